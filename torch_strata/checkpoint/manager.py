"""CheckpointManager: the checkpoints of one run over its whole life.

What there is, what may be saved next and what goes is decided in Rust (native/strata-checkpoint/src/run); states travel
through `async_save` and DCP.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torch_strata import _native
from torch_strata._store import check_flag, open_store, place_below, resolve_config
from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint._generation import Claim, claimed, newest_generation
from torch_strata.checkpoint._holds import held, release
from torch_strata.checkpoint._keys import KEYS_KEY, KeyNotes
from torch_strata.checkpoint._order import SaveOrder, check_step, folder_of, make_order
from torch_strata.checkpoint._passed_over import PassedOver, whole_in
from torch_strata.checkpoint._payload import Trusted
from torch_strata.checkpoint._ranks import DAMAGE, Ranks
from torch_strata.checkpoint._rng import RNG_KEY, capture_rng
from torch_strata.checkpoint._run_settings import check_choice, check_span, check_store, policy_of, root_of
from torch_strata.checkpoint._run_writer import OnTorn, RunWriter, admit, retain
from torch_strata.checkpoint.async_save import OnFailure, async_save, in_turn
from torch_strata.checkpoint.checkpoint_handle import CheckpointHandle
from torch_strata.checkpoint.handle import SaveHandle, UnseenSaves
from torch_strata.checkpoint.metrics import write_text
from torch_strata.checkpoint.reader import checked_classes
from torch_strata.checkpoint.restore import held_by, plain, restore, set_aside
from torch_strata.checkpoint.retention import Retention, best_of, best_policies
from torch_strata.checkpoint.run import (
    CheckpointMetadata,
    CheckpointType,
    ListedCheckpoint,
    listed_in,
    open_run,
    what_else_there_is,
)
from torch_strata.checkpoint.run_record import RunRecord
from torch_strata.checkpoint.save_planner import StrataSavePlanner
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.verify import VerifyReport, verify
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError, ConfigError, StrataError

__all__ = ["CheckpointManager"]

_logger = logging.getLogger(__name__)


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
        compress: Whether incremental checkpoints store changed tensors encoded where that pays: planes of bytes
            compressed with zstd, and XORed with an earlier content. Stock torch cannot read these, but what
            ``strata export`` makes of them. After 16 in a row a full one is saved in the place of an incremental one.
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
        compress: bool = False,
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
        self._compress = check_flag("compress", compress)
        self._run = open_run(self._root, self._config, policy=self._retention)
        self._ranks = Ranks(process_group, no_dist=check_flag("no_dist", no_dist))
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
        self._claim, self._unseen = Claim(self._root, self._config), UnseenSaves()
        self._notes, self._passed_over = KeyNotes(self._root), PassedOver(self._root)

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
            ForkedProcessError: In a child of a process that saves to the run, with the manager of that one.
            StrataError: Why a save of this manager failed before, the first of which nobody has asked for the result.
        """
        self._claim.check_process()
        order = make_order(step, epoch, checkpoint_type, metadata, metrics, overwrite=overwrite)
        if self._ranks.number == 0:
            self._record.note_metrics(order)
        if self._max_age is not None:
            self._record.check_age(self._max_age)
        try:
            is_state = not isinstance(state, bytes | bytearray | memoryview)
            handle = self._save_state(state, order) if is_state else self._save_bytes(state, order)
        except StrataError:
            self._record.note_refused(order)
            raise
        self._record.follow(handle, order)
        return CheckpointHandle(handle, self._run, order)

    def _save_bytes(self, data: bytes | bytearray | memoryview, order: SaveOrder) -> SaveHandle:
        if not self._ranks.no_dist and (world_size() or 1) > 1:
            raise ConfigError("bytes are saved by one process: pass no_dist=True on the one that does, or a state dict")
        taken = bytes(data)  # what can change is copied here; bytes are not
        path, transfer = place_below(self._root, order.folder), _native.Transfer()

        def write() -> SaveStats:
            started = time.monotonic()
            admit(self._run, self._root, order)
            self._hold_right()
            raw = self._run.save_bytes(
                taken, order.as_native(), save_id=os.urandom(16).hex(), overwrite=order.overwrite, transfer=transfer
            )
            seconds = time.monotonic() - started
            retain(self._run, self._root, self._record)
            saved = CheckpointMetadata.of_native(raw)
            return SaveStats(
                save_id=saved.id,
                written_bytes=saved.size_bytes,
                own_bytes=saved.size_bytes,
                write_seconds=seconds,
                committed=True,
            )

        return in_turn(path, write, transfer, on_failure=self._on_failure, unseen=self._unseen)

    def _save_state(self, state: Any, order: SaveOrder) -> SaveHandle:
        held = held_by(state)
        if not isinstance(held, dict):
            raise ConfigError(f"state: expected a state dict, a Stateful or bytes, found a {type(state).__name__}")
        key = order.checkpoint_type.key
        if key is not None and key not in held:
            raise ConfigError(f"state: a checkpoint of type {order.checkpoint_type} needs the key {key!r}")
        if taken := held.keys() & {RNG_KEY, KEYS_KEY}:
            raise ConfigError(f"state: the key {taken.pop()!r} is the manager's own")
        saved = plain(held if key is None else {key: held[key]})
        saved |= self._notes.of(saved)
        if order.checkpoint_type.is_whole:
            saved[RNG_KEY] = {str(self._ranks.number): capture_rng()}
        return async_save(
            saved,
            storage_writer=RunWriter(
                *(self._root, self._run, order),
                claim=self._claim,
                unseen=self._unseen,
                record=self._record,
                on_torn=self._on_torn,
                config=self._config,
                compress=self._compress,
            ),
            # A file of safetensors holds tensors whole.
            planner=StrataSavePlanner(whole_chunks=order.checkpoint_type is CheckpointType.MODEL_ONLY),
            process_group=self._ranks.group,
            no_dist=self._ranks.no_dist,
            timeout=self._timeout,
            on_failure=self._on_failure,
            step=order.step,
        )

    def load(
        self,
        which: int | Literal["latest", "best"] = "latest",
        state: Any = None,
        *,
        rng: bool = True,
    ) -> Any:
        """Load a checkpoint, verified; every rank calls it.

        A step of which only the model and the optimizer were saved is both of them, under the keys ``model`` and
        ``optimizer``; the newest and the best are always whole checkpoints. With "latest", a checkpoint that turns out
        to be damaged is set aside, said so, and the one before is loaded. No policy removes it, but a save of its step.

        Args:
            which: A step, the newest, or the best by the policy's one KeepBest.
            state: A state dict, filled in place as by ``dcp.load``, or a Stateful; lists and dicts that are empty in it
                get all that was saved in them, see `StrataReader`. If not given, a new state of plain tensors is
                returned, all of it on this rank.
            rng: Whether the random number generators go on as they did then.

        Returns:
            The bytes if bytes were saved; else the state.

        Raises:
            CheckpointNotFoundError: If there is none.
            CheckpointError: If ranks ask for different checkpoints.
            CorruptionError: If the step that was asked for is damaged, or every one is.
            ObjectNotFoundError: Likewise, if something of it is missing.
            LayoutMismatchError: If `state` does not fit, or has keys that no part of the step was saved with; if bytes
                were saved, and a state is given.
        """
        if not (state is None or isinstance(state, dict | Stateful)):
            raise ConfigError(f"state: expected a state dict or a Stateful, found a {type(state).__name__}")
        self._ranks.check_same(f"load({which!r}) with{'out' * (state is None)} a state")
        tried: dict[str, Exception] = {}
        while True:
            # Listed again after each: another process may have saved, and removed what it does not keep.
            candidates = self._ranks.agree(lambda: self._candidates(which))
            found = next((found for found in candidates if found[0].id not in tried), None)
            if found is None and tried:
                raise next(reversed(tried.values()))
            if found is None:
                listed = self.listed()
                raise self._passed_over.error(which, listed) or self._none(which, listed)
            try:
                return restore(
                    found, self._run, state, ranks=self._ranks, rng=rng, config=self._config, **self._reading
                )
            except (*DAMAGE, CheckpointNotFoundError) as error:
                if which != "latest":
                    raise
                if isinstance(error, DAMAGE):  # and not removed before it was opened, or on no disk of this rank
                    set_aside(found[0], self._run, error, marks=self._ranks.number == 0)
                    self._passed_over.note(found[0].path)
                tried[found[0].id] = error

    def latest(self) -> CheckpointMetadata | None:
        """The newest checkpoint to resume from. Looks at the store, on the rank that asks."""
        return next(reversed(self._whole()), None)

    def best(self, metric: str | None = None) -> CheckpointMetadata | None:
        """The best checkpoint by the policy's KeepBest, or by the one for `metric` if there are several.

        Raises:
            ConfigError: If there is no such KeepBest in the policy, or more than one.
        """
        policy = best_of(self._retention, metric)
        whole = self._whole()
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
        return max((found.step for found in self._ranks.agree(self.all)), default=0) + 1

    def listed(self) -> list[ListedCheckpoint]:
        """Every folder of the run, with what is the matter with it; ascending by step, those of no known step last."""
        return listed_in(self._run)

    def wait(self) -> None:
        """Wait for every save.

        Raises:
            StrataError: Why one failed, the first that did and of which nobody has asked.
        """
        self._unseen.wait()

    def rollback(self, step: int) -> list[str]:
        """Take the run back to `step`: later checkpoints are passed over, and go when the policy is applied next.

        Every rank calls it. Claims the run, as a save does. Returns the folders that are left behind.

        Args:
            step: Of a checkpoint; 0 for the very beginning.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint; nothing is left behind then.
            CheckpointError: If ranks ask for different steps.
            ForkedProcessError: As `save`.
            StaleGenerationError: If another process has claimed the run.
        """
        self._claim.check_process()
        self._ranks.check_same(f"rollback({check_step(step)})")
        with self._ranks.together():
            self.wait()

        def take_back() -> list[str]:
            listed = self.listed()
            if step and all(one.metadata is None or one.metadata.step != step for one in listed):
                raise self._none(step, listed)
            if not listed and not self._newest_generation():
                return []  # nothing is made where nothing is
            self._hold_right()
            return self._run.rollback(step)

        return self._ranks.agree(take_back)

    def hold(
        self, step: int, who: str, *, checkpoint_type: CheckpointType | str = CheckpointType.FULL
    ) -> AbstractContextManager[None]:
        """No policy removes the checkpoint of `step` meanwhile, and no save replaces it, in whatever process.

        Several may hold it at once, under one name too. The hold of a process that died stays, see `release`.

        Raises:
            CheckpointNotFoundError: If there is none.
            CorruptionError: If its manifest is lost, or cannot be read.
        """
        return held(self._run, folder_of(step, checkpoint_type), who)

    def release(self, step: int, who: str, *, checkpoint_type: CheckpointType | str = CheckpointType.FULL) -> int:
        """End all holds of `who` on the checkpoint of `step`, where those who held it are gone; how many there were."""
        return release(self._run, self._root, self._config, folder_of(step, checkpoint_type), who)

    def verify(self, step: int, *, checkpoint_type: CheckpointType | str = CheckpointType.FULL) -> VerifyReport:
        """Read all of a checkpoint and compare it with its digests.

        A sound one is not removed while it is the newest that is known to be; a damaged one is set aside.

        Raises:
            CheckpointNotFoundError: If there is none.
            CorruptionError: If its manifest is lost, or cannot be read.
        """
        folder = folder_of(step, checkpoint_type)
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
        """Apply the policy now. Every rank may call it: the first does it.

        A process that has not saved to the run claims nothing by this: whoever trains goes on.
        """
        self._claim.check_process()
        if self._ranks.number != 0:
            return
        if claimed(self._root) is not None:
            self._hold_right()
            retain(self._run, self._root, self._record)
            return
        run = open_run(self._root, self._config, policy=self._retention)
        run.hold(self._newest_generation())
        retain(run, self._root, self._record)

    @property
    def last_durable_age(self) -> timedelta:
        """Time since a save of this process was committed last; since the manager was made, if none was."""
        return self._record.last_durable_age

    def metrics(self) -> str:
        """What this rank's saves did, in Prometheus' text format; metrics are listed in docs/guide/manager.md."""
        return self._record.text(rank=self._ranks.number)

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

    def _whole(self) -> list[CheckpointMetadata]:
        return whole_in(self.listed())

    def _hold_right(self) -> None:
        """The right to commit and to remove: the one that this process's writers have too."""
        self._run.hold(self._claim.generation())

    def _newest_generation(self) -> int:
        return newest_generation(open_store(self._root, self._config))

    def _candidates(self, which: int | str) -> list[list[CheckpointMetadata]]:
        """Each a whole checkpoint, or the parts of a step."""
        if which == "latest":
            listed = self.listed()
            self._passed_over.tell(listed)
            return [[found] for found in reversed(whole_in(listed))]
        if which == "best":
            best = self.best()
            return [] if best is None else [[best]]
        step = check_step(which)
        at = [found for found in self.all() if found.step == step]
        return [[found for found in at if found.checkpoint_type.is_whole] or at] if at else []

    def _none(self, which: int | str, listed: Sequence[ListedCheckpoint]) -> CheckpointNotFoundError:
        what = "no checkpoint to resume from" if isinstance(which, str) else f"no checkpoint of step {which}"
        return CheckpointNotFoundError("; ".join([f"{what} at {self._root}", *what_else_there_is(listed)]))
