"""The `.metadata` that the Rust core writes, unpickled by pickle itself, against what DCP's own classes say."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_strata import StrataSavePlanner, StrataWriter

STATES = {
    "nothing": {},
    "one": {"w": torch.ones(3)},
    "kinds": {
        "model": {"w": torch.ones(2, 3).t(), "scalar": torch.tensor(1.5), "none": torch.empty(0, 4)},
        "long": {"x" * 300: torch.ones(1), "\u00fc\u4e2d": torch.ones(1, dtype=torch.bfloat16)},
        "optim": {"step": 3, "groups": [{"lr": 0.1, "t": torch.arange(5)}]},
        "last": torch.nn.Parameter(torch.ones(2, 2).to(memory_format=torch.contiguous_format)),
        "deep": torch.ones(1, 2, 1, 2, 1, 300),
    },
    "many": {f"t.{i:05d}": torch.full((2,), float(i)) for i in range(3000)},
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, StrataSavePlanner])
def test_pickle_reads_what_stock_would_have_written(tmp_path, planner, name):
    state = STATES[name]
    place = tmp_path / "ours"
    dcp.save(state, storage_writer=StrataWriter(place), planner=planner(), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    found = pickle.loads((place / ".metadata").read_bytes())
    expected = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert found.planner_data == expected.planner_data
    assert found.version == expected.version
    assert type(found) is type(expected)
    assert found.storage_data.keys() == expected.storage_data.keys()
    for index, info in found.storage_data.items():
        assert type(index) is MetadataIndex
        stored = (place / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        if index.offset is not None:  # a tensor's frame begins as torch.save's does
            assert stored[:4] == b"PK\x03\x04"
