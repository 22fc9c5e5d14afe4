"""Reading once for a group of ranks: what several of them need, one reads and hands on.

Whatever a rank may fail at ends in an agreement of all ranks, in which the failure travels as a value. So a rank that
fails takes part until all know of it, and none waits for one that has left. Bytes travel between two agreements, where
nothing can fail but the group itself. What a round holds is chosen in Rust, `share.rs`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from torch_strata import _native
from torch_strata.checkpoint._board import travelling
from torch_strata.errors import ConfigError, CoordinationError

__all__ = ["Exchange", "Group", "Region", "Sharing", "group_fault", "world_size"]

_logger = logging.getLogger(__name__)

# Row, first element and lengths; the latter two empty for a payload that is taken as it is.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]

# A region, the CUDA device (-1: the host) and address of its first element there, strides, and what owns the memory.
Lent = tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], Any]

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group whose ranks read together.

    Attributes:
        handle: The group.
        rank: This process's rank in it.
        members: Global rank of each of its ranks.
    """

    handle: dist.ProcessGroup
    rank: int
    members: tuple[int, ...]

    @classmethod
    def of(cls, process_group: object) -> Self:
        """The group, if it can hand on bytes in the memory of the CPU.

        Raises:
            ConfigError: If it cannot, or this process is not in it.
        """
        if not isinstance(process_group, dist.ProcessGroup):
            found = type(process_group).__name__
            raise ConfigError(f"process_group: expected a ProcessGroup with this process in it, found a {found}")
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ConfigError("process_group: this process is not in the group")
        if torch.device("cpu") not in process_group._device_types:
            backend = dist.get_backend(process_group)
            raise ConfigError(
                f"process_group: its backend {backend!r} does not hand on what is in the memory of the CPU; "
                "pass a group with gloo, such as dist.new_group(backend='gloo')"
            )
        return cls(handle=process_group, rank=rank, members=tuple(dist.get_process_group_ranks(process_group)))

    @property
    def identity(self) -> tuple[int, int]:
        """Number of ranks, and a number that is the same for the same ranks in every process."""
        return len(self.members), hash(self.members)


def world_size() -> int | None:
    """Ranks of the default group; None without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def group_fault(identities: Sequence[tuple[int, int] | None]) -> str | None:
    """Why ranks that load together, each with the group that it was given, would wait for each other for ever."""
    for (size, _), count in Counter(identity for identity in identities if identity is not None).items():
        if count != size:
            return (
                f"process_group has {size} ranks, of which {count} take part in this load with it: "
                "every rank of the group must load, with a reader that was given it (no_dist=True loads take none)"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a group reads together, as this rank sees it.

    Attributes:
        native: The rounds.
        spans: Of each region the rounds in which it arrives, half-open; None if it is for this rank to read alone.
    """

    native: _native.Together
    spans: list[tuple[int, int] | None]


