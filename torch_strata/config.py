"""Settings of a store: one frozen value, checked when built. Reads the environment only when asked to."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from torch_strata.errors import ConfigError

__all__ = ["StorageConfig"]

_MIB = 1 << 20
_GIB = 1 << 30
# S3 takes parts from 5 MiB to 5 GiB.
_PART_RANGE = (5 * _MIB, 5 * _GIB)
_PREFIX = "STRATA_"


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return known[text.strip().lower()]


def _seconds(text: str) -> timedelta:
    return timedelta(seconds=float(text))


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "max_in_flight_bytes": int,
    "max_concurrency": int,
    "part_bytes": int,
    "fsync": _flag,
    "direct_io": _flag,
    "max_tries": int,
    "max_staging_bytes": int,
    "deadline": _seconds,
    "progress": _flag,
}


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Limits of one store.

    Attributes:
        max_in_flight_bytes: Memory that buffers and bytes in flight may take, in bytes; at least ``part_bytes``.
        max_concurrency: Requests, or local reads and writes, at a time; 1 to 1024. A remote store that throttles gets
            fewer: half as many after each complaint, and one more after each round that it served.
        part_bytes: Size of a part of a large object, in bytes; 5 MiB to 5 GiB. Raised for objects that would need
            more than 10,000 parts.
        fsync: Whether local writes end with fsync of file and directory. Without it a power cut may lose a save
            that was reported as done.
        direct_io: Whether large local transfers bypass the page cache where alignment allows.
        max_tries: Tries of one request, the first included; 1 to 100.
        deadline: Time for one operation with all its tries, waits for a busy store included; more than 0.
        max_staging_bytes: Memory that the staged states of asynchronous saves may take in this process, all together,
            in bytes; a save that finds it in use waits, ``deadline`` at the longest. None: two states at a time,
            whatever their size.
        progress: Whether rank 0 draws a bar with bytes, rate and time left, on stderr, for a save or load that takes
            longer than a second. None: where stderr is a terminal and nothing else goes on, so not for asynchronous
            saves. The loggers of ``torch_strata`` say the same at level INFO, on every rank, at the start, each half
            minute and at the end.
        storage_options: The store's own settings, such as ``endpoint`` or ``region``.

    Raises:
        ConfigError: If a value has the wrong type or is out of range.
    """

    max_in_flight_bytes: int = 256 * _MIB
    max_concurrency: int = 16
    part_bytes: int = 16 * _MIB
    fsync: bool = True
    direct_io: bool = True
    max_tries: int = 8
    deadline: timedelta = timedelta(minutes=10)
    max_staging_bytes: int | None = None
    progress: bool | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold credentials

    def __post_init__(self) -> None:
        self._check_int("part_bytes", *_PART_RANGE)
        self._check_int("max_in_flight_bytes", self.part_bytes, 1 << 50)
        self._check_int("max_concurrency", 1, 1024)
        self._check_int("max_tries", 1, 100)
        if self.max_staging_bytes is not None:
            self._check_int("max_staging_bytes", 1, 1 << 50)
        for name in ("fsync", "direct_io"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"StorageConfig.{name}: expected a bool, found {getattr(self, name)!r}")
        if self.progress is not None and type(self.progress) is not bool:
            raise ConfigError(f"StorageConfig.progress: expected a bool or None, found {self.progress!r}")
        deadline: object = self.deadline
        if not isinstance(deadline, timedelta) or deadline <= timedelta(0):
            raise ConfigError(f"StorageConfig.deadline: expected a timedelta above 0, found {deadline!r}")
        object.__setattr__(self, "storage_options", MappingProxyType(_checked_options(self.storage_options)))

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"StorageConfig.{name}: expected an int from {low} to {high}, found {value!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "storage_options": dict(self.storage_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "storage_options", MappingProxyType(state["storage_options"]))

    def __hash__(self) -> int:
        options = tuple(sorted(self.storage_options.items()))
        return hash((options, *(getattr(self, f.name) for f in fields(self) if f.name != "storage_options")))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> "StorageConfig":
        """Settings from ``STRATA_…`` variables, such as ``STRATA_PART_BYTES``; an argument beats the environment.

        Args:
            env: Variables to read; the process's own if not given. Sizes are in bytes, ``STRATA_DEADLINE`` in seconds,
                flags are 0 or 1.
            **overrides: Fields that are set here and not read.

        Raises:
            ConfigError: If a variable cannot be read as its field's type, or is out of range.
        """
        source = os.environ if env is None else env
        values: dict[str, Any] = {}
        for name, parse in _PARSERS.items():
            variable = _PREFIX + name.upper()
            if name in overrides or variable not in source:
                continue
            try:
                values[name] = parse(source[variable])
            except (ValueError, KeyError, OverflowError) as error:
                raise ConfigError(f"{variable}: cannot read {source[variable]!r} as {name}") from error
        return cls(**{**values, **overrides})


def _checked_options(options: object) -> dict[str, str]:
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        raise ConfigError(f"StorageConfig.storage_options: expected a mapping of str to str, found a {kind}")
    for key, value in options.items():
        # The value is not shown: it may be a secret.
        if not isinstance(key, str) or not isinstance(value, str):
            kinds = f"{type(key).__name__} to {type(value).__name__} at {key!r}"
            raise ConfigError(f"StorageConfig.storage_options: expected str to str, found {kinds}")
    return dict(options)
