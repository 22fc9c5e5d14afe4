"""The StrataWriter of a CheckpointManager: knows its run, may refer to an earlier checkpoint, retains afterwards."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torch_strata import _native
from torch_strata.checkpoint._order import SaveOrder
from torch_strata.checkpoint._store import open_store
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.checkpoint.writer import StrataWriter
from torch_strata.config import StorageConfig
from torch_strata.errors import StrataError

if TYPE_CHECKING:
    from torch_strata._types import RunInfo

__all__ = ["RunWriter", "retain"]

_logger = logging.getLogger(__name__)


# Then one is saved whole, as it is: what tensors are XORed with is not to grow older and older, and stock readers find
# something now and then. What is XORed with one from 16 saves ago has mostly been given a newer base long before.
_MOST_ENCODED = 16


class _Told(NamedTuple):
    """What the planning rank tells each rank."""

    rank: int
    parent: str | None


class RunWriter(StrataWriter):
    """Saves one checkpoint of a run. The planning rank decides which earlier one it may refer to."""

    def __init__(
        self,
        root: str,
        run: _native.Run,
        order: SaveOrder,
        *,
        config: StorageConfig,
        compress: bool = False,
        **settings: Any,
    ) -> None:
        self._root, self._run, self._order = root, run, order
        self._compress = compress and order.checkpoint_type.is_whole
        self._parent: str | None = None
        super().__init__(f"{root.rstrip('/')}/{order.folder}", config=config, run_root=root, **settings)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the writer's own, once the run allows this step.

        Raises:
            CheckpointExistsError: If the step is saved already.
            CheckpointError: If the run has gone further.
        """
        if self._commits:
            order = self._order
            newest = self._run.check_new(order.step, order.checkpoint_type.value, overwrite=order.overwrite)
            is_incremental = order.checkpoint_type is CheckpointType.INCREMENTAL
            # What it replaces goes: it cannot refer to that.
            if is_incremental and newest is not None and newest != order.step:
                self._parent = _native.run_folder(newest, CheckpointType.FULL.value)
            if is_incremental and self._compress:
                self._bound_chain()
        prepared = super().prepare_local_plan(plan)
        if self._commits:
            self._run.hold(self._generation())
        return prepared

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the writer's own; tells each rank what it may refer to."""
        told = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=_Told(plan.storage_data, self._parent)) for plan in told]

    def _bound_chain(self) -> None:
        """Save all of the state as it is, if enough checkpoints in a row were encoded or there is none before."""
        parent = None if self._parent is None else self._open_parent(self._parent)
        if parent is None or parent.encoded_in_a_row >= _MOST_ENCODED:
            self._parent = None
            self._order = replace(self._order, checkpoint_type=CheckpointType.FULL)
            _logger.info("%s: is saved as a full checkpoint", self.checkpoint_id)

    def _told(self, plan: SavePlan) -> tuple[int, _native.Parent | None]:
        told: _Told = plan.storage_data
        parent = None if told.parent is None else self._open_parent(told.parent)
        if parent is None and self._compress:
            parent = _native.Parent.none()
        return told.rank, parent

    def _open_parent(self, folder: str) -> _native.Parent | None:
        place = f"{self._root.rstrip('/')}/{folder}"
        try:
            return _native.Parent.open(open_store(place, self._config), folder, encode=self._compress)
        except StrataError as error:
            _logger.warning("%s: %s: %s; everything is written", self.checkpoint_id, type(error).__name__, error)
            return None

    def _run_info(self) -> "RunInfo":
        return self._order.as_native()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the writer's own; then what the policy does not keep goes. A failure at that is only logged."""
        super().finish(metadata, results)
        retain(self._run, self._root)


def retain(run: _native.Run, root: str) -> None:
    """Remove what the policy of `run` does not keep, and log it."""
    try:
        removed, num_objects, freed_bytes, notes = run.retain()
    except StrataError as error:
        _logger.warning("%s: nothing more is removed for now: %s: %s", root, type(error).__name__, error)
        return
    for note in notes:
        _logger.warning("%s: %s", root, note)
    if num_objects:
        names = ", ".join(removed) or "what saves that ended long ago have left"
        _logger.info("%s: removed %s: %d objects, %.0f MB", root, names, num_objects, freed_bytes / 1e6)
