"""Entries of state_dict_metadata from and to the columns in which they travel to the Rust core. Imports no torch."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_strata._types import EntryColumns, TensorEntry

__all__ = ["pack_entries", "unpack_entries"]


def pack_entries(entries: "Iterable[TensorEntry]") -> "EntryColumns":
    """Columns as `_native.commit` takes them."""
    names: list[bytes] = []
    numbers: dict[tuple[str, bool, bool, int, str, bool], int] = {}
    templates, num_dims, sizes, strides, first_chunks, first_dims, offsets = columns = [array("q") for _ in range(7)]
    first_chunks.append(0)
    first_dims.append(0)
    for name, is_tensor, dtype, size, known, grad, pin, encoding, layout, chunks, _ in entries:
        names.append(name)
        template = (dtype, grad, pin, encoding, layout, known is not None)
        templates.append(numbers.setdefault(template, len(numbers)) if is_tensor else -1)
        num_dims.append(len(size))
        sizes.extend(size)
        strides.extend((0,) * len(size) if known is None else known)
        for chunk in chunks:
            offsets.extend(chunk)
            first_dims.append(len(offsets))
        first_chunks.append(len(first_dims) - 1)
    return names, list(numbers), list(columns)


def unpack_entries(columns: "EntryColumns") -> "Iterator[TensorEntry]":
    """The entries in columns as the core gives them."""
    names, table, numbers = columns
    templates, num_dims, sizes, strides, first_chunks, first_dims, offsets, lengths = (
        memoryview(column).cast(code).tolist() for code, column in numbers
    )
    at = 0
    for row, name in enumerate(names):
        dims = slice(at, at + num_dims[row])
        at = dims.stop
        if templates[row] < 0:
            yield (name, False, "", (), None, False, False, 0, "", [], [])
            continue
        dtype, grad, pin, encoding, layout, has_strides = table[templates[row]]
        chunks = [slice(*ends) for ends in pairwise(first_dims[first_chunks[row] : first_chunks[row + 1] + 1])]
        known = tuple(strides[dims]) if has_strides else None
        places = [tuple(offsets[chunk]) for chunk in chunks], [tuple(lengths[chunk]) for chunk in chunks]
        yield (name, True, dtype, tuple(sizes[dims]), known, grad, pin, encoding, layout, *places)
