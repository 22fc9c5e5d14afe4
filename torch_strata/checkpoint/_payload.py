"""Values out of pickled payloads, with nothing run that the caller does not trust."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["Trusted", "load_tensor", "load_value"]

# A class or function, or one with the full name under which a pickle knows it.
Trusted = Callable[..., Any] | tuple[Callable[..., Any], str]

# Local file header of a zip archive: what torch.save writes. Its older tar and bare pickle forms are refused, since
# torch.load may read such bytes in another way once weights_only is off.
_ZIP_MAGIC = b"PK\x03\x04"

# Bytes and a position: making one runs nothing. Trainers keep what they pickled themselves in it, and torch does not
# load it by default.
_INERT: tuple[Trusted, ...] = (io.BytesIO,)


def load_value(data: bytes, *, fqn: str, where: str, trusted: Sequence[Trusted]) -> Any:
    """The value that was saved under `fqn`.

    Raises:
        CheckpointError: If its pickle names a class outside torch's allow-list and `trusted`.
        CorruptionError: If the bytes are not what ``torch.save`` writes.
    """
    if not data.startswith(_ZIP_MAGIC):
        raise CorruptionError(f"{where}: the value of {fqn!r} is not in torch.save's format: starts with {data[:4]!r}")
    try:
        with safe_globals([*_INERT, *trusted]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = _untrusted_globals(data, trusted)
        if not named:
            raise CheckpointError(f"{where}: torch refuses to load the value of {fqn!r}: {_reason(error)}") from error
        raise CheckpointError(
            f"{where}: the value of {fqn!r} needs {', '.join(named)} to load, which could run any code; if you trust "
            f"this checkpoint, pass trusted_classes=[...] to StrataReader"
        ) from error
    except Exception as error:
        raise CorruptionError(f"{where}: cannot load the value of {fqn!r}: {_reason(error)}") from error


def load_tensor(data: bytes, *, fqn: str, where: str, trusted: Sequence[Trusted]) -> torch.Tensor:
    """A tensor that ``torch.save`` framed.

    Raises:
        CheckpointError: As `load_value`.
        CorruptionError: As `load_value`, or if the value is not a tensor.
    """
    value = load_value(data, fqn=fqn, where=where, trusted=trusted)
    if not isinstance(value, torch.Tensor):
        raise CorruptionError(f"{where}: {fqn!r} should be a tensor, found a {type(value).__name__}")
    return value


def _untrusted_globals(data: bytes, trusted: Sequence[Trusted]) -> list[str]:
    try:
        with safe_globals([*_INERT, *trusted]):
            return sorted(get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # only words for a message that is raised anyway
        return []


def _reason(error: Exception) -> str:
    """The first line of what happened.

    torch wraps a refusal in advice for its own users, colours included, such as to pass ``weights_only=False``: the
    bare reason is the error that it was handling.
    """
    bare = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    lines = str(bare).splitlines()
    return lines[0][:300] if lines else type(bare).__name__
