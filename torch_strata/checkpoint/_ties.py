"""Destinations that are one memory, as tied weights are: what is stored for them has to be one content."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from torch_strata.checkpoint._metadata import dtype_of
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._part import Part, lent, place_of
from torch_strata.checkpoint._tensors import is_plain
from torch_strata.errors import LayoutMismatchError

__all__ = ["address_of", "without_ties"]


def address_of(target: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none that others could share."""
    return target.data_ptr() if is_plain(target) and target.numel() else 0


def without_ties(opened: Opened, parts: Sequence[Part], others: Iterable[Part], *, verify: str) -> list[Part]:
    """Those of `parts` that have to be read beside `others`: of tied destinations the first.

    DCP's own planner lets the last of them win. What has one payload or equal digests is known to be equal; other
    payloads, as of stock checkpoints, are read and compared here, before a destination changes. Destinations that
    overlap and are not the same elements are not looked at.

    Raises:
        LayoutMismatchError: If two tied destinations are to get different values.
        CorruptionError, StorageError: If what is to be compared cannot be read.
    """
    dropped = set()
    for first, again in _tied([*others, *parts]):
        if _source(first) != _source(again):
            if not _same_digests(opened, first, again) and not _same_content(opened, first, again, verify):
                raise LayoutMismatchError(
                    f"{opened.where}: {first.fqn!r} and {again.fqn!r} are stored with different values, and are one "
                    "memory in the state to load into, which can hold one of them: untie them there, or load one"
                )
            dropped.add(id(again))
    return [part for part in parts if id(part) not in dropped] if dropped else list(parts)


def _tied(parts: Iterable[Part]) -> Iterator[tuple[Part, Part]]:
    """Each that has the same elements as one before, behind that one."""
    by_address: dict[int, list[Part]] = {}
    for part in parts:
        if address := address_of(part.target):
            by_address.setdefault(address, []).append(part)
    for sharing in by_address.values():
        if len(sharing) > 1:
            firsts: dict[object, Part] = {}
            for part in sharing:
                first = firsts.setdefault(place_of(part.target), part)
                if first is not part:
                    yield first, part


def _source(part: Part) -> tuple[int, tuple[int, ...]]:
    return part.row, tuple(part.item.storage_offsets)


def _same_digests(opened: Opened, a: Part, b: Part) -> bool:
    alike = [(p.kind, p.dtype, p.shape, p.strides, tuple(p.item.storage_offsets)) for p in (a, b)]
    digests = opened.native.digests([a.row, b.row])
    return alike[0] == alike[1] and bool(digests[0]) and digests[0] == digests[1]


def _same_content(opened: Opened, a: Part, b: Part, verify: str) -> bool:
    """Whether both would leave the same bits in their destination."""
    bits = []
    for part in (a, b):
        found = torch.empty(tuple(part.item.lengths), dtype=dtype_of(part.dtype))
        opened.native.read([lent(part, found)], [], [], verify=verify)
        bits.append(found.to(part.target.dtype).reshape(-1).view(torch.uint8))
    return torch.equal(*bits)
