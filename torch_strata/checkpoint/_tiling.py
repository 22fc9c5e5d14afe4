"""Whether stored chunks cover their tensor exactly once. Integers in, a sentence or None out."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import numpy as np

from torch_strata.checkpoint._columns import Ints, padded
from torch_strata.checkpoint._lazy_state import Chunks

__all__ = ["tiling_fault", "untiled"]

Dims = tuple[int, ...]

# A box has 2**dims corners. No mesh has this many axes; a hostile index might.
_MAX_CUT_DIMS = 12


# Beyond this a sum of two might not be what it says.
_MOST = 1 << 62

# Chunks looked at in one go: their columns take some megabytes.
_BATCH = 1 << 14


def untiled(chunks: Chunks) -> Ints:
    """Rows of the tensors that `tiling_fault` has to look at: not those cut along one dim without hole or overlap.

    At 256 ranks of 2,200 tensors half a million chunks are of that kind.
    """
    found, row, rows = [], 0, len(chunks.first) - 1
    while row < rows:
        end = int(np.searchsorted(chunks.first, chunks.first[row] + _BATCH))
        end = min(max(end, row + 1), rows)
        found.append(row + _untiled(chunks, row, end))
        row = end
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _untiled(chunks: Chunks, start: int, stop: int) -> Ints:
    """As `untiled`, of the names from `start` to `stop`, counted from `start`."""
    shared, dims = chunks.columns.shared, chunks.columns.first_dims
    begin = chunks.begin[chunks.first[start] : chunks.first[stop] + 1]
    counts, chunk_dims, ndims = np.diff(chunks.first[start : stop + 1]), np.diff(begin), shared.ndims[start:stop]
    owner = np.repeat(np.arange(len(counts)), counts)
    num_dims = int(max(ndims.max(initial=0), chunk_dims.max(initial=0), 1))
    size = padded(shared.sizes[dims[start] : dims[stop]], ndims, fill=1, num_dims=num_dims)
    offsets = padded(chunks.offsets[begin[0] : begin[-1]], chunk_dims, fill=0, num_dims=num_dims)
    lengths = padded(chunks.lengths[begin[0] : begin[-1]], chunk_dims, fill=1, num_dims=num_dims)
    odd = chunk_dims != ndims[owner]
    for column in (size[owner], offsets, lengths):
        odd |= ((column < 0) | (column > _MOST)).any(axis=1)
    cut = np.zeros(size.shape, dtype=bool)
    np.logical_or.at(cut, owner, (offsets != 0) | (lengths != size[owner]))
    doubtful = (shared.templates[start:stop] >= 0) & ((counts == 0) | (cut.sum(axis=1) > 1))
    dim = cut.argmax(axis=1)[owner]
    each = np.arange(len(owner))
    begins = offsets[each, dim]
    ends = begins + lengths[each, dim]
    order = np.lexsort([ends, begins, owner])
    owner, begins, ends = owner[order], begins[order], ends[order]
    is_first = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    is_last = np.append(is_first[1:], True)[: len(owner)]
    before = np.where(is_first, 0, np.append(0, ends[:-1])[: len(owner)])
    wrong = odd[order] | (begins != before) | (is_last & (ends != size[owner, dim[order]]))
    doubtful[owner[wrong]] = True
    return np.flatnonzero(doubtful)


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
