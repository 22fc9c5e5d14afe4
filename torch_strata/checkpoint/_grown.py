"""Lists and dicts that are empty in the state to load into and have entries in the checkpoint: those are read too.

DCP plans what is in the state: nothing for an empty dict, and for an empty list a value under its own name, which is
not what is stored. Here the plan gets the entries instead, and the containers get them when all has been read and
verified. Only of planners whose ways are known; for any other such a name is missing in the checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from torch_strata.checkpoint._paths import Path, dotted, nested, rename_keys
from torch_strata.checkpoint._reads import CompactReads, PlannedReads
from torch_strata.checkpoint._resolve import finds_plainly
from torch_strata.checkpoint._shortcuts import keeps_methods
from torch_strata.checkpoint._stored_lists import StoredList, entry_paths
from torch_strata.checkpoint.planner import StrataLoadPlanner, missing_list
from torch_strata.errors import CheckpointError, LayoutMismatchError

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["Grown", "empty_containers", "number_params", "slot_for", "with_grown"]

_PLANNING = ("set_up_planner", "create_local_plan", "load_bytes")
_PLANNING_OF_ALL = ("create_global_plan", "finish_plan")

# Some torch may come without them.
_QUANTIZED = {getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")}


@dataclass(eq=False)
class _Container:
    """An empty list or dict, the dict or list that it is in, and the paths from it to the entries stored for it."""

    held: Any
    parent: Any
    entries: dict[str, Path]

    @property
    def is_of_kind(self) -> bool:
        """Whether a container of this kind was saved."""
        return all((type(path[0]) is int) == isinstance(self.held, list) for path in self.entries.values())


class Grown:
    """What is read beyond the plan.

    Attributes:
        values: By name: the new tensor to read into; of a pickled value what was read.
    """

    def __init__(self, containers: Iterable[_Container] = ()) -> None:
        self.values: dict[str, Any] = {}
        self._containers = list(containers)

    def __bool__(self) -> bool:
        return bool(self._containers)

    def fill(self) -> None:
        """Put the entries into their containers."""
        for container in self._containers:
            built = nested((path, self.values[fqn]) for fqn, path in container.entries.items())
            if isinstance(container.held, list):
                container.held[:] = built
            else:
                container.held.update(built)
        for container in self._containers:
            number_params(container.held)
            _number_params_of(container.parent)


def with_grown(
    plan: LoadPlan, planner: LoadPlanner, stored: Mapping[str, Any], planner_data: Any
) -> tuple[LoadPlan, Grown]:
    """The plan with reads for the entries of containers that are empty in the planner's state.

    Args:
        plan: Of this rank.
        planner: That made it.
        stored: The checkpoint's `state_dict_metadata`.
        planner_data: The checkpoint's.

    Raises:
        LayoutMismatchError: If a list is wanted where there is a dict, or the reverse, or anything else but a list.
        CorruptionError: If the paths in the checkpoint contradict one another.
        CheckpointError: If there is no memory for a tensor.
    """
    if isinstance(plan.items, PlannedReads):
        return plan, Grown()  # the names in the state are those in the checkpoint
    containers = _grown(planner, stored, planner_data) if _is_known(planner) else {}
    reads = CompactReads()
    for item in plan.items:
        if item.type is not LoadItemType.BYTE_IO or not isinstance(stored.get(item.storage_index.fqn), StoredList):
            reads.append(item)
        else:
            _check_list(planner, item, containers)
    if not containers and len(reads) == len(plan.items):
        return plan, Grown()
    grown = Grown(containers.values())
    for container in containers.values():
        nested((path, None) for path in container.entries.values())  # raises before anything is read
        for fqn in container.entries:
            slot = grown.values[fqn] = slot_for(fqn, stored[fqn])
            reads += _create_read_items(fqn, stored[fqn], slot)
            if slot is not None:
                planner.state_dict[fqn] = slot  # type: ignore[attr-defined]
    return replace(plan, items=reads), grown


def _is_known(planner: LoadPlanner) -> "TypeGuard[DefaultLoadPlanner]":
    """Whether the planner asks for what is in its state, and nobody decides on anything else."""
    return (
        isinstance(planner, DefaultLoadPlanner)
        and planner.flatten_state_dict
        and finds_plainly(planner)
        and keeps_methods(planner, DefaultLoadPlanner, *_PLANNING_OF_ALL)
        and any(keeps_methods(planner, kind, *_PLANNING) for kind in (DefaultLoadPlanner, StrataLoadPlanner))
    )


def _grown(planner: DefaultLoadPlanner, stored: Mapping[str, Any], planner_data: Any) -> dict[Path, _Container]:
    """The containers of the state that are empty and have entries in the checkpoint, by path."""
    if planner.state_dict.keys() == stored.keys():
        return {}
    empty = {
        path: _Container(held, parent, {})
        for path, held, parent in empty_containers(planner.original_state_dict)
        if isinstance(stored.get(dotted(path), StoredList()), StoredList)
    }
    lengths = sorted({len(path) for path in empty})
    for fqn, path in entry_paths(planner_data).items() if empty else ():
        if fqn in planner.state_dict or fqn not in stored:
            continue
        for length in lengths:
            if length < len(path) and path[:length] in empty:
                empty[path[:length]].entries[fqn] = path[length:]
    found = {path: container for path, container in empty.items() if container.entries}
    for path, container in found.items():
        if not container.is_of_kind and not planner.allow_partial_load:
            kind = "dict" if isinstance(container.held, list) else "list"
            raise LayoutMismatchError(
                f"{dotted(path)!r} is stored as a {kind}, the state holds a {type(container.held).__name__}"
            )
    return {path: container for path, container in found.items() if container.is_of_kind}


def empty_containers(held: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Path, the container, and what it is in."""
    inside: Iterable[tuple[str | int, Any]] = ()
    if isinstance(held, Mapping):
        inside = ((str(key), value) for key, value in held.items())
    elif isinstance(held, list):
        inside = enumerate(held)
    for part, value in inside:
        if isinstance(value, list | Mapping):
            if value:
                yield from empty_containers(value, (*path, part))
            elif isinstance(value, list | MutableMapping):
                yield (*path, part), value, held


