"""Where each item of a load goes, and what is refused before the first byte of a destination changes. Reads nothing."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torch_strata import _native
from torch_strata.checkpoint._metadata import dtype_of
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._part import Part
from torch_strata.checkpoint._shortcuts import is_bare, keeps_methods
from torch_strata.checkpoint._tensors import PLAIN_TYPES, overlaps_itself, settled
from torch_strata.errors import CheckpointError, CorruptionError, LayoutMismatchError, StrataError

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["check_coverage", "check_framed", "check_value", "finds_plainly", "guarded", "resolve_parts"]


def check_coverage(opened: Opened, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Whether what one rank saved on its own fills every destination; of whole checkpoints the chunks tile each tensor.

    Only of DCP's own planners, which show their state.

    Raises:
        LayoutMismatchError: If a part of a destination would keep its values.
    """
    if not isinstance(planner, DefaultLoadPlanner) or planner.metadata is None:
        return
    filled: Counter[str] = Counter()
    for item in plan.items:
        filled[item.dest_index.fqn] += math.prod(item.lengths)
    for fqn, value in planner.state_dict.items():
        if not isinstance(value, torch.Tensor) or fqn not in planner.metadata.state_dict_metadata:
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        if filled[fqn] < local.numel():
            raise LayoutMismatchError(
                f"{opened.where}: {fqn!r}: of {local.numel()} elements to load this rank saved {filled[fqn]}; ranks "
                "that saved on their own (use_collectives=False) have only their own parts"
            )


def check_value(opened: Opened, part: Part, planner: LoadPlanner) -> None:
    """Look at what a value will replace, which DCP's own planners let us do.

    Raises:
        LayoutMismatchError: If that is a tensor.
        CorruptionError: If a tensor is stored under the name.
    """
    if part.kind != _native.BYTES and not part.transforms:
        raise CorruptionError(f"{opened.where}: {part.fqn!r}: the index says a pickled value, a tensor is stored")
    if isinstance(planner, DefaultLoadPlanner):
        template = planner.state_dict.get(part.item.dest_index.fqn)
        if isinstance(template, torch.Tensor):
            raise LayoutMismatchError(
                f"{opened.where}: {part.fqn!r} is stored as a pickled value, the state to load into holds a tensor "
                f"of {template.dtype} {tuple(template.shape)}"
            )


def resolve_parts(opened: Opened, parts: Sequence[Part], planner: LoadPlanner, *, allow_dtype_cast: bool) -> None:
    """Ask the planner for the destination of each tensor, and compare it with what is stored.

    Raises:
        LayoutMismatchError: If a destination has another dtype, shape or kind.
        CorruptionError: If what is stored is not what the index says.
        CheckpointError: If the planner's own code fails.
    """
    resolve = _resolver(planner)
    for part in parts:
        _resolve(opened, part, guarded(part, resolve, part.item), allow_dtype_cast)


def finds_plainly(planner: LoadPlanner) -> "TypeGuard[DefaultLoadPlanner]":
    """Whether a tensor goes into what the planner's state holds under its name, and nobody is told of it."""
    return keeps_methods(
        planner, DefaultLoadPlanner, "resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor"
    )


def check_framed(where: str, part: Part, stored: torch.Tensor, *, allow_dtype_cast: bool) -> None:
    """Compare a tensor that was stored as a pickle with its destination.

    Raises:
        LayoutMismatchError: If the destination has another dtype or quantizer.
        CorruptionError: If the planned region does not lie in the tensor.
    """
    name = f"{where}: {part.fqn!r}"
    _check_dtype(name, stored.dtype, part.target.dtype, allow_dtype_cast)
    _check_quantizer(name, stored, part.target)
    _check_region(name, tuple(stored.shape), part.item)


def guarded(part: Part, call: Callable[..., Any], *args: Any) -> Any:
    """Run a planner's code; its errors become ours, which can be pickled to the other ranks.

    Raises:
        CheckpointError: What the code raised, unless that was ours already.
    """
    try:
        return call(*args)
    except StrataError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot load {part.fqn!r}: {type(error).__name__}: {error}") from error


