"""The physical limit on a local disk: the same bytes, moved by nothing but system calls on threads.

Every way writes the same layout, so any way of reading can follow any way of writing. A tensor's bytes go straight
from its memory; only what cannot be aligned (heads, tails and tensors under 64 KiB) is gathered in a bounce buffer
that is kept, and follows at the end of the file. The layout carries no index: nothing but this module can read it.
"""

import ctypes
import mmap
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# What O_DIRECT asks of offset, length and address on common block devices (statx, STATX_DIOALIGN).
ALIGN = 512
# One system call moves this much: large enough to hide its cost, small enough to spread over threads.
PIECE_BYTES = 16 << 20
SMALL_BYTES = 64 << 10
NUM_FILES = 4

_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the system calls are made. `num_threads` is at most NUM_FILES: a file has one thread at a time."""

    num_threads: int
    direct: bool = False
    fallocate: bool = False
    start_writeback: bool = False

    def __str__(self) -> str:
        marks = [(self.fallocate, "fallocate"), (self.start_writeback, "sync_file_range")]
        words = ["O_DIRECT" if self.direct else "buffered", *(name for on, name in marks if on)]
        return f"{' + '.join(words)}, {self.num_threads} thr"


WRITE_WAYS = (
    *(Way(num_threads=n) for n in (1, 2, 4)),
    Way(num_threads=2, fallocate=True),
    Way(num_threads=4, fallocate=True),
    Way(num_threads=2, start_writeback=True),
    Way(num_threads=4, direct=True),
    Way(num_threads=4, direct=True, fallocate=True),
)
WARM_READ_WAYS = tuple(Way(num_threads=n) for n in (1, 2, 4))
COLD_READ_WAYS = (*WARM_READ_WAYS, Way(num_threads=2, direct=True), Way(num_threads=4, direct=True))


class _File:
    """The part of the bytes that one file holds: aligned pieces in place, then one bounce."""

    def __init__(self, views: list[memoryview]) -> None:
        self.pieces: list[memoryview] = []
        self.scattered: list[memoryview] = []
        for view in views:
            self._add(view)
        num_bytes = sum(map(len, self.scattered))
        self.pieces_bytes = sum(map(len, self.pieces))
        # Anonymous maps are page-aligned; written once here, so that no timed run pays for fresh pages.
        self.bounce = memoryview(mmap.mmap(-1, max(ALIGN, -(-num_bytes // ALIGN) * ALIGN)))
        self.bounce[:] = bytes(len(self.bounce))
        self.total_bytes = self.pieces_bytes + len(self.bounce)

    def _add(self, view: memoryview) -> None:
        if len(view) < SMALL_BYTES:
            self.scattered.append(view)
            return
        head = -_address(view) % ALIGN
        end = head + (len(view) - head) // ALIGN * ALIGN
        self.scattered += [part for part in (view[:head], view[end:]) if part]
        self.pieces += [view[at : min(at + PIECE_BYTES, end)] for at in range(head, end, PIECE_BYTES)]

    def write(self, path: Path, way: Way) -> None:
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | (os.O_DIRECT if way.direct else 0), 0o644)
        try:
            if way.fallocate:
                os.posix_fallocate(fd, 0, self.total_bytes)
            at = 0
            for piece in self.pieces:
                _whole(os.pwrite(fd, piece, at), len(piece))
                if way.start_writeback:
                    _start_writeback(fd, at, len(piece))
                at += len(piece)
            self._gather()
            _whole(os.pwrite(fd, self.bounce, at), len(self.bounce))
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, way: Way) -> None:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way.direct else 0))
        try:
            at = 0
            for piece in self.pieces:
                _whole(os.preadv(fd, [piece], at), len(piece))
                at += len(piece)
            _whole(os.preadv(fd, [self.bounce], at), len(self.bounce))
        finally:
            os.close(fd)
        self._scatter()

    def _gather(self) -> None:
        at = 0
        for part in self.scattered:
            self.bounce[at : at + len(part)] = part
            at += len(part)

    def _scatter(self) -> None:
        at = 0
        for part in self.scattered:
            part[:] = self.bounce[at : at + len(part)]
            at += len(part)


class RawFiles:
    """`views`, spread evenly over NUM_FILES files. The views must stay alive and in place."""

    def __init__(self, views: list[memoryview]) -> None:
        bins: list[list[memoryview]] = [[] for _ in range(NUM_FILES)]
        loads = [0] * NUM_FILES
        for view in sorted(views, key=len, reverse=True):
            lightest = loads.index(min(loads))
            bins[lightest].append(view)
            loads[lightest] += len(view)
        self._files = [_File(part) for part in bins]

    def save(self, directory: Path, way: Way) -> None:
        """Write and fsync every file, then the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self._run(directory, way, _File.write)
        fd = os.open(directory, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self, directory: Path, way: Way) -> None:
        """Read every file back into the views."""
        self._run(directory, way, _File.read)

    def _run(self, directory: Path, way: Way, action: Callable[[_File, Path, Way], None]) -> None:
        run_threads(
            [partial(action, file, directory / f"raw.{number}", way) for number, file in enumerate(self._files)],
            num_threads=way.num_threads,
        )


def run_threads(tasks: Sequence[Callable[[], None]], *, num_threads: int) -> None:
    """Run `tasks` in order on `num_threads` threads; the first exception rises when all have ended."""
    pending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for task in tasks:
        pending.put(task)

    def drain() -> None:
        while True:
            try:
                task = pending.get_nowait()
            except queue.Empty:
                return
            task()

    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(drain) for _ in range(num_threads)]:
            future.result()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _whole(moved: int, wanted: int) -> None:
    """A regular file moves short only when the disk is full or the file was cut: neither is worth a figure."""
    if moved != wanted:
        raise OSError(f"short transfer: expected {wanted} bytes, moved {moved}")


def _start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    status = _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)
    if status != 0:
        raise OSError(ctypes.get_errno(), "sync_file_range failed")
