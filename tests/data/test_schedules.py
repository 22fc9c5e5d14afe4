"""Seeded schedules of interruptions: whoever goes on, nothing is lost and nothing comes twice."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.shards import NUM_SAMPLES, numbers, write_tars
from torch_strata.data._course import Place
from torch_strata.data.batch import Batch
from torch_strata.data.dataset import ShardDataset
from torch_strata.data.shuffle import Shuffle

SHUFFLES = [
    None,
    Shuffle(seed=1, by="samples"),
    Shuffle(seed=2, by="shards"),
    Shuffle(seed=3, block=4, buffer=16),
    Shuffle(seed=4, block=7, buffer=1000),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("shards"))


def steps(dataset: ShardDataset, world_size: int, num_workers: int) -> Iterator[list[Batch]]:
    """The batches of all ranks in each step; workers take turns, as a loader's do. Ends when a rank does."""
    begin = dataset.next_pass
    ranks = []
    for rank in range(world_size):
        workers = []
        for worker in range(num_workers):
            dataset.next_pass = begin
            workers.append(dataset.iterate(Place(rank, world_size, worker, num_workers)))
        ranks.append(in_turn(workers))
    return map(list, zip(*ranks, strict=True))


def in_turn(workers: list[Any]) -> Iterator[Batch]:
    for worker in itertools.cycle(workers):
        batch = next(worker, None)
        if batch is None:
            return
        yield batch


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_of_kills_loses_and_repeats_nothing(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    shuffle, ending = dice.choice(SHUFFLES), dice.choice(["short", "drop", "pad", "continue"])
    kept: list[int] = []
    state, num_passes = None, dice.choice([1, 2, 3])
    for _ in range(300):
        dataset = ShardDataset(folder, format="tar", shuffle=shuffle, batch_size=dice.randint(1, 9), ending=ending)
        if state is not None:
            dataset.load_state_dict(json.loads(state))
        if dataset.epoch == num_passes:
            break
        made = list(
            itertools.islice(steps(dataset, dice.randint(1, 5), dice.randint(1, 4)), dice.choice([1, 3, 9, 200]))
        )
        is_killed = dataset.has_handed_over
        # Killed, perhaps, before the state of the last step was kept: that step comes again.
        made = made[: len(made) - (is_killed and dice.random() < 0.5)]
        for batches in made:
            states = [json.dumps(dataset.state_dict(after=batch)) for batch in batches]
            assert set(states) == {states[0]} and len(states[0]) < 1024
            state = states[0]
            kept += [number for batch in batches for number in own_numbers(batch)]
        if not is_killed:
            state = json.dumps(dataset.state_dict())
    assert dataset.epoch == num_passes
    counts = Counter(kept)
    if ending in ("short", "pad"):
        assert counts == dict.fromkeys(range(NUM_SAMPLES), num_passes)
    elif ending == "continue":
        over = dataset.next_pass.samples
        assert len(kept) == num_passes * NUM_SAMPLES + over and over < 45
        assert {counts[number] - num_passes for number in range(NUM_SAMPLES)} <= {0, 1}
    else:
        assert max(counts.values()) <= num_passes and len(kept) > num_passes * (NUM_SAMPLES - 45)


def own_numbers(batch: Batch) -> list[int]:
    """Without those that others have too."""
    found = numbers(batch)
    return found[: len(found) - batch.num_repeated]
