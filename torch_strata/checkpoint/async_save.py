"""`async_save`: a save that goes on while training does, without a collective.

The order of DCP's own save, with a notice board where DCP gathers and scatters. Training may use the process group
meanwhile, and no rank waits without end.
"""

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from torch_strata import _native
from torch_strata.checkpoint._board import PLANNING_RANK, Beats, Board, Failure
from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._staged import StagedFuture, StagedState
from torch_strata.checkpoint.handle import SaveHandle
from torch_strata.checkpoint.save_planner import StrataSavePlanner
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.writer import StrataWriter
from torch_strata.errors import CheckpointError, ConfigError, CoordinationError

__all__ = ["async_save"]

_logger = logging.getLogger(__name__)

OnFailure = Literal["raise", "continue"]


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StrataWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: timedelta = timedelta(seconds=60),
    on_failure: OnFailure = "raise",
) -> SaveHandle:
    """Save in the background; returns when the state is copied, after which training may change anything.

    Every rank of the group calls it, in the same order. No collective runs, neither here nor in the background: ranks
    leave word in the store of the group, whatever its backend moves. Saves of a process are done one after another.
    At the end of the interpreter a save in flight is completed first.

    Args:
        state_dict: As for ``dcp.save``.
        checkpoint_id: Place of this checkpoint, unless `storage_writer` has one.
        storage_writer: With what to write; one for `checkpoint_id` if not given.
        planner: A StrataSavePlanner if not given.
        process_group: Ranks that save together; the default group if not given.
        no_dist: Whether this process saves alone, whatever groups there are.
        timeout: For how long a rank may be silent, and for how long others may go on after one has failed.
        on_failure: Whether a save that failed raises, from `SaveHandle.result` or, if nobody asked, from the next
            call here. With "continue" it is only logged, as every failure is. The previous checkpoint stays.

    Raises:
        ConfigError: If an argument cannot be used.
        CheckpointError: If a value cannot be copied.
        StrataError: Why the save before failed, if nobody has asked for its result.
    """
    started = time.monotonic()
    writer = _writer_for(checkpoint_id, storage_writer)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ConfigError(f"timeout: expected a timedelta above 0, found {timeout!r}")
    if on_failure not in ("raise", "continue"):
        raise ConfigError(f"on_failure: expected 'raise' or 'continue', found {on_failure!r}")
    place = writer.checkpoint_id if checkpoint_id is None else checkpoint_id
    process = _process()
    board, earlier = process.board(process_group, no_dist=no_dist, timeout=timeout)
    transfer = _native.Transfer()
    part = _Part(
        board=board,
        writer=writer,
        planner=planner or StrataSavePlanner(),
        place=place,
        earlier=earlier,
        transfer=transfer,
    )
    process.beats.start(board, part.give_up)
    try:
        process.raise_unseen()
        staged = writer.copy_state(_plain(state_dict))
    except BaseException as error:
        # The others are in this save already, or will be, and learn of it there.
        part.end_by(error)
        process.beats.stop(board)
        raise
    future = process.executor.submit(_run, process, part, staged, on_failure)
    handle = SaveHandle(place, future, transfer, timedelta(seconds=time.monotonic() - started))
    process.last = handle if on_failure == "raise" else None
    return handle


def in_turn(
    place: str, work: Callable[[], SaveStats], transfer: _native.Transfer, *, on_failure: OnFailure
) -> SaveHandle:
    """Do `work` in the background, when the saves before it have ended; a save as `async_save` does them.

    Raises:
        StrataError: Why the save before failed, if nobody has asked for its result.
    """
    process = _process()
    process.raise_unseen()

    def run() -> SaveStats | None:
        try:
            return work()
        except BaseException as error:
            return _failed(place, error, on_failure)

    handle = SaveHandle(place, process.executor.submit(run), transfer, timedelta())
    process.last = handle if on_failure == "raise" else None
    return handle


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


def _run(
    process: "_Process", part: "_Part", staged: StagedState | StagedFuture, on_failure: OnFailure
) -> SaveStats | None:
    """The background's part."""
    try:
        return part.save(staged)
    except BaseException as error:
        return _failed(os.fspath(part.place), error, on_failure)
    finally:
        staged.lease.release()  # whoever keeps the planner, or an error's traceback, keeps no memory
        process.beats.stop(part.board)


def _failed(place: str, error: BaseException, on_failure: OnFailure) -> None:
    """Log why a save failed, and raise it unless training goes on without."""
    _logger.error("%s: the checkpoint was not saved: %s: %s", place, type(error).__name__, error)
    for note in getattr(error, "__notes__", ()):
        _logger.error("%s: %s", place, note)
    if on_failure != "continue" or not isinstance(error, Exception):
        raise error


