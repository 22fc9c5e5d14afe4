"""Between DCP's `Metadata` and the plain entries that the Rust core keeps in a manifest."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_strata.checkpoint._columns import BYTES, SHARD, Builder, Columns, Shared, Template
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._lazy_state import Chunks, LazyState, PlannedMetadata
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._paths import decode_fqn, encode_fqn
from torch_strata.checkpoint._planner_data import decode_planner_data
from torch_strata.checkpoint._stock_pickle import DCP_VERSION
from torch_strata.checkpoint._stored_lists import StoredDict
from torch_strata.checkpoint._tiling import tiling_fault
from torch_strata.checkpoint._untiled import untiled
from torch_strata.errors import CheckpointError, CorruptionError

if TYPE_CHECKING:
    from torch_strata._types import EntryColumns, TensorEntry

__all__ = [
    "RECORDS_STRIDES",
    "dtype_name",
    "dtype_of",
    "promises_of",
    "read_metadata",
]

# DCP's own numbering, `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.channels_last: 1, torch.preserve_format: 2}
_MEMORY_FORMAT_OF = {number: value for value, number in _MEMORY_FORMATS.items()}
# torch 2.14 and older record none.
RECORDS_STRIDES = any(field.name == "strides" for field in dataclasses.fields(TensorProperties))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        CorruptionError: If this torch has none.
    """
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise CorruptionError(f"dtype {name!r:.100} is unknown to torch {torch.__version__}")
    return value


def promises_of(metadata: Metadata) -> "EntryColumns":
    """What ``state_dict_metadata`` says, as `_native.commit` takes it.

    Raises:
        CheckpointError: If a key is not a str, or strides are not those of the size.
        OverflowError: If a number has more than 64 bits.
    """
    state = metadata.state_dict_metadata
    chunks = state.untouched if isinstance(state, LazyState) else None
    if chunks is None:
        chunks = _chunks_of(state)
    columns, shared = chunks.columns, chunks.columns.shared
    table = [
        (
            dtype_name(template.dtype),
            template.requires_grad,
            template.pin_memory,
            template.memory_format,
            str(template.layout).removeprefix("torch."),
            template.has_strides and RECORDS_STRIDES,
        )
        for template in shared.table
    ]
    numbers = [
        shared.templates,
        shared.ndims,
        shared.sizes,
        columns.strides,
        chunks.first,
        chunks.begin,
        chunks.offsets,
    ]
    return (
        [encode_fqn(fqn) for fqn in shared.names],
        table,
        [np.ascontiguousarray(column) for column in numbers],
    )


def _chunks_of(state: Mapping[str, Any]) -> Chunks:
    """What another planner has made."""
    builder = Builder()
    first, begin = [0], [0]
    offsets: list[int] = []
    lengths: list[int] = []
    for fqn, value in state.items():
        if isinstance(value, TensorStorageMetadata):
            properties, size = value.properties, value.size
            strides = getattr(properties, "strides", None)  # torch 2.14 and older record none
            if strides is not None and len(strides) != len(size):
                raise CheckpointError(f"{fqn!r}: the planner's metadata has the strides {strides} for {tuple(size)}")
            flags = (
                bool(properties.requires_grad),
                _MEMORY_FORMATS[properties.memory_format],
                bool(properties.pin_memory),
            )
            template = (properties.dtype, properties.layout, *flags, strides is not None)
            builder.add_tensor(fqn, SHARD, template, size, [0] * len(size) if strides is None else strides, (), size)
            for chunk in value.chunks:
                offsets += chunk.offsets
                lengths += chunk.sizes
                begin.append(len(offsets))
        else:
            builder.add_bytes(fqn)
        first.append(len(begin) - 1)
    numbers = (np.array(column, dtype=np.int64) for column in (first, begin, offsets, lengths))
    return Chunks(builder.columns(), *numbers)


