"""Parts of tensors: pure arithmetic on shapes. Imports no torch."""

import math
from collections.abc import Iterator, Sequence

__all__ = ["Box", "contiguous", "overlap", "parts_of"]

# First element and lengths, in elements of the tensor.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def parts_of(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Boxes that make up a tensor in row-major order, each one run of its row-major memory.

    Args:
        shape: Of the tensor.
        max_elements: A box has at most as many elements; at least 1.
    """
    if math.prod(shape) <= max_elements:
        yield (0,) * len(shape), tuple(shape)
        return
    row = math.prod(shape[1:])
    if row <= max_elements:
        step = max_elements // row
        for first in range(0, shape[0], step):
            rest = (0,) * (len(shape) - 1)
            yield (first, *rest), (min(step, shape[0] - first), *shape[1:])
        return
    for index in range(shape[0]):
        for first_of_row, lengths in parts_of(shape[1:], max_elements):
            yield (index, *first_of_row), (1, *lengths)


def overlap(left: Box, right: Box) -> Box | None:
    """What is in both boxes of one tensor; None if that is nothing."""
    first, lengths = [], []
    for a, n, b, m in zip(*left, *right, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        first.append(begin)
        lengths.append(end - begin)
    return tuple(first), tuple(lengths)
