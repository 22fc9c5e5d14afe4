"""What is empty in a fresh job and has entries in the checkpoint comes back, or the load says why not."""

from collections import OrderedDict, defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import assert_same, failure_of, load, save
from torch_strata import (
    CheckpointError,
    CorruptionError,
    LayoutMismatchError,
    StrataLoadPlanner,
    StrataReader,
    StrataWriter,
)
from torch_strata.checkpoint._paths import nested
from torch_strata.checkpoint._stored_lists import ListNames
from torch_strata.checkpoint.manager import CheckpointManager

PLANNERS = [DefaultLoadPlanner, StrataLoadPlanner]
EMA = torch.arange(3000.0)


def grown() -> dict[str, Any]:
    return {
        "w": torch.ones(2),
        "history": [{"loss": 1.5, "tags": ["a", "b"]}, {"loss": 1.25, "tags": []}],
        "meters": {"acc": 0.5, "ema": EMA, "by_task": {"qa": {"em": torch.tensor(3)}, "none": None}},
        "deep": {"steps": [{"norms": [torch.full((4,), 7.0), torch.zeros(0)]}]},
        "empty": [],
        "nothing": {},
        "plain": [1, 2, 3],
    }


def fresh() -> dict[str, Any]:
    empty = {"history": [], "meters": {}, "deep": {"steps": []}, "empty": [], "nothing": {}, "plain": []}
    return {"w": torch.zeros(2), **empty}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("by_stock", [False, True])
def test_what_has_grown_comes_back(tmp_path, planner, by_stock):
    writer = FileSystemWriter(tmp_path / "c") if by_stock else StrataWriter(tmp_path / "c")
    dcp.save(grown(), storage_writer=writer, no_dist=True)
    state = fresh()
    load(state, tmp_path / "c", planner=planner())
    assert_same(state, grown())


@pytest.mark.parametrize("planner", PLANNERS)
def test_dicts_are_filled_in_place_whatever_their_class(tmp_path, planner):
    save({"a": {"x": 1}, "b": {"y": {"z": torch.ones(2)}}, "c": {"v": 2}}, tmp_path / "c")
    held = {"a": {}, "b": OrderedDict(), "c": defaultdict(int)}
    state = dict(held)
    load(state, tmp_path / "c", planner=planner())
    assert all(state[key] is value for key, value in held.items())
    assert (held["a"], held["c"]) == ({"x": 1}, {"v": 2})
    assert torch.equal(held["b"]["y"]["z"], torch.ones(2))


def test_our_planner_fills_the_list_itself(tmp_path):
    save({"history": [{"loss": 1}], "in": {"more": [[{"a": 1}], {"b": 2}]}}, tmp_path / "c")
    history, first = [], []
    state = {"history": history, "in": {"more": [first, {"b": 0}]}}
    load(state, tmp_path / "c", planner=StrataLoadPlanner())
    assert (history, first) == ([{"loss": 1}], [{"a": 1}])
    assert state["history"] is history and state["in"]["more"] == [[{"a": 1}], {"b": 2}]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_place_of_a_list_that_held_an_empty_dict_holds_one_again(tmp_path, planner):
    save({"history": [{}, {"loss": 1.0}, {}, {"loss": None}]}, tmp_path / "c")
    state = {"history": []}
    load(state, tmp_path / "c", planner=planner())
    assert state["history"] == [{}, {"loss": 1.0}, {}, {"loss": None}]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("other", [5, "text", [1, 2], [{"loss": 0.0, "more": 1}], torch.zeros(2), None, ()])
def test_only_an_empty_list_is_filled(tmp_path, planner, other):
    save({"w": torch.ones(2), "history": [{"loss": 1.5}]}, tmp_path / "c")
    state = {"w": torch.zeros(2), "history": other}
    failure = failure_of(lambda: load(state, tmp_path / "c", planner=planner()))
    assert "Missing key in checkpoint state_dict: history" in str(failure)
    assert torch.equal(state["w"], torch.zeros(2)), "nothing has been changed"
    assert_same(state["history"], other)


