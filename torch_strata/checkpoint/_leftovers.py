"""Removes what a failed save has written. Raises nothing: what stays is logged, and the next save there removes it."""

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.config import StorageConfig
from torch_strata.errors import ObjectNotFoundError, StorageError

__all__ = ["remove_objects", "remove_save"]

_logger = logging.getLogger(__name__)


def remove_save(place: str | os.PathLike[str], save_id: str, config: StorageConfig, *, within: timedelta) -> None:
    """Remove the objects of a save that some rank may still be writing, whatever has come of them.

    Args:
        place: Of the checkpoint.
        save_id: Of the save.
        config: Limits of the store.
        within: Time for it.
    """
    ends_at = time.monotonic() + within.total_seconds()
    store = open_store(place, replace(config, deadline=min(config.deadline, within)))
    try:
        names = [name for name, _ in store.list("") if f".{save_id}." in name]
    except ObjectNotFoundError:
        return  # nothing was ever written there
    except StorageError as error:
        _logger.warning("%s: cannot look for objects of a failed save: %s", os.fspath(place), error)
        return
    remove_objects(store, place, names, ends_at=ends_at)


def remove_objects(
    store: _native.Store, place: str | os.PathLike[str], names: Iterable[str], *, ends_at: float = math.inf
) -> None:
    """Remove objects of a save that cannot be committed, as many as there is time for.

    Args:
        store: Of the place.
        place: Of the checkpoint, for the log.
        names: Of the objects.
        ends_at: By the monotonic clock, in seconds.
    """
    for name in sorted(names):
        if time.monotonic() > ends_at:
            _logger.warning("%s: no time to remove %s of a failed save", os.fspath(place), name)
            continue
        try:
            store.delete(name)
        except StorageError as error:
            _logger.warning("%s: cannot remove %s of a failed save: %s", os.fspath(place), name, error)
