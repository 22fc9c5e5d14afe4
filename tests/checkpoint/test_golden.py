"""A checkpoint of format version 1 as it was written then: every later version reads it."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties

from tests.checkpoint.states import same_bits
from tests.golden.state import golden_state
from torch_strata import StrataReader, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def emptied(value):
    """The same state with other values."""
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape).to(value.dtype)
    return [None] * len(value) if isinstance(value, list) else None


def assert_golden(reader):
    expected = golden_state()
    found = emptied(expected)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["step"] == expected["step"] and found["config"] == expected["config"]
    for key in ("transposed", "fp8", "scalar", "empty", "large"):
        assert same_bits(found[key], expected[key]), key
    for key, value in expected["model"].items():
        assert same_bits(found["model"][key], value), key


def test_version_1_is_read():
    assert_golden(StrataReader(GOLDEN))


@pytest.mark.skipif(not hasattr(TensorProperties(), "strides"), reason="its .metadata is of torch 2.15")
def test_version_1_is_read_by_stock():
    assert_golden(FileSystemReader(GOLDEN))


def test_version_1_is_sound():
    report = verify(GOLDEN)
    assert report.is_sound and report.unverified_bytes == 0 and not report.warnings


def test_version_1_is_read_by_its_manifest_alone(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    assert_golden(StrataReader(tmp_path / "c"))
