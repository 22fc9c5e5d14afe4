"""What values of a nested state are called, and where they stand in it. Imports no torch."""

import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch_strata.errors import CheckpointError, ConfigError, CorruptionError

__all__ = ["Path", "decode_fqn", "dotted", "encode_fqn", "nested", "nested_too_deep", "rename_keys"]

# As DCP writes it: keys as text, places in a list as numbers.
Path = tuple[str | int, ...]

# A place in a list that no entry has was an empty dict's, and costs as much: an index can claim any number of them.
_MAX_PLACES = 1 << 24


def dotted(path: Path) -> str:
    """The key that DCP gives to what stands at `path`."""
    return ".".join(map(str, path))


def encode_fqn(fqn: Any) -> bytes:
    """A key as bytes, as the Rust core takes it; lone surrogates survive.

    Raises:
        CheckpointError: If it is not a str.
    """
    if not isinstance(fqn, str):
        raise CheckpointError(f"a key of the state_dict is not a str: {fqn!r:.200}")
    return fqn.encode("utf-8", "surrogatepass")


def decode_fqn(fqn: bytes) -> str:
    """The key that was encoded so."""
    return fqn.decode("utf-8", "surrogatepass")


def nested(entries: Iterable[tuple[Path, Any]], where: str = "planner_data") -> Any:
    """The dict or list that has each value at its path; `where`, for messages, says who holds the paths.

    An empty dict is stored under no name: a place of a list that no entry has gets one.

    Raises:
        CorruptionError: If the paths cannot be those of one state.
    """
    inside: dict[str | int, list[tuple[Path, Any]]] = {}
    try:
        for path, value in entries:
            inside.setdefault(path[0], []).append((path[1:], value))
        built = {
            part: below[0][1] if len(below) == 1 and not below[0][0] else nested(below, where)
            for part, below in inside.items()
        }
    except (IndexError, RecursionError) as error:
        raise CorruptionError(f"{where}: a path leads through a value, or on without end") from error
    if all(type(part) is str for part in built):
        return built
    places = [part for part in built if type(part) is int and 0 <= part < _MAX_PLACES]
    if len(places) < len(built):
        raise CorruptionError(f"{where}: no list has the places {', '.join(map(repr, list(built)[:9]))}")
    return [built.get(place, {}) for place in range(max(places) + 1)]


def nested_too_deep(state: Mapping[Any, Any]) -> ConfigError:
    """What to raise where a walk through `state` has met Python's limit: names the deepest key of the state itself."""
    depths = {key: _depth(value) for key, value in state.items()}
    key = max(depths, key=lambda key: depths[key], default=None)
    return ConfigError(f"state: {key!r:.200} is nested too deeply, or holds a dict or list that contains itself")


def _depth(value: Any) -> int:
    """Levels of dicts, lists and tuples, counted to Python's limit; a loop."""
    limit, deepest = sys.getrecursionlimit(), 0
    left = [(value, 1)]
    while left and deepest < limit:
        held, depth = left.pop()
        deepest = max(deepest, depth)
        inside = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else ()
        left += [(one, depth + 1) for one in inside]
    return deepest


def rename_keys(held: MutableMapping[Any, Any], names: Mapping[Any, Any]) -> None:
    """Give keys of a dict the names that `names` has for them; all stay in their order."""
    entries = [(names.get(key, key), value) for key, value in held.items()]
    held.clear()
    held.update(entries)
