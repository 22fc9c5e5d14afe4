"""Between DCP's `Metadata` and the plain entries that the Rust core keeps in a manifest."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._lazy_state import Chunks, LazyState
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._planner_data import decode_planner_data
from torch_strata.checkpoint._stock_pickle import DCP_VERSION
from torch_strata.checkpoint._tiling import tiling_fault
from torch_strata.errors import CheckpointError, CorruptionError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = [
    "RECORDS_STRIDES",
    "dtype_name",
    "dtype_of",
    "encode_fqn",
    "entries_of",
    "entries_of_chunks",
    "read_metadata",
]

# DCP's own numbering, `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.channels_last: 1, torch.preserve_format: 2}
_MEMORY_FORMAT_OF = {number: value for value, number in _MEMORY_FORMATS.items()}


def encode_fqn(fqn: Any) -> bytes:
    """A name as bytes; lone surrogates survive.

    Raises:
        CheckpointError: If it is not a str.
    """
    if not isinstance(fqn, str):
        raise CheckpointError(f"a key of the state_dict is not a str: {fqn!r:.200}")
    return fqn.encode("utf-8", "surrogatepass")


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


def entries_of(metadata: Metadata) -> "list[TensorEntry]":
    """One plain entry for each key of ``state_dict_metadata``, in its order."""
    state = metadata.state_dict_metadata
    if isinstance(state, LazyState) and state.untouched is not None:
        return entries_of_chunks(state.untouched)
    return [_entry(fqn, value) for fqn, value in metadata.state_dict_metadata.items()]


def _entry(fqn: str, value: Any) -> "TensorEntry":
    if not isinstance(value, TensorStorageMetadata):
        return (encode_fqn(fqn), False, "", (), None, False, False, 0, "", [], [])
    properties = value.properties
    strides = getattr(properties, "strides", None)  # torch 2.14 and older record none
    return (
        encode_fqn(fqn),
        True,
        dtype_name(properties.dtype),
        tuple(value.size),
        None if strides is None else tuple(strides),
        bool(properties.requires_grad),
        bool(properties.pin_memory),
        _MEMORY_FORMATS[properties.memory_format],
        str(properties.layout).removeprefix("torch."),
        [tuple(chunk.offsets) for chunk in value.chunks],
        [tuple(chunk.sizes) for chunk in value.chunks],
    )


def entries_of_chunks(chunks: Chunks) -> "list[TensorEntry]":
    """One plain entry for each name."""
    found: list[TensorEntry] = []
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # ranks' shards have the same shapes, thousands of times
    for row, fqn in enumerate(chunks.columns.shared.names):
        described = chunks.described(row)
        if described is None:
            found.append((encode_fqn(fqn), False, "", (), None, False, False, 0, "", [], []))
            continue
        template, size, strides = described
        offsets, lengths = chunks.of(row)
        found.append(
            (
                encode_fqn(fqn),
                True,
                dtype_name(template.dtype),
                size,
                strides if template.has_strides and RECORDS_STRIDES else None,
                template.requires_grad,
                template.pin_memory,
                template.memory_format,
                str(template.layout).removeprefix("torch."),
                [same.setdefault(dims, dims) for dims in offsets],
                [same.setdefault(dims, dims) for dims in lengths],
            )
        )
    return found


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
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in opened.entries:
        fqn = entry[0].decode("utf-8", "surrogatepass")
        if fqn in state:
            raise CorruptionError(f"{where}: the key {fqn!r} is stored twice")
        state[fqn] = _tensor_metadata(fqn, entry, whole, where) if entry[1] else BytesStorageMetadata()
    if opened.written_by == "torch_strata":
        planner_data = decode_planner_data(opened.native.planner_data, where)
    else:
        planner_data = opened.foreign_planner_data
    return Metadata(state, planner_data=planner_data, storage_meta=storage_meta, version=DCP_VERSION)


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


RECORDS_STRIDES = any(field.name == "strides" for field in dataclasses.fields(TensorProperties))


@functools.cache
def _layout_of(name: str) -> torch.layout:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.layout):
        raise CorruptionError(f"layout {name!r:.100} is unknown to torch {torch.__version__}")
    return value
