"""What the collector and the allocator do with memory, where there is much of it. Imports no torch."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "give_back_memory"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic collection within; also a decorator.

    The indices of a large checkpoint are millions of tuples in no cycle, and a collection visits them all again and
    again: it was 90 % of the time to open 500,000 items (``benchmarks/checkpoint.py manifest``).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def give_back_memory() -> None:
    """Let the system have what is free, where the C library is glibc.

    It keeps what arrays of some megabytes have left, between others that live on: 60 MB after the plans of 256 ranks
    (``benchmarks/planning.py``), on top of which a commit takes what it needs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
