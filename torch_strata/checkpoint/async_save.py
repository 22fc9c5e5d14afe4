"""`async_save`: a save that goes on while training does, without a collective.

The order of DCP's own save, with a notice board where DCP gathers and scatters. Training may use the process group
meanwhile, and no rank waits without end.
"""

import hashlib
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from torch_strata import _native
from torch_strata.checkpoint._assignment import Assignment, assignment_of
from torch_strata.checkpoint._board import PLANNING_RANK, Beats, Board, Failure
from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._staged import StagedFuture, StagedState
from torch_strata.checkpoint._task import Task, TaskQueue
from torch_strata.checkpoint.handle import SaveHandle, UnseenSaves
from torch_strata.checkpoint.planning import ChosenItems
from torch_strata.checkpoint.save_planner import StrataSavePlanner
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.writer import StrataWriter
from torch_strata.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    CorruptionError,
    ObjectNotFoundError,
    PreconditionError,
    StaleGenerationError,
)

__all__ = ["async_save"]

_logger = logging.getLogger(__name__)

# Part of `timeout` for removing what a failed save has written; others need some to hear of it, and to stop.
_CLEANING_SHARE = 4

_TIMEOUT = timedelta(seconds=60)

OnFailure = Literal["raise", "continue"]


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StrataWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: timedelta = _TIMEOUT,
    on_failure: OnFailure = "raise",
    step: int | None = None,
) -> SaveHandle:
    """Save in the background; returns when the state is copied, after which training may change anything.

    Every rank of the group calls it, for the same saves in the same order. Calls meet by their place, by `step`, and
    where these are the same by their number: with a place or a `step` for each save, a call that a rank misses fails
    that save, after `timeout`, and no other. No collective runs, neither here nor in the background: ranks leave word
    in the store of the group, whatever its backend moves. Saves of a process are done one after another.
    At the end of the interpreter a save in flight is completed first.

    With the default planner, a rank that saves a state of the same structure as the time before copies only what it
    wrote then (``SaveStats.staged_bytes``); tensors that other ranks hold too and write are left to them. The first
    call, one that comes while the save before is still being planned, and one after a failure copy everything.

    Args:
        state_dict: As for ``dcp.save``.
        checkpoint_id: Place of this checkpoint, and from now on of `storage_writer`; that one's own if not given.
        storage_writer: With what to write; one for `checkpoint_id` if not given.
        planner: A StrataSavePlanner if not given.
        process_group: Ranks that save together; the default group if not given.
        no_dist: Whether this process saves alone, whatever groups there are.
        timeout: For how long a rank may be silent, and for how long others may go on after one has failed.
        on_failure: Whether a save that failed raises, from `SaveHandle.result` or, if nobody asked, from the next
            call here. With "continue" it is only logged, as every failure is. The previous checkpoint stays.
        step: Of this save, the same on all ranks, by which saves to one place are told apart. Without it ranks whose
            states hold different integers under ``step`` refuse to save together.

    Raises:
        ConfigError: If an argument cannot be used.
        CheckpointError: If a value cannot be copied.
        StrataError: Why a save before failed, the first of which nobody has asked for the result.
    """
    started = time.monotonic()
    writer = _writer_for(checkpoint_id, storage_writer)
    place = writer.checkpoint_id if checkpoint_id is None else checkpoint_id
    process = _process()
    group = process.group(process_group, no_dist=no_dist)
    is_usable = isinstance(timeout, timedelta) and timeout > timedelta(0)
    board = group.board(place, step, timeout if is_usable else _TIMEOUT)
    planner = planner or StrataSavePlanner()
    transfer = _native.Transfer()
    part = _Part(
        board=board,
        writer=writer,
        planner=planner,
        place=place,
        group=group,
        number=group.num_saves,
        transfer=transfer,
    )
    task = staged = None
    try:
        process.beats.start(board, part.give_up)
        if not is_usable:
            raise ConfigError(f"timeout: expected a timedelta above 0, found {timeout!r}")
        if on_failure not in ("raise", "continue"):
            raise ConfigError(f"on_failure: expected 'raise' or 'continue', found {on_failure!r}")
        unseen = writer.unseen or process.unseen
        unseen.raise_first()
        staged = writer.copy_state(_plain(state_dict), last=group.last_assignment(planner))
        task = Task(partial(_run, process, part, staged))
        future = process.tasks.put(task)
    except BaseException as error:  # Ctrl-C anywhere in it too
        if task is None or task.withdraw():
            # The others are in this save already, or will be, and learn of it there.
            part.end_by(error)
            process.beats.stop(board)
            if staged is not None:
                staged.lease.release()
        raise
    stage_time = timedelta(seconds=time.monotonic() - started)
    return unseen.added(SaveHandle(place, future, transfer, stage_time, raises=on_failure == "raise"))


