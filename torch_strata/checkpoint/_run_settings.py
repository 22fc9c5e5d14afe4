"""The arguments of a manager, checked. Imports no torch."""

import os
from datetime import timedelta

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.checkpoint.retention import KeepAll, KeepLast, Retention
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError

__all__ = ["check_choice", "check_span", "check_store", "policy_of", "root_of"]


def root_of(path: str | os.PathLike[str] | None, bucket: str | None, storage_type: str | None) -> str:
    """Root of the run. Of a local one the absolute path, so that it stays the same wherever the process goes.

    Raises:
        ConfigError: If that is not said, or twice.
    """
    if (path is None) == (bucket is None):
        raise ConfigError("CheckpointManager: expected one of storage_path and bucket")
    named = bucket if path is None else os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(named, str) or not named:
        which = "bucket" if path is None else "storage_path"
        raise ConfigError(f"{which}: expected a path or URL as text, found {named!r}")
    if path is not None and storage_type is not None:
        raise ConfigError("storage_type: goes with bucket; storage_path says by its scheme where it is")
    if storage_type not in (None, "local", "file", *_native.SCHEMES):
        raise ConfigError(f"storage_type: expected local, {', '.join(_native.SCHEMES)}, found {storage_type!r}")
    root = named if storage_type in (None, "local", "file") else f"{storage_type}://{named}"
    # What looks like a URL is for the store to understand or to refuse: pathlib makes "s3:/bucket" of one.
    if root.partition(":")[0] in _native.SCHEMES or "://" in root:
        return root.rstrip("/") or root
    return os.path.abspath(os.path.expanduser(root))


def check_store(root: str, config: StorageConfig) -> None:
    """Open the store of `root`, without asking it anything.

    Raises:
        ConfigError: If its scheme or an option is unknown, or one cannot be used.
    """
    open_store(root, config).counters()


def policy_of(keep_count: int | None, retention: Retention | None) -> Retention:
    """What is kept.

    Raises:
        ConfigError: If it is said twice, or is no policy.
    """
    if keep_count is None:
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError(f"retention: expected a policy such as KeepLast(3), found {retention!r}")
        return KeepAll() if retention is None else retention
    if retention is not None:
        raise ConfigError("keep_count: is KeepLast(keep_count); give either it or retention")
    if type(keep_count) is not int or keep_count < 1:
        raise ConfigError(f"keep_count: expected an int of at least 1, found {keep_count!r}")
    return KeepLast(keep_count)


def check_span(name: str, value: object) -> None:
    """Refuse what is no time.

    Raises:
        ConfigError: If it is no timedelta above 0.
    """
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{name}: expected a timedelta above 0, found {value!r}")


def check_choice(name: str, value: object, first: str, second: str) -> None:
    """Refuse what is neither of two words.

    Raises:
        ConfigError: If it is neither.
    """
    if value not in (first, second):
        raise ConfigError(f"{name}: expected {first!r} or {second!r}, found {value!r}")
