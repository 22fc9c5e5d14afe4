"""The items of a save plan as a struct of arrays: built from a state, packed for the way to another rank, read back.

A rank's WriteItems are six small objects each; pickled they are 50 times as long, and unpickling them is what a
planning rank spends its time on.
"""

import dataclasses
import functools
import hashlib
import pickle
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = [
    "BYTES",
    "SHARD",
    "TENSOR",
    "Builder",
    "Columns",
    "Ints",
    "Shared",
    "Template",
    "forget_unpacked",
    "pack_ints",
    "padded",
    "unpack",
    "unpack_ints",
]

Ints = npt.NDArray[np.int64]

# What an item is: the index into WriteItemType's members.
TENSOR, SHARD, BYTES = 0, 1, 2
_TYPES = (WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO)
_CODES = {member: code for code, member in enumerate(_TYPES)}

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)

_WIDTHS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64)

# torch 2.14 and older record none.
_RECORDS_STRIDES = any(field.name == "strides" for field in dataclasses.fields(TensorProperties))


@dataclass(frozen=True)
class Template:
    """What many items have in common.

    Attributes:
        dtype: The dtype.
        layout: The layout.
        requires_grad: torch's deprecated property.
        memory_format: torch's deprecated property, by its place in DCP's numbering.
        pin_memory: torch's deprecated property.
        has_strides: Whether strides are known.
        is_divisible: Whether the rows of a chunk can be taken apart and written by several ranks.
    """

    dtype: torch.dtype
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: int = 0
    pin_memory: bool = False
    has_strides: bool = True
    is_divisible: bool = False

    def properties(self, strides: tuple[int, ...]) -> TensorProperties:
        """DCP's form of it."""
        found = TensorProperties(
            self.dtype, self.layout, self.requires_grad, _MEMORY_FORMATS[self.memory_format], self.pin_memory
        )
        if _RECORDS_STRIDES and self.has_strides:
            found.strides = strides
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # A layout cannot be pickled by itself.
        fields = (str(self.layout), self.requires_grad, self.memory_format, self.pin_memory, self.has_strides)
        return _template, (str(self.dtype), *fields, self.is_divisible)


def _template(dtype: str, layout: str, *rest: Any) -> Template:
    return Template(getattr(torch, dtype.removeprefix("torch.")), getattr(torch, layout.removeprefix("torch.")), *rest)


@dataclass(frozen=True, eq=False)
class Shared:
    """What ranks that hold shards of the same tensors have in common: unpacked once for all of them."""

    names: tuple[str, ...]
    kinds: Ints
    ndims: Ints
    templates: Ints
    table: tuple[Template, ...]
    sizes: Ints


