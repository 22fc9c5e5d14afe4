"""A copy of a state on the host, taken before an asynchronous save returns to training.

The copy lies in memory that is kept from save to save (`_arena.py`). Never copies a storage behind a view, and never
re-uses memory that a save in flight, or whoever keeps its state, still refers to.
"""

import copy
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_strata import _native
from torch_strata.checkpoint._arena import ArenaStats, arena
from torch_strata.checkpoint._assignment import Assignment, Rows, Share, rows_only
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._leaves import LISTS, MAPPINGS, Leaves
from torch_strata.checkpoint._optimizers import hold_steps, storages_of
from torch_strata.checkpoint._paths import nested_too_deep
from torch_strata.checkpoint._process import forget_process
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
    why_no_memory,
)
from torch_strata.checkpoint.alarms import TensorWatch, changed_values, in_words
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError

__all__ = [
    "ArenaStats",
    "StagedFuture",
    "StagedState",
    "arena_stats",
    "forget_process",
    "snapshot",
    "snapshot_behind_training",
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
    placements. The memory is lent again when nothing refers to the copy's tensors any more. What another thread changes
    meanwhile is logged as torn, as far as `TensorWatch` and `changed_values` see it.

    Args:
        state: What `dcp.save` takes.
        config: Its `max_staging_bytes` limits the memory of all staged states together, its `deadline` the wait for it.
        user: Who needs the copy, in words for those who wait for its memory.
        last: What this rank wrote of a state last time. If `state` has the same structure, only that is copied, and
            `StagedState.assignment` says so.

    Raises:
        CheckpointError: If a value cannot be copied, naming it; if the memory is not to be had; if another thread adds
            or removes tensors meanwhile.
        ConfigError: If the state is nested too deeply, or contains itself.
    """
    staging = _begun(state, frozenset(), config, user, last)
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
    staging = _begun(state, storages_of(optimizers), config, user, last)
    future = StagedFuture()
    future.lease = staging.staged.lease
    future.set_running_or_notify_cancel()
    ended = threading.Event()
    hold_steps(optimizers, ended)

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


def arena_stats() -> ArenaStats:
    """What this process keeps for staging now."""
    return arena().stats()


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


def _begun(state: dict[str, Any], *how: Any) -> "_Staging":
    try:
        return _Staging(state, *how)
    except RecursionError:
        raise nested_too_deep(state) from None


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
            assignment = last if last is not None and last.is_of(leaves.structure) else None
            shares: Sequence[Share] = [None] * len(leaves.tensors) if assignment is None else assignment.shares
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
        watch = TensorWatch(leaves, passed_over=later)
        try:
            copying = self._copy(later=False)
            try:
                with gc_paused(), torch.no_grad():
                    staged = {key: self._take(value, str(key)) for key, value in state.items()}
                    if next(self._found, None) is not None:
                        raise CheckpointError(f"{user}: tensors were removed from the state while it was copied")
            finally:
                copying.wait()
            torn = (*watch.changed(), *changed_values(state, staged))
            self._second = self._copy(later=True) if later else None
        except BaseException:
            self._lease.release()  # the error's traceback holds what was staged
            raise
        self._lease.settle()
        self.staged = StagedState(
            staged,
            lease=self._lease,
            outline=leaves.outline(),
            assignment=assignment,
            num_bytes=sum(piece.num_bytes for piece in self._pieces) + sum(c.nbytes for c in self._clones.values()),
            torn=torn,
        )
        if torn:
            _logger.warning(
                "%s: torn, maybe a mix of two states: these changed while they were copied: %s; save between steps",
                *(user, in_words(torn)),
            )

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
            return self._tensor(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        except Exception as error:
            raise CheckpointError(f"cannot copy {name!r} for an asynchronous save: {error}") from error

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        found, local, place = next(self._found, (None, tensor, None))
        if found is not tensor:  # or one would be saved under the name of another
            raise CheckpointError("tensors were added or replaced while the state was copied")
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
            if (why := why_no_memory(source)) is not None:
                raise CheckpointError(why)
            clone = self._clones[id(tensor)] = source.clone() if source.device.type == "cpu" else source.cpu()
            keep_attributes(tensor, clone)
        return clone
