"""The tensors of a nested state in the order of a walk, and what another state needs to be planned like it."""

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torch_strata.checkpoint._paths import Path, dotted
from torch_strata.checkpoint._tensors import PLAIN_TYPES, is_plain, settled, why_no_memory
from torch_strata.errors import CheckpointError

__all__ = ["LISTS", "MAPPINGS", "Leaves", "Outline"]

# Of other mappings a shallow copy may share what holds the items: those are values.
MAPPINGS = (dict, OrderedDict, defaultdict)
LISTS = (list, tuple)


class Outline(NamedTuple):
    """What `Leaves` has found, without the tensors."""

    paths: list[Path]
    structure: list[Any] | None


class Leaves:
    """The tensors in a state's dicts, lists and tuples.

    Attributes:
        tensors: As they stand there, each as often as it does.
        local_tensors: Of each the memory of this rank: the tensor itself, or a DTensor's local one.
        paths: Where each stands.
        structure: Equal for two states that a rank plans alike: kinds, dtypes, shapes, strides, meshes and placements
            by path. None if that cannot be told of a value here.

    Raises:
        CheckpointError: If a tensor has no memory of its own that could be copied, naming it.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.local_tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self._nodes: list[Any] = []
        self._is_known = True
        for key, value in state.items():
            self._find(value, (str(key),))

    @property
    def structure(self) -> list[Any] | None:
        """See the class."""
        return self._nodes if self._is_known else None

    def outline(self) -> Outline:
        """What may be kept after the save."""
        return Outline(self.paths, self.structure)

    def _find(self, value: Any, path: Path) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES:
            self._add(value, value, path)
            # An attribute could make it one that DCP asks for its shards.
            self._is_known = self._is_known and not vars(value)
            try:
                self._nodes.append((path, value.dtype, value.layout, value.shape, value.stride()))
            except RuntimeError as error:  # compressed sparse tensors have no strides, nested ones no shape
                why = why_no_memory(value) or error
                raise CheckpointError(f"cannot copy {dotted(path)!r} for an asynchronous save: {why}") from error
        elif kind in MAPPINGS:
            self._nodes.append((path, len(value)))
            for key, item in value.items():
                self._find(item, (*path, str(key)))
        elif kind in LISTS:
            self._nodes.append((path, kind, len(value)))
            for i, item in enumerate(value):
                self._find(item, (*path, i))
        elif isinstance(value, DTensor):
            local = value._local_tensor
            if type(local) not in PLAIN_TYPES:
                local = settled(local)
            self._add(value, local, path)
            self._is_known = self._is_known and is_plain(local)
            self._nodes.append((path, value._spec, local.dtype, local.shape, local.stride()))
        elif isinstance(value, torch.Tensor):
            self._add(value, value, path)
            self._is_known = False
        else:
            self._is_known = self._is_known and not hasattr(value, "__create_write_items__")
            self._nodes.append((path, kind))

    def _add(self, tensor: torch.Tensor, local: torch.Tensor, path: Path) -> None:
        self.tensors.append(tensor)
        self.local_tensors.append(local)
        self.paths.append(path)
