import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = (1, 511, 65_536, 65_537, 3 << 20, (17 << 20) + 5)


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_raw")


def test_every_way_of_reading_returns_what_every_way_of_writing_wrote(raw, tmp_path):
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    expected = [tensor.clone() for tensor in tensors]
    files = raw.RawFiles([tensor.numpy().data for tensor in tensors])
    for write_way in raw.WRITE_WAYS:
        for read_way in raw.COLD_READ_WAYS:
            files.save(tmp_path / "raw", write_way)
            for tensor in tensors:
                tensor.zero_()
            files.load(tmp_path / "raw", read_way)
            assert all(map(torch.equal, tensors, expected)), f"{write_way}, then {read_way}"