@pytest.mark.parametrize("planner", PLANNERS)
def test_other_values_under_the_name_of_a_list_are_left_alone_by_a_partial_load(tmp_path, planner):
    save({"w": torch.ones(2), "history": [{"loss": 1.5}], "more": [{"loss": 2.5}]}, tmp_path / "c")
    state = {"w": torch.zeros(2), "history": 5, "more": [], "nowhere": []}
    load(state, tmp_path / "c", planner=planner(allow_partial_load=True))
    assert torch.equal(state.pop("w"), torch.ones(2))
    assert state == {"history": 5, "more": [{"loss": 2.5}], "nowhere": []}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_list_that_is_nowhere_is_missing_and_a_dict_of_other_keys_stays_as_it_is(tmp_path, planner):
    save({"meters": {"acc": 0.5, "loss": 1.0}}, tmp_path / "c")
    failure = failure_of(lambda: load({"history": []}, tmp_path / "c", planner=planner()))
    assert "Missing key in checkpoint state_dict: history" in str(failure)
    state = {"meters": {"acc": 0.0}, "nowhere": {}}
    load(state, tmp_path / "c", planner=planner())
    assert state == {"meters": {"acc": 0.5}, "nowhere": {}}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_list_does_not_become_a_dict_nor_a_dict_a_list(tmp_path, planner):
    save({"list": [{"a": 1}], "dict": {"a": 1}}, tmp_path / "c")
    failure = failure_of(lambda: load({"list": {}}, tmp_path / "c", planner=planner()))
    assert isinstance(failure, LayoutMismatchError) and "'list' is stored as a list" in str(failure)
    failure = failure_of(lambda: load({"dict": []}, tmp_path / "c", planner=planner()))
    assert "Missing key in checkpoint state_dict: dict" in str(failure)


