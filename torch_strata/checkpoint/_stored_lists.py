"""The names of lists of which a checkpoint holds the entries, each under a name of its own. Reads nothing.

In a flat state an empty list is a value under the list's name, so that is the name that DCP's planner looks for when
the list was empty in the state to load into. To look is to find `StoredList` there; nobody finds it by iterating.
"""

import functools
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from torch_strata.checkpoint._paths import Path

__all__ = ["ListNames", "StoredDict", "StoredList", "entry_paths"]


class StoredList(BytesStorageMetadata):
    """What `state_dict_metadata` says of such a name: planned as a pickled value, and never read as one."""


class ListNames:
    """The names of lists with entries below, as DCP makes names of paths. Nothing is done before the first question."""

    def __init__(self, planner_data: Any) -> None:
        self._planner_data = planner_data

    @functools.cached_property
    def _sorted(self) -> list[tuple[str, Path]]:
        return sorted(entry_paths(self._planner_data).items(), key=_name)

    def __contains__(self, fqn: object) -> bool:
        if not isinstance(fqn, str):
            return False
        below = f"{fqn}."
        for at in range(bisect_left(self._sorted, below, key=_name), len(self._sorted)):
            name, path = self._sorted[at]
            if not name.startswith(below):
                return False
            if _is_in_list(path, fqn):
                return True
        return False


def _name(entry: tuple[str, Path]) -> str:
    return entry[0]


def _is_in_list(path: Path, fqn: str) -> bool:
    """Whether an entry at `path` is one, or below one, of a list of that name."""
    name = ""
    for at, part in enumerate(path):
        if at and name == fqn:
            return type(part) is int
        name = f"{name}.{part}" if at else str(part)
        if len(name) > len(fqn):
            return False
    return False


class StoredDict(dict[str, Any]):
    """A plain `state_dict_metadata` that knows such names."""

    def __init__(self, stored: Mapping[str, Any], planner_data: Any) -> None:
        super().__init__(stored)
        self._lists = ListNames(planner_data)

    def __missing__(self, fqn: str) -> StoredList:
        if fqn in self._lists:
            return StoredList()
        raise KeyError(fqn)

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or fqn in self._lists

    def get(self, fqn: str, default: Any = None) -> Any:
        try:
            return self[fqn]
        except KeyError:
            return default

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def entry_paths(planner_data: Any) -> Mapping[str, Path]:
    """Where each name stood in the state, if the planner's data says that."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {fqn: path for fqn, path in planner_data.items() if isinstance(fqn, str) and isinstance(path, tuple)}
