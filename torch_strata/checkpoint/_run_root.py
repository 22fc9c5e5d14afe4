"""Keeps checkpoints out of the roots of runs, where one would hide the run from whoever opens the place.

Imports no torch.
"""

import os

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.checkpoint._generation import newest_generation
from torch_strata.checkpoint._safetensors import holds_safetensors
from torch_strata.checkpoint.run import listed_in, open_run
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointExistsError

__all__ = ["check_no_run", "holds_checkpoint", "run_below"]


def run_below(place: str | os.PathLike[str], config: StorageConfig) -> bool:
    """Whether a place is the root of a run: one was begun there, or checkpoints of ours are in its folders.

    Raises:
        StorageError: If it cannot be listed.
    """
    if newest_generation(open_store(place, config)):
        return True
    # A run that was copied has no generation.
    return any(one.metadata is not None for one in listed_in(open_run(os.fspath(place), config)))


def check_no_run(place: str | os.PathLike[str], config: StorageConfig) -> None:
    """Whether a checkpoint may be written to a place.

    Raises:
        CheckpointExistsError: If it is the root of a run.
        StorageError: If it cannot be listed.
    """
    if run_below(place, config):
        raise CheckpointExistsError(
            f"{os.fspath(place)} is the root of a run, which a checkpoint there would hide: name a folder of its own"
        )


def holds_checkpoint(store: _native.Store) -> bool:
    """Whether a checkpoint is at a place, or what is left of one.

    Raises:
        StorageError: If it cannot be listed.
    """
    return _native.open_base(store, rank=None).exists or holds_safetensors(store)
