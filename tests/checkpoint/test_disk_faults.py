"""A disk that is full or read-only: a named error, the old checkpoint whole, nothing left, the next save works."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import failure_of, load, save
from tests.support.mounts import mounted, read_only
from torch_strata import StorageError, StrataReader, StrataWriter, async_save, verify
from torch_strata.checkpoint.staging import arena_stats

MIB = 1 << 20
LONG = timedelta(seconds=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB that holds step 1 of a checkpoint, 2 MiB."""
    with mounted(tmp_path / "disk", mib=12) as folder:
        save(state(1), folder / "c")
        yield folder


def state(step: int, mib: int = 2) -> dict[str, Any]:
    return {"w": torch.full((mib * MIB // 4,), float(step)), "step": step}


def loaded(place: Path) -> int:
    out = state(0)
    load(out, place)
    assert out["w"].unique().tolist() == [float(out["step"])]
    return int(out["step"])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def by_dcp(state: dict[str, Any], place: Path) -> BaseException | None:
    try:
        return failure_of(lambda: dcp.save(state, storage_writer=StrataWriter(place), no_dist=True))
    except AssertionError:
        return None


def by_ours(state: dict[str, Any], place: Path) -> BaseException | None:
    return async_save(state, checkpoint_id=place).exception(LONG)


def by_dcp_async(state: dict[str, Any], place: Path) -> BaseException | None:
    error = dcp.async_save(state, storage_writer=StrataWriter(place), no_dist=True).exception(60)
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


Save = Callable[[dict[str, Any], Path], BaseException | None]
WAYS: list[Save] = [by_dcp, by_ours, by_dcp_async]


@pytest.mark.parametrize("by", WAYS)
def test_a_full_disk_is_named_and_leaves_the_old_checkpoint_alone(disk, by):
    before = files(disk)
    error = by(state(2, mib=20), disk / "c")
    assert isinstance(error, StorageError) and "No space left on device" in str(error)
    assert str(disk / "c") in str(error)
    assert files(disk) == before and loaded(disk / "c") == 1
    assert arena_stats().busy_slots == 0
    assert by(state(3), disk / "c") is None and loaded(disk / "c") == 3


@pytest.mark.parametrize("by", [by_dcp, by_ours])
def test_wherever_the_disk_becomes_full_the_save_is_whole_or_leaves_nothing(disk, by):
    filler, outcomes = disk / "filler", set()
    for kib in (0, 4, 40, 1024, 2040, 2044, 2048, 2052, 2056, 2060, 2064, 2068, 2076, 2100, 2200):
        save(state(1), disk / "c")
        before = files(disk / "c")
        room = _room(disk)
        with filler.open("wb") as file:
            file.write(b"\1" * max(room - kib * 1024, 0))
        error = by(state(2), disk / "c")
        filler.unlink()
        outcomes.add(error is None)
        assert error is None or isinstance(error, StorageError), repr(error)
        assert loaded(disk / "c") == (2 if error is None else 1)
        assert error is None or files(disk / "c") == before
        assert verify(disk / "c").problems == ()
    assert outcomes == {True, False}


def _room(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("by", WAYS)
def test_a_place_that_is_read_only_is_named_and_still_loads(disk, by):
    read_only(disk, on=True)
    before = files(disk)
    try:
        error = by(state(2), disk / "c")
        assert isinstance(error, StorageError) and "Read-only file system" in str(error), repr(error)
        assert str(disk / "c") in str(error)
        assert isinstance(by(state(2), disk / "new"), StorageError)
        assert files(disk) == before and loaded(disk / "c") == 1 and verify(disk / "c").problems == ()
    finally:
        read_only(disk, on=False)
    assert arena_stats().busy_slots == 0
    assert by(state(3), disk / "c") is None and loaded(disk / "c") == 3


def save_more_than_fits(rank: int, place: str) -> Any:
    told = []
    for step, mib in ((2, 2), (3, 12 if rank == 1 else 1), (4, 1)):
        mine = {f"own{rank}": torch.full((mib * MIB // 4,), float(step)), "shared": torch.full((5,), float(step))}
        error = async_save(mine, checkpoint_id=place).exception(LONG)
        told.append((type(error).__name__, str(error), getattr(error, "__notes__", [])) if error else None)
    out = {"shared": torch.zeros(5)}
    dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
    return told, out["shared"].unique().tolist(), arena_stats().busy_slots


def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(disk, tmp_path):
    results = run_ranks(tmp_path, 2, save_more_than_fits, str(disk / "ranks"))
    for rank, (told, found, busy) in enumerate(results):
        assert [error is None for error in told] == [True, False, True]
        name, message, notes = told[1]
        assert name == "StorageError" and "No space left on device" in message
        assert ("rank 1 of 2 failed" in " ".join(notes)) == (rank == 0)
        assert (found, busy) == ([4.0], 0)
    assert verify(disk / "ranks").problems == ()
    assert len([name for name in files(disk / "ranks") if name.endswith(".distcp")]) == 2
