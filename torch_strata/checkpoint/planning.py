"""Planning a save as functions: a compact plan of each rank, one plan of all. Needs no process group and sends nothing.

    mine = local_plan(state)                  # on each rank; pickles to some kilobytes
    plans, metadata = merge(all_of_them)      # on the planning rank, given every rank's plan in order
    final = finished(plans[rank], mine)       # on each rank: what it writes

`StrataSavePlanner` is the same for `torch.distributed.checkpoint`.
"""

import functools
import hashlib
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_strata.checkpoint._assignment import Copied
from torch_strata.checkpoint._columns import SHARD, TENSOR, Builder, Columns, forget_unpacked, unpack
from torch_strata.checkpoint._gc import gc_paused, give_back_memory
from torch_strata.checkpoint._lazy_state import Chunks, LazyState, PlannedMetadata
from torch_strata.checkpoint._merge import Merged, Selection, merge_columns
from torch_strata.checkpoint._shortcuts import is_bare
from torch_strata.checkpoint._tensors import PLAIN_TYPES, is_dense, why_no_memory
from torch_strata.errors import CheckpointError

__all__ = ["CompactItems", "PackedItems", "compact", "finished", "local_plan", "merge", "packed_plan", "structure_key"]

# Plans of all ranks that were merged last: a training has one structure, a second one for what it also saves.
_KEPT = 2
_merged: "OrderedDict[bytes, tuple[Merged, Chunks]]" = OrderedDict()


class PackedItems(Sequence[WriteItem]):
    """Items of a plan as columns: WriteItems are made when somebody looks, and pickling is short."""

    def __init__(
        self,
        columns: Columns | None = None,
        packed: tuple[bytes, bytes, bytes] | None = None,
        copied: Copied | None = None,
    ) -> None:
        self._columns = columns
        self._packed = packed
        # What alone the rank has copied, if not everything.
        self.copied = copied
        self._items: list[WriteItem] | None = None

    @property
    def columns(self) -> Columns:
        """The items as columns."""
        if self._columns is None:
            if self._packed is None:
                raise CheckpointError("items of a plan that finished() has not yet given its rank's own plan")
            self._columns = unpack(*self._packed[:2])
        return self._columns

    @property
    def digest(self) -> bytes:
        """16 bytes that differ where any item does."""
        return self.columns.digest if self._packed is None else self._packed[2]

    def forget(self) -> None:
        """Let go of the columns, where what they were unpacked from is there."""
        if self._packed is not None:
            self._columns = None

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        return self._all()[index]

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self._all())

    def _all(self) -> list[WriteItem]:
        if self._items is None:
            with gc_paused():
                self._items = self.columns.items()
        return self._items

    def __reduce__(self) -> tuple[Any, ...]:
        if self._packed is None:
            self._packed = (*self.columns.packed, self.columns.digest)
        return PackedItems, (None, self._packed, self.copied)

    def limited_to(self, copied: Copied) -> "PackedItems":
        """The same items, of which only `copied` is copied."""
        return PackedItems(self._columns, self._packed, copied)


class ChosenItems(PackedItems):
    """What one rank writes of its plan. Only the choice travels: the rank has the plan.

    `key` names the plan of all ranks; empty if the same offers might be assigned otherwise another time.
    """

    def __init__(self, offered: PackedItems | None, selection: Selection, key: bytes = b"") -> None:
        super().__init__()
        self.selection = selection
        self.offered = offered
        self.key = key

    @property
    def columns(self) -> Columns:
        """The items as columns."""
        if self._columns is None and self.offered is not None:
            self._columns = self.selection.of(self.offered.columns)
        return super().columns

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenItems, (None, self.selection, self.key)


class CompactItems(list[WriteItem]):
    """A list of WriteItems that pickles as columns where they can hold it, and arrives as a list."""

    def __reduce__(self) -> tuple[Any, ...]:
        with gc_paused():
            columns = _columns_of(self)
        return (list, (list(self),)) if columns is None else (Columns.items, (columns,))


def compact(items: list[WriteItem]) -> list[WriteItem]:
    """The items of any planner's plan, which are short when they travel."""
    return CompactItems(items) if type(items) is list else items


def _columns_of(items: Sequence[WriteItem]) -> Columns | None:
    builder = Builder()
    return builder.columns() if all(map(builder.add_item, items)) else None


