"""An object of a store, written from its first byte to its last in bounded memory. Imports no torch."""

from collections.abc import Callable
from typing import Any

from torch_strata import _native
from torch_strata.errors import CheckpointError

__all__ = ["ObjectStream"]


class ObjectStream:
    """Takes bytes in order and sends them part by part; the object's beginning goes last.

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
        self._first: bytes | None = None
        self._index = 0

    def write(self, data: Any, done: Callable[[int], None] | None = None) -> None:
        """Take more bytes. Blocks while parts are sent."""
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
        """
        if self._written != self._size:
            raise CheckpointError(f"{self._name}: {self._size} bytes were promised, {self._written} came")
        if self._part:
            self._send()
        if self._first is not None:
            self._upload.write_part(0, self._first)
        self._upload.finish()

    def abort(self) -> None:
        """Remove what was written."""
        self._upload.abort()

    def _send(self) -> None:
        data = bytes(self._part)
        if self._index == 0:
            self._first = data
        else:
            self._upload.write_part(self._index, data)
        self._index += 1
        self._part = bytearray()
