"""Whether the chunks of tensors lie inside them, do not overlap, and leave no hole. Arrays in, sentences out.

Linear in the number of chunks but for a sort: at 256 ranks of 2,200 items there are half a million.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from torch_strata.checkpoint._columns import Ints

__all__ = ["Boxes", "plan_faults"]


# Chunks looked at in one go: what that takes is some megabytes, at half a million chunks it would be a hundred.
_BATCH = 1 << 16


@dataclass(frozen=True, eq=False)
class Boxes:
    """Chunks of many tensors, and the rank that writes each.

    Attributes:
        name: Number of the tensor; shape ``(boxes,)``.
        offsets: First element, padded with 0; shape ``(boxes, dims)``.
        lengths: Shape, padded with 1; shape ``(boxes, dims)``.
        rank: Who writes it; shape ``(boxes,)``.
    """

    name: Ints
    offsets: Ints
    lengths: Ints
    rank: Ints

    def only(self, chosen: npt.NDArray[np.bool_] | Ints | slice) -> "Boxes":
        """Some of them."""
        return Boxes(self.name[chosen], self.offsets[chosen], self.lengths[chosen], self.rank[chosen])

    def described(self, box: int) -> str:
        """The rank and the region."""
        ends = zip(self.offsets[box].tolist(), (self.offsets + self.lengths)[box].tolist(), strict=True)
        return f"rank {self.rank[box]} writes [{', '.join(f'{begin}:{end}' for begin, end in ends)}]"


def plan_faults(boxes: Boxes, sizes: Ints, names: Sequence[str], *, whole: bool) -> list[str]:
    """What is wrong, one sentence a tensor.

    Args:
        boxes: The chunks, sorted by tensor.
        sizes: Shape of each tensor, padded with 1; shape ``(tensors, dims)``.
        names: Name of each tensor.
        whole: Whether the chunks must fill their tensors.
    """
    faults, start = [], 0
    while start < len(boxes.name):
        # All chunks of a tensor are looked at together.
        last = boxes.name[min(start + _BATCH, len(boxes.name)) - 1]
        end = int(np.searchsorted(boxes.name, last, side="right"))
        faults += _faults(boxes.only(slice(start, end)), sizes, names, whole=whole)
        start = end
    return faults


def _faults(boxes: Boxes, sizes: Ints, names: Sequence[str], *, whole: bool) -> list[str]:
    size = sizes[boxes.name]
    outside = ((boxes.offsets < 0) | (boxes.lengths < 0) | (boxes.offsets + boxes.lengths > size)).any(axis=1)
    faults = {
        int(boxes.name[box]): f"{names[boxes.name[box]]!r} of {_shape(size[box])}: {boxes.described(box)}, outside it"
        for box in np.flatnonzero(outside).tolist()
    }
    filled = boxes.only(np.flatnonzero(~outside & (boxes.lengths > 0).all(axis=1)))
    for first, second in _overlaps(filled, sizes):
        number = int(filled.name[first])
        what = f"{filled.described(first)}, {filled.described(second)}: they overlap"
        faults.setdefault(number, f"{names[number]!r} of {_shape(sizes[number])}: {what}")
    if whole:
        volumes = np.zeros(len(names), dtype=np.int64)
        np.add.at(volumes, filled.name, filled.lengths.prod(axis=1))
        numels = sizes.prod(axis=1)
        planned = np.zeros(len(names), dtype=bool)
        planned[boxes.name] = True
        for number in np.flatnonzero(planned & (volumes < numels)).tolist():
            ranks = sorted(set(filled.rank[filled.name == number].tolist()))
            what = f"{volumes[number]} of {numels[number]} elements are written, by ranks {ranks}"
            faults.setdefault(number, f"{names[number]!r} of {_shape(sizes[number])}: {what}")
    return list(faults.values())


def _shape(size: Ints) -> str:
    return f"({', '.join(map(str, size.tolist()))})"


def _overlaps(boxes: Boxes, sizes: Ints) -> Iterator[tuple[int, int]]:
    """Pairs that share elements; at least one pair for each tensor that has any."""
    if not len(boxes.name):
        return
    cut: npt.NDArray[np.bool_] = np.zeros(sizes.shape, dtype=bool)
    np.logical_or.at(cut, boxes.name, boxes.lengths != sizes[boxes.name])
    num_dims = sizes.shape[1]
    num_cut = cut.sum(axis=1)[boxes.name]
    several = np.bincount(boxes.name, minlength=len(sizes))[boxes.name] > 1
    dim = cut.argmax(axis=1) if num_dims else np.zeros(len(sizes), dtype=np.int64)
    # Cut along one dim, neighbours tell all; along none, each fills the tensor.
    plain = np.flatnonzero(several & (num_cut <= 1))
    if len(plain) and num_dims:
        along = dim[boxes.name[plain]]
        begins = boxes.offsets[plain, along]
        order = np.lexsort([begins, boxes.name[plain]])
        ends = (begins + boxes.lengths[plain, along])[order]
        name, begins = boxes.name[plain][order], begins[order]
        for at in np.flatnonzero((name[1:] == name[:-1]) & (begins[1:] < ends[:-1])).tolist():
            yield int(plain[order[at]]), int(plain[order[at + 1]])
    elif len(plain):
        for at in np.flatnonzero(np.diff(boxes.name[plain]) == 0).tolist():
            yield int(plain[at]), int(plain[at + 1])
    for count in np.unique(num_cut[several & (num_cut > 1)]).tolist():
        members = np.flatnonzero(several & (num_cut == count))
        for number in _not_tiled(boxes.only(members), sizes, cut, count):
            yield from _sweep(boxes, members[boxes.name[members] == number])


def _not_tiled(boxes: Boxes, sizes: Ints, cut: npt.NDArray[np.bool_], num_cut: int) -> list[int]:
    """Tensors that their chunks do not tile: they overlap or leave a hole.

    The number of boxes over a point is determined by its mixed differences, which are +1 or -1 at a box's corners and
    0 elsewhere: boxes tile a tensor exactly if their signed corners add up to the tensor's own. Dims that no box cuts
    add nothing.
    """
    numbers = np.unique(boxes.name)
    dims = np.nonzero(cut[numbers])[1].reshape(len(numbers), num_cut)
    own = dims[np.searchsorted(numbers, boxes.name)]
    begins = np.take_along_axis(boxes.offsets, own, axis=1)
    ends = begins + np.take_along_axis(boxes.lengths, own, axis=1)
    whole = np.take_along_axis(sizes[numbers], dims, axis=1)
    corners, signs = [], []
    for upper in product((False, True), repeat=num_cut):
        sign = -1 if sum(upper) % 2 else 1
        corners.append(np.column_stack([boxes.name, np.where(upper, ends, begins)]))
        corners.append(np.column_stack([numbers, np.where(upper, whole, 0)]))
        signs += [np.full(len(boxes.name), sign), np.full(len(numbers), -sign)]
    table, signed = np.concatenate(corners), np.concatenate(signs)
    order = np.lexsort(table.T[::-1])
    table = table[order]
    starts = np.flatnonzero(np.append(True, (table[1:] != table[:-1]).any(axis=1)))
    sums = np.add.reduceat(signed[order], starts)
    return np.unique(table[starts[sums != 0], 0]).tolist()  # type: ignore[no-any-return]


def _sweep(boxes: Boxes, members: Ints) -> Iterator[tuple[int, int]]:
    """The first overlapping pair among the boxes of one tensor, if any."""
    begins, ends = boxes.offsets[members], (boxes.offsets + boxes.lengths)[members]
    dim = int(np.argmax(ends.max(axis=0)))
    active: list[int] = []
    for at in np.argsort(begins[:, dim], kind="stable").tolist():
        active = [other for other in active if ends[other, dim] > begins[at, dim]]
        for other in active:
            if (begins[at] < ends[other]).all() and (begins[other] < ends[at]).all():
                yield int(members[other]), int(members[at])
                return
        active.append(at)
