"""What a URL leads to: one checkpoint, or the root of a run."""

from collections.abc import Sequence

from torch_strata._store import open_store
from torch_strata.checkpoint._generation import newest_generation
from torch_strata.checkpoint._opened import Opened, open_checkpoint
from torch_strata.checkpoint.run import ListedCheckpoint, listed_in, open_run
from torch_strata.cli._common import say
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError, StorageError, StoragePermissionError

__all__ = ["look"]


def look(url: str, rank: int | None, config: StorageConfig) -> Opened | Sequence[ListedCheckpoint]:
    """The checkpoint at a place, or the checkpoints below it: none if a run was begun there and has saved nothing yet.

    Where there are both, the run counts if a manager has begun it there, else the checkpoint; a note on stderr says so.

    Raises:
        CheckpointNotFoundError: If there is neither.
        CorruptionError: If a checkpoint's index is damaged.
        StorageError: If the place cannot be reached.
    """
    try:
        opened = open_checkpoint(open_store(url, config), url, rank=rank)
    except CheckpointNotFoundError as nothing:
        if rank is not None:
            raise
        return _run(url, config, nothing)
    return opened if rank is not None else _run_around(opened, url, config)


def _run(url: str, config: StorageConfig, nothing: CheckpointNotFoundError) -> Sequence[ListedCheckpoint]:
    try:
        listed = listed_in(open_run(url, config))
        if listed or newest_generation(open_store(url, config)):
            return listed
    except StoragePermissionError:
        raise
    except StorageError:
        if url.startswith(("http://", "https://")):  # a server that lists no folders
            raise nothing from None
        raise
    raise nothing


def _run_around(opened: Opened, url: str, config: StorageConfig) -> Opened | Sequence[ListedCheckpoint]:
    try:
        generation = newest_generation(open_store(url, config))
        listed = listed_in(open_run(url, config))
    except StorageError:  # what was asked for is open
        return opened
    if generation:
        say(f"note: {url} is the root of a run; a checkpoint that was saved to the root itself is passed over")
        return listed
    if any(one.metadata is not None for one in listed):
        say(f"note: {url} is a checkpoint itself, and the checkpoints in its folders are passed over")
    return opened
