"""All ranks' items to one plan: who writes which rows, and what the checkpoint then consists of. Decides, does nothing.

Works on arrays: at 256 ranks of 2,200 items one object for each item would be the planning rank's minute and gigabyte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_strata.checkpoint._columns import BYTES, SHARD, TENSOR, Columns, Ints, pack_ints, padded, unpack_ints
from torch_strata.checkpoint._copies import assigned_by_copies
from torch_strata.checkpoint._overlaps import Boxes, plan_faults
from torch_strata.errors import LayoutMismatchError

__all__ = ["Holders", "Merged", "Offers", "Selection", "merge_columns"]

# What an item costs beyond its bytes, in bytes that are written meanwhile: about 30 us at 1 GB/s
# (`benchmarks/small_tensors.py`). Keeps ranks equal that share many small tensors.
_ITEM_WEIGHT = 32 << 10

# The least that a rank writes of a tensor which it shares with its replicas: a block has one digest.
_MIN_PIECE_BYTES = 4 << 20

# Pieces are no longer than this part of what a rank of the group has to write, so that ranks end up about equal.
_PIECES_A_RANK = 4

_NAMED_FAULTS = 5

# The sum of two numbers below it has 31 bits.
_NARROW = 1 << 30


@dataclass(frozen=True, eq=False)
class Selection:
    """What one rank writes of the items that it offered: all that has to travel back to it.

    Attributes:
        rows: Which of its items, ascending; an item that is cut into pieces may stand there several times.
        hints: DCP's index hint of each: the chunk's place among its tensor's; -1 for a pickled value.
        shards: Whether each is a chunk of several.
        pieces: For the places in `rows` where the rank writes a part of its chunk: the first row and their number.
    """

    rows: Ints
    hints: Ints
    shards: npt.NDArray[np.bool_]
    pieces: dict[int, tuple[int, int]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _selection, (pack_ints(self.rows, self.hints, self.shards.astype(np.int64)), self.pieces)

    def of(self, columns: Columns) -> Columns:
        """The items themselves."""
        return columns.taken(self.rows, self.hints, self.shards, self.pieces)


def _selection(packed: bytes, pieces: dict[int, tuple[int, int]]) -> Selection:
    rows, hints, shards = unpack_ints(packed)
    return Selection(rows, hints, shards.astype(bool), pieces)


@dataclass(frozen=True, eq=False)
class Merged:
    """The plan of all ranks.

    Attributes:
        selections: One for each rank.
        names: Every name, in the order in which ranks offered them.
        samples: For each name, a rank and its row that describe the tensor.
        first_chunks: Where each name's chunks begin, and the end of the last; shape ``(names + 1,)``.
        ndims: Dims of each chunk.
        offsets: First element of each chunk, dims of all chunks one after the other.
        lengths: Their shapes, likewise.
    """

    selections: list[Selection]
    names: list[str]
    samples: list[tuple[int, int]]
    first_chunks: Ints
    ndims: Ints
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, eq=False)
class Offers:
    """All ranks' items in one table; a row is one rank's offer of one chunk.

    Numbers have 32 bits where they suffice.
    """

    rank: Ints
    row: Ints  # in the rank's own plan
    name: Ints
    kind: Ints
    ndim: Ints
    nbytes: Ints
    divisible: npt.NDArray[np.bool_]
    offsets: Ints  # padded
    lengths: Ints  # padded


@dataclass(frozen=True, eq=False)
class Holders:
    """The offers of each chunk, one chunk after the other, by rank."""

    row: Ints
    begin: Ints

    @property
    def counts(self) -> Ints:
        return np.diff(np.append(self.begin, len(self.row)))


def merge_columns(
    plans: Sequence[Columns], *, to_lowest_rank: bool = False, copies: Sequence[Selection | None] = ()
) -> Merged:
    """Give each chunk that several ranks hold to one of them, or its rows to several, and check the whole.

    Args:
        plans: What each rank offers to write, by rank.
        to_lowest_rank: Whether the lowest rank that holds a chunk writes it, whatever that does to the balance.
        copies: What alone each rank has copied, by rank, None for everything; if given, that is what it may write.

    Raises:
        CheckpointError: If no rank has copied a chunk.
        LayoutMismatchError: If ranks disagree about a tensor, or if what they would write overlaps, lies outside, or
            leaves a hole, naming the tensors, ranks and regions. Holes are no fault where one rank saves alone.
    """
    ids: dict[str, int] = {}
    samples: list[tuple[int, int]] = []
    names = _number_names(plans, ids, samples)
    offers = _offers(plans, names)
    sizes = _agreed_sizes(plans, offers, list(ids), samples)
    holders = _distinct(offers, list(ids))
    chosen = holders.row[holders.begin]
    chosen = chosen[offers.kind[chosen] != BYTES]
    boxes = Boxes(offers.name[chosen], offers.offsets[chosen], offers.lengths[chosen], offers.rank[chosen])
    faults = plan_faults(boxes, sizes, list(ids), whole=len(plans) > 1)
    del chosen, boxes
    if faults:
        more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
        raise LayoutMismatchError(f"the ranks' plans do not fit together: {'; '.join(faults[:_NAMED_FAULTS])}{more}")
    if copies:
        row, first, count = assigned_by_copies(offers, holders, list(ids), copies)
    else:
        row, first, count = _assigned(offers, holders, len(plans), to_lowest_rank=to_lowest_rank)
    return _merged(offers, row, first, count, list(ids), samples, len(plans))


def _number_names(plans: Sequence[Columns], ids: dict[str, int], samples: list[tuple[int, int]]) -> list[Ints]:
    """The number of each item's name, for each rank. Ranks that sent the same names share the work."""
    found: list[Ints] = []
    known: dict[int, Ints] = {}
    for rank, plan in enumerate(plans):
        table = plan.shared.names
        if id(table) not in known:
            numbers = []
            for row, name in enumerate(table):
                number = ids.setdefault(name, len(ids))
                if number == len(samples):
                    samples.append((rank, row))
                numbers.append(number)
            known[id(table)] = np.array(numbers, dtype=np.int64)
        found.append(known[id(table)])
    return found


