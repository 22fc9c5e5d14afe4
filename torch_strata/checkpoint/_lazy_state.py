"""A checkpoint's `state_dict_metadata` as arrays, whose objects are made when somebody looks at them."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from torch_strata.checkpoint._columns import Columns, Ints, Template, pack_ints, unpack_ints

__all__ = ["Chunks", "LazyState", "PlannedMetadata"]

Stored = TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, eq=False)
class Chunks:
    """All chunks of a checkpoint, ordered by tensor.

    Attributes:
        columns: One item for each name, which describes it; the chunk in it does not matter.
        first: Where each name's chunks begin, and the end of the last; shape ``(names + 1,)``.
        begin: Where each chunk's dims begin; shape ``(chunks + 1,)``.
        offsets: First element of each chunk, dims of all chunks one after the other.
        lengths: Their shapes, likewise.
    """

    columns: Columns
    first: Ints
    begin: Ints
    offsets: Ints
    lengths: Ints

    def of(self, row: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Offsets and shapes of one name's chunks."""
        bounds = self.begin[self.first[row] : self.first[row + 1] + 1].tolist()
        start = bounds[0]
        offsets = self.offsets[start : bounds[-1]].tolist()
        lengths = self.lengths[start : bounds[-1]].tolist()
        spans = [slice(a - start, b - start) for a, b in pairwise(bounds)]
        return [tuple(offsets[span]) for span in spans], [tuple(lengths[span]) for span in spans]

    def described(self, row: int) -> tuple[Template, tuple[int, ...], tuple[int, ...]] | None:
        """Template, size and strides of one name; None for a pickled value."""
        shared = self.columns.shared
        template = int(shared.templates[row])
        if template < 0:
            return None
        dims = slice(self.columns.first_dims[row], self.columns.first_dims[row + 1])
        return shared.table[template], tuple(shared.sizes[dims].tolist()), tuple(self.columns.strides[dims].tolist())


class LazyState(MutableMapping[str, Stored]):
    """``state_dict_metadata`` that makes an entry when it is first looked at.

    Pickled as arrays, which other ranks need torch_strata to read; `PlannedMetadata` pickles it as stock does.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks: Chunks | None = chunks
        self._rows = {name: row for row, name in enumerate(chunks.columns.shared.names)}
        self._made: dict[str, Stored] = {}

    @property
    def untouched(self) -> Chunks | None:
        """What it is made of, if nobody has looked at an entry, which could then have been changed."""
        return None if self._made else self.chunks

    def __getitem__(self, fqn: str) -> Stored:
        made = self._made.get(fqn)
        if made is None:
            made = self._made[fqn] = self._make(self._rows[fqn])
        return made

    def __setitem__(self, fqn: str, stored: Stored) -> None:
        self._rows.setdefault(fqn, -1)
        self._made[fqn] = stored

    def __delitem__(self, fqn: str) -> None:
        for name in self._rows:
            self[name]
        del self._rows[fqn]
        del self._made[fqn]
        self.chunks = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())!r})"

    def _make(self, row: int) -> Stored:
        if self.chunks is None:
            raise KeyError(row)
        described = self.chunks.described(row)
        if described is None:
            return BytesStorageMetadata()
        template, size, strides = described
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
            for offsets, lengths in zip(*self.chunks.of(row), strict=True)
        ]
        return TensorStorageMetadata(template.properties(strides), torch.Size(size), chunks)

    def __reduce__(self) -> tuple[Any, ...]:
        chunks = self.untouched
        if chunks is None:
            return dict, (list(self.items()),)
        return _unpacked, (chunks.columns, pack_ints(chunks.first, chunks.begin, chunks.offsets, chunks.lengths))


def _unpacked(columns: Columns, packed: bytes) -> LazyState:
    return LazyState(Chunks(columns, *unpack_ints(packed)))


class PlannedMetadata(Metadata):
    """Metadata over a `LazyState`; pickled as the plain Metadata that stock readers know.

    A writer that has put down what stock reads sets `as_stock` to False: what DCP then sends to all ranks is short.
    """

    as_stock = True

    def __reduce__(self) -> tuple[Any, ...]:
        state = {field.name: getattr(self, field.name) for field in fields(Metadata)}
        if self.as_stock:
            state["state_dict_metadata"] = dict(self.state_dict_metadata.items())
        return Metadata, ({},), state
