"""What DCP does not keep of a state's dicts: keys that are integers, and dicts that are empty.

DCP makes text of every key, and stores what is in a dict, not the dict. A manager saves a note of both beside the state
and undoes both where it makes a dict anew; in a dict that the caller gives, the caller's own keys count. Imports no
torch.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_strata.checkpoint._paths import Path, dotted, nested_too_deep, rename_keys
from torch_strata.errors import CorruptionError

__all__ = ["KEYS_KEY", "KeyNotes", "Keys", "keys_of", "noted"]

_logger = logging.getLogger(__name__)

# Below this key of a saved state the notes of its ranks lie under their digests: equal ones are saved once.
KEYS_KEY = "strata_keys"


@dataclass
class Keys:
    """What is noted of a state.

    Attributes:
        ints: By path of a dict: its keys that are integers.
        empty: Paths of dicts that are empty, in the order of a walk.
        other: Paths of dicts with keys that are neither text nor integers, each with such a key. Only for a warning.
    """

    ints: dict[Path, list[int]] = field(default_factory=dict)
    empty: list[Path] = field(default_factory=list)
    other: dict[Path, object] = field(default_factory=dict)

    def as_entry(self) -> dict[str, str]:
        """What to save under `KEYS_KEY`; empty if there is nothing to note."""
        if not self.ints and not self.empty:
            return {}
        text = json.dumps({"ints": list(self.ints.items()), "empty": self.empty})
        return {hashlib.blake2b(text.encode(), digest_size=16).hexdigest(): text}

    @classmethod
    def of_entries(cls, notes: Iterable[object]) -> "Keys":
        """All that the ranks have noted.

        Raises:
            CorruptionError: If a note is none.
        """
        keys = cls()
        for note in notes:
            try:
                told = json.loads(note)  # type: ignore[arg-type]
                for path, ints in told["ints"]:
                    known = keys.ints.setdefault(_path(path), [])
                    known += [number for number in ints if type(number) is int and number not in set(known)]
                keys.empty += [_path(path) for path in told["empty"]]
            except (TypeError, ValueError, KeyError, RecursionError) as error:
                raise CorruptionError(f"{KEYS_KEY}: a note of keys cannot be read: {error}") from error
        return keys

    def below(self, key: str) -> "Keys":
        """What is noted of what lies below a key that is written as a name, with dots, as if that were all."""

        def depth(path: Path) -> int:
            heads = (at for at in range(1, len(path) + 1) if dotted(path[:at]) == key)
            return next(heads, 0)

        ints = {path[at:]: keys for path, keys in self.ints.items() if (at := depth(path))}
        return Keys(ints, [path[at:] for path in self.empty if (at := depth(path)) and path[at:]])

    def give_back(self, state: Any, made: Sequence[Path]) -> None:
        """Let `state` have again what was noted, in what was made anew at the paths `made` and below.

        Raises:
            CorruptionError: If the notes are not of this state.
        """
        if not self.ints and not self.empty:
            return

        def is_new(path: Path) -> bool:
            return any(path[: len(start)] == start for start in made)

        for path in self.empty:
            if is_new(path):
                _put(state, path)
        # The deepest first: on the way to it all keys are still text.
        for path in sorted(filter(is_new, self.ints), key=len, reverse=True):
            held = _find(state, path)
            if not isinstance(held, MutableMapping):
                continue  # of another rank, and not loaded here
            numbers = {str(number): number for number in self.ints[path]}
            rename_keys(held, numbers)


class KeyNotes:
    """The notes of one run's states; warns once of each dict whose keys cannot be noted."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._warned_of: set[Path] = set()

    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What to save beside `state`; empty if there is nothing to note."""
        keys = keys_of(state)
        for path in keys.other.keys() - self._warned_of:
            self._warned_of.add(path)
            name = dotted(path) or "the state itself"
            _logger.warning(
                "%s: a dict in the state (%s) has the key %r: it is saved as text, and comes back as text where a load "
                "makes the dict anew; only integers come back as they were",
                *(self._root, name, keys.other[path]),
            )
        return noted(keys)


def noted(keys: Keys) -> dict[str, dict[str, str]]:
    """What to save beside a state; empty if there is nothing to note."""
    entry = keys.as_entry()
    return {KEYS_KEY: entry} if entry else {}


def keys_of(state: Mapping[Any, Any]) -> Keys:
    """What is to be noted of `state`: in dicts, and in lists with dicts in them.

    Raises:
        ConfigError: If it is nested too deeply, or contains itself.
    """
    keys = Keys()
    try:
        _Walk(keys).visit(state, ())
    except RecursionError:
        raise nested_too_deep(state) from None
    return keys


class _Walk:
    """Through the containers of a state. A large one has millions of values: their types are looked at, and no more."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._kinds: dict[type, type | None] = {}
        # Lists that were looked at; a file may hold one in so many places that no walk would end.
        self._known: dict[int, bool] = {}

    def visit(self, held: Mapping[Any, Any], path: Path) -> None:
        if path and not held:
            self._keys.empty.append(path)
        others = {type(key) for key in held} - {str}
        if int in others:
            self._keys.ints[path] = [key for key in held if type(key) is int]
            others.discard(int)
        for kind in others:
            if not issubclass(kind, str):
                self._keys.other[path] = next(key for key in held if type(key) is kind)
        self._visit_all(((str(key), value) for key, value in held.items() if self._kind(type(value))), path)

    def _visit_all(self, inside: Iterable[tuple[str | int, Any]], path: Path) -> None:
        for part, value in inside:
            if self._kind(type(value)) is Mapping:
                self.visit(value, (*path, part))
            elif self._has_mapping(value):
                self._visit_all(((at, one) for at, one in enumerate(value) if self._kind(type(one))), (*path, part))

    def _has_mapping(self, held: list[Any]) -> bool:
        """Whether there is a dict in a list; what is in tuples is pickled as it is."""
        found = self._known.get(id(held))
        if found is None:
            kinds = {self._kind(kind) for kind in set(map(type, held))}
            found = Mapping in kinds or (
                list in kinds and any(self._has_mapping(one) for one in held if self._kind(type(one)) is list)
            )
            self._known[id(held)] = found
        return found

    def _kind(self, of: type) -> type | None:
        """Mapping or list as DCP goes through them; None of a value."""
        if of not in self._kinds:
            self._kinds[of] = Mapping if issubclass(of, Mapping) else list if issubclass(of, list) else None
        return self._kinds[of]


