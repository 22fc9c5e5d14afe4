"""Stubs of the Rust core's data shards; `_native` has the rest."""

from collections.abc import Sequence
from typing import Any, final

from torch_strata._native import Store
from torch_strata._types import DataColumn

@final
class SharedBytes:
    """Bytes of the core, read-only, through the buffer protocol: for `bytes`, `memoryview`, `numpy.frombuffer`."""

    @staticmethod
    def cut(buffer: Any, lengths: Sequence[int]) -> list[SharedBytes]:
        """Pieces of a contiguous `buffer`, one after the other, of so many bytes each. Copies nothing.

        Raises:
            ValueError: If it has fewer bytes.
        """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class DataOrder:
    """The order of an epoch; docs/concepts/data-order.md."""

@final
class DataIndex:
    """The shards at a place, and where the samples of each begin. Belongs to no process."""

    @staticmethod
    def scan(
        stores: Sequence[Store], places: Sequence[tuple[int, str]], format: tuple[str, str, int, int, int]
    ) -> DataIndex:
        """Look for shards and their samples.

        `places`: number of a store, and a name or a glob below it. `format`: kind, dtype, header bytes, window, stride.

        Raises:
            ConfigError: If a place is no glob.
            ObjectNotFoundError: If nothing matches.
            CorruptionError: If a shard cannot be of `format`.
            StorageError: If the store fails.
        """

    @property
    def num_samples(self) -> int: ...
    @property
    def shards(self) -> list[tuple[str, int, int]]:
        """Name, bytes, and number of samples, sorted by name."""

    def store_of(self, shard: int) -> int:
        """Number of the store of a shard.

        Raises:
            ValueError: If there are not so many shards.
        """

    def order(self, shuffle: tuple[str, int, int], num_lanes: int, turn: int, seed: int, epoch: int) -> DataOrder:
        """The order of an epoch; `shuffle` is its kind ("none", "shards", "blocks", "full"), block and buffer."""

    def batches(
        self,
        stores: Sequence[Store],
        order: DataOrder,
        following: DataOrder,
        *,
        world_size: int,
        rank: int,
        num_workers: int,
        worker: int,
        batch_size: int,
        ending: str,
        start: int,
        first: int,
        max_ahead_bytes: int,
    ) -> Batches:
        """Begin to read a worker's batches, from its batch number `first` behind the position `start` on."""

@final
class Batches:
    """Batches that are read ahead. Dropped, it ends what it has begun."""

    def next(self) -> tuple[int, int, int, list[str], list[tuple[int, int]], dict[str, DataColumn]] | None:
        """The next batch, or None behind the last one.

        Position of all ranks behind it, its number, how many of its samples are repeated; keys; shard and first byte of
        each sample; by name the fields.

        Raises:
            ForkedProcessError: In a child of the process that began it.
            ValueError: If it was interrupted by Ctrl-C before.
            CorruptionError: If a sample is not what its format wants.
            StorageError: If the store fails.
        """
