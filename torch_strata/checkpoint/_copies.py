"""Who writes what where ranks have copied no more than what they wrote last time, and a state has changed since.

Decides, does nothing. Ranks that have copied a part only have copied parts of one and the same assignment, that of the
save before. So a chunk is without a copy only if the rank that wrote it last time holds it no more.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_strata.checkpoint._columns import BYTES, Ints
from torch_strata.errors import CheckpointError

if TYPE_CHECKING:
    from torch_strata.checkpoint._merge import Holders, Offers, Selection

__all__ = ["assigned_by_copies"]

# Rows that a rank has copied of one of its items: the first and their number, or None for all.
_Rows = dict[int, list[tuple[int, int] | None]]


def assigned_by_copies(
    offers: "Offers", holders: "Holders", names: Sequence[str], copies: Sequence["Selection | None"]
) -> tuple[Ints, Ints, Ints]:
    """Offers that are taken up, with the first row and the number of rows that are meant; -1 for all.

    Args:
        offers: All ranks' items.
        holders: Who holds each chunk.
        names: By number.
        copies: What each rank has copied, by rank; None for everything.

    Raises:
        CheckpointError: If nobody has copied a chunk, naming it.
    """
    copied = [None if copy is None else _rows_of(copy) for copy in copies]
    taken: list[tuple[int, int, int]] = []
    for group in np.split(holders.row, holders.begin[1:]):
        taken += _takers(offers, group.tolist(), names, copied)
    rows, first, count = np.array(taken, dtype=np.int64).reshape(-1, 3).T
    return rows, first, count


def _rows_of(copy: "Selection") -> _Rows:
    rows: _Rows = {}
    for place, row in enumerate(copy.rows.tolist()):
        rows.setdefault(row, []).append(copy.pieces.get(place))
    return rows


def _takers(
    offers: "Offers", group: Sequence[int], names: Sequence[str], copied: Sequence[_Rows | None]
) -> list[tuple[int, int, int]]:
    """Of one chunk's offers the first that is copied whole, or those whose rows together are the chunk."""
    parts: list[tuple[int, int, int]] = []
    for offer in group:
        own = copied[int(offers.rank[offer])]
        # Values are always copied.
        rows = [None] if own is None or offers.kind[offer] == BYTES else own.get(int(offers.row[offer]), [])
        if None in rows:
            return [(offer, -1, -1)]
        parts += [(offer, *part) for part in rows if part is not None]
    parts.sort(key=lambda part: part[1])
    end = 0
    for _, first, count in parts:
        if first != end:
            break
        end += count
    if not group or (parts and end == offers.lengths[group[0], 0]):
        return parts
    ranks = ", ".join(str(offers.rank[offer]) for offer in group)
    raise CheckpointError(
        f"{names[offers.name[group[0]]]!r}: no copy of it to save: ranks that hold it ({ranks}) left it to one that "
        "wrote it last time and holds it no more; the next save copies it everywhere"
    )
