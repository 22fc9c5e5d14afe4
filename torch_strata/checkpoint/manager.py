"""CheckpointManager: the checkpoints of one run over its whole life.

What there is, what may be saved next and what goes is decided in Rust (native/strata-checkpoint/src/run); states travel
through `async_save` and DCP.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch.distributed as dist

from torch_strata import _native
from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint._generation import generation_of
from torch_strata.checkpoint._order import SaveOrder, check_name, check_step, make_order
from torch_strata.checkpoint._payload import Trusted
from torch_strata.checkpoint._rng import RNG_KEY, capture_rng
from torch_strata.checkpoint._run_settings import check_choice, check_span, check_store, policy_of, root_of
from torch_strata.checkpoint._run_writer import OnTorn, RunWriter, retain
from torch_strata.checkpoint._store import check_flag, resolve_config
from torch_strata.checkpoint.async_save import OnFailure, async_save, in_turn
from torch_strata.checkpoint.checkpoint_handle import CheckpointHandle
from torch_strata.checkpoint.handle import SaveHandle
from torch_strata.checkpoint.metrics import write_text
from torch_strata.checkpoint.reader import checked_classes
from torch_strata.checkpoint.restore import DAMAGE, restore, together
from torch_strata.checkpoint.retention import Retention, best_of, best_policies
from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType, ListedCheckpoint, open_run
from torch_strata.checkpoint.run_record import RunRecord
from torch_strata.checkpoint.save_planner import StrataSavePlanner
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.verify import VerifyReport, verify
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError, ConfigError, StrataError

__all__ = ["CheckpointManager"]

_logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of one run.

    Every rank makes one with the same arguments, and calls `save` and `load` with the others. Claims the run at its
    first save: an earlier process of the same run can no longer commit then.

    Args:
        storage_path: Root of the run: local path or URL. ``~`` is the home directory; a relative path is that of now.
        bucket: In place of `storage_path`: a bucket, or a directory with ``storage_type="local"``.
        storage_type: What `bucket` is in: ``"s3"``, ``"local"`` or another scheme.
        keep_count: How many of the newest checkpoints are kept; everything if neither this nor `retention` is given.
        retention: Which are kept. The newest, the newest verified, and those that somebody holds stay in any case.
        config: Limits of the store.
        storage_options: The store's own settings; win over those of `config`.
        process_group: Ranks that save together; the default group if not given.
        no_dist: Whether this process saves alone, whatever groups there are.
        timeout: As `async_save`.
        on_failure: As `async_save`: with "continue" a failed save is only logged, until `max_age` is reached.
        max_age: If no save has been committed for so long, and one failed since or has been under way for as long,
            `save` raises what the last one failed at. Time in which nobody saved does not count.
        on_torn: Whether a state that another thread changes while it is copied is logged, or refused by `save`.
        allow_dtype_cast: As StrataReader, for loads.
        trusted_classes: As StrataReader, for loads.

    Raises:
        ConfigError: If an argument cannot be used.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] | None = None,
        *,
        bucket: str | None = None,
        storage_type: str | None = None,
        keep_count: int | None = None,
        retention: Retention | None = None,
        config: StorageConfig | None = None,
        storage_options: Mapping[str, str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        timeout: timedelta = timedelta(seconds=60),
        on_failure: OnFailure = "raise",
        max_age: timedelta | None = None,
        on_torn: OnTorn = "warn",
        allow_dtype_cast: bool = False,
        trusted_classes: Sequence[Trusted] = (),
    ) -> None:
        self._root = root_of(storage_path, bucket, storage_type)
        self._config = resolve_config(config, storage_options)
        check_store(self._root, self._config)
        self._retention = policy_of(keep_count, retention)
        self._run = open_run(self._root, self._config, policy=self._retention)
        self._group, self._no_dist = process_group, check_flag("no_dist", no_dist)
        check_span("timeout", timeout)
        check_choice("on_failure", on_failure, "raise", "continue")
        self._timeout, self._on_failure = timeout, on_failure
        if max_age is not None:
            check_span("max_age", max_age)
        self._max_age = max_age
        check_choice("on_torn", on_torn, "warn", "raise")
        self._on_torn: OnTorn = on_torn
        self._record = RunRecord(self._root, [best.metric for best in best_policies(self._retention)])
        self._reading = {
            "allow_dtype_cast": check_flag("allow_dtype_cast", allow_dtype_cast),
            "trusted_classes": checked_classes(trusted_classes),
        }
        self._handles: list[CheckpointHandle] = []

    @property
    def storage_path(self) -> str:
        """Root of the run."""
        return self._root

    def save(
        self,
        state: Any,
        *,
        step: int,
        epoch: int = 0,
        checkpoint_type: CheckpointType | str = CheckpointType.FULL,
        metadata: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
    ) -> CheckpointHandle:
        """Save in the background; returns when the state is copied.

        Saves are done one after another, in the order of the calls. After each one that is committed the policy is
        applied. The state of the random number generators of every rank is saved with a whole state.

        Args:
            state: A state dict or a Stateful, as for ``dcp.save``, on every rank; or bytes, of one process.
            step: Optimizer steps done; more than those of the newest checkpoint, see `rollback`.
            epoch: Passes over the data done.
            checkpoint_type: What to save; of a state dict with the keys ``model`` and ``optimizer`` one part.
            metadata: The user's own.
            metrics: The user's own, by which checkpoints are compared.
            overwrite: Whether a checkpoint of this step may be replaced.

        Raises:
            ConfigError: If an argument cannot be used.
            CheckpointError: If a value cannot be copied; if nothing was committed for `max_age`; with
                ``on_torn="raise"`` if the state changes meanwhile.
            StrataError: Why the save before failed, if nobody has asked for its result.
        """
        order = make_order(step, epoch, checkpoint_type, metadata, metrics, overwrite=overwrite)
        if self._rank == 0:
            self._record.note_metrics(order)
        if self._max_age is not None:
            self._record.check_age(self._max_age)
        try:
            is_state = not isinstance(state, bytes | bytearray | memoryview)
            handle = self._save_state(state, order) if is_state else self._save_bytes(state, order)
        except StrataError:
            self._record.note_refused(order)
            raise
        self._handles = [known for known in self._handles if not known.done()]
        found = CheckpointHandle(handle, self._run, order)
        self._handles.append(found)
        self._record.follow(handle, order)
        return found

    def _save_bytes(self, data: bytes | bytearray | memoryview, order: SaveOrder) -> SaveHandle:
        if not self._no_dist and (world_size() or 1) > 1:
            raise ConfigError("bytes are saved by one process: pass no_dist=True on the one that does, or a state dict")
        taken = bytes(data)  # what can change is copied here; bytes are not
        path, transfer = f"{self._root}/{order.folder}", _native.Transfer()

        def write() -> SaveStats:
            started = time.monotonic()
            self._claim()
            raw = self._run.save_bytes(
                taken, order.as_native(), save_id=os.urandom(16).hex(), overwrite=order.overwrite, transfer=transfer
            )
            seconds = time.monotonic() - started
            retain(self._run, self._root, self._record)
            return SaveStats(
                save_id=raw[0], written_bytes=raw[4], own_bytes=raw[4], write_seconds=seconds, committed=True
            )

        return in_turn(path, write, transfer, on_failure=self._on_failure)

    def _save_state(self, state: Any, order: SaveOrder) -> SaveHandle:
        held = state.state_dict() if hasattr(state, "state_dict") and not isinstance(state, dict) else state
        if not isinstance(held, dict):
            raise ConfigError(f"state: expected a state dict, a Stateful or bytes, found a {type(state).__name__}")
        key = order.checkpoint_type.key
        if key is not None and key not in held:
            raise ConfigError(f"state: a checkpoint of type {order.checkpoint_type} needs the key {key!r}")
        if RNG_KEY in held:
            raise ConfigError(f"state: the key {RNG_KEY!r} is the manager's own")
        whole = held if key is None else {key: held[key]}
        if order.checkpoint_type.is_whole:
            whole = {**whole, RNG_KEY: {str(self._rank): capture_rng()}}
        return async_save(
            whole,
            storage_writer=RunWriter(
                *(self._root, self._run, order),
                record=self._record,
                on_torn=self._on_torn,
                config=self._config,
                overwrite=True,
            ),
            # A file of safetensors holds tensors whole.
            planner=StrataSavePlanner(whole_chunks=order.checkpoint_type is CheckpointType.MODEL_ONLY),
            process_group=self._group,
            no_dist=self._no_dist,
            timeout=self._timeout,
            on_failure=self._on_failure,
            step=order.step,
        )

    def load(
        self,
        which: int | Literal["latest", "best"] = "latest",
        state: dict[str, Any] | None = None,
        *,
        rng: bool = True,
    ) -> Any:
        """Load a checkpoint, verified; every rank calls it.

        A step of which only the model and the optimizer were saved is both of them, under the keys ``model`` and
        ``optimizer``; the newest and the best are always whole checkpoints. With "latest", a checkpoint that turns out
        to be damaged is set aside, said so, and the one before is loaded; nothing of it is removed.

        Args:
            which: A step, the newest, or the best by the policy's one KeepBest.
            state: Filled in place, as by ``dcp.load``; lists and dicts that are empty in it get all that was saved in
                them, see `StrataReader`. If not given, a new state of plain tensors is returned, all of it on this
                rank.
            rng: Whether the random number generators go on as they did then.

        Returns:
            The bytes if bytes were saved; else the state.

        Raises:
            CheckpointNotFoundError: If there is none.
            CorruptionError: If the step that was asked for is damaged, or every one is.
            ObjectNotFoundError: Likewise, if something of it is missing.
            LayoutMismatchError: If `state` does not fit, or has keys that no part of the step was saved with.
        """
        tried: dict[str, Exception] = {}
        while True:
            # Listed again after each: another process may have saved, and removed what it does not keep.
            candidates = self._agree(lambda: self._candidates(which))
            found = next((found for found in candidates if found[0].id not in tried), None)
            if found is None:
                missing = CheckpointNotFoundError(f"no checkpoint to resume from at {self._root}")
                raise next(reversed(tried.values()), missing)
            try:
                return self._load(found, state, rng=rng)
            except (*DAMAGE, CheckpointNotFoundError) as error:
                if which != "latest":
                    raise
                if isinstance(error, DAMAGE):  # and not removed before it was opened, or on no disk of this rank
                    self._set_aside(found[0], error)
                tried[found[0].id] = error

    def latest(self) -> CheckpointMetadata | None:
        """The newest checkpoint to resume from. Looks at the store, on the rank that asks."""
        whole = [found for found in self.all() if found.checkpoint_type.is_whole]
        return whole[-1] if whole else None

    def best(self, metric: str | None = None) -> CheckpointMetadata | None:
        """The best checkpoint by the policy's KeepBest, or by the one for `metric` if there are several.

        Raises:
            ConfigError: If there is no such KeepBest in the policy, or more than one.
        """
        policy = best_of(self._retention, metric)
        whole = [found for found in self.all() if found.checkpoint_type.is_whole]
        at = policy.best_of([dict(found.metrics) for found in whole])
        return None if at is None else whole[at]

    def all(self) -> list[CheckpointMetadata]:
        """Every committed checkpoint, ascending by step; not those that were set aside or left behind.

        Raises:
            StorageError: If the store cannot be listed: never an empty list for that.
        """
        return [CheckpointMetadata.of_native(raw) for raw in self._run.all()]

    def next_step(self) -> int:
        """One more than the highest step there is, 1 if there is none; every rank calls it and gets the same."""
        return max((found.step for found in self._agree(self.all)), default=0) + 1

    def listed(self) -> list[ListedCheckpoint]:
        """Every folder of the run, with what is the matter with it."""
        return [ListedCheckpoint.of_native(raw) for raw in self._run.catalog()]

    def wait(self) -> None:
        """Wait for every save.

        Raises:
            StrataError: Why one failed, the first that did and of which nobody has asked.
        """
        handles, self._handles = self._handles, []
        unseen = [handle for handle in handles if not handle.is_seen]
        failures = [failure for handle in unseen if (failure := handle.exception()) is not None]
        if failures and self._on_failure == "raise":
            raise failures[0]

    def rollback(self, step: int) -> list[str]:
        """Take the run back to `step`: later checkpoints are passed over, and go when the policy is applied next.

        Every rank calls it. Claims the run, as a save does. Returns the folders that are left behind.

        Raises:
            StaleGenerationError: If another process has claimed the run.
        """
        with together(self._group, no_dist=self._alone):
            self.wait()

        def take_back() -> list[str]:
            self._claim()
            return self._run.rollback(check_step(step))

        return self._agree(take_back)

    @contextmanager
    def hold(self, step: int, who: str) -> Iterator[None]:
        """No policy removes the checkpoint of `step` meanwhile, in whatever process.

        Raises:
            CheckpointNotFoundError: If there is none.
        """
        folder = _native.run_folder(check_step(step), CheckpointType.FULL.value)
        check_name(who)
        self._run.pin(folder, who)
        try:
            yield
        finally:
            self._run.unpin(folder, who)

    def verify(self, step: int) -> VerifyReport:
        """Read all of a checkpoint and compare it with its digests.

        A sound one is not removed while it is the newest that is known to be; a damaged one is set aside.
        """
        folder = _native.run_folder(check_step(step), CheckpointType.FULL.value)
        found = CheckpointMetadata.of_native(self._run.found(folder))
        report = verify(found.path, config=self._config)
        if report.is_sound:
            self._run.note_verified(folder, found.id)
        elif report.problems:
            self._run.quarantine(folder, found.id, report.problems[0])
        return report

    def retention_plan(self) -> list[tuple[str, bool, str]]:
        """What the policy would do now: each checkpoint's folder, whether it stays, and why."""
        return self._run.plan()[0]

    def apply_retention(self) -> None:
        """Apply the policy now. Every rank may call it: the first does it, which has the right to."""
        if self._rank == 0:
            self._claim()
            retain(self._run, self._root, self._record)

    @property
    def last_durable_age(self) -> timedelta:
        """Time since a save of this process was committed last; since the manager was made, if none was."""
        return self._record.last_durable_age

    def metrics(self) -> str:
        """What this rank's saves did, in Prometheus' text format; metrics are listed in docs/guide/manager.md."""
        return self._record.text(rank=self._rank)

    def write_metrics(self, path: str | os.PathLike[str]) -> None:
        """Replace the file at `path` by `metrics`, at once: ``*.prom`` in the directory of node_exporter's textfile.

        Raises:
            StorageError: If it cannot be written.
        """
        write_text(path, self.metrics())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            _logger.error("%s: %s: %s", self._root, type(failure).__name__, failure)

    @property
    def _alone(self) -> bool:
        return self._no_dist or world_size() is None

    @property
    def _rank(self) -> int:
        return 0 if self._alone else dist.get_rank(self._group)

    def _claim(self) -> None:
        """The right to commit and to remove: the one that this process's writers have too."""
        self._run.hold(generation_of(self._root, self._config))

    def _agree(self, find: Callable[[], list[_Found]]) -> list[_Found]:
        """What the first rank finds, or its error, on all of them."""
        if self._alone:
            return find()
        told: list[Any] = [None]
        if self._rank == 0:
            try:
                told[0] = find()
            except Exception as error:
                told[0] = error
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        found: list[_Found] = told[0]
        return found

    def _candidates(self, which: int | str) -> list[list[CheckpointMetadata]]:
        """Each a whole checkpoint, or the parts of a step."""
        if which == "latest":
            return [[found] for found in reversed(self.all()) if found.checkpoint_type.is_whole]
        if which == "best":
            best = self.best()
            return [] if best is None else [[best]]
        step = check_step(which)
        at = [found for found in self.all() if found.step == step]
        if not at:
            raise CheckpointNotFoundError(f"no checkpoint of step {step} at {self._root}")
        return [[found for found in at if found.checkpoint_type.is_whole] or at]

    def _load(self, found: list[CheckpointMetadata], state: dict[str, Any] | None, *, rng: bool) -> Any:
        return restore(
            found,
            self._run,
            state,
            rng=rng,
            config=self._config,
            process_group=self._group,
            no_dist=self._alone,
            **self._reading,
        )

    def _set_aside(self, found: CheckpointMetadata, error: BaseException) -> None:
        _logger.debug("%s is damaged", found.path, exc_info=error)
        if self._rank != 0:
            return
        what = type(error).__name__, error
        _logger.error("%s is damaged and is passed over; nothing of it is removed: %s: %s", found.path, *what)
        folder = _native.run_folder(found.step, found.checkpoint_type.value)
        try:
            if found in self.all():  # and was not removed while it was read
                self._run.quarantine(folder, found.id, f"{type(error).__name__}: {error}")
        except StrataError as failure:  # as where nothing may be written: it is passed over all the same
            _logger.warning("%s: not marked as damaged: %s: %s", found.path, type(failure).__name__, failure)
