"""The StrataWriter of a CheckpointManager: knows its run, may refer to an earlier checkpoint, retains afterwards."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_strata import _native
from torch_strata._store import open_store, place_below
from torch_strata.checkpoint._assignment import Assignment
from torch_strata.checkpoint._content import content_of
from torch_strata.checkpoint._generation import Claim
from torch_strata.checkpoint._items import NativeItems
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint._order import SaveOrder
from torch_strata.checkpoint._staged import StagedFuture, StagedState
from torch_strata.checkpoint.alarms import in_words
from torch_strata.checkpoint.copying import Destination, commit_content
from torch_strata.checkpoint.handle import UnseenSaves
from torch_strata.checkpoint.planning import PackedItems
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.checkpoint.run_record import RunRecord
from torch_strata.checkpoint.writer import StrataWriter
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError, StrataError

if TYPE_CHECKING:
    from torch_strata._types import RunInfo, StockParts

__all__ = ["OnTorn", "RunWriter", "admit", "retain"]

_logger = logging.getLogger(__name__)

OnTorn = Literal["warn", "raise"]


# Then one is saved whole, as it is: what tensors are XORed with is not to grow older and older, and stock readers find
# something now and then. What is XORed with one from 16 saves ago has mostly been given a newer base long before.
_MOST_ENCODED = 16


class _Told(NamedTuple):
    """What the planning rank tells each rank."""

    rank: int
    parent: str | None
    is_whole: bool


class RunWriter(StrataWriter):
    """Saves one checkpoint of a run. The planning rank decides which earlier one it may refer to."""

    def __init__(
        self,
        root: str,
        run: _native.Run,
        order: SaveOrder,
        *,
        claim: Claim,
        unseen: UnseenSaves,
        record: RunRecord,
        on_torn: OnTorn,
        config: StorageConfig,
        compress: bool,
    ) -> None:
        self._root, self._run, self._order = root, run, order
        self._claim, self.unseen = claim, unseen
        self._record, self._on_torn = record, on_torn
        self._compress = compress and order.checkpoint_type.is_whole
        self._parent: str | None = None
        self._rewrites = False
        super().__init__(place_below(root, order.folder), config=config, run_root=root, overwrite=True)

    def copy_state(self, state_dict: dict[str, Any], *, last: Assignment | None = None) -> StagedState | StagedFuture:
        """As the writer's own.

        Raises:
            CheckpointError: Also if the state changed meanwhile, where that is asked for.
        """
        staged = super().copy_state(state_dict, last=last)
        if isinstance(staged, StagedState) and staged.torn:
            self._record.note_torn(self._order)
            if self._on_torn == "raise":
                staged.lease.release()
                raise CheckpointError(f"{self.checkpoint_id}: changed while it was copied: {in_words(staged.torn)}")
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the writer's own, once the run allows this step.

        Raises:
            CheckpointExistsError: If the step is saved already, by whomever.
            CheckpointError: If the run has gone further; if somebody holds what would be replaced.
        """
        if self._commits:
            order = self._order
            parent = admit(self._run, self._root, order)
            self._record.learn_newest(self._run, order)
            if order.checkpoint_type is CheckpointType.INCREMENTAL:
                self._parent = parent
                if self._compress:
                    self._bound_chain()
        prepared = super().prepare_local_plan(plan)
        if self._commits:
            self._run.hold(self._generation())
        return prepared

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the writer's own; tells each rank what it may refer to, and whether all tensors are whole."""
        is_whole = all(_are_whole(plan.items) for plan in plans)
        self._rewrites = self._makes_safetensors and not is_whole
        told = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=_Told(plan.storage_data, self._parent, is_whole)) for plan in told]

    def _bound_chain(self) -> None:
        """Save all of the state as it is, if enough checkpoints in a row were encoded or there is none before."""
        parent = None if self._parent is None else self._open_parent(self._parent)
        if parent is None or parent.encoded_in_a_row >= _MOST_ENCODED:
            self._parent = None
            self._order = replace(self._order, checkpoint_type=CheckpointType.FULL)
            _logger.info("%s: is saved as a full checkpoint", self.checkpoint_id)

    @property
    def _makes_safetensors(self) -> bool:
        return self._order.checkpoint_type is CheckpointType.MODEL_ONLY

    def _told_rank(self, plan: SavePlan) -> int:
        told: _Told = plan.storage_data
        return told.rank

    def _write(self, items: NativeItems, plan: SavePlan, rank: int) -> bytes:
        told: _Told = plan.storage_data
        store, save_id, transfer = self._store(), self.save_id, self.transfer
        if not self._makes_safetensors:
            parent = None if told.parent is None else self._open_parent(told.parent)
            if parent is None and self._compress:
                parent = _native.Parent.none()
            return items.write(store, rank=rank, save_id=save_id, parent=parent, transfer=transfer)
        if names := items.value_names():
            _logger.info("%s: no tensors, and not in safetensors: %s", self.checkpoint_id, ", ".join(names))
        if told.is_whole:
            return items.write_safetensors(store, rank=rank, save_id=save_id, transfer=transfer)
        return items.write(store, rank=rank, save_id=save_id, parent=None, transfer=transfer)

    def _open_parent(self, folder: str) -> _native.Parent | None:
        try:
            return _native.Parent.open(
                open_store(place_below(self._root, folder), self._config), folder, encode=self._compress
            )
        except StrataError as error:
            _logger.warning("%s: %s: %s; everything is written", self.checkpoint_id, type(error).__name__, error)
            return None

    def _generation(self) -> int:
        return self._claim.generation()

    def _run_info(self) -> "RunInfo":
        return self._order.as_native()

    def _stock_parts(self, planner_data: Any, save_id: str) -> "StockParts | None":
        # Stock cannot read safetensors by a `.metadata`.
        return None if self._makes_safetensors else super()._stock_parts(planner_data, save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the writer's own; then what the policy does not keep goes. A failure at that is only logged.

        Of a model in shards whole tensors are made first, and committed over it.

        Raises:
            StrataError: As the writer's own. If shards could not be made whole, they are committed all the same.
        """
        super().finish(metadata, results)
        if self._rewrites:
            self._rewrite()
        assert self._stats is not None  # the writer's own has set it
        self._record.note_commit(self._order, self._stats.model_hash)
        retain(self._run, self._root, self._record)

    def _rewrite(self) -> None:
        """Commit what has just been committed, in files of safetensors."""
        started = time.monotonic()
        to = Destination(
            place=os.fspath(self.checkpoint_id),
            config=self._config,
            overwrite=True,
            run_info=self._run_info(),
            run_root=self._run_root_store(),
            generation=self._generation(),
            as_safetensors=True,
        )
        try:
            opened = open_checkpoint(self._store(), self.checkpoint_id, rank=None)
            save_id, done = commit_content(content_of(opened), to)
        except StrataError as error:
            error.add_note(f"{self.checkpoint_id}: the model is committed, in shards that only DCP reads")
            raise
        self._note(done, time.monotonic() - started)
        assert self._stats is not None  # `_note` has set it
        self._stats = replace(self._stats, save_id=save_id)


def _are_whole(items: Sequence[WriteItem]) -> bool:
    """Whether each tensor that is written is written whole."""
    if isinstance(items, PackedItems):
        return np.array_equal(items.columns.lengths, items.columns.shared.sizes)
    chunks = (item.tensor_data for item in items if item.tensor_data is not None)
    return all(data.chunk.sizes == data.size for data in chunks)


def admit(run: _native.Run, root: str, order: SaveOrder) -> str | None:
    """Folder of the checkpoint to which the save may refer, if any. A damaged one that it replaces is told in the log.

    Raises:
        CheckpointExistsError: If the step is saved already, by whomever.
        CheckpointError: If the run has gone further; if somebody holds what would be replaced.
    """
    parent, damage = run.check_new(order.step, order.checkpoint_type.value, overwrite=order.overwrite)
    if damage is not None:
        _logger.warning("%s/%s: is damaged, and this save replaces it: %s", root, order.folder, damage)
    return parent


def retain(run: _native.Run, root: str, record: RunRecord) -> None:
    """Remove what the policy of `run` does not keep, and log it."""
    try:
        removed, num_kept, num_objects, freed_bytes, notes = run.retain()
    except StrataError as error:
        _logger.warning("%s: nothing more is removed for now: %s: %s", root, type(error).__name__, error)
        return
    record.note_sweep(len(removed), num_kept, num_objects, freed_bytes)
    for note in notes:
        _logger.warning("%s: %s", root, note)
    if num_objects:
        names = ", ".join(removed) or "what saves that ended long ago have left"
        _logger.info("%s: removed %s: %d objects, %.0f MB", root, names, num_objects, freed_bytes / 1e6)
