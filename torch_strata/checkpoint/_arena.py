"""Memory for staged states, kept from save to save: a fresh page costs thirty times what copying into a warm one does.

A slot is the memory of one staged state. It is lent again only when no tensor and no running write refers to it, which
torch's own count of its storage says. Never knows what a checkpoint is.
"""

import gc
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_strata import _native
from torch_strata.errors import CheckpointError

__all__ = ["Arena", "ArenaStats", "Lease", "arena", "forget_frames"]

_logger = logging.getLogger(__name__)

# Of the system's large pages; a slot is whole ones.
_GRAIN_BYTES = 2 << 20

# A state may grow a little from save to save: a slot is larger by this share. Pages that nobody touches cost nothing.
_SLACK = 64

# How long a slot may be free before a save that waits for it notices.
_LOOK_EVERY_SECONDS = 0.01

# Saves in flight at a time, unless a budget says otherwise: one that is being written and one that is being staged.
_SLOTS_WITHOUT_BUDGET = 2


@dataclass(frozen=True, kw_only=True)
class ArenaStats:
    """What this process keeps for staging.

    Attributes:
        slots: Pieces of memory, one for each save in flight at a time.
        busy_slots: Those that a save in flight, or whoever keeps its state, still refers to.
        slot_bytes: Memory of all slots, in bytes.
        waits: Saves that had to wait for memory so far.
    """

    slots: int
    busy_slots: int
    slot_bytes: int
    waits: int


class Arena:
    """The slots of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._waits = 0

    def take(self, needed_bytes: int, *, budget_bytes: int | None, deadline_seconds: float, user: str) -> "Lease":
        """Memory of at least `needed_bytes` that nobody else has; waits while saves in flight use up the budget.

        Args:
            needed_bytes: Of the state.
            budget_bytes: Of all slots together; None for two slots.
            deadline_seconds: Time to wait.
            user: Who takes it, in words for those who will wait for it.

        Raises:
            CheckpointError: If the budget is less than what is needed, the system has not that much memory, or no
                slot was free in time.
        """
        if budget_bytes is not None and needed_bytes > budget_bytes:
            raise CheckpointError(
                f"staging {user} needs {needed_bytes} bytes of memory, more than StorageConfig.max_staging_bytes="
                f"{budget_bytes}"
            )
        started = time.monotonic()
        waits = False
        while True:
            with self._lock:
                lease = self._take(needed_bytes, budget_bytes, user)
            if lease is not None:
                return lease
            if not waits:
                waits = True
                self._waits += 1
                _logger.warning("staging %s waits for memory that %s still use", user, self._users())
                # What holds a state may be garbage that refers to itself, as exceptions with their frames do.
                gc.collect()
            if time.monotonic() - started > deadline_seconds:
                raise CheckpointError(
                    f"staging {user} needs {needed_bytes} bytes of memory; waited {deadline_seconds:g} s for what "
                    f"{self._users()} still use; StorageConfig.max_staging_bytes={budget_bytes} sets how much there is"
                )
            time.sleep(_LOOK_EVERY_SECONDS)

    def release(self, addresses: Iterable[int]) -> None:
        """Take back what was staged for one save and has one of `addresses`: it is written, whoever still holds it."""
        wanted = list(addresses)
        with self._lock:
            slots = list(self._slots)
        for slot in slots:
            lease = slot.lease
            if lease is not None and lease.is_for_one_save and any(slot.holds(address) for address in wanted):
                lease.release()

    def trim(self) -> None:
        """Give memory that no save uses back to the system."""
        with self._lock:
            self._drop_free()

    def stats(self) -> ArenaStats:
        """What is kept now."""
        with self._lock:
            _native.release_ended()
            return ArenaStats(
                slots=len(self._slots),
                busy_slots=sum(not slot.is_free() for slot in self._slots),
                slot_bytes=sum(slot.num_bytes for slot in self._slots),
                waits=self._waits,
            )

    def _take(self, needed_bytes: int, budget_bytes: int | None, user: str) -> "Lease | None":
        _native.release_ended()
        fitting = [slot for slot in self._slots if slot.num_bytes >= needed_bytes and slot.is_free()]
        if fitting:
            return min(fitting, key=lambda slot: slot.num_bytes).lend(user)
        # Before memory for a larger one is taken: with both the peak would be twice the state.
        self._drop_free()
        size = _slot_bytes(needed_bytes)
        if budget_bytes is None:
            if len(self._slots) >= _SLOTS_WITHOUT_BUDGET:
                return None
        else:
            left = budget_bytes - sum(slot.num_bytes for slot in self._slots)
            if needed_bytes > left:
                return None
            size = min(size, left)
        slot = _Slot(size)
        self._slots.append(slot)
        return slot.lend(user)

    def _drop_free(self) -> None:
        _native.release_ended()
        free = [slot for slot in self._slots if slot.is_free()]
        self._slots = [slot for slot in self._slots if slot not in free]
        for slot in free:
            slot.close()

    def _users(self) -> str:
        return ", ".join(sorted({slot.user for slot in list(self._slots) if slot.lease is not None}))


def forget_frames(error: BaseException) -> None:
    """Let go of the variables of calls that have ended with `error`: whoever keeps it would keep a staged state."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


