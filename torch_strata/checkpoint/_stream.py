"""An object of a store, written from its first byte to its last in bounded memory. Imports no torch."""

import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch_strata import _native
from torch_strata.errors import CheckpointError, CheckpointExistsError, StorageError

__all__ = ["ObjectStream"]


class ObjectStream:
    """Takes bytes in order and sends them part by part, one while the next is filled; it gets its name last.

    A local file has its full size as soon as it is begun: until it is whole it is called ``.NAME.….partial``. Object
    stores show nothing before.

    Args:
        store: Where.
        name: The object's, new there.
        size: In bytes.
        folder: The store's path, if it is in the local file system.
    """

    def __init__(self, store: _native.Store, name: str, size: int, folder: str | None) -> None:
        self._name, self._size, self._written = name, size, 0
        self._folder = folder
        self._begun = name if folder is None else f".{name}.{uuid.uuid4().hex}.partial"
        self._upload = store.create(self._begun, size)
        self._part = bytearray()
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
            CheckpointExistsError: If somebody else has made a file of that name meanwhile.
            StorageError: If the store fails.
        """
        if self._written != self._size:
            raise CheckpointError(f"{self._name}: {self._size} bytes were promised, {self._written} came")
        if self._part:
            self._send()
        self._settle()
        self._pool.shutdown()
        self._upload.finish()
        if self._folder is not None:
            self._publish(self._folder)

    def abort(self) -> None:
        """Remove what was written."""
        self._pool.shutdown()
        self._upload.abort()

    def _send(self) -> None:
        self._settle()
        self._sending = self._pool.submit(self._upload.write_part, self._index, self._part)
        self._index += 1
        self._part = bytearray()

    def _settle(self) -> None:
        if self._sending is not None:
            self._sending.result()

    def _publish(self, folder: str) -> None:
        begun, place = os.path.join(folder, self._begun), os.path.join(folder, self._name)
        try:
            try:
                os.link(begun, place)  # unlike a rename it replaces nothing
            except FileExistsError:
                raise CheckpointExistsError(f"{place} already exists") from None
            except OSError:  # a file system without links
                os.rename(begun, place)
            else:
                os.unlink(begun)
            _sync(folder)
        except OSError as error:
            with suppress(OSError):
                os.unlink(begun)
            if isinstance(error, CheckpointExistsError):
                raise
            raise StorageError(f"naming {place}: {error}") from error


def _sync(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
