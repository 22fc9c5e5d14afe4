"""SIGKILL after every write of a save in turn: what was there loads whole, or what was saved, never a mix of both."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tests.checkpoint.ranks import run_ranks
from tests.support.kill import in_child, watch
from torch_strata import CheckpointNotFoundError, StorageConfig, StrataReader, StrataWriter, verify

# Two parts. One write at a time: "after the N-th" names one state.
ONE_BY_ONE = StorageConfig(part_bytes=5 << 20, max_concurrency=1)
SEVERAL = StorageConfig(part_bytes=5 << 20)

NOTHING = "nothing"
Found = int | str


def state_of(step: int) -> dict[str, Any]:
    """Everything differs from step to step."""
    return {
        "big": torch.arange(1_200_000, dtype=torch.float32) + step,
        "middle": torch.arange(150_000, dtype=torch.float32) * step,
        "small": torch.full((3, 5), float(step), dtype=torch.bfloat16),
        "even": torch.tensor(step % 2 == 0),
        "opt": {"step": step, "text": f"{step} " * 4000, "m": [torch.full((7,), step), step * 0.5]},
    }


def zeros() -> dict[str, Any]:
    return {
        "big": torch.zeros(1_200_000),
        "middle": torch.zeros(150_000),
        "small": torch.zeros(3, 5, dtype=torch.bfloat16),
        "even": torch.tensor(False),
        "opt": {"step": 0, "text": "", "m": [torch.zeros(7, dtype=torch.int64), 0.0]},
    }


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def save(step: int, place: Path, *, alone: bool = False, config: StorageConfig = ONE_BY_ONE) -> None:
    writer = StrataWriter(place, config=config)
    dcp.save(state_of(step), storage_writer=writer, no_dist=True, use_collectives=not alone)


def save_with_stock(step: int, place: Path) -> None:
    dcp.save(state_of(step), storage_writer=FileSystemWriter(place), no_dist=True)


BEFORE = {
    "nothing": lambda place: None,
    "ours": lambda place: save(1, place),
    "stock's": lambda place: save_with_stock(1, place),
    "a rank's": lambda place: save(1, place, alone=True),
}


def found(place: Path, reader: Any) -> Found:
    """The step that loads whole, or what went wrong."""
    out = zeros()
    try:
        dcp.load(out, storage_reader=reader(place), no_dist=True)
    except BaseException as error:
        failures = getattr(error, "failures", None)
        cause = next(iter(failures.values()))[0] if failures else error
        return NOTHING if isinstance(cause, FileNotFoundError | CheckpointNotFoundError) else f"{cause!r}"
    step = out["opt"]["step"]
    return step if equal(out, state_of(step)) else f"a mix with step {step}"


def problems(place: Path) -> list[str]:
    try:
        report = verify(place)
    except CheckpointNotFoundError:
        try:
            report = verify(place, rank=0)
        except CheckpointNotFoundError:
            return [NOTHING]
    return [*report.problems, *report.warnings]


def aftermath(place: Path) -> dict[str, Any]:
    """What a killed save left, and what the next save makes of it."""
    left = {"ours": found(place, StrataReader), "stock": found(place, FileSystemReader), "verify": problems(place)}
    # Stages of dead processes go when they are an hour old, since they may be those of living ones before.
    for stage in place.rglob(".tmp-*"):
        os.utime(stage, (time.time() - 7200,) * 2)
    save(3, place)
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    after = {"ours": found(place, StrataReader), "stock": found(place, FileSystemReader), "verify": problems(place)}
    return {"left": left, "after": after, "files": files}


def sweep(_rank: int, folder: str, before: str, alone: bool, sampled: bool, config: StorageConfig) -> Any:
    """Every write of the save, and the aftermath of a kill after it."""
    place, origin = Path(folder, "c"), Path(folder, "before")
    in_child(BEFORE[before], origin)

    def start_over() -> None:
        shutil.rmtree(place, ignore_errors=True)
        if origin.exists():
            shutil.copytree(origin, place)

    def killed(number: int | None) -> Any:
        start_over()
        return watch(lambda: save(2, place, alone=alone, config=config), folder, kill_after=number)

    whole = killed(None)
    assert whole.exit_code == 0
    total = len(whole.writes)
    numbers = range(total + 1)
    if sampled:
        numbers = sorted({*numbers[:3], *numbers[::7], *numbers[-14:]})
    results = []
    for number in numbers:
        ended = killed(number)
        last = ended.writes[-1] if ended.writes else "no write"
        assert ended.exit_code == (-9 if number <= len(ended.writes) else 0)
        results.append((f"killed after {number} of {total}: {last}", in_child(aftermath, place)))
    return whole.writes, results
