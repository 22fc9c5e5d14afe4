"""A look at all tensors of an index at once, so that only few have to be looked at by `tiling_fault`."""

import numpy as np

from torch_strata.checkpoint._columns import Ints, padded
from torch_strata.checkpoint._lazy_state import Chunks

__all__ = ["untiled"]

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