def _offers(plans: Sequence[Columns], names: Sequence[Ints]) -> Offers:
    num_dims = max((int(plan.shared.ndims.max(initial=0)) for plan in plans), default=0)
    counts = [len(plan) for plan in plans]
    divisible = [np.array([t.is_divisible for t in plan.shared.table] + [False]) for plan in plans]

    extents = [column for plan in plans for column in (plan.offsets, plan.lengths) if len(column)]
    is_narrow = all(column.min() >= 0 and column.max() < _NARROW for column in extents)
    width: Any = np.int32 if is_narrow else np.int64

    def joined(parts: Sequence[Ints], kind: Any = np.int32) -> Ints:
        return np.concatenate(parts, dtype=kind, casting="same_kind") if parts else np.zeros(0, dtype=kind)

    def matrix(parts: Sequence[tuple[Ints, Ints]], fill: int) -> Ints:
        rows = [padded(flat, ndims, fill=fill, num_dims=num_dims).astype(width) for flat, ndims in parts]
        return np.concatenate(rows) if rows else np.zeros((0, 0), dtype=width)

    return Offers(
        rank=np.repeat(np.arange(len(plans), dtype=np.int32), counts),
        row=joined([np.arange(count, dtype=np.int32) for count in counts]),
        name=joined(names),
        kind=joined([plan.shared.kinds for plan in plans]),
        ndim=joined([plan.shared.ndims for plan in plans]),
        nbytes=joined([plan.nbytes for plan in plans], np.int64),
        divisible=np.concatenate([d[p.shared.templates] for d, p in zip(divisible, plans, strict=True)]),
        offsets=matrix([(plan.offsets, plan.shared.ndims) for plan in plans], 0),
        lengths=matrix([(plan.lengths, plan.shared.ndims) for plan in plans], 1),
    )


