"""What a caller holds of a save of a manager that goes on in the background."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from torch_strata import _native
from torch_strata.checkpoint._order import SaveOrder
from torch_strata.checkpoint.handle import SaveHandle, SaveProgress
from torch_strata.checkpoint.run import CheckpointMetadata
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.errors import CheckpointNotFoundError

__all__ = ["CheckpointHandle"]


class CheckpointHandle:
    """A save of a manager that goes on in the background.

    Attributes:
        path: Where it goes: URL or local path.
        step: What was saved.
    """

    def __init__(self, handle: SaveHandle, run: _native.Run, order: SaveOrder) -> None:
        self.path = os.fspath(handle.path)
        self.step = order.step
        self._handle, self._run, self._folder = handle, run, order.folder

    @property
    def progress(self) -> SaveProgress:
        """How far this rank has come."""
        return self._handle.progress

    @property
    def stage_time(self) -> timedelta:
        """Time for which the caller was held up."""
        return self._handle.stage_time

    @property
    def stats(self) -> SaveStats | None:
        """What the save did on this rank; None before it has ended, and if it failed."""
        return self._handle.stats

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._handle.done()

    def exception(self, timeout: timedelta | None = None) -> BaseException | None:
        """Wait for the end; why the save failed, or None.

        Raises:
            TimeoutError: If it has not ended in time; it goes on.
        """
        return self._handle.exception(timeout)

    def result(self, timeout: timedelta | None = None) -> CheckpointMetadata | None:
        """Wait until the checkpoint is committed, on every rank.

        Returns:
            What is committed; None if that has been removed since, as the policy may, and after a failure with
            ``on_failure="continue"``.

        Raises:
            TimeoutError: If the save has not ended in time; it goes on.
            StrataError: Why it failed, as `SaveHandle.result`.
        """
        if self._handle.result(timeout) is None:
            return None
        try:
            return CheckpointMetadata.of_native(self._run.found(self._folder))
        except CheckpointNotFoundError:
            return None

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback` with this handle at the end, from the thread that saves; at once if that has been."""
        self._handle.add_done_callback(lambda _: callback(self))
