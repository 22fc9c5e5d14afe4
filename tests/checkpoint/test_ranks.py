"""Several ranks: who commits, who learns of a failure, and what a save without collectives leaves."""

import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import load, save
from torch_strata import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    LayoutMismatchError,
    StorageError,
    StrataError,
    StrataLoadPlanner,
    StrataReader,
    StrataWriter,
)


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {
        f"own{rank}": torch.full((3000,), float(value + rank)),
        "shared": torch.full((10,), float(value)),
        "step": int(value),
    }


def failures(call: Any) -> dict[int, tuple[str, str, float]]:
    """Class and message of each failing rank, and the seconds until this rank knew."""
    started = time.monotonic()
    try:
        call()
    except CheckpointException as error:
        took = time.monotonic() - started
        return {rank: (type(cause).__name__, str(cause), took) for rank, (cause, _) in error.failures.items()}
    return {}


def save_and_load(rank: int, place: str) -> Any:
    writer = StrataWriter(place)
    metadata = dcp.save(state_of(rank, 1), storage_writer=writer)
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(place))
    return out["step"], out[f"own{rank}"].unique().tolist(), metadata.storage_data, writer.stats.committed


def test_every_rank_writes_and_the_planning_rank_commits(tmp_path):
    results = run_ranks(tmp_path, 3, save_and_load, str(tmp_path / "c"))
    assert [result[:2] for result in results] == [(1, [1.0]), (1, [2.0]), (1, [3.0])]
    assert [result[2] for result in results] == [None] * 3, "the index is not broadcast"
    assert [result[3] for result in results] == [True, False, False]
    out = {f"own{rank}": torch.zeros(3000) for rank in range(3)}
    dcp.load(out, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert [out[f"own{rank}"][0].item() for rank in range(3)] == [1, 2, 3]


def test_fewer_ranks_later_leave_nothing_of_the_earlier_ones(tmp_path):
    run_ranks(tmp_path, 3, save_and_load, str(tmp_path / "c"))
    save(state_of(0, 5), tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 1
    with pytest.raises(CheckpointException):
        load({"own1": torch.zeros(3000)}, tmp_path / "c")


def save_with_one_bad_rank(rank: int, place: str, bad: str) -> Any:
    dcp.save(state_of(rank, 1), storage_writer=StrataWriter(place))
    found = failures(lambda: dcp.save(state_of(rank, 2), storage_writer=StrataWriter(bad if rank == 1 else place)))
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(place))
    return found, out["step"], out["shared"].unique().tolist()


def test_all_ranks_learn_soon_that_one_could_not_write_and_the_old_checkpoint_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for found, step, shared in run_ranks(
        tmp_path, 2, save_with_one_bad_rank, str(tmp_path / "c"), str(tmp_path / "file/x")
    ):
        assert list(found) == [1]
        name, message, seconds = found[1]
        assert issubclass(getattr(__import__("torch_strata"), name), StorageError) and str(tmp_path / "file") in message
        assert seconds < 20
        assert (step, shared) == (1, [1.0])


class Unpicklable(Exception):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__("odd")
        self.file = open(os.devnull)  # noqa: SIM115


class Odd:
    def __reduce__(self) -> Any:
        raise Unpicklable(1, 2)


def save_with_a_value_that_raises(rank: int, place: str) -> Any:
    state = {**state_of(rank, 2), f"bad{rank}": Odd() if rank == 1 else 0}
    return failures(lambda: dcp.save(state, storage_writer=StrataWriter(place)))


def test_an_error_that_cannot_travel_becomes_one_that_can(tmp_path):
    for found in run_ranks(tmp_path, 2, save_with_a_value_that_raises, str(tmp_path / "c")):
        assert found[1][0] == CheckpointError.__name__ and "'bad1'" in found[1][1]


def save_to_unshared_disks(rank: int, place: str) -> Any:
    return failures(lambda: dcp.save(state_of(rank, 1), storage_writer=StrataWriter(f"{place}{rank}")))


def test_a_place_that_ranks_do_not_share_is_noticed_before_the_commit(tmp_path):
    for found in run_ranks(tmp_path, 2, save_to_unshared_disks, str(tmp_path / "disk")):
        assert list(found) == [0]
        assert "share" in found[0][1] and "__1_" in found[0][1]
    assert not list(tmp_path.rglob(".metadata"))


def load_with_a_wrong_rank(rank: int, place: str, strict: bool) -> Any:
    template = {"shared": torch.zeros(10, dtype=torch.float64 if rank == 1 else torch.float32)}
    planner = StrataLoadPlanner() if strict else None
    found = failures(lambda: dcp.load(template, storage_reader=StrataReader(place), planner=planner))
    return found, template["shared"].unique().tolist()


@pytest.mark.parametrize("strict", [True, False])
def test_all_ranks_learn_that_one_cannot_load(tmp_path, strict):
    save(state_of(0, 1), tmp_path / "c")
    results = run_ranks(tmp_path, 2, load_with_a_wrong_rank, str(tmp_path / "c"), strict)
    for found, _ in results:
        assert list(found) == [1] and found[1][0] == LayoutMismatchError.__name__, found
    assert results[1][1] == [0.0]
    if strict:  # refused while planning: the other rank has not read either
        assert results[0][1] == [0.0]


def load_from_nowhere(rank: int, place: str) -> Any:
    return failures(lambda: dcp.load(state_of(rank, 0), storage_reader=StrataReader(place)))


def test_a_missing_checkpoint_has_its_class_on_every_rank(tmp_path):
    for found in run_ranks(tmp_path, 2, load_from_nowhere, str(tmp_path / "nowhere")):
        assert {name for name, _, _ in found.values()} == {CheckpointNotFoundError.__name__}


def save_alone(rank: int, place: str, value: float) -> Any:
    dcp.save(state_of(rank, value), storage_writer=StrataWriter(place), use_collectives=False)


def load_alone(rank: int, place: str) -> Any:
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(place))
    return out["step"], out[f"own{rank}"].unique().tolist(), out["shared"].unique().tolist()