class _Paths:
    """Where each flat name stands in the nested state; unpacked once for all ranks that sent the same."""

    def __init__(self, mapping: Mapping[str, Any] | None = None, packed: bytes = b"") -> None:
        self._mapping = mapping
        self._packed = packed

    @property
    def packed(self) -> bytes:
        if not self._packed:
            self._packed = zlib.compress(pickle.dumps(self._mapping, protocol=5), 1)
        return self._packed

    @property
    def mapping(self) -> Mapping[str, Any]:
        if self._mapping is None:
            self._mapping = _unpacked_paths(self._packed)
        return self._mapping

    def __reduce__(self) -> tuple[Any, ...]:
        return _Paths, (None, self.packed)


@functools.lru_cache(maxsize=64)
def _unpacked_paths(packed: bytes) -> Mapping[str, Any]:
    return pickle.loads(zlib.decompress(packed))  # type: ignore[no-any-return]


@gc_paused()
def local_plan(
    state: Mapping[str, Any], *, paths: Mapping[str, Any] | None = None, whole_chunks: bool = False
) -> SavePlan:
    """What this rank can write: every chunk it holds, and every value.

    Args:
        state: A state_dict; nested ones are flattened as DCP does.
        paths: Where each name stands in the nested state, if `state` is flat already.
        whole_chunks: Whether ranks that hold the same chunk may not share it by rows.

    Raises:
        CheckpointError: If a tensor is sparse or nested in a way that cannot be planned, naming it.
    """
    if paths is None:
        state, paths = flatten_state_dict(dict(state))
    try:
        items = _items_of(state, divides=not whole_chunks)
    except Exception:
        # torch's own words for it name no key.
        for fqn, value in state.items():
            if isinstance(value, torch.Tensor) and (why := why_no_memory(value)) is not None:
                raise CheckpointError(f"cannot store {fqn!r}: {why}") from None
        raise
    return SavePlan(items, planner_data=_Paths(paths))  # type: ignore[arg-type]


def packed_plan(items: Sequence[WriteItem], paths: Mapping[str, Any]) -> SavePlan:
    """A plan for `merge` of items that somebody else made; `paths` as in `local_plan`.

    Raises:
        CheckpointError: If an item says what DCP's own never do.
    """
    columns = _columns_of(items)
    if columns is None:
        raise CheckpointError("an item of the plan is of a foreign class, or says what DCP's items do not")
    return SavePlan(PackedItems(columns), planner_data=_Paths(paths))  # type: ignore[arg-type]


def structure_key(state: Mapping[str, Any]) -> bytes:
    """16 bytes that differ where a name, kind, dtype, shape, stride, offset or size of a shard does; not for values."""
    items = local_plan(state).items
    if isinstance(items, PackedItems):
        return items.digest
    return hashlib.blake2b(repr(items).encode("utf-8", "surrogatepass"), digest_size=16).digest()


@gc_paused()
def merge(plans: Sequence[SavePlan], *, to_lowest_rank: bool = False) -> tuple[list[SavePlan], Metadata]:
    """One plan of all: each chunk is written once, ranks write about as many bytes, and chunks tile their tensors.

    Plans that were merged before cost a comparison of their digests.

    Args:
        plans: Every rank's `local_plan`, by rank.
        to_lowest_rank: Whether the lowest rank that holds a chunk writes all of it.

    Raises:
        LayoutMismatchError: If the plans do not fit together, naming tensors, ranks and regions.
        CheckpointError: If no rank has copied a tensor that is to be saved.
    """
    items: list[PackedItems] = [plan.items for plan in plans]  # type: ignore[misc]
    key = hashlib.blake2b(b"".join(item.digest for item in items) + bytes([to_lowest_rank]), digest_size=16).digest()
    if any(item.copied is not None and item.copied.key != key for item in items):
        # Some copied what a plan gave them that holds no more. This one holds for their copies alone: it has no key.
        copies = [None if item.copied is None else item.copied.selection for item in items]
        merged, chunks = _merge(items, to_lowest_rank=to_lowest_rank, copies=copies)
        key = b""
    else:
        if key not in _merged:
            _merged[key] = _merge(items, to_lowest_rank=to_lowest_rank)
        _merged.move_to_end(key)
        while len(_merged) > _KEPT:
            _merged.popitem(last=False)
        merged, chunks = _merged[key]
    metadata = PlannedMetadata(LazyState(chunks))  # type: ignore[arg-type]
    metadata.planner_data = _merged_paths([plan.planner_data for plan in plans])
    final = [
        SavePlan(ChosenItems(item, selection, key))  # type: ignore[arg-type]
        for item, selection in zip(items, merged.selections, strict=True)
    ]
    for item in items:
        item.forget()
    forget_unpacked()
    _unpacked_paths.cache_clear()
    return final, metadata


