"""After the first error of an `async_save` all ranks end within `timeout`, also where the store answers nobody."""

import inspect
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.s3_states import RUN, SMALL_PARTS, Forward, loaded_step, state
from tests.checkpoint.states import save
from tests.support.s3 import Answer, Request, gateway, options
from torch_strata import StrataWriter, async_save

TIMEOUT = timedelta(seconds=4)


class FailsLate:
    """A value that is copied, and found to be unstorable when the others write."""

    def __deepcopy__(self, _: Any) -> "FailsLate":
        return self

    def __reduce__(self) -> Any:
        time.sleep(1)
        raise TypeError("not to be pickled")


def one_fails(rank: int, url: str, door: str, when: str) -> Any:
    mine = {**state(2), "own": torch.ones(10)} if rank == 0 else {"other": torch.ones(10)}
    if rank == 1:
        mine["bad"] = FailsLate() if when == "writing" else threading.Lock()
        time.sleep(1)
    started = time.monotonic()
    writer = StrataWriter(url, config=SMALL_PARTS, storage_options=options(door))
    try:
        error = async_save(mine, storage_writer=writer, timeout=TIMEOUT).exception()
    except Exception as raised:
        error = raised
    return time.monotonic() - started, type(error).__name__, str(error), getattr(error, "__notes__", [])


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST") and ".distcp" in request.target


@pytest.mark.parametrize(("when", "hangs"), [("writing", is_write), ("opening", lambda request: True)])
def test_a_rank_whose_store_hangs_ends_in_time_when_another_one_fails(tmp_path, bucket, when, hangs):
    save(state(1), bucket.url(RUN))
    over, hung = threading.Event(), threading.Event()

    def behave(request: Request, forward: Forward) -> Answer:
        # From then on nothing is answered: what has failed cannot be cleaned up either.
        if hung.is_set() or hangs(request):
            hung.set()
            over.wait(60)
        return forward()

    with gateway(bucket.endpoint, behave) as door:
        try:
            first, second = run_ranks(tmp_path, 2, one_fails, bucket.url(RUN), door, when, timeout_seconds=40)
        finally:
            over.set()
    for _, name, message, _ in (first, second):
        assert name == "CheckpointError" and "'bad'" in message
    assert any("rank 1 of 2 failed" in note for note in first[3])
    # Rank 1 fails a second after its call at most, which is a second after that of rank 0.
    assert first[0] < 2 + TIMEOUT.total_seconds() and second[0] < 1 + TIMEOUT.total_seconds()
    assert loaded_step(bucket.url(RUN)) == 1


def test_the_time_that_is_allowed_by_default_is_a_minute():
    assert inspect.signature(async_save).parameters["timeout"].default == timedelta(seconds=60)
