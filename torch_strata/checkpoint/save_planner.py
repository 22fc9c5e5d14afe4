"""A save planner for many tensors or many ranks: compact plans, planned once while the state keeps its structure."""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_strata.checkpoint._assignment import Assignment, copied_rows
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._paths import nested_too_deep
from torch_strata.checkpoint._shortcuts import is_bare
from torch_strata.checkpoint.planning import ChosenItems, PackedItems, finished, local_plan, merge
from torch_strata.errors import CheckpointError, ConfigError

__all__ = ["StrataSavePlanner"]

# By name and offset of a piece: the offset of its chunk, the first row in that, and the number of rows.
_Pieces = dict[tuple[str, torch.Size | None], tuple[torch.Size | None, int, int]]


class StrataSavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner for many tensors or many ranks: ``dcp.save(..., planner=StrataSavePlanner())``.

    A rank sends its plan as a few kilobytes and gets back only which of its items it writes. Ranks that hold the same
    tensor share its writing by bytes, large ones by rows. Plans that do not fit together raise LayoutMismatchError,
    which names tensors, ranks and regions. While no rank's state changes its structure (names, kinds, dtypes, shapes,
    strides, offsets), the planning rank compares digests and plans nothing, also with a new planner for each save.

    What it writes loads with any planner; it works with any storage writer.

    Args:
        flatten_state_dict: As DefaultSavePlanner.
        flatten_sharded_tensors: As DefaultSavePlanner.
        dedup_save_to_lowest_rank: As DefaultSavePlanner: the lowest rank that holds a chunk writes all of it.
        whole_chunks: Whether one rank writes all of a chunk that several hold, however large it is.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
        whole_chunks: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank
        )
        self.whole_chunks = whole_chunks
        self._pieces: _Pieces = {}

    @gc_paused()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save of `state_dict`.

        Raises:
            ConfigError: If two values have one name, such as ``a.b`` beside ``b`` below ``a``; if it is nested too
                deeply, or contains itself.
        """
        if self.flatten_state_dict:
            try:
                state_dict, self.mappings = flatten_state_dict(state_dict)
            except ValueError as error:
                raise ConfigError(f"state: two values have one name: {error}") from error
            except RecursionError:
                raise nested_too_deep(state_dict) from None
        # In a flat state without any, it changes nothing but the time.
        is_flat = self.flatten_state_dict and not any(isinstance(v, ShardedTensor) for v in state_dict.values())
        if self.flatten_sharded_tensors and not is_flat:
            state_dict = _flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self._pieces = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank can write; pickles to a few kilobytes."""
        paths = self.mappings if self.flatten_state_dict else {}
        self.plan = local_plan(self.state_dict, paths=paths, whole_chunks=self.whole_chunks)
        return self.plan

    def repeat_local_plan(self, last: Assignment) -> SavePlan:
        """As `create_local_plan`, for a state of which only what `last` tells was copied."""
        self.plan = last.repeated()
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes, and the checkpoint's metadata.

        Raises:
            LayoutMismatchError: If the plans do not fit together, naming tensors, ranks and regions.
            CheckpointError: If no rank has copied a tensor that is to be saved.
        """
        if all(isinstance(plan.items, PackedItems) for plan in all_plans):
            self.global_plan, self.metadata = merge(all_plans, to_lowest_rank=self.dedup_save_to_lowest_rank)
            if not self.flatten_state_dict:
                self.metadata.planner_data = None
        else:  # an item of a foreign class is DCP's to plan
            if any(getattr(plan.items, "copied", None) is not None for plan in all_plans):
                raise CheckpointError(
                    "a rank saves an object that only DCP can plan, which no rank did the last time: the others copied "
                    "no more than their part; the next save copies everything"
                )
            plain = [replace(plan, planner_data=dict(plan.planner_data.mapping)) for plan in all_plans]
            self.global_plan, self.metadata = self._create_global_plan(plain)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        plan = finished(new_plan, self.plan)
        if isinstance(plan.items, ChosenItems):
            self._pieces = _pieces(plan.items)
        self.plan = replace(plan, planner_data=self.mappings if self.flatten_state_dict else None)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value under a name, the chunk at an offset, or the rows of it that this rank writes."""
        piece = self._pieces.get((index.fqn, index.offset)) if self._pieces else None
        if piece is None:
            return self._chunk(index)
        offset, first, count = piece
        copied = copied_rows(self.state_dict.get(index.fqn))
        if copied is not None and (first, count) in copied:
            return copied[first, count]
        return self._chunk(MetadataIndex(index.fqn, offset)).detach().narrow(0, first, count)

    def _chunk(self, index: MetadataIndex) -> Any:
        found = self.state_dict.get(index.fqn)
        if is_bare(found) and (index.offset is None or not any(index.offset)):
            return found
        if copied_rows(found) is not None:
            raise CheckpointError(f"cannot store {index.fqn!r}: this rank left it to another one and has no copy")
        return find_state_dict_object(self.state_dict, index)


def _pieces(items: ChosenItems) -> _Pieces:
    found: _Pieces = {}
    for place, (first, count) in items.selection.pieces.items():
        index = items.columns.item(place).index
        whole = items.offered.columns.item(int(items.selection.rows[place])).index.offset  # type: ignore[union-attr]
        found[index.fqn, index.offset] = (whole, first, count)
    return found
