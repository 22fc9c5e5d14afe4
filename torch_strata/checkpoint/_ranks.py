"""What the ranks of a manager do alike: ask one of them, compare what they were asked for, fail together."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.distributed as dist

from torch_strata.checkpoint._exchange import world_size
from torch_strata.checkpoint.restore import together
from torch_strata.errors import CheckpointError

__all__ = ["Ranks"]

_Found = TypeVar("_Found")


class Ranks:
    """Those that save and load together.

    Args:
        group: The default group if None.
        no_dist: Whether this process is alone, whatever groups there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, no_dist: bool) -> None:
        self._group, self._no_dist = group, no_dist

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self._no_dist or world_size() is None

    @property
    def number(self) -> int:
        """This rank's."""
        return 0 if self.is_alone else dist.get_rank(self._group)

    def together(self) -> AbstractContextManager[None]:
        """See `restore.together`."""
        return together(self._group, no_dist=self.is_alone)

    def agree(self, find: Callable[[], list[_Found]]) -> list[_Found]:
        """What the first rank finds, or its error, on all of them."""
        if self.is_alone:
            return find()
        told: list[Any] = [None]
        if self.number == 0:
            try:
                told[0] = find()
            except Exception as error:
                told[0] = error
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        found: list[_Found] = told[0]
        return found

    def check_same(self, call: str) -> None:
        """Compare what was called, in words, with the other ranks.

        Raises:
            CheckpointError: On every rank, if they differ.
        """
        if self.is_alone:
            return
        calls: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(calls, call, group=self._group)
        if len(set(calls)) > 1:
            ranks = {each: [rank for rank, other in enumerate(calls) if other == each] for each in calls}
            told = ", ".join(f"{each} on {_words(of)}" for each, of in ranks.items())
            raise CheckpointError(f"ranks ask for different things: {told}")


def _words(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"rank {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
