"""When DCP's planners need not be asked, because what they would do is known. Decides, does nothing."""

from typing import TYPE_CHECKING, TypeVar

from torch_strata.checkpoint._tensors import PLAIN_TYPES

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch

__all__ = ["is_bare", "keeps_methods"]

_Owner = TypeVar("_Owner")


def is_bare(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether DCP takes it as one tensor: one without attributes, which could make it one that is asked for its shards.

    DCP asks each object whether it implements a protocol. That takes longer than all else that is done with it.
    """
    return type(value) in PLAIN_TYPES and not vars(value)


def keeps_methods(planner: object, owner: type[_Owner], *names: str) -> "TypeGuard[_Owner]":
    """Whether `planner` is an `owner` and overrides none of these methods."""
    return isinstance(planner, owner) and all(
        getattr(getattr(planner, name), "__func__", None) is getattr(owner, name) for name in names
    )
