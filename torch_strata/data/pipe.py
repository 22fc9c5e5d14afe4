"""`StrataShardPipe`: data shards for DataLoader and StatefulDataLoader."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper

from torch_strata.data._between_processes import register
from torch_strata.data.batch import Batch, Position
from torch_strata.data.dataset import BatchIterator, ShardDataset, state_of
from torch_strata.errors import ConfigError

__all__ = ["StrataShardPipe"]


class _TensorIterator(BatchIterator):
    """Its arrays are tensors."""

    def _array(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array)


class _LoaderDataset(IterableDataset[Any]):
    """What loaders iterate instead of the pipe: it knows of workers, and its iterators have a state."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset
        # Where to begin, and how often that was said: shared with workers that live longer than a pass.
        self._said = torch.zeros(5, dtype=torch.int64).share_memory_()
        self._heard = 0

    def say(self) -> None:
        """Tell workers, those that run among them, where the next pass begins."""
        begin = self.dataset.next_pass
        self._said[:4] = torch.tensor([begin.epoch, begin.samples, begin.num_lanes, begin.turn])
        self._said[4] += 1
        self._heard = int(self._said[4])

    def __iter__(self) -> BatchIterator:
        place = self.dataset.place
        worker = get_worker_info()
        if worker is not None:
            place = replace(place, worker=worker.id, num_workers=worker.num_workers)
        *begin, times = self._said.tolist()
        if times != self._heard:
            self._heard, self.dataset.next_pass = times, Position(*begin)
        return self.dataset.iterate(place, _TensorIterator)

    def __len__(self) -> int:
        return len(self.dataset)


class StrataShardPipe(IterDataPipe[Any]):
    """Samples of shards in batches, for DataLoader (``batch_size=None``), StatefulDataLoader, or no loader.

    Its order is that of `ShardDataset`, whose arguments it takes, for any number of workers. A loader gets the data set
    and not the pipe: torch wraps pipes into something that has no state, and makes all ranks wait for each other
    (docs/design/2026-11-28-loaders.md).

    Raises:
        ConfigError: If an argument has the wrong type or is out of range.
    """

    def __init__(self, url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **arguments: Any) -> None:
        self._loaded = _LoaderDataset(ShardDataset(url, **arguments))
        self._is_in_loader = False

    @property
    def dataset(self) -> ShardDataset:
        """The data set behind it, for iteration without torch."""
        return self._loaded.dataset

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator make the pass `epoch`, from 0; see `ShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)
        self._loaded.say()

    if TYPE_CHECKING:

        def __iter__(self) -> BatchIterator: ...

    def __len__(self) -> int:
        """Batches of each rank in a whole pass."""
        return len(self.dataset)

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """Where all ranks stand once each has consumed `after`; see `ShardDataset.state_dict`.

        Raises:
            ConfigError: If `after` is not given and a loader reads the pipe: only the batch knows what was consumed.
        """
        if after is None and self._is_in_loader and not self.dataset.has_handed_over:
            raise ConfigError("after: expected the last batch that was consumed, for a loader's workers read ahead")
        return self.dataset.state_dict(after)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind what `state` says was consumed: one of ours, or a whole one of StatefulDataLoader.

        Of a loader it may be for another number of workers or ranks; the new loader is made afterwards. See
        `ShardDataset.load_state_dict`.
        """
        self.dataset.load_state_dict(_of_loader(state) or state)
        self._loaded.say()


def _iterate(self: StrataShardPipe) -> BatchIterator:
    return iter(self._loaded)


# Put here, out of sight of the metaclass, which would wrap it: into iterators of which only one lives at a time.
StrataShardPipe.__iter__ = _iterate  # type: ignore[method-assign]


def _of_loader(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a StatefulDataLoader's state says of all its workers together; None of another state."""
    snapshot = state.get("_snapshot")
    if snapshot is not None:
        streams = [worker["fetcher_state"] for worker in snapshot["_worker_snapshots"].values()]
        num_batches = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
    elif "fetcher_state" in state:
        streams, num_batches = [state["fetcher_state"]], state["_num_yielded"]
    else:
        return None
    stream = streams[0]["dataset_iter_state"]
    begin = Position(**stream["begin"])
    # Behind the end of the pass, where the last step was not a whole one: the next one begins there.
    samples = begin.samples + num_batches * stream["samples_a_step"]
    return state_of(stream["data"], replace(begin, samples=samples))


def _given_to_a_loader(cls: type, datapipe: Any = None) -> Any:
    """In place of torch's wrapper: of our pipe, the data set; what is not an instance of `cls` is not initialised."""
    if isinstance(datapipe, StrataShardPipe):
        datapipe._is_in_loader = True
        return datapipe._loaded
    return object.__new__(cls)


register()
_IterDataPipeSerializationWrapper.__new__ = staticmethod(_given_to_a_loader)  # type: ignore[method-assign]
