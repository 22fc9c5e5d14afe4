"""What is known of the checkpoints of a run. Imports no torch."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.checkpoint.retention import KeepAll, Retention
from torch_strata.config import StorageConfig

__all__ = ["CheckpointMetadata", "CheckpointType", "ListedCheckpoint", "listed_in", "open_run", "what_else_there_is"]

# Longer than any save takes: what is older and named by no manifest is of a save that has died.
ORPHAN_AGE = timedelta(days=1)


class CheckpointType(StrEnum):
    """What a checkpoint holds.

    ``FULL``: all of the state. ``INCREMENTAL``: all of it, where tensors that are as in an earlier checkpoint are
    referred to. ``OPTIMIZER_ONLY``: the key ``optimizer``. ``MODEL_ONLY``: the key ``model``.
    """

    FULL = "full"
    INCREMENTAL = "incremental"
    OPTIMIZER_ONLY = "optimizer_only"
    MODEL_ONLY = "model_only"

    @property
    def is_whole(self) -> bool:
        """Whether training can resume from it."""
        return self in (CheckpointType.FULL, CheckpointType.INCREMENTAL)

    @property
    def key(self) -> str | None:
        """The one key of a state that it holds; None if it is whole."""
        return {CheckpointType.MODEL_ONLY: "model", CheckpointType.OPTIMIZER_ONLY: "optimizer"}.get(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """A committed checkpoint of a run.

    Attributes:
        id: Identity of the save.
        step: Optimizer steps done.
        epoch: Passes over the data done.
        path: URL or local path; for ``StrataReader`` and ``strata verify``.
        size_bytes: What its own objects take; what it refers to in other checkpoints is not counted.
        checkpoint_type: What it holds.
        model_hash: XXH3-128 over names, types, shapes and content of the items below the key ``model``, 32 hex digits;
            equal for equal weights saved by as many ranks. None if there is no such key.
        metadata: What was given to ``save``.
        metrics: What was given to ``save``, by which checkpoints are compared.
        created_at: When it was committed, by the clock of the planning rank.
    """

    id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    checkpoint_type: CheckpointType
    model_hash: str | None
    metadata: Mapping[str, str] = field(hash=False)
    metrics: Mapping[str, float] = field(hash=False)
    created_at: datetime

    @classmethod
    def of_native(cls, raw: tuple[Any, ...]) -> "CheckpointMetadata":
        """From what `_native.Run` tells."""
        *head, kind, model_hash, metadata, metrics, created_at = raw
        identity, step, epoch, path, size_bytes = head
        return cls(
            id=identity,
            step=step,
            epoch=epoch,
            path=path,
            size_bytes=size_bytes,
            checkpoint_type=CheckpointType(kind),
            model_hash=model_hash,
            metadata=metadata,
            metrics=metrics,
            created_at=datetime.fromtimestamp(created_at, UTC),
        )


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A folder below a run's root.

    Attributes:
        folder: Its name.
        state: ``committed``; ``foreign``: somebody else's checkpoint; ``uncommitted``: a save that has not ended, or
            what is left of one; ``kept``: a policy took it, and others need its data; ``unreadable``: it is damaged,
            for no manifest in it can be read, or the manifest is lost.
        detail: Why it is unreadable; what it is kept for.
        metadata: What is committed.
        is_quarantined: Whether it was found damaged; it is passed over.
        is_abandoned: Whether the run was taken back behind it.
        is_verified: Whether it was read and found sound.
        pins: Who holds it.
        refers_to: Folders of checkpoints that hold parts of it.
    """

    folder: str
    state: str
    detail: str
    metadata: CheckpointMetadata | None
    is_quarantined: bool
    is_abandoned: bool
    is_verified: bool
    pins: tuple[str, ...]
    refers_to: tuple[str, ...]

    @classmethod
    def of_native(cls, raw: tuple[Any, ...]) -> "ListedCheckpoint":
        """From what `_native.Run` tells."""
        folder, state, detail, metadata, is_quarantined, is_abandoned, is_verified, pins, refers_to = raw
        return cls(
            folder=folder,
            state=state,
            detail=detail,
            metadata=None if metadata is None else CheckpointMetadata.of_native(metadata),
            is_quarantined=is_quarantined,
            is_abandoned=is_abandoned,
            is_verified=is_verified,
            pins=tuple(pins),
            refers_to=tuple(refers_to),
        )


def listed_in(run: _native.Run) -> list[ListedCheckpoint]:
    """Every folder of a run, ascending by step; those of no known step last.

    Raises:
        StorageError: If it cannot be listed.
    """
    listed = [ListedCheckpoint.of_native(raw) for raw in run.catalog()]
    return sorted(listed, key=lambda one: (one.metadata is None, one.metadata.step if one.metadata else 0, one.folder))


# Folders that a message names.
_NAMED = 4


def what_else_there_is(listed: Sequence[ListedCheckpoint]) -> list[str]:
    """In words: what is in a run besides checkpoints to resume from."""
    usable = [one for one in listed if not one.is_quarantined and not one.is_abandoned]
    parts = [one for one in usable if one.metadata is not None and not one.metadata.checkpoint_type.is_whole]
    foreign = [one for one in listed if one.state == "foreign"]
    kinds = (
        ("of parts, which load by their step", parts),
        ("of somebody else, which StrataReader or torch's own reader loads", foreign),
        ("found damaged", [one for one in listed if one.is_quarantined]),
        ("left behind by rollback", [one for one in listed if one.is_abandoned and not one.is_quarantined]),
        ("unreadable", [one for one in listed if one.state == "unreadable"]),
        ("kept only for their data, which others need", [one for one in listed if one.state == "kept"]),
        ("not committed", [one for one in listed if one.state == "uncommitted"]),
    )
    return [f"{_names(found)}: {what}" for what, found in kinds if found]


def _names(found: Sequence[ListedCheckpoint]) -> str:
    more = len(found) - _NAMED
    return ", ".join(one.folder for one in found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def open_run(
    root: str, config: StorageConfig, *, policy: Retention | None = None, orphan_age: timedelta = ORPHAN_AGE
) -> _native.Run:
    """The run below `root`. Opens nothing yet.

    Raises:
        ConfigError: If the URL's scheme or an option is unknown.
    """
    native = (policy or KeepAll()).as_native()
    store = open_store(root, config)
    return _native.Run(store, owner=uuid.uuid4().hex, policy=native, orphan_age_s=orphan_age.total_seconds())