def _path(parts: Iterable[Any]) -> Path:
    path = tuple(parts)
    if not all(type(part) in (str, int) for part in path):
        raise TypeError(f"{path!r} is no path")
    return path


def _find(held: Any, path: Path) -> Any:
    """What is at `path`; None if nothing is."""
    for part in path:
        if isinstance(held, Mapping):
            held = held.get(_key(held, part))
        elif isinstance(held, list) and type(part) is int and 0 <= part < len(held):
            held = held[part]
        else:
            return None
    return held


def _key(held: Mapping[Any, Any], part: str | int) -> Any:
    """The key that DCP calls `part`: a caller's dict may have an integer there."""
    if part in held:
        return part
    return next((key for key in held if str(key) == part), part)


def _put(held: Any, path: Path) -> None:
    """An empty dict at `path`, and what leads there."""
    for at, part in enumerate(path):
        rest = path[at + 1 :]
        fresh: Any = [] if rest and type(rest[0]) is int else {}
        if isinstance(held, list) and type(part) is int and 0 <= part <= len(held):
            if part == len(held):
                held.append(fresh)
            elif fresh == [] and isinstance(held[part], dict) and not held[part]:
                held[part] = fresh  # made for a place that no entry has
            held = held[part]
        elif isinstance(held, MutableMapping) and type(part) is str:
            held = held.setdefault(_key(held, part), fresh)
        else:
            raise CorruptionError(f"{KEYS_KEY}: {path!r} leads nowhere in the state")
