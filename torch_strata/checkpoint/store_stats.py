"""What a store went through during one save or load. Imports nothing."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch_strata import _native

__all__ = ["StoreStats"]


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What happened to the requests of one rank. All 0 for local paths, where nothing is tried twice.

    Attributes:
        requests: Requests sent, every try counted.
        retries: Tries after the first of each operation.
        throttled: Answers by which the store asked for fewer requests.
        restarted: Transfers ended because too few bytes moved, and begun again.
        hedged: Second requests for what a first one was slow to bring.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    restarted: int = 0
    hedged: int = 0

    @classmethod
    def of(cls, store: "_native.Store") -> Self:
        """Since the store was opened in this process."""
        return cls(**store.counters())

    def since(self, earlier: "StoreStats") -> "StoreStats":
        """What came after `earlier`."""
        return StoreStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def plus(self, other: "StoreStats") -> "StoreStats":
        """Of both."""
        return StoreStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __str__(self) -> str:
        """What went wrong, in words; empty if nothing did."""
        counts = [f"{getattr(self, f.name)} {f.name}" for f in fields(self)[1:] if getattr(self, f.name)]
        return ", ".join(counts)
