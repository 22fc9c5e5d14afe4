"""Loading one checkpoint of a run: its bytes, a state into place, or all of a state anew."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from torch_strata import _native
from torch_strata.checkpoint._grown import nested, number_params, slot_for
from torch_strata.checkpoint._payload import Trusted
from torch_strata.checkpoint._rng import RNG_KEY, restore_rng
from torch_strata.checkpoint._stored_lists import entry_paths
from torch_strata.checkpoint.planner import StrataLoadPlanner
from torch_strata.checkpoint.reader import StrataReader
from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType
from torch_strata.config import StorageConfig
from torch_strata.errors import LayoutMismatchError

__all__ = ["restore"]

_logger = logging.getLogger(__name__)

# As strata-checkpoint's BYTES_KEY, the one key of a checkpoint of bytes.
_BYTES = "bytes"


def restore(
    found: Sequence[CheckpointMetadata], run: _native.Run, state: dict[str, Any] | None, **settings: Any
) -> Any:
    """Load a whole checkpoint, or all parts that there are of a step, as `_restore_one` does.

    Args:
        found: The one, or the parts.
        run: The run that they are of.
        state: As `_restore_one`.
        settings: As `_restore_one`.

    Raises:
        LayoutMismatchError: If `state` has keys that no part was saved with; nothing has been changed then.
    """
    parts = {kind.key: part for part in found if (kind := part.checkpoint_type).key is not None}
    if len(parts) < len(found):
        return _restore_one(found[0], run, state, **settings)
    if state is None:
        return {key: part for one in found for key, part in _restore_one(one, run, None, **settings).items()}
    if not parts.keys() >= state.keys():
        raise LayoutMismatchError(_words(found, [key for key in state if key not in parts]))
    loaded = {key: {key: state[key]} for key in parts if key in state}
    for key, part in loaded.items():
        _restore_one(parts[key], run, part, **settings)
    for part in loaded.values():
        state.update(part)
    return state


def _words(found: Sequence[CheckpointMetadata], missing: Sequence[str]) -> str:
    step = found[0].step
    folders = {kind.key: _native.run_folder(step, kind.value) for kind in CheckpointType if kind.key is not None}
    why = [f"{key!r}: {folders[key]} is not saved" if key in folders else f"{key!r}: is in no part" for key in missing]
    there = " and ".join(part.path for part in found)
    return f"of step {step} only {there} is saved, not all that the state has: {'; '.join(why)}"


def _restore_one(
    found: CheckpointMetadata,
    run: _native.Run,
    state: dict[str, Any] | None,
    *,
    rng: bool,
    config: StorageConfig,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    trusted_classes: Sequence[Trusted],
) -> Any:
    """Load the checkpoint `found` into `state`, or if that is None, all of it into a new state on this rank.

    Args:
        found: Which one.
        run: The run that it is of.
        state: As for ``dcp.load``.
        rng: Whether this rank's generators go on as they did then.
        config: Limits of the store.
        process_group: Ranks that load together.
        no_dist: Whether this process loads alone.
        trusted_classes: As StrataReader.

    Returns:
        The bytes if bytes were saved; else the state.
    """
    reader = StrataReader(found.path, config=config, trusted_classes=trusted_classes)
    metadata = reader.read_metadata()
    paths = entry_paths(metadata.planner_data)
    if set(metadata.state_dict_metadata) == {_BYTES} and not paths:
        return run.load_bytes(found.step, found.checkpoint_type.value)
    rank = str(0 if no_dist else dist.get_rank(process_group))
    wanted = {} if state is None else dict(state)
    if state is None:
        wanted = _slots(metadata, [fqn for fqn in metadata.state_dict_metadata if paths.get(fqn, ("",))[0] != RNG_KEY])
    if rng:
        wanted |= _slots(metadata, [fqn for fqn, path in paths.items() if path[:2] == (RNG_KEY, rank)])
    dcp.load(
        wanted,
        storage_reader=reader,
        planner=StrataLoadPlanner(trusted_classes=trusted_classes),
        process_group=None if no_dist else process_group,
        no_dist=no_dist or state is None,
    )
    generators = wanted.pop(RNG_KEY, {}).get(rank)
    if generators is not None:
        restore_rng(generators)
    elif rng and found.checkpoint_type.is_whole:
        _logger.warning("%s: rank %s saved no random number generators; those here go on as they are", found.path, rank)
    if state is None:
        number_params(wanted)
        return wanted
    state.update(wanted)
    return state


def _slots(metadata: Metadata, fqns: Iterable[str]) -> dict[str, Any]:
    """What the stored keys `fqns` can be loaded into, at their paths."""
    paths = entry_paths(metadata.planner_data)
    slots: dict[str, Any] = nested(
        (paths.get(fqn, (fqn,)), slot_for(fqn, metadata.state_dict_metadata[fqn])) for fqn in fqns
    )
    return slots
