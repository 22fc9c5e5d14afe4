"""A load planner that compares the state with the checkpoint before any rank reads."""

import io
import reprlib
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
from torch_strata.checkpoint._lazy_state import StoredIndex
from torch_strata.checkpoint._payload import Trusted, load_value
from torch_strata.checkpoint._reads import CompactReads, PlannedReads
from torch_strata.checkpoint._shortcuts import is_bare
from torch_strata.errors import LayoutMismatchError

__all__ = ["StrataLoadPlanner", "missing_list"]


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
        flat, mappings = flatten_state_dict(state_dict) if self.flatten_state_dict else ({}, {})
        if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in flat.values()):
            _init_state_dict(state_dict)
            flat, mappings = flatten_state_dict(state_dict)
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
        index = StoredIndex(stored)
        left = []
        whole = []
        for fqn, wanted in self.state_dict.items():
            if is_bare(wanted) and index.is_whole(fqn, wanted.dtype, wanted.shape):
                whole.append((fqn, wanted.shape))
            elif fqn in stored and index.is_list(fqn):
                if not (isinstance(wanted, list) and not wanted) and not self.allow_partial_load:
                    raise missing_list(fqn, wanted)
            elif fqn in stored:
                self._compare(fqn, *index.described(fqn), wanted)
                left.append(fqn)
        # Missing keys, and keys of a time when they were named otherwise, are DCP's affair.
        if self.metadata is None or stored.keys() != self.state_dict.keys():
            plan = super().create_local_plan()
            return replace(plan, items=CompactReads(plan.items))
        others = CompactReads()
        for fqn in left:
            others += _read_items(fqn, index, self.state_dict[fqn])
        return LoadPlan(PlannedReads(whole, others))  # type: ignore[arg-type]

    def _compare(
        self, fqn: str, is_tensor: bool, dtype: torch.dtype | None, size: tuple[int, ...], wanted: Any
    ) -> None:
        if not isinstance(wanted, torch.Tensor):
            if is_tensor:
                raise LayoutMismatchError(f"{fqn!r} is stored as a tensor, the state holds a {type(wanted).__name__}")
            return
        if not is_tensor:
            raise LayoutMismatchError(f"{fqn!r} is stored as a pickled value, the state holds a tensor")
        if dtype != wanted.dtype and not self._allow_dtype_cast:
            raise LayoutMismatchError(
                f"{fqn!r}: stored dtype {dtype}, destination dtype {wanted.dtype}; "
                "pass allow_dtype_cast=True to CheckpointManager, or to StrataReader and StrataLoadPlanner, to convert"
            )
        shape = torch.Size(getattr(wanted, "global_shape", wanted.size()))
        if size != shape:
            raise LayoutMismatchError(f"{fqn!r}: stored shape {tuple(size)}, destination {tuple(shape)}")

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


def missing_list(fqn: str, wanted: Any) -> LayoutMismatchError:
    """What to raise where only the entries of a list are stored, and the state holds something else than none."""
    return LayoutMismatchError(
        f"Missing key in checkpoint state_dict: {fqn}. Stored are the entries of a list of that name, which only an "
        f"empty list takes up; the state holds {reprlib.repr(wanted)}"
    )


def _read_items(fqn: str, index: StoredIndex, wanted: Any) -> list[ReadItem]:
    """What DCP plans for one key, without asking of each object whether it implements a protocol."""
    is_tensor = index.described(fqn)[0]
    if is_tensor and is_bare(wanted):
        return _reads_of(fqn, index, ChunkStorageMetadata(torch.Size([0] * wanted.dim()), wanted.size()))
    if isinstance(wanted, DTensor):
        if wanted.device_mesh.get_coordinate() is None:
            return []
        if is_tensor and len(chunks := _create_chunk_list(wanted)) == 1:
            return _reads_of(fqn, index, chunks[0])
    return _create_read_items(fqn, index.stored[fqn], wanted)


def _reads_of(fqn: str, index: StoredIndex, chunk: ChunkStorageMetadata) -> list[ReadItem]:
    """Reads that fill one local chunk."""
    # Stored as it is wanted, as after an unchanged restart: chunks tile their tensor, so that no other one has a part.
    at = None if 0 in chunk.sizes else index.position(fqn, chunk)
    if at is None:
        return create_read_items_for_chunk_list(fqn, index.stored[fqn], [chunk])
    start = torch.Size([0] * len(chunk.sizes))
    here, there = MetadataIndex(fqn, chunk.offsets, 0), MetadataIndex(fqn, chunk.offsets, at)
    return [ReadItem(LoadItemType.TENSOR, here, start, there, start, chunk.sizes)]
