"""SIGKILL after every write of a save in turn: what was there loads whole, or what was saved, never a mix of both."""

import logging
import os
import shutil
import tempfile
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
STOCK_IS_BEHIND = "stock readers see another state"
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
        if isinstance(cause, CheckpointNotFoundError) or "metadata is None" in str(cause):  # ours, stock's
            return NOTHING
        return f"{cause!r}"
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
    notes = [STOCK_IS_BEHIND if "stock readers" in warning else warning for warning in report.warnings]
    return [*report.problems, *report.unchecked, *notes]


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


def sweep(_rank: int, folder: str, before: str, alone: bool, config: StorageConfig) -> Any:
    """Every write of the save, and the aftermath of a kill after it."""
    logging.disable(logging.CRITICAL)  # of this process: most loads here fail, with long traces
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
    results = []
    for number in range(total + 1):
        ended = killed(number)
        last = ended.writes[-1] if ended.writes else "no write"
        assert ended.exit_code == (-9 if number <= len(ended.writes) else 0)
        indexed = any(write.startswith("rename") and write.endswith(".metadata") for write in ended.writes)
        result = {**in_child(aftermath, place), "indexed": indexed}
        results.append((f"killed after {number} of {total}: {last}", result))
    return whole.writes, results


def check(results: Any, *, empty: bool) -> None:
    """Old, then new from one write on: a later kill never brings the old state back."""
    old = NOTHING if empty else 1
    for reader in ("ours", "stock"):
        steps = [(what, result["left"][reader]) for what, result in results]
        turn = next((i for i, (_, step) in enumerate(steps) if step == 2), len(steps) - 1)
        assert [*steps[:turn]] == [(what, old) for what, _ in steps[:turn]], f"{reader} before the commit"
        assert [*steps[turn:]] == [(what, 2) for what, _ in steps[turn:]], f"{reader} from the commit on"
    for what, result in results:
        left, after, files = result["left"], result["after"], result["files"]
        expected = [STOCK_IS_BEHIND] if left["ours"] == 2 and not result["indexed"] else []
        assert left["verify"] == ([NOTHING] if left["ours"] == NOTHING else expected), what
        assert after == {"ours": 3, "stock": 3, "verify": []}, what
        kinds = [os.path.splitext(name)[1] or os.path.dirname(name) for name in files]
        assert kinds == ["", ".strata", ".distcp"], (what, files)


SAVES = [(before, alone) for before in BEFORE for alone in (False, True)]


@pytest.mark.parametrize(("before", "alone"), SAVES)
def test_a_kill_after_any_write_leaves_the_old_checkpoint_or_the_new_one(tmp_path, before, alone):
    (result,) = run_ranks(tmp_path, 1, sweep, str(tmp_path), before, alone, ONE_BY_ONE)
    writes, results = result
    assert len(writes) >= 15 and len(results) == len(writes) + 1
    check(results, empty=before == "nothing")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "alone"), SAVES)
def test_a_kill_among_writes_at_the_same_time_leaves_the_old_checkpoint_or_the_new_one(tmp_path, before, alone):
    for _ in range(5):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        ((_, results),) = run_ranks(folder, 1, sweep, str(folder), before, alone, SEVERAL)
        check(results, empty=before == "nothing")


class OfRank:
    """A writer or reader of one rank that saves and loads on its own, in this process."""

    own_rank = 0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **{**kwargs, "rank": self.own_rank})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return super().read_metadata(*args, **({**kwargs, "rank": self.own_rank} if "rank" in kwargs else kwargs))

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **{**kwargs, "rank": self.own_rank})


def of_rank(rank: int, kind: Any) -> Any:
    return type(f"{kind.__name__}OfRank{rank}", (OfRank, kind), {"own_rank": rank})


def save_alone(rank: int, step: int, place: Path) -> None:
    writer = of_rank(rank, StrataWriter)(place, world_size=2)
    dcp.save(state_of(step), storage_writer=writer, no_dist=True, use_collectives=False)


@pytest.mark.parametrize("before", BEFORE)
def test_ranks_on_their_own_have_saved_when_the_last_of_them_has(tmp_path, before):
    """A kill of the whole job between the commits of two ranks: no rank may load another step than its neighbour."""
    place = tmp_path / "c"
    old = NOTHING if before == "nothing" else 1
    if before == "a rank's":
        save_alone(0, 1, place)
        save_alone(1, 1, place)
    else:
        BEFORE[before](place)
    save_alone(0, 2, place)
    assert [found(place, of_rank(rank, StrataReader)) for rank in (0, 1)] == [old, old]
    save_alone(1, 2, place)
    assert [found(place, of_rank(rank, StrataReader)) for rank in (0, 1)] == [2, 2]
    assert [found(place, of_rank(rank, FileSystemReader)) for rank in (0, 1)] == [2, 2]