@pytest.mark.parametrize("planner", PLANNERS)
def test_an_optimizer_that_has_not_stepped_goes_on_as_the_one_that_was_saved(tmp_path, planner):
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    model, optimizer = made()
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    again, its_optimizer = made()
    load({"model": again, "optimizer": its_optimizer}, tmp_path / "c", planner=planner())
    assert step(again, its_optimizer) == step(model, optimizer)
    assert_same(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("verify", ["inplace", "before"])
def test_a_damaged_entry_is_an_error_and_what_was_empty_stays_so(tmp_path, planner, verify):
    save(grown(), tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(EMA[5:50].numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)
    state = fresh()
    failure = failure_of(lambda: load(state, tmp_path / "c", planner=planner(), verify=verify))
    assert isinstance(failure, CorruptionError)
    assert (state["meters"], state["history"]) == ({}, [])


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("of", [[], {}])
def test_an_entry_of_a_class_that_is_not_trusted_is_refused(tmp_path, planner, of):
    save({"w": torch.ones(2), "points": [{"at": Point(3)}] if of == [] else {"at": Point(3)}}, tmp_path / "c")
    state = {"w": torch.zeros(2), "points": of.copy()}
    failure = failure_of(lambda: load(state, tmp_path / "c", planner=planner()))
    assert isinstance(failure, CheckpointError) and "Point" in str(failure) and "trusted_classes" in str(failure)
    assert torch.equal(state["w"], torch.zeros(2)) and state["points"] == of
    load(state, tmp_path / "c", planner=planner(), trusted_classes=[Point])
    assert state["points"] == ([{"at": Point(3)}] if of == [] else {"at": Point(3)})


def test_a_planner_that_decides_itself_is_not_given_what_it_did_not_plan(tmp_path):
    save({"meters": {"acc": 0.5}, "history": [{"loss": 1}]}, tmp_path / "c")

    class OnlyMeters(DefaultLoadPlanner):
        def create_local_plan(self):
            return super().create_local_plan()

    state: dict[str, Any] = {"meters": {}}
    load(state, tmp_path / "c", planner=OnlyMeters())
    assert state == {"meters": {}}
    failure = failure_of(lambda: load({"history": []}, tmp_path / "c", planner=OnlyMeters()))
    assert "Missing key in checkpoint state_dict: history" in str(failure)


def test_the_names_of_lists_are_found_and_not_listed(tmp_path):
    save(grown(), tmp_path / "c")
    dcp.save(grown(), storage_writer=FileSystemWriter(tmp_path / "stock"), no_dist=True)
    expected = set(FileSystemReader(tmp_path / "stock").read_metadata().state_dict_metadata)
    for place in ("c", "stock"):
        stored = StrataReader(tmp_path / place).read_metadata().state_dict_metadata
        assert set(stored) == expected and len(stored) == len(expected)
        assert "history" in stored and "history" not in list(stored.keys())
        assert "meters" not in stored and "nothing" not in stored
        with pytest.raises(KeyError):
            stored["meters"]


def sharded_entries(rank: int, place: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shard = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    state = {"history": [{"norm": shard, "loss": 0.5}], "own": {f"rank{rank}": {"seen": [rank, rank + 1]}}}
    dcp.save(state, storage_writer=StrataWriter(place))


def load_entries(rank: int, place: str, planner: type, together: bool) -> Any:
    state: dict[str, Any] = {"history": [], "own": {}}
    reader = StrataReader(place, process_group=dist.group.WORLD if together else None)
    dcp.load(state, storage_reader=reader, planner=planner())
    return state["history"][0]["norm"].tolist(), state["history"][0]["loss"], state["own"], reader.stats.bytes_read


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(("world", "together"), [(2, False), (3, True)])
def test_every_rank_gets_all_entries_and_shards_whole(tmp_path, planner, world, together):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, 2, sharded_entries, place)
    results = run_ranks(tmp_path, world, load_entries, place, planner, together)
    own = {"rank0": {"seen": [0, 1]}, "rank1": {"seen": [1, 2]}}
    assert [result[:3] for result in results] == [([float(i) for i in range(10)], 0.5, own)] * world


def load_into_different_kinds(rank: int, place: str, planner: type, together: bool) -> str:
    state = {"history": [] if rank == 0 else 5, "own": {}}
    reader = StrataReader(place, process_group=dist.group.WORLD if together else None)
    return str(failure_of(lambda: dcp.load(state, storage_reader=reader, planner=planner())))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("together", [False, True])
def test_all_ranks_learn_that_one_cannot_take_the_entries(tmp_path, planner, together):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, 2, sharded_entries, place)
    for message in run_ranks(tmp_path, 2, load_into_different_kinds, place, planner, together):
        assert "Missing key in checkpoint state_dict: history" in message


@pytest.mark.parametrize("template", [fresh, lambda: None])
def test_a_manager_brings_back_what_has_grown(tmp_path, template):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(grown(), step=1).result(timedelta(seconds=60))
        state = template()
        found = manager.load(1, state)
    assert state is None or found is state
    assert_same(found, grown())


def test_a_manager_gives_an_optimizer_its_numbers(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": {"w": parameter.detach()}, "optimizer": optimizer.state_dict()}, step=1).result()
        again = torch.optim.AdamW([parameter])
        again.load_state_dict(manager.load(1)["optimizer"])
        assert_same(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "paths",
    [
        [("a", 0), ("a", "x")],
        [("a", -1)],
        [("a", 1 << 40)],
        [("a", 0), ("a", 0, "x")],
        [("a", 0), ("a", 0)],
        [("a", *([0] * 100_000))],
    ],
)
def test_paths_of_no_state_are_refused(paths):
    with pytest.raises(CorruptionError, match="planner_data"):
        nested((path[1:], None) for path in paths)


def test_planner_data_of_another_kind_names_no_lists():
    for data in (None, [], {"a.0": None}, {1: ("a", 0)}, {"a": ("a",)}, {"a.0": ("a", "0")}, {"a.0": ("a.0",)}):
        assert "a" not in ListNames(data)
    names = ListNames({"a.0.b.1": ("a", 0, "b", 1), "a.c.0": ("a.c", 0), "a.c.x": ("a", "c", "x")})
    found = ["a", "a.0", "a.0.b", "a.0.b.1", "a.c", "a.c.0", "b", "", 0]
    assert [name for name in found if name in names] == ["a", "a.0.b", "a.c"]


def test_a_list_that_was_saved_as_one_value_is_loaded_as_one(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    save({"history": [{"loss": 1.0}]}, tmp_path / "c", planner=planner)
    state: dict[str, Any] = {"history": []}
    load(state, tmp_path / "c")
    assert state == {"history": [{"loss": 1.0}]}
