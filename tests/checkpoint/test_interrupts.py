"""Ctrl-C as a signal to a real process in the middle of a save or a load: what was there stays, what follows works."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.s3_states import RUN, SMALL_PARTS, Forward, leftovers, loaded_step, state
from tests.checkpoint.states import load, save
from tests.support import REPOSITORY, run_python
from tests.support.s3 import Answer, Request, gateway, options
from torch_strata import StrataReader, StrataWriter, async_save, verify
from torch_strata.checkpoint._task import Task, TaskQueue
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.staging import arena_stats, snapshot

SECONDS = 30


class Interrupt:
    """A gateway's behaviour: Ctrl-C for the process named in `folder` at the first request that `matters`.

    That request is answered when the process says that it is over it.
    """

    def __init__(self, folder: Path, matters: Any) -> None:
        self._folder, self._matters = folder, matters
        self.is_sent = False

    def __call__(self, request: Request, forward: Forward) -> Answer:
        if self._matters(request) and (self._folder / "pid").exists() and not self.is_sent:
            self.is_sent = True
            os.kill(int((self._folder / "pid").read_text()), signal.SIGINT)
            wait_for(self._folder / "over")
        return forward()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hear_ctrl_c() -> None:
    """As from a terminal: what a shell runs in the background, as some runners of tests do, ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kinds(error: BaseException) -> set[str]:
    """Its class, and those of what DCP has wrapped in it."""
    inner = [failure[0] for failure in getattr(error, "failures", {}).values()]
    return {type(found).__name__ for found in (error, *inner)}


def interrupted(rank: int, folder: str, url: str, server: str, door: str, how: str) -> Any:
    hear_ctrl_c()
    there, past = options(door), options(server)
    Path(folder, "pid").write_text(str(os.getpid()))
    seen: set[str] = set()
    handle = None
    try:
        if how == "load":
            loaded_step(url, storage_options=there)
        else:
            writer = StrataWriter(url, config=SMALL_PARTS, storage_options=there)
            if how == "save":
                dcp.save(state(2), storage_writer=writer, no_dist=True)
            else:
                handle = async_save(state(2), storage_writer=writer)
                handle.result()
    except BaseException as error:
        seen = kinds(error)
    Path(folder, "over").touch()
    if handle is not None:
        handle.result()
    after = loaded_step(url, storage_options=past)
    save(state(3), url, storage_options=past)
    async_save(state(4), storage_writer=StrataWriter(url, storage_options=past)).result()
    return seen, after, loaded_step(url, storage_options=past), arena_stats().busy_slots


def is_data(request: Request) -> bool:
    return request.method == "GET" and ".distcp" in request.target


@pytest.mark.parametrize(
    ("how", "matters", "found"),
    [("save", lambda r: r.is_part(2), 1), ("result", lambda r: r.is_part(2), 2), ("load", is_data, 1)],
)
def test_ctrl_c_in_the_middle_is_a_keyboard_interrupt_and_the_next_save_works(tmp_path, bucket, how, matters, found):
    save(state(1), bucket.url(RUN))
    behave = Interrupt(tmp_path, matters)
    with gateway(bucket.endpoint, behave) as door:
        args = (str(tmp_path), bucket.url(RUN), bucket.endpoint, door, how)
        ((seen, after, last, busy),) = run_ranks(tmp_path, 1, interrupted, *args)
    assert behave.is_sent and "KeyboardInterrupt" in seen
    # Whoever waits for a result can be interrupted; the save goes on.
    assert (after, last, busy) == (found, 4, 0)
    assert leftovers(bucket) == [] and verify(bucket.url(RUN)).problems == ()
    assert len([key for key in bucket.sizes() if key.endswith(".distcp")]) == 1


class InterruptsItsCopy:
    """A value in the state: whoever copies it is interrupted."""

    def __deepcopy__(self, _: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS)


def interrupt_staging(rank: int, place: str, how: str) -> Any:
    hear_ctrl_c()

    def of(step: int) -> dict[str, Any]:
        return {"w": torch.full((1 << 20,), float(step)), f"own{rank}": torch.ones(10)}

    def found() -> list[float]:
        out = of(0)
        dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
        values: list[float] = out["w"].unique().tolist()
        return values

    async_save(of(1), checkpoint_id=place).result()
    told: set[str] = set()
    notes = ""
    try:
        if rank == 1:
            bad = {**of(2), "bad": InterruptsItsCopy()}
            if how == "ours":
                async_save(bad, checkpoint_id=place)
            else:
                snapshot(bad)
        elif how == "ours":
            async_save(of(2), checkpoint_id=place).result()
    except BaseException as error:
        told, notes = kinds(error), f"{error} {getattr(error, '__notes__', [])}"
    dist.barrier()
    busy, after = arena_stats().busy_slots, found()
    dist.barrier()
    async_save(of(3), checkpoint_id=place).result()
    return told, notes, busy, after, found()


