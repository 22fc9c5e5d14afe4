"""A checkpoint's `state_dict_metadata` as arrays, whose objects are made when somebody looks at them."""

import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from torch_strata.checkpoint._columns import Columns, Ints, Template, pack_ints, unpack_ints
from torch_strata.checkpoint._stored_lists import ListNames, StoredList

__all__ = ["Chunks", "LazyState", "PlannedMetadata", "StoredIndex"]

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

    @functools.cached_property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Whether each name is a tensor with elements that one chunk holds; shape ``(names,)``."""
        shared, first = self.columns.shared, self.first
        found: npt.NDArray[np.bool_] = (shared.templates >= 0) & (np.diff(first) == 1)
        rows = np.flatnonzero(found)
        found[rows] = np.diff(self.begin)[first[rows]] == shared.ndims[rows]
        rows = np.flatnonzero(found)
        ndims = shared.ndims[rows]
        each = np.arange(int(ndims.sum())) - np.repeat(np.cumsum(ndims) - ndims, ndims)
        of_size = np.repeat(np.array(self.columns.first_dims)[rows], ndims) + each
        of_chunk = np.repeat(self.begin[first[rows]], ndims) + each
        sizes = shared.sizes[of_size]
        wrong = (self.offsets[of_chunk] != 0) | (self.lengths[of_chunk] != sizes) | (sizes <= 0)
        found[np.repeat(rows, ndims)[wrong]] = False
        return found

    def position(self, row: int, offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
        """Which of a name's chunks lies there, if one does."""
        begin = self.begin[self.first[row] : self.first[row + 1] + 1]
        dims = len(offsets)
        if (np.diff(begin) != dims).any():
            return None
        if not dims:
            return 0 if len(begin) > 1 else None
        there = self.offsets[begin[0] : begin[-1]].reshape(-1, dims) == np.array(offsets)
        same = self.lengths[begin[0] : begin[-1]].reshape(-1, dims) == np.array(lengths)
        found = np.flatnonzero((there & same).all(axis=1))
        return int(found[0]) if len(found) else None


class LazyState(MutableMapping[str, Stored]):
    """``state_dict_metadata`` that makes an entry when it is first looked at.

    A name that is found and not iterated over is that of a list (`_stored_lists.py`), if it knows the planner's data.
    Pickled as arrays, which other ranks need torch_strata to read; `PlannedMetadata` pickles it as stock does.
    """

    def __init__(self, chunks: Chunks, planner_data: Any = None) -> None:
        self.chunks: Chunks | None = chunks
        self._lists = ListNames(planner_data)
        self._rows = {name: row for row, name in enumerate(chunks.columns.shared.names)}
        self._made: dict[str, Stored] = {}

    @property
    def untouched(self) -> Chunks | None:
        """What it is made of, if nobody has looked at an entry, which could then have been changed."""
        return None if self._made else self.chunks

    def __getitem__(self, fqn: str) -> Stored:
        made = self._made.get(fqn)
        if made is None:
            if fqn not in self._rows and fqn in self._lists:
                return StoredList()
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
        return fqn in self._rows or fqn in self._lists

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


class StoredIndex:
    """Answers about ``state_dict_metadata`` that make no object, where it is a `LazyState` that nobody has touched."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.stored = stored
        self._chunks = stored.untouched if isinstance(stored, LazyState) else None
        self._rows: Mapping[str, int] = {}
        if self._chunks is not None:
            shared = self._chunks.columns.shared
            self._rows = {fqn: row for row, fqn in enumerate(shared.names)}
            self._dtypes = [template.dtype for template in shared.table]
            self._templates = shared.templates.tolist()
            self._whole = self._chunks.whole.tolist()
            self._first, self._sizes = self._chunks.columns.first_dims, shared.sizes.tolist()

    def is_whole(self, fqn: str, dtype: torch.dtype, size: torch.Size) -> bool:
        """Whether one chunk is known to hold all of a tensor of this dtype and size, which has elements."""
        row = self._rows.get(fqn)
        if row is None or not self._whole[row]:
            return False
        is_same = self._dtypes[self._templates[row]] == dtype
        return is_same and tuple(self._sizes[self._first[row] : self._first[row + 1]]) == size

    def is_list(self, fqn: str) -> bool:
        """Whether only the entries of a list of this name are stored."""
        if self._chunks is not None:
            return fqn not in self._rows and fqn in self.stored
        return isinstance(self.stored.get(fqn), StoredList)

    def described(self, fqn: str) -> tuple[bool, torch.dtype | None, tuple[int, ...]]:
        """Whether it is a tensor; its dtype and size."""
        if self._chunks is not None:
            found = self._chunks.described(self._rows[fqn])
            return (False, None, ()) if found is None else (True, found[0].dtype, found[1])
        stored = self.stored[fqn]
        if not isinstance(stored, TensorStorageMetadata):
            return False, None, ()
        return True, stored.properties.dtype, stored.size

    def position(self, fqn: str, chunk: ChunkStorageMetadata) -> int | None:
        """Which of a tensor's chunks `chunk` is."""
        if self._chunks is not None:
            return self._chunks.position(self._rows[fqn], chunk.offsets, chunk.sizes)
        chunks = self.stored[fqn].chunks
        return chunks.index(chunk) if chunk in chunks else None


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
