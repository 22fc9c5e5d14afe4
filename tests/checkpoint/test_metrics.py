"""Metrics: text that a parser of Prometheus' format takes, with numbers that agree with what was saved."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.s3 import Answer, Bucket, Request, gateway, options, refusal
from torch_strata import CheckpointManager
from torch_strata.checkpoint import run_record
from torch_strata.checkpoint.metrics import Family, Sample, exposition, write_text
from torch_strata.errors import CheckpointError, StorageError

LIMIT = timedelta(seconds=60)
LINE = re.compile(r"(?P<name>[a-z_:][a-z0-9_:]*)\{(?P<labels>.*)\} (?P<value>\S+)")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Values by name and labels; fails where the text is not what the format's page says."""
    assert text.endswith("\n")
    values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    family, kind = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family, help_text = line.removeprefix("# HELP ").split(" ", 1)
            assert help_text and family not in values
        elif line.startswith("# TYPE "):
            named, kind = line.removeprefix("# TYPE ").split(" ")
            assert named == family
            assert (kind == "counter") == family.endswith("_total")
        else:
            found = LINE.fullmatch(line)
            assert found, line
            allowed = {f"{family}_sum", f"{family}_count"} if kind == "summary" else {family}
            assert found["name"] in allowed
            rest = LABEL.sub("", found["labels"])
            assert set(rest) <= {","}, rest
            labels = frozenset((key, unescaped(value)) for key, value in LABEL.findall(found["labels"]))
            series = values.setdefault(found["name"], {})
            assert labels not in series, "one value of each"
            series[labels] = float(found["value"])
    return values


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def value(manager: CheckpointManager, name: str, **labels: str) -> float:
    series = parsed(manager.metrics())[f"strata_{name}"]
    return series[frozenset({"run": manager.storage_path, "rank": "0", **labels}.items())]


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 128), float(step)), "frozen": torch.arange(65536.0)}, "step": step}


def test_labels_survive_whatever_a_path_holds() -> None:
    run = 'a "run" \\ with\na line end, {and} more'
    families = [
        Family("strata_x_total", "counter", "help with \\ and\na line end", [Sample(3, {"type": "full"})]),
        Family("strata_y_seconds", "summary", "y", [Sample(0.25, {}, "_sum"), Sample(2, {}, "_count")]),
        Family("strata_z", "gauge", "nothing yet", []),
    ]
    assert parsed(exposition(families, {"run": run})) == {
        "strata_x_total": {frozenset({("run", run), ("type", "full")}): 3},
        "strata_y_seconds_sum": {frozenset({("run", run)}): 0.25},
        "strata_y_seconds_count": {frozenset({("run", run)}): 2},
    }


def test_metrics_say_what_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_strata")
    manager = CheckpointManager(tmp_path / "run", keep_count=2)
    assert "strata_checkpoint_last_durable_step" not in parsed(manager.metrics())
    began_at = time.time()
    for step in (1, 2):
        manager.save(state_of(step), step=step).result(LIMIT)
    manager.save(state_of(3), step=3, checkpoint_type="incremental").result(LIMIT)
    found = {checkpoint.step: checkpoint.size_bytes for checkpoint in manager.all()}
    assert value(manager, "checkpoint_last_durable_step") == 3
    assert began_at <= value(manager, "checkpoint_last_durable_timestamp_seconds") <= time.time()
    assert 0 <= value(manager, "checkpoint_last_durable_age_seconds") < time.time() - began_at
    assert value(manager, "checkpoint_saves_total", type="full") == 2
    assert value(manager, "checkpoint_saves_total", type="incremental") == 1
    assert value(manager, "checkpoint_written_bytes_total", type="full") == 2 * found[2]
    assert value(manager, "checkpoint_written_bytes_total", type="incremental") == found[3]
    assert value(manager, "checkpoint_referred_bytes_total", type="full") == 0
    assert value(manager, "checkpoint_referred_bytes_total", type="incremental") == 65536 * 4
    for duration in ("stage", "write", "commit"):
        assert value(manager, f"checkpoint_{duration}_seconds_count", type="full") == 2
        assert value(manager, f"checkpoint_{duration}_seconds_sum", type="full") > 0
    assert value(manager, "checkpoint_removed_total") == 1
    assert value(manager, "checkpoint_kept") == 2
    assert value(manager, "checkpoint_saves_in_flight") == 0
    assert value(manager, "store_retries_total") == 0
    told = [record.message for record in caplog.records if "after the call" in record.message]
    assert len(told) == 3 and "step-3: incremental" in told[2] and "0.3 MB referred to" in told[2]


