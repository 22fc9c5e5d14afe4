"""One ReadItem of a load: where it is stored, and the memory that it fills. Reads nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_strata import _native
from torch_strata.checkpoint._exchange import Lent
from torch_strata.checkpoint._metadata import dtype_of
from torch_strata.checkpoint._tensors import contiguous_strides, device_number, is_plain, is_reachable

__all__ = ["Part", "bump_versions", "copy_into", "lent", "place_of", "takes_bytes"]


_NOTHING = torch.empty(0)


@dataclass(slots=True)
class Part:
    """One ReadItem on its way: where it is stored and where it goes."""

    item: ReadItem
    row: int
    kind: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    transforms: tuple[str, ...] = ()
    target: torch.Tensor = _NOTHING
    value: Any = None
    is_whole: bool = False  # all that is stored goes into a contiguous tensor of the host

    @property
    def fqn(self) -> str:
        """The name under which it is stored."""
        return self.item.storage_index.fqn

    @property
    def is_blob(self) -> bool:
        """Whether what is stored is a pickle, to be loaded as a whole."""
        return self.item.type is LoadItemType.BYTE_IO or self.kind == _native.TORCH_SAVE or bool(self.transforms)


def place_of(target: torch.Tensor) -> Any:
    """What two destinations have in common that are the same elements in the same order.

    Tied destinations are read once.
    """
    return (target.data_ptr(), tuple(target.shape), tuple(target.stride())) if is_plain(target) else id(target)


def takes_bytes(part: Part) -> bool:
    """Whether Rust may fill the destination as it lies; otherwise a temporary is filled and copied."""
    target = part.target
    return (
        is_plain(target)
        and is_reachable(target)
        and (target.device.type == "cpu" or _is_one_run(part))
        and target.dtype == dtype_of(part.dtype)
        and not target.is_conj()
        and not target.is_neg()
        and target.data_ptr() != 0
    )


def _is_one_run(part: Part) -> bool:
    """Whether what is read lies in one piece on both sides: a device copies pieces, not elements."""
    rows = tuple(part.item.lengths)[1:] == part.shape[1:]
    return rows and part.strides == contiguous_strides(part.shape) and part.target.is_contiguous()


def lent(part: Part, memory: torch.Tensor) -> Lent:
    """`memory`, of the shape that is read, for the bytes of `part`."""
    item = part.item
    first, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    return (part.row, first, lengths, device_number(memory), memory.data_ptr(), tuple(memory.stride()), memory)


def bump_versions(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that Rust has changed the memory of `tensors`, as copy_() would."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and convert as torch does, also where gradients are recorded or `target` is an inference tensor."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source)