@dataclass(kw_only=True)
class _Part:
    """This rank's part in one save."""

    board: Board
    writer: StrataWriter
    planner: SavePlanner
    place: str | os.PathLike[str]
    earlier: list[Board]
    transfer: _native.Transfer
    metadata: Metadata | None = None
    may_be_committed: bool = False
    has_ended: bool = False
    is_running: bool = False

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
                self.earlier.append(self.board)
        stats = self.writer.stats
        assert stats is not None  # write_data has set it
        rate = stats.written_bytes / 1e9 / max(stats.write_seconds, 1e-9)
        _logger.info(
            "%s: saved; this rank wrote %d bytes in %.2f s (%.2f GB/s)",
            *(os.fspath(self.place), stats.written_bytes, stats.write_seconds, rate),
        )
        return stats

    def give_up(self) -> None:
        """Another rank has failed: write no more."""
        self.transfer.cancel()

    def end_by(self, error: BaseException) -> BaseException:
        """Tell the others, remove what was written; what to raise on this rank."""
        try:
            failure = self._agreed(error)
        except CoordinationError as lost:
            error.add_note(str(lost))
            failure = Failure(self.board.rank, error)
        if self.is_running and not self.may_be_committed:
            self.writer.discard()
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
        board.post("plan", (os.fspath(self.place), self._local_plan(state)))
        if self.plans:
            for rank, plan in enumerate(self._global_plan(board.gather("plan"))):
                board.post("assigned", plan, rank=rank)
        plan = self.planner.finish_plan(board.take("assigned"))
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
    def _local_plan(self, state: dict[str, Any]) -> SavePlan:
        self.writer.reset(self.place)
        self.writer.transfer = self.transfer
        self.planner.set_up_planner(state, storage_meta=self.writer.storage_meta(), is_coordinator=self.plans)
        self.writer.set_up_storage_writer(self.plans, rank=self.board.rank, use_collectives=True)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    @gc_paused()
    def _global_plan(self, told: Sequence[tuple[str, SavePlan]]) -> list[SavePlan]:
        while self.earlier:  # each rank has ended the saves before, or it would not have come to this one
            self.earlier.pop().forget()
        places, plans = zip(*told, strict=True)
        for rank, place in enumerate(places):
            if place != places[0]:
                raise CheckpointError(f"rank 0 saves to {places[0]}, rank {rank} to {place}: each save has one place")
        assigned, self.metadata = self.planner.create_global_plan(list(plans))
        return self.writer.prepare_global_plan(assigned)

    def _commit(self, results: list[list[WriteResult]]) -> None:
        assert self.metadata is not None  # `_global_plan` has set it
        self.may_be_committed = True  # what fails from here on `finish` itself cleans up, if it may
        self.writer.finish(self.metadata, results)
        try:
            self.board.end(None)
        except CoordinationError as error:
            _logger.warning("%s: committed, but the other ranks may not learn it: %s", os.fspath(self.place), error)


class _Process:
    """What the saves of one process share."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strata-save")
        self.beats = Beats()
        self.last: SaveHandle | None = None
        # Of each group the number of its next save, which is the same on all ranks, and its store.
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()

    def board(self, group: dist.ProcessGroup | None, *, no_dist: bool, timeout: timedelta) -> tuple[Board, list[Board]]:
        """For the next save of a group, and those of the saves before that are still to be forgotten."""
        if no_dist or world_size() is None:
            return Board(store=dist.HashStore(), prefix="save", rank=0, world_size=1, timeout=timeout), []
        group = distributed_c10d._get_default_group() if group is None else group
        rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1
        if rank < 0:
            raise ConfigError("process_group: expected a ProcessGroup with this process in it")
        if group not in self._groups:
            self._groups[group] = _Group(group)  # opens a connection
        known = self._groups[group]
        prefix = f"torch_strata/save/{next(known.numbers)}"
        size = dist.get_world_size(group)
        board = Board(store=known.store, prefix=prefix, rank=rank, world_size=size, timeout=timeout)
        return board, known.earlier

    def raise_unseen(self) -> None:
        """Raise what the save before failed at, if nobody has asked."""
        last, self.last = self.last, None
        failure = None if last is None else last.unseen_failure()
        if failure is not None:
            raise failure


class _Group:
    """A process group's store, over a connection of our own: another thread may block in the group's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # The original lives on with the clone: on one rank it is the server.
        self._original = distributed_c10d._get_process_group_store(group)
        self.store = self._original.clone()
        self.numbers = itertools.count()
        self.earlier: list[Board] = []


_the_process: _Process | None = None


def _process() -> _Process:
    global _the_process
    if _the_process is None or _the_process.pid != os.getpid():
        _the_process = _Process()  # a fork has none of the threads
    return _the_process
