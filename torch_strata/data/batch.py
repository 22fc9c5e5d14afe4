"""What a pipe hands over: a dict that knows where in the order of the data it stands."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Batch", "Position"]


@dataclass(frozen=True)
class Position:
    """How far all ranks together are once each has consumed the batch that carries this.

    Attributes:
        epoch: Pass over the data, from 0.
        samples: Samples of the epoch that are consumed then.
        num_lanes: Lanes in which the epoch is dealt out (docs/concepts/data-order.md).
        turn: Samples in a turn of a lane.
    """

    epoch: int
    samples: int
    num_lanes: int
    turn: int


class Batch(dict[str, Any]):
    """Fields by name: a list with one value for each sample, or one value where the pipe makes no batches.

    What copies a dict keeps the attributes, as DataLoader does when it collates and pins.

    Attributes:
        position: Where all ranks stand behind it.
        num_repeated: Samples at its end that come a second time, to fill it.
    """

    def __init__(self, fields: dict[str, Any], position: Position, num_repeated: int = 0) -> None:
        super().__init__(fields)
        self.position = position
        self.num_repeated = num_repeated

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (dict(self), self.position, self.num_repeated)