_arenas: dict[int, Arena] = {}


def arena() -> Arena:
    """This process's arena. A forked child begins with an empty one: its parent goes on using the memory they share."""
    pid = os.getpid()
    if pid not in _arenas:
        _arenas.clear()
        _arenas.setdefault(pid, Arena())
    return _arenas[pid]


class Lease:
    """A slot while a state is staged in it."""

    def __init__(self, slot: "_Slot") -> None:
        self._slot = slot
        # A storage of its own, which counts as a user of the slot until the last piece of it is gone.
        self._whole: torch.UntypedStorage | None = slot.storage[0 : slot.num_bytes]
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._thread: threading.Thread | None = None
        # Whether its tensors were emptied.
        self.is_released = False
        # Whether the state serves one save, so that the memory is free once that has written it.
        self.is_for_one_save = False

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._slot.address

    @property
    def storage(self) -> torch.UntypedStorage:
        """All of the slot's memory, as one storage that other processes can map."""
        return self._slot.storage

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor begins in the slot; None if it lies elsewhere."""
        address = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.layout is torch.strided else 0
        return address - self.address if self._slot.holds(address) else None

    @property
    def keeper(self) -> torch.UntypedStorage:
        """What keeps the slot from being lent again; only until `settle`."""
        assert self._whole is not None
        return self._whole

    def tensor(
        self, offset: int, num_bytes: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor in the slot, with a storage that ends where it ends: who pickles it gets no more than that."""
        piece = self.keeper[offset : offset + num_bytes]
        tensor = torch.empty(0, dtype=dtype).set_(piece, 0, shape, strides)
        self._tensors.append(weakref.ref(tensor))
        return tensor

    def also_in(self, tensor: torch.Tensor) -> None:
        """A view of one of the tensors, such as a DTensor has of its local one, is another holder of its memory."""
        self._tensors.append(weakref.ref(tensor))

    def lock_pages(self, device: int) -> None:
        """Let a GPU copy into the slot at full speed, where the system allows."""
        self._slot.lock_pages(device)

    def settle(self) -> None:
        """All tensors are made: from now on the slot is lent for as long as one of them lives."""
        self._whole = None

    def runs_in(self, thread: threading.Thread) -> None:
        """The save runs in `thread`: when that has ended, nobody needs the state any more."""
        self._thread = thread

    @property
    def thread(self) -> threading.Thread | None:
        """In which the save runs, as far as is known."""
        return self._thread

    @property
    def is_held(self) -> bool:
        """Whether the memory is still lent."""
        return self._slot.lease is self and not self._slot.is_free()

    @property
    def is_over(self) -> bool:
        """Whether the save's thread has ended, though somebody, such as an exception's traceback, holds the state."""
        return self._thread is not None and not self._thread.is_alive()

    def release(self) -> None:
        """Take the memory from the tensors that are still held; they are empty afterwards."""
        self._whole = None
        self.is_released = True
        tensors, self._tensors = self._tensors, []
        with torch.no_grad():
            for reference in tensors:
                tensor = reference()
                if tensor is not None:
                    tensor.set_()  # type: ignore[call-overload]


class _Slot:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.storage = _new_storage(num_bytes)
        self.address = self.storage.data_ptr()
        _native.populate(self.address, num_bytes, self.storage)
        self.user = ""
        self.lease: Lease | None = None
        self._lock: _native.PageLock | None = None

    def lend(self, user: str) -> Lease:
        self.user = user
        self.lease = Lease(self)
        return self.lease

    def is_free(self) -> bool:
        if self.lease is not None and self.lease.is_over:
            self.lease.release()
        # 1: this object alone.
        if torch._C._storage_Use_Count(self.storage._cdata) > 1:
            return False
        self.lease = None
        return True

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.num_bytes

    def lock_pages(self, device: int) -> None:
        # Tried once: what the system refuses it will refuse again.
        if self._lock is None:
            self._lock = _native.PageLock(device, self.address, self.num_bytes, self.storage)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _new_storage(num_bytes: int) -> torch.UntypedStorage:
    try:
        file = _native.memory_file(num_bytes)
    except OSError as error:
        raise CheckpointError(f"no memory for staging: {num_bytes} bytes: {error}") from error
    if file is None:
        return torch.UntypedStorage(num_bytes)
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(file, num_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(file)  # the storage has a descriptor of its own
    return storage


def _slot_bytes(needed_bytes: int) -> int:
    with_slack = needed_bytes + needed_bytes // _SLACK
    return max(-(-with_slack // _GRAIN_BYTES), 1) * _GRAIN_BYTES
