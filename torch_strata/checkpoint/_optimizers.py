"""What only an optimizer's step changes, and steps that wait while that is copied."""

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_strata.errors import ConfigError

__all__ = ["check_optimizers", "hold_steps", "storages_of"]

# Hooks before a step, by what they wait for.
_fences: list[tuple[threading.Event, Any]] = []


def check_optimizers(value: object) -> tuple[torch.optim.Optimizer, ...]:
    """`value` as optimizers: one, or several.

    Raises:
        ConfigError: If it is something else.
    """
    optimizers = (value,) if not isinstance(value, list | tuple) else tuple(value)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"overlap: expected optimizers, found a {type(optimizer).__name__}")
    return optimizers


def storages_of(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """The addresses of torch's storage objects (`_cdata`) of all parameters and states."""
    values: list[Any] = []
    for optimizer in optimizers:
        values += [tensor for group in optimizer.param_groups for tensor in group["params"]]
        values += [value for state in optimizer.state.values() for value in state.values()]
    return frozenset(_local(value).untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def hold_steps(optimizers: Sequence[torch.optim.Optimizer], ended: threading.Event) -> None:
    """Let no step of `optimizers` begin before `ended` is set."""
    # A hook cannot remove itself, torch is going through the hooks then: the next save removes those that have passed.
    for passed in [fence for fence in _fences if fence[0].is_set()]:
        passed[1].remove()
        _fences.remove(passed)
    pid = os.getpid()

    def wait(*_: Any) -> None:
        # In a forked child nobody copies, and its tensors are its own.
        if os.getpid() == pid:
            ended.wait()

    _fences.extend((ended, optimizer.register_step_pre_hook(wait)) for optimizer in optimizers)