def test_saves_of_bytes_and_failures_are_counted(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", on_failure="continue")
    manager.save(b"x" * 1000, step=1).result(LIMIT)
    manager.save(b"x", step=1).exception(LIMIT)
    manager.save(state_of(1), step=1).exception(LIMIT)
    with pytest.raises(CheckpointError):
        manager.save({"step": threading.Lock()}, step=2)
    assert value(manager, "checkpoint_saves_total", type="full") == 1
    assert value(manager, "checkpoint_save_failures_total", type="full") == 3
    assert value(manager, "checkpoint_written_bytes_total", type="full") == 1000


def test_what_a_store_did_to_the_saves_is_counted(bucket: Bucket) -> None:
    refused: list[Request] = []

    def throttling(request: Request, forward: Callable[[], Answer]) -> Answer:
        if request.method == "PUT" and ".distcp" in request.target and not refused:
            refused.append(request)
            return refusal(503, "SlowDown")
        return forward()

    with gateway(bucket.endpoint, throttling) as endpoint:
        manager = CheckpointManager(bucket.url("run"), storage_options=options(endpoint))
        for step in (1, 2):
            manager.save(state_of(step), step=step).result(LIMIT)
        assert value(manager, "store_retries_total") == value(manager, "store_throttled_total") == len(refused) == 1
        assert value(manager, "store_requests_total") > 10


def test_a_stale_and_a_torn_state_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_strata.checkpoint.alarms import TensorWatch

    manager = CheckpointManager(tmp_path / "run")
    for step in (1, 2, 3):
        manager.save(state_of(0), step=step).result(LIMIT)
    monkeypatch.setattr(TensorWatch, "changed", lambda _: ["model.weight"])
    manager.save(state_of(1), step=4).result(LIMIT)
    assert value(manager, "checkpoint_stale_saves_total", type="full") == 2
    assert value(manager, "checkpoint_torn_saves_total", type="full") == 1


def test_a_file_of_metrics_is_replaced_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    path = tmp_path / "run.prom"
    manager.write_metrics(path)
    parsed(path.read_text())
    assert path.stat().st_mode & 0o444 == 0o444, "whoever scrapes is another user"
    with path.open() as old:
        write_text(path, "new\n")
        assert parsed(old.read()) and path.read_text() == "new\n"
    assert [found.name for found in tmp_path.iterdir()] == ["run.prom"]
    with pytest.raises(StorageError, match=r"nowhere/run.prom"):
        manager.write_metrics(tmp_path / "nowhere/run.prom")


class Clock:
    """`time` as `run_record` sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(run_record, "time", self)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_age_is_that_of_the_last_commit_whatever_failed_since(tmp_path: Path, clock: Clock) -> None:
    manager = CheckpointManager(tmp_path / "run", on_failure="continue")
    clock.now += 5
    assert manager.last_durable_age == timedelta(seconds=5)
    manager.save(b"1", step=1).result(LIMIT)
    assert manager.last_durable_age == timedelta(0), "whoever waited for the save finds it noted"
    clock.now += 7
    assert manager.save(b"1", step=1).exception(LIMIT) is not None
    assert manager.last_durable_age == timedelta(seconds=7)
    manager.save(state_of(2), step=2).result(LIMIT)
    assert manager.last_durable_age == timedelta(0)


def test_time_in_which_nobody_saved_is_not_held_against_a_run(tmp_path: Path, clock: Clock) -> None:
    manager = CheckpointManager(tmp_path / "run", max_age=timedelta(minutes=10))
    clock.now += 3600
    manager.save(b"1", step=1).result(LIMIT)
    clock.now += 3600
    manager.save(b"2", step=2).result(LIMIT)
    assert [found.step for found in manager.all()] == [1, 2]


def test_saves_that_fail_for_longer_than_max_age_stop_the_training_and_one_that_works_starts_anew(
    tmp_path: Path, clock: Clock
) -> None:
    root = tmp_path / "run"
    manager = CheckpointManager(root, on_failure="continue", max_age=timedelta(minutes=10))
    manager.save(b"1", step=1).result(LIMIT)
    root.rename(tmp_path / "aside")
    root.write_text("a file in the way")
    clock.now += 500
    cause = manager.save(b"2", step=2).exception(LIMIT)
    assert isinstance(cause, StorageError)
    clock.now += 101
    with pytest.raises(
        CheckpointError, match=r"nothing was committed for 0:10:01, more than max_age=0:10:00"
    ) as caught:
        manager.save(b"2", step=2)
    assert caught.value.__cause__ is cause
    root.unlink()
    shutil.move(tmp_path / "aside", root)
    clock.now -= 101
    manager.save(b"2", step=2).result(LIMIT)
    clock.now += 3600
    manager.save(b"3", step=3).result(LIMIT)


def test_a_save_that_hangs_for_longer_than_max_age_stops_the_training(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path / "run", on_failure="continue", max_age=timedelta(minutes=10))
    gate = threading.Event()
    hold_right = manager._hold_right
    monkeypatch.setattr(manager, "_hold_right", lambda: (gate.wait(60), hold_right()))
    clock.now += 3600
    hanging = manager.save(b"1", step=1)
    try:
        clock.now += 590
        second = manager.save(b"2", step=2)
        clock.now += 20
        with pytest.raises(CheckpointError, match="a save is still under way"):
            manager.save(b"3", step=3)
    finally:
        gate.set()
    assert hanging.result(LIMIT) is not None and second.result(LIMIT) is not None
    manager.save(b"3", step=3).result(LIMIT)
