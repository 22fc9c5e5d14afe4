"""`async_save`: in the background, without a collective, and every end of it is learned by every rank."""

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.ranks import run_ranks
from tests.support import run_python
from torch_strata import (
    CheckpointError,
    ConfigError,
    StrataError,
    StrataReader,
    StrataWriter,
    async_save,
    verify,
)

SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=60)


class Unstorable:
    def __reduce__(self) -> Any:
        raise TypeError("a lock cannot be pickled")

    def __deepcopy__(self, _: Any) -> "Unstorable":
        return self


def state_of(rank: int, value: float) -> dict[str, Any]:
    return {f"own{rank}": torch.full((300_000,), value + rank), "shared": torch.full((1000,), value), "step": value}


def values_at(place: str | Path, rank: int) -> list[float]:
    out = state_of(rank, -1.0)
    dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
    values: list[float] = out[f"own{rank}"].unique().tolist()
    return [*values, *out["shared"].unique().tolist(), out["step"]]


def objects_at(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*.distcp"))


def ended(call: Any) -> tuple[str, str, list[str], float]:
    """Class, message and notes of what `call` raises, and how long it took in seconds."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        took = time.monotonic() - started
        return type(error).__name__, str(error), getattr(error, "__notes__", []), took
    return "", "", [], time.monotonic() - started


# One process.


def test_what_changes_after_the_call_is_not_saved(tmp_path):
    state = {"w": torch.arange(500_000.0), "nested": {"list": [1, 2]}, "step": 3}
    handle = async_save(state, checkpoint_id=tmp_path / "c")
    state["w"].zero_()
    state["nested"]["list"].append(3)
    stats = handle.result(LONG)
    assert (stats.committed, handle.done(), handle.path) == (True, True, tmp_path / "c")
    out = {"w": torch.zeros(500_000), "nested": {"list": [0, 0]}, "step": 0}
    dcp.load(out, storage_reader=StrataReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(out["w"], torch.arange(500_000.0))
    assert (out["nested"], out["step"]) == ({"list": [1, 2]}, 3)


def test_stock_reads_what_was_saved_in_the_background(tmp_path):
    async_save({"w": torch.arange(1000.0)}, checkpoint_id=tmp_path / "c").result(LONG)
    out = {"w": torch.zeros(1000)}
    dcp.load(out, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(out["w"], torch.arange(1000.0))


def test_the_handle_tells_how_far_the_save_has_come(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="torch_strata"):
        handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c")
        stats = handle.result(LONG)
    progress = handle.progress
    assert progress.written_bytes == progress.total_bytes == stats.written_bytes > 0
    assert progress.remaining == timedelta(0)
    assert str(progress).startswith("1 of 1 MB")
    assert f"saved; this rank wrote {stats.written_bytes} bytes" in caplog.text


def test_saves_without_waiting_all_land_in_their_order(tmp_path):
    writer = StrataWriter(tmp_path / "first")
    places = [tmp_path / "first", tmp_path / "second", tmp_path / "first"]
    handles = [
        async_save(state_of(0, float(i)), storage_writer=writer, checkpoint_id=place) for i, place in enumerate(places)
    ]
    ends: list[Path] = []
    for handle in handles:
        handle.add_done_callback(lambda handle: ends.append(handle.path))
    for handle in handles:
        handle.result(LONG)
    assert ends == places
    assert values_at(tmp_path / "second", 0) == [1.0, 1.0, 1.0]
    assert values_at(tmp_path / "first", 0) == [2.0, 2.0, 2.0]


def test_a_failure_is_raised_by_result_and_logged_and_the_old_checkpoint_stays(tmp_path, caplog):
    async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c").result(LONG)
    before = objects_at(tmp_path / "c")
    with caplog.at_level(logging.ERROR):
        handle = async_save({**state_of(0, 2.0), "bad": Unstorable()}, checkpoint_id=tmp_path / "c")
        with pytest.raises(CheckpointError, match="cannot store 'bad'"):
            handle.result(LONG)
    assert "the checkpoint was not saved" in caplog.text
    assert values_at(tmp_path / "c", 0) == [1.0, 1.0, 1.0]
    assert objects_at(tmp_path / "c") == before


def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_call(tmp_path):
    handle = async_save({"bad": Unstorable()}, checkpoint_id=tmp_path / "c")
    wait_for(handle.done)
    with pytest.raises(CheckpointError, match="cannot store 'bad'"):
        async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c")
    async_save(state_of(0, 2.0), checkpoint_id=tmp_path / "c").result(LONG)
    assert values_at(tmp_path / "c", 0) == [2.0, 2.0, 2.0]


def test_with_continue_the_handle_still_tells_of_a_failure(tmp_path):
    seen: list[Any] = []
    (tmp_path / "c").write_text("a file in the way")
    handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c", on_failure="continue")
    handle.add_done_callback(lambda ended: seen.append(ended.exception()))
    assert handle.result() is None and handle.stats is None
    assert isinstance(handle.exception(), StrataError)
    assert seen == [handle.exception()]


def test_a_forked_child_is_told_that_it_does_not_save(tmp_path, monkeypatch):
    may_write, write = threading.Event(), StrataWriter.write_data

    def held_up(writer: StrataWriter, *args: Any) -> Any:
        may_write.wait(60)
        return write(writer, *args)

    monkeypatch.setattr(StrataWriter, "write_data", held_up)
    handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c")
    child = os.fork()
    if child == 0:
        try:
            os._exit(7 if ended(lambda: handle.result(SHORT))[0] == "ForkedProcessError" else 1)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    may_write.set()
    handle.result(LONG)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_timeout_that_is_no_timedelta_is_refused_by_name(tmp_path):
    handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c")
    with pytest.raises(ConfigError, match="timeout: expected a timedelta, found 1"):
        handle.result(1)  # type: ignore[arg-type]
    handle.result()


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    with pytest.raises(CheckpointError, match=r"'q'.*layout is torch.sparse_coo"):
        async_save({"q": sparse}, checkpoint_id=tmp_path / "c")


def test_with_continue_a_failure_is_only_logged(tmp_path, caplog):
    handle = async_save({"bad": Unstorable()}, checkpoint_id=tmp_path / "c", on_failure="continue")
    assert handle.result(LONG) is None
    assert "the checkpoint was not saved" in caplog.text
    async_save(state_of(0, 2.0), checkpoint_id=tmp_path / "c").result(LONG)


def test_a_place_that_cannot_be_written_is_a_named_error(tmp_path):
    (tmp_path / "file").write_text("")
    handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "file" / "c")
    with pytest.raises(StrataError, match="file"):
        handle.result(LONG)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"storage_writer": "s3://x"},
        {"checkpoint_id": "c", "timeout": 5},
        {"checkpoint_id": "c", "timeout": timedelta(0)},
        {"checkpoint_id": "c", "on_failure": "ignore"},
        {"checkpoint_id": "ftp://c"},
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments):
    with pytest.raises(ConfigError):
        async_save({"w": torch.ones(1)}, **arguments)


def test_the_threads_of_many_saves_do_not_add_up(tmp_path):
    for i in range(3):
        async_save(state_of(0, float(i)), checkpoint_id=tmp_path / "c").result(LONG)
    wait_for(lambda: all(thread.name != "strata-beats" for thread in threading.enumerate()))
    before = threading.active_count()
    for i in range(20):
        async_save(state_of(0, float(i)), checkpoint_id=tmp_path / "c").result(LONG)
    wait_for(lambda: threading.active_count() <= before)


EXIT_AT_ONCE = """
import sys, torch, torch_strata
torch_strata.async_save({"w": torch.full((2_000_000,), 7.0)}, checkpoint_id=sys.argv[1])
"""


def test_no_thread_is_left_to_the_end_of_the_interpreter(tmp_path, caplog):
    # A daemon that is in torch's code then is ended there, and C++ ends the whole process: exit status -6.
    caplog.set_level(logging.INFO)
    handle = async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "c")
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("strata-")]
    assert ours
    assert not [thread.name for thread in ours if thread.daemon]
    handle.result()


def test_a_save_in_flight_when_the_interpreter_ends_is_completed(tmp_path):
    run_python(EXIT_AT_ONCE, str(tmp_path / "c"))
    assert verify(tmp_path / "c").problems == ()


def test_a_fork_saves_on_its_own(tmp_path):
    async_save(state_of(0, 1.0), checkpoint_id=tmp_path / "parent").result(LONG)
    child = os.fork()
    if child == 0:
        try:
            async_save(state_of(0, 2.0), checkpoint_id=tmp_path / "child").result(LONG)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert values_at(tmp_path / "child", 0) == [2.0, 2.0, 2.0]


# Several ranks.


def save_while_training(rank: int, place: str) -> Any:
    handle = async_save(state_of(rank, 1.0), checkpoint_id=place)
    total = torch.ones(1000)
    for _ in range(200):  # collectives on the very group, at the same time
        dist.all_reduce(total)
        total /= dist.get_world_size()
    stats = handle.result(LONG)
    return stats.committed, total.unique().tolist()


def test_training_uses_the_group_while_its_ranks_save(tmp_path):
    results = run_ranks(tmp_path, 3, save_while_training, str(tmp_path / "c"))
    assert results == [(True, [1.0]), (False, [1.0]), (False, [1.0])]
    assert [values_at(tmp_path / "c", rank) for rank in range(3)] == [[1.0 + r, 1.0, 1.0] for r in range(3)]
    assert verify(tmp_path / "c").problems == ()


def save_sharded(rank: int, place: str) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(rank * 5000.0, rank * 5000 + 5000)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    handle = async_save({"w": tensor}, checkpoint_id=place)
    local.zero_()
    handle.result(LONG)
    dcp.load({"w": tensor}, storage_reader=StrataReader(place))
    return local[[0, -1]].tolist()


def test_shards_are_saved_as_they_were_at_the_call(tmp_path):
    assert run_ranks(tmp_path, 2, save_sharded, str(tmp_path / "c")) == [[0.0, 4999.0], [5000.0, 9999.0]]


def save_many(rank: int, place: str) -> int:
    for i in range(30):
        async_save(state_of(rank, float(i)), checkpoint_id=place).result(LONG)
    from torch_strata.checkpoint.async_save import _process

    (group,) = _process()._groups.values()
    return group.store.num_keys()


def test_many_saves_leave_no_keys_in_the_store(tmp_path):
    keys = run_ranks(tmp_path, 2, save_many, str(tmp_path / "c"))
    assert max(keys) < 60  # a save of two ranks has ten; gloo has its own
    assert values_at(tmp_path / "c", 1) == [30.0, 29.0, 29.0]


def one_rank_cannot(rank: int, place: str, bad: int, kind: str) -> Any:
    async_save(state_of(rank, 1.0), checkpoint_id=place).result(LONG)
    state = state_of(rank, 2.0)
    if rank == bad and kind == "value":
        state["bad"] = Unstorable()
    if rank == bad and kind == "copy":
        state["worse"] = threading.Lock()
    outcome = ended(lambda: async_save(state, checkpoint_id=place).result(LONG))
    async_save(state_of(rank, 3.0), checkpoint_id=f"{place}-next").result(LONG)
    return outcome


@pytest.mark.parametrize("kind", ["value", "copy"])
@pytest.mark.parametrize("bad", [0, 2])
def test_what_one_rank_fails_at_every_rank_raises_soon(tmp_path, bad, kind):
    place = tmp_path / "c"
    results = run_ranks(tmp_path, 3, one_rank_cannot, str(place), bad, kind)
    for rank, (name, message, notes, took) in enumerate(results):
        assert name == "CheckpointError"
        assert ("'bad'" if kind == "value" else "'worse'") in message
        assert (f"rank {bad} of 3 failed" in " ".join(notes)) == (rank != bad)
        assert took < 30
    assert values_at(place, 1) == [2.0, 1.0, 1.0]
    assert len(objects_at(place)) == 3
    assert values_at(f"{place}-next", 1) == [4.0, 3.0, 3.0]


def two_places(rank: int, place: str) -> Any:
    return ended(lambda: async_save(state_of(rank, 1.0), checkpoint_id=f"{place}{rank}", timeout=SHORT).result(LONG))


def test_ranks_that_save_to_two_places_are_told_so(tmp_path):
    for rank, (name, message, _, _) in enumerate(run_ranks(tmp_path, 2, two_places, str(tmp_path / "c"))):
        assert name == "CoordinatorTimeoutError"
        own, other = tmp_path / f"c{rank}", tmp_path / f"c{1 - rank}"
        assert f"did not call async_save for {own}; rank {1 - rank}'s last call was for {other}" in message
    assert not objects_at(tmp_path)


def miss_a_call(rank: int, place: str, how: str) -> list[Any]:
    """Four saves; at the second one rank 1 makes no call, or one that is refused."""
    outcomes = []
    for step in range(1, 5):
        dist.barrier()
        timeout: Any = SHORT
        if rank == 1 and step == 2:
            if how == "misses":
                continue
            timeout = 5
        path = place if how == "misses" else f"{place}-{step}"
        state = state_of(rank, float(step)) | {"step": step}
        named = {"step": step} if how == "misses" else {}
        call = partial(async_save, state, checkpoint_id=path, timeout=timeout, **named)
        outcomes.append((step, ended(lambda call=call: call().result(LONG))))
    return outcomes


def test_a_call_that_a_rank_misses_costs_that_save_and_no_other(tmp_path):
    told = run_ranks(tmp_path, 2, miss_a_call, str(tmp_path / "c"), "misses")
    for rank, outcomes in enumerate(told):
        names = {step: outcome[0] for step, outcome in outcomes}
        assert names == {1: "", 3: "", 4: ""} | ({2: "CoordinatorTimeoutError"} if rank == 0 else {})
    assert f"rank 1's last call was for {tmp_path / 'c'} at step" in told[0][1][1][1]
    for rank in (0, 1):
        assert values_at(tmp_path / "c", rank)[0] == 4.0 + rank


def mix_steps(rank: int, place: str) -> Any:
    state = {"own": torch.full((10,), float(rank)), "step": 2 + rank}
    return ended(lambda: async_save(state, checkpoint_id=place, timeout=SHORT).result(LONG))


def test_ranks_never_make_one_checkpoint_of_two_steps(tmp_path):
    for name, message, _, _ in run_ranks(tmp_path, 2, mix_steps, str(tmp_path / "c")):
        assert name == "CheckpointError"
        assert "rank 0 step 2, rank 1 step 3 in one save: a rank has missed a call of async_save" in message
    assert not objects_at(tmp_path)


def test_a_call_that_is_refused_on_one_rank_is_told_to_the_others_and_costs_no_other_save(tmp_path):
    told = run_ranks(tmp_path, 2, miss_a_call, str(tmp_path / "c"), "refused")
    for outcomes in told:
        assert {step: outcome[0] for step, outcome in outcomes} == {1: "", 2: "ConfigError", 3: "", 4: ""}
        assert "timeout: expected a timedelta above 0, found 5" in outcomes[1][1][1]
    assert values_at(tmp_path / "c-4", 1)[0] == 5.0


def save_where_nobody_else_looks(rank: int, place: str) -> Any:
    folder = Path(f"{place}-{rank}")
    folder.mkdir()
    os.chdir(folder)
    outcome = ended(lambda: async_save(state_of(rank, 1.0), checkpoint_id="here", timeout=SHORT).result(LONG))
    return outcome, [path.name for path in folder.rglob("*.distcp")]


def test_a_disk_that_ranks_do_not_share_is_told_and_holds_nothing_afterwards(tmp_path):
    for (name, message, _, _), left in run_ranks(tmp_path, 2, save_where_nobody_else_looks, str(tmp_path / "node")):
        assert name == "ObjectNotFoundError" and "do all ranks share this place?" in message
        assert not left


def lose_a_rank(rank: int, place: str, lost: int, how: str) -> Any:
    async_save(state_of(rank, 1.0), checkpoint_id=place).result(LONG)
    dist.barrier()
    if rank == lost:
        # Killed between the copy and the plan: the others have every reason to wait for it.
        threading.Timer(0.3, os.kill, (os.getpid(), getattr(signal, how))).start()
        time.sleep(0.5)
    outcome = ended(lambda: async_save(state_of(rank, 2.0), checkpoint_id=place, timeout=SHORT).result(LONG))
    Path(f"{place}-{rank}").write_text(repr(outcome))
    return outcome


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_dies_or_hangs_is_named_by_the_others(tmp_path, lost, how):
    place = tmp_path / "c"
    with pytest.raises(AssertionError, match=f"rank {lost} ended|ranks \\[{lost}\\] were still running"):
        run_ranks(tmp_path, 3, lose_a_rank, str(place), lost, how, timeout_seconds=15)
    for rank in {0, 1, 2} - {lost}:
        name, message, _, took = eval(Path(f"{place}-{rank}").read_text())
        assert name == "CoordinatorTimeoutError"
        assert f"have not been heard of for 2 s: {lost};" in message
        assert took < 10
    assert values_at(place, 1) == [2.0, 1.0, 1.0]


def one_comes_late(rank: int, place: str, *, too_late: bool) -> Any:
    called, given_up = Path(f"{place}-called"), Path(f"{place}-given-up")
    if rank == 1:
        wait_for((given_up if too_late else called).exists)
        time.sleep(0.0 if too_late else 0.7)

    def save() -> None:
        handle = async_save(state_of(rank, 1.0), checkpoint_id=place, timeout=SHORT / 4 if too_late else LONG)
        called.touch()
        handle.result(LONG)

    outcome = ended(save)
    given_up.touch()
    return outcome


def comes_late(rank: int, place: str) -> Any:
    return one_comes_late(rank, place, too_late=False)


def comes_too_late(rank: int, place: str) -> Any:
    return one_comes_late(rank, place, too_late=True)


def test_a_rank_that_comes_late_is_waited_for(tmp_path):
    results = run_ranks(tmp_path, 2, comes_late, str(tmp_path / "c"))
    assert [name for name, *_ in results] == ["", ""]
    assert values_at(tmp_path / "c", 1) == [2.0, 1.0, 1.0]


def test_a_rank_that_comes_too_late_learns_that_the_save_has_failed(tmp_path):
    for name, message, _, _ in run_ranks(tmp_path, 2, comes_too_late, str(tmp_path / "c")):
        assert (name, "did not call async_save" in message) == ("CoordinatorTimeoutError", True)
    assert objects_at(tmp_path) == []


def stop_and_go_on(rank: int, place: str) -> Any:
    pid = os.getpid()
    if rank == 1 and os.fork() == 0:  # wakes its parent, which cannot do so itself
        time.sleep(0.4)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    if rank == 1:
        time.sleep(0.8)
    return ended(lambda: async_save(state_of(rank, 1.0), checkpoint_id=place, timeout=SHORT / 2).result(LONG))


def test_a_rank_that_wakes_after_it_was_given_up_leaves_nothing(tmp_path):
    results = run_ranks(tmp_path, 2, stop_and_go_on, str(tmp_path / "c"))
    assert [name for name, *_ in results] == ["CoordinatorTimeoutError"] * 2
    assert objects_at(tmp_path) == []


def wait_for(claim: Any) -> None:
    deadline = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)