def _step_of(state: Mapping[str, Any]) -> int | None:
    """The step that a state says it is of."""
    step = state.get("step")
    return step if type(step) is int else None


def _check_steps(steps: Sequence[int | None], call: str) -> None:
    """Refuse to make one checkpoint of two steps."""
    known = {step: rank for rank, step in reversed(list(enumerate(steps))) if step is not None}
    if len(known) > 1:
        told = ", ".join(f"rank {rank} step {step}" for step, rank in sorted(known.items(), key=lambda pair: pair[1]))
        raise CheckpointError(
            f"{call}: {told} in one save: a rank has missed a call of async_save; pass step= so that such a call costs "
            "one save and not all later ones"
        )


def in_turn(
    place: str,
    work: Callable[[], SaveStats],
    transfer: _native.Transfer,
    *,
    on_failure: OnFailure,
    unseen: UnseenSaves,
) -> SaveHandle:
    """Do `work` in the background, when the saves before it have ended; a save as `async_save` does them.

    Raises:
        StrataError: Why one of `unseen` failed.
    """
    process = _process()
    unseen.raise_first()

    def run() -> SaveStats:
        try:
            return work()
        except BaseException as error:
            _log_failure(place, error)
            raise

    task = Task(run)
    try:
        future = process.tasks.put(task)
    except BaseException:
        task.withdraw()
        raise
    return unseen.added(SaveHandle(place, future, transfer, timedelta(), raises=on_failure == "raise"))


def _writer_for(place: str | os.PathLike[str] | None, writer: StrataWriter | None) -> StrataWriter:
    if writer is not None:
        if not isinstance(writer, StrataWriter):
            raise ConfigError(f"storage_writer: expected a StrataWriter, found a {type(writer).__name__}")
        return writer
    if place is None:
        raise ConfigError("async_save needs a checkpoint_id or a storage_writer")
    return StrataWriter(place)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def _run(process: "_Process", part: "_Part", staged: StagedState | StagedFuture) -> SaveStats:
    """The background's part."""
    try:
        return part.save(staged)
    except BaseException as error:
        _log_failure(part.place, error)
        raise
    finally:
        staged.lease.release()  # whoever keeps the planner, or an error's traceback, keeps no memory
        process.beats.stop(part.board)


def _log_failure(place: str | os.PathLike[str], error: BaseException) -> None:
    where = os.fspath(place)
    _logger.error("%s: the checkpoint was not saved: %s: %s", where, type(error).__name__, error)
    for note in getattr(error, "__notes__", ()):
        _logger.error("%s: %s", where, note)


