"""The part of `torch_strata._native` that is about memory. For type checkers: there is no such module to import."""

from collections.abc import Sequence
from typing import Any, final

__all__ = ["Copy", "PageLock", "memory_file", "populate", "release_ended", "start_copy"]

def memory_file(bytes: int) -> int | None:
    """Descriptor of a new file without a name that is memory, zeroed; None where the system has no such files.

    Raises:
        OSError: If the system does not promise that much memory.
    """

def populate(address: int, bytes: int, owner: Any) -> None:
    """Make whole pages of memory present, which is far faster than page by page when they are first written."""

def release_ended() -> None:
    """Let go of objects whose memory was lent to operations that have ended since."""

@final
class PageLock:
    """Pages of the host that stay in memory, so that GPUs copy to them at full speed, until `release`."""

    def __new__(cls, ordinal: int, address: int, bytes: int, owner: Any) -> PageLock:
        """`ordinal`: a CUDA device, the lock serves all of them. `owner`: what keeps the memory alive.

        Raises:
            CheckpointError: If there is no driver.
        """
    @property
    def is_locked(self) -> bool:
        """False where the system refused."""
    def release(self) -> None: ...

@final
class Copy:
    """Copies that run."""

    def wait(self) -> None:
        """Wait until all have ended; may be called on any thread and again.

        Raises:
            CheckpointError: If a device failed; the targets then hold anything.
        """

def start_copy(pieces: Sequence[tuple[int, int, int, int]], owner: Any) -> Copy:
    """Begin to copy to memory of the host: `(device, source, bytes, target)`, the device -1 for the host.

    Uses all cores and does not block. `owner`: what keeps sources and targets alive, until the copies have ended;
    nobody may write to a source or use a target before.
    """
