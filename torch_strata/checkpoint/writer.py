"""StrataWriter: `torch.distributed.checkpoint`'s StorageWriter over the Rust core.

Tensors are written from their own memory. Nothing is visible before every rank's objects are durable and the planning
rank has committed; a failed save leaves the checkpoint that was there.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torch_strata import _native
from torch_strata._store import check_flag, is_below, is_place, open_store, resolve_config
from torch_strata.checkpoint._arena import Lease, arena, forget_frames
from torch_strata.checkpoint._assignment import Assignment
from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._generation import claimed, generation_of, take_over
from torch_strata.checkpoint._items import NativeItems
from torch_strata.checkpoint._lazy_state import PlannedMetadata
from torch_strata.checkpoint._leftovers import remove_objects, remove_save
from torch_strata.checkpoint._metadata import RECORDS_STRIDES, promises_of
from torch_strata.checkpoint._opened import metadata_name, open_checkpoint
from torch_strata.checkpoint._optimizers import check_optimizers
from torch_strata.checkpoint._planner_data import decode_planner_data, encode_planner_data
from torch_strata.checkpoint._process import forget_dead_process
from torch_strata.checkpoint._progress import shown, wants_bar
from torch_strata.checkpoint._safetensors import holds_safetensors
from torch_strata.checkpoint._staged import StagedFuture, StagedState
from torch_strata.checkpoint._stock_pickle import stock_parts
from torch_strata.checkpoint._training_group import warn_of_training_group
from torch_strata.checkpoint._turns import takes_turn, wait_for_turn
from torch_strata.checkpoint._unpickle import previous_save_id
from torch_strata.checkpoint.handle import UnseenSaves
from torch_strata.checkpoint.planning import compact
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.staging import snapshot, snapshot_behind_training
from torch_strata.checkpoint.store_stats import StoreStats
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError, CheckpointExistsError, ConfigError

if TYPE_CHECKING:
    from torch_strata._types import RunInfo, StockParts

__all__ = ["SaveStats", "StrataWriter"]

_logger = logging.getLogger(__name__)


class StrataWriter(StorageWriter):
    """Saves to a local path or a URL.

    Args:
        path: Local path or URL of the checkpoint.
        config: Limits of the store.
        storage_options: The store's own settings; win over those of `config`.
        overwrite: Whether an existing checkpoint may be replaced.
        run_root: Place of the run that this checkpoint belongs to. If given, the run's generation is claimed at this
            process's first save, and a run that was replaced by a newer one cannot commit any more.
        world_size: Ranks that save together with ``use_collectives=False``, where DCP does not tell; the default
            group's if not given.
        overlap: One optimizer or several: ``dcp.async_save`` then returns before what only their ``step`` changes is
            copied; the next ``step`` waits for it. It returns an ``AsyncSaveResponse``.

    Pass it to ``dcp.save(state, storage_writer=...)`` on every rank. Also an AsyncStager: ``dcp.async_save`` copies
    the state with it before training goes on. Can be pickled; what is open is not carried along.

    Attributes:
        transfer: Of the save that begins or runs: bytes written, and a way to end it from another thread.

    Raises:
        ConfigError: If the place or a setting cannot be used.
    """

    # AsyncStager: nobody needs to wait after `stage`; with `overlap` the optimizer does.
    _synchronize_after_execute: bool = False
    # Whose failures `async_save` raises with it; if None those of the process.
    unseen: UnseenSaves | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: StorageConfig | None = None,
        storage_options: Mapping[str, str] | None = None,
        overwrite: bool = True,
        run_root: str | os.PathLike[str] | None = None,
        world_size: int | None = None,
        overlap: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        super().__init__()
        self._config = resolve_config(config, storage_options)
        self._overwrite = check_flag("overwrite", overwrite)
        if world_size is not None and (type(world_size) is not int or world_size < 1):
            raise ConfigError(f"world_size: expected an int of at least 1, found {world_size!r}")
        self._world_size = world_size
        self._run_root = run_root
        self._run_root_store()
        self._overlap = check_optimizers(overlap)
        self._is_a_copy = False  # in a process that saves for another one
        self._staged: Lease | None = None
        self._place: str | os.PathLike[str] = path
        self._check_run_root()
        self._opened: _native.Store | None = None
        self._begin_anew()
        self._store()  # a bad URL fails here, not in the middle of a save

    def _begin_anew(self) -> None:
        self._save_id = uuid.uuid4().hex
        self._pid = os.getpid()
        self._spent = False
        self._rank: int | None = None
        self._plans = False
        self._use_collectives = True
        self._base: _native.Base | None = None
        self._stats: SaveStats | None = None
        self.transfer = _native.Transfer()
        self._met_before = StoreStats()

    def __getstate__(self) -> dict[str, Any]:
        unopened = {"_base": None, "_opened": None, "transfer": None, "_staged": None, "_overlap": ()}
        return {**self.__dict__, **unopened, "_held": claimed(self._run_root), "_home": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held, home = state.pop("_held"), state.pop("_home")
        self.__dict__.update(state)
        if home != os.getpid() and os.fspath(self._place).startswith("memory://"):
            raise ConfigError(f"{self._place}: what another process saves to memory:// nobody else can load")
        self._is_a_copy = home != os.getpid()
        self._begin_anew()  # the copy and the original may both save: their objects must not have the same names
        take_over(self._run_root, held)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the next save goes."""
        return self._place

    @property
    def save_id(self) -> str:
        """Identity of the save that begins, runs or was the last one here."""
        return self._save_id

    @property
    def stats(self) -> SaveStats | None:
        """What the last save did on this rank; None before the first."""
        return self._stats

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can save to `checkpoint_id`: a local path that can be made, or a URL it knows."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at another place if one is given. DCP calls it only when given a ``checkpoint_id``."""
        if checkpoint_id:
            self._place = checkpoint_id
            self._opened = None
            self._check_run_root()
        self._begin_anew()

    def storage_meta(self) -> StorageMeta | None:
        """Identity of the save that begins or runs; DCP asks for it first."""
        return StorageMeta(checkpoint_id=self._place, save_id=self._fresh_save_id())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank. DCP passes ``rank`` and ``use_collectives`` because of the name ``kwargs``."""
        self._fresh_save_id()
        self._plans = is_coordinator
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)
        self._base = None
        self._met_before = StoreStats.of(self._store())
        if self._staged is not None:
            self._staged.runs_in(threading.current_thread())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look at the place before anything is written: on the planning rank, or on each without collectives.

        Raises:
            CheckpointExistsError: If a checkpoint is there and may not be overwritten.
            StorageError: If the place cannot be reached.
        """
        if self._commits:
            self._base = _native.open_base(self._store(), rank=self._own_rank, transfer=self.transfer)
            self._check_place(self._base)
            if self._base.stale_metadata:
                self._republish()
            self._generation()
        return replace(plan, items=compact(plan.items))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number, for callers of DCP that do not pass it. Carries no name: plans may be cached."""
        return [replace(plan, items=compact(plan.items), storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; durable when it returns. Blocks with the GIL released.

        Raises:
            CheckpointError: If a value cannot be stored; nothing has been written then.
            StorageError: If the store fails. What this rank wrote is removed; what others wrote stays until the next
                save here.
        """
        started = time.monotonic()
        self._spent = True
        rank = self._told_rank(plan) if self._rank is None else self._rank
        items = NativeItems(for_safetensors=self._makes_safetensors)
        transfer = self.transfer
        bar = wants_bar(self._config.progress, in_background=self._is_a_copy)
        try:
            items.resolve(plan.items, planner)
            with shown("saving", os.fspath(self._place), lambda: transfer.progress, self._met, bar=bar):
                record = self._write(items, plan, rank)
        except BaseException as error:
            forget_frames(error)
            raise
        finally:
            arena().release(items.addresses())
            items.clear()  # an error's traceback holds this frame
        encoded_payload_bytes, encoded_bytes = _native.record_encoded(record)
        self._stats = SaveStats(
            save_id=self._save_id,
            written_bytes=sum(size for _, size in _native.record_objects(record)),
            encoded_payload_bytes=encoded_payload_bytes,
            encoded_bytes=encoded_bytes,
            write_seconds=time.monotonic() - started,
            store=self._met(),
        )
        # One compact result a rank: DCP only carries it to `finish`.
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(f"rank {rank}"), self._stats.written_bytes, record)])
        return future

    @gc_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what the ranks wrote: the last step, after which the checkpoint is the new one.

        Empties the lists in `results`: of many ranks they are tens of megabytes, which the commit needs itself.

        Raises:
            ObjectNotFoundError: If an object of another rank is not visible from here.
            CorruptionError: If an object has another size than its rank wrote.
            CheckpointError: If a planned item was not written, or twice.
            StorageError: If the store fails before the manifest is written. Once it is, the checkpoint is committed:
                a failure to write `.metadata` or to remove what is superseded is in ``stats.warnings``, and the next
                save here makes up for it. Only over a stock `.metadata` without a save_id, as older torch writes, the
                failure to replace it is an error: that one still counts then.
            PreconditionError: If somebody else committed here meanwhile.
            StaleGenerationError: If a newer run has claimed the run root.
        """
        started = time.monotonic()
        base = self._base
        if base is None:
            raise CheckpointError("finish() was called on a rank that did not prepare a plan")
        records = [result.storage_data for rank_results in results for result in rank_results]
        cleans_up = False
        try:
            commit = partial(
                _native.commit,
                self._store(),
                base,
                records,
                promises_of(metadata),
                planner_data=encode_planner_data(metadata.planner_data),
                stock=self._stock_parts(metadata.planner_data, self._save_id),
                save_id=self._save_id,
                previous_save_id=previous_save_id(base),
                rank=self._own_rank,
                world_size=self._ranks_that_save(len(results)),
                generation=self._generation(),
                run_root=self._run_root_store(),
                run=self._run_info(),
            )
            for rank_results in results:
                rank_results.clear()  # the records are large, and the commit takes them
            cleans_up = True  # it removes the objects itself, unless they may be committed
            done = commit()
        except (OverflowError, TypeError) as error:  # an argument that Rust cannot hold: nothing was begun
            self._discard(records)
            raise CheckpointError(f"the planner's metadata cannot be written: {error}") from error
        except Exception:
            if not cleans_up:
                self._discard(records)
            raise
        self._base = None
        if isinstance(metadata, PlannedMetadata):
            metadata.as_stock = False  # what stock reads is written; DCP sends this one to all ranks
        self._note(done, time.monotonic() - started)

    def stage(self, state_dict: dict[str, Any]) -> StagedState | StagedFuture:
        """A copy of the state on the host, for ``dcp.async_save``; complete when it returns, unless ``overlap`` is set.

        Waits for DCP's save in the background before it, and warns once if that gathers on training's group. The copy
        serves one save: when that has written it, its memory goes to a later one.

        Raises:
            CheckpointError: If a value cannot be copied, naming it; if ``max_staging_bytes`` are less than the state,
                or in use for longer than ``deadline``.
        """
        warn_of_training_group()
        forget_dead_process()
        wait_for_turn(user=self._user, deadline_seconds=self._config.deadline.total_seconds())
        staged = self.copy_state(state_dict)
        self._staged = staged.lease
        takes_turn(staged.lease)
        return staged

    def copy_state(self, state_dict: dict[str, Any], *, last: Assignment | None = None) -> StagedState | StagedFuture:
        """As `stage`, whatever else is in flight; with `last` only what this rank wrote then, as `snapshot` tells.

        Raises:
            CheckpointError: As `stage`.
        """
        staged: StagedState | StagedFuture
        if self._overlap:
            staged = snapshot_behind_training(
                state_dict, self._overlap, config=self._config, user=self._user, last=last
            )
        else:
            staged = snapshot(state_dict, config=self._config, user=self._user, last=last)
        staged.lease.is_for_one_save = True
        return staged

    @property
    def _user(self) -> str:
        return f"the save to {os.fspath(self._place)}"

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: what is not copied when `stage` returns is waited for before the optimizer's step."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Give memory for staging that no save of this process uses back to the system: after the last save."""
        arena().trim()

    def discard(self, *, within: timedelta) -> None:
        """Remove what this save has written, which nobody may commit any more. What cannot be removed is logged.

        Args:
            within: Time for it: those who wait for the end of a failed save wait no longer than that for its cleaning.
        """
        remove_save(self._place, self._save_id, self._config, within=within)
        self._store().tidy()

    def _met(self) -> StoreStats:
        """What the store has gone through since this save began."""
        return StoreStats.of(self._store()).since(self._met_before)

    @property
    def _makes_safetensors(self) -> bool:
        """Whether tensors are to end in files of safetensors."""
        return False

    def _told_rank(self, plan: SavePlan) -> int:
        """This rank's number, as the planning rank said."""
        return plan.storage_data  # type: ignore[no-any-return]

    def _write(self, items: NativeItems, plan: SavePlan, rank: int) -> bytes:
        """Write this rank's items; its record."""
        return items.write(self._store(), rank=rank, save_id=self._save_id, parent=None, transfer=self.transfer)

    def _run_info(self) -> "RunInfo | None":
        """What a manager says of the checkpoint, see `_native.commit`; None without one."""
        return None

    def _check_place(self, base: _native.Base) -> None:
        place, store = os.fspath(self._place), self._store()
        if not self._overwrite and (base.exists or holds_safetensors(store)):
            raise CheckpointExistsError(f"Checkpoint already exists at {place}, and overwrite=False")
        ranks = self._ranks_that_save(0)
        if base.ranks not in (None, ranks):
            raise CheckpointError(
                f"{place}: {base.ranks} ranks saved here on their own (use_collectives=False), now {ranks} are about "
                "to: a load could mix their parts; save to a new place"
            )

    @property
    def _commits(self) -> bool:
        return self._plans or not self._use_collectives

    @property
    def _own_rank(self) -> int | None:
        """The rank that commits alone, or None where the planning rank commits for all."""
        if self._use_collectives:
            return None
        return 0 if self._rank is None else self._rank

    def _fresh_save_id(self) -> str:
        # DCP calls reset() only when it is given a checkpoint_id, so a used id, or one of before a fork, ends here.
        if self._spent or self._pid != os.getpid():
            self._begin_anew()
        return self._save_id

    def _store(self) -> _native.Store:
        if self._opened is None:
            self._opened = open_store(self._place, self._config)
        return self._opened

    def _run_root_store(self) -> _native.Store | None:
        return None if self._run_root is None else open_store(self._run_root, self._config)

    def _check_run_root(self) -> None:
        # Fenced by a root that it is not under, a checkpoint would not be fenced at all.
        if self._run_root is not None and not is_below(self._place, self._run_root):
            place, root = os.fspath(self._place), os.fspath(self._run_root)
            raise ConfigError(f"run_root: expected a place above {place}, found {root}")

    def _generation(self) -> int:
        return 0 if self._run_root is None else generation_of(self._run_root, self._config)

    def _ranks_that_save(self, heard_of: int) -> int:
        """Ranks whose parts make the checkpoint; without collectives each hears only of itself."""
        if self._use_collectives:
            return heard_of
        if self._world_size is not None:
            return self._world_size
        return world_size() or 1

    def _republish(self) -> None:
        """Write the `.metadata` that the last save here did not come to.

        Before the next manifest: a reader can tell a `.metadata` from stock's only if it is one save behind at most.
        """
        rank = self._own_rank
        opened = open_checkpoint(self._store(), self._place, rank=rank)
        if opened.native.is_encoded:
            self._store().delete(metadata_name(rank))  # stock cannot read what is there
            return
        planner_data = decode_planner_data(opened.native.planner_data, os.fspath(self._place))
        parts = self._stock_parts(planner_data, opened.save_id)
        if parts is not None:
            self._store().put(metadata_name(rank), opened.native.stock_pickle(parts))

    def _stock_parts(self, planner_data: Any, save_id: str) -> "StockParts | None":
        """What `.metadata` says beside the manifest; None if there is to be none."""
        place = os.fspath(self._place)
        return stock_parts(planner_data, checkpoint_id=place, save_id=save_id, records_strides=RECORDS_STRIDES)

    def _discard(self, records: Iterable[bytes]) -> None:
        names = {name for record in records for name, _ in _native.record_objects(record)}
        remove_objects(self._store(), self._place, names)
        self._store().tidy()

    def _note(self, done: _native.CommitStats, seconds: float) -> None:
        for warning in done.warnings:
            _logger.warning("%s: %s", os.fspath(self._place), warning)
        if not done.fenced:
            _logger.warning(
                "%s: the store does not refuse a second writer; two runs that save here may overwrite each other",
                os.fspath(self._place),
            )
        before = self._stats or SaveStats(save_id=self._save_id)
        self._stats = replace(
            before,
            committed=True,
            number=done.number,
            objects=done.num_objects,
            items=done.num_items,
            payload_bytes=done.payload_bytes,
            referred_bytes=done.referred_bytes,
            own_bytes=done.own_bytes,
            model_hash=done.model_hash,
            collected=done.collected,
            commit_seconds=seconds,
            fenced=done.fenced,
            warnings=tuple(done.warnings),
            store=self._met(),
        )
        _logger.info(
            "%s: committed as number %d: %d objects, %.0f MB of tensors and values, %.2f s for the commit",
            *(os.fspath(self._place), done.number, done.num_objects, done.payload_bytes / 1e6, seconds),
        )
