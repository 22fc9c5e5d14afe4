"""SIGKILL at random moments of a process that saves without a pause: nothing that was told is lost, nothing is left."""

import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.ranks import _CONTEXT
from tests.support.s3 import Bucket, options
from torch_strata import CheckpointNotFoundError, StorageConfig
from torch_strata._store import open_store
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.retention import KeepLast
from torch_strata.checkpoint.run import open_run

# Tensors of more than a part, so that uploads are left in the middle.
SMALL_PARTS = StorageConfig(part_bytes=5 << 20)
START_SECONDS = 60


def state_of(step: int) -> dict[str, Any]:
    """A part that never changes, one that changes each third step, one that always does."""
    return {
        "model": {
            "frozen": torch.arange(1_500_000.0),
            "slow": torch.full((200_000,), float(step // 3)),
            "weight": torch.arange(30_000.0) + step,
        },
        "optimizer": {"m": torch.arange(1_400_000.0) * step},
        "step": step,
    }


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return bool(left == right)


def train(root: str, config: StorageConfig, seed: int, told: Any) -> None:
    """Resumes, and saves until it is killed; tells of each step that is committed."""
    torch.set_num_threads(1)
    dice = random.Random(seed)
    manager = CheckpointManager(root, keep_count=2, config=config)
    newest = manager.latest()
    step = 0 if newest is None else newest.step
    told.send(("begins", step))
    while True:
        step += 1
        kind = dice.choice(["full", "incremental", "incremental", "incremental"])
        manager.save(state_of(step), step=step, checkpoint_type=kind).result(timedelta(seconds=60))
        told.send(("saved", step))


def kill_once(root: str, config: StorageConfig, dice: random.Random, *, saves: int) -> int:
    """The newest step that was told to be committed, of a process that is killed after so many saves."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = _CONTEXT.Process(target=train, args=(root, config, dice.randrange(1 << 30), sender))
    process.start()
    sender.close()
    try:
        newest = 0
        for _ in range(1 + saves):
            assert receiver.poll(START_SECONDS), "it does nothing"
            newest = receiver.recv()[1]
        time.sleep(dice.random() * 1.5)
        assert process.is_alive(), "it ended by itself"
    finally:
        process.kill()
        process.join()
    return max([newest, *told_since(receiver)])


def told_since(receiver: Any) -> Iterator[int]:
    """Steps that were told and not read before the end of the process."""
    with contextlib.suppress(EOFError):
        while receiver.poll(0):
            yield receiver.recv()[1]


def assert_resumable(root: str, config: StorageConfig, told: int) -> None:
    manager = CheckpointManager(root, config=config)
    newest = manager.latest()
    assert (newest.step if newest else 0) >= told, "what was told to be committed is lost"
    for found in manager.all():
        loaded = manager.load(found.step, rng=False)
        assert equal({key: loaded[key] for key in ("model", "optimizer", "step")}, state_of(found.step)), found


def collected(root: str, config: StorageConfig, count: int) -> None:
    """As if everything that is left were older than a day."""
    run = open_run(root, config, policy=KeepLast(count), orphan_age=timedelta(0))
    run.generation()
    for _ in range(3):
        run.retain()


def named(root: str, config: StorageConfig) -> set[str]:
    """Data objects that the checkpoints of the run name, without their folders: no name is used twice."""
    names = set()
    for place in (f"{root}/{listed.folder}" for listed in CheckpointManager(root, config=config).listed()):
        with contextlib.suppress(CheckpointNotFoundError):  # what is left of one to whose data another refers
            names |= {name for name, _ in open_checkpoint(open_store(place, config), place, rank=None).native.objects()}
    return names


def assert_nothing_left(root: str, config: StorageConfig, found: Callable[[], list[str]]) -> None:
    """What is there is what the manifests name; with one checkpoint, nothing but that."""
    collected(root, config, 2)
    there = found()
    data = [os.path.basename(name) for name in there if name.endswith(".distcp")]
    assert sorted(data) == sorted(named(root, config)), "\n".join(there)
    manager = CheckpointManager(root, keep_count=1, config=config)
    newest = manager.latest()
    step = 1 + (newest.step if newest else 0)
    manager.save(state_of(step), step=step).result(timedelta(seconds=60))
    collected(root, config, 1)
    left = [name for name in found() if not name.startswith(".strata/generations/")]
    kinds = sorted(os.path.splitext(name)[1] or os.path.dirname(name) for name in left)
    assert all(name.startswith(f"step-{step}/") for name in left), left
    assert kinds == [".distcp", f"step-{step}", f"step-{step}/.strata"], left


def sweep(root: str, config: StorageConfig, kills: int, seed: int) -> None:
    dice, told = random.Random(seed), 0
    for kill in range(kills):
        told = max(told, kill_once(root, config, dice, saves=(kill + 1) % 2))
        assert_resumable(root, config, told)
    assert told > 0


def files_of(root: Path) -> list[str]:
    # Stages of dead processes go when they are an hour old, since they may be those of living ones before.
    for stage in root.rglob(".tmp-*"):
        os.utime(stage, (time.time() - 7200,) * 2)
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def check_local(root: Path, kills: int, seed: int) -> None:
    sweep(str(root), SMALL_PARTS, kills, seed)
    files_of(root)  # makes what is staged old
    assert_nothing_left(str(root), SMALL_PARTS, lambda: files_of(root))
    assert len([path for path in root.glob("*/") if path.name != ".strata"]) == 1, "an empty folder is left"


def check_bucket(bucket: Bucket, kills: int, seed: int) -> None:
    root, config = bucket.url("run"), replace(SMALL_PARTS, storage_options=options(bucket.endpoint))
    sweep(root, config, kills, seed)
    assert_nothing_left(root, config, lambda: [key.removeprefix("run/") for key in bucket.sizes()])
    assert bucket.open_uploads() == []


def test_uploads_that_nobody_wrote_down_are_ended_and_no_others(bucket: Bucket) -> None:
    # moto gives every upload an age of years.
    root, config = bucket.url("run"), replace(SMALL_PARTS, storage_options=options(bucket.endpoint))
    CheckpointManager(root, config=config).save(state_of(1), step=1).result(timedelta(seconds=60))

    def begin(key: str) -> str:
        return str(bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"])

    data = f"__0_0.{'a' * 32}.distcp"
    others = [f"run/deeper/step-7/{data}", f"runs/step-7/{data}", "run/step-7/data.bin", f"run/step-8/{data}"]
    begin(f"run/step-7/{data}")
    ids = [begin(key) for key in others]
    record = {"name": data, "upload_id": ids[-1], "began_at_unix_s": int(time.time())}
    bucket.put("run/step-8/.strata/uploads/1.json", json.dumps(record).encode())
    run = open_run(root, config, policy=KeepLast(2), orphan_age=timedelta(days=1))
    run.generation()
    run.retain()
    assert sorted(bucket.open_uploads()) == sorted(others)


@pytest.mark.timeout(240)
def test_a_run_that_is_killed_again_and_again_loses_and_leaves_nothing(tmp_path: Path) -> None:
    check_local(tmp_path / "run", 5, seed=1)


@pytest.mark.timeout(240)
def test_a_run_in_a_bucket_that_is_killed_again_and_again_loses_and_leaves_nothing(bucket: Bucket) -> None:
    check_bucket(bucket, 3, seed=2)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_lose_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    check_local(tmp_path / "run", 40, seed=100 + seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_of_a_run_in_a_bucket_lose_and_leave_nothing(bucket: Bucket, seed: int) -> None:
    check_bucket(bucket, 20, seed=200 + seed)
