"""Generations of a run root: which this process holds, its right to commit there, and which is the newest.

Imports no torch.
"""

import os
import threading
import uuid

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.config import StorageConfig
from torch_strata.errors import ForkedProcessError, ObjectNotFoundError

__all__ = ["Claim", "claimed", "generation_of", "newest_generation", "take_over"]

# Create-only records whose names are numbers, see native/strata-checkpoint/src/base.rs.
_FOLDER = ".strata/generations/"

# One claim a process and run root: a second one would fence off our own writers that are still saving.
_claimed: dict[tuple[int, str], int] = {}

# Of each process, for its threads: a manager's caller and the thread that saves may ask for the first time at once.
_locks: dict[int, threading.Lock] = {}


def generation_of(run_root: str | os.PathLike[str], config: StorageConfig, *, may_be_void: bool = False) -> int:
    """This process's generation, claimed when it is first asked for.

    Args:
        run_root: Place of the run.
        config: Limits of the store.
        may_be_void: Whether to look if the store still knows of any claim, and to claim anew if not.

    Raises:
        StorageError: If the run root cannot be reached.
    """
    key = _key(run_root)
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if may_be_void and key in _claimed and newest_generation(open_store(run_root, config)) == 0:
            del _claimed[key]
        if key not in _claimed:
            _claimed[key] = _native.claim_generation(open_store(run_root, config), owner=uuid.uuid4().hex)
        return _claimed[key]


class Claim:
    """A manager's right to commit: its process's, taken when it is first needed."""

    def __init__(self, run_root: str, config: StorageConfig) -> None:
        self._root, self._config = run_root, config
        self._pid = os.getpid()
        self._has_looked = False

    def check_process(self) -> None:
        """Whether the process that made this is still the one that asks, or has not saved.

        Raises:
            ForkedProcessError: If a child would fence off the process that it was forked from.
        """
        if self._pid != os.getpid() and (self._pid, self._root) in _claimed:
            raise ForkedProcessError(
                f"{self._root}: the process that this one was forked from saves to this run; to take it over, make a "
                "CheckpointManager here"
            )

    def generation(self) -> int:
        """The generation that this process holds.

        Raises:
            ForkedProcessError: As `check_process`.
            StorageError: If the run root cannot be reached.
        """
        self.check_process()
        # Somebody may have removed the whole run before this manager came: what was claimed there is void.
        generation = generation_of(self._root, self._config, may_be_void=not self._has_looked)
        self._has_looked = True
        return generation


def newest_generation(root: _native.Store) -> int:
    """The highest generation that was claimed below `root`, by whomever; 0 if none was.

    Raises:
        StorageError: If the root cannot be listed.
    """
    try:
        names = [name.removeprefix(_FOLDER) for name, _ in root.list(_FOLDER)]
    except ObjectNotFoundError:
        return 0
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)


def claimed(run_root: str | os.PathLike[str] | None) -> int | None:
    """What this process has claimed, if it has."""
    return None if run_root is None else _claimed.get(_key(run_root))


def take_over(run_root: str | os.PathLike[str] | None, generation: int | None) -> None:
    """Be of the run that another process has claimed: one that this process saves for."""
    if run_root is not None and generation is not None:
        _claimed.setdefault(_key(run_root), generation)


def _key(run_root: str | os.PathLike[str]) -> tuple[int, str]:
    return os.getpid(), os.fspath(run_root)
