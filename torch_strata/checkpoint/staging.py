"""A copy of a state_dict on the host, taken before an asynchronous save returns to training.

Never copies a storage behind a view, and never re-uses memory of a save that may still run.
"""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_strata.checkpoint._tensors import is_plain, settled
from torch_strata.errors import CheckpointError

__all__ = ["snapshot"]

# By these DCP knows a plain tensor that is a shard of a larger one (CheckpointableTensor).
_CHECKPOINTABLE = frozenset({"global_shape", "global_offsets", "local_offsets", "local_sizes"})


def snapshot(state: Any) -> Any:
    """A copy that later changes to `state` do not reach: tensors cloned to the CPU, values deep-copied.

    Views that were the same memory stay the same memory (tied weights are copied once); a DTensor keeps its mesh and
    placements.

    Raises:
        CheckpointError: If a value cannot be copied, naming it.
    """
    return _Snapshot().take(state, "")


class _Snapshot:
    """One copy in the making; `memo` keeps what was tied tied."""

    def __init__(self) -> None:
        self._memo: dict[Any, Any] = {}
        # The originals stay alive while their ids and addresses are keys.
        self._kept: list[Any] = []

    def take(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        # Of other mappings a shallow copy may share what holds the items: those are copied deeply below.
        if type(value) in (dict, OrderedDict, defaultdict):
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self.take(item, f"{name}.{key}" if name else str(key))
            return copied
        if type(value) in (list, tuple):
            return type(value)(self.take(item, f"{name}.{i}") for i, item in enumerate(value))
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise CheckpointError(f"cannot copy {name!r} for an asynchronous save: {error}") from error

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        try:
            with torch.no_grad():
                return self._copy(tensor)
        except Exception as error:
            raise CheckpointError(f"cannot copy {name!r} for an asynchronous save: {error}") from error

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            local = self._copy(tensor.to_local())
            return DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.size(),
                stride=tensor.stride(),
            )
        key = _identity(tensor)
        if key not in self._memo:
            self._kept.append(tensor)
            source = settled(tensor)
            clone = source.clone() if source.device.type == "cpu" else source.cpu()
            for attribute in _CHECKPOINTABLE & vars(tensor).keys():
                setattr(clone, attribute, getattr(tensor, attribute))
            self._memo[key] = clone
        return self._memo[key]  # type: ignore[no-any-return]


def _identity(tensor: torch.Tensor) -> Any:
    if not is_plain(tensor) or tensor.data_ptr() == 0:
        return id(tensor)
    storage = tensor.untyped_storage()._cdata
    geometry = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
    return (storage, *geometry, tensor.dtype, tensor.is_conj(), tensor.is_neg())
