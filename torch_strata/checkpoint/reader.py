"""StrataReader: `torch.distributed.checkpoint`'s StorageReader over the Rust core.

Reads checkpoints of StrataWriter and of stock torch. Nothing is unpickled unchecked, and every block of ours is
verified on every read.
"""

import logging
import math
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torch_strata import _native
from torch_strata._store import check_flag, is_place, open_store, resolve_config
from torch_strata.checkpoint._exchange import Exchange, Group, group_fault, world_size
from torch_strata.checkpoint._grown import Grown, with_grown
from torch_strata.checkpoint._load import LoadSettings, ReadStats, load_plan
from torch_strata.checkpoint._metadata import read_metadata
from torch_strata.checkpoint._opened import Opened, open_checkpoint
from torch_strata.checkpoint._payload import Trusted
from torch_strata.checkpoint._progress import shown, wants_bar
from torch_strata.checkpoint._resolve import check_coverage
from torch_strata.checkpoint.store_stats import StoreStats
from torch_strata.config import StorageConfig
from torch_strata.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    LayoutMismatchError,
    ObjectNotFoundError,
    StrataError,
)

__all__ = ["ReadStats", "StrataReader", "checked_classes"]

_logger = logging.getLogger(__name__)

# Collection looks here: an expiry in Unix seconds, and a nonce.
_LEASES_FOLDER = ".strata/leases/"

# A rank's manifest, then its index for stock: a save without collectives that was killed left only the manifest.
_RANK_FOLDER = ".strata/ranks/"
_RANK_INDEX = re.compile(rf"{re.escape(_RANK_FOLDER)}\d{{20}}\.\d+|__\d+\.metadata")


@dataclass(frozen=True)
class _State:
    """Which committed state a rank reads."""

    save_id: str
    number: int


@dataclass(frozen=True)
class _Local:
    """What travels with a rank's plan to the planning rank."""

    state: _State | None
    group: tuple[int, int] | None


class _UnreadMetadata(Metadata):
    """Stands for metadata that could not be read; looking at it raises the reason.

    DCP swallows what `read_metadata` raises and reports an AssertionError instead, or goes on with rank-local
    metadata. So the reason travels in here, and `set_up_storage_reader` raises it.
    """

    def __init__(self, error: StrataError) -> None:
        self.error = error
        self.planner_data = None
        self.storage_data = None
        self.storage_meta = None
        self.version = None

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        raise self.error

    def __repr__(self) -> str:
        return f"<metadata that could not be read: {self.error}>"


def checked_classes(trusted: Sequence[Trusted]) -> tuple[Trusted, ...]:
    """Classes and functions, or pairs of one and its name; a name alone is neither."""
    try:
        classes = tuple(trusted)
    except TypeError as error:
        raise ConfigError(f"trusted_classes: expected classes or functions, found {trusted!r}") from error
    for entry in classes:
        found, name = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, "")
        if not callable(found) or not isinstance(name, str):
            raise ConfigError(f"trusted_classes: expected a class or function, found {entry!r}")
    return classes


