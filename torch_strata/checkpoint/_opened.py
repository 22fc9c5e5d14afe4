"""A checkpoint open for reading, ours or stock's, in one form. Imports no torch."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch_strata import _native
from torch_strata.checkpoint._entries import unpack_entries
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._paths import decode_fqn, encode_fqn
from torch_strata.checkpoint._safetensors import open_safetensors
from torch_strata.checkpoint._unpickle import load_stock_metadata
from torch_strata.errors import CheckpointNotFoundError, CorruptionError, ObjectNotFoundError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = ["Opened", "metadata_name", "open_checkpoint", "opened_safetensors"]

_STOCK_RANK_INDEX = re.compile(r"__\d+\.metadata")

# As strata-checkpoint's BYTES_KEY, the one key of a checkpoint of bytes.
_BYTES_KEY = b"bytes"

Key = tuple[bytes, tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One committed state.

    Attributes:
        native: The Rust core's handle.
        where: The place, for messages.
        foreign_entries: One for each key of the state_dict, where there is no manifest of ours to hold them.
        foreign_planner_data: The planner's data where there is no manifest of ours to hold it.
        transforms: Stream transforms of stock items that have any.
        save_id: Identity of the save; empty where stock left none.
    """

    native: _native.Checkpoint
    where: str
    foreign_entries: "Sequence[TensorEntry]" = ()
    foreign_planner_data: Any = None
    transforms: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    save_id: str

    @property
    def written_by(self) -> Literal["torch_strata", "stock torch", "safetensors"]:
        """Whose index was read."""
        if self.native.is_stock:
            return "stock torch"
        return "torch_strata" if self.native.number else "safetensors"

    @functools.cached_property
    def entries(self) -> "Sequence[TensorEntry]":
        """One for each key of the state_dict, in its order."""
        if self.written_by != "torch_strata":
            return self.foreign_entries
        with gc_paused():
            return list(unpack_entries(self.native.entries()))

    @property
    def holds_bytes(self) -> bool:
        """Whether it is what one process serialised itself and handed to a manager, not a state."""
        if self.native.run is None or self.written_by != "torch_strata" or self.native.planner_data:
            return False
        return [(entry[0], bool(entry[1])) for entry in self.entries[:2]] == [(_BYTES_KEY, False)]

    def same_as(self, other: "Opened") -> bool:
        """Whether nothing was saved between the two openings."""
        mine, theirs = (self.native.number, self.save_id), (other.native.number, other.save_id)
        return self.native.is_stock == other.native.is_stock and mine == theirs


def metadata_name(rank: int | None) -> str:
    """Stock's index of the whole checkpoint, or of what one rank saved on its own."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


@gc_paused()
def open_checkpoint(store: _native.Store, place: str | os.PathLike[str], *, rank: int | None) -> Opened:
    """The newest committed state at a place; where nothing is committed, the safetensors files there.

    Args:
        store: The place's store.
        place: The place, for messages.
        rank: To read what that rank saved on its own, else None.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
        CorruptionError: If an index is damaged or names objects elsewhere.
        StorageError: If the place cannot be reached.
    """
    where = os.fspath(place)
    try:
        native = _native.Checkpoint.open(store, rank=rank)
    except CheckpointNotFoundError:
        found = open_safetensors(store, where) if rank is None else None
        if found is None:
            _check_no_rank_saved(store, where, rank)
            raise
        return opened_safetensors(*found, where)
    if not native.is_stock:
        return _ours(native, where)
    data = native.stock_metadata
    if data is None:
        raise CorruptionError(f"{where}: .metadata disappeared while it was opened")
    try:
        stock = load_stock_metadata(data, f"{where}/{metadata_name(rank)}")
    except CorruptionError as error:
        native.without_metadata(str(error))
        return _ours(native, where)
    rows = [(encode_fqn(i.fqn), i.offsets, i.index, i.relative_path, i.offset, i.length) for i in stock.items]
    if not native.set_stock_entries(rows):
        return _ours(native, where)
    return Opened(
        native=native,
        where=where,
        foreign_entries=stock.entries,
        foreign_planner_data=stock.planner_data,
        transforms={row[:2]: item.transforms for row, item in zip(rows, stock.items, strict=True) if item.transforms},
        save_id=stock.save_id or "",
    )


def opened_safetensors(native: _native.Checkpoint, entries: "Sequence[TensorEntry]", where: str) -> Opened:
    """Tensors of safetensors files that were found."""
    # Names with dots are names: each key is its own path.
    flat = {name: (name,) for name in (decode_fqn(entry[0]) for entry in entries)}
    return Opened(native=native, where=where, foreign_entries=entries, foreign_planner_data=flat, save_id="")


def _check_no_rank_saved(store: _native.Store, where: str, rank: int | None) -> None:
    """What stock's ranks saved on their own has no index of the whole."""
    try:
        listed = store.list("") if rank is None else []
    except ObjectNotFoundError:
        return
    if any(_STOCK_RANK_INDEX.fullmatch(name) for name, _ in listed):
        raise CheckpointNotFoundError(
            f"no checkpoint of all ranks at {where}: they saved here without collectives (use_collectives=False), each "
            "a part of its own: name one, as with strata verify --rank 0"
        )


def _ours(native: _native.Checkpoint, where: str) -> Opened:
    return Opened(native=native, where=where, save_id=native.save_id)
