"""What a URL leads to: one checkpoint, or the root of a run."""

from collections.abc import Sequence

from torch_strata._store import open_store
from torch_strata.checkpoint._opened import Opened, open_checkpoint
from torch_strata.checkpoint.run import ListedCheckpoint, listed_in, open_run
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError, StorageError

__all__ = ["look"]


def look(url: str, rank: int | None, config: StorageConfig) -> Opened | Sequence[ListedCheckpoint]:
    """The checkpoint at a place, or the checkpoints below it.

    Raises:
        CheckpointNotFoundError: If there is neither.
        CorruptionError: If a checkpoint's index is damaged.
        StorageError: If the place cannot be reached.
    """
    try:
        return open_checkpoint(open_store(url, config), url, rank=rank)
    except CheckpointNotFoundError as nothing:
        if rank is not None:
            raise
        try:
            listed = listed_in(open_run(url, config))
        except StorageError:
            raise nothing from None  # a store without folders, such as http
        if not listed:
            raise
        return listed
