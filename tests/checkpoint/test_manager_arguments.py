"""What a caller gets wrong is told at the call that is wrong, and means what it says wherever the process goes."""

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_strata import AsyncCheckpointWriter, CheckpointManager, KeepAny, KeepBest, KeepLast, configure
from torch_strata.errors import ConfigError

WAIT = timedelta(seconds=60)


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((16,), float(step))}, "step": step}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as made:
        yield made


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_failure": "ignore"}, "on_failure: expected 'raise' or 'continue', found 'ignore'"),
        ({"on_torn": "ignore"}, "on_torn: expected 'warn' or 'raise'"),
        ({"timeout": 5}, "timeout: expected a timedelta above 0, found 5"),
        ({"timeout": timedelta(0)}, "timeout: expected a timedelta above 0"),
        ({"no_dist": "no"}, "no_dist: expected a bool, found 'no'"),
        ({"storage_options": {"colour": "red"}}, 'no option "colour" for local stores'),
        ({"storage_options": ["region"]}, "storage_options: expected a mapping"),
        ({"trusted_classes": "numpy"}, "trusted_classes: expected a class or function"),
        ({"trusted_classes": 3}, "trusted_classes: expected classes or functions"),
        ({"allow_dtype_cast": 1}, "allow_dtype_cast: expected a bool"),
    ],
)
def test_a_setting_is_refused_where_it_is_given(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", [b"run", "", 5, Path("s3:/bucket/run")])
def test_a_place_that_is_none_is_refused_where_it_is_given(place: Any) -> None:
    with pytest.raises(ConfigError):
        CheckpointManager(place)


def test_an_option_of_a_remote_store_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match='no option "colour" for s3'):
        CheckpointManager("s3://bucket/run", storage_options={"colour": "red"})
    with pytest.raises(ConfigError, match="on_failure"):
        AsyncCheckpointWriter("run", on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout"):
        configure("run", timeout=5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metadata": ["note"]}, "metadata: expected a mapping of str to str, found a list"),
        ({"metadata": "note"}, "metadata: expected a mapping of str to str, found a str"),
        ({"metadata": {"note": "\ud800"}}, "metadata: expected str to str"),
        ({"metadata": {"\ud800": "note"}}, "metadata: expected str to str"),
        ({"metrics": [1.0]}, "metrics: expected a mapping of str to a number, found a list"),
        ({"metrics": {1: 1.0}}, "metrics: expected str to a number, found the key 1"),
        ({"metrics": {"\ud800": 1.0}}, "metrics: expected str to a number"),
        ({"metrics": {"loss": "1.5"}}, "metrics: expected numbers, found 'loss': '1.5'"),
        ({"metrics": {"loss": True}}, "metrics: expected numbers, found 'loss': True"),
        ({"metrics": {"loss": 10**400}}, "too large"),
        ({"metrics": {"loss": torch.ones(2)}}, "metrics: expected numbers"),
        ({"overwrite": "no"}, "overwrite: expected a bool, found 'no'"),
        ({"step": 1 << 63}, r"step: expected an int from 0 to 2\*\*63 - 1, found 9223372036854775808"),
        ({"epoch": 1 << 63}, r"epoch: expected an int from 0 to 2\*\*63 - 1"),
    ],
)
def test_a_save_refuses_what_it_cannot_keep(manager: CheckpointManager, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manager.save(state_of(1), **{"step": 1, **settings})
    assert manager.all() == []
    manager.save(state_of(1), step=1).result(WAIT)


def test_two_values_of_one_name_are_named(manager: CheckpointManager) -> None:
    with pytest.raises(ConfigError, match=r"two values have one name: .*a\.b"):
        manager.save({"a.b": 1, "a": {"b": 2}}, step=1).result(WAIT)


@pytest.mark.parametrize("who", ["", "a/b", 5, None, "\ud800"])
def test_who_holds_has_a_name(manager: CheckpointManager, who: Any) -> None:
    manager.save(state_of(1), step=1).result(WAIT)
    with pytest.raises(ConfigError, match="who: expected a name"), manager.hold(1, who):
        pass


@pytest.mark.parametrize("how", ["storage_path", "bucket"])
def test_a_run_stays_where_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager(**{how: "runs/../run/"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = manager.save(state_of(1), step=1).result(WAIT)
    assert manager.storage_path == str(tmp_path / "run")
    assert found is not None and found.path == str(tmp_path / "run/step-1")
    assert manager.load()["step"] == 1 and list((tmp_path / "elsewhere").iterdir()) == []


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for place in ("~/run", Path("~/run")):
        assert CheckpointManager(place).storage_path == str(tmp_path / "home/run")
    assert CheckpointManager("s3://bucket/~/run/").storage_path == "s3://bucket/~/run"


def test_a_metric_that_no_policy_finds_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = KeepAny(KeepLast(1), KeepBest("val_los"), KeepBest("acc", "max"))
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path / "run", retention=policy) as manager:
        manager.save(state_of(1), step=1)  # a save without any is one that was not evaluated
        assert caplog.records == []
        for step in (2, 3):
            manager.save(state_of(step), step=step, metrics={"val_loss": 0.5, "acc": 0.1 * step})
    told = [record.getMessage() for record in caplog.records if "KeepBest" in record.getMessage()]
    assert len(told) == 1 and "without the metric 'val_los'" in told[0] and "'val_loss', 'acc'" in told[0]


def test_any_of_nothing_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="KeepAny: expected at least one policy"):
        KeepAny()


def test_the_best_is_asked_for_by_its_metric_where_there_are_several(tmp_path: Path) -> None:
    policy = KeepAny(KeepBest("loss"), KeepAny(KeepBest("acc", "max"), KeepLast(9)))
    with CheckpointManager(tmp_path / "run", retention=policy) as manager:
        for step, loss, acc in ((1, 0.1, 0.2), (2, 0.5, 0.9), (3, 0.6, 0.3)):
            manager.save(state_of(step), step=step, metrics={"loss": loss, "acc": acc})
    best = {metric: manager.best(metric) for metric in ("loss", "acc")}
    assert {metric: found and found.step for metric, found in best.items()} == {"loss": 1, "acc": 2}
    ask: Callable[[], object]
    for ask in (manager.best, lambda: manager.load("best")):
        with pytest.raises(ConfigError, match=r"not clear by which of 'loss' \(min\), 'acc' \(max\)"):
            ask()
    with pytest.raises(ConfigError, match="no KeepBest for the metric 'f1'"):
        manager.best("f1")
