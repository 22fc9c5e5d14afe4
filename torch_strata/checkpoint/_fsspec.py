"""fsspec's view of our object stores: ``strata+s3://``, ``strata+gs://`` and the like, found through entry points.

For what only knows fsspec: torch's FsspecWriter and FsspecReader, torchtitan's search for the newest step. A file that
is written appears whole when it is closed, or not at all. Imports no torch; for local files fsspec has its own.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from torch_strata import _native
from torch_strata._store import open_store, resolve_config
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError, ObjectNotFoundError

__all__ = ["PLAIN", "StrataFileSystem", "set_default_config"]

_logger = logging.getLogger(__name__)

# What is being written is kept in memory up to this size, then in a temporary file: the store wants to know an object's
# size before its first part.
_SPOOL_BYTES = 64 << 20

_default: StorageConfig | None = None


def set_default_config(config: StorageConfig | None) -> None:
    """Settings for every file system here that was made without any; None for those of the environment."""
    global _default
    _default = config


def _only_missing(error: Exception) -> None:
    """Leave out a folder that is not there, and nothing else: or a run would begin anew because a store was down."""
    if not isinstance(error, FileNotFoundError):
        raise error


class StrataFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in an object store; a folder is there as long as a file is in it.

    Args:
        storage_options: The store's own settings, as StorageConfig takes them.

    Raises:
        ConfigError: If an option is unknown, at the first use.
    """

    scheme: ClassVar[str]
    root_marker = ""

    def __init__(self, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._stores: dict[tuple[str, StorageConfig], _native.Store] = {}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name, size in bytes (0 for a folder) and type.

        Raises:
            FileNotFoundError: If neither a file nor a folder is there.
        """
        path = self._strip_protocol(path)
        store, key = self._at(path)
        if key:
            try:
                return _file(path, store.size(key))
            except ObjectNotFoundError:
                if not self._entries(path):
                    raise FileNotFoundError(path) from None
        return _folder(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is in a folder, or the one file at `path`.

        Raises:
            FileNotFoundError: If neither is there.
        """
        path = self._strip_protocol(path)
        found = self._entries(path)
        if not found and "/" in path:
            found = [self.info(path)]
        return found if detail else [entry["name"] for entry in found]

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[Exception], None] = _only_missing,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Folders, and what is in them, as fsspec has it.

        Raises:
            StorageError: If a folder cannot be listed; one that is not there is left out.
        """
        yield from super().walk(path, maxdepth, topdown, on_error, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a file or folder is there.

        Raises:
            StorageError: If the store cannot tell.
        """
        return self._kind(path) is not None

    def isfile(self, path: str) -> bool:
        """Whether a file is there; raises as `exists`."""
        return self._kind(path) == "file"

    def isdir(self, path: str) -> bool:
        """Whether a folder is there; raises as `exists`."""
        return self._kind(path) == "directory"

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing: folders come with their first file."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: folders come with their first file."""

    def rmdir(self, path: str) -> None:
        """Nothing: folders go with their last file."""

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, through this process; of a folder there is nothing to copy."""
        if self.isdir(path1):
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, _ReadFile.DEFAULT_BLOCK_SIZE)

    def _rm(self, path: str) -> None:
        store, key = self._at(self._strip_protocol(path))
        store.delete(key)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> AbstractBufferedFile:
        kinds: Mapping[str, type[AbstractBufferedFile]] = {"rb": _ReadFile, "wb": _WriteFile}
        if mode not in kinds:
            raise ConfigError(f"{path}: expected the mode 'rb' or 'wb', found {mode!r}")
        return kinds[mode](self, path, mode, **kwargs)

    def _kind(self, path: str) -> str | None:
        try:
            return self.info(path)["type"]  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def _entries(self, path: str) -> list[dict[str, Any]]:
        store, key = self._at(path)
        root = path.partition("/")[0]
        prefix = f"{key}/" if key else ""
        files = [_file(f"{root}/{name}", size) for name, size in store.list(prefix)]
        return files + [_folder(f"{root}/{name}") for name in store.list_folders(prefix)]

    def _at(self, path: str) -> tuple[_native.Store, str]:
        root, _, key = path.partition("/")
        if not root:
            raise ConfigError(f"{self.scheme}://: expected a bucket or container, then a path")
        config = resolve_config(_default, self.storage_options)
        if (root, config) not in self._stores:
            self._stores[root, config] = open_store(f"{self.scheme}://{root}", config)
        return self._stores[root, config], key


def _file(path: str, size: int) -> dict[str, Any]:
    return {"name": path, "size": size, "type": "file"}


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


class _ReadFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file at any position; each read beyond what is cached is one ranged request."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        store, key = self.fs._at(self.path)
        return store.read_range(key, start, end)  # type: ignore[no-any-return]


class _WriteFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file in the making; nothing is at the store before it is closed."""

    # Where fsspec would close it, and what is half written would look like a whole file:

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.close()
            return
        self.discard()
        self.closed = True

    def __del__(self) -> None:
        if not self.closed and self.autocommit:
            self.discard()
            self.closed = True
            _logger.warning("%s: not written, because it was never closed", self.path)

    def _initiate_upload(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115  # closed by commit or discard

    def _upload_chunk(self, final: bool = False) -> bool:
        self._spool.write(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Send the file; it is there, whole, when this returns."""
        size = self._spool.tell()
        self._spool.seek(0)
        store, key = self.fs._at(self.path)
        with self._spool as spool:
            upload = store.create(key, size)
            try:
                for index in range(-(-size // upload.part_bytes)):
                    upload.write_part(index, spool.read(upload.part_bytes))
            except BaseException:
                upload.abort()
                raise
            upload.finish()

    def discard(self) -> None:
        """Forget the file; nothing of it has been sent."""
        if self.offset is not None:
            self._spool.close()


class S3FileSystem(StrataFileSystem):
    """``strata+s3://bucket/path``."""

    scheme, protocol = "s3", ("strata+s3", "s3")


class S3AFileSystem(StrataFileSystem):
    """``s3a://bucket/path``, as Hadoop writes it."""

    scheme, protocol = "s3a", ("strata+s3a", "s3a")


class GSFileSystem(StrataFileSystem):
    """``strata+gs://bucket/path``."""

    scheme, protocol = "gs", ("strata+gs", "gs")


class AzureFileSystem(StrataFileSystem):
    """``strata+az://container/path``."""

    scheme, protocol = "az", ("strata+az", "az")


class ABFSFileSystem(StrataFileSystem):
    """``strata+abfs://container@account.dfs.core.windows.net/path``."""

    scheme, protocol = "abfs", ("strata+abfs", "abfs")


class ABFSSFileSystem(StrataFileSystem):
    """``strata+abfss://container@account.dfs.core.windows.net/path``."""

    scheme, protocol = "abfss", ("strata+abfss", "abfss")


# By the scheme that others own, too: registered only inside install().
PLAIN: Mapping[str, type[StrataFileSystem]] = {
    kind.scheme: kind
    for kind in (S3FileSystem, S3AFileSystem, GSFileSystem, AzureFileSystem, ABFSFileSystem, ABFSSFileSystem)
}
