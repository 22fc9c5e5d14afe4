"""Whether stored chunks cover their tensor exactly once. Integers in, a sentence or None out. Imports no torch."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

__all__ = ["tiling_fault"]

Dims = tuple[int, ...]

# A box has 2**dims corners. No mesh has this many axes; a hostile index might.
_MAX_CUT_DIMS = 12


def tiling_fault(size: Dims, offsets: Sequence[Dims], sizes: Sequence[Dims], *, whole: bool = True) -> str | None:
    """What is wrong with the chunks of a tensor, or None.

    Args:
        size: The tensor's shape.
        offsets: First element of each chunk.
        sizes: Shape of each chunk.
        whole: Whether the chunks must cover the tensor; if not, only their bounds are checked.
    """
    if any(extent < 0 for extent in size):
        return f"negative size {size}"
    for offset, extents in zip(offsets, sizes, strict=True):
        if not _inside(size, offset, extents):
            return f"chunk at {offset} of {extents} lies outside {size}"
    if not whole:
        return None
    # A chunk without elements covers nothing, but a tensor needs at least one, or a load would read nothing.
    if not offsets:
        return f"no chunk is stored for {size}"
    boxes = [(o, s) for o, s in zip(offsets, sizes, strict=True) if 0 not in s]
    if len(boxes) == 1 and boxes[0][1] == size:
        return None
    if 0 in size:
        return None
    cut = [d for d in range(len(size)) if any(extents[d] != size[d] for _, extents in boxes)]
    if len(cut) > _MAX_CUT_DIMS:
        return f"chunks cut {len(cut)} dims of {size}; at most {_MAX_CUT_DIMS} are read"
    if not boxes or not _covers_once(size, boxes, cut):
        return f"{len(boxes)} stored chunks leave a hole in {size}, or overlap"
    return None


def _inside(size: Dims, offset: Dims, extents: Dims) -> bool:
    if not len(size) == len(offset) == len(extents):
        return False
    return all(o >= 0 and e >= 0 and o + e <= s for s, o, e in zip(size, offset, extents, strict=True))


def _covers_once(size: Dims, boxes: Sequence[tuple[Dims, Dims]], cut: Sequence[int]) -> bool:
    """Whether each element lies in exactly one box.

    The number of boxes over a point is determined by its mixed differences, which are +1 or -1 at a box's corners and
    0 elsewhere. So the boxes tile the tensor exactly if their signed corners add up to the tensor's own: linear in
    the number of boxes, where comparing pairs is quadratic. Dims outside `cut` add nothing and are left out.
    """
    corners: defaultdict[Dims, int] = defaultdict(int)
    for offset, extents in boxes:
        edges = [((offset[d], 1), (offset[d] + extents[d], -1)) for d in cut]
        for corner in product(*edges):
            corners[tuple(at for at, _ in corner)] += _sign(corner)
    for corner in product(*[((0, 1), (size[d], -1)) for d in cut]):
        corners[tuple(at for at, _ in corner)] -= _sign(corner)
    return not any(corners.values())


def _sign(corner: tuple[tuple[int, int], ...]) -> int:
    sign = 1
    for _, factor in corner:
        sign *= factor
    return sign