def _resolver(planner: LoadPlanner) -> Callable[[ReadItem], Any]:
    """`planner.resolve_tensor`; where that is DCP's own, a tensor that nothing shards is found without a search."""
    if not keeps_methods(planner, DefaultLoadPlanner, "resolve_tensor", "lookup_tensor"):
        return planner.resolve_tensor
    transforms = not finds_plainly(planner)

    def resolve(item: ReadItem) -> Any:
        index = item.dest_index
        found = planner.state_dict.get(index.fqn)
        if not is_bare(found):
            return planner.resolve_tensor(item)
        if index.offset is None or any(index.offset) or len(index.offset) != found.dim():
            return planner.resolve_tensor(item)
        if transforms or item.lengths != found.shape or any(item.dest_offsets):
            return planner.transform_tensor(item, found)
        return found

    return resolve


def _resolve(opened: Opened, part: Part, found: Any, allow_dtype_cast: bool) -> None:
    item = part.item
    if type(found) in PLAIN_TYPES and not part.is_blob and part.kind == _native.TENSOR:
        target = part.target = found.detach()
        shape = tuple(target.shape)
        # What nearly every tensor is: as it was stored, in the host's memory.
        if (
            shape == part.shape == item.lengths
            and target.device.type == "cpu"
            and target.is_contiguous()
            and target.dtype == dtype_of(part.dtype)
            and not any(item.storage_offsets)
        ):
            part.is_whole = True
            return
    _resolve_unlike(opened, part, found, allow_dtype_cast)


def _resolve_unlike(opened: Opened, part: Part, found: Any, allow_dtype_cast: bool) -> None:
    item, name = part.item, f"{opened.where}: {part.fqn!r}"
    if not isinstance(found, torch.Tensor):
        raise LayoutMismatchError(f"{name} is a tensor, the state to load into holds a {type(found).__name__}")
    part.target = settled(found)
    lengths = tuple(item.lengths)
    if tuple(part.target.shape) != lengths:
        raise LayoutMismatchError(f"{name}: {lengths} were planned, the destination is {tuple(part.target.shape)}")
    if part.target.is_meta:
        raise LayoutMismatchError(f"{name}: the destination is on the meta device and has no memory")
    if part.target.layout is torch.strided and overlaps_itself(lengths, tuple(part.target.stride())):
        raise LayoutMismatchError(
            f"{name}: the destination's elements share memory (an expanded view, strides {tuple(part.target.stride())})"
        )
    if part.kind == _native.BYTES and not part.is_blob:
        raise CorruptionError(f"{name}: the index says a tensor, a pickled value is stored")
    if part.is_blob:
        return
    _check_dtype(name, dtype_of(part.dtype), part.target.dtype, allow_dtype_cast)
    _check_region(name, part.shape, item)


def _check_dtype(name: str, stored: torch.dtype, wanted: torch.dtype, allow_dtype_cast: bool) -> None:
    if stored != wanted and not allow_dtype_cast:
        raise LayoutMismatchError(
            f"{name}: stored dtype {stored}, destination dtype {wanted}; pass "
            "allow_dtype_cast=True to StrataReader or CheckpointManager to convert"
        )


def _check_quantizer(name: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
    # copy_() between quantized tensors moves the integers and leaves scale and zero point: other numbers.
    if stored.is_quantized and wanted.is_quantized and _quantizer(stored) != _quantizer(wanted):
        raise LayoutMismatchError(
            f"{name}: stored with the quantizer {_quantizer(stored)}, the destination has {_quantizer(wanted)}"
        )


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), tensor.q_per_channel_axis(), *(values.tolist() for values in channels)


def _check_region(name: str, shape: tuple[int, ...], item: ReadItem) -> None:
    first, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    inside = len(first) == len(lengths) == len(shape) and all(
        f >= 0 and n >= 0 and f + n <= s for f, n, s in zip(first, lengths, shape, strict=True)
    )
    if not inside:
        raise CorruptionError(f"{name}: {lengths} at {first} do not lie in the stored {shape}")
