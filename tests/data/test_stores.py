"""Shards in a bucket: the same samples as on disk, and what goes wrong is named."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.data.shards import NUM_SAMPLES, all_numbers, write_tars
from tests.support.s3 import Bucket, options
from torch_strata.data.pipe import StrataShardPipe
from torch_strata.data.shuffle import Shuffle
from torch_strata.errors import ObjectNotFoundError

SHUFFLE = Shuffle(seed=1, block=4, buffer=16)


@pytest.fixture
def in_bucket(bucket: Bucket, tmp_path: Path) -> Path:
    """Shards that are below ``train`` in the bucket too."""
    for shard in sorted(write_tars(tmp_path).iterdir()):
        bucket.put(f"train/{shard.name}", shard.read_bytes())
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_in_a_bucket_give_what_those_on_disk_do(bucket: Bucket, in_bucket: Path, num_workers: int) -> None:
    local = StrataShardPipe(in_bucket / "*.tar", shuffle=SHUFFLE, batch_size=4)
    there = StrataShardPipe(
        bucket.url("train/*.tar"), shuffle=SHUFFLE, batch_size=4, storage_options=options(bucket.endpoint)
    )
    loaders = [DataLoader(pipe, batch_size=None, num_workers=num_workers) for pipe in (local, there)]
    first, second = (all_numbers(loader) for loader in loaders)
    assert first == second and sorted(first) == list(range(NUM_SAMPLES))
    assert there.dataset.identity() == local.dataset.identity()


def test_a_shard_that_disappears_is_named(bucket: Bucket, in_bucket: Path) -> None:
    pipe = StrataShardPipe(bucket.url("train/*.tar"), batch_size=4, storage_options=options(bucket.endpoint))
    assert pipe.dataset.num_samples == NUM_SAMPLES
    bucket.client.delete_object(Bucket=bucket.name, Key="train/003.tar")
    with pytest.raises(ObjectNotFoundError, match=r"train/003\.tar"):
        list(pipe)
    with pytest.raises(ObjectNotFoundError, match=r"none/\*\.tar"):
        len(StrataShardPipe(bucket.url("none/*.tar"), storage_options=options(bucket.endpoint)))
