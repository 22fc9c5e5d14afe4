"""Settings of two stores that one call uses. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch_strata.checkpoint._store import resolve_config
from torch_strata.config import StorageConfig

__all__ = ["TwoPlaces"]


@dataclass(frozen=True, kw_only=True)
class TwoPlaces:
    """Where a call reads and where it writes, or the two that it reads.

    Attributes:
        source: Settings of the first.
        destination: Of the second.
    """

    source: StorageConfig
    destination: StorageConfig

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        config: StorageConfig | None,
        storage_options: Mapping[str, str] | None,
        to_options: Mapping[str, str] | None = None,
    ) -> "TwoPlaces":
        """One set of settings for both, `to_options` for the second alone; local stores have no options.

        Raises:
            ConfigError: If a setting is of the wrong type.
        """
        settings = resolve_config(config, storage_options)
        own = replace(settings, storage_options={})
        second = settings if to_options is None else resolve_config(own, to_options)
        return cls(source=_for(source, settings), destination=_for(destination, second))


def _for(place: str | os.PathLike[str], settings: StorageConfig) -> StorageConfig:
    scheme, separator, _ = os.fspath(place).partition("://")
    is_local = not separator or scheme == "file"
    return replace(settings, storage_options={}) if is_local else settings
