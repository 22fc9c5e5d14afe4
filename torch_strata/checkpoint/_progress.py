"""Shows how a transfer goes: a bar at a terminal, and lines in the log. Never fails what it shows.

A thread of its own looks, a few times a second, at counters that the Rust core keeps. Without a bar and without a
logger that wants to know there is no such thread.
"""

import logging
import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torch_strata.checkpoint._watching import watching
from torch_strata.checkpoint.store_stats import StoreStats

__all__ = ["in_words", "shown", "wants_bar"]

_logger = logging.getLogger(__name__)

# Often enough for an eye, and nothing beside a transfer.
_LOOK_EVERY_SECONDS = 0.2
_LINE_EVERY_SECONDS = 30.0
# What is over by then has no bar.
_BAR_AFTER_SECONDS = 1.0
# Of 80 columns the numbers take about 40.
_PLACE_CHARS = 24

# Bytes moved, and bytes to move as far as that is known.
Look = Callable[[], tuple[int, int]]


def in_words(moved_bytes: int, total_bytes: int, seconds: float) -> str:
    """Bytes, rate and time left: ``1200 of 4000 MB, 100 MB/s, 28 s left``."""
    rate = moved_bytes / max(seconds, 1e-9)
    left = f", {(total_bytes - moved_bytes) / rate:.0f} s left" if moved_bytes else ""
    return f"{moved_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s{left}"


def wants_bar(asked: bool | None, *, in_background: bool = False) -> bool:
    """Whether a bar is to be drawn here.

    Args:
        asked: What the caller has set: on rank 0 always, never, or where it disturbs nobody.
        in_background: Whether training goes on beside it, whose own output a bar would scramble. Other threads than
            the main one, and daemons, are taken for that.
    """
    if asked is False or _rank() != 0 or sys.stderr is None or sys.stderr.closed:
        return False
    beside = threading.current_thread() is not threading.main_thread() or multiprocessing.current_process().daemon
    return asked is True or (sys.stderr.isatty() and not in_background and not beside)


@contextmanager
def shown(doing: str, where: str, look: Look, store: Callable[[], StoreStats], *, bar: bool) -> Iterator[None]:
    """Show the block's transfer while it runs.

    Args:
        doing: A verb: ``saving``, ``loading``.
        where: The checkpoint.
        look: Called from another thread; must not block.
        store: What the store has gone through since the transfer began.
        bar: Whether to draw a bar.
    """
    if not bar and not _logger.isEnabledFor(logging.INFO):
        yield
        return
    lines = _Lines(doing, where, look, store)
    drawn = _Bar(doing, where) if bar else None

    def look_again() -> None:
        lines.look_again()
        if drawn is not None:
            drawn.draw(*look())

    ending = "ended early"
    try:
        with watching(look_again, every_seconds=_LOOK_EVERY_SECONDS):
            yield
        ending = "moved"
    finally:
        if drawn is not None:
            drawn.close(*look())
        lines.last(ending)


class _Lines:
    """What an operator reads."""

    def __init__(self, doing: str, where: str, look: Look, store: Callable[[], StoreStats]) -> None:
        self._head = f"{where}: {doing} on rank {_rank()}"
        self._look = look
        self._store = store
        self._began_at = time.monotonic()
        self._next_at: float | None = None

    def look_again(self) -> None:
        """Write a line if it is time: at first as soon as it is known how much there is."""
        now, (moved, total) = time.monotonic(), self._look()
        if self._next_at is None:
            if total:
                self._next_at = now + _LINE_EVERY_SECONDS
                _logger.info("%s: %.0f MB", self._head, total / 1e6)
        elif now >= self._next_at:
            self._next_at += _LINE_EVERY_SECONDS
            _logger.info("%s: %s%s", self._head, in_words(moved, total, now - self._began_at), self._troubles())

    def last(self, ending: str) -> None:
        """Write how it ended."""
        seconds, (moved, _) = time.monotonic() - self._began_at, self._look()
        rate = moved / 1e6 / max(seconds, 1e-9)
        _logger.info(
            "%s: %s: %.0f MB in %.1f s, %.0f MB/s%s",
            *(self._head, ending, moved / 1e6, seconds, rate, self._troubles()),
        )

    def _troubles(self) -> str:
        met = str(self._store())
        return f"; {met}" if met else ""


class _Bar:
    """A bar on stderr, from the second on in which it is drawn."""

    def __init__(self, doing: str, where: str) -> None:
        import tqdm  # a fiftieth of a second that only a bar is worth

        class Quiet(tqdm.tqdm):  # type: ignore[type-arg]
            """Without a thread that would look after it: ours does."""

            monitor_interval = 0

        size = shutil.get_terminal_size()
        self._tqdm: Any = Quiet(
            desc=f"{doing} {where if len(where) <= _PLACE_CHARS else '…' + where[1 - _PLACE_CHARS :]}",
            total=0,
            unit="B",
            unit_scale=True,
            delay=_BAR_AFTER_SECONDS,
            mininterval=_LOOK_EVERY_SECONDS / 2,
            miniters=0,  # drawn anew also when nothing moves, or nobody could see that
            # tqdm itself would draw nothing on a terminal that does not know how large it is.
            ncols=size.columns,
            nrows=size.lines,
            file=sys.stderr,
        )

    def draw(self, moved_bytes: int, total_bytes: int) -> None:
        self._guarded(lambda: self._move(moved_bytes, total_bytes))

    def close(self, moved_bytes: int, total_bytes: int) -> None:
        """Draw the end, if it was ever drawn, and leave it there."""
        self.draw(moved_bytes, total_bytes)
        self._guarded(lambda: self._tqdm.close())

    def _move(self, moved_bytes: int, total_bytes: int) -> None:
        self._tqdm.total = total_bytes
        self._tqdm.update(moved_bytes - self._tqdm.n)

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._tqdm is None:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # the terminal is gone
            self._tqdm = None
            _logger.info("no bar any more: %s", error)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