class StrataReader(StorageReader):
    """Loads from a local path or a URL.

    Args:
        path: Local path or URL of the checkpoint.
        config: Limits of the store.
        storage_options: The store's own settings; win over those of `config`.
        verify: ``"inplace"`` verifies what has been read where it lies: after a CorruptionError the destinations it
            names are undefined. ``"before"`` verifies in a buffer first, at the price of a copy. Tensors of stock
            have one checksum each, compared when all of one has arrived, in either mode.
        allow_dtype_cast: Whether a tensor may be converted to its destination's dtype; an error otherwise.
        trusted_classes: Classes and functions that pickled values may name, beyond those that torch always allows.
            They can run any code: name them for checkpoints that you trust.
        process_group: Ranks that all load together with such a reader, in which what several of them need leaves the
            store once and is handed on. It must move what is in the CPU's memory, as gloo does. Not pickled, and not
            used for what ranks have saved on their own.
        lease: How long a load may take during which no save removes what it reads. Each rank writes a small object to
            the checkpoint's ``.strata/leases/`` and removes it after the load; one that was killed expires. Without a
            lease a load that meets a removed object begins again, on one rank, or raises ObjectNotFoundError.

    Pass it to ``dcp.load(state, storage_reader=...)`` on every rank.

    An empty dict or list in the state gets all entries that are stored below its name, where a dict or list was saved:
    what a fresh job has not collected yet comes back. A dict is filled in place, and so is a list with
    StrataLoadPlanner; DCP's own planner replaces lists. Tensors among the entries are new, on the CPU and whole, also
    those that ranks share. DCP keeps no keys but text: other keys come back as text, except those of an optimizer's
    ``state``. What is not wanted is to be left out of the state. Planners that override how a state is planned are
    told of such a list that it is not stored, and empty dicts stay empty.

    Raises:
        ConfigError: If the place or a setting cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: StorageConfig | None = None,
        storage_options: Mapping[str, str] | None = None,
        verify: Literal["inplace", "before"] = "inplace",
        allow_dtype_cast: bool = False,
        trusted_classes: Sequence[Trusted] = (),
        process_group: dist.ProcessGroup | None = None,
        lease: timedelta | None = None,
    ) -> None:
        super().__init__()
        if verify not in ("inplace", "before"):
            raise ConfigError(f"verify: expected 'inplace' or 'before', found {verify!r}")
        if lease is not None and (not isinstance(lease, timedelta) or lease <= timedelta(0)):
            raise ConfigError(f"lease: expected a timedelta above 0, found {lease!r}")
        self._config = resolve_config(config, storage_options)
        self._lease_length = lease
        self._lease: str | None = None
        self._settings = LoadSettings(
            verify=verify,
            allow_dtype_cast=check_flag("allow_dtype_cast", allow_dtype_cast),
            trusted=checked_classes(trusted_classes),
            budget_bytes=self._config.max_in_flight_bytes,
        )
        self._group = None if process_group is None else Group.of(process_group)
        self._place: str | os.PathLike[str] = path
        self._opened_store: _native.Store | None = None
        self._begin_anew()
        self._store()  # a bad URL fails here

    def _begin_anew(self) -> None:
        self._load_id = uuid.uuid4().hex
        self._opened: Opened | None = None
        self._metadata_read: Metadata | None = None
        self._reads: Opened | None = None  # while it loads, for whoever looks how far that has come
        self._rank: int | None = None
        self._stats: ReadStats | None = None
        self._met_before: StoreStats | None = None

    def __getstate__(self) -> dict[str, Any]:
        unopened = {"_opened": None, "_metadata_read": None, "_reads": None, "_opened_store": None, "_met_before": None}
        return {**self.__dict__, **unopened, "_group": None, "_lease": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the next load reads."""
        return self._place

    @property
    def load_id(self) -> str:
        """Identity of the load that begins, runs or was the last one."""
        return self._load_id

    @property
    def stats(self) -> ReadStats | None:
        """What the last load read on this rank; None before the first."""
        return self._stats

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a local path or a URL that this reader knows."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another place if one is given."""
        self._release()
        if checkpoint_id:
            self._place = checkpoint_id
            self._opened_store = None
        self._begin_anew()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, or with ``rank=`` what that rank saved on its own.

        Does no collective. Where it cannot be read, the value returned raises the reason as soon as it is looked at.

        Raises:
            CheckpointNotFoundError: If only ranks on their own have saved here; DCP then asks again with ``rank=``.
        """
        rank = kwargs.get("rank")
        self._opened = self._metadata_read = None
        try:
            self._met_before = StoreStats.of(self._store())
            self._opened = self._open(rank)
            self._metadata_read = self._metadata(self._opened, rank)
            return self._metadata_read
        except CheckpointNotFoundError as error:
            self._release()
            if rank is None and self._has_rank_index():
                raise
            return _UnreadMetadata(error)
        except StrataError as error:
            self._release()
            return _UnreadMetadata(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank.

        Raises:
            StrataError: The reason why `read_metadata` failed.
        """
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        if self._rank is not None and self._opened is not None:
            self._check_ranks(self._opened)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan with the identity of the state that this rank has opened, and of its group."""
        opened, group = self._opened, self._group
        state = None if opened is None else _State(opened.save_id, opened.native.number)
        return replace(plan, storage_data=_Local(state, None if group is None else group.identity))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, if all ranks are about to read the same state.

        Raises:
            CheckpointError: If a save was committed while the ranks opened the checkpoint; load again.
            ConfigError: If not all ranks of a reader's group take part in this load with it.
        """
        states = {plan.storage_data.state for plan in plans}
        # Ranks that saved on their own have a save_id each; their numbers were compared when they were opened.
        if self._rank is None and len(states) > 1:
            found = ", ".join(sorted(str(state) for state in states))
            raise CheckpointError(f"{os.fspath(self._place)}: a save was committed meanwhile, ranks opened {found}")
        fault = group_fault([plan.storage_data.group for plan in plans])
        if self._rank is None and fault:
            raise ConfigError(fault)
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items. Blocks with the GIL released.

        Raises:
            LayoutMismatchError: If a destination has another dtype, shape or kind; nothing has been changed then.
            CheckpointError: If a value needs a class that is not trusted; nothing has been changed then.
            CorruptionError: If stored bytes are damaged.
            StorageError: If the store fails or an object is missing.
            CoordinationError: If a rank of the group has died or is too late.

        With a group every rank raises what one of them has failed at.
        """
        started, before = time.monotonic(), self._met_before or StoreStats.of(self._store())

        def met() -> StoreStats:
            return StoreStats.of(self._store()).since(before)

        def look() -> tuple[int, int]:
            return (0, 0) if self._reads is None else self._reads.native.progress

        try:
            with shown("loading", os.fspath(self._place), look, met, bar=wants_bar(self._config.progress)):
                if self._group is not None and self._rank is None:
                    stats = self._read_with(self._group, plan, planner)
                else:
                    stats = self._read_alone(plan, planner)
        finally:
            self._reads = self._metadata_read = None
            self._release()
        self._stats = replace(stats, seconds=time.monotonic() - started, store=met())
        self._met_before = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_with(self, group: Group, plan: LoadPlan, planner: LoadPlanner) -> ReadStats:
        # Two rounds are in memory, and up to as much again for destinations that do not take bytes as they are.
        round_bytes = self._config.max_in_flight_bytes // 4
        with Exchange(group, where=os.fspath(self._place), round_bytes=round_bytes) as exchange:
            opened = self._reads = self._opened or self._open(None)
            plan, grown = self._with_grown(plan, planner)
            stats = load_plan(opened, plan, planner, self._settings, exchange, beyond=grown.values)
        grown.fill()
        return stats

    def _read_alone(self, plan: LoadPlan, planner: LoadPlanner) -> ReadStats:
        opened = self._reads = self._opened or self._open(self._rank)
        plan, grown = self._with_grown(plan, planner)
        try:
            return self._load(opened, plan, planner, grown)
        except ObjectNotFoundError:
            # A save that ended meanwhile may have removed what it superseded: read the new state, once.
            self._opened = self._reads = self._open(self._rank)
            if self._opened.same_as(opened) or plan.storage_data != 1 or grown:
                raise  # other ranks may already have read the old state, and what has grown may have grown on
            return self._load(self._opened, plan, planner, grown)

    def _load(self, opened: Opened, plan: LoadPlan, planner: LoadPlanner, grown: Grown) -> ReadStats:
        if self._rank is not None:
            check_coverage(opened, plan, planner)
        stats = load_plan(opened, plan, planner, self._settings, beyond=grown.values)
        grown.fill()
        return stats

    def _with_grown(self, plan: LoadPlan, planner: LoadPlanner) -> tuple[LoadPlan, Grown]:
        known = self._metadata_read
        if known is None:
            return plan, Grown()
        return with_grown(plan, planner, known.state_dict_metadata, known.planner_data)

    def _check_ranks(self, opened: Opened) -> None:
        saved, loading = opened.native.world_size, world_size()
        # Of what stock's ranks saved on their own nobody knows how many there were: 0. A process without a group may
        # look at one rank's part.
        if saved not in (0, loading) and loading is not None:
            raise LayoutMismatchError(
                f"{opened.where}: {saved} ranks saved here on their own (use_collectives=False), {loading} load: each "
                "has only its own part; load with as many ranks, and save with collectives to load with others"
            )

    def _metadata(self, opened: Opened, rank: int | None) -> Metadata:
        storage_meta = StorageMeta(self._place, opened.save_id or None, self._load_id)
        return read_metadata(opened, storage_meta=storage_meta, whole=rank is None)

    def _has_rank_index(self) -> bool:
        try:
            listed = [*self._store().list(_RANK_FOLDER), *self._store().list("")]
        except StrataError:
            return False  # the error at hand says more
        return any(_RANK_INDEX.fullmatch(name) for name, _ in listed)

    def _open(self, rank: int | None) -> Opened:
        opened = open_checkpoint(self._store(), self._place, rank=rank)
        if self._lease_length is not None and self._lease is None:
            self._take_lease(self._lease_length)
            # What was opened may have been superseded, and collected, before the lease was there.
            opened = open_checkpoint(self._store(), self._place, rank=rank)
        for warning in opened.native.warnings:
            _logger.warning("%s", warning)
        return opened

    def _take_lease(self, length: timedelta) -> None:
        expiry = math.ceil(time.time() + length.total_seconds())
        name = f"{_LEASES_FOLDER}{expiry:020}-{uuid.uuid4().hex}"
        self._store().put(name, b"")
        self._lease = name

    def _release(self) -> None:
        if self._lease is None:
            return
        name, self._lease = self._lease, None
        try:
            self._store().delete(name)
        except StrataError as error:
            _logger.warning("%s: a lease stays until it expires: %s", os.fspath(self._place), error)

    def _store(self) -> _native.Store:
        if self._opened_store is None:
            self._opened_store = open_store(self._place, self._config)
        return self._opened_store