@dataclass(kw_only=True)
class _Part:
    """This rank's part in one save."""

    board: Board
    writer: StrataWriter
    planner: SavePlanner
    place: str | os.PathLike[str]
    group: "_Group"
    number: int
    transfer: _native.Transfer
    offer: SavePlan | None = None
    metadata: Metadata | None = None
    may_be_committed: bool = False
    has_ended: bool = False
    is_running: bool = False
    was_given_up: bool = False
    staged_bytes: int = 0
    torn: tuple[str, ...] = ()

    @property
    def plans(self) -> bool:
        return self.board.rank == PLANNING_RANK

    def save(self, staged: StagedState | StagedFuture) -> SaveStats:
        """Take part from the plan to the end.

        Raises:
            Exception: What this rank failed at, or the first rank that did.
        """
        self.is_running = True
        try:
            self._save(staged)
        except BaseException as error:
            raise self.end_by(error) from None
        finally:
            self.is_running = False
            if self.plans:
                self.group.earlier.append(self.board)
        stats = self.writer.stats
        assert stats is not None  # write_data has set it
        rate = stats.written_bytes / 1e9 / max(stats.write_seconds, 1e-9)
        _logger.info(
            "%s: saved; this rank wrote %d bytes in %.2f s (%.2f GB/s)",
            *(os.fspath(self.place), stats.written_bytes, stats.write_seconds, rate),
        )
        return replace(stats, staged_bytes=self.staged_bytes, torn=self.torn)

    def give_up(self) -> None:
        """Another rank has failed, or the store of the group has gone: write no more."""
        self.was_given_up = True
        self.transfer.cancel()

    def end_by(self, error: BaseException) -> BaseException:
        """Tell the others, remove what was written; what to raise on this rank."""
        try:
            failure = self._agreed(error)
        except CoordinationError as lost:
            if not self.was_given_up:
                error.add_note(str(lost))
            failure = Failure(self.board.rank, lost if self.was_given_up else error)
        if self.is_running and not self.may_be_committed:
            self.writer.discard(within=self.board.timeout / _CLEANING_SHARE)
        if failure.rank != self.board.rank:
            failure.cause.add_note(f"rank {failure.rank} of {self.board.world_size} failed at this, first of all")
        return failure.cause

    def _agreed(self, error: BaseException) -> Failure:
        """The failure that all ranks tell: the first one."""
        failure = error if isinstance(error, Failure) else Failure(self.board.rank, error)
        if self.has_ended:
            return failure
        self.board.fail(failure.cause)
        first = self.board.failure() or failure
        if first.rank == self.board.rank:
            first = Failure(first.rank, failure.cause)  # with its traceback
        if self.plans:
            self.board.end(Failure(first.rank, first.cause, in_commit=self.may_be_committed))
        return first

    def _save(self, staged: StagedState | StagedFuture) -> None:
        board = self.board
        state = staged.result() if isinstance(staged, StagedFuture) else staged
        self.staged_bytes, self.torn = state.num_bytes, state.torn
        board.post("plan", (_step_of(state), self._local_plan(state)))
        if self.plans:
            for rank, plan in enumerate(self._global_plan(board.gather("plan"))):
                board.post("assigned", plan, rank=rank)
        plan = self.planner.finish_plan(board.take("assigned"))
        self._remember(state, plan)
        results = self.writer.write_data(plan, self.planner).value()
        if self.plans:
            board.post("written", results)
            self._commit(board.gather("written"))
            return
        # From here on the planning rank alone says how it ends.
        self.may_be_committed = self.has_ended = True
        board.post("written", results)
        try:
            board.wait_for_end()
        except Failure as failure:
            self.may_be_committed = failure.in_commit
            raise

    @gc_paused()
    def _local_plan(self, state: StagedState) -> SavePlan:
        self.writer.reset(self.place)
        self.writer.transfer = self.transfer
        self.planner.set_up_planner(state, storage_meta=self.writer.storage_meta(), is_coordinator=self.plans)
        self.writer.set_up_storage_writer(self.plans, rank=self.board.rank, use_collectives=True)
        if state.assignment is not None and isinstance(self.planner, StrataSavePlanner):
            self.offer = self.planner.repeat_local_plan(state.assignment)
        else:
            self.offer = self.planner.create_local_plan()
        return self.writer.prepare_local_plan(self.offer)

    def _remember(self, state: StagedState, plan: SavePlan) -> None:
        """What this rank writes now is all that it needs to copy of a state like this the next time."""
        options = _options(self.planner)
        if options is None or self.board.world_size == 1 or not isinstance(plan.items, ChosenItems):
            return
        assert self.offer is not None  # `_local_plan` has set it
        mappings = self.planner.mappings  # type: ignore[attr-defined]
        self.group.assignment = assignment_of(
            state.outline,
            number=self.number,
            options=options,
            offer=self.offer,
            chosen=plan.items,
            names=mappings,
        )

    @gc_paused()
    def _global_plan(self, told: Sequence[tuple[int | None, SavePlan]]) -> list[SavePlan]:
        while self.group.earlier:  # each rank has ended the saves before, or it would not have come to this one
            self.group.earlier.pop().forget()
        steps, plans = zip(*told, strict=True)
        _check_steps(steps, self.board.call)
        assigned, self.metadata = self.planner.create_global_plan(list(plans))
        return self.writer.prepare_global_plan(assigned)

    def _commit(self, results: list[list[WriteResult]]) -> None:
        assert self.metadata is not None  # `_global_plan` has set it
        self.may_be_committed = True  # what fails from here on `finish` itself cleans up, if it may
        try:
            self.writer.finish(self.metadata, results)
        except (CorruptionError, ObjectNotFoundError, PreconditionError, StaleGenerationError):
            # Nothing was published. Each rank removes its own: the planning rank may not see a disk that is not shared.
            self.may_be_committed = False
            raise
        try:
            self.board.end(None)
        except CoordinationError as error:
            _logger.warning("%s: committed, but the other ranks may not learn it: %s", os.fspath(self.place), error)


