"""Adapter for case scripts that try one kind of fault against any checkpoint library: names ours."""

import os
from typing import Any

import torch

from torch_strata import CheckpointManager, Shuffle, StrataReader, StrataShardPipe, StrataWriter


def writer(path: str | os.PathLike[str]) -> StrataWriter:
    """A StorageWriter to `path`."""
    return StrataWriter(path)


def reader(path: str | os.PathLike[str]) -> StrataReader:
    """A StorageReader of `path`."""
    return StrataReader(path)


def manager(root: str | os.PathLike[str], keep_last: int = 2) -> "_Manager":
    """The checkpoints of one run, saved by this process alone, of which the last ones are kept."""
    return _Manager(CheckpointManager(root, keep_count=keep_last, no_dist=True))


def pipe(
    paths: list[str],
    format: str | None = None,
    shuffle: bool = False,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    dtype: str | None = None,
    seq_len: int | None = None,
) -> StrataShardPipe:
    """Single samples of shards, as plain values."""
    return StrataShardPipe(
        paths,
        format=format,
        shuffle=Shuffle(seed=seed, block=4, buffer=64) if shuffle else None,
        rank=rank,
        world_size=world,
        dtype=dtype,
        window=seq_len,
        transform=_plain,
    )


def _plain(sample: dict[str, Any]) -> Any:
    if set(sample) == {"json"}:
        return sample["json"]
    if "tokens" in sample:
        return {"tokens": torch.as_tensor(sample["tokens"]).long()}
    return {name: bytes(value) if hasattr(value, "cut") else value for name, value in sample.items()}


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
