"""A load planner that compares the state with the checkpoint before any rank reads."""

import io
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_read_items,
    _init_state_dict,
    create_read_items_for_chunk_list,
)
from torch.distributed.tensor import DTensor

from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._payload import Trusted, load_value
from torch_strata.checkpoint._tensors import PLAIN_TYPES
from torch_strata.errors import LayoutMismatchError

__all__ = ["StrataLoadPlanner"]


class StrataLoadPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner that also refuses a change of dtype or kind, while planning: it fails on every rank.

    With any other planner StrataReader makes the same checks rank by rank, at the start of reading.

    Args:
        flatten_state_dict: As DefaultLoadPlanner.
        flatten_sharded_tensors: As DefaultLoadPlanner.
        allow_partial_load: As DefaultLoadPlanner: keys that are not stored keep their values.
        allow_dtype_cast: Whether a tensor may be stored in another dtype; give it to StrataReader too.
        trusted_classes: Classes that pickled values may name, where a reader leaves loading them to the planner.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_dtype_cast: bool = False,
        trusted_classes: Sequence[Trusted] = (),
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._allow_dtype_cast = allow_dtype_cast
        self._trusted = tuple(trusted_classes)

    @gc_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load into `state_dict`."""
        _init_state_dict(state_dict)
        flat, mappings = flatten_state_dict(state_dict) if self.flatten_state_dict else ({}, {})
        if not self.flatten_state_dict or any(isinstance(value, ShardedTensor) for value in flat.values()):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        # Without any, flattening them changes nothing but the time.
        self.original_state_dict, self.state_dict, self.mappings = state_dict, flat, mappings
        self.metadata, self.is_coordinator = metadata, is_coordinator

    @gc_paused()
    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank.

        Raises:
            LayoutMismatchError: If a key is stored in another dtype, shape or kind, naming the first one.
        """
        stored = {} if self.metadata is None else self.metadata.state_dict_metadata
        for fqn, wanted in self.state_dict.items():
            if fqn in stored:
                self._compare(fqn, stored[fqn], wanted)
        # Missing keys, and keys of a time when they were named otherwise, are DCP's affair.
        if self.metadata is None or stored.keys() != self.state_dict.keys():
            plan = super().create_local_plan()
            return replace(plan, items=CompactReads(plan.items))
        items = CompactReads()
        for fqn, wanted in self.state_dict.items():
            items += _read_items(fqn, stored[fqn], wanted)
        return LoadPlan(items)

    def _compare(self, fqn: str, stored: Any, wanted: Any) -> None:
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if not isinstance(wanted, torch.Tensor):
            if is_tensor:
                raise LayoutMismatchError(f"{fqn!r} is stored as a tensor, the state holds a {type(wanted).__name__}")
            return
        if not is_tensor:
            raise LayoutMismatchError(f"{fqn!r} is stored as a pickled value, the state holds a tensor")
        if stored.properties.dtype != wanted.dtype and not self._allow_dtype_cast:
            raise LayoutMismatchError(
                f"{fqn!r}: stored dtype {stored.properties.dtype}, destination dtype {wanted.dtype}; "
                "pass allow_dtype_cast=True to StrataReader, and to StrataLoadPlanner if it plans, to convert"
            )
        shape = torch.Size(getattr(wanted, "global_shape", wanted.size()))
        if stored.size != shape:
            raise LayoutMismatchError(f"{fqn!r}: stored shape {tuple(stored.size)}, destination {tuple(shape)}")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a pickled value in its place, loaded with ``weights_only=True``.

        Raises:
            CheckpointError: If it names a class that is not trusted.
        """
        fqn = read_item.dest_index.fqn
        loaded = load_value(value.getvalue(), fqn=fqn, where="checkpoint", trusted=self._trusted)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
        else:
            self.state_dict[fqn] = loaded


class CompactReads(list[ReadItem]):
    """A list of ReadItems that pickles as plain tuples: a tenth of the bytes and of the time."""

    def __reduce__(self) -> tuple[Any, ...]:
        if any(type(item) is not ReadItem for item in self):
            return list, (list(self),)
        return _reads, (zlib.compress(pickle.dumps([_plain_read(item) for item in self], protocol=5), 1),)


def _plain_read(item: ReadItem) -> tuple[Any, ...]:
    dest, source = item.dest_index, item.storage_index
    names = (dest.fqn, None if dest.offset is None else tuple(dest.offset), dest.index, source.fqn)
    at = (None if source.offset is None else tuple(source.offset), source.index)
    dims = (tuple(item.dest_offsets), tuple(item.storage_offsets), tuple(item.lengths))
    return item.type is LoadItemType.BYTE_IO, names, at, dims


def _reads(packed: bytes) -> list[ReadItem]:
    return [
        ReadItem(
            LoadItemType.BYTE_IO if is_bytes else LoadItemType.TENSOR,
            MetadataIndex(*names[:3]),
            torch.Size(dims[0]),
            MetadataIndex(names[3], *at),
            torch.Size(dims[1]),
            torch.Size(dims[2]),
        )
        for is_bytes, names, at, dims in pickle.loads(zlib.decompress(packed))
    ]


def _read_items(fqn: str, stored: Any, wanted: Any) -> list[ReadItem]:
    """What DCP plans for one key, without asking of each object whether it implements a protocol."""
    # An attribute could make a plain tensor one that DCP asks for its shards.
    is_plain = type(wanted) in PLAIN_TYPES and not vars(wanted)
    if isinstance(stored, TensorStorageMetadata):
        if is_plain:
            size = wanted.size()
            return _reads_of(fqn, stored, ChunkStorageMetadata(torch.Size([0] * len(size)), size))
        if isinstance(wanted, DTensor):
            if wanted.device_mesh.get_coordinate() is None:
                return []
            if len(chunks := _create_chunk_list(wanted)) == 1:
                return _reads_of(fqn, stored, chunks[0])
    elif isinstance(wanted, DTensor) and wanted.device_mesh.get_coordinate() is None:
        return []
    return _create_read_items(fqn, stored, wanted)


def _reads_of(fqn: str, stored: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> list[ReadItem]:
    """Reads that fill one local chunk."""
    chunks = stored.chunks
    # Stored as it is wanted, as after an unchanged restart: chunks tile their tensor, so that no other one has a part.
    if 0 not in chunk.sizes and chunk in chunks:
        at = chunks.index(chunk)
        start = torch.Size([0] * len(chunk.sizes))
        here, there = MetadataIndex(fqn, chunk.offsets, 0), MetadataIndex(fqn, chunk.offsets, at)
        return [ReadItem(LoadItemType.TENSOR, here, start, there, start, chunk.sizes)]
    return create_read_items_for_chunk_list(fqn, stored, [chunk])
