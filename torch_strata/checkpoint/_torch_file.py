"""A file of torch.save as the content of a checkpoint, nothing of it unpickled unchecked. Imports no torch."""

import io
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch_strata import _native
from torch_strata.checkpoint._content import Content, Piece, Tensor
from torch_strata.checkpoint._dtypes import dtype_named
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._keys import keys_of, noted
from torch_strata.checkpoint._paths import Path, dotted, encode_fqn
from torch_strata.checkpoint._torch_pickle import Storage, TensorRef, dump, load
from torch_strata.checkpoint._torch_zip import TorchZip
from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["flatten", "load_value", "open_torch_file", "save_value"]

_MAGIC = b"PK\x03\x04"
_LOCAL_BYTES = 30
# Local headers are read at a time: each is a small request, and what they wait for is the store's latency.
_AT_ONCE = 16
_READ_AHEAD = 1 << 20
# Twenty times what the largest models have.
_MOST_LEAVES = 10_000_000


class _RangeFile(io.RawIOBase):
    """An object as a file that can be sought in, for zipfile."""

    def __init__(self, store: _native.Store, name: str) -> None:
        self._store, self._name, self.size, self._at = store, name, store.size(name), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self.size)
        if end <= self._at:
            return 0
        data = self._store.read_range(self._name, self._at, end)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Archive:
    """Where the records of a torch.save archive are."""

    def __init__(self, file: Any, where: str) -> None:
        self.where = where
        try:
            self.zip = zipfile.ZipFile(file)
            names = [name for name in self.zip.namelist() if name.endswith("data.pkl") and name.count("/") == 1]
            if len(names) != 1:
                raise CheckpointError(f"{where}: a zip archive, but not one of torch.save")
            self.root = names[0].removesuffix("data.pkl")
            self.data_pkl = self.zip.read(self._stored(names[0]))
            if f"{self.root}byteorder" in self.zip.namelist():
                order = self.zip.read(self._stored(f"{self.root}byteorder"))
                if order != b"little":
                    raise CheckpointError(f"{where}: its byte order is {order!r:.20}; only little endian is read")
        except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
            raise CorruptionError(f"{where}: damaged zip archive: {error!s:.300}") from error

    def record(self, storage: Storage) -> zipfile.ZipInfo:
        """The record of a storage."""
        info = self._stored(f"{self.root}data/{storage.key}")
        if info.file_size < storage.num_bytes:
            found = f"{info.file_size} bytes, {storage.num_bytes} are promised"
            raise CorruptionError(f"{self.where}: the storage {storage.key!r:.100} has {found}")
        return info

    def read(self, storage: Storage) -> bytes:
        """The bytes of a storage, compared with the archive's checksum."""
        try:
            return self.zip.read(self.record(storage))[: storage.num_bytes]
        except (zipfile.BadZipFile, EOFError) as error:
            raise CorruptionError(f"{self.where}: the storage {storage.key!r:.100}: {error!s:.300}") from error

    def _stored(self, name: str) -> zipfile.ZipInfo:
        try:
            info = self.zip.getinfo(name)
        except KeyError:
            raise CorruptionError(f"{self.where}: the archive has no {name!r:.200}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CorruptionError(
                f"{self.where}: {name!r:.200} is compressed or encrypted, which torch.save never does"
            )
        return info


def load_value(data: bytes, where: str) -> Any:
    """A pickled value of a checkpoint, with stand-ins for what is torch's; its storages hold their bytes.

    Raises:
        CheckpointError: If it needs a class that is not known.
        CorruptionError: If it is damaged.
    """
    archive = _Archive(io.BytesIO(data), where)
    value = load(archive.data_pkl, where)
    for storage in {tensor.storage for tensor in _tensors_in(value, where)}:
        object.__setattr__(storage, "source", archive.read(storage))
    return value


def save_value(value: Any) -> bytes:
    """As torch.save writes it; its storages hold their bytes.

    Raises:
        CheckpointError: If it cannot be written for ``weights_only``.
    """
    data_pkl, storages = dump(value)
    out = bytearray()
    archive = TorchZip(out.extend)
    archive.begin(data_pkl)
    for number, storage in enumerate(storages):
        archive.add(f"data/{number}", storage.num_bytes, [storage.source])
    archive.finish()
    return bytes(out)


@gc_paused()
def open_torch_file(store: _native.Store, name: str, where: str) -> Content:
    """The state in a file that torch.save wrote; a tensor is read when it is wanted.

    Raises:
        CheckpointError: If the file needs a class that is not known, or is of torch.save's older format.
        CorruptionError: If it is damaged.
        StorageError: If it cannot be read.
    """
    raw = _RangeFile(store, name)
    if store.read_range(name, 0, min(len(_MAGIC), raw.size)) != _MAGIC:
        raise CheckpointError(f"{where}: not a zip archive, as torch.save writes them since torch 1.6")
    archive = _Archive(io.BufferedReader(raw, _READ_AHEAD), where)
    state = load(archive.data_pkl, where)
    if not isinstance(state, dict):
        kind = "tensor" if isinstance(state, TensorRef) else type(state).__name__
        raise CheckpointError(f"{where} holds a {kind}, not a state_dict, which is a dict: of names and tensors")
    leaves = flatten(state, where)
    leaves |= flatten(noted(keys_of(state)), where)
    found = {fqn: leaf for fqn, (_, leaf) in leaves.items() if isinstance(leaf, TensorRef)}
    starts = _starts(store, name, archive, {leaf.storage for leaf in found.values()})
    native = _native.Checkpoint.plain(store, [_plain(fqn, leaf, name, starts) for fqn, leaf in found.items()])
    firsts = [(0,) if _needs_gather(leaf) else _zeros(leaf) for leaf in found.values()]
    rows, _, _ = native.locate([encode_fqn(fqn) for fqn in found], list(range(len(firsts))), firsts)
    tensors = {fqn: _tensor(fqn, leaf, row) for (fqn, leaf), row in zip(found.items(), rows, strict=True)}
    values: dict[str, int | bytes] = {}
    for fqn, (_, leaf) in leaves.items():
        if fqn not in tensors:
            for inner in _tensors_in(leaf, where):
                object.__setattr__(inner.storage, "source", archive.read(inner.storage))
            values[fqn] = save_value(leaf)
    paths = {fqn: path for fqn, (path, _) in leaves.items()}
    return Content(
        where=where, native=native, tensors=tensors, values=values, order=list(leaves), paths=paths, planner_data=paths
    )


