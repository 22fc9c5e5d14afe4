"""A copy of a state on the host, taken before an asynchronous save returns to training.

The copy lies in memory that is kept from save to save (`_arena.py`). Never copies a storage behind a view, and never
re-uses memory that a save in flight, or whoever keeps its state, still refers to.
"""

import copy
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_strata import _native
from torch_strata.checkpoint._arena import ArenaStats, Lease, arena
from torch_strata.checkpoint._assignment import Assignment, Rows, Share, rows_only
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._leaves import LISTS, MAPPINGS, Leaves
from torch_strata.checkpoint._process import forget_dead_process, forget_process
from torch_strata.checkpoint._staged import StagedFuture, StagedState, keep_attributes, shard_like
from torch_strata.checkpoint._tensors import (
    HOST,
    contiguous_strides,
    device_number,
    is_dense,
    is_plain,
    is_reachable,
    settled,
    wait_for_kernels,
)
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError, ConfigError

__all__ = [
    "ArenaStats",
    "StagedFuture",
    "StagedState",
    "arena_stats",
    "check_optimizers",
    "forget_dead_process",
    "forget_process",
    "snapshot",
    "snapshot_behind_training",
    "takes_turn",
    "wait_for_turn",
]

_logger = logging.getLogger(__name__)

# From this size on a payload is aligned in its file so that direct I/O needs no bounce (layout.rs): so is its copy.
_ALIGNED_BYTES = 512 << 10
_PAGE_BYTES = 4096
_LEAST_ALIGN = 64

_UNCHANGING = (int, float, bool, str, bytes, type(None))


def snapshot(
    state: dict[str, Any],
    *,
    config: StorageConfig | None = None,
    user: str = "a state",
    last: Assignment | None = None,
) -> StagedState:
    """A copy that later changes to `state` do not reach: tensors copied to the host, values deep-copied.

    Views that were the same memory stay the same memory (tied weights are copied once); a DTensor keeps its mesh and
    placements. The memory is lent again when nothing refers to the copy's tensors any more.

    Args:
        state: What `dcp.save` takes.
        config: Its `max_staging_bytes` limits the memory of all staged states together, its `deadline` the wait for it.
        user: Who needs the copy, in words for those who wait for its memory.
        last: What this rank wrote of a state last time. If `state` has the same structure, only that is copied, and
            `StagedState.by` says so.

    Raises:
        CheckpointError: If a value cannot be copied, naming it; if the memory is not to be had.
    """
    staging = _Staging(state, frozenset(), config, user, last)
    staging.finish()
    return staging.staged


def snapshot_behind_training(
    state: dict[str, Any],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    config: StorageConfig | None = None,
    user: str = "a state",
    last: Assignment | None = None,
) -> StagedFuture:
    """As `snapshot`, but what only the optimizers' ``step`` changes is copied while the next forward and backward run.

    These are the tensors that share a storage with the optimizers' parameters and states. Everything else is copied
    when this returns. The next ``step`` of each optimizer begins when the copy has ended.

    Raises:
        CheckpointError: As `snapshot`, unless it happens later: then the future raises it.
    """
    storages = frozenset(storage for optimizer in optimizers for storage in _storages_of(optimizer))
    staging = _Staging(state, storages, config, user, last)
    future = StagedFuture()
    future.lease = staging.staged.lease
    future.set_running_or_notify_cancel()
    ended = threading.Event()
    _fence(optimizers, ended)

    def finish() -> None:
        try:
            staging.finish()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(staging.staged)
        finally:
            ended.set()

    threading.Thread(target=finish, name="strata-staging").start()
    return future


# Of DCP's last save in the background: this process's id, and the memory of its state.
_running: tuple[int, Lease] | None = None

# What DCP calls the threads in which it saves.
_DCP_THREADS = ("AsyncCheckpointExecutor", "ThreadPoolExecutor")

_LOOK_EVERY_SECONDS = 0.002
_SAID_AFTER_SECONDS = 0.1


