"""One save of DCP's in the background at a time.

Two would mix: their collectives meet on one group, and answers of a process on one pipe.
"""

import logging
import os
import threading
import time

from torch_strata.checkpoint._arena import Lease
from torch_strata.errors import CheckpointError

__all__ = ["takes_turn", "wait_for_turn"]

_logger = logging.getLogger(__name__)

# Of DCP's last save in the background: this process's id, and the memory of its state.
_running: tuple[int, Lease] | None = None

# What DCP calls the threads in which it saves.
_DCP_THREADS = ("AsyncCheckpointExecutor", "ThreadPoolExecutor")

_LOOK_EVERY_SECONDS = 0.002
_SAID_AFTER_SECONDS = 0.1


def wait_for_turn(*, user: str, deadline_seconds: float) -> None:
    """Wait until DCP's save in the background before this one has ended.

    Args:
        user: Who waits, in words for the log.
        deadline_seconds: For how long.

    Raises:
        CheckpointError: If it has not ended in time.
    """
    started = time.monotonic()
    said = False
    while _running is not None and _running[0] == os.getpid() and _is_running(_running[1]):
        # The thread of a save that has reported its end takes a moment to go.
        if not said and time.monotonic() - started > _SAID_AFTER_SECONDS:
            said = True
            _logger.warning("%s waits for the save before it; torch_strata.async_save would not", user)
        if time.monotonic() - started > deadline_seconds:
            raise CheckpointError(f"{user} waited {deadline_seconds:g} s for the save before it")
        time.sleep(_LOOK_EVERY_SECONDS)


def takes_turn(lease: Lease) -> None:
    """DCP's save in the background of this memory's state begins."""
    global _running
    _running = os.getpid(), lease


def _is_running(lease: Lease) -> bool:
    if lease.thread is threading.current_thread():
        return False  # a callback of that very save
    if lease.thread is not None:
        return lease.thread.is_alive()
    # It has not come to its writer yet, or never did.
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_DCP_THREADS)]
    return lease.is_held and bool(threads)
