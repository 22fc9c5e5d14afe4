"""Staged states across fork and spawn: handed over without a copy, and never taken from under another process."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import load
from torch_strata import CheckpointError, StrataWriter
from torch_strata.checkpoint import _arena
from torch_strata.checkpoint.staging import arena_stats, forget_process, snapshot

MIB = 1 << 20
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _new_arena(monkeypatch):
    monkeypatch.setattr(_arena, "_arenas", {})


def look(connection: Any) -> None:
    """Answers with what the state holds, then again with what it holds after the sender has changed its own."""
    state = connection.recv()
    shard = state["shard"]
    connection.send(
        (
            state["n"]["w"].unique().tolist(),
            state["n"]["w"] is state["tied"],
            tuple(state["t"].stride()),
            (shard.global_shape, shard.global_offsets),
            state["list"],
            state["n"]["w"].untyped_storage().nbytes(),
        )
    )
    connection.recv()
    connection.send(state["n"]["w"].unique().tolist())


def test_a_spawned_process_sees_the_very_same_memory():
    weights, shard = torch.full((MIB,), 1.0), torch.ones(3, 2)
    shard.global_shape, shard.global_offsets = torch.Size((6, 2)), (3, 0)
    staged = snapshot(
        {"n": {"w": weights}, "tied": weights, "t": torch.ones(3, 5).t(), "shard": shard, "list": [1, "a"]}
    )
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=look, args=(theirs,))
    process.start()
    try:
        ours.send(staged)
        assert ours.poll(60)
        assert ours.recv() == ([1.0], True, (1, 5), (torch.Size((6, 2)), (3, 0)), [1, "a"], weights.nbytes)
        staged["n"]["w"].fill_(2.0)
        ours.send("changed")
        assert ours.poll(60) and ours.recv() == [2.0]
    finally:
        process.kill()
        process.join(30)


def test_a_forked_child_stages_in_memory_of_its_own():
    staged = snapshot({"w": torch.full((MIB,), 1.0)})
    address = staged["w"].data_ptr()
    del staged  # free here: the child must not take it for its own
    child = os.fork()
    if child == 0:
        copy = snapshot({"w": torch.full((MIB,), 2.0)})
        fine = copy["w"].unique().tolist() == [2.0] and arena_stats().slots == 1
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    staged = snapshot({"w": torch.full((MIB,), 3.0)})
    assert staged["w"].data_ptr() == address and staged["w"].unique().tolist() == [3.0]


def test_a_state_staged_before_a_fork_stays_as_it_is():
    staged = snapshot({"w": torch.full((MIB,), 1.0)})
    child = os.fork()
    if child == 0:
        for value in (2.0, 3.0):
            snapshot({"w": torch.full((MIB,), value)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert staged["w"].unique().tolist() == [1.0]


def process_save(value: float, place: str) -> Any:
    state = {"w": torch.full((MIB,), value)}
    future = dcp.async_save(
        state, storage_writer=StrataWriter(place), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    state["w"].fill_(-5.0)
    return future


def found(place: str) -> list[float]:
    out = {"w": torch.zeros(MIB)}
    load(out, place)
    return out["w"].unique().tolist()


def kill_the_process(rank: int, folder: str) -> Any:
    from torch.distributed.checkpoint import _async_process_executor as executor

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    process_save(1.0, f"{folder}/1").result(80)
    os.kill(executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGSTOP)
    future = process_save(2.0, f"{folder}/2")
    os.kill(executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGKILL)
    error = future.exception(80)
    process_save(3.0, f"{folder}/3").result(80)
    stats = arena_stats()
    forget_process()
    is_error = isinstance(error, RuntimeError | OSError)  # by what torch notices first
    return is_error, found(f"{folder}/1"), found(f"{folder}/3"), stats.slots, os.path.exists(f"{folder}/2")


def test_a_process_that_was_killed_is_an_error_of_that_save_and_the_next_one_works(tmp_path):
    (result,) = run_ranks(tmp_path, 1, kill_the_process, str(tmp_path))
    assert result == (True, [1.0], [3.0], 1, False)


def kill_one_of_two(rank: int, folder: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.checkpoint import _async_process_executor as executor

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    process_save(1.0, f"{folder}/1").result(80)
    if rank == 1:
        os.kill(executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGKILL)
        executor._CHECKPOINT_PROCESS._save_process.join(30)
    told = ""
    try:
        process_save(2.0, f"{folder}/2").result(80)
    except CheckpointError as error:
        told = str(error)
    except Exception as error:
        told = type(error).__name__
    dist.barrier()
    forget_process()
    process_save(3.0, f"{folder}/3").result(80)
    forget_process()
    return told, found(f"{folder}/3")


def test_with_several_ranks_all_start_new_processes_when_told_to(tmp_path):
    first, second = run_ranks(tmp_path, 2, kill_one_of_two, str(tmp_path))
    assert first == ("RuntimeError", [3.0])
    assert "forget_process() on every rank" in second[0] and second[1] == [3.0]


def stage_shards(rank: int, place: str) -> Any:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mesh = init_device_mesh("cpu", (2,))
    weights = torch.arange(8.0).view(4, 2)
    tensor = DTensor.from_local(weights[rank * 2 : rank * 2 + 2].clone(), mesh, [Shard(0)])
    replica = DTensor.from_local(weights.clone(), mesh, [Replicate()])
    future = dcp.async_save(
        {"s": tensor, "r": replica},
        storage_writer=StrataWriter(place),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    tensor.to_local().zero_()
    replica.to_local().zero_()
    future.result(80)
    forget_process()
    return arena_stats().busy_slots


def test_shards_keep_their_mesh_on_the_way_to_the_process(tmp_path):
    assert run_ranks(tmp_path, 2, stage_shards, str(tmp_path / "c")) == [0, 0]
    out = {"s": torch.zeros(4, 2), "r": torch.zeros(4, 2)}
    load(out, tmp_path / "c")
    assert torch.equal(out["s"], torch.arange(8.0).view(4, 2)) and torch.equal(out["r"], out["s"])