def wait_for_turn(*, user: str, deadline_seconds: float) -> None:
    """Wait until DCP's save in the background before this one has ended.

    Two at a time would mix: their collectives meet on one group, and answers of a process on one pipe.

    Raises:
        CheckpointError: If it has not ended in time.
    """
    started = time.monotonic()
    said = False
    while _running is not None and _running[0] == os.getpid() and _is_running(_running[1]):
        # The thread of a save that has reported its end takes a moment to go.
        if not said and time.monotonic() - started > _SAID_AFTER_SECONDS:
            said = True
            _logger.warning("%s waits for the save before it; torch_strata.async_save would not", user)
        if time.monotonic() - started > deadline_seconds:
            raise CheckpointError(f"{user} waited {deadline_seconds:g} s for the save before it")
        time.sleep(_LOOK_EVERY_SECONDS)


def takes_turn(lease: Lease) -> None:
    """DCP's save in the background of this memory's state begins."""
    global _running
    _running = os.getpid(), lease


def _is_running(lease: Lease) -> bool:
    if lease.thread is threading.current_thread():
        return False  # a callback of that very save
    if lease.thread is not None:
        return lease.thread.is_alive()
    # It has not come to its writer yet, or never did.
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_DCP_THREADS)]
    return lease.is_held and bool(threads)


def arena_stats() -> ArenaStats:
    """What this process keeps for staging now."""
    return arena().stats()


def check_optimizers(value: object) -> tuple[torch.optim.Optimizer, ...]:
    """`value` as optimizers: one, or several.

    Raises:
        ConfigError: If it is something else.
    """
    optimizers = (value,) if not isinstance(value, list | tuple) else tuple(value)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"overlap: expected optimizers, found a {type(optimizer).__name__}")
    return optimizers


# Hooks before a step, by what they wait for.
_fences: list[tuple[threading.Event, Any]] = []


def _fence(optimizers: Sequence[torch.optim.Optimizer], ended: threading.Event) -> None:
    """Let no step of `optimizers` begin before `ended` is set."""
    # A hook cannot remove itself, torch is going through the hooks then: the next save removes those that have passed.
    for passed in [fence for fence in _fences if fence[0].is_set()]:
        passed[1].remove()
        _fences.remove(passed)
    pid = os.getpid()

    def wait(*_: Any) -> None:
        # In a forked child nobody copies, and its tensors are its own.
        if os.getpid() == pid:
            ended.wait()

    _fences.extend((ended, optimizer.register_step_pre_hook(wait)) for optimizer in optimizers)


