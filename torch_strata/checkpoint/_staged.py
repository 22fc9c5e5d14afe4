"""A staged state_dict: what holds the tensors of a slot, and how another process maps them instead of copying them."""

import threading
from collections import OrderedDict, defaultdict
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torch_strata.checkpoint._arena import Lease
from torch_strata.checkpoint._assignment import Assignment
from torch_strata.checkpoint._leaves import Outline
from torch_strata.errors import CheckpointError

__all__ = ["StagedFuture", "StagedState", "keep_attributes", "shard_like"]

# By these DCP knows a plain tensor that is a shard of a larger one (CheckpointableTensor).
_CHECKPOINTABLE = frozenset({"global_shape", "global_offsets", "local_offsets", "local_sizes"})


class StagedState(dict[str, Any]):
    """A staged state_dict. A spawned process that it is sent to maps the same memory.

    Once `lease` is released its tensors are empty, and `items` raises.

    Attributes:
        lease: Of its memory.
        outline: Of the state that was copied.
        assignment: Of which alone the tensors were copied; None if the whole state was.
        num_bytes: Bytes of tensors that were copied.
        torn: Names of what changed meanwhile; but for what is copied later.
    """

    def __init__(
        self,
        state: dict[str, Any],
        *,
        lease: Lease,
        outline: Outline,
        assignment: Assignment | None,
        num_bytes: int,
        torn: tuple[str, ...] = (),
    ) -> None:
        super().__init__(state)
        self.lease, self.outline, self.assignment, self.num_bytes = lease, outline, assignment, num_bytes
        self.torn = torn

    def items(self) -> Any:
        """As of a dict.

        Raises:
            CheckpointError: If the state was written and its memory taken back.
        """
        if self.lease.is_released:
            raise CheckpointError("this staged state was written already: its memory belongs to a later save")
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class StagedFuture(Future[StagedState]):
    """A `StagedState` of which a part is still being copied."""

    lease: Lease


def keep_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let `target` be the same shard for DCP as `source`."""
    if attributes := vars(source):
        for name in _CHECKPOINTABLE & attributes.keys():
            setattr(target, name, attributes[name])


def shard_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor with the mesh, placements and shape of `like`."""
    # What from_local does in the end, after a tenth of a millisecond of checks that `like` has passed.
    return DTensor(local, like._spec, requires_grad=False)


class _Packed(NamedTuple):
    """A tensor of a slot."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    attributes: dict[str, Any]


class _PackedShard(NamedTuple):
    """A DTensor whose local tensor lies in a slot."""

    local: Any
    mesh: Any
    placements: Any
    shape: torch.Size
    strides: tuple[int, ...]


def _pack(staged: StagedState) -> Any:
    """Called in the thread that sends the state to a process, and waits there for its answer."""
    staged.lease.runs_in(threading.current_thread())
    packed = {key: _packed(value, staged.lease) for key, value in staged.items()}
    return _unpack, (staged.lease.storage, packed)


def _packed(value: Any, lease: Lease) -> Any:
    if isinstance(value, DTensor):
        local = _packed(value.to_local(), lease)
        return _PackedShard(local, value.device_mesh, value.placements, value.size(), value.stride())
    if isinstance(value, torch.Tensor):
        offset = lease.offset_of(value)
        if offset is None:
            return value
        attributes = {name: vars(value)[name] for name in _CHECKPOINTABLE & vars(value).keys()}
        return _Packed(offset, value.nbytes, value.dtype, tuple(value.shape), value.stride(), attributes)
    return _changed(value, lambda item: _packed(item, lease))


def _unpack(storage: torch.UntypedStorage, packed: dict[str, Any]) -> dict[str, Any]:
    unpacked: dict[Any, torch.Tensor] = {}

    def change(value: Any) -> Any:
        if isinstance(value, _PackedShard):
            local, mesh, placements, shape, strides = value
            return DTensor.from_local(change(local), mesh, placements, run_check=False, shape=shape, stride=strides)
        if not isinstance(value, _Packed):
            return _changed(value, change)
        key = value[:-1]
        if key not in unpacked:
            piece = storage[value.offset : value.offset + value.num_bytes]
            tensor = torch.empty(0, dtype=value.dtype).set_(piece, 0, value.shape, value.strides)
            for name, attribute in value.attributes.items():
                setattr(tensor, name, attribute)
            unpacked[key] = tensor
        return unpacked[key]

    return {key: change(value) for key, value in packed.items()}


def _changed(value: Any, change: Any) -> Any:
    """The container with each item changed; what is none as it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, change(item)) for key, item in value.items())
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, {key: change(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value


ForkingPickler.register(StagedState, _pack)
