"""What tells that a state changed while it was copied, and that a model did not change although steps were counted.

Looks at nothing on a device, and at the content of no tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torch_strata.checkpoint._leaves import LISTS, MAPPINGS, Leaves
from torch_strata.checkpoint._paths import Path, dotted
from torch_strata.checkpoint._tensors import PLAIN_TYPES

__all__ = ["StaleAlarm", "TensorWatch", "changed_values", "in_words"]

_PLAIN_TYPES = frozenset(PLAIN_TYPES)

_UNCHANGING = (int, float, bool, str, bytes, type(None))

# More names do not help whoever reads the log.
_MAX_NAMES = 3


class TensorWatch:
    """Knows of tensors whether they were written to since it was made, by the count that autograd keeps of that.

    That count is not told of what is written through ``.data``, NumPy or a fused optimizer; of the last the tensors
    ``step`` in its state tell.
    """

    def __init__(self, leaves: Leaves, *, passed_over: Collection[int] = ()) -> None:
        """Begin to watch.

        Args:
            leaves: The tensors.
            passed_over: Addresses of torch's storage objects (`_cdata`) whose tensors may be written to.
        """
        self._paths, self._tensors = leaves.paths, leaves.local_tensors
        self._passed_over = passed_over
        self._before = _versions(self._tensors)

    def changed(self) -> list[str]:
        """Names of those that were written to."""
        now = _versions(self._tensors)
        if now == self._before:
            return []
        rows = zip(self._paths, self._tensors, self._before, now, strict=True)
        written = [(path, tensor) for path, tensor, before, after in rows if before != after]
        return [_name(path) for path, tensor in written if tensor.untyped_storage()._cdata not in self._passed_over]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each was written to; None where nothing counts that: in inference, and in types of others."""
    if set(map(type, tensors)) <= _PLAIN_TYPES:
        try:
            return [tensor._version for tensor in tensors]
        except RuntimeError:  # there are some of inference
            pass
    return [
        tensor._version if type(tensor) in PLAIN_TYPES and not tensor.is_inference() else None for tensor in tensors
    ]


def changed_values(state: Mapping[Any, Any], copied: Mapping[Any, Any]) -> list[str]:
    """Names of numbers, strings and containers in `state` that are not any more as they were `copied`.

    Objects of other kinds, which are deep-copied, are not compared.
    """
    found: list[str] = []
    try:
        _compare(state, copied, (), found)
    except RuntimeError:  # a dict that changes while it is gone through
        found.append("the state")
    return found


def _compare(now: Any, copied: Any, path: Path, found: list[str]) -> None:
    """Compare two containers of the same kind."""
    if len(now) != len(copied):
        found.append(_name(path))
        return
    is_mapping = type(now) in MAPPINGS
    for key, item in now.items() if is_mapping else enumerate(now):
        kind = type(item)
        if kind in PLAIN_TYPES:
            continue
        if is_mapping and key not in copied:
            found.append(_name((*path, str(key))))
            continue
        other = copied[key]
        if item is other:
            continue
        if kind in MAPPINGS or kind in LISTS:
            if type(other) is kind:
                _compare(item, other, (*path, str(key)), found)
            else:
                found.append(_name((*path, str(key))))
        elif kind in _UNCHANGING and (type(other) is not kind or item != other):
            found.append(_name((*path, str(key))))


def _name(path: Path) -> str:
    return dotted(path) or "the state"


def in_words(names: Sequence[str]) -> str:
    """The first of `names`, and how many there are beside."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


class StaleAlarm:
    """Finds checkpoints with the same model as the one before, of another step. Says it once in a row."""

    def __init__(self) -> None:
        # By what is saved: step and model_hash of the newest checkpoint, and whether it has been told of.
        self._newest: dict[str, tuple[int, str | None, bool]] = {}

    def knows(self, kind: str) -> bool:
        """Whether there has been a checkpoint of that kind."""
        return kind in self._newest

    def note(self, kind: str, step: int, model_hash: str | None) -> tuple[bool, str]:
        """Take notice of a checkpoint.

        Args:
            kind: What is compared with each other.
            step: Optimizer steps done.
            model_hash: As `CheckpointMetadata.model_hash`.

        Returns:
            Whether it is stale, and what to tell of that; empty if it was told before.
        """
        before, before_hash, was_told = self._newest.get(kind, (step, None, False))
        is_stale = model_hash is not None and model_hash == before_hash and step > before
        self._newest[kind] = (step, model_hash, is_stale or (was_told and step == before))
        if not is_stale or was_told:
            return is_stale, ""
        return True, (
            f"the model at step {step} is the one of step {before}, bit for bit, although steps were done: is "
            "what is saved what is trained? (said once, until it changes)"
        )
