"""Keeps the cyclic collector out of the way while many small objects are made. Imports no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


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