def _check_list(planner: LoadPlanner, item: ReadItem, containers: Mapping[Path, _Container]) -> None:
    """Whether what is planned under the name of a list is filled.

    Raises:
        LayoutMismatchError: If it is not.
    """
    fqn = item.dest_index.fqn
    if not isinstance(planner, DefaultLoadPlanner):
        raise missing_list(fqn, None)
    if planner.mappings.get(fqn, (fqn,)) in containers or planner.allow_partial_load:
        return
    raise missing_list(fqn, planner.state_dict.get(fqn))


def slot_for(fqn: str, stored: Any) -> torch.Tensor | None:
    """What one entry of `state_dict_metadata` can be loaded into: a new tensor; None for a pickled value.

    Raises:
        CheckpointError: If such a tensor cannot be made.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.properties.dtype in _QUANTIZED:  # torch.empty makes one without a quantizer, which nothing can fill
        raise CheckpointError(
            f"cannot make a tensor for {fqn!r}: it is quantized ({stored.properties.dtype}), and only a tensor with "
            "its quantizer can take it: load it into a state that has one"
        )
    try:
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"cannot make a tensor for {fqn!r}, {tuple(stored.size)}: {reason}") from error


def number_params(held: Any) -> None:
    """In what an optimizer's `state_dict` has become, know parameters by number again; DCP makes text of keys.

    Anywhere in dicts and lists; it is a dict with `state` and `param_groups`.
    """
    _number_params_of(held)
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
    for value in inside:
        if isinstance(value, dict | list):
            number_params(value)


def _number_params_of(held: Any) -> None:
    state, groups = (held.get("state"), held.get("param_groups")) if isinstance(held, dict) else (None, None)
    if not isinstance(state, dict) or not isinstance(groups, list):
        return
    params = [group.get("params") for group in groups if isinstance(group, dict)]
    numbers = {str(param): param for held in params if isinstance(held, list) for param in held if type(param) is int}
    if numbers.keys() & state.keys():
        rename_keys(state, numbers)
