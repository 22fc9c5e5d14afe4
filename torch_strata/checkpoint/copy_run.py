"""Copies the checkpoints of a run to another root, references kept. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch_strata import _native
from torch_strata._store import open_store, place_below, resolve_configs
from torch_strata.checkpoint._content import Content, Progress, content_of
from torch_strata.checkpoint._generation import newest_generation
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint._run_root import holds_checkpoint
from torch_strata.checkpoint.compare import compare_contents
from torch_strata.checkpoint.copying import CopyReport, Destination, write_content
from torch_strata.checkpoint.run import CheckpointType, ListedCheckpoint, listed_in, open_run
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointExistsError, CheckpointNotFoundError

__all__ = ["CopiedRun", "copy_run"]


@dataclass(frozen=True, kw_only=True)
class CopiedRun:
    """What became of the folders of a run.

    Attributes:
        copied: Folders that were written.
        found: Folders that were at the destination already, with the same content.
        passed_over: Folders that were not copied, each with a sentence.
        payload_bytes: What the copied ones hold, in bytes.
        referred_bytes: How much of it stands in an earlier copy and was not written again.
    """

    copied: tuple[str, ...]
    found: tuple[str, ...]
    passed_over: Mapping[str, str]
    payload_bytes: int
    referred_bytes: int


def copy_run(
    source: str,
    destination: str,
    *,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> CopiedRun:
    """Copy every committed checkpoint below a root, ascending by step; can be called again after a failure.

    A checkpoint that is at the destination with the same content is not written again. What an incremental one refers
    to in an earlier copy is referred to there too. Those that were found damaged or abandoned are passed over. No
    generation is claimed: a run that claims the destination meanwhile ends the copy.

    Args:
        source: URL or local path of the run's root.
        destination: URL or local path of the new root.
        config: Limits of both stores.
        storage_options: The source's own settings; win over those of `config`.
        to_options: The destination's own settings; those of the source if not given. Local stores have none.
        progress: Told of bytes that are written.

    Raises:
        CheckpointNotFoundError: If no checkpoint is below the root.
        CheckpointExistsError: If another checkpoint is in a folder of the destination, or at the destination itself.
        CorruptionError: If what is read is damaged; what was committed before stays.
        StaleGenerationError: If a run claims the destination meanwhile.
        StorageError: If a store fails.
    """
    config, to_config = resolve_configs(source, destination, config, storage_options, to_options)
    listed = listed_in(open_run(source, config))
    passed_over = {one.folder: why for one in listed if (why := _passed_over(one)) is not None}
    wanted = [one for one in listed if one.folder not in passed_over]
    if not wanted:
        raise CheckpointNotFoundError(f"no committed checkpoint below {source}")
    root = open_store(destination, to_config)
    generation = newest_generation(root)
    if not generation and holds_checkpoint(root):
        raise CheckpointExistsError(f"a checkpoint is at {destination} itself, which would hide a run there")
    reports: dict[str, CopyReport] = {}
    found = []
    whole: str | None = None
    for one in wanted:
        content = _open(place_below(source, one.folder), config)
        target = place_below(destination, one.folder)
        kind = None if one.metadata is None else one.metadata.checkpoint_type
        if _is_there(target, to_config, content):
            found.append(one.folder)
        else:
            refers_to = whole if kind is CheckpointType.INCREMENTAL else None
            to = Destination(
                place=target,
                config=to_config,
                run_info=content.native.run,
                run_root=root,
                generation=generation,
                parent=None if refers_to is None else _open_parent(destination, refers_to, to_config),
                as_safetensors=content.native.has_safetensors,
            )
            reports[one.folder] = write_content(content, to, progress)
        if kind is not None and kind.is_whole:
            whole = one.folder
    return CopiedRun(
        copied=tuple(reports),
        found=tuple(found),
        passed_over=passed_over,
        payload_bytes=sum(report.payload_bytes for report in reports.values()),
        referred_bytes=sum(report.referred_bytes for report in reports.values()),
    )


def _open(place: str, config: StorageConfig) -> Content:
    return content_of(open_checkpoint(open_store(place, config), place, rank=None))


def _open_parent(root: str, folder: str, config: StorageConfig) -> _native.Parent:
    return _native.Parent.open(open_store(place_below(root, folder), config), folder)


def _passed_over(one: ListedCheckpoint) -> str | None:
    if one.state in ("uncommitted", "kept"):
        return "nothing is committed in it"
    if one.state == "unreadable":
        return one.detail
    if one.is_quarantined:
        return "it was found damaged"
    return "the run was taken back behind it" if one.is_abandoned else None


def _is_there(target: str, config: StorageConfig, content: Content) -> bool:
    try:
        there = _open(target, config)
    except CheckpointNotFoundError:
        return False
    if compare_contents(content, there).is_equal:
        return True
    raise CheckpointExistsError(f"another checkpoint already exists at {target}")
