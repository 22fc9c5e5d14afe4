"""From what a user passes as a place to a store of the Rust core. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import replace

from torch_strata import _native
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError

__all__ = [
    "check_flag",
    "is_below",
    "is_place",
    "local_folder",
    "open_store",
    "place_below",
    "resolve_config",
    "resolve_configs",
]


def check_flag(name: str, value: object) -> bool:
    """`value`, if it is a bool: by its truth a word like "no" would mean yes.

    Raises:
        ConfigError: If it is not.
    """
    if type(value) is not bool:
        raise ConfigError(f"{name}: expected a bool, found {value!r}")
    return value


def resolve_config(config: StorageConfig | None, storage_options: Mapping[str, str] | None) -> StorageConfig:
    """The settings to use; `storage_options` given beside `config` are added to its own and win."""
    base = StorageConfig() if config is None else config
    if not isinstance(base, StorageConfig):
        raise ConfigError(f"config: expected a StorageConfig, found a {type(config).__name__}")
    if storage_options is None:
        return base
    try:
        return replace(base, storage_options={**base.storage_options, **storage_options})
    except TypeError as error:
        kind = type(storage_options).__name__
        raise ConfigError(f"storage_options: expected a mapping of str to str, found a {kind}") from error


def resolve_configs(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    config: StorageConfig | None,
    storage_options: Mapping[str, str] | None,
    to_options: Mapping[str, str] | None = None,
) -> tuple[StorageConfig, StorageConfig]:
    """The settings to use for two places: as `resolve_config`, but that `to_options` are the second's own if given.

    Local places have no options.

    Raises:
        ConfigError: If a setting is of the wrong type.
    """
    settings = resolve_config(config, storage_options)
    own = settings if to_options is None else resolve_config(replace(settings, storage_options={}), to_options)
    return _for(first, settings), _for(second, own)


def _for(place: str | os.PathLike[str], settings: StorageConfig) -> StorageConfig:
    scheme, separator, _ = os.fspath(place).partition("://")
    is_local = not separator or scheme == "file"
    return replace(settings, storage_options={}) if is_local else settings


def open_store(place: str | os.PathLike[str], config: StorageConfig) -> _native.Store:
    """A store at a local path or URL. Opens nothing yet.

    Raises:
        ConfigError: If the URL's scheme or an option is unknown.
    """
    return _native.Store(
        _url(place),
        dict(config.storage_options),
        max_in_flight_bytes=config.max_in_flight_bytes,
        max_concurrency=config.max_concurrency,
        part_bytes=config.part_bytes,
        fsync=config.fsync,
        direct_io=config.direct_io,
        max_tries=config.max_tries,
        deadline_s=config.deadline.total_seconds(),
    )


def local_folder(place: str | os.PathLike[str]) -> str | None:
    """The path of a place in the local file system; None of any other."""
    url = _url(place)
    return url.removeprefix("file://") if url.startswith("file://") or "://" not in url else None


def place_below(root: str | os.PathLike[str], name: str) -> str:
    """The place of what is called `name` in the place `root`."""
    return f"{os.fspath(root).rstrip('/')}/{name}"


def is_below(place: str | os.PathLike[str], root: str | os.PathLike[str]) -> bool:
    """Whether `place` is within the place `root`, and not `root` itself."""
    inner, outer = _parts(place), _parts(root)
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _parts(place: str | os.PathLike[str]) -> list[str]:
    url = _url(place).removeprefix("file://")
    if "://" not in url:
        url = os.path.abspath(url)
    return [part for part in url.split("/") if part]


def is_place(place: object) -> bool:
    """Whether `place` is something `open_store` takes: a path that can be made here, or a URL of a known scheme."""
    if isinstance(place, os.PathLike):
        return True
    if not isinstance(place, str) or not place:
        return False
    scheme, separator, _ = place.partition("://")
    if separator:
        return scheme in _native.SCHEMES
    path = os.path.abspath(place)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK)


def _url(place: str | os.PathLike[str]) -> str:
    url = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(url, str) or not url:
        raise ConfigError(f"place: expected a path or a URL, found {place!r}")
    scheme, colon, rest = url.partition(":")
    if colon and scheme in _native.SCHEMES and not rest.startswith("//"):
        # pathlib makes one slash of two, and a checkpoint would go to a local folder named "s3:".
        raise ConfigError(f"place: expected {scheme}://…, found {url!r}; pass URLs as str, not as Path")
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in _native.SCHEMES:
        raise ConfigError(f"no store for the scheme {scheme!r} of {url!r}; known: {', '.join(_native.SCHEMES)}")
    return url
