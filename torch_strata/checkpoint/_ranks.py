"""What the ranks of a manager do alike: ask one of them, compare what they were asked for, fail together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_strata.checkpoint._board import travelling
from torch_strata.checkpoint._exchange import world_size
from torch_strata.errors import CheckpointError, CorruptionError, ObjectNotFoundError

__all__ = ["DAMAGE", "Ranks"]

# What a checkpoint before may be free of.
DAMAGE = (CorruptionError, ObjectNotFoundError)

_Found = TypeVar("_Found")


class Ranks:
    """Those that save and load together.

    Attributes:
        group: The default group if None.
        no_dist: Whether this process is alone, whatever groups there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, no_dist: bool) -> None:
        self.group, self.no_dist = group, no_dist

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.no_dist or world_size() is None

    @property
    def number(self) -> int:
        """This rank's."""
        return 0 if self.is_alone else dist.get_rank(self.group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done within fails on every rank if it fails on one, with what the first such rank has failed at.

        So that all go on to the same checkpoint. An error that DCP has gathered is told as its cause.
        """
        mine = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            mine = error
        failures = [mine and _cause_of(mine)]
        if not self.is_alone:
            failures *= dist.get_world_size(self.group)
            dist.all_gather_object(failures, failures[0] and travelling(failures[0]), group=self.group)
        first = next((failure for failure in failures if failure is not None), None)
        if first is None:
            return
        if first is mine:
            raise mine
        raise first from mine

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
        dist.broadcast_object_list(told, group=self.group, group_src=0)
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
        calls: list[str] = [""] * dist.get_world_size(self.group)
        dist.all_gather_object(calls, call, group=self.group)
        if len(set(calls)) > 1:
            ranks = {each: [rank for rank, other in enumerate(calls) if other == each] for each in calls}
            told = ", ".join(f"{each} on {_words(of)}" for each, of in ranks.items())
            raise CheckpointError(f"ranks ask for different things: {told}")


def _cause_of(error: BaseException) -> BaseException:
    """Of what several ranks failed at, damage comes first."""
    if not isinstance(error, CheckpointException):
        return error
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, DAMAGE)), causes[0])


def _words(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"rank {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