class Exchange:
    """One load of a group. Enter it on every rank; an exception that leaves it reaches all of them.

    Args:
        group: The group.
        where: The checkpoint, for messages.
        round_bytes: Bytes that a rank takes in one round, of which two are in memory.
    """

    def __init__(self, group: Group, *, where: str, round_bytes: int) -> None:
        self._group = group
        self._where = where
        self._round_bytes = max(round_bytes, _BLOCK_BYTES)
        self._is_over = False
        self.bytes_read = 0
        self.bytes_received = 0
        self.requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Ctrl-C and the like do not wait for others; those learn of it from the group, when this process has ended.
        if isinstance(error, Exception) and not self._is_over:
            try:
                self._agree(None, error)
            except CoordinationError as later:
                _logger.warning("the other ranks may not learn why this one failed: %s", later)

    def share(self, opened: _native.Checkpoint, wanted: Sequence[Sequence[Region]], *, verify: str) -> list[Sharing]:
        """What of each list of `wanted` is read together. Every rank calls it once, with as many lists.

        Raises:
            StrataError: What a rank has failed at.
        """
        needs = self._agree([_native.Together.needs(opened, regions) for regions in wanted])
        sharings = []
        for index, regions in enumerate(wanted):
            native = _native.Together(
                opened,
                [lists[index] for lists in needs],
                rank=self._group.rank,
                round_bytes=self._round_bytes,
                verify=verify,
            )
            sharings.append(Sharing(native=native, spans=native.spans(regions)))
        return sharings

    def read(self, sharing: Sharing, lend: Callable[[int], Lent], done: Callable[[int], None]) -> _native.ReadStats:
        """Read what is shared, in rounds. Every rank calls it for each of its sharings, in the same order.

        Args:
            sharing: What `share` returned.
            lend: Memory for the region with that index, asked for before its first round.
            done: Told once all of the region has arrived.

        Returns:
            What was checked; what was read is counted here.

        Raises:
            StrataError: What a rank has failed at; all raise it.
        """
        rounds = sharing.native.rounds
        buffers = [torch.empty(sharing.native.buffer_bytes, dtype=torch.uint8) for _ in range(min(rounds, 2))]
        spans = {index: span for index, span in enumerate(sharing.spans) if span is not None}
        lent: dict[int, Lent] = {}
        begun: list[_native.Round] = []

        def begin(number: int) -> None:
            lent.update({index: lend(index) for index, span in spans.items() if span[0] == number})
            active = [memory for index, memory in lent.items() if number < spans[index][1]]
            buffer = buffers[number % 2]
            begun.append(sharing.native.begin(number, active, buffer.data_ptr(), buffer.numel(), buffer))

        try:
            for number in range(rounds):
                if number == 0:
                    begin(0)
                current = begun[0]
                pieces, stats = current.wait()
                self.bytes_read += stats.bytes_read
                self.requests += stats.requests
                if number + 1 < rounds:
                    begin(number + 1)  # is read while this round's bytes travel
                self._agree(None)
                self._hand_on(pieces, buffers[number % 2])
                current.deliver()
                begun.remove(current)
                for index in [index for index in lent if spans[index][1] == number + 1]:
                    done(index)
                    del lent[index]
        finally:
            for left in begun:
                left.end()  # nothing may write to a destination after the load has failed
        return sharing.native.settle()

    def close(self) -> None:
        """Learn that every rank has all that it wanted.

        Raises:
            StrataError: What a rank has failed at.
        """
        self._agree(None)
        self._is_over = True

    def _agree(self, value: Any, error: Exception | None = None) -> list[Any]:
        """What each rank said; the failure of one is raised on all others."""
        told = None if error is None else travelling(error)
        answers: list[Any] = [None] * len(self._group.members)
        self._is_over = True  # until all are known to go on
        self._with_group(lambda: dist.all_gather_object(answers, (told, value), group=self._group.handle))
        failed = [(rank, failure) for rank, (failure, _) in enumerate(answers) if failure is not None]
        if failed and error is None:
            rank, failure = failed[0]
            raise type(failure)(f"rank {self._group.members[rank]}: {failure}")
        self._is_over = bool(failed)
        return [value for _, value in answers]

    def _hand_on(self, pieces: Sequence[tuple[int, list[int], int, int]], buffer: torch.Tensor) -> None:
        handle, own, world = self._group.handle, self._group.rank, len(self._group.members)

        def travel() -> None:
            works = []
            for owner, receivers, start, end in pieces:
                piece = buffer[start:end]
                if owner != own:
                    works.append(dist.irecv(piece, group=handle, group_src=owner))
                    continue
                # Each owner begins with its neighbour, so that they do not all send to one rank at a time.
                for receiver in sorted(receivers, key=lambda rank: (rank - own) % world):
                    works.append(dist.isend(piece, group=handle, group_dst=receiver))
            for work in works:
                if work is not None:
                    work.wait()

        self._with_group(travel)
        self.bytes_received += sum(end - start for owner, _, start, end in pieces if owner != own)

    def _with_group(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as error:
            self._is_over = True
            raise CoordinationError(f"{self._where}: the ranks that read together lost each other: {error}") from error