def _agreed_sizes(
    plans: Sequence[Columns], offers: Offers, names: Sequence[str], samples: Sequence[tuple[int, int]]
) -> Ints:
    """The whole size of each name; shape ``(names, dims)``.

    Raises:
        LayoutMismatchError: If ranks say different things of one name.
    """
    num_dims = offers.offsets.shape[1]
    described = np.zeros((len(names), num_dims + 2), dtype=np.int64)
    # Ranks that sent the same names and sizes share one table, which is compared once.
    seen: dict[int, int] = {}
    dtypes: dict[object, int] = {}
    filled = np.zeros(len(names), dtype=bool)
    starts = np.cumsum([0, *(len(plan) for plan in plans)])
    for rank, plan in enumerate(plans):
        if id(plan.shared) in seen:
            continue
        seen[id(plan.shared)] = rank
        numbers = offers.name[starts[rank] : starts[rank + 1]]
        codes = np.array([dtypes.setdefault(t.dtype, len(dtypes)) for t in plan.shared.table] + [-1], dtype=np.int64)
        mine = np.empty((len(plan), num_dims + 2), dtype=np.int64)
        mine[:, :-2] = padded(plan.shared.sizes, plan.shared.ndims, fill=1, num_dims=num_dims)
        mine[:, -2], mine[:, -1] = plan.shared.ndims, codes[plan.shared.templates]
        new = ~filled[numbers]
        described[numbers[new]], filled[numbers[new]] = mine[new], True
        for row in np.flatnonzero((described[numbers] != mine).any(axis=1))[:1].tolist():
            other, other_row = samples[numbers[row]]
            raise LayoutMismatchError(
                f"{names[numbers[row]]!r}: rank {other} saves {_described(plans[other], other_row)}, "
                f"rank {rank} {_described(plan, row)}"
            )
    return described[:, :-2]


def _described(plan: Columns, row: int) -> str:
    if plan.shared.kinds[row] == BYTES:
        return "a pickled value"
    begin, end = plan.first_dims[row], plan.first_dims[row + 1]
    return f"{plan.shared.table[plan.shared.templates[row]].dtype} {tuple(plan.shared.sizes[begin:end].tolist())}"


def _distinct(offers: Offers, names: Sequence[str]) -> Holders:
    """Who offers each chunk.

    Raises:
        LayoutMismatchError: If ranks offer chunks of different shapes at one place, or one offers a chunk twice.
    """
    # Chunks without elements, which uneven sharding makes, stand for themselves only where nothing else begins.
    is_empty = (offers.lengths == 0).any(axis=1)
    order = np.lexsort([offers.rank, is_empty, *offers.offsets.T[::-1], offers.name])
    place = np.column_stack([offers.name, offers.offsets])[order]
    begins = np.append(True, (place[1:] != place[:-1]).any(axis=1))[: len(order)]
    leader = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    same = (offers.lengths[order] == offers.lengths[leader]).all(axis=1)
    for at in np.flatnonzero(~same & ~is_empty[order])[:1].tolist():
        one, other = int(leader[at]), int(order[at])
        raise LayoutMismatchError(
            f"{names[offers.name[one]]!r}: rank {offers.rank[one]} writes {_region(offers, one)}, "
            f"rank {offers.rank[other]} {_region(offers, other)}: they overlap"
        )
    row, leader = order[same], leader[same]
    rank = offers.rank[row]
    for at in np.flatnonzero((leader[1:] == leader[:-1]) & (rank[1:] == rank[:-1]) & ~is_empty[row[1:]])[:1].tolist():
        raise LayoutMismatchError(
            f"{names[offers.name[row[at]]]!r}: rank {rank[at]} writes {_region(offers, row[at])} twice"
        )
    return Holders(row, np.flatnonzero(np.append(True, leader[1:] != leader[:-1])[: len(row)]))


def _region(offers: Offers, row: int) -> str:
    dims = range(int(offers.ndim[row]))
    ends = [(int(offers.offsets[row, d]), int(offers.offsets[row, d] + offers.lengths[row, d])) for d in dims]
    return f"[{', '.join(f'{begin}:{end}' for begin, end in ends)}]"


