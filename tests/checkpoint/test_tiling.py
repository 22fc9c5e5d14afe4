"""The look at all tensors of an index at once never passes over one whose chunks leave a hole or overlap."""

import random

import numpy as np
import torch

from torch_strata.checkpoint._columns import SHARD, Builder
from torch_strata.checkpoint._lazy_state import Chunks
from torch_strata.checkpoint._tiling import tiling_fault
from torch_strata.checkpoint._untiled import untiled

Box = tuple[tuple[int, ...], tuple[int, ...]]


def chunks_of(tensors: list[tuple[tuple[int, ...], list[Box]]]) -> Chunks:
    builder, first, begin = Builder(), [0], [0]
    offsets: list[int] = []
    lengths: list[int] = []
    for number, (size, boxes) in enumerate(tensors):
        template = (torch.float32, torch.strided, False, 0, False, False)
        builder.add_tensor(str(number), SHARD, template, size, [0] * len(size), (), size)
        for offset, extents in boxes:
            offsets += offset
            lengths += extents
            begin.append(len(offsets))
        first.append(len(begin) - 1)
    return Chunks(builder.columns(), *(np.array(column, dtype=np.int64) for column in (first, begin, offsets, lengths)))


def some_tensor(rng: random.Random) -> tuple[tuple[int, ...], list[Box]]:
    """Cut along one dim, and often damaged."""
    size = tuple(rng.choice([0, 1, 2, 5, 8]) for _ in range(rng.randrange(4)))
    if not size:
        return size, [((), ())] * rng.randrange(3)
    dim = rng.randrange(len(size))
    cuts = sorted(rng.choices(range(size[dim] + 1), k=rng.randrange(4)))
    boxes = []
    for begin, end in zip([0, *cuts], [*cuts, size[dim]], strict=True):
        offset = tuple(begin if d == dim else 0 for d in range(len(size)))
        boxes.append((offset, tuple(end - begin if d == dim else extent for d, extent in enumerate(size))))
    if rng.random() < 0.6:
        at = rng.randrange(len(boxes))
        change = rng.choice(["drop", "double", "move", "grow", "huge"])
        offset, extents = boxes.pop(at)
        moved = tuple(o + rng.choice([-1, 0, 1]) for o in offset)
        grown = tuple(e + rng.choice([-1, 0, 1]) for e in extents)
        huge = tuple((1 << 63) - 1 for _ in offset)
        boxes += {
            "drop": [],
            "double": [(offset, extents)] * 2,
            "move": [(moved, extents)],
            "grow": [(offset, grown)],
            "huge": [(huge, extents)],
        }[change]
    rng.shuffle(boxes)
    return size, boxes


def test_every_tensor_with_a_fault_is_looked_at():
    rng = random.Random(4)
    tensors = [some_tensor(rng) for _ in range(3000)]
    found = set(untiled(chunks_of(tensors)).tolist())
    faulty = {
        row
        for row, (size, boxes) in enumerate(tensors)
        if tiling_fault(size, [offset for offset, _ in boxes], [extents for _, extents in boxes])
    }
    assert faulty <= found
    assert len(found) < len(tensors)  # most sound ones need no second look
    assert len(faulty) > 500


def test_tensors_cut_along_one_dim_need_no_second_look():
    rows = [((8 * rank, 0), (8, 4)) for rank in range(256)]
    whole = ((2048, 4), rows)
    assert untiled(chunks_of([whole] * 300)).tolist() == []
    assert untiled(chunks_of([whole, ((2048, 4), rows[1:]), whole])).tolist() == [1]
