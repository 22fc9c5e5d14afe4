"""The order of the data is the one that docs/concepts/data-order.md writes down."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.shards import COUNTS, NUM_SAMPLES, write_tars
from tests.support import REPOSITORY
from torch_strata.data._course import Place
from torch_strata.data.dataset import ShardDataset
from torch_strata.data.shuffle import Shuffle

SHUFFLES = [
    None,
    Shuffle(seed=5, by="samples"),
    Shuffle(seed=2**64 - 1, by="shards"),
    Shuffle(seed=0, by="blocks", block=4, buffer=16),
    Shuffle(seed=1, by="blocks", block=1000, buffer=1000),
]


@pytest.fixture(scope="module")
def written_down() -> dict[str, Any]:
    text = (REPOSITORY / "docs/concepts/data-order.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 4), (3, 4), (4, 50)])
def test_the_core_takes_samples_in_the_order_that_is_written_down(
    folder: Path, written_down: dict[str, Any], shuffle: Shuffle | None, world_size: int, batch_size: int
) -> None:
    lanes = (1, 1) if shuffle is None or shuffle.by == "samples" else (world_size, batch_size)
    for epoch in (0, 7):
        expected = []
        for position in range(NUM_SAMPLES):
            place, lane = written_down["place"](position, NUM_SAMPLES, *lanes)
            expected.append(
                written_down["sample"](place, lane, COUNTS, shuffle, shuffle.seed, epoch) if shuffle else place
            )
        assert sorted(expected) == list(range(NUM_SAMPLES))
        steps = zip(
            *(keys_of(folder, shuffle, batch_size, epoch, Place(rank, world_size)) for rank in range(world_size)),
            strict=True,
        )
        assert [key for step in steps for batch in step for key in batch] == [f"d/s{number:03}" for number in expected]


def keys_of(folder: Path, shuffle: Shuffle | None, batch_size: int, epoch: int, place: Place) -> list[list[str]]:
    """Of each batch of a rank."""
    dataset = ShardDataset(folder, format="tar", shuffle=shuffle, batch_size=batch_size)
    dataset.set_epoch(epoch)
    return [batch["__key__"] for batch in dataset.iterate(place)]