def _stored_chunks(columns: "EntryColumns", where: str) -> Chunks:
    """What a manifest says.

    Raises:
        CorruptionError: If this torch does not know a dtype or a layout.
    """
    names, table, numbers = columns
    templates, ndims, sizes, strides, first, begin, offsets, lengths = (
        np.frombuffer(column, dtype=code) for code, column in numbers
    )
    known = tuple(
        Template(dtype_of(dtype), _layout_of(layout), grad, encoding if encoding in _MEMORY_FORMAT_OF else 0, pin, has)
        for dtype, grad, pin, encoding, layout, has in table
    )
    fqns = tuple(decode_fqn(name) for name in names)
    if len(set(fqns)) != len(fqns):
        twice = next(fqn for fqn, count in Counter(fqns).items() if count > 1)
        raise CorruptionError(f"{where}: the key {twice!r} is stored twice")
    shared = Shared(fqns, np.where(templates < 0, BYTES, SHARD), ndims, templates, known, sizes)
    none = np.zeros(0, dtype=np.int64)
    return Chunks(Columns(shared, none, none, none, strides), first, begin, offsets, lengths)


@gc_paused()
def read_metadata(opened: Opened, *, storage_meta: StorageMeta, whole: bool) -> Metadata:
    """DCP's view of a stored checkpoint, checked: chunks tile their tensors, dtypes exist.

    Args:
        opened: The checkpoint.
        storage_meta: Its identity.
        whole: Whether chunks must cover each tensor; false for what one rank saved on its own.

    Raises:
        CorruptionError: If a tensor's chunks leave a hole, overlap or lie outside, naming it.
    """
    where = opened.where
    if opened.written_by == "torch_strata":
        chunks = _stored_chunks(opened.native.entries(), where)
        for row in untiled(chunks).tolist():
            described = chunks.described(row)
            if described and (fault := tiling_fault(described[1], *chunks.of(row), whole=whole)):
                raise CorruptionError(f"{where}: {chunks.columns.shared.names[row]!r}: {fault}")
        planner_data = decode_planner_data(opened.native.planner_data, where)
        metadata = PlannedMetadata(LazyState(chunks, planner_data))  # type: ignore[arg-type]
        metadata.planner_data = planner_data
        metadata.storage_meta, metadata.version = storage_meta, DCP_VERSION
        return metadata
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in opened.foreign_entries:
        fqn = decode_fqn(entry[0])
        if fqn in state:
            raise CorruptionError(f"{where}: the key {fqn!r} is stored twice")
        state[fqn] = _tensor_metadata(fqn, entry, whole, where) if entry[1] else BytesStorageMetadata()
    planner_data = opened.foreign_planner_data
    known = StoredDict(state, planner_data)
    return Metadata(known, planner_data=planner_data, storage_meta=storage_meta, version=DCP_VERSION)


def _tensor_metadata(fqn: str, entry: "TensorEntry", whole: bool, where: str) -> TensorStorageMetadata:
    _, _, dtype, size, strides, requires_grad, pin_memory, memory_format, layout, offsets, sizes = entry
    size, offsets, sizes = tuple(size), [tuple(o) for o in offsets], [tuple(s) for s in sizes]
    is_one = len(sizes) == 1 and sizes[0] == size and not any(offsets[0])
    if not is_one and (fault := tiling_fault(size, offsets, sizes, whole=whole)):
        raise CorruptionError(f"{where}: {fqn!r}: {fault}")
    properties = TensorProperties(
        dtype=dtype_of(dtype),
        layout=_layout_of(layout),
        requires_grad=requires_grad,
        memory_format=_MEMORY_FORMAT_OF.get(memory_format, torch.contiguous_format),
        pin_memory=pin_memory,
    )
    if strides is not None and RECORDS_STRIDES:
        properties.strides = tuple(strides)
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in zip(offsets, sizes, strict=True)]
    return TensorStorageMetadata(properties, torch.Size(size), chunks)


@functools.cache
def _layout_of(name: str) -> torch.layout:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.layout):
        raise CorruptionError(f"layout {name!r:.100} is unknown to torch {torch.__version__}")
    return value
