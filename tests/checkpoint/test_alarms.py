"""Alarms: a state that changes while it is copied, and a model that stands still while steps are counted."""

import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.ranks import run_ranks
from torch_strata import CheckpointManager, async_save
from torch_strata.checkpoint import staging
from torch_strata.checkpoint.alarms import StaleAlarm, changed_values, in_words
from torch_strata.checkpoint.staging import snapshot, snapshot_behind_training
from torch_strata.errors import CheckpointError, ConfigError

LIMIT = timedelta(seconds=60)


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(64, 128, generator=generator), "bias": torch.zeros(4)},
        "optimizer": {"exp_avg": torch.randn(64, 128, generator=generator), "groups": [{"lr": 0.1, "steps": step}]},
        "step": step,
    }


class Meanwhile:
    """Lets another thread do something to a state between the begin and the end of its copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._start = staging._native.start_copy
        self._work: Any = None
        monkeypatch.setattr(staging._native, "start_copy", self._copy)

    def do(self, work: Any) -> None:
        self._work = work

    def _copy(self, *args: Any) -> Any:
        copying = self._start(*args)
        work, self._work = self._work, None
        if work is not None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
        return copying


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    return Meanwhile(monkeypatch)


def test_a_tensor_that_another_thread_writes_to_while_it_is_copied_is_named(
    meanwhile: Meanwhile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(1)
    meanwhile.do(lambda: state["model"]["weight"].add_(1))
    stats = async_save(state, checkpoint_id=tmp_path / "torn").result(LIMIT)
    assert stats is not None and stats.torn == ("model.weight",)
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "torn, maybe a mix of two states" in told.message
    assert "model.weight" in told.message
    caplog.clear()
    stats = async_save(state, checkpoint_id=tmp_path / "whole").result(LIMIT)
    assert stats is not None and stats.torn == () and not caplog.records


def test_a_value_that_changes_while_the_tensors_are_copied_is_named(meanwhile: Meanwhile) -> None:
    state = state_of(1)
    meanwhile.do(lambda: None)
    assert snapshot(state).torn == ()
    copied = dict(snapshot(state))
    state["optimizer"]["groups"][0]["steps"] = 2
    state["optimizer"]["groups"].append({})
    state["model"]["more"] = 1
    del state["step"]
    assert changed_values(state, copied) == ["the state"]
    state["step"] = "1"
    assert changed_values(state, copied) == ["model", "optimizer.groups", "step"]


def test_views_and_optimizers_count_as_writes(meanwhile: Meanwhile) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    train()
    meanwhile.do(train)
    torn = snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict()}).torn
    assert "model.weight" in torn and "optimizer.state.0.exp_avg" in torn and "optimizer.state.1.step" in torn


def test_what_overlap_copies_later_is_not_called_torn(meanwhile: Meanwhile, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = torch.zeros(8)

    def change() -> None:
        with torch.no_grad():
            model.weight.add_(1)

    meanwhile.do(change)
    staged = snapshot_behind_training({"model": model.state_dict(), "buffer": buffer}, [optimizer]).result(60)
    assert staged.torn == () and not caplog.records
    meanwhile.do(lambda: buffer.add_(1))
    staged = snapshot_behind_training({"model": model.state_dict(), "buffer": buffer}, [optimizer]).result(60)
    assert staged.torn == ("buffer",)


def test_a_tensor_is_never_saved_under_the_name_of_another(meanwhile: Meanwhile) -> None:
    state = state_of(1)
    new = {"first": torch.ones(3), **state["model"]}
    meanwhile.do(lambda: state.update(model=new))
    with pytest.raises(CheckpointError, match=r"'model.first'.*added or replaced"):
        snapshot(state)
    meanwhile.do(lambda: state["optimizer"].pop("exp_avg"))
    with pytest.raises(CheckpointError, match="removed from the state"):
        snapshot(state)
    assert snapshot(state).torn == ()


def test_tensors_of_inference_are_copied_although_nothing_counts_their_writes() -> None:
    with torch.inference_mode():
        state = {"w": torch.arange(4.0)}
    assert torch.equal(snapshot(state)["w"], torch.arange(4.0))


def test_a_manager_refuses_a_torn_state_if_asked_to(meanwhile: Meanwhile, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", on_torn="raise")
    state = state_of(1)
    meanwhile.do(lambda: state["model"]["weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"step-1: changed while it was copied: model.weight"):
        manager.save(state, step=1)
    assert manager.all() == [] and not list(tmp_path.rglob("*.distcp"))
    manager.save(state, step=1).result(LIMIT)
    assert [found.step for found in manager.all()] == [1]
    with pytest.raises(ConfigError, match="on_torn"):
        CheckpointManager(tmp_path / "run", on_torn="ignore")  # type: ignore[arg-type]


def _save_torn_on_rank_1(rank: int, root: Path) -> tuple[str, str, list[str]]:
    manager = CheckpointManager(root, on_torn="raise")
    state = state_of(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            Meanwhile(patch).do(lambda: state["model"]["weight"].add_(1))
        try:
            manager.save(state, step=1).result(LIMIT)
        except CheckpointError as error:
            told = str(error), "".join(getattr(error, "__notes__", ()))
    manager.save(state, step=2).result(LIMIT)
    lines = manager.metrics().splitlines()
    return *told, [line for line in lines if line.startswith(("strata_checkpoint_save", "strata_checkpoint_torn"))]


def test_what_one_rank_refuses_no_rank_saves_and_the_next_save_is_whole(tmp_path: Path) -> None:
    zero, one = run_ranks(tmp_path, 2, _save_torn_on_rank_1, tmp_path / "run")
    assert "step-1: changed while it was copied: model.weight" in zero[0] and zero[0] == one[0]
    assert "rank 1 of 2" in zero[1]
    for rank, (_, _, lines) in enumerate((zero, one)):
        labels = f'run="{tmp_path}/run",rank="{rank}",type="full"'
        assert f"strata_checkpoint_saves_total{{{labels}}} 1" in lines
        assert f"strata_checkpoint_save_failures_total{{{labels}}} 1" in lines
        assert f"strata_checkpoint_torn_saves_total{{{labels}}} {rank}" in lines
    assert [found.step for found in CheckpointManager(tmp_path / "run").all()] == [2]


def test_a_model_that_stands_still_while_steps_are_counted_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stale() -> list[str]:
        told = [record.message for record in caplog.records if "bit for bit" in record.message]
        caplog.clear()
        return told

    manager = CheckpointManager(tmp_path / "run")
    for step, weights in [(10, 1), (20, 1), (30, 1), (40, 2)]:
        manager.save({**state_of(weights), "step": step}, step=step).result(LIMIT)
    (told,) = stale()
    assert "the model at step 20 is the one of step 10" in told
    manager.save({**state_of(2), "step": 50}, step=50).result(LIMIT)
    assert len(stale()) == 1, "it had changed in between"
    manager.save({"w": torch.zeros(3)}, step=60).result(LIMIT)
    manager.save({"w": torch.zeros(3)}, step=70).result(LIMIT)
    assert stale() == [], "nobody said which of it is the model"


def test_a_training_that_stands_still_after_it_was_resumed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CheckpointManager(tmp_path / "run").save(state_of(1), step=10).result(LIMIT)
    CheckpointManager(tmp_path / "run").save(state_of(1), step=20, checkpoint_type="incremental").result(LIMIT)
    assert "the model at step 20 is the one of step 10" in caplog.text


def test_a_stale_alarm_compares_what_is_alike_and_later() -> None:
    alarm = StaleAlarm()
    notes = [("whole", 1, "a"), ("model", 1, "a"), ("model", 2, "a"), ("whole", 1, "a"), ("whole", 2, "b")]
    assert [alarm.note(*note)[0] for note in notes] == [False, False, True, False, False]
    assert alarm.note("whole", 3, None) == (False, "") == alarm.note("whole", 4, None)


def test_few_names_are_shown_of_many() -> None:
    assert in_words(["a", "b"]) == "a, b"
    assert in_words(list("abcde")) == "a, b, c and 2 more"
