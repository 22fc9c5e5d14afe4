"""The items of a load plan, short: without an object for each whole tensor, and as plain tuples when they travel."""

import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

__all__ = ["CompactReads", "PlannedReads", "whole_read"]


class PlannedReads(Sequence[ReadItem]):
    """Tensors that are stored whole and wanted whole, by name and size; then the other items.

    ReadItems are made when somebody looks.

    Attributes:
        whole: Name and size of each whole tensor.
        others: The other items.
    """

    def __init__(self, whole: list[tuple[str, torch.Size]], others: "CompactReads") -> None:
        self.whole = whole
        self.others = others
        self._items: list[ReadItem] | None = None

    def __len__(self) -> int:
        return len(self.whole) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        return self._all()[index]

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self._all())

    def _all(self) -> list[ReadItem]:
        if self._items is None:
            self._items = [whole_read(fqn, size) for fqn, size in self.whole]
            self._items += self.others
        return self._items

    def __reduce__(self) -> tuple[Any, ...]:
        plain = [(fqn, tuple(size)) for fqn, size in self.whole]
        return _planned, (zlib.compress(pickle.dumps(plain, protocol=5), 1), self.others)


def _planned(packed: bytes, others: "CompactReads") -> PlannedReads:
    return PlannedReads([(fqn, torch.Size(size)) for fqn, size in pickle.loads(zlib.decompress(packed))], others)


def whole_read(fqn: str, size: torch.Size) -> ReadItem:
    """A tensor that one chunk holds, as a whole."""
    start = torch.Size([0] * len(size))
    index = MetadataIndex(fqn, start, 0)
    return ReadItem(LoadItemType.TENSOR, index, start, index, start, size)


class CompactReads(list[ReadItem]):
    """A list of ReadItems that pickles as plain tuples: a tenth of the bytes and of the time."""

    def __reduce__(self) -> tuple[Any, ...]:
        if any(type(item) is not ReadItem for item in self):
            return list, (list(self),)
        return _reads, (zlib.compress(pickle.dumps([_plain_read(item) for item in self], protocol=5), 1),)


def _plain_read(item: ReadItem) -> tuple[Any, ...]:
    dest, source = item.dest_index, item.storage_index
    names = (dest.fqn, None if dest.offset is None else tuple(dest.offset), dest.index, source.fqn)
    at = (None if source.offset is None else tuple(source.offset), source.index)
    dims = (tuple(item.dest_offsets), tuple(item.storage_offsets), tuple(item.lengths))
    return item.type is LoadItemType.BYTE_IO, names, at, dims


def _reads(packed: bytes) -> list[ReadItem]:
    return [
        ReadItem(
            LoadItemType.BYTE_IO if is_bytes else LoadItemType.TENSOR,
            MetadataIndex(*names[:3]),
            torch.Size(dims[0]),
            MetadataIndex(names[3], *at),
            torch.Size(dims[1]),
            torch.Size(dims[2]),
        )
        for is_bytes, names, at, dims in pickle.loads(zlib.decompress(packed))
    ]
