"""The process that saves for `dcp.async_save` in its process mode: torch keeps one for good, also when it has died."""

import logging
import os
import socket
import sys
from typing import Any

from torch_strata.checkpoint._exchange import world_size
from torch_strata.errors import CheckpointError

__all__ = ["forget_dead_process", "forget_process"]

_logger = logging.getLogger(__name__)

# Where torch 2.11 to 2.15 keep it. Only looked up: who never saves in a process does not load it.
_MODULE = "torch.distributed.checkpoint._async_process_executor"

# A process that dies closes its pipe first, and can be waited for a little later.
_DYING_SECONDS = 5


def forget_dead_process() -> None:
    """If the process has died, let torch start another one: torch itself would fail every later save of the job.

    Raises:
        CheckpointError: If other ranks have one too. All must start theirs together, and no rank knows of another's:
            call `forget_process` on every rank.
    """
    process = _process()
    if process is None or (process._save_process.is_alive() and not _has_hung_up(process._process_pipe)):
        return
    process._save_process.join(_DYING_SECONDS)
    exit_code = process._save_process.exitcode
    if (world_size() or 1) > 1:
        raise CheckpointError(
            f"the process that saves for this rank has died with exit code {exit_code}; call "
            f"torch_strata.checkpoint.staging.forget_process() on every rank before the next save"
        )
    _logger.warning("the process that saves has died with exit code %s; this save starts another one", exit_code)
    forget_process()


def forget_process() -> None:
    """End the process that saves, so that the next save starts another one. With several ranks call it on all of them.

    No save may be in flight.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is not None:
        module._CHECKPOINT_PROCESS = None


def _process() -> Any:
    return getattr(sys.modules.get(_MODULE), "_CHECKPOINT_PROCESS", None)


def _has_hung_up(pipe: Any) -> bool:
    """Whether nobody is at the other end, found out without taking an answer that waits to be read."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        try:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
