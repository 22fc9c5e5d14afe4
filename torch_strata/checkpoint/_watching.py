"""Looks now and then at what goes on. Imports no torch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["watching"]


@contextmanager
def watching(look: Callable[[], object], *, every_seconds: float) -> Iterator[None]:
    """Call `look` while the block runs, from a thread of its own: the one that saves or loads waits in Rust."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_seconds):
            look()

    thread = threading.Thread(target=watch, name="strata-progress")
    try:
        thread.start()  # where Ctrl-C may come, after which nobody else would end it
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join()