def load_alone_with_stock(rank: int, place: str) -> Any:
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=FileSystemReader(place))
    return out["step"], out[f"own{rank}"].unique().tolist(), out["shared"].unique().tolist()


@pytest.mark.parametrize("reader", [load_alone, load_alone_with_stock])
def test_ranks_that_save_on_their_own_load_on_their_own(tmp_path, reader):
    place = str(tmp_path / "c")
    for value in (1.0, 4.0):
        run_ranks(tmp_path, 2, save_alone, place, value)
        assert run_ranks(tmp_path, 2, reader, place) == [(value, [value + rank], [value]) for rank in range(2)]
    assert {"__0.metadata", "__1.metadata"} <= set(os.listdir(place))


def load_alone_failing(rank: int, place: str) -> Any:
    return failures(lambda: load_alone(rank, place))


def test_ranks_on_their_own_are_only_a_checkpoint_together(tmp_path):
    place = tmp_path / "c"
    run_ranks(tmp_path, 2, save_alone, str(place), 1.0)
    for path in [
        *place.glob("__1*metadata"),
        *(p for p in (place / ".strata").rglob("*") if p.is_file() and ".1" in p.name),
    ]:
        path.unlink()
    for found in run_ranks(tmp_path, 2, load_alone_failing, str(place)):
        assert found and all(name == CheckpointNotFoundError.__name__ for name, _, _ in found.values())


def load_shard_alone(rank: int, place: str, reader: type) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = {"t": distribute_tensor(torch.zeros(12), mesh, [Shard(0)])}
    failed = refusal(lambda: dcp.load(out, storage_reader=reader(place)))
    return failed, out["t"].to_local().tolist()


def refusal(call: Any) -> str:
    """What the error of a rank on its own says, which DCP gathers from no other rank."""
    try:
        call()
    except (CheckpointException, StrataError) as error:
        return str(error)
    return ""


def save_shard_alone(rank: int, place: str, writer: type) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"t": distribute_tensor(torch.ones(12), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=writer(place), use_collectives=False)


@pytest.mark.parametrize("writer", [StrataWriter, FileSystemWriter])
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (3, 2), (2, 3)])
def test_parts_of_other_ranks_are_never_left_unfilled(tmp_path, saving, loading, writer):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, saving, save_shard_alone, place, writer)
    for failed, values in run_ranks(tmp_path, loading, load_shard_alone, place, StrataReader):
        assert failed
        assert values == [0.0] * (12 // loading)
    assert all(not failed for failed, _ in run_ranks(tmp_path, saving, load_shard_alone, place, StrataReader))


def save_alone_failing(rank: int, place: str, value: float) -> Any:
    return refusal(lambda: save_alone(rank, place, value))


def test_ranks_on_their_own_do_not_save_over_another_number_of_them(tmp_path):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, 2, save_alone, place, 1.0)
    for world in (1, 3):
        for found in run_ranks(tmp_path, world, save_alone_failing, place, 2.0):
            assert "2 ranks saved here on their own" in found
    assert run_ranks(tmp_path, 2, load_alone, place) == [(1.0, [1.0 + rank], [1.0]) for rank in range(2)]
    run_ranks(tmp_path, 1, save_together, place, 5.0)
    run_ranks(tmp_path, 3, save_alone, place, 6.0)  # over a save with collectives any number may


