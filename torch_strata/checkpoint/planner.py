"""A load planner that compares the state with the checkpoint before any rank reads."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torch_strata.checkpoint._payload import Trusted, load_value
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

    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank.

        Raises:
            LayoutMismatchError: If a key is stored in another dtype, shape or kind, naming the first one.
        """
        stored = {} if self.metadata is None else self.metadata.state_dict_metadata
        for fqn, wanted in self.state_dict.items():
            if fqn in stored:
                self._compare(fqn, stored[fqn], wanted)
        return super().create_local_plan()

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