class _Process:
    """What the saves of one process share."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.tasks = TaskQueue()
        self.beats = Beats()
        self.unseen = UnseenSaves()
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()

    def group(self, group: dist.ProcessGroup | None, *, no_dist: bool) -> "_Group":
        """The ranks that save together."""
        if no_dist or world_size() is None:
            return _Group(None)
        group = distributed_c10d._get_default_group() if group is None else group
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ConfigError("process_group: expected a ProcessGroup with this process in it")
        if group not in self._groups:
            self._groups[group] = _Group(group)  # opens a connection
        return self._groups[group]


class _Group:
    """Ranks that save together: their store, and what lasts from save to save."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if group is None:
            self.store: dist.Store = dist.HashStore()
        else:
            # A connection of our own: another thread may block in the group's. The original lives on with the clone:
            # on one rank it is the server.
            self._original = distributed_c10d._get_process_group_store(group)
            self.store = self._original.clone()
        self.num_saves = 0
        # How often each save was called for. Ranks meet by this and not by a count of all calls: one that has missed a
        # call would meet the others at the wrong saves ever after, and what they save would be a mix.
        self._calls: Counter[str] = Counter()
        # Boards that are still to be forgotten.
        self.earlier: list[Board] = []
        self.assignment: Assignment | None = None

    def board(self, place: str | os.PathLike[str], step: int | None, timeout: timedelta) -> Board:
        """For the next save."""
        call = os.fspath(place) if step is None else f"{os.fspath(place)} at step {step}"
        self.num_saves += 1
        self._calls[call] += 1
        name = hashlib.blake2b(call.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        board = Board(
            store=self.store,
            prefix=f"torch_strata/save/{name}/{self._calls[call]}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            call=call,
        )
        board.announce()
        return board

    def last_assignment(self, planner: SavePlanner) -> Assignment | None:
        """This rank's part in the save before the one that begins, if a rank that knows it need copy no more.

        Of that save only: so all ranks that copy a part copy parts of the same plan (`_copies.py`).
        """
        known = self.assignment
        if known is None or known.number != self.num_saves - 1 or known.options != _options(planner):
            return None
        return known


def _options(planner: SavePlanner) -> tuple[bool, ...] | None:
    """What decides how a planner plans a state; None if that is not known."""
    if type(planner) is not StrataSavePlanner or not planner.flatten_state_dict:
        return None
    return planner.flatten_sharded_tensors, planner.dedup_save_to_lowest_rank, planner.whole_chunks


_the_process: _Process | None = None


def _process() -> _Process:
    global _the_process
    if _the_process is None or _the_process.pid != os.getpid():
        _the_process = _Process()  # a fork has none of the threads
    return _the_process
