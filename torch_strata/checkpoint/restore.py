"""Loading one checkpoint of a run: its bytes, a state into place, or all of a state anew."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from torch_strata import _native
from torch_strata.checkpoint._grown import empty_containers, number_params, slot_for
from torch_strata.checkpoint._keys import KEYS_KEY, Keys
from torch_strata.checkpoint._paths import nested
from torch_strata.checkpoint._quiet import quiet_alone
from torch_strata.checkpoint._ranks import Ranks
from torch_strata.checkpoint._rng import RNG_KEY, restore_rng
from torch_strata.checkpoint._stored_lists import entry_paths
from torch_strata.checkpoint.planner import StrataLoadPlanner
from torch_strata.checkpoint.reader import StrataReader
from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType
from torch_strata.config import StorageConfig
from torch_strata.errors import LayoutMismatchError, StrataError

__all__ = ["held_by", "plain", "restore", "set_aside"]

_logger = logging.getLogger(__name__)

# As strata-checkpoint's BYTES_KEY, the one key of a checkpoint of bytes.
_BYTES = "bytes"


def restore(found: Sequence[CheckpointMetadata], run: _native.Run, state: Any, *, ranks: Ranks, **settings: Any) -> Any:
    """Load a whole checkpoint, or all parts that there are of a step, as `_restore_one` does.

    Args:
        found: The one, or the parts.
        run: The run that they are of.
        state: As `_restore_one`, or a Stateful, which is given what was loaded.
        ranks: As `_restore_one`.
        settings: As `_restore_one`.

    Raises:
        LayoutMismatchError: If `state` has keys that no part was saved with; nothing has been changed then.
    """
    if isinstance(state, Stateful) and not isinstance(state, dict):
        with ranks.together():
            held = state.state_dict()
        held = restore(found, run, held, ranks=ranks, **settings)
        with ranks.together():
            state.load_state_dict(held)
        return state
    parts = {kind.key: part for part in found if (kind := part.checkpoint_type).key is not None}
    if parts and state is not None and not parts.keys() >= state.keys():
        raise LayoutMismatchError(_words(found, [key for key in state if key not in parts]))
    if len(found) == 1:
        return _restore_one(found[0], run, state, ranks=ranks, **settings)
    loaded = {}
    for key, part in parts.items():
        if state is None or key in state:
            one = _restore_one(part, run, None if state is None else {key: state[key]}, ranks=ranks, **settings)
            loaded[key] = one[key] if isinstance(one, dict) else one
    if state is None:
        return loaded
    state.update(loaded)
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
    ranks: Ranks,
    rng: bool,
    config: StorageConfig,
    **reading: Any,
) -> Any:
    """Load the checkpoint `found` into `state`, or if that is None, all of it into a new state on this rank.

    Args:
        found: Which one.
        run: The run that it is of.
        state: As for ``dcp.load``.
        ranks: Those that load together.
        rng: Whether this rank's generators go on as they did then.
        config: Limits of the store.
        reading: What StrataReader and StrataLoadPlanner are told of dtypes and classes.

    Returns:
        The bytes if bytes were saved; else the state.

    Raises:
        LayoutMismatchError: If bytes are to be loaded into a state.
        StrataError: What a rank has failed at, on all of them. `state` may hold some of what was loaded then; lists and
            dicts that were empty are empty.
    """
    alone = ranks.is_alone or state is None
    rank = str(ranks.number)
    with ranks.together():
        reader = StrataReader(found.path, config=config, **reading)
        metadata = reader.read_metadata()
        paths = entry_paths(metadata.planner_data)
        is_bytes = set(metadata.state_dict_metadata) == {_BYTES} and not paths
        if is_bytes and state is not None:
            raise LayoutMismatchError(f"{found.path}: holds bytes, not a state: load it without one")
        own = {fqn: path for fqn, path in paths.items() if path[:1] in ((RNG_KEY,), (KEYS_KEY,))}
        fqns = [fqn for fqn in metadata.state_dict_metadata if fqn not in own]
        notes = [fqn for fqn, path in own.items() if path[0] == KEYS_KEY]
        generators = [fqn for fqn, path in own.items() if rng and path[:2] == (RNG_KEY, rank)]
        # A Stateful is given what was loaded when that is complete.
        wanted = _slots(metadata, fqns) if state is None else plain(state)
        wanted |= _slots(metadata, [*generators, *notes])
    if is_bytes:
        with ranks.together():
            return run.load_bytes(found.step, found.checkpoint_type.value)
    empty = list(empty_containers(wanted))
    try:
        with ranks.together(), quiet_alone(alone):
            dcp.load(
                wanted,
                storage_reader=reader,
                planner=StrataLoadPlanner(**reading),
                process_group=None if alone else ranks.group,
                no_dist=alone,
            )
            generated = wanted.pop(RNG_KEY, {})
            keys = Keys.of_entries(wanted.pop(KEYS_KEY, {}).values())
            keys.give_back(wanted, [()] if state is None else [path for path, _, _ in empty])
        with ranks.together():
            if generators:
                restore_rng(generated[rank])
            if state is not None:
                _hand_over(wanted, state)
    except BaseException:
        # This rank may have filled what another could not: the next attempt is to find it as it was.
        for _, held, _ in empty:
            held.clear()
        raise
    if rng and not generators and found.checkpoint_type.is_whole:
        _logger.warning("%s: rank %s saved no random number generators; those here go on as they are", found.path, rank)
    if state is None:
        number_params(wanted)  # of what was saved without such notes
        return wanted
    return state


def held_by(state: Any) -> Any:
    """The state dict of a Stateful, or of what only saves like one; all else as it is."""
    return state.state_dict() if hasattr(state, "state_dict") and not isinstance(state, dict) else state


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """With what the Statefuls in it say of themselves."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def _hand_over(loaded: dict[str, Any], state: dict[str, Any]) -> None:
    """As ``dcp.load``: a Stateful in `state` is given what was loaded for it, all else is replaced."""
    for key, value in loaded.items():
        if isinstance(state.get(key), Stateful):
            state[key].load_state_dict(value)
        else:
            state[key] = value


def set_aside(found: CheckpointMetadata, run: _native.Run, error: BaseException, *, marks: bool) -> None:
    """Say that `found` is damaged, if this rank is the one that `marks` it, and see to it that all pass it over."""
    _logger.debug("%s is damaged", found.path, exc_info=error)
    if not marks:
        return
    what = type(error).__name__, error
    _logger.error("%s is damaged and is passed over; nothing of it is removed: %s: %s", found.path, *what)
    folder = _native.run_folder(found.step, found.checkpoint_type.value)
    try:
        if any(raw[0] == found.id for raw in run.all()):  # and was not removed while it was read
            run.quarantine(folder, found.id, f"{type(error).__name__}: {error}")
    except StrataError as failure:  # as where nothing may be written: it is passed over all the same
        _logger.warning("%s: not marked as damaged: %s: %s", found.path, type(failure).__name__, failure)


def _slots(metadata: Metadata, fqns: Iterable[str]) -> dict[str, Any]:
    """What the stored keys `fqns` can be loaded into, at their paths."""
    paths = entry_paths(metadata.planner_data)
    slots: dict[str, Any] = nested(
        (paths.get(fqn, (fqn,)), slot_for(fqn, metadata.state_dict_metadata[fqn])) for fqn in fqns
    )
    return slots
