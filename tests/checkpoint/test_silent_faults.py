"""Faults that once gave wrong values, or a clean report, without a word."""

import pathlib
import pickle
from collections import UserDict
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointError, ConfigError, CorruptionError, StrataReader, StrataWriter, verify
from torch_strata.checkpoint.staging import snapshot


def test_a_stock_tensor_whose_elements_overlap_is_read_as_stock_reads_it(tmp_path):
    overlapping = torch.arange(3 << 10).as_strided((1 << 10, 3), (1, 2))
    dcp.save({"w": overlapping}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    out = {"w": torch.zeros(1 << 10, 3, dtype=torch.int64)}
    load(out, tmp_path / "c")
    assert torch.equal(out["w"], overlapping)


@pytest.mark.parametrize("large", [False, True])
def test_destinations_that_share_memory_hold_one_of_the_stored_values_and_load(tmp_path, large):
    n = 3 << 20 if large else 3000
    save({"w": torch.full((n,), 1.0), "v": torch.full((n - 7,), 2.0)}, tmp_path / "c")
    memory = torch.zeros(n)
    load({"w": memory, "v": memory[3 : n - 4]}, tmp_path / "c")
    assert memory[:3].eq(1).all() and memory[n - 4 :].eq(1).all()
    assert memory[3 : n - 4].unique().numel() <= 2 and memory[3 : n - 4].ge(1).all()


def test_a_sparse_tensor_is_refused_for_it_could_not_be_loaded(tmp_path):
    error = failure_of(lambda: save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, tmp_path / "c"))
    assert isinstance(error, CheckpointError) and "'s'" in str(error) and "sparse" in str(error)


class Wrapper(UserDict):
    """A mapping whose shallow copy shares its items."""

    def __copy__(self):
        copied = Wrapper()
        copied.data = self.data
        return copied


def test_staging_leaves_mappings_of_other_kinds_alone():
    weight = torch.ones(2)
    state = {"m": Wrapper(w=weight)}
    staged = snapshot(state)
    assert state["m"]["w"] is weight
    weight.fill_(5)
    assert staged["m"]["w"].eq(1).all()


@pytest.mark.parametrize("place", ["s3:/bucket/x", pathlib.Path("s3://bucket/run"), "file:/tmp/q", "gs:x"])
def test_a_url_that_lost_a_slash_is_not_taken_for_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (StrataWriter, StrataReader):
        with pytest.raises(ConfigError, match="as str"):
            make(place)
    assert not list(tmp_path.iterdir())


def test_ranks_that_opened_different_states_do_not_load(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "c")
    reader = StrataReader(tmp_path / "c")
    plans = []
    for _ in range(2):
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
        save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="committed meanwhile"):
        reader.prepare_global_plan(plans)
    assert [plan.storage_data for plan in reader.prepare_global_plan(plans[:1] * 2)] == [2, 2]


def test_a_damaged_frame_of_an_empty_tensor_is_found(tmp_path):
    save({"empty": torch.zeros(0, 4)}, tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[10] ^= 0xFF
    data.write_bytes(content)
    assert not verify(tmp_path / "c").is_sound


def test_a_length_that_no_file_has_is_an_error_and_not_an_allocation(tmp_path):
    dcp.save({"v": {"a": 1}, "n": 3}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    path = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {key: replace(info, length=1 << 60) for key, info in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: load({"v": {"a": 0}, "n": 0}, tmp_path / "c"))
    assert isinstance(error, CorruptionError) and "expected at least" in str(error)
    assert not verify(tmp_path / "c").is_sound
