"""What a rank wrote of its state last time: all that it needs to copy of one of the same structure.

A rank that has copied no more says so in its plan (`Copied`). The planning rank then assigns the same as before, or,
where that holds no more, only what is copied (`_copies.py`). What was not copied is a tensor on the meta device, which
no writer takes: it cannot be written by mistake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan

from torch_strata.checkpoint._leaves import Outline
from torch_strata.checkpoint._paths import Path

if TYPE_CHECKING:
    from torch_strata.checkpoint._merge import Selection
    from torch_strata.checkpoint.planning import ChosenItems, PackedItems

__all__ = ["Assignment", "Copied", "Rows", "Share", "assignment_of", "copied_rows", "rows_only"]

# The first row, and their number.
Rows = tuple[int, int]

# What a rank writes of one tensor: some rows, perhaps none; None for all of it.
Share = tuple[Rows, ...] | None


class Copied(NamedTuple):
    """What a rank has copied of the tensors that it offers.

    Attributes:
        key: Of the plan of all ranks that assigned it.
        selection: The items.
    """

    key: bytes
    selection: "Selection"


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """A rank's part in the last save.

    Attributes:
        number: Of that save.
        options: Of its planner.
        structure: Of its state.
        shares: What the rank wrote of each tensor, in the order of `Leaves`.
        offer: The plan that the rank sent.
        copied: What it may say next time.
    """

    number: int
    options: tuple[bool, ...]
    structure: list[Any]
    shares: Sequence[Share]
    offer: SavePlan
    copied: Copied

    def is_of(self, structure: list[Any] | None) -> bool:
        """Whether a state with this structure is planned alike."""
        return structure == self.structure

    def repeated(self) -> SavePlan:
        """The plan to send for a state of which only this was copied."""
        items: PackedItems = self.offer.items  # type: ignore[assignment]
        return replace(self.offer, items=items.limited_to(self.copied))  # type: ignore[arg-type]


def assignment_of(
    outline: Outline,
    *,
    number: int,
    options: tuple[bool, ...],
    offer: SavePlan,
    chosen: "ChosenItems",
    names: Mapping[str, Path],
) -> Assignment | None:
    """What to remember of a save, if the next one can make use of it.

    Args:
        outline: Of the state that was planned.
        number: Of the save.
        options: Of the planner.
        offer: What the rank offered.
        chosen: What it was told to write.
        names: Where each name stands in the state.
    """
    if outline.structure is None or not chosen.key:
        return None
    columns, selection = offer.items.columns, chosen.selection  # type: ignore[attr-defined]
    shares: dict[str, list[Rows | None]] = {name: [] for name in columns.shared.names}
    for place, row in enumerate(selection.rows.tolist()):
        shares[columns.shared.names[row]].append(selection.pieces.get(place))
    name_at = {path: name for name, path in names.items()}
    return Assignment(
        number=number,
        options=options,
        structure=outline.structure,
        shares=[_share(shares.get(name_at.get(path, ""))) for path in outline.paths],
        offer=offer,
        copied=Copied(chosen.key, selection),
    )


def _share(parts: list[Rows | None] | None) -> Share:
    # What is offered under no name of its own, as in a tuple, is part of a value that is written here.
    if parts is None:
        return None
    rows = [part for part in parts if part is not None]
    return None if len(rows) < len(parts) else tuple(rows)


def rows_only(parts: Mapping[Rows, torch.Tensor]) -> torch.Tensor:
    """What stands for a tensor of which only some rows are copied."""
    placeholder = torch.empty(0, device="meta")
    placeholder.copied_rows = parts  # type: ignore[attr-defined]
    return placeholder


def copied_rows(value: object) -> Mapping[Rows, torch.Tensor] | None:
    """The rows that `rows_only` was given; None for anything else."""
    return getattr(value, "copied_rows", None) if isinstance(value, torch.Tensor) and value.is_meta else None
