"""Reads everything a checkpoint holds and compares it with its digests. Imports no torch."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch_strata import _native
from torch_strata._store import open_store, resolve_config
from torch_strata.checkpoint._opened import Opened, open_checkpoint
from torch_strata.checkpoint._safetensors import unread_files
from torch_strata.checkpoint._stock_index import IndexFindings, check_safetensors_index, check_stock_index
from torch_strata.checkpoint._watching import watching
from torch_strata.config import StorageConfig
from torch_strata.errors import CorruptionError, ObjectNotFoundError

__all__ = ["VerifyReport", "verify"]

_TELL_EVERY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was found.

    Attributes:
        save_id: Identity of the save that was read; empty where stock left none.
        objects: Objects that the checkpoint lists.
        blocks: Blocks whose digest was compared.
        read_bytes: Bytes that were read.
        unverified_bytes: Bytes without a digest to compare: parts of stock checkpoints.
        problems: One sentence for each damage; none if the checkpoint is sound.
        unchecked: One sentence for each object that could not be looked at, whole or in part, such as one that may not
            be read: nothing is known of it.
        warnings: What is no damage but should be known, such as that stock readers see an older state, or that a
            safetensors file is not in the index.
    """

    save_id: str
    objects: int
    blocks: int
    read_bytes: int
    unverified_bytes: int
    problems: tuple[str, ...]
    unchecked: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything was looked at and nothing is damaged."""
        return not self.problems and not self.unchecked


def verify(
    path: str | os.PathLike[str],
    *,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    rank: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> VerifyReport:
    """Read and check a whole checkpoint, ours or stock's, within 128 MiB of memory. Blocks.

    Of ours also the `.metadata`, by which stock readers find the same, or the index of safetensors: it must say what
    the manifest says. One that is missing, or of the save before, as a save leaves that ended before its last step, is
    a warning. A stock checkpoint whose data files are ours has lost its manifest and its digests: a problem.

    Args:
        path: Local path or URL.
        config: Limits of the store.
        storage_options: The store's own settings.
        rank: To check what that rank saved on its own.
        progress: Told of bytes that were read, from another thread.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
        CorruptionError: If the index itself is damaged; damaged data is in the report instead.
        StorageError: If the place cannot be reached.
    """
    store = open_store(path, resolve_config(config, storage_options))
    opened = open_checkpoint(store, path, rank=rank)
    with _told(opened, progress):
        report = _report(store, opened, rank)
    if report.is_sound:
        return report
    # What a save removes or replaces while it is looked at is not damaged.
    newer = open_checkpoint(store, path, rank=rank)
    return report if newer.same_as(opened) else _report(store, newer, rank)


@contextmanager
def _told(opened: Opened, progress: Callable[[int], object] | None) -> Iterator[None]:
    """Tell of what is read meanwhile."""
    if progress is None:
        yield
        return
    told = 0

    def tell() -> None:
        nonlocal told
        moved, _ = opened.native.progress
        if moved > told:
            progress(moved - told)
            told = moved

    try:
        with watching(tell, every_seconds=_TELL_EVERY_SECONDS):
            yield
    finally:
        tell()


def _report(store: _native.Store, opened: Opened, rank: int | None) -> VerifyReport:
    try:
        stats, problems, unchecked = opened.native.verify()
    except (CorruptionError, ObjectNotFoundError) as error:
        # Of a stock checkpoint, whose items can only be found by reading them.
        stats, problems, unchecked = None, [str(error)], []
    index = IndexFindings()
    if opened.written_by == "torch_strata":
        index = check_safetensors_index(store, opened) or check_stock_index(store, opened, rank=rank)
    problems += index.problems
    objects = [name for name, _ in opened.native.objects()]
    unread = unread_files(store, objects) if opened.written_by == "safetensors" else []
    return VerifyReport(
        save_id=opened.save_id,
        objects=len(objects),
        blocks=stats.blocks_verified if stats else 0,
        read_bytes=stats.bytes_read if stats else 0,
        unverified_bytes=stats.unverified_bytes if stats else 0,
        problems=tuple(problems),
        unchecked=(*unchecked, *index.unchecked),
        warnings=(*(warning for warning in opened.native.warnings if warning not in problems), *index.notes, *unread),
    )
