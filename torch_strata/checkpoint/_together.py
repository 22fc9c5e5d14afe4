"""The destinations of what a group reads once: which may be filled in rounds, and the memory that is lent for them."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_strata import _native
from torch_strata.checkpoint._exchange import Exchange, Lent, Sharing
from torch_strata.checkpoint._metadata import dtype_of
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._part import Part, bump_versions, copy_into, lent, place_of, takes_bytes
from torch_strata.checkpoint._tensors import HOST, is_plain

__all__ = ["separated", "share_blobs", "share_regions"]

# Device, lowest address, and one past the highest.
Extent = tuple[str, int, int]


def separated(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Parts that may be read in any order, tied ones once; and those that may share memory with another."""
    distinct: dict[Any, Part] = {}
    for part in parts:
        if part.target.numel():
            distinct.setdefault((place_of(part.target), part.row, tuple(part.item.storage_offsets)), part)
    # Parts of one destination are boxes of it, which do not overlap however their rows interleave in memory.
    places: dict[Any, list[Part]] = {}
    for part in distinct.values():
        places.setdefault(part.item.dest_index if is_plain(part.target) else None, []).append(part)
    apart = places.pop(None, [])
    clashing = _clashing([_extent(members) for members in places.values()])
    joint: list[Part] = []
    for number, members in enumerate(places.values()):
        (apart if number in clashing else joint).extend(members)
    return joint, apart


def _extent(parts: Sequence[Part]) -> Extent:
    """That of all parts of one destination."""
    ends = []
    for target in (part.target for part in parts):
        elements = 1 + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride(), strict=True))
        ends.append(target.data_ptr() + elements * target.dtype.itemsize)
    return str(parts[0].target.device), min(part.target.data_ptr() for part in parts), max(ends)


def _clashing(extents: Sequence[Extent]) -> set[int]:
    """Which of `extents`, by index, reach into another one on their device."""
    clashing: set[int] = set()
    furthest: tuple[Extent, int] | None = None
    for extent, index in sorted((extent, index) for index, extent in enumerate(extents)):
        device, start, end = extent
        if furthest is None or device != furthest[0][0]:
            furthest = extent, index
            continue
        if start < furthest[0][2]:
            clashing |= {index, furthest[1]}
        if end > furthest[0][2]:
            furthest = extent, index
    return clashing


def share_blobs(
    opened: Opened, rows: Sequence[int], sharing: Sharing, exchange: Exchange
) -> tuple[dict[int, bytes], _native.ReadStats]:
    """The payloads of those of `rows` that arrive in rounds, and what was checked of them. Every rank calls it.

    Raises:
        StrataError: What a rank has failed at; all raise it.
    """
    shared = [row for row, span in zip(rows, sharing.spans, strict=True) if span is not None]
    data_of = {row: bytearray(size) for row, size in zip(shared, opened.native.blob_bytes(shared), strict=True)}

    def lend(index: int) -> Lent:
        memory = torch.frombuffer(data_of[rows[index]], dtype=torch.uint8)
        return rows[index], (), (), HOST, memory.data_ptr(), (), memory

    checked = exchange.read(sharing, lend, lambda _: None)
    return {row: bytes(data) for row, data in data_of.items()}, checked


def share_regions(parts: Sequence[Part], sharing: Sharing, exchange: Exchange) -> _native.ReadStats:
    """Fill the destinations of those of `parts` that arrive in rounds; what was checked. Every rank calls it.

    Raises:
        StrataError: What a rank has failed at; all raise it.
    """
    temporaries: dict[int, torch.Tensor] = {}

    def lend(index: int) -> Lent:
        part = parts[index]
        if takes_bytes(part):
            return lent(part, part.target)
        temporaries[index] = torch.empty(tuple(part.item.lengths), dtype=dtype_of(part.dtype))
        return lent(part, temporaries[index])

    def done(index: int) -> None:
        if index in temporaries:
            copy_into(parts[index].target, temporaries.pop(index))
        else:
            bump_versions([parts[index].target])

    return exchange.read(sharing, lend, done)
