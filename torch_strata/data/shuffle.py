"""How the samples of an epoch are put into disorder. Pure; docs/concepts/data-order.md has the rules."""

from dataclasses import dataclass
from typing import Literal

from torch_strata.errors import ConfigError

__all__ = ["Shuffle"]


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """A permutation of an epoch's samples, another one in each epoch, that is kept nowhere: it is computed.

    Attributes:
        seed: Below 2**64. The same seed gives the same order, whatever the number of ranks and workers asks for.
        by: ``"samples"``: all samples, each read by itself. ``"shards"``: whole shards; within a shard as they lie.
            ``"blocks"``: runs of ``block`` samples, and then the samples among each ``buffer``: nearly as good as all
            samples, and read in large pieces.
        block: Samples in a run; above 0.
        buffer: Samples that are shuffled among themselves; above 0.

    Raises:
        ConfigError: If a value has the wrong type or is out of range.
    """

    seed: int = 0
    by: Literal["samples", "shards", "blocks"] = "blocks"
    block: int = 32
    buffer: int = 4096

    def __post_init__(self) -> None:
        if self.by not in ("samples", "shards", "blocks"):
            raise ConfigError(f"Shuffle.by: expected 'samples', 'shards' or 'blocks', found {self.by!r}")
        for name, low, high in (("seed", 0, 2**64 - 1), ("block", 1, 2**32), ("buffer", 1, 2**32)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"Shuffle.{name}: expected an int from {low} to {high}, found {value!r}")