def _merge(items: Sequence[PackedItems], **options: Any) -> tuple[Merged, Chunks]:
    columns = [item.columns for item in items]
    found = merge_columns(columns, **options)
    give_back_memory()
    return found, _chunks(found, columns)


def finished(plan: SavePlan, local: SavePlan) -> SavePlan:
    """What this rank writes: its part of the merged plan, with the items of its own plan."""
    chosen, offered = plan.items, local.items
    if not isinstance(chosen, ChosenItems) or not isinstance(offered, PackedItems):
        return plan
    return replace(plan, items=ChosenItems(offered, chosen.selection, chosen.key))  # type: ignore[arg-type]


def _merged_paths(paths: Sequence[_Paths | None]) -> dict[str, Any]:
    """The lowest rank's path wins, as in DCP."""
    merged: dict[str, Any] = {}
    seen: set[int] = set()
    for found in paths:
        mapping = {} if found is None else found.mapping
        if id(mapping) not in seen:
            seen.add(id(mapping))
            for name in mapping.keys() - merged.keys() if merged else mapping:
                merged[name] = mapping[name]
    return merged


def _chunks(merged: Merged, plans: Sequence[Columns]) -> Chunks:
    """What state_dict_metadata has to say."""
    builder = Builder()
    for name, (rank, row) in zip(merged.names, merged.samples, strict=True):
        shared, plan = plans[rank].shared, plans[rank]
        if shared.templates[row] < 0:
            builder.add_bytes(name)
            continue
        dims = slice(plan.first_dims[row], plan.first_dims[row + 1])
        size = tuple(shared.sizes[dims].tolist())
        template = shared.table[shared.templates[row]]
        fields = tuple(getattr(template, field) for field in template.__dataclass_fields__)
        builder.add_tensor(name, SHARD, fields, size, plan.strides[dims].tolist(), [0] * len(size), size)
    begin = np.concatenate([[0], np.cumsum(merged.ndims)]).astype(np.int64)
    return Chunks(builder.columns(), merged.first_chunks, begin, merged.offsets, merged.lengths)


def _items_of(state: Mapping[str, Any], *, divides: bool) -> Sequence[WriteItem]:
    """The items that DCP makes of a flat state, as columns where they can hold them."""
    builder = Builder()
    places: dict[Any, Any] = {}
    tensor, is_pinnable, records_grad = torch.Tensor, torch.cuda.is_available(), torch.is_grad_enabled()
    for fqn, value in state.items():
        kind = type(value)
        if is_bare(value) and value.layout is torch.strided:
            size, strides = value.shape, value.stride()
            template = _described(value, strides, value.requires_grad, is_pinnable, divides)
            builder.add_tensor(fqn, TENSOR, template, size, strides, (0,) * len(size), size)
        elif kind is DTensor and type(value._local_tensor) in PLAIN_TYPES and not _is_partial(value):
            if value.device_mesh.get_coordinate() is None:
                continue
            local = value.to_local()
            place = (value.shape, value.device_mesh, value.placements)
            if place not in places:
                places[place] = compute_local_shape_and_global_offset(*place)
            lengths, offsets = places[place]
            strides = local.stride()
            grad = local.requires_grad or (records_grad and value.requires_grad)
            template = _described(local, strides, grad, is_pinnable, divides)
            builder.add_tensor(fqn, SHARD, template, value.shape, strides, offsets, tuple(lengths))
        elif not isinstance(value, tensor) and not hasattr(value, "__create_write_items__"):
            builder.add_bytes(fqn)
        elif isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue
        elif not all(map(builder.add_item, _create_write_items(fqn, value))):
            return _stock_items(state)
    return PackedItems(builder.columns())


def _described(
    local: torch.Tensor, strides: tuple[int, ...], requires_grad: bool, is_pinnable: bool, divides: bool
) -> tuple[Any, ...]:
    """The arguments of a Template."""
    pinned = is_pinnable and local.is_pinned()
    is_divisible = divides and local.dim() > 0 and (local.is_contiguous() or is_dense(tuple(local.shape), strides))
    return local.dtype, local.layout, requires_grad, 0, pinned, True, is_divisible


def _is_partial(value: DTensor) -> bool:
    return any(placement.is_partial() for placement in value.placements)


def _stock_items(state: Mapping[str, Any]) -> list[WriteItem]:
    items: list[WriteItem] = []
    for fqn, value in state.items():
        if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
            items += _create_write_items(fqn, value)
    return items
