"""Adapter for case scripts that try one kind of fault against any checkpoint library: names ours."""

import os
from typing import Any

from torch_strata import CheckpointManager, StrataReader, StrataWriter


def writer(path: str | os.PathLike[str]) -> StrataWriter:
    """A StorageWriter to `path`."""
    return StrataWriter(path)


def reader(path: str | os.PathLike[str]) -> StrataReader:
    """A StorageReader of `path`."""
    return StrataReader(path)


def manager(root: str | os.PathLike[str], keep_last: int = 2) -> "_Manager":
    """The checkpoints of one run, saved by this process alone, of which the last ones are kept."""
    return _Manager(CheckpointManager(root, keep_count=keep_last, no_dist=True))


class _Manager:
    def __init__(self, held: CheckpointManager) -> None:
        self._held = held

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Returns when it is committed."""
        self._held.save(state, step=step).result()

    def latest(self) -> int | None:
        """The newest step."""
        found = self._held.latest()
        return None if found is None else found.step

    def load(self, state: dict[str, Any]) -> None:
        """The newest step, in place."""
        self._held.load("latest", state)

    def is_complete(self, step: int) -> bool:
        """Whether training can resume from that step."""
        return any(found.step == step and found.checkpoint_type.is_whole for found in self._held.all())
