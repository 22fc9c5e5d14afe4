"""Saves in one line: where they go, under which step, and when they have gone there."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_strata
from tests.checkpoint.ranks import run_ranks
from torch_strata import AsyncCheckpointWriter, CheckpointManager, StorageConfig
from torch_strata.checkpoint import quick
from torch_strata.checkpoint.retention import KeepLast
from torch_strata.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError

LIMIT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(quick, "_the_process", None)
    for name in [name for name in os.environ if name.startswith("STRATA_")]:
        monkeypatch.delenv(name)
    yield
    torch_strata.wait_for_checkpoints()


def steps(root: Path) -> list[int]:
    return [found.step for found in CheckpointManager(root).all()]


def state_of(value: float, **more: Any) -> dict[str, Any]:
    return {"w": torch.full((8,), value), **more}


def test_without_a_place_it_says_what_to_do() -> None:
    for call in (
        lambda: torch_strata.save_checkpoint(state_of(1)),
        torch_strata.load_checkpoint,
        torch_strata.configure,
    ):
        with pytest.raises(ConfigError, match=r"configure\(storage_path=...\) or set STRATA_STORAGE"):
            call()
    torch_strata.wait_for_checkpoints()


def test_the_place_is_that_of_configure_else_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_STORAGE", str(tmp_path / "named"))
    torch_strata.save_checkpoint(state_of(1), step=10)
    torch_strata.configure(storage_path=tmp_path / "chosen")
    torch_strata.save_checkpoint(state_of(2), step=20)
    torch_strata.configure(tmp_path / "other")
    torch_strata.save_checkpoint(state_of(3), step=30)
    torch_strata.wait_for_checkpoints()
    assert [steps(tmp_path / name) for name in ("named", "chosen", "other")] == [[10], [20], [30]]
    assert torch_strata.configure().storage_path == str(tmp_path / "named")


def test_settings_reach_the_store_and_the_manager_and_beat_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_MAX_TRIES", "3")
    monkeypatch.setenv("STRATA_FSYNC", "0")
    manager = torch_strata.configure(tmp_path / "run", keep_count=2, max_tries=5)
    assert manager._config == StorageConfig(max_tries=5, fsync=False)
    for step in (1, 2, 3):
        torch_strata.save_checkpoint(state_of(step), step=step)
    torch_strata.wait_for_checkpoints()
    assert steps(tmp_path / "run") == [2, 3]
    config = StorageConfig(max_concurrency=4)
    assert torch_strata.configure(tmp_path, config=config, max_tries=5)._config == StorageConfig(
        max_concurrency=4, max_tries=5
    )
    assert torch_strata.configure(bucket=str(tmp_path / "bucket")).storage_path == str(tmp_path / "bucket")
    with pytest.raises(ConfigError, match=r"unknown keep; expected some of .*keep_count.*max_tries"):
        torch_strata.configure(tmp_path, keep=3)
    with pytest.raises(ConfigError, match="keep_count"):
        torch_strata.configure(tmp_path, keep_count=0)
    assert torch_strata.save_checkpoint(state_of(1), step=1).path == f"{tmp_path}/bucket/step-1", "the last that worked"


def test_a_step_is_the_given_one_else_the_state_s_else_the_next(tmp_path: Path) -> None:
    torch_strata.configure(tmp_path / "run")
    assert torch_strata.save_checkpoint(state_of(1)).step == 1
    assert torch_strata.save_checkpoint(state_of(2)).step == 2
    assert torch_strata.save_checkpoint(state_of(3, step=40)).step == 40
    assert torch_strata.save_checkpoint(state_of(4, step=torch.tensor(3))).step == 41, "not a number"
    assert torch_strata.save_checkpoint(state_of(5, step=7), step=50).step == 50
    assert torch_strata.save_checkpoint(torch.nn.Linear(2, 2)).step == 51
    torch_strata.configure(tmp_path / "run")
    torch_strata.wait_for_checkpoints()
    assert torch_strata.save_checkpoint(b"as bytes").step == 52
    handle = torch_strata.save_checkpoint(state_of(6), step=52)
    with pytest.raises(CheckpointExistsError):
        handle.result(LIMIT)


def test_a_step_in_the_state_that_is_no_int_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch_strata.configure(tmp_path / "run")
    for step in (1, 2):
        assert torch_strata.save_checkpoint(state_of(1, step=torch.tensor(30))).step == step
    torch_strata.save_checkpoint(state_of(1, step=torch.tensor(30)), step=30)
    told = [record.message for record in caplog.records if "pass step=" in record.message]
    assert told == ["the step in the state is no int but a Tensor: saved as step 1; pass step="]


def test_what_was_saved_is_loaded_also_while_it_is_being_saved(tmp_path: Path) -> None:
    torch_strata.configure(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError):
        torch_strata.load_checkpoint()
    handle = torch_strata.save_checkpoint(state_of(1, step=7), epoch=3, metadata={"a": "b"}, metrics={"loss": 1})
    state = state_of(0, step=0)
    assert torch_strata.load_checkpoint(state) is state
    assert state["step"] == 7 and torch.equal(state["w"], torch.ones(8))
    found = handle.result(LIMIT)
    assert found is not None and (found.epoch, found.metadata, found.metrics) == (3, {"a": "b"}, {"loss": 1.0})
    torch_strata.save_checkpoint(state_of(2, step=8))
    assert torch_strata.load_checkpoint()["step"] == 8
    assert torch_strata.load_checkpoint(which=7)["step"] == 7


def test_a_failure_that_nobody_was_told_of_is_raised_by_the_wait_and_the_rest_is_saved(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "first").save(b"1", step=1).result(LIMIT)
    torch_strata.configure(tmp_path / "second")
    torch_strata.save_checkpoint(state_of(1), step=1)
    torch_strata.configure(tmp_path / "first")
    torch_strata.save_checkpoint(state_of(1), step=1)
    with pytest.raises(CheckpointExistsError):
        torch_strata.wait_for_checkpoints()
    assert steps(tmp_path / "second") == [1]
    torch_strata.wait_for_checkpoints()


def test_a_forked_child_saves_to_the_same_place_by_a_manager_of_its_own(tmp_path: Path) -> None:
    torch_strata.configure(tmp_path / "run", keep_count=5)
    torch_strata.save_checkpoint(state_of(1)).result(LIMIT)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch_strata.save_checkpoint(b"from the child").result(LIMIT)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert steps(tmp_path / "run") == [1, 2]


def _save_on_a_rank(rank: int, root: Path) -> list[int]:
    torch_strata.configure(root)
    handles = [torch_strata.save_checkpoint({"w": torch.full((4,), float(n))}) for n in range(3)]
    torch_strata.wait_for_checkpoints()
    return [handle.step for handle in handles]


def test_ranks_agree_on_the_next_step(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "run").save(b"1", step=10).result(LIMIT)
    assert run_ranks(tmp_path, 2, _save_on_a_rank, tmp_path / "run") == [[11, 12, 13]] * 2


def test_bytes_are_written_in_order_while_the_caller_goes_on(tmp_path: Path) -> None:
    with AsyncCheckpointWriter(tmp_path / "run", retention=KeepLast(2)) as writer:
        data = bytearray(b"a" * 100_000)
        handles = []
        for step in (1, 2, 3):
            handles.append(writer.write(data, step=step, epoch=1, metadata={"n": str(step)}))
            data[:] = bytes([ord("a") + step]) * 100_000
        assert [handle.step for handle in handles] == [1, 2, 3]
        writer.wait()
        assert all(handle.done() for handle in handles)
        assert steps(tmp_path / "run") == [2, 3]
        assert writer.manager.load(3) == b"c" * 100_000
        with pytest.raises(ConfigError, match=r"expected bytes.*found a dict"):
            writer.write({"w": 1}, step=4)  # type: ignore[arg-type]
        with pytest.raises(CheckpointExistsError):
            writer.write(b"", step=3).result(LIMIT)
