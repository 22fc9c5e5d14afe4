"""What a caller holds of a save that goes on in the background."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from torch_strata import _native
from torch_strata.checkpoint._progress import in_words
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.errors import ConfigError, ForkedProcessError

__all__ = ["SaveHandle", "SaveProgress", "UnseenSaves"]


@dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """How far a save has come on this rank.

    Attributes:
        written_bytes: Bytes that the store has taken.
        total_bytes: Bytes to write; 0 until that is planned.
        elapsed: Time since the copy was made.
    """

    written_bytes: int
    total_bytes: int
    elapsed: timedelta

    @property
    def remaining(self) -> timedelta | None:
        """Time that the rest takes at the rate so far; None while there is none."""
        if not self.written_bytes:
            return None
        return self.elapsed * ((self.total_bytes - self.written_bytes) / self.written_bytes)

    def __str__(self) -> str:
        return in_words(self.written_bytes, self.total_bytes, self.elapsed.total_seconds())


class SaveHandle:
    """A save in the background, as this rank sees it. Made by `async_save`.

    Attributes:
        path: Where it goes.
        stage_time: Time for which the caller was held up: the copy, and what had to be waited for before it.
        raises: Whether a failure is raised, by `result` or by the next call; it is only logged if not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        future: "Future[SaveStats]",
        transfer: _native.Transfer,
        stage_time: timedelta,
        *,
        raises: bool,
    ) -> None:
        self.path = path
        self.stage_time = stage_time
        self._transfer = transfer
        self._began = time.monotonic()
        self._future = future
        self.raises = raises
        self._is_seen = False
        self._pid = os.getpid()

    @property
    def progress(self) -> "SaveProgress":
        """How far this rank has come."""
        written, total = self._transfer.progress
        return SaveProgress(
            written_bytes=written,
            total_bytes=total,
            elapsed=timedelta(seconds=time.monotonic() - self._began),
        )

    @property
    def stats(self) -> SaveStats | None:
        """What the save did on this rank; None before it has ended, and if it failed."""
        return self._future.result() if self.done() and self._future.exception() is None else None

    @property
    def failure(self) -> BaseException | None:
        """Why the save failed; None before it has ended. Whoever looks here has not asked, as `exception` does."""
        return self._future.exception() if self._future.done() else None

    @property
    def is_seen(self) -> bool:
        """Whether somebody has asked how it ended, and has been told."""
        return self._is_seen

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def result(self, timeout: timedelta | None = None) -> SaveStats | None:
        """Wait for the end. The checkpoint is committed, on every rank, when this returns.

        Args:
            timeout: Longest time to wait.

        Returns:
            What this rank did; None after a failure with ``on_failure="continue"``.

        Raises:
            TimeoutError: If the save has not ended in time; it goes on.
            StrataError: Why the save failed: what this rank raised, or the first other rank that failed, with a note
                that says which.
            ForkedProcessError: In a child that was forked meanwhile, which has none of the threads that save.
        """
        failure = self.exception(timeout)
        if failure is None:
            return self._future.result()
        if self.raises or not isinstance(failure, Exception):
            raise failure
        return None

    def exception(self, timeout: timedelta | None = None) -> BaseException | None:
        """Wait for the end; why the save failed, or None.

        Raises:
            TimeoutError: If the save has not ended in time; it goes on.
            ForkedProcessError: As `result`.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ConfigError(f"timeout: expected a timedelta, found {timeout!r}")
        if not self._future.done() and self._pid != os.getpid():
            raise ForkedProcessError(f"{os.fspath(self.path)}: the process that this one was forked from saves it")
        error = self._future.exception(None if timeout is None else timeout.total_seconds())
        self._is_seen = True
        return error

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback` with this handle at the end, from the thread that saves; at once if that has been."""
        self._future.add_done_callback(lambda _: callback(self))

    @property
    def matters(self) -> bool:
        """Whether it goes on, or has failed so that somebody must be told and nobody has been."""
        return not self.done() or (self.raises and not self._is_seen and self.failure is not None)


class UnseenSaves:
    """Saves of one user of this process, who is told of each failure: by a handle, or by the next call."""

    def __init__(self) -> None:
        self._saves: list[SaveHandle] = []

    def added(self, save: SaveHandle) -> SaveHandle:
        """Keep `save`, which is returned, until it has gone well or somebody has asked."""
        self._saves.append(save)
        return save

    def raise_first(self) -> None:
        """Raise what the first save of which nobody has asked has failed at; of that one somebody has asked now."""
        self._saves = [save for save in self._saves if save.matters]
        for save in self._saves:
            if save.done() and (failure := save.exception()) is not None:
                raise failure

    def wait(self) -> None:
        """Wait for all; raise what the first of which nobody has asked has failed at. By this all were asked for."""
        untold = [save for save in self._saves if not save.is_seen]
        failures = [failure for save in untold if (failure := save.exception()) is not None and save.raises]
        self._saves = [save for save in self._saves if save.matters]
        if failures:
            raise failures[0]