def save_together(rank: int, place: str, value: float) -> None:
    dcp.save(state_of(rank, value), storage_writer=StrataWriter(place))


def save_and_damage(rank: int, place: str) -> Any:
    dcp.save(state_of(rank, 1), storage_writer=StrataWriter(place))
    dist.barrier()
    if rank == 0:
        path = next(Path(place).glob("__1_*.distcp"))
        content = bytearray(path.read_bytes())
        at = content.index(torch.full((3000,), 2.0).numpy().tobytes())
        content[at + 2000] ^= 1
        path.write_bytes(content)
    dist.barrier()
    return failures(lambda: dcp.load(state_of(rank, 0), storage_reader=StrataReader(place)))


def test_all_ranks_learn_that_an_object_of_one_is_damaged(tmp_path):
    for found in run_ranks(tmp_path, 2, save_and_damage, str(tmp_path / "c")):
        assert list(found) == [1]
        assert issubclass(getattr(__import__("torch_strata"), found[1][0]), CorruptionError)


def save_in_a_group_of_two(rank: int, place: str) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[0 if rank == 0 else 1]
    mine = f"{place}{0 if rank == 0 else 1}"
    dcp.save(state_of(rank, 1), storage_writer=StrataWriter(mine), process_group=group)
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(mine), process_group=group)
    return out[f"own{rank}"].unique().tolist()


def test_a_group_other_than_the_default_saves_for_itself(tmp_path):
    assert run_ranks(tmp_path, 3, save_in_a_group_of_two, str(tmp_path / "c")) == [[1.0], [2.0], [3.0]]


def save_with_cached_plans(rank: int, place: str) -> Any:
    steps = []
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state_of(rank, value), storage_writer=StrataWriter(place), planner=planner)
        out = state_of(rank, 0)
        dcp.load(out, storage_reader=StrataReader(place))
        steps.append((out["step"], out[f"own{rank}"].unique().tolist()))
    return steps


def test_cached_plans_save_the_present_state_of_every_rank(tmp_path):
    results = run_ranks(tmp_path, 2, save_with_cached_plans, str(tmp_path / "c"))
    assert results == [[(v, [v + rank]) for v in (1.0, 2.0, 3.0)] for rank in range(2)]
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2


def save_asynchronously(rank: int, place: str) -> Any:
    state = state_of(rank, 1)
    future = dcp.async_save(state, storage_writer=StrataWriter(place))
    state["shared"].zero_()
    state[f"own{rank}"].zero_()
    future.result(60)
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(place))
    return out["shared"].unique().tolist(), out[f"own{rank}"].unique().tolist()


def test_an_asynchronous_save_of_several_ranks_holds_the_state_of_its_call(tmp_path):
    assert run_ranks(tmp_path, 2, save_asynchronously, str(tmp_path / "c")) == [([1.0], [1.0]), ([1.0], [2.0])]


def save_in_another_process(rank: int, place: str) -> Any:
    from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    future = dcp.async_save(
        state_of(rank, 1), storage_writer=StrataWriter(place), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    future.result(80)
    _ProcessBasedAsyncCheckpointExecutor._checkpoint_process = None
    out = state_of(rank, 0)
    dcp.load(out, storage_reader=StrataReader(place))
    return out["step"]


def test_the_process_executor_saves_with_a_writer_that_was_pickled(tmp_path):
    assert run_ranks(tmp_path, 1, save_in_another_process, str(tmp_path / "c")) == [1]


def test_a_writer_and_a_reader_are_pickled_without_what_is_open(tmp_path):
    writer, reader = StrataWriter(tmp_path / "c"), StrataReader(tmp_path / "c", verify="before")
    dcp.save(state_of(0, 1), storage_writer=writer, no_dist=True)
    dcp.load(state_of(0, 0), storage_reader=reader, no_dist=True)
    shutil.rmtree(tmp_path / "c")
    copied_writer, copied_reader = pickle.loads(pickle.dumps((writer, reader)))
    dcp.save(state_of(0, 2), storage_writer=copied_writer, no_dist=True)
    out = state_of(0, 0)
    dcp.load(out, storage_reader=copied_reader, no_dist=True)
    assert out["step"] == 2
