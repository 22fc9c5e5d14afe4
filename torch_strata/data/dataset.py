"""The shards of a data set as an iterable of batches, with a state that resumes exactly. Imports no torch."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from torch_strata import _native
from torch_strata._store import open_store, place_below, resolve_config
from torch_strata._types import DataColumn
from torch_strata.config import StorageConfig
from torch_strata.data._course import BEGINNING, Course, Ending, Place
from torch_strata.data._places import check_int, format_of, places_of
from torch_strata.data.batch import Batch, Position
from torch_strata.data.decode import DECODERS, Decoder
from torch_strata.data.shuffle import Shuffle
from torch_strata.errors import ConfigError, CorruptionError

__all__ = ["Ending", "ShardDataset"]

_STATE_VERSION = 1


class ShardDataset:
    """Samples of shards at a path or URL, in batches, for one rank of several.

    Args:
        url: A path or URL of shards, or several: names with `*`, `?`, `[0-9]`, `{a,b}`, `{000..127}` and `**`, or
            their folder.
        format: ``"tar"``, ``"jsonl"``, ``"mds"``, ``"tokens"``, ``"megatron"`` or ``"files"``; None: by the name's end,
            and tokens where there is a `window`.
        window: Tokens in a sample, for formats of tokens.
        stride: Tokens from the beginning of one sample to that of the next; None: `window`.
        dtype: Of flat tokens, as NumPy calls it; None: uint16.
        header_bytes: Bytes before flat tokens; None: none.
        decode: Whether fields become values by what they are (`torch_strata.data.decode.DECODERS`), or further decoders
            by name; None: of formats that say what a field is, jsonl and mds.
        shuffle: None: as they lie, shards by their names.
        batch_size: Samples in a batch of a rank; None: single samples.
        ending: What becomes of the last samples of an epoch, which do not fill a batch on every rank. Every rank gets
            as many batches in each case. ``"short"``: the last batches are short; ``"drop"``: they are left out;
            ``"pad"``: the batches are filled with samples from the epoch's beginning; ``"continue"``: with those of the
            next epoch, which begins behind them.
        transform: Called with each batch; what it returns is handed over instead.
        rank: None: that of torch.distributed, else of torchrun, else 0.
        world_size: Number of ranks that share the data; as `rank`.
        max_ahead_bytes: Memory for what is read ahead, in bytes; one batch more may be held.
        config: Settings of the store.
        storage_options: The store's own settings; added to those of `config`.

    Raises:
        ConfigError: If an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: str | None = None,
        window: int | None = None,
        stride: int | None = None,
        dtype: str | None = None,
        header_bytes: int | None = None,
        decode: bool | Mapping[str, Decoder] | None = None,
        shuffle: Shuffle | None = None,
        batch_size: int | None = None,
        ending: Ending = "short",
        transform: Callable[[Batch], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        max_ahead_bytes: int = 256 << 20,
        config: StorageConfig | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        tokens = {"window": window, "stride": stride, "dtype": dtype, "header_bytes": header_bytes}
        self._format = format_of(url, format, **tokens)
        self._places = places_of(url, self._format.kind)
        self._decode = _checked(decode, self._format.kind)
        self._config = resolve_config(config, storage_options)
        if config is None:
            # What an epoch reads once, the next one reads again: the page cache helps.
            self._config = replace(self._config, direct_io=False)
        if shuffle is not None and not isinstance(shuffle, Shuffle):
            raise ConfigError(f"shuffle: expected a Shuffle or None, found {shuffle!r}")
        if ending not in ("short", "drop", "pad", "continue"):
            raise ConfigError(f"ending: expected 'short', 'drop', 'pad' or 'continue', found {ending!r}")
        if (rank is None) != (world_size is None):
            raise ConfigError("rank and world_size: expected both or neither")
        self.shuffle, self.ending, self.transform = shuffle, ending, transform
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        if rank is None or world_size is None:
            self._place = None
        else:
            self._place = Place(check_int("rank", rank, 0, world_size), check_int("world_size", world_size, 1))
        self._max_ahead_bytes = check_int("max_ahead_bytes", max_ahead_bytes, 1)
        self._opened: _native.DataIndex | None = None
        self._digest: str | None = None
        self.next_pass = BEGINNING
        self._last: Position | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all shards. Looks for them when it is first asked."""
        return int(self._index().num_samples)

    @property
    def place(self) -> Place:
        """This process among those that share the data."""
        return self._place or _world()

    @property
    def has_handed_over(self) -> bool:
        """Whether batches of the pass that is going on were handed over in this process."""
        return self._last is not None

    @property
    def epoch(self) -> int:
        """The pass that the next iterator makes, from 0."""
        return self.next_pass.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator make the pass `epoch`; it has no effect on the rest of a pass that was loaded.

        Raises:
            ConfigError: If `epoch` is not an int from 0 on.
        """
        course, world_size = self.course(), self.place.world_size
        self.next_pass = course.at_epoch(self.next_pass, check_int("epoch", epoch, 0), world_size)

    def __len__(self) -> int:
        """Batches of each rank in a whole pass."""
        return self.course().num_batches(self.place.world_size)

    def course(self) -> Course:
        """How the passes follow one another."""
        return Course(
            num_samples=self.num_samples,
            batch_size=self.batch_size or 1,
            ending=self.ending,
            has_lanes=self.shuffle is not None and self.shuffle.by != "samples",
        )

    def __iter__(self) -> "BatchIterator":
        return self.iterate(self.place)

    def iterate(self, place: Place, kind: "type[BatchIterator] | None" = None) -> "BatchIterator":
        """One pass, from where the last one ended or the loaded state says, as `place` takes part in it."""
        return (kind or BatchIterator)(self, place, self.course().begin(self.next_pass, place))

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """Where all ranks stand once each has consumed `after`, or the last batch that was handed over here.

        Less than 1 KB, the same on all ranks, and good on any other number of ranks and workers.

        Raises:
            ConfigError: If `after` carries no position.
        """
        if after is None:
            position = self._last or self.next_pass
        elif isinstance(after, Batch):
            position = after.position
        else:
            raise ConfigError(f"after: expected a Batch of this pipe, found a {type(after).__name__} without position")
        return state_of(self.identity(), position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind what `state` says was consumed.

        Raises:
            ConfigError: If the state is of other data, of another shuffle or of another version.
        """
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION:
            raise ConfigError(f"state: expected one of state_dict() of version {_STATE_VERSION}, found {state!r}")
        self.check_identity(state["data"])
        self.next_pass = self.course().behind(Position(*(state[name] for name in asdict(BEGINNING))))
        self._last = None

    def identity(self) -> dict[str, Any]:
        """What positions are of: other shards or another shuffle give it another value."""
        if self._digest is None:
            # Once: a loader may ask behind each batch, and there may be 10,000 shards.
            self._digest = hashlib.sha256(repr(self._index().shards).encode()).hexdigest()[:16]
        return {"num_samples": self.num_samples, "shards": self._digest, "shuffle": list(self._raw_shuffle())}

    def check_identity(self, found: object) -> None:
        """Refuse a state of other data.

        Raises:
            ConfigError: If `found` is not the identity of this data set.
        """
        expected = self.identity()
        if found != expected:
            raise ConfigError(f"the state is of other data or another shuffle: expected {expected}, found {found}")

    def __getstate__(self) -> dict[str, Any]:
        # An index is found again; a list of 10,000 shards is not sent to each worker.
        return {**self.__dict__, "_opened": None, "_digest": None, "_place": self.place}

    def _index(self) -> "_native.DataIndex":
        if self._opened is None:
            self._opened = _native.DataIndex.scan(self._stores(), list(self._places.patterns), self._format.raw)
        return self._opened

    def _stores(self) -> list[_native.Store]:
        return [open_store(root, self._config) for root in self._places.roots]

    def _raw_shuffle(self) -> tuple[str, int, int, int]:
        shuffle = self.shuffle
        if shuffle is None:
            return ("none", 0, 0, 0)
        names = {"samples": "full", "shards": "shards", "blocks": "blocks"}
        is_blocks = shuffle.by == "blocks"
        return (
            names[shuffle.by],
            shuffle.block if is_blocks else 0,
            shuffle.buffer if is_blocks else 0,
            shuffle.seed,
        )

    def _order(self, epoch: int, begin: Position) -> "_native.DataOrder":
        kind, block, buffer, seed = self._raw_shuffle()
        return self._index().order((kind, block, buffer), begin.num_lanes, begin.turn, seed, epoch)

    def _batches(self, place: Place, begin: Position, first: int) -> "_native.Batches":
        order = self._order(begin.epoch, begin)
        return self._index().batches(
            self._stores(),
            order,
            self._order(begin.epoch + 1, begin) if self.ending == "continue" else order,
            world_size=place.world_size,
            rank=place.rank,
            num_workers=place.num_workers,
            worker=place.worker,
            batch_size=self.batch_size or 1,
            ending=self.ending,
            start=begin.samples,
            first=first,
            max_ahead_bytes=self._max_ahead_bytes,
        )

    def url_of(self, shard: int) -> str:
        """Where the shard of this number lies."""
        index = self._index()
        return place_below(self._places.roots[index.store_of(shard)], index.shards[shard][0])

    def decoder(self, kind: str) -> Decoder | None:
        """What makes a value of a field of this kind; None where it stays bytes."""
        if isinstance(self._decode, bool):
            return DECODERS.get(kind) if self._decode else None
        return self._decode.get(kind) or DECODERS.get(kind)

    def _handed_over(self, position: Position) -> None:
        self._last = position

    def _ended(self, position: Position) -> None:
        self.next_pass, self._last = self.course().behind(position), None


def state_of(identity: Mapping[str, Any], position: Position) -> dict[str, Any]:
    """The state that says: everything before `position` in the order of the data `identity` is consumed."""
    return {"version": _STATE_VERSION, "data": identity, **asdict(position)}


class BatchIterator(Iterator[Any]):
    """One pass of one stream. Reads ahead from its first batch on."""

    def __init__(self, dataset: ShardDataset, place: Place, begin: Position) -> None:
        self._dataset, self._place, self._begin = dataset, place, begin
        self._nth = 0
        self._reading: _native.Batches | None = None

    def __iter__(self) -> "BatchIterator":
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads for itself.
        return {**self.__dict__, "_reading": None}

    def __next__(self) -> Any:
        if self._reading is None:
            self._reading = self._dataset._batches(self._place, self._begin, self._nth)
        try:
            raw = self._reading.next()
        except KeyboardInterrupt:
            self._reading = None  # what was read ahead is gone; whoever goes on gets the same batch
            raise
        if raw is None:
            self._dataset._ended(self._dataset.course().end(self._begin, self._place.world_size))
            raise StopIteration
        after, nth, num_repeated, keys, places, found = raw
        self._nth = nth + 1
        position = replace(self._begin, samples=after)
        fields: dict[str, Any] = {"__key__": keys} if any(keys) else {}
        fields |= {name: self._column(name, column, places) for name, column in found.items()}
        if self._dataset.batch_size is None:
            fields = {name: values[0] for name, values in fields.items()}
        made = self._transformed(Batch(fields, position, num_repeated))
        self._dataset._handed_over(position)
        return made

    def _column(self, name: str, column: DataColumn, places: Sequence[tuple[int, int]]) -> Any:
        """The values of a field: an array where they are arrays of one kind, else a list."""
        if column[0] == "array":
            _, dtype, shape, memory = column
            return self._array(np.frombuffer(memory, dtype).reshape(-1, *shape))
        values = zip(column[1], places, strict=True)
        return [None if value is None else self._value(name, place, *value) for value, place in values]

    def _value(
        self, name: str, place: tuple[int, int], kind: str, dtype: str, shape: Sequence[int], data: _native.SharedBytes
    ) -> Any:
        if kind == "array":
            return self._array(np.frombuffer(bytearray(data), dtype).reshape(shape))
        decoder = self._dataset.decoder(kind or name.rpartition(".")[2])
        if decoder is None:
            return data
        try:
            return decoder(memoryview(data))
        except Exception as error:
            where = f"{self._dataset.url_of(place[0])}: {name!r} of the sample at byte {place[1]}"
            raise CorruptionError(f"{where}: {error} ({type(error).__name__})") from error

    def _array(self, array: "np.ndarray[Any, Any]") -> Any:
        return array

    def _transformed(self, batch: Batch) -> Any:
        if self._dataset.transform is None:
            return batch
        made = self._dataset.transform(batch)
        if isinstance(made, dict) and not isinstance(made, Batch):
            return Batch(made, batch.position, batch.num_repeated)
        return made

    def state_dict(self) -> dict[str, Any]:
        """This stream's part of the state, for the same number of ranks and workers."""
        each = self._place.world_size * (self._dataset.batch_size or 1)
        return {
            "data": self._dataset.identity(),
            "num_workers": self._place.num_workers,
            "samples_a_step": each,
            "begin": asdict(self._begin),
            "num_batches": self._nth,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that `state` says were handed over.

        Raises:
            ConfigError: If it is of other data, or of another number of ranks or workers.
        """
        self._dataset.check_identity(state["data"])
        own = self.state_dict()
        for name in ("num_workers", "samples_a_step"):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the state of a loader: expected {name} {own[name]}, found {state[name]}; for another number of "
                    "ranks or workers give it to the pipe's load_state_dict, and make a new loader"
                )
        self._begin, self._nth, self._reading = Position(**state["begin"]), state["num_batches"], None


def _checked(decode: object, kind: str) -> bool | Mapping[str, Decoder]:
    if decode is None:
        return kind in ("jsonl", "mds")
    if isinstance(decode, bool):
        return decode
    if not isinstance(decode, Mapping) or not all(callable(decoder) for decoder in decode.values()):
        raise ConfigError(f"decode: expected a bool or a mapping of names to functions, found {decode!r}")
    return dict(decode)


def _world() -> Place:
    """This process among those that train: of torch.distributed if that is up, else of torchrun."""
    import sys

    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return Place(0, 1)
    return Place(int(rank), int(world_size))
