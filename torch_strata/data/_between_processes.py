"""How a worker hands a batch to its loader: large fields in shared memory, as torch does with tensors.

What `multiprocessing` sends is pickled; of a batch's buffers that would copy every byte four times.
"""

from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from torch_strata._native import SharedBytes
from torch_strata.data.batch import Batch, Position

__all__ = ["register"]

# Below this a pipe is cheaper than a file descriptor; a page of both, not tuned.
_MIN_BYTES = 64 << 10


def register() -> None:
    """Let every batch that is sent to another process of this machine go this way."""
    ForkingPickler.register(Batch, _reduced)


def _reduced(batch: Batch) -> tuple[Any, ...]:
    fields, shared = dict(batch), {}
    for name, values in batch.items():
        if _are_buffers(values) and sum(map(len, values)) >= _MIN_BYTES:
            shared[name] = (_in_shared_memory(values), [len(value) for value in values])
            del fields[name]
    return _rebuilt, (list(batch), fields, shared, batch.position, batch.num_repeated)


def _are_buffers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is SharedBytes for value in values)


def _rebuilt(
    names: list[str],
    fields: dict[str, Any],
    shared: dict[str, tuple[torch.Tensor, list[int]]],
    position: Position,
    num_repeated: int,
) -> Batch:
    cut = {name: SharedBytes.cut(memory.numpy(), lengths) for name, (memory, lengths) in shared.items()}
    return Batch({name: cut[name] if name in cut else fields[name] for name in names}, position, num_repeated)


def _in_shared_memory(values: list[SharedBytes]) -> torch.Tensor:
    """The bytes of `values`, one after the other; shape ``(num_bytes,)``, uint8."""
    ends = list(accumulate(map(len, values), initial=0))
    storage = torch.UntypedStorage._new_shared(ends[-1])
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    view: Any = memoryview(memory.numpy())  # type: ignore[arg-type]
    for value, (start, end) in zip(values, pairwise(ends), strict=True):
        view[start:end] = memoryview(value)
    return memory