def test_ctrl_c_while_a_rank_stages_is_raised_there_and_the_others_learn_of_it(tmp_path):
    first, second = run_ranks(tmp_path, 2, interrupt_staging, str(tmp_path / "c"), "ours")
    assert second[0] == {"KeyboardInterrupt"}
    assert first[0] == {"CheckpointError"} and "KeyboardInterrupt" in first[1] and "rank 1 of 2 failed" in first[1]
    assert [result[2:] for result in (first, second)] == [(0, [1.0], [3.0])] * 2
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2


def test_ctrl_c_in_a_stager_gives_its_memory_back(tmp_path):
    _, second = run_ranks(tmp_path, 2, interrupt_staging, str(tmp_path / "c"), "stager")
    assert second[0] == {"KeyboardInterrupt"} and second[2:] == (0, [1.0], [3.0])


UNTIL_INTERRUPTED = """
import signal, sys, time, torch, torch_strata
signal.signal(signal.SIGINT, signal.default_int_handler)
torch_strata.async_save({"w": torch.full((2_000_000,), 7.0)}, checkpoint_id=sys.argv[1])
print("saving", flush=True)
time.sleep(60)
"""


def test_a_script_that_ctrl_c_ends_completes_the_save_in_flight(tmp_path):
    script = [sys.executable, "-c", UNTIL_INTERRUPTED, str(tmp_path / "c")]
    process = subprocess.Popen(script, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said and process.returncode == -signal.SIGINT
    assert verify(tmp_path / "c").problems == ()
    out = {"w": torch.zeros(2_000_000)}
    load(out, tmp_path / "c")
    assert out["w"].unique().tolist() == [7.0]


# The starter waits for the new thread's first sign of life, on a loaded machine for long: Ctrl-C finds it there.
INTERRUPTED_START = """
import logging, sys, threading
import torch
from torch_strata import CheckpointManager, verify

place, name = sys.argv[1:]
logging.basicConfig(level=logging.INFO, filename=place + ".log")
start, interrupted = threading.Thread.start, []

def interrupted_start(thread):
    start(thread)
    if thread.name.startswith(name) and threading.current_thread() is threading.main_thread() and not interrupted:
        interrupted.append(thread)
        raise KeyboardInterrupt

threading.Thread.start = interrupted_start
manager = CheckpointManager(place, keep_count=3)
try:
    with manager:
        for step in range(1, 4):
            manager.save({"w": torch.full((2000,), float(step)), "step": step}, step=step)
        manager.wait()
        manager.load()
        verify(manager.storage_path + "/step-3", progress=print)
except KeyboardInterrupt:
    pass
assert interrupted
manager.save({"w": torch.zeros(2000), "step": 9}, step=9).result()
assert manager.load()["step"] == 9 and manager.load()["w"].sum() == 0
"""


@pytest.mark.parametrize("thread", ["strata-save", "strata-beats", "strata-progress"])
def test_ctrl_c_while_a_thread_is_started_leaves_none_that_keeps_the_process(tmp_path, thread):
    run_python(INTERRUPTED_START, str(tmp_path / "run"), thread)
    for found in (tmp_path / "run").glob("step-*"):
        assert verify(found).is_sound


def test_what_is_submitted_after_an_interrupted_call_waits_for_what_was_before(monkeypatch):
    tasks, begun, go, order = TaskQueue(), threading.Event(), threading.Event(), []

    def first():
        begun.set()
        go.wait(SECONDS)
        order.append(1)
        return SaveStats(save_id="")

    def interrupted(thread):
        start(thread)
        begun.wait(SECONDS)
        raise KeyboardInterrupt

    start = threading.Thread.start
    task = Task(first)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tasks.put(task)
    assert not task.withdraw()  # it has been begun
    following = [tasks.put(Task(lambda n=n: (order.append(n), SaveStats(save_id=""))[1])) for n in (2, 3)]
    withdrawn = Task(lambda: order.append("never"))
    assert withdrawn.withdraw()
    tasks.put(withdrawn)
    go.set()
    assert [future.result(SECONDS).save_id for future in following] == ["", ""] and order == [1, 2, 3]
