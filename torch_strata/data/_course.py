"""Where passes over the data begin and end. Pure: positions in, positions out."""

from dataclasses import dataclass, replace
from typing import Literal

from torch_strata.data.batch import Position

__all__ = ["BEGINNING", "Course", "Ending", "Place"]

Ending = Literal["short", "drop", "pad", "continue"]

# No lanes until it is known who takes part.
BEGINNING = Position(0, 0, 0, 0)


@dataclass(frozen=True)
class Place:
    """One stream of batches among those of all ranks and their workers."""

    rank: int
    world_size: int
    worker: int = 0
    num_workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Course:
    """How passes of `num_samples` follow one another.

    Attributes:
        num_samples: Samples of a pass.
        batch_size: Samples in a batch of a rank.
        ending: What becomes of the last samples.
        has_lanes: Whether each stream has a piece of the data of its own.
    """

    num_samples: int
    batch_size: int
    ending: Ending
    has_lanes: bool

    def num_batches(self, world_size: int) -> int:
        """Batches of each rank in a whole pass."""
        each = world_size * self.batch_size
        return self.num_samples // each if self.ending == "drop" else -(-self.num_samples // each)

    def begin(self, position: Position, place: Place) -> Position:
        """Where the pass begins that goes on behind `position`."""
        begin = self.behind(position)
        if begin.num_lanes:
            return begin
        lanes = (place.world_size * place.num_workers, self.batch_size) if self.has_lanes else (1, 1)
        return replace(begin, num_lanes=lanes[0], turn=lanes[1])

    def end(self, begin: Position, world_size: int) -> Position:
        """Where all ranks stand at the end of the pass from `begin` on."""
        left, each = self.num_samples - begin.samples, world_size * self.batch_size
        over = -left % each if self.ending == "continue" else 0
        return replace(begin, samples=self.num_samples + over)

    def behind(self, position: Position) -> Position:
        """`position`, or the beginning of the next pass if it is at the end of one."""
        if self.num_samples == 0 or position.samples < self.num_samples:
            return position
        if self.ending == "continue":
            # The samples before it were taken in these lanes.
            return replace(position, epoch=position.epoch + 1, samples=position.samples - self.num_samples)
        return Position(position.epoch + 1, 0, 0, 0)

    def at_epoch(self, position: Position, epoch: int, world_size: int) -> Position:
        """Where the pass `epoch` begins, if passes follow one another from `position` on."""
        if epoch == position.epoch:
            return position
        if self.ending != "continue":
            return Position(epoch, 0, 0, 0)
        behind = (epoch - position.epoch) * self.num_samples - position.samples
        return replace(position, epoch=epoch, samples=-behind % (world_size * self.batch_size))