def _assigned(offers: Offers, holders: Holders, num_ranks: int, *, to_lowest_rank: bool) -> tuple[Ints, Ints, Ints]:
    """Offers that are taken up, with the first row and the number of rows that are meant; -1 for all."""
    counts = holders.counts
    if to_lowest_rank or not (counts > 1).any():
        none = np.full(len(counts), -1, dtype=np.int64)
        return holders.row[holders.begin], none, none
    lone = holders.row[holders.begin[counts == 1]]
    load = np.bincount(offers.rank[lone], weights=offers.nbytes[lone] + _ITEM_WEIGHT, minlength=num_ranks).tolist()
    several = np.flatnonzero(counts > 1)
    heads = holders.row[holders.begin]
    divisible = np.logical_and.reduceat(offers.divisible[holders.row], holders.begin)
    # The longest first: what is short evens out what they leave.
    several = several[np.argsort(-offers.nbytes[heads[several]], kind="stable")]
    groups = [holders.row[holders.begin[g] : holders.begin[g] + counts[g]] for g in several.tolist()]
    ranks = [tuple(offers.rank[group].tolist()) for group in groups]
    sizes = offers.nbytes[heads[several]].tolist()
    piece_bytes = _piece_bytes(ranks, sizes)
    taken: list[tuple[int, int, int]] = []
    for place, (group, members, size) in enumerate(zip(groups, ranks, sizes, strict=True)):
        head, most = int(heads[several[place]]), piece_bytes[members]
        is_cut = size >= 2 * most and divisible[several[place]] and offers.ndim[head] > 0
        pieces = _pieces(int(offers.lengths[head, 0]), size, size // most, len(members)) if is_cut else [(-1, -1, size)]
        for begin, length, weight in pieces:
            at = min(range(len(members)), key=lambda i: load[members[i]])
            load[members[at]] += weight + _ITEM_WEIGHT
            taken.append((int(group[at]), begin, length))
    rows, first, count = np.array(taken, dtype=np.int64).reshape(-1, 3).T
    whole = np.full(len(lone), -1, dtype=np.int64)
    return np.concatenate([lone, rows]), np.concatenate([whole, first]), np.concatenate([whole, count])


def _piece_bytes(ranks: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> dict[tuple[int, ...], int]:
    """For each set of replicas, the most that one of them writes of a tensor in one piece."""
    held: dict[tuple[int, ...], int] = {}
    for members, size in zip(ranks, sizes, strict=True):
        held[members] = held.get(members, 0) + size
    return {members: max(_MIN_PIECE_BYTES, n // (len(members) * _PIECES_A_RANK)) for members, n in held.items()}


def _pieces(rows: int, total: int, num_pieces: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """First row, rows and bytes of each piece of a chunk: as many for each rank, where there are enough."""
    if num_pieces > num_ranks:
        num_pieces -= num_pieces % num_ranks
    row_bytes, step = total // rows, -(-rows // num_pieces)
    return [(begin, min(step, rows - begin), row_bytes * min(step, rows - begin)) for begin in range(0, rows, step)]


def _merged(
    offers: Offers,
    row: Ints,
    first: Ints,
    count: Ints,
    names: list[str],
    samples: list[tuple[int, int]],
    num_ranks: int,
) -> Merged:
    # By name, then rank, then place: the order in which DCP lists a tensor's chunks.
    by_name = np.lexsort([first, offers.row[row], offers.rank[row], offers.name[row]])
    row, first, count = row[by_name], first[by_name], count[by_name]
    is_tensor = offers.kind[row] != BYTES
    per_name = np.bincount(offers.name[row[is_tensor]], minlength=len(names))
    first_chunks = np.concatenate([[0], np.cumsum(per_name)])
    hints = np.full(len(row), -1, dtype=np.int64)
    hints[is_tensor] = np.arange(int(first_chunks[-1])) - first_chunks[offers.name[row[is_tensor]]]
    is_piece = first >= 0
    offsets, lengths = offers.offsets[row], offers.lengths[row]
    if is_piece.any():  # without tensors there is no dimension
        offsets[is_piece, 0] += first[is_piece]
        lengths[is_piece, 0] = count[is_piece]
    used = (np.arange(offsets.shape[1]) < offers.ndim[row][:, None])[is_tensor]
    shards = (offers.kind[row] == SHARD) | (is_piece & (offers.kind[row] == TENSOR))
    selections = []
    order = np.lexsort([first, offers.row[row], offers.rank[row]])
    bounds = np.searchsorted(offers.rank[row][order], np.arange(num_ranks + 1))
    for begin, end in pairwise(bounds.tolist()):
        mine = order[begin:end]
        pieces = {int(i): (int(first[mine[i]]), int(count[mine[i]])) for i in np.flatnonzero(is_piece[mine])}
        selections.append(Selection(offers.row[row[mine]], hints[mine], shards[mine], pieces))
    return Merged(
        selections=selections,
        names=names,
        samples=samples,
        first_chunks=first_chunks,
        ndims=offers.ndim[row][is_tensor],
        offsets=offsets[is_tensor][used],
        lengths=lengths[is_tensor][used],
    )
