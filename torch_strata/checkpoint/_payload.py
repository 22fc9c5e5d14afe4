"""Values out of pickled payloads, with nothing run that the caller does not trust."""

import io
import logging
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["Trusted", "load_tensor", "load_value", "warn_of_untrusted"]

_logger = logging.getLogger(__name__)

# A class or function, or one with the full name under which a pickle knows it.
Trusted = Callable[..., Any] | tuple[Callable[..., Any], str]

# Local file header of a zip archive: what torch.save writes. Its older tar and bare pickle forms are refused, since
# torch.load may read such bytes in another way once weights_only is off.
_ZIP_MAGIC = b"PK\x03\x04"

# Bytes and a position: making one runs nothing. Trainers keep what they pickled themselves in it, and torch does not
# load it by default.
_INERT: tuple[Trusted, ...] = (io.BytesIO,)

# Of values that any load takes; of others, by what was looked at in this process already.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, tuple, list, set, frozenset)
_looked_at: set[type] = set(_PLAIN)
_told: set[str] = {"_io.BytesIO"}


def warn_of_untrusted(fqn: str, value: Any, data: io.BytesIO) -> None:
    """Say, once a class and process, that what is saved loads only where that is trusted.

    Args:
        fqn: Its key.
        value: What is saved.
        data: As torch.save wrote it.
    """
    unknown = _unknown_types(value)
    if not unknown:
        return
    _looked_at.update(unknown)
    try:
        named = set(get_unsafe_globals_in_checkpoint(io.BytesIO(data.getbuffer()))) - _told
    except Exception:  # not torch.save's format: whoever planned it also loads it
        return
    if named:
        _told.update(named)
        _logger.warning(
            "%r is saved, but loads only where what its pickle names is trusted, which could run any code: pass "
            "trusted_classes=[...] with %s to CheckpointManager or StrataReader, or save a plain value or a tensor",
            *(fqn, _in_words(named)),
        )


def _unknown_types(value: Any) -> set[type]:
    unknown: set[type] = set()
    entered: set[int] = set()  # one that holds itself has no end
    left = [value]
    while left:
        found = left.pop()
        if type(found) not in _CONTAINERS:
            unknown |= {type(found)} - _looked_at
        elif id(found) not in entered:
            entered.add(id(found))
            left += [*found, *found.values()] if isinstance(found, dict) else found
    return unknown


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
            f"{where}: the value of {fqn!r} needs {_in_words(named)} to load, which could run any code; if you trust "
            f"this checkpoint, pass trusted_classes=[...] to StrataReader or CheckpointManager"
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
            return get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # only words for a message that is raised anyway
        return []


def _in_words(named: Collection[str]) -> str:
    """What a pickle names, and what torch asks for besides: the class of a dtype of NumPy's, which no pickle names."""
    names = ", ".join(sorted(named))
    if "numpy.dtype" not in named:
        return names
    return f"{names} and the classes of its dtypes, such as numpy.dtypes.UInt32DType,"


def _reason(error: Exception) -> str:
    """The first line of what happened.

    torch wraps a refusal in advice for its own users, colours included, such as to pass ``weights_only=False``: the
    bare reason is the error that it was handling.
    """
    bare = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    lines = str(bare).splitlines()
    return lines[0][:300] if lines else type(bare).__name__