def _storages_of(optimizer: torch.optim.Optimizer) -> set[int]:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return {_local(value).untyped_storage()._cdata for value in tensors if isinstance(value, torch.Tensor)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Piece:
    """One tensor that is copied as memory, or gathered by torch, into the slot."""

    __slots__ = ("device", "later", "num_bytes", "offset", "source", "staged", "strides")

    def __init__(self, source: torch.Tensor, num_bytes: int, offset: int) -> None:
        self.source, self.num_bytes, self.offset = source, num_bytes, offset
        self.strides: tuple[int, ...] | None = None  # of the copy; None if torch gathers it
        self.device = HOST
        self.later = False
        self.staged: torch.Tensor | None = None


# Where a tensor of the state goes: to a piece; with some of its rows to pieces; or, None, to memory of its own.
_Place = _Piece | dict[Rows, _Piece] | None


class _Staging:
    """One copy in the making: the tensors are found first, then copied while the values are."""

    def __init__(
        self,
        state: dict[str, Any],
        later: frozenset[int],
        config: StorageConfig | None,
        user: str,
        last: Assignment | None,
    ) -> None:
        config = config or StorageConfig()
        self._later = later
        self._pieces: list[_Piece] = []
        self._by_memory: dict[Any, _Piece] = {}
        self._clones: dict[int, torch.Tensor] = {}
        self._num_bytes = 0
        with gc_paused():
            leaves = Leaves(state)
            by = last if last is not None and last.is_of(leaves.structure) else None
            shares: Sequence[Share] = [None] * len(leaves.tensors) if by is None else by.shares
            places = list(map(self._place, leaves.local_tensors, shares))
        # Walked once more below, in the same order.
        self._found = zip(leaves.tensors, leaves.local_tensors, places, strict=True)
        wait_for_kernels({piece.device for piece in self._pieces})
        self._lease = arena().take(
            self._num_bytes,
            budget_bytes=config.max_staging_bytes,
            deadline_seconds=config.deadline.total_seconds(),
            user=user,
        )
        try:
            copying = self._copy(later=False)
            try:
                with gc_paused(), torch.no_grad():
                    staged = {key: self._take(value, str(key)) for key, value in state.items()}
            finally:
                copying.wait()
            self._second = self._copy(later=True) if later else None
        except BaseException:
            self._lease.release()  # the error's traceback holds what was staged
            raise
        self._lease.settle()
        num_bytes = sum(piece.num_bytes for piece in self._pieces) + sum(c.nbytes for c in self._clones.values())
        self.staged = StagedState(staged, lease=self._lease, outline=leaves.outline(), by=by, num_bytes=num_bytes)

    def finish(self) -> None:
        """Wait until everything is copied.

        Raises:
            CheckpointError: If a device fails.
        """
        if self._second is not None:
            self._second.wait()

    def _place(self, tensor: torch.Tensor, share: Share) -> _Place:
        """Give a tensor that fits into the slot as it is a place there, or those of its rows that are this rank's."""
        if not is_plain(tensor) or not tensor.numel() or not tensor.data_ptr():
            return None
        if share is None or (share and not tensor.is_contiguous()):
            return self._piece(tensor)
        return {(first, count): self._piece(tensor.detach().narrow(0, first, count)) for first, count in share}

    def _piece(self, tensor: torch.Tensor) -> _Piece:
        shape, strides = tensor.shape, tensor.stride()
        is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
        memory = (tensor.data_ptr(), tensor.get_device(), shape, strides, tensor.dtype, is_conj, is_neg)
        piece = self._by_memory.get(memory)
        if piece is None:
            num_bytes = tensor.nbytes
            align = _LEAST_ALIGN if num_bytes < _ALIGNED_BYTES else _PAGE_BYTES
            offset = -(-self._num_bytes // align) * align
            piece = self._by_memory[memory] = _Piece(tensor, num_bytes, offset)
            self._num_bytes = offset + num_bytes
            if is_reachable(tensor):
                piece.device = device_number(tensor)
                if not (is_conj or is_neg) and (tensor.is_contiguous() or is_dense(tuple(shape), strides)):
                    piece.strides = strides
                    piece.later = bool(self._later) and tensor.untyped_storage()._cdata in self._later
            self._pieces.append(piece)
        return piece

    def _copy(self, *, later: bool) -> _native.Copy:
        chosen = [piece for piece in self._pieces if piece.strides is not None and piece.later is later]
        for device in {piece.device for piece in chosen} - {HOST}:
            self._lease.lock_pages(device)
        start = self._lease.address
        return _native.start_copy(
            [(piece.device, piece.source.data_ptr(), piece.num_bytes, start + piece.offset) for piece in chosen],
            ([piece.source for piece in chosen], self._lease.keeper),
        )

    def _take(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if kind in MAPPINGS:
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self._take(item, f"{name}.{key}")
            return copied
        if kind in LISTS:
            return kind(self._take(item, f"{name}.{i}") for i, item in enumerate(value))
        try:
            return self._tensor(*next(self._found)) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        except Exception as error:
            raise CheckpointError(f"cannot copy {name!r} for an asynchronous save: {error}") from error

    def _tensor(self, tensor: torch.Tensor, local: torch.Tensor, place: _Place) -> torch.Tensor:
        if isinstance(place, dict):
            return rows_only({rows: self._staged(piece) for rows, piece in place.items()})
        staged = self._clone(local) if place is None else self._staged(place)
        return shard_like(staged, tensor) if isinstance(tensor, DTensor) else staged

    def _staged(self, piece: _Piece) -> torch.Tensor:
        if piece.staged is None:
            source = piece.source
            strides = contiguous_strides(tuple(source.shape)) if piece.strides is None else piece.strides
            piece.staged = self._lease.tensor(piece.offset, piece.num_bytes, source.dtype, source.shape, strides)
            if piece.strides is None:
                piece.staged.copy_(source)
            keep_attributes(source, piece.staged)
        return piece.staged

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of its own: of nothing, or of what keeps its elements in a way of its own."""
        clone = self._clones.get(id(tensor))
        if clone is None:
            source = settled(tensor)
            clone = self._clones[id(tensor)] = source.clone() if source.device.type == "cpu" else source.cpu()
            keep_attributes(tensor, clone)
        return clone
