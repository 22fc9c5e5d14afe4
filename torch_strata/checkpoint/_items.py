"""From DCP's WriteItems to what the Rust core writes: an address where memory can be lent, bytes where not."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from torch_strata import _native
from torch_strata.checkpoint._columns import SHARD, TENSOR, Columns
from torch_strata.checkpoint._metadata import dtype_name
from torch_strata.checkpoint._paths import decode_fqn, encode_fqn
from torch_strata.checkpoint._payload import warn_of_untrusted
from torch_strata.checkpoint._safetensors import why_not_safetensors
from torch_strata.checkpoint._shortcuts import is_bare, keeps_methods
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
    why_no_memory,
)
from torch_strata.checkpoint.planning import ChosenItems
from torch_strata.checkpoint.save_planner import StrataSavePlanner
from torch_strata.errors import CheckpointError

__all__ = ["NativeItems"]

# By these methods a planner finds what an item is.
_FINDING = ("resolve_data", "lookup_object", "transform_object")

# What many items have in common: offsets, kind, device, bytes, dtype, shape, strides.
_Template = tuple[tuple[int, ...] | None, int, int, int, str, tuple[int, ...], tuple[int, ...]]


class NativeItems:
    """Items as `_native.write_items` takes them: an address where memory can be lent, bytes where not.

    Args:
        for_safetensors: Whether they have to be what safetensors can hold, row-major.
    """

    def __init__(self, *, for_safetensors: bool = False) -> None:
        self._for_safetensors = for_safetensors
        self._items: list[tuple[bytes, int, int, int, Any]] = []  # fqn, index, template, address, keeper
        self._templates: list[_Template] = []
        self._numbers: dict[_Template, int] = {}
        # Of whole tensors of the host, which nearly all are, by offsets, dtype and shape.
        self._plain: dict[tuple[Any, torch.dtype, torch.Size], int] = {}

    def resolve(self, items: Iterable[WriteItem], planner: SavePlanner) -> None:
        """Look up every value before anything is written, so that one that cannot be stored leaves no trace.

        Raises:
            CheckpointError: If a value cannot be stored, naming it.
        """
        if isinstance(items, ChosenItems) and keeps_methods(planner, StrataSavePlanner, *_FINDING):
            items = self._add_planned(items.columns, planner.state_dict)
        resolve, state = _resolver(planner), getattr(planner, "state_dict", {})
        for item in items:
            try:
                data = resolve(item)
                if item.type is WriteItemType.BYTE_IO:
                    self._add_bytes(item, data)
                    warn_of_untrusted(item.index.fqn, state.get(item.index.fqn), data)
                elif not self._add_whole(item, data):
                    self._add_tensor(item, data)
            except CheckpointError:
                raise
            # Whatever a planner or a value's own __reduce__ raises becomes ours: it has to be picklable to reach the
            # other ranks, or they wait for ever.
            except Exception as error:
                fqn = item.index.fqn
                raise CheckpointError(f"cannot store {fqn!r}: {type(error).__name__}: {error}") from error
        if self._for_safetensors:
            self._check_safetensors()
        wait_for_kernels(device for _, _, device, *_ in self._templates)

    def write(
        self,
        store: _native.Store,
        *,
        rank: int,
        save_id: str,
        parent: _native.Parent | None,
        transfer: _native.Transfer,
    ) -> bytes:
        """Write them, but what `parent` holds; the rank's record. Blocks with the GIL released."""
        return _native.write_items(
            store, self._items, self._templates, rank=rank, save_id=save_id, parent=parent, transfer=transfer
        )

    def write_safetensors(self, store: _native.Store, *, rank: int, save_id: str, transfer: _native.Transfer) -> bytes:
        """Write them to files of safetensors; the rank's record. Blocks with the GIL released."""
        return _native.write_safetensors(
            store, self._items, self._templates, rank=rank, save_id=save_id, transfer=transfer
        )

    def value_names(self) -> list[str]:
        """Keys of those that are no tensors."""
        kinds = [kind for _, kind, *_ in self._templates]
        return [decode_fqn(fqn) for fqn, _, number, *_ in self._items if kinds[number] == _native.BYTES]

    def addresses(self) -> Iterator[int]:
        """Where those lie that are on the host."""
        return (address for _, _, number, address, _ in self._items if self._templates[number][2] == HOST)

    def clear(self) -> None:
        """Let go of the values."""
        self._items.clear()

    def _check_safetensors(self) -> None:
        for fqn, _, number, *_ in self._items:
            _, kind, _, _, dtype, shape, _ = self._templates[number]
            if kind == _native.BYTES:
                continue
            name = decode_fqn(fqn)
            why = "a tensor subclass" if kind == _native.TORCH_SAVE else why_not_safetensors(name, dtype, shape)
            if why is not None:
                raise CheckpointError(f"cannot store {name!r}: safetensors cannot hold {why}")

    def _add_planned(self, columns: Columns, state: Mapping[str, Any]) -> list[WriteItem]:
        """Add the whole tensors among the items of a plan of ours, without an object for each; the other items."""
        shared, first, lengths = columns.shared, columns.first_dims, columns.lengths.tolist()
        heads = zip(shared.names, shared.kinds.tolist(), shared.templates.tolist(), columns.hints.tolist(), strict=True)
        left = []
        for row, (fqn, kind, template, hint) in enumerate(heads):
            shape = tuple(lengths[first[row] : first[row + 1]])
            found: Any = state.get(fqn)
            is_whole = kind == TENSOR and is_bare(found)
            whole = (0,) * len(shape)
            if not is_whole or not self._add_plain(fqn, hint, whole, found, shape, shared.table[template].dtype):
                left.append(row)
        rows = np.array(left, dtype=np.int64)
        return columns.taken(rows, columns.hints[rows], shared.kinds[rows] == SHARD, {}).items()

    def _add_whole(self, item: WriteItem, data: Any) -> bool:
        planned, index = item.tensor_data, item.index
        if type(data) not in PLAIN_TYPES or planned is None or index.offset is None:
            return False
        sizes, dtype = planned.chunk.sizes, planned.properties.dtype
        return self._add_plain(index.fqn, _index(item), index.offset, data, sizes, dtype)

    def _add_plain(
        self,
        fqn: str,
        index: int,
        offsets: tuple[int, ...],
        data: torch.Tensor,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> bool:
        """Add what nearly every tensor is, unasked: plain, contiguous, on the host, and as planned."""
        if data.layout is not torch.strided or not data.is_contiguous() or not data.is_cpu:
            return False
        address, shape = data.data_ptr(), data.shape
        if not address or data.is_conj() or data.is_neg() or shape != sizes or data.dtype != dtype:
            return False
        number = self._plain.get((offsets, dtype, shape))
        if number is None:
            if not is_plain(data):
                return False
            layout = dtype_name(dtype), tuple(shape), contiguous_strides(shape)
            number = self._number((tuple(offsets), _native.TENSOR, HOST, data.nbytes, *layout))
            self._plain[offsets, dtype, shape] = number
        self._items.append((encode_fqn(fqn), index, number, address, data))
        return True

    def _add_bytes(self, item: WriteItem, data: Any) -> None:
        if not isinstance(data, io.BytesIO):
            kind = type(data).__name__
            raise CheckpointError(f"cannot store {item.index.fqn!r}: its planner gave a {kind}, not BytesIO")
        self._add(item, (None, _native.BYTES, HOST, 0, "", (), ()), 0, data.getbuffer())

    def _add_tensor(self, item: WriteItem, data: Any) -> None:
        fqn, planned = item.index.fqn, item.tensor_data
        if not isinstance(data, torch.Tensor):
            raise CheckpointError(f"cannot store {fqn!r}: its planner gave a {type(data).__name__}, not a tensor")
        tensor = settled(data)
        if tensor.is_meta:
            raise CheckpointError(f"cannot store {fqn!r}: a tensor on the meta device has no values")
        # DCP gives a reader nothing to load one into: the values would be lost at the load, without a word.
        if (why := why_no_memory(tensor)) is not None:
            raise CheckpointError(f"cannot store {fqn!r}: {why}")
        if planned is not None:
            _check_plan(fqn, tensor, planned.chunk.sizes, planned.properties.dtype)
        offsets = None if item.index.offset is None else tuple(item.index.offset)
        shape = tuple(tensor.shape)
        if not is_plain(tensor) or (tensor.numel() and tensor.data_ptr() == 0 and not _holds_storage(fqn, tensor)):
            dtype, strides = dtype_name(tensor.dtype), contiguous_strides(shape)
            self._add(item, (offsets, _native.TORCH_SAVE, HOST, 0, dtype, shape, strides), 0, _framed(tensor))
            return
        lent = _lendable(tensor, row_major=self._for_safetensors)
        strides = contiguous_strides(shape) if lent.is_contiguous() or not lent.numel() else tuple(lent.stride())
        address = lent.data_ptr() if lent.numel() else 0
        device = device_number(lent) if address else HOST
        template = (offsets, _native.TENSOR, device, lent.nbytes, dtype_name(lent.dtype), shape, strides)
        self._add(item, template, address, lent)

    def _add(self, item: WriteItem, template: _Template, address: int, keeper: Any) -> None:
        self._items.append((encode_fqn(item.index.fqn), _index(item), self._number(template), address, keeper))

    def _number(self, template: _Template) -> int:
        number = self._numbers.setdefault(template, len(self._templates))
        if number == len(self._templates):
            self._templates.append(template)
        return number


def _resolver(planner: SavePlanner) -> Callable[[WriteItem], Any]:
    """`planner.resolve_data`; where that is DCP's own, a tensor that nothing shards is found without a search."""
    if not keeps_methods(planner, DefaultSavePlanner, *_FINDING):
        return planner.resolve_data
    state = planner.state_dict

    def resolve(item: WriteItem) -> Any:
        found, offset = state.get(item.index.fqn), item.index.offset
        if not is_bare(found) or offset is None or any(offset):
            return planner.resolve_data(item)
        return found

    return resolve


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


def _lendable(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    """The tensor itself where its memory can be written as it lies, else a dense copy on the CPU."""
    dense = tensor.is_contiguous() or (not row_major and is_dense(tuple(tensor.shape), tuple(tensor.stride())))
    if dense and is_reachable(tensor) and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    dense = not row_major and is_dense(tuple(tensor.shape), tuple(tensor.stride()))
    return tensor if dense else tensor.contiguous()


def _framed(tensor: torch.Tensor) -> memoryview:
    buffer = io.BytesIO()
    torch.save(tensor.cpu(), buffer)
    return buffer.getbuffer()


def _index(item: WriteItem) -> int:
    return -1 if item.index.index is None else item.index.index
