"""Loads into tied destinations: they hold what is stored for each of them, or nothing is loaded."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.checkpoint.states import same_bits, save
from torch_strata import CheckpointManager, StrataLoadPlanner, StrataReader
from torch_strata.errors import LayoutMismatchError

PLANNERS = {"DCP's planner": lambda **_: None, "ours": StrataLoadPlanner}
TORN = torch.tensor([float("nan"), -0.0, 2.0])


def stock_save(state, path):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def load_tied(path, tied, planner, others=(), **reading):
    state = {"a": tied, "b": tied, **dict(others)}
    reader = StrataReader(path, **reading)
    dcp.load(state, storage_reader=reader, planner=PLANNERS[planner](**reading), no_dist=True)
    return reader.stats


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("write", [save, stock_save])
def test_two_tensors_that_differ_are_not_loaded_into_one_memory(tmp_path, write, planner):
    write({"a": torch.ones(300, 400), "b": torch.ones(300, 400) + torch.eye(300, 400), "c": torch.ones(2)}, tmp_path)
    tied, other = torch.full((300, 400), 7.0), torch.full((2,), 7.0)
    with pytest.raises(CheckpointException) as caught:
        load_tied(tmp_path, tied, planner, {"c": other})
    (cause, _) = caught.value.failures[0]
    assert isinstance(cause, LayoutMismatchError) and "'a' and 'b'" in str(cause)
    assert tied.eq(7).all() and other.eq(7).all()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("write", [save, stock_save])
def test_equal_tensors_that_were_stored_apart_are_loaded_into_one_memory(tmp_path, write, planner):
    write({"a": TORN.clone(), "b": TORN.clone(), "c": torch.ones(2)}, tmp_path)
    tied, other = torch.zeros(3), torch.zeros(2)
    load_tied(tmp_path, tied, planner, {"c": other})
    assert same_bits(tied, TORN) and other.eq(1).all()


@pytest.mark.parametrize("planner", PLANNERS)
def test_of_equal_tensors_of_ours_only_one_is_read(tmp_path, planner):
    value = torch.randn(1000, 1000)
    save({"a": value, "b": value.clone()}, tmp_path)
    tied = torch.zeros(1000, 1000)
    stats = load_tied(tmp_path, tied, planner)
    assert same_bits(tied, value) and stats.bytes_read < 1.1 * value.nbytes


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_is_converted_is_compared_as_it_would_arrive(tmp_path, planner):
    save({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, tmp_path)
    tied = torch.zeros(2, dtype=torch.float64)
    load_tied(tmp_path, tied, planner, allow_dtype_cast=True)
    assert tied.tolist() == [1.0, 2.0]


def test_equal_bytes_of_another_order_are_not_the_same_tensor(tmp_path):
    value = torch.arange(6.0)
    save({"a": value.view(2, 3).clone(), "b": value.view(3, 2).clone().t()}, tmp_path)
    for planner in PLANNERS:
        with pytest.raises(CheckpointException) as caught:
            load_tied(tmp_path, torch.zeros(2, 3), planner)
        assert isinstance(caught.value.failures[0][0], LayoutMismatchError)


def test_a_manager_says_which_keys_are_tied_and_differ(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save({"head": torch.ones(4), "embedding": torch.zeros(4)}, step=1).result()
    tied = torch.full((4,), 7.0)
    with pytest.raises(LayoutMismatchError, match="'embedding' and 'head'"):
        manager.load(1, {"head": tied, "embedding": tied})
    assert tied.eq(7).all()
    manager.load(1, {"head": tied})
    assert tied.eq(1).all()
