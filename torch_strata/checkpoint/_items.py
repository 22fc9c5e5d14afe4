"""From DCP's WriteItems to what the Rust core writes: an address where memory can be lent, bytes where not."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from torch_strata import _native
from torch_strata.checkpoint._metadata import dtype_name, encode_fqn
from torch_strata.checkpoint._tensors import (
    HOST,
    PLAIN_TYPES,
    contiguous_strides,
    device_number,
    is_dense,
    is_plain,
    is_reachable,
    settled,
    wait_for_kernels,
)
from torch_strata.errors import CheckpointError

__all__ = ["NativeItem", "resolve_items"]

# As `_native.write_items` takes them: fqn, offsets, index, kind, device, address, bytes, dtype, shape, strides, keeper.
NativeItem = tuple[bytes, tuple[int, ...] | None, int, int, int, int, int, str, tuple[int, ...], tuple[int, ...], Any]


def resolve_items(items: Iterable[WriteItem], planner: SavePlanner) -> list[NativeItem]:
    """Look up every value before anything is written, so that one that cannot be stored leaves no trace.

    Raises:
        CheckpointError: If a value cannot be stored, naming it.
    """
    resolved: list[NativeItem] = []
    resolve = _resolver(planner)
    for item in items:
        fqn = item.index.fqn
        try:
            data = resolve(item)
            if item.type is WriteItemType.BYTE_IO:
                resolved.append(_bytes_item(item, data))
            else:
                resolved.append(_whole_item(item, data) or _tensor_item(item, data))
        except CheckpointError:
            raise
        # Whatever a planner or a value's own __reduce__ raises becomes ours: it has to be picklable to reach the
        # other ranks, or they wait for ever.
        except Exception as error:
            raise CheckpointError(f"cannot store {fqn!r}: {type(error).__name__}: {error}") from error
    wait_for_kernels(device for _, _, _, _, device, *_ in resolved)
    return resolved


def _resolver(planner: SavePlanner) -> Callable[[WriteItem], Any]:
    """`planner.resolve_data`; where that is DCP's own, a tensor that nothing shards is found without a search.

    DCP asks of each object whether it implements a protocol, which takes longer than all that a save does with it.
    """
    if not isinstance(planner, DefaultSavePlanner):
        return planner.resolve_data
    methods = (planner.resolve_data, planner.lookup_object, planner.transform_object)
    own = [DefaultSavePlanner.resolve_data, DefaultSavePlanner.lookup_object, DefaultSavePlanner.transform_object]
    if [getattr(method, "__func__", None) for method in methods] != own:
        return planner.resolve_data
    state = planner.state_dict

    def resolve(item: WriteItem) -> Any:
        found, offset = state.get(item.index.fqn), item.index.offset
        # An attribute could make a plain tensor one that DCP asks for its shards.
        if type(found) not in PLAIN_TYPES or vars(found) or offset is None or any(offset):
            return planner.resolve_data(item)
        return found

    return resolve


def _whole_item(item: WriteItem, data: Any) -> NativeItem | None:
    """What nearly every tensor is, without further questions: plain, contiguous, on the host, and as planned."""
    if type(data) not in PLAIN_TYPES or data.layout is not torch.strided or not data.is_contiguous():
        return None
    address, planned, index = data.data_ptr() if data.device.type == "cpu" else 0, item.tensor_data, item.index
    if not address or planned is None or index.offset is None or data.is_conj() or data.is_neg() or not is_plain(data):
        return None
    shape, dtype = data.shape, data.dtype
    if shape != planned.chunk.sizes or dtype != planned.properties.dtype:
        return None
    place = encode_fqn(index.fqn), tuple(index.offset), _index(item)
    layout = dtype_name(dtype), tuple(shape), contiguous_strides(shape)
    return (*place, _native.TENSOR, HOST, address, data.nbytes, *layout, data)


def _bytes_item(item: WriteItem, data: Any) -> NativeItem:
    if not isinstance(data, io.BytesIO):
        raise CheckpointError(f"cannot store {item.index.fqn!r}: its planner gave a {type(data).__name__}, not BytesIO")
    return (encode_fqn(item.index.fqn), None, _index(item), _native.BYTES, HOST, 0, 0, "", (), (), data.getbuffer())


def _tensor_item(item: WriteItem, data: Any) -> NativeItem:
    fqn, planned = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor):
        raise CheckpointError(f"cannot store {fqn!r}: its planner gave a {type(data).__name__}, not a tensor")
    tensor = settled(data)
    if tensor.is_meta:
        raise CheckpointError(f"cannot store {fqn!r}: a tensor on the meta device has no values")
    if tensor.layout is not torch.strided:
        # DCP gives a reader nothing to load one into: the values would be lost at the load, without a word.
        raise CheckpointError(f"cannot store {fqn!r}: its layout is {tensor.layout}, DCP loads torch.strided only")
    if planned is not None:
        _check_plan(fqn, tensor, planned.chunk.sizes, planned.properties.dtype)
    offsets = None if item.index.offset is None else tuple(item.index.offset)
    head = (encode_fqn(fqn), offsets, _index(item))
    shape = tuple(tensor.shape)
    if not is_plain(tensor) or (tensor.numel() and tensor.data_ptr() == 0 and not _holds_storage(fqn, tensor)):
        dtype, strides = dtype_name(tensor.dtype), contiguous_strides(shape)
        return (*head, _native.TORCH_SAVE, HOST, 0, 0, dtype, shape, strides, _framed(tensor))
    lent = _lendable(tensor)
    strides = contiguous_strides(shape) if lent.is_contiguous() or not lent.numel() else tuple(lent.stride())
    address = lent.data_ptr() if lent.numel() else 0
    device = device_number(lent) if address else HOST
    return (*head, _native.TENSOR, device, address, lent.nbytes, dtype_name(lent.dtype), shape, strides, lent)


def _check_plan(fqn: str, tensor: torch.Tensor, sizes: torch.Size, dtype: torch.dtype) -> None:
    # A cached plan ignores dtypes, so what it promises may no longer be what the state holds.
    if tensor.shape != sizes or tensor.dtype != dtype:
        raise CheckpointError(
            f"cannot store {fqn!r}: the plan says {dtype} {tuple(sizes)}, the state holds "
            f"{tensor.dtype} {tuple(tensor.shape)}; a planner with enable_plan_caching does not notice such a change"
        )


def _holds_storage(fqn: str, tensor: torch.Tensor) -> bool:
    """False for a plain tensor without accessible memory.

    Raises:
        CheckpointError: If its storage was freed (as FSDP does with a gathered parameter).
    """
    if tensor.untyped_storage().nbytes() == 0:
        raise CheckpointError(f"cannot store {fqn!r}: its storage was freed, {tensor.nbytes} bytes are missing")
    return False


def _lendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its memory can be written as it lies, else a dense copy on the CPU."""
    dense = tensor.is_contiguous() or is_dense(tuple(tensor.shape), tuple(tensor.stride()))
    if dense and is_reachable(tensor) and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    return tensor if is_dense(tuple(tensor.shape), tuple(tensor.stride())) else tensor.contiguous()


def _framed(tensor: torch.Tensor) -> memoryview:
    buffer = io.BytesIO()
    torch.save(tensor.cpu(), buffer)
    return buffer.getbuffer()


def _index(item: WriteItem) -> int:
    return -1 if item.index.index is None else item.index.index