def flatten(state: Mapping[Any, Any], where: str) -> dict[str, tuple[Path, Any]]:
    """Keys with their paths and leaves, as DCP's flatten_state_dict makes them.

    Raises:
        CheckpointError: If two leaves have one key.
        CorruptionError: If it is nested without end.
    """
    leaves: dict[str, tuple[Path, Any]] = {}
    try:
        for path, leaf in _Walk(where).leaves((), state):
            fqn = dotted(path)
            if fqn in leaves:
                raise CheckpointError(f"{where}: two values have the key {fqn!r:.200}")
            leaves[fqn] = path, leaf
    except RecursionError as error:
        raise CorruptionError(f"{where}: the state is nested without end") from error
    return leaves


class _Walk:
    """Through a state whose containers may be shared: by a hostile file so often that no walk would end."""

    def __init__(self, where: str) -> None:
        self._where, self._left = where, _MOST_LEAVES
        self._terminal: dict[int, bool] = {}

    def leaves(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        self._left -= 1
        if self._left < 0:
            raise CorruptionError(f"{self._where}: more than {_MOST_LEAVES} values")
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from self.leaves((*path, str(key)), inner)
        elif isinstance(value, list) and not self._is_terminal(value):
            for index, inner in enumerate(value):
                yield from self.leaves((*path, index), inner)
        else:
            yield path, value

    def _is_terminal(self, value: Any) -> bool:
        """Whether a list is one value: it holds no tensor and no container that is gone through."""
        if not isinstance(value, list):
            return not isinstance(value, dict)
        known = self._terminal.get(id(value))
        if known is None:
            inner = (not isinstance(part, TensorRef) and self._is_terminal(part) for part in value)
            known = self._terminal[id(value)] = all(inner)
        return known


def _tensors_in(value: Any, where: str) -> Iterator[TensorRef]:
    """Every tensor in a value, each container once."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += list(value.values()) if isinstance(value, dict) else list(value)


def _starts(store: _native.Store, name: str, archive: _Archive, storages: set[Storage]) -> dict[Storage, int]:
    """Where the bytes of each storage begin in the file: behind a header whose length only itself says."""
    ordered = sorted(storages, key=lambda storage: archive.record(storage).header_offset)
    # Headers that stand close together are read at once: those of a thousand small tensors.
    runs: list[list[Storage]] = []
    first = -_READ_AHEAD
    for storage in ordered:
        at = archive.record(storage).header_offset
        if at + _LOCAL_BYTES > first + _READ_AHEAD:
            runs.append([])
            first = at
        runs[-1].append(storage)

    def starts_of(run: list[Storage]) -> list[int]:
        places = [archive.record(storage).header_offset for storage in run]
        data = store.read_range(name, places[0], places[-1] + _LOCAL_BYTES)
        return [
            place + _header_bytes(archive, data[place - places[0] : place - places[0] + _LOCAL_BYTES])
            for place in places
        ]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [start for starts in pool.map(starts_of, runs) for start in starts]
    return dict(zip(ordered, found, strict=True))


def _header_bytes(archive: _Archive, header: bytes) -> int:
    if header[:4] != _MAGIC:
        raise CorruptionError(f"{archive.where}: no header of a storage where one should be")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return _LOCAL_BYTES + lengths


def _plain(fqn: str, leaf: TensorRef, name: str, starts: Mapping[Storage, int]) -> tuple[Any, ...]:
    item = dtype_named(leaf.dtype).num_bytes
    shape = (leaf.span,) if _needs_gather(leaf) else leaf.shape
    return encode_fqn(fqn), name, starts[leaf.storage] + leaf.offset * item, leaf.span * item, leaf.dtype, shape


def _needs_gather(leaf: TensorRef) -> bool:
    return not leaf.is_contiguous


def _zeros(leaf: TensorRef) -> tuple[int, ...]:
    return (0,) * len(leaf.shape)


def _tensor(fqn: str, leaf: TensorRef, row: int) -> Tensor:
    first = _zeros(leaf)
    entry = (
        *(encode_fqn(fqn), True, leaf.dtype, leaf.shape, None, leaf.requires_grad, False, 0, "strided"),
        [first],
        [leaf.shape],
    )
    gathered = leaf.strides if _needs_gather(leaf) else None
    piece = Piece(row=row, offsets=first, shape=leaf.shape, strides=leaf.strides, gathered=gathered)
    return Tensor(fqn=fqn, entry=entry, dtype=leaf.dtype, shape=leaf.shape, pieces=(piece,))
