"""A notice board for the ranks of one save: keys in the store of their process group, and no collective.

A rank posts what it has done and looks for what it waits for, so that training may use the group meanwhile. Nobody is
waited for without end: a rank whose beat stands still is named, and one that fails tells all others.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from torch_strata.checkpoint._gc import gc_paused
from torch_strata.errors import CheckpointError, CoordinationError, CoordinatorTimeoutError, StrataError

__all__ = ["PLANNING_RANK", "Beats", "Board", "Failure", "travelling"]

PLANNING_RANK = 0

# The first look follows soon, for what is nearly there; later ones leave the store alone.
_FIRST_WAIT_SECONDS = 0.002
_LONGEST_WAIT_SECONDS = 0.1

# Beats in the time after which a silent rank is given up: some may come late.
_BEATS_PER_TIMEOUT = 10


class Failure(Exception):
    """What went wrong with a save, and where: a message between ranks, which reaches no user.

    Attributes:
        rank: That failed; in the group.
        cause: What it raised.
        in_commit: Whether the commit had begun, so that what was written may be in use, or removed already.
    """

    def __init__(self, rank: int, cause: BaseException, *, in_commit: bool = False) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.cause = cause
        self.in_commit = in_commit


@dataclass(frozen=True, kw_only=True)
class Board:
    """One save, as one rank sees it.

    Attributes:
        store: Of the group.
        prefix: Of the keys; the same on all ranks, and never used before.
        rank: This rank in the group.
        world_size: Number of ranks in the group.
        timeout: Time for which a rank may be silent.
        call: What is saved, in words.
    """

    store: dist.Store
    prefix: str
    rank: int
    world_size: int
    timeout: timedelta
    call: str

    def announce(self) -> None:
        """Say that this rank has come to this save, for those who wait for it at another one.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        self._reach(lambda: self.store.set(_call_key(self.rank), self.call))

    def post(self, what: str, value: Any, *, rank: int | None = None) -> None:
        """Say `what` as this rank, or leave it for `rank`. Returns at once.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        key = self._key(what, self.rank if rank is None else rank)
        self._reach(lambda: self.store.set(key, data))  # type: ignore[arg-type]  # takes bytes, its stub says str

    def gather(self, what: str) -> list[Any]:
        """What each rank said, by rank.

        Raises:
            Failure: If a rank has failed or is silent.
            CoordinationError: If the store cannot be reached.
        """
        ranks = range(self.world_size)
        keys = [self._key(what, rank) for rank in ranks]
        self._wait(keys, watched=ranks)
        with gc_paused():
            return [self._get(key) for key in keys]

    def take(self, what: str) -> Any:
        """What the planning rank has left for this one.

        Raises:
            Failure: If a rank has failed, or the planning rank is silent.
            CoordinationError: If the store cannot be reached.
        """
        key = self._key(what, self.rank)
        self._wait([key], watched=[PLANNING_RANK])
        return self._get(key)

    def end(self, failure: Failure | None) -> None:
        """On the planning rank: say how the save has ended, once and for all.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        told = None if failure is None else (failure.rank, travelling(failure.cause), failure.in_commit)
        self.post("end", told, rank=PLANNING_RANK)

    def wait_for_end(self) -> None:
        """Return when the planning rank has committed.

        Raises:
            Failure: If the save has failed, for certain.
            CoordinationError: If the planning rank is silent or the store cannot be reached: nobody knows here.
        """
        key = self._key("end", PLANNING_RANK)
        try:
            self._wait([key], watched=[PLANNING_RANK], heeds_failures=False)
        except Failure as failure:
            raise CoordinatorTimeoutError(f"{failure.cause}; whether it has committed is not known") from None
        told = self._get(key)
        if told is not None:
            rank, cause, in_commit = told
            raise Failure(rank, cause, in_commit=in_commit)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed. The first to fail is the one that is heard of.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        told = pickle.dumps((self.rank, travelling(error)))
        key = self._key("failed")
        self._reach(lambda: self.store.compare_set(key, "", told))  # type: ignore[arg-type]  # takes bytes

    def failure(self) -> Failure | None:
        """The first failure of a rank, if one has failed.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        key = self._key("failed")
        if not self._reach(lambda: self.store.check([key])):
            return None
        return Failure(*self._get(key))

    def beat(self, count: int) -> None:
        """Show that this rank lives.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        self._reach(lambda: self.store.set(self._key("beat", self.rank), str(count)))

    def forget(self) -> None:
        """Remove all that was said, of a save whose end every rank has learned: the store lives as long as the job.

        Raises:
            CoordinationError: If the store cannot be reached.
        """
        ranks = range(self.world_size)
        kinds = ("plan", "assigned", "written", "beat")
        keys = [self._key(kind, rank) for kind in kinds for rank in ranks]
        for key in (*keys, self._key("end", PLANNING_RANK), self._key("failed")):
            self._reach(partial(self.store.delete_key, key))

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self.prefix}/{what}" if rank is None else f"{self.prefix}/{what}/{rank}"

    def _get(self, key: str) -> Any:
        # As torch's own collectives of objects do: the ranks of a group trust each other.
        return pickle.loads(self._reach(lambda: self.store.get(key)))

    def _wait(self, keys: Sequence[str], *, watched: Sequence[int], heeds_failures: bool = True) -> None:
        pulse = _Pulse(self, watched)
        pause = _FIRST_WAIT_SECONDS
        while not self._reach(lambda: self.store.check(list(keys))):
            failure = self.failure() if heeds_failures else None
            if failure is not None:
                raise failure
            silent = pulse.silent()
            if silent:
                raise Failure(self.rank, self._not_heard_of(silent))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)

    def _not_heard_of(self, silent: Sequence[int]) -> CoordinatorTimeoutError:
        ranks = ", ".join(map(str, silent[:10])) + (", …" if len(silent) > 10 else "")
        of = f"{len(silent)} of {self.world_size} ranks"
        elsewhere = "".join(f"; rank {rank}'s last call was for {call}" for rank, call in self._last_calls(silent[:10]))
        return CoordinatorTimeoutError(
            f"{of} have not been heard of for {self.timeout.total_seconds():g} s: {ranks}; they died, hang, "
            f"or did not call async_save for {self.call}{elsewhere}"
        )

    def _last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        said = [rank for rank in ranks if self._reach(partial(self.store.check, [_call_key(rank)]))]
        return [(rank, self._reach(partial(self.store.get, _call_key(rank))).decode()) for rank in said]

    def _reach(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # of which torch's store errors are kinds
            raise CoordinationError(
                f"the store of the process group cannot be reached, as when the rank that keeps it, most often rank 0, "
                f"has died: {error}"
            ) from error


def _call_key(rank: int) -> str:
    return f"torch_strata/last_call/{rank}"


class _Pulse:
    """Which of some ranks are silent, by this rank's own clock."""

    def __init__(self, board: Board, ranks: Sequence[int]) -> None:
        self._board = board
        self._limit = board.timeout.total_seconds()
        now = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {rank: (b"", now) for rank in ranks if rank != board.rank}
        self._looked = now

    def silent(self) -> list[int]:
        now = time.monotonic()
        if now - self._looked < self._limit / _BEATS_PER_TIMEOUT:
            return []
        self._looked = now
        for rank, (beat, _) in self._seen.items():
            found = self._beat_of(rank)
            if found != beat:
                self._seen[rank] = (found, now)
        return [rank for rank, (_, since) in self._seen.items() if now - since > self._limit]

    def _beat_of(self, rank: int) -> bytes:
        board = self._board
        key = board._key("beat", rank)
        if not board._reach(lambda: board.store.check([key])):
            return b""
        return board._reach(lambda: board.store.get(key))  # type: ignore[no-any-return]


class Beats:
    """Shows on every board of this process that it lives, and tells a save when another rank has failed.

    One thread for all saves, while there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boards: dict[Board, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def start(self, board: Board, on_failure: Callable[[], None]) -> None:
        """Beat on `board` until `stop`; call `on_failure` if another rank fails meanwhile."""
        board.beat(0)
        with self._lock:
            self._boards[board] = on_failure
            if self._thread is None:
                # No daemon: what Python leaves behind in torch's code when it ends brings the process down with it.
                self._thread = threading.Thread(target=self._run, name="strata-beats")
                self._thread.start()
        self._changed.set()

    def stop(self, board: Board) -> None:
        """Be silent on `board`."""
        with self._lock:
            self._boards.pop(board, None)
        self._changed.set()

    def _run(self) -> None:
        count = 0
        while True:
            self._changed.clear()
            with self._lock:
                if not self._boards:
                    self._thread = None
                    return
                boards = dict(self._boards)
            count += 1
            for board, on_failure in boards.items():
                try:
                    board.beat(count)
                    if board.failure() is not None:
                        on_failure()
                except CoordinationError:
                    on_failure()  # whoever waits on the board finds the same, and says so
            self._changed.wait(min(board.timeout for board in boards).total_seconds() / _BEATS_PER_TIMEOUT)


def travelling(error: BaseException) -> BaseException:
    """`error` if it is one of ours, which all ranks can read; else one of ours with what it says."""
    if isinstance(error, StrataError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")
