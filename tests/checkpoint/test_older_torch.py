"""Checkpoints of older torch load too: their metadata names classes where DCP used to keep them."""

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as older
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tests.checkpoint.states import save
from torch_strata import StrataReader, verify


@pytest.fixture
def saved_by_older_torch(tmp_path):
    """A directory that stock wrote with the tensor properties of torch 2.1, and what it holds."""
    state = {"w": torch.arange(12.0).reshape(3, 4), "h": torch.ones(5, dtype=torch.bfloat16), "step": 7}
    with mock.patch("torch.distributed.checkpoint.metadata.TensorProperties", older.TensorProperties):
        dcp.save(dict(state), storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    assert older.TensorProperties.__module__.encode() in (tmp_path / "c" / ".metadata").read_bytes()
    return tmp_path / "c", state


def empty() -> dict:
    return {"w": torch.zeros(3, 4), "h": torch.zeros(5, dtype=torch.bfloat16), "step": 0}


def assert_equal(found: dict, expected: dict) -> None:
    assert found["step"] == expected["step"]
    assert all(torch.equal(found[name], expected[name]) for name in ("w", "h"))


def test_a_checkpoint_of_older_torch_is_loaded(saved_by_older_torch):
    place, state = saved_by_older_torch
    out = empty()
    dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
    assert_equal(out, state)


def test_a_state_of_five_fields_has_no_strides(saved_by_older_torch):
    place, state = saved_by_older_torch
    path = place / ".metadata"
    getstate = older.TensorProperties.__getstate__
    with mock.patch.object(older.TensorProperties, "__getstate__", lambda self: getstate(self)[:5]):
        path.write_bytes(pickle.dumps(FileSystemReader(place).read_metadata()))
    out = empty()
    dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
    assert_equal(out, state)
    properties = StrataReader(place).read_metadata().state_dict_metadata["w"].properties
    assert getattr(properties, "strides", None) is None


def test_our_save_replaces_a_checkpoint_of_older_torch(saved_by_older_torch):
    place, _ = saved_by_older_torch
    newer = {"w": torch.full((3, 4), 2.0), "h": torch.zeros(5, dtype=torch.bfloat16), "step": 8}
    save(newer, place)
    for reader in (StrataReader, FileSystemReader):
        out = empty()
        dcp.load(out, storage_reader=reader(place), no_dist=True)
        assert_equal(out, newer)


def test_verify_reads_a_checkpoint_of_older_torch(saved_by_older_torch):
    place, _ = saved_by_older_torch
    assert verify(place).is_sound
