"""The names of lists of which a checkpoint holds the entries, each under a name of its own. Reads nothing.

In a flat state an empty list is a value under the list's name, so that is the name that DCP's planner looks for when
the list was empty in the state to load into. To look is to find `StoredList` there; nobody finds it by iterating.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

__all__ = ["StoredDict", "StoredList", "entry_paths", "names_of_lists"]

Path = tuple[str | int, ...]


class StoredList(BytesStorageMetadata):
    """What `state_dict_metadata` says of such a name: planned as a pickled value, and never read as one."""


class StoredDict(dict[str, Any]):
    """A plain `state_dict_metadata` that knows such names."""

    def __init__(self, stored: Mapping[str, Any], planner_data: Any) -> None:
        super().__init__(stored)
        self._planner_data = planner_data
        self._lists: frozenset[str] | None = None

    def __missing__(self, fqn: str) -> StoredList:
        if fqn in self._names():
            return StoredList()
        raise KeyError(fqn)

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or fqn in self._names()

    def get(self, fqn: str, default: Any = None) -> Any:
        try:
            return self[fqn]
        except KeyError:
            return default

    def _names(self) -> frozenset[str]:
        if self._lists is None:
            self._lists = names_of_lists(self._planner_data)
        return self._lists

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def entry_paths(planner_data: Any) -> Mapping[str, Path]:
    """Where each name stood in the state, if the planner's data says that."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {fqn: path for fqn, path in planner_data.items() if isinstance(fqn, str) and isinstance(path, tuple)}


def names_of_lists(planner_data: Any) -> frozenset[str]:
    """The names of lists with entries below, as DCP makes names of paths."""
    prefixes = {
        path[:at]
        for path in entry_paths(planner_data).values()
        for at, part in enumerate(path)
        if at and type(part) is int
    }
    return frozenset(".".join(map(str, prefix)) for prefix in prefixes)
