"""A warning for who lets `dcp.async_save` run its collectives on the group that training uses."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torch_strata.checkpoint._exchange import world_size

__all__ = ["warn_of_training_group"]

_logger = logging.getLogger(__name__)

# The stager that DCP calls is a few wrappers away.
_MOST_FRAMES = 12

_has_warned = False


def warn_of_training_group() -> None:
    """Called from a stager: warn, once a process, if its caller is about to gather on the default group in a thread.

    Two threads that run collectives on one group at a time may pair them up differently on each rank.
    """
    global _has_warned
    if _has_warned or (world_size() or 1) == 1:
        return
    arguments = _arguments_of_async_save()
    if arguments is not None and _meets_training(arguments):
        _has_warned = True
        _logger.warning(
            "dcp.async_save runs its collectives in the background on the default process group, where they meet those "
            "of training; give it a group of its own, process_group=dist.new_group(backend='gloo'), or call "
            "torch_strata.async_save, which uses none"
        )


def _arguments_of_async_save() -> Mapping[str, Any] | None:
    """The variables of the `dcp.async_save` that is running; None if there is none.

    It tells neither writer nor stager its group. Good enough for a warning, and for nothing else.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == "async_save" and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            return frame.f_locals
    return None


def _meets_training(arguments: Mapping[str, Any]) -> bool:
    group = arguments.get("process_group")
    is_in_thread = getattr(arguments.get("async_checkpointer_type"), "name", "") != "PROCESS"
    gathers = arguments.get("use_collectives", True) and not arguments.get("no_dist", False)
    return bool(gathers and is_in_thread and (group is None or group is dist.group.WORLD))
