"""An object of a store, written from its first byte to its last in bounded memory. Imports no torch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch_strata import _native
from torch_strata.errors import CheckpointError

__all__ = ["ObjectStream"]


class ObjectStream:
    """Takes bytes in order and sends them part by part, one while the next is filled; the beginning goes last.

    A local file has its full size as soon as it is begun: without its first bytes nobody takes it for a whole one.

    Args:
        store: Where.
        name: The object's, new there.
        size: In bytes.
    """

    def __init__(self, store: _native.Store, name: str, size: int) -> None:
        self._name, self._size, self._written = name, size, 0
        self._upload = store.create(name, size)
        self._part = bytearray()
        self._first: bytearray | None = None
        self._index = 0
        self._pool = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None

    def write(self, data: Any, done: Callable[[int], object] | None = None) -> None:
        """Take more bytes. Blocks while the part before the last is sent.

        Raises:
            StorageError: If the store fails, now or at the part before.
        """
        view = memoryview(data).cast("B")
        while view:
            taken = view[: self._upload.part_bytes - len(self._part)]
            self._part += taken
            view = view[len(taken) :]
            self._written += len(taken)
            if len(self._part) == self._upload.part_bytes:
                self._send()
            if done is not None:
                done(len(taken))

    def finish(self) -> None:
        """Make it durable and visible.

        Raises:
            CheckpointError: If it did not get as many bytes as promised.
            StorageError: If the store fails.
        """
        if self._written != self._size:
            raise CheckpointError(f"{self._name}: {self._size} bytes were promised, {self._written} came")
        if self._part:
            self._send()
        self._settle()
        self._pool.shutdown()
        if self._first is not None:
            self._upload.write_part(0, self._first)
        self._upload.finish()

    def abort(self) -> None:
        """Remove what was written."""
        self._pool.shutdown()
        self._upload.abort()

    def _send(self) -> None:
        self._settle()
        if self._index == 0:
            self._first = self._part
        else:
            self._sending = self._pool.submit(self._upload.write_part, self._index, self._part)
        self._index += 1
        self._part = bytearray()

    def _settle(self) -> None:
        if self._sending is not None:
            self._sending.result()
