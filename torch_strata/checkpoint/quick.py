"""Saves and loads in one line, at a place that is configured once for the process.

They stand on one `CheckpointManager` a place, which `configure` returns. The place is that of `configure`, else the one
that ``STRATA_STORAGE`` names.
"""

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from torch_strata.checkpoint.checkpoint_handle import CheckpointHandle
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.restore import held_by
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError

__all__ = ["configure", "load_checkpoint", "save_checkpoint", "wait_for_checkpoints"]

_logger = logging.getLogger(__name__)

_VARIABLE = "STRATA_STORAGE"

_LIMITS = frozenset(f.name for f in fields(StorageConfig))
_MANAGING = frozenset(inspect.signature(CheckpointManager).parameters) - {"storage_path", "config"} - _LIMITS


class _Place:
    """Where to, and what was saved there last."""

    def __init__(self, path: str | os.PathLike[str], config: StorageConfig, managing: Mapping[str, Any]) -> None:
        self.manager = CheckpointManager(path, config=config, **managing)
        self._newest: int | None = None
        self._has_warned = False

    def step_of(self, state: Any, given: int | None) -> int:
        """The step to save `state` under."""
        step = given
        told = state.get("step") if given is None and isinstance(state, Mapping) else None
        if type(told) is int:
            step = told
        if step is None:
            step = self.manager.next_step() if self._newest is None else self._newest + 1
            if told is not None and not self._has_warned:
                self._has_warned = True
                kind = type(told).__name__
                _logger.warning("the step in the state is no int but a %s: saved as step %d; pass step=", kind, step)
        self._newest = step
        return step


class _Process:
    """The places of one process. A forked child makes its own from what was configured."""

    def __init__(self, configured: tuple[Any, ...] | None = None) -> None:
        self.pid = os.getpid()
        self.configured = configured
        self.chosen = None if configured is None else _Place(*configured)
        self.named: dict[str, _Place] = {}
        self.former: list[_Place] = []

    def place(self) -> _Place:
        """The one to save to now.

        Raises:
            ConfigError: If none is named.
        """
        if self.chosen is not None:
            return self.chosen
        path = _named()
        if path not in self.named:
            self.named[path] = _Place(path, StorageConfig.from_env(), {})
        return self.named[path]

    def choose(self, *configured: Any) -> _Place:
        """From now on this one."""
        chosen = _Place(*configured)
        self.former += [] if self.chosen is None else [self.chosen]
        self.chosen, self.configured = chosen, configured
        return chosen

    def all(self) -> list[_Place]:
        """Every one that was saved to."""
        return [*self.former, *self.named.values(), *([] if self.chosen is None else [self.chosen])]


def configure(
    storage_path: str | os.PathLike[str] | None = None, *, config: StorageConfig | None = None, **settings: Any
) -> CheckpointManager:
    """Say where and how `save_checkpoint` and `load_checkpoint` work in this process, on every rank alike.

    Args:
        storage_path: Root of the run, local path or URL; what ``STRATA_STORAGE`` names if not given.
        config: Limits of the store; `StorageConfig.from_env` if not given.
        **settings: Fields of `StorageConfig`, which win over those of `config` and over the environment; arguments of
            `CheckpointManager`, such as ``keep_count=3``.

    Returns:
        The manager, for all that takes more than a line: the best checkpoint, holds, metrics.

    Raises:
        ConfigError: If a setting is unknown or cannot be used, or no place is named.
    """
    unknown = sorted(settings.keys() - _LIMITS - _MANAGING)
    if unknown:
        expected = ", ".join(sorted(_LIMITS | _MANAGING))
        raise ConfigError(f"configure: unknown {', '.join(unknown)}; expected some of {expected}")
    limits = {name: value for name, value in settings.items() if name in _LIMITS}
    managing = {name: value for name, value in settings.items() if name not in _LIMITS}
    path = None if "bucket" in managing else _named() if storage_path is None else storage_path
    config = StorageConfig.from_env(**limits) if config is None else replace(config, **limits)
    return _process().choose(path, config, managing).manager


def save_checkpoint(
    state: Any,
    *,
    step: int | None = None,
    epoch: int = 0,
    checkpoint_type: CheckpointType | str = CheckpointType.FULL,
    metadata: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> CheckpointHandle:
    """Save in the background, on every rank; returns when the state is copied.

    Args:
        state: As for `CheckpointManager.save`, and so is the rest.
        step: Optimizer steps done. If not given: the integer under the state's own key ``step``; without that one more
            than the newest checkpoint's, beginning with 1, and a warning if there is something else under ``step``.
        epoch: Passes over the data done.
        checkpoint_type: What to save.
        metadata: The user's own.
        metrics: The user's own, by which checkpoints are compared.
        overwrite: Whether a checkpoint of this step may be replaced.

    Raises:
        ConfigError: If no place is named, see `configure`, or an argument cannot be used.
        CheckpointError, StrataError: As `CheckpointManager.save`.
    """
    place = _process().place()
    held = held_by(state)
    return place.manager.save(
        held,
        step=place.step_of(held, step),
        epoch=epoch,
        checkpoint_type=checkpoint_type,
        metadata=metadata,
        metrics=metrics,
        overwrite=overwrite,
    )


def load_checkpoint(
    state: dict[str, Any] | None = None, which: int | Literal["latest", "best"] = "latest", *, rng: bool = True
) -> Any:
    """Load a checkpoint, verified, on every rank. Saves that this process has begun there are waited for first.

    Args:
        state: Filled in place; a new one of plain tensors if not given.
        which: As `CheckpointManager.load`.
        rng: Whether the random number generators go on as they did then.

    Returns:
        The state, or the bytes.

    Raises:
        ConfigError: If no place is named, see `configure`.
        CheckpointNotFoundError, CorruptionError, LayoutMismatchError: As `CheckpointManager.load`.
        StrataError: Why a save failed, if nobody has been told.
    """
    manager = _process().place().manager
    manager.wait()
    return manager.load(which, state, rng=rng)


def wait_for_checkpoints() -> None:
    """Wait until every save of `save_checkpoint` is committed, on every rank.

    Raises:
        StrataError: Why one failed, the first that did and of which nobody has been told. The others are waited for
            too.
    """
    failures = []
    for place in _process().all():
        try:
            place.manager.wait()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _named() -> str:
    path = os.environ.get(_VARIABLE, "")
    if not path:
        raise ConfigError(
            f"nowhere to save to: call torch_strata.configure(storage_path=...) or set {_VARIABLE} to a path or URL"
        )
    return path


_the_process: _Process | None = None


def _process() -> _Process:
    global _the_process
    if _the_process is None or _the_process.pid != os.getpid():
        _the_process = _Process(None if _the_process is None else _the_process.configured)
    return _the_process
