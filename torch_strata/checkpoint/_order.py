"""What is to be saved of a run, checked. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_strata import _native
from torch_strata._store import check_flag
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.errors import ConfigError

if TYPE_CHECKING:
    from torch_strata._types import RunInfo

__all__ = ["SaveOrder", "check_name", "check_step", "folder_of", "make_order"]


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What is to be saved of a run.

    Attributes:
        step: Optimizer steps done.
        epoch: Passes over the data done.
        checkpoint_type: What it will hold.
        metadata: The user's own.
        metrics: The user's own, by which checkpoints are compared.
        overwrite: Whether a checkpoint of this step may be replaced.
    """

    step: int
    epoch: int
    checkpoint_type: CheckpointType
    metadata: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False

    @property
    def folder(self) -> str:
        """Its folder's name below the run's root."""
        return _native.run_folder(self.step, self.checkpoint_type.value)

    def as_native(self) -> "RunInfo":
        """As `_native.commit` takes it."""
        return self.step, self.epoch, self.checkpoint_type.value, dict(self.metadata), dict(self.metrics)


def make_order(
    step: int,
    epoch: int,
    checkpoint_type: CheckpointType | str,
    metadata: Mapping[str, str] | None,
    metrics: Mapping[str, float] | None,
    *,
    overwrite: bool,
) -> SaveOrder:
    """What is to be saved, see `SaveOrder`.

    Raises:
        ConfigError: If an argument cannot be used.
    """
    kind = _check_type(checkpoint_type)
    if type(epoch) is not int or not 0 <= epoch < 1 << 63:
        raise ConfigError(f"epoch: expected an int from 0 to 2**63 - 1, found {epoch!r}")
    for key, value in _items("metadata", metadata, "str"):
        if not _is_text(value):
            raise ConfigError(f"metadata: expected str to str, found {key!r}: {value!r:.200}")
    numbers = {key: _number(key, value) for key, value in _items("metrics", metrics, "a number")}
    return SaveOrder(
        step=check_step(step),
        epoch=epoch,
        checkpoint_type=kind,
        metadata=dict(metadata or {}),
        metrics=numbers,
        overwrite=check_flag("overwrite", overwrite),
    )


def check_step(step: object) -> int:
    """`step`, if it is one.

    Raises:
        ConfigError: If it is not.
    """
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise ConfigError(f"step: expected an int from 0 to 2**63 - 1, found {step!r}")
    return step


def check_name(who: object) -> None:
    """Refuse what cannot be the name of a holder.

    Raises:
        ConfigError: If it cannot.
    """
    if not _is_text(who) or not who or "/" in str(who):
        raise ConfigError(f"who: expected a name without a slash, found {who!r}")


def folder_of(step: object, checkpoint_type: CheckpointType | str) -> str:
    """Name, below the run's root, of the folder of such a checkpoint.

    Raises:
        ConfigError: If there are no such checkpoints.
    """
    return _native.run_folder(check_step(step), _check_type(checkpoint_type).value)


def _check_type(checkpoint_type: CheckpointType | str) -> CheckpointType:
    try:
        return CheckpointType(checkpoint_type)
    except ValueError:
        expected = ", ".join(CheckpointType)
        raise ConfigError(f"checkpoint_type: expected {expected}, found {checkpoint_type!r}") from None


def _items(name: str, given: object, to: str) -> Iterable[tuple[str, Any]]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: expected a mapping of str to {to}, found a {type(given).__name__}")
    for key in given:
        if not _is_text(key):
            raise ConfigError(f"{name}: expected str to {to}, found the key {key!r}")
    return given.items()


def _is_text(value: object) -> bool:
    """Whether it is a str that can be written: lone surrogates cannot."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _number(key: str, value: Any) -> float:
    if isinstance(value, str | bytes | bytearray | bool):
        raise ConfigError(f"metrics: expected numbers, found {key!r}: {value!r:.200}")
    try:
        return float(value)  # a tensor of one element too
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"metrics: expected numbers, found {key!r}: {value!r:.200}: {error!s:.200}") from None