@dataclass(frozen=True, eq=False)
class Columns:
    """Items of one rank, in the order of its plan.

    Attributes:
        shared: Names, kinds (`TENSOR`, `SHARD`, `BYTES`), dims, templates and whole sizes; see `Shared`.
        hints: DCP's index hint of each item, -1 for none; shape ``(items,)``.
        offsets: First element of each item's chunk in the whole tensor, dims of all items one after the other.
        lengths: Shape of each chunk, likewise.
        strides: Strides of the tensor that holds the chunk, likewise; 0 where not known.
    """

    shared: Shared
    hints: Ints
    offsets: Ints
    lengths: Ints
    strides: Ints

    def __len__(self) -> int:
        return len(self.shared.names)

    @functools.cached_property
    def first_dims(self) -> list[int]:
        """Where each item's dims begin."""
        ends = np.cumsum(self.shared.ndims)
        return [0, *ends.tolist()]

    @functools.cached_property
    def nbytes(self) -> Ints:
        """Bytes of each chunk; 0 for a pickled value."""
        shared = self.shared
        itemsizes = np.array([t.dtype.itemsize for t in shared.table] + [0], dtype=np.int64)
        numels = padded(self.lengths, shared.ndims, fill=1).prod(axis=1)
        found: Ints = numels * itemsizes[shared.templates]
        return found

    def item(self, row: int) -> WriteItem:
        """The WriteItem of one row."""
        shared, begin, end = self.shared, self.first_dims[row], self.first_dims[row + 1]
        hint = int(self.hints[row])
        return _write_item(
            (shared.names[row], int(shared.kinds[row]), hint),
            shared.table[shared.templates[row]] if shared.table else None,
            tuple(self.offsets[begin:end].tolist()),
            tuple(self.lengths[begin:end].tolist()),
            tuple(shared.sizes[begin:end].tolist()),
            tuple(self.strides[begin:end].tolist()),
        )

    def items(self) -> list[WriteItem]:
        """All WriteItems."""
        shared, first = self.shared, self.first_dims
        heads = zip(shared.names, shared.kinds.tolist(), self.hints.tolist(), strict=True)
        dims = [column.tolist() for column in (self.offsets, self.lengths, shared.sizes, self.strides)]
        table = [*shared.table, None]
        return [
            _write_item(head, table[template], *[tuple(column[begin:end]) for column in dims])
            for head, template, begin, end in zip(heads, shared.templates.tolist(), first[:-1], first[1:], strict=True)
        ]

    def taken(
        self, rows: Ints, hints: Ints, shards: npt.NDArray[np.bool_], pieces: "dict[int, tuple[int, int]]"
    ) -> "Columns":
        """Some of the items, with other hints.

        Args:
            rows: Which items; shape ``(n,)``.
            hints: Their new hints; shape ``(n,)``.
            shards: Which of them are chunks of several from now on; shape ``(n,)``.
            pieces: For the places in `rows` where only a part of the chunk is meant: its first row, and its rows.
        """
        shared = self.shared
        ndims = shared.ndims[rows]
        first = np.array(self.first_dims, dtype=np.int64)[rows]
        begins = np.cumsum(ndims) - ndims
        dims = np.repeat(first - begins, ndims) + np.arange(int(ndims.sum()), dtype=np.int64)
        offsets, lengths = self.offsets[dims], self.lengths[dims]
        for place, (row, count) in pieces.items():
            offsets[begins[place]] += row
            lengths[begins[place]] = count
        names = tuple(map(shared.names.__getitem__, rows.tolist()))
        kinds = np.where(shards, SHARD, shared.kinds[rows])
        chosen = Shared(names, kinds, ndims, shared.templates[rows], shared.table, shared.sizes[dims])
        return Columns(chosen, hints, offsets, lengths, self.strides[dims])

    @functools.cached_property
    def packed(self) -> tuple[bytes, bytes]:
        """Compressed bytes for `unpack`: what other ranks are likely to send too, and what is this rank's own."""
        return _compressed(self._raw[0]), _compressed(self._raw[1])

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that differ where any item does."""
        state = hashlib.blake2b(digest_size=16)
        for part in self._raw:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    @functools.cached_property
    def _raw(self) -> tuple[bytes, bytes]:
        shared = self.shared
        table = [template.__reduce__()[1] for template in shared.table]
        numbers = _slim(shared.kinds, shared.ndims, shared.templates, shared.sizes)
        common = pickle.dumps((list(shared.names), table, numbers), protocol=5)
        return common, pickle.dumps(_slim(self.hints, self.offsets, self.lengths, self.strides), protocol=5)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, self.packed


def unpack(common: bytes, own: bytes) -> Columns:
    """The columns that were packed into these two."""
    return Columns(_unpack_shared(common), *unpack_ints(own))


# Ranks of a pipeline's stages differ; those of one stage do not.
@functools.lru_cache(maxsize=64)
def _unpack_shared(common: bytes) -> Shared:
    names, table, numbers = pickle.loads(zlib.decompress(common))
    kinds, ndims, templates, sizes = _widened(numbers)
    return Shared(tuple(names), kinds, ndims, templates, tuple(_template(*fields) for fields in table), sizes)


def forget_unpacked() -> None:
    """Let go of what was kept for the other ranks of an exchange."""
    _unpack_shared.cache_clear()
    _compressed.cache_clear()


@functools.lru_cache(maxsize=8)  # an unchanged state's bytes are the same at each save
def _compressed(raw: bytes) -> bytes:
    return zlib.compress(raw, 1)


def pack_ints(*columns: Ints) -> bytes:
    """Compressed bytes for `unpack_ints`."""
    return zlib.compress(pickle.dumps(_slim(*columns), protocol=5), 1)


def unpack_ints(packed: bytes) -> list[Ints]:
    """The columns that were packed."""
    return _widened(pickle.loads(zlib.decompress(packed)))


def _slim(*columns: Ints) -> list[tuple[str, bytes]]:
    """Numbers in the narrowest type that holds them all."""
    slim = []
    for values in columns:
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        fits = (kind for kind in _WIDTHS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        kind = np.dtype(next(fits))
        slim.append((kind.str, values.astype(kind).tobytes()))
    return slim


def _widened(slim: Iterable[tuple[str, bytes]]) -> list[Ints]:
    return [np.frombuffer(data, dtype=kind).astype(np.int64) for kind, data in slim]


def padded(flat: Ints, ndims: Ints, *, fill: int, num_dims: int | None = None) -> Ints:
    """Dims of all items, one after the other, as a matrix; shape ``(items, num_dims or the most dims)``."""
    if num_dims is None:
        num_dims = int(ndims.max(initial=0))
    matrix = np.full((len(ndims), num_dims), fill, dtype=np.int64)
    matrix[np.arange(num_dims) < ndims[:, None]] = flat
    return matrix


def _write_item(
    head: tuple[str, int, int],
    template: Template | None,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> WriteItem:
    fqn, kind, hint = head
    index = None if hint < 0 else hint
    if kind == BYTES or template is None:
        return WriteItem(MetadataIndex(fqn, None, index), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
    data = TensorWriteData(chunk, template.properties(strides), torch.Size(sizes))
    return WriteItem(MetadataIndex(fqn, offsets, index), _TYPES[kind], tensor_data=data)


class Builder:
    """Collects items; `columns` makes arrays of them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._heads: list[tuple[int, int, int, int]] = []  # kind, dims, template, hint
        self._sizes: list[int] = []
        self._strides: list[int] = []
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add_bytes(self, fqn: str, hint: int = -1) -> None:
        """A pickled value."""
        self._names.append(fqn)
        self._heads.append((BYTES, 0, -1, hint))

    def add_tensor(
        self,
        fqn: str,
        kind: int,
        template: tuple[Any, ...],
        sizes: Iterable[int],
        strides: Iterable[int],
        offsets: Iterable[int],
        lengths: tuple[int, ...],
        hint: int = -1,
    ) -> None:
        """A chunk; `template` holds the arguments of `Template`."""
        number = self._numbers.setdefault(template, len(self._numbers))
        self._names.append(fqn)
        self._heads.append((kind, len(lengths), number, hint))
        self._sizes.extend(sizes)
        self._strides.extend(strides)
        self._offsets.extend(offsets)
        self._lengths.extend(lengths)

    def add_item(self, item: WriteItem) -> bool:
        """A WriteItem as a planner made it; false if it says what no column holds."""
        index, data = item.index, item.tensor_data
        hint = -1 if index.index is None else index.index
        if type(item) is not WriteItem or type(index.fqn) is not str or item.bytes_io_data is not None or hint < -1:
            return False
        if data is None:
            if item.type is not WriteItemType.BYTE_IO or index.offset is not None:
                return False
            self.add_bytes(index.fqn, hint)
            return True
        chunk, properties = data.chunk, data.properties
        strides = getattr(properties, "strides", None)
        dims = {len(chunk.offsets), len(chunk.sizes), len(data.size), len(data.size if strides is None else strides)}
        if len(dims) != 1 or index.offset != chunk.offsets or item.type is WriteItemType.BYTE_IO:
            return False
        template = (
            *(properties.dtype, properties.layout, properties.requires_grad),
            *(_MEMORY_FORMATS.index(properties.memory_format), properties.pin_memory, strides is not None),
        )
        known = [0] * len(data.size) if strides is None else strides
        args = (data.size, known, chunk.offsets, tuple(chunk.sizes), hint)
        self.add_tensor(index.fqn, _CODES[item.type], template, *args)
        return True

    def columns(self) -> Columns:
        """What was added."""
        heads = np.array(self._heads, dtype=np.int64).reshape(-1, 4)
        kinds, ndims, templates, hints = heads.T.copy()
        sizes, strides, offsets, lengths = (
            np.array(dims, dtype=np.int64) for dims in (self._sizes, self._strides, self._offsets, self._lengths)
        )
        table = tuple(Template(*fields) for fields in self._numbers)
        shared = Shared(tuple(self._names), kinds, ndims, templates, table, sizes)
        return Columns(shared, hints, offsets, lengths, strides)
