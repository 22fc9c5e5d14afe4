"""CheckpointManager: the right checkpoints are kept, training resumes exactly, and damage is passed over."""

import random
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.states import flip, largest_object
from torch_strata import StorageConfig, StrataReader, _native
from torch_strata._store import open_store
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.retention import KeepAny, KeepBest, KeepEverySteps, KeepLast
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    LayoutMismatchError,
    StaleGenerationError,
    StorageError,
    StoragePermissionError,
)


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(64, 128, generator=generator), "frozen": torch.arange(65536.0)},
        "optimizer": {"exp_avg": torch.randn(64, 128, generator=generator)},
        "step": step,
    }


def empty_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(64, 128), "frozen": torch.zeros(65536)},
        "optimizer": {"exp_avg": torch.zeros(64, 128)},
        "step": 0,
    }


def assert_is(state: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    assert state["step"] == step
    for part in ("model", "optimizer"):
        for key, value in expected[part].items():
            assert torch.equal(state[part][key], value), f"{part}.{key}"


def saved(manager: CheckpointManager, *steps: int, **settings: Any) -> None:
    for step in steps:
        manager.save(state_of(step), step=step, **settings).result(timedelta(seconds=60))


def another_process_claims(root: Path) -> None:
    _native.claim_generation(open_store(root, StorageConfig()), owner="another process")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as made:
        yield made


def test_a_loop_keeps_the_last_and_resumes_from_them(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_count=2) as manager:
        for step in range(1, 6):
            manager.save(state_of(step), step=step, epoch=step // 2)
    assert [found.step for found in manager.all()] == [4, 5]
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-4", "step-5"]
    again = CheckpointManager(tmp_path / "run", keep_count=2)
    assert again.latest() is not None
    state = empty_state()
    again.load("latest", state)
    assert_is(state, 5)


def test_a_handle_tells_what_is_committed(manager: CheckpointManager, tmp_path: Path) -> None:
    handle = manager.save(state_of(7), step=7, epoch=2, metadata={"who": "me"}, metrics={"loss": torch.tensor(0.5)})
    assert handle.path == f"{tmp_path}/run/step-7"
    found = handle.result(timedelta(seconds=60))
    assert found is not None
    assert handle.done() and handle.exception() is None
    assert (found.step, found.epoch, found.checkpoint_type) == (7, 2, CheckpointType.FULL)
    assert (found.metadata, found.metrics) == ({"who": "me"}, {"loss": 0.5})
    assert found.size_bytes > 65536 * 4 and found.model_hash is not None
    assert manager.all() == [found]


def test_a_save_that_went_well_and_was_removed_since_is_no_failure(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_count=1)
    first, second = (manager.save(state_of(step), step=step) for step in (1, 2))
    manager.wait()
    assert first.result() is None and first.exception() is None
    found = second.result()
    assert found is not None and found.step == 2


def test_the_state_may_change_as_soon_as_save_returns(manager: CheckpointManager) -> None:
    state, data = state_of(1), bytearray(b"x" * 100_000)
    first = manager.save(state, step=1)
    state["model"]["weight"].zero_()
    second = manager.save(data, step=2)
    data[:] = b"y" * 100_000
    first.result()
    second.result()
    loaded = empty_state()
    manager.load(1, loaded)
    assert_is(loaded, 1)
    assert manager.load(2) == b"x" * 100_000


def test_random_numbers_go_on_as_they_would_have(manager: CheckpointManager) -> None:
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    np.random.standard_normal()  # leaves half of a pair behind
    manager.save(state_of(1), step=1).result()

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(), np.random.randint(1 << 30)

    expected = draw()
    draw()
    manager.load("latest", empty_state())
    assert draw() == expected
    manager.load("latest", empty_state(), rng=False)
    assert draw() != expected


def test_all_of_a_state_loads_without_a_template(manager: CheckpointManager) -> None:
    saved(manager, 3)
    state = manager.load(3)
    assert set(state) == {"model", "optimizer", "step"}
    assert_is(state, 3)


def test_what_did_not_change_is_not_written_again_and_outlives_its_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_count=1) as manager:
        saved(manager, 1)
        saved(manager, 2, 3, checkpoint_type="incremental")
        found = manager.latest()
        assert found is not None
        assert found.checkpoint_type is CheckpointType.INCREMENTAL
        assert found.size_bytes < 200_000, "the frozen 256 KiB are referred to"
        state = empty_state()
        manager.load("latest", state)
        assert_is(state, 3)
        assert manager.verify(3).is_sound
        import torch.distributed.checkpoint as dcp

        stock = {"model": {"frozen": torch.zeros(65536)}}
        dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "run/step-3"))
        assert torch.equal(stock["model"]["frozen"], state["model"]["frozen"]), "stock follows the reference"
        saved(manager, 4)
        assert manager.verify(4).is_sound  # until then the newest that is known to be sound is step 3
        manager.apply_retention()
        assert {path.name for path in (tmp_path / "run").rglob("*.distcp")} == {
            path.name for path in (tmp_path / "run/step-4").glob("*.distcp")
        }


def test_an_incremental_whose_parent_is_gone_says_so(manager: CheckpointManager, tmp_path: Path) -> None:
    saved(manager, 1)
    saved(manager, 2, checkpoint_type="incremental")
    for path in (tmp_path / "run/step-1").glob("*.distcp"):
        path.unlink()
    with pytest.raises(BaseException, match=r"step-1/.*step-2 refers to it"):
        manager.load(2, empty_state())


def test_parts_are_saved_and_together_make_the_whole(manager: CheckpointManager) -> None:
    saved(manager, 4, checkpoint_type="optimizer_only")
    assert manager.latest() is None, "nobody can resume from a part"
    part = {"optimizer": {"exp_avg": torch.zeros(64, 128)}}
    manager.load(4, part)
    assert torch.equal(part["optimizer"]["exp_avg"], state_of(4)["optimizer"]["exp_avg"])


def zeros_of(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in empty_state().items() if key in keys}


@pytest.mark.parametrize("template", [lambda: None, lambda: zeros_of("model", "optimizer")])
def test_parts_of_a_step_load_as_one_state(manager: CheckpointManager, template: Any) -> None:
    saved(manager, 3)
    for kind in ("optimizer_only", "model_only"):
        saved(manager, 4, checkpoint_type=kind)
    template = template()
    state = manager.load(4, template)
    assert template is None or state is template
    assert state.keys() == {"model", "optimizer"}
    assert_is({**state, "step": 4}, 4)
    latest = manager.latest()
    assert latest is not None and latest.step == 3, "only a whole checkpoint is the newest"
    manager.load("latest", newest := empty_state())
    assert_is(newest, 3)


def test_bytes_of_a_part_load_alone_and_beside_the_other_part(manager: CheckpointManager) -> None:
    manager.save(b"weights", step=4, checkpoint_type="model_only").result()
    assert manager.load(4) == b"weights"
    saved(manager, 4, checkpoint_type="optimizer_only")
    both = manager.load(4)
    assert both["model"] == b"weights" and torch.equal(
        both["optimizer"]["exp_avg"], state_of(4)["optimizer"]["exp_avg"]
    )


def test_one_of_two_parts_loads_alone(manager: CheckpointManager) -> None:
    for kind in ("optimizer_only", "model_only"):
        saved(manager, 4, checkpoint_type=kind)
    part = manager.load(4, zeros_of("model"))
    assert part.keys() == {"model"} and torch.equal(part["model"]["weight"], state_of(4)["model"]["weight"])


def test_a_whole_checkpoint_of_a_step_comes_before_its_parts(manager: CheckpointManager) -> None:
    saved(manager, 4, checkpoint_type="model_only")
    saved(manager, 4)
    assert_is(manager.load(4), 4)


def test_keys_that_no_part_was_saved_with_are_named_and_nothing_is_changed(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    saved(manager, 4, checkpoint_type="model_only")
    state = empty_state()
    with pytest.raises(LayoutMismatchError) as caught:
        manager.load(4, state)
    assert "'optimizer': step-4-optimizer is not saved; 'step': is in no part" in str(caught.value)
    assert f"only {tmp_path}/run/step-4-model is saved" in str(caught.value)
    assert not state["model"]["weight"].any()


def test_a_damaged_part_is_an_error(manager: CheckpointManager, tmp_path: Path) -> None:
    for kind in ("optimizer_only", "model_only"):
        saved(manager, 4, checkpoint_type=kind)
    flip(largest_object(tmp_path / "run/step-4-optimizer"))
    with pytest.raises(CorruptionError, match="step-4-optimizer"):
        manager.load(4, zeros_of("model", "optimizer"))


def test_the_best_is_kept_and_found(tmp_path: Path) -> None:
    retention = KeepAny(KeepLast(1), KeepBest("loss", "min"), KeepEverySteps(4))
    manager = CheckpointManager(tmp_path / "run", retention=retention)
    for step, loss in enumerate([0.9, 0.2, 0.5, 0.7, float("nan"), 0.6], start=1):
        saved(manager, step, metrics={"loss": loss})
    assert [found.step for found in manager.all()] == [2, 4, 6]
    assert manager.best() is not None
    state = empty_state()
    manager.load("best", state)
    assert_is(state, 2)
    plan = {folder: (keeps, because) for folder, keeps, because in manager.retention_plan()}
    assert plan["step-2"] == (True, "it is one of the best 1 by loss")


def test_a_damaged_newest_is_passed_over_and_stays_for_a_person(
    manager: CheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(manager, 1, 2, 3)
    flip(largest_object(tmp_path / "run/step-3"))
    state = empty_state()
    manager.load("latest", state)
    assert_is(state, 2)
    assert "step-3 is damaged and is passed over" in caplog.text
    assert [found.step for found in manager.all()] == [1, 2]
    assert list((tmp_path / "run/step-3").glob("*.distcp")), "nothing of it is removed"
    with pytest.raises(CheckpointNotFoundError):
        manager.load(3, empty_state())


def test_a_newest_of_which_a_part_is_gone_is_passed_over(
    manager: CheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(manager, 1, 2)
    for path in (tmp_path / "run/step-2").glob("*.distcp"):
        path.unlink()
    state = empty_state()
    manager.load("latest", state)
    assert_is(state, 1)
    assert "step-2 is damaged and is passed over" in caplog.text
    assert [found.step for found in manager.all()] == [1]


def test_whoever_takes_a_run_back_has_claimed_it(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path / "run")
    saved(first, 1, 2)
    _native.Run(
        open_store(tmp_path / "run", StorageConfig()), owner="another process", policy=("all",), orphan_age_s=1.0
    ).rollback(1)
    with pytest.raises(StaleGenerationError):
        saved(first, 3)
    with pytest.raises(StaleGenerationError):
        first.rollback(1)


def test_one_that_was_removed_while_it_was_read_is_not_marked_and_the_newest_is_loaded(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(manager, 1)
    candidates = manager._candidates

    def look(which: Any) -> Any:
        found = candidates(which)
        monkeypatch.setattr(manager, "_candidates", candidates)
        saved(CheckpointManager(tmp_path / "run", keep_count=1), 2)
        return found

    monkeypatch.setattr(manager, "_candidates", look)
    state = empty_state()
    manager.load("latest", state)
    assert_is(state, 2)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-2"]


def test_a_damaged_newest_is_passed_over_where_nothing_may_be_written(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(manager, 1, 2)
    flip(largest_object(tmp_path / "run/step-2"))

    class ReadOnly:
        def __getattr__(self, name: str) -> Any:
            return getattr(run, name)

        def quarantine(self, *args: Any) -> None:
            raise StoragePermissionError("nothing may be written here")

    run = manager._run
    monkeypatch.setattr(manager, "_run", ReadOnly())
    state = empty_state()
    manager.load("latest", state)
    assert_is(state, 1)
    assert "not marked as damaged: StoragePermissionError" in caplog.text


def test_a_damaged_step_that_was_asked_for_is_an_error(manager: CheckpointManager, tmp_path: Path) -> None:
    saved(manager, 1, 2)
    flip(largest_object(tmp_path / "run/step-2"))
    with pytest.raises(CorruptionError, match="step-2"):
        manager.load(2, empty_state())
    assert [found.step for found in manager.all()] == [1, 2]


def test_the_newest_verified_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_count=1)
    saved(manager, 1)
    assert manager.verify(1).is_sound
    saved(manager, 2, 3)
    assert [found.step for found in manager.all()] == [1, 3]
    assert manager.verify(3).is_sound
    saved(manager, 4)
    assert [found.step for found in manager.all()] == [3, 4]


def test_what_is_held_stays_as_long_as_it_is_held(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_count=1)
    saved(manager, 1)
    with CheckpointManager(tmp_path / "run").hold(1, "evaluation"):
        saved(manager, 2, 3)
        assert [found.step for found in manager.all()] == [1, 3]
    saved(manager, 4)
    assert [found.step for found in manager.all()] == [4]


def test_a_step_is_saved_once_and_never_backwards_unless_taken_back(manager: CheckpointManager) -> None:
    saved(manager, 10, 20)
    with pytest.raises(CheckpointExistsError, match="step-20"):
        saved(manager, 20)
    saved(manager, 20, overwrite=True)
    with pytest.raises(CheckpointError, match=r"step 15 lies before step 20.*call rollback\(10\) first"):
        saved(manager, 15)
    assert manager.rollback(10) == ["step-20"]
    saved(manager, 15)
    assert [found.step for found in manager.all()] == [10, 15]


def test_a_manager_that_was_replaced_can_commit_and_remove_nothing_more(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_count=2)
    saved(manager, 1, 2)
    another_process_claims(tmp_path / "run")
    with pytest.raises(StaleGenerationError):
        manager.save(b"3", step=3).result()
    with pytest.raises(StaleGenerationError):
        saved(manager, 4)
    CheckpointManager(tmp_path / "run", keep_count=1).apply_retention()
    assert [found.step for found in manager.all()] == [1, 2]


def test_managers_of_one_process_are_one_run(tmp_path: Path) -> None:
    first, second = (CheckpointManager(tmp_path / "run") for _ in range(2))
    first.save(b"1", step=1).result()
    saved(second, 2)
    second.apply_retention()
    first.save(b"3", step=3).result()
    saved(first, 4)
    assert [found.step for found in second.all()] == [1, 2, 3, 4]


def test_a_step_that_is_saved_incrementally_over_itself_is_whole(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    saved(manager, 1)
    saved(manager, 1, checkpoint_type="incremental", overwrite=True)
    state = empty_state()
    manager.load(1, state)
    assert_is(state, 1)


def test_failures_are_passed_over_only_until_the_last_checkpoint_is_too_old(tmp_path: Path) -> None:
    max_age = timedelta(milliseconds=300)
    manager = CheckpointManager(tmp_path / "run", on_failure="continue", max_age=max_age, keep_count=1)
    manager.save(b"1", step=1).result()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file in the way")
    assert isinstance(manager.save(b"2", step=2).exception(), StorageError)
    ends_at = time.monotonic() + 20
    with pytest.raises(CheckpointError, match="nothing was committed for"):
        while time.monotonic() < ends_at:
            manager.save(b"2", step=2).exception()


def test_a_store_that_cannot_be_listed_is_an_error_and_not_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(StorageError):
        manager.latest()
    with pytest.raises(StorageError):
        manager.load("latest", empty_state())


def test_nothing_to_resume_from_is_told(manager: CheckpointManager) -> None:
    assert manager.latest() is None and manager.all() == []
    with pytest.raises(CheckpointNotFoundError):
        manager.load("latest", empty_state())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one of storage_path and bucket"),
        ({"storage_path": "a", "bucket": "b"}, "one of storage_path and bucket"),
        ({"storage_path": "a", "storage_type": "s3"}, "goes with bucket"),
        ({"bucket": "b", "storage_type": "ftp"}, "expected local, file, s3"),
        ({"storage_path": "a", "keep_count": 0}, "at least 1, found 0"),
        ({"storage_path": "a", "keep_count": -3}, "at least 1, found -3"),
        ({"storage_path": "a", "keep_count": True}, "found True"),
        ({"storage_path": "a", "keep_count": 1, "retention": KeepLast(1)}, "either it or retention"),
        ({"storage_path": "a", "retention": "last"}, "expected a policy"),
        ({"storage_path": "a", "max_age": 3}, "expected a timedelta"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"step": -1}, "step: expected an int from 0"),
        ({"step": 1.0}, "step"),
        ({"step": 1, "epoch": -1}, "epoch"),
        ({"step": 1, "checkpoint_type": "half"}, "expected full, incremental"),
        ({"step": 1, "metadata": {"a": 1}}, "metadata: expected str to str"),
        ({"step": 1, "metrics": {"loss": "low"}}, "metrics: expected numbers"),
    ],
)
def test_orders_that_make_no_sense_are_refused(
    manager: CheckpointManager, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        manager.save(state_of(1), **settings)
    assert manager.all() == []


def test_plain_readers_load_what_a_manager_saved(manager: CheckpointManager, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved(manager, 5)
    for reader in (StrataReader(tmp_path / "run/step-5"), dcp.FileSystemReader(tmp_path / "run/step-5")):
        state = empty_state()
        dcp.load(state, storage_reader=reader)
        assert_is(state, 5)
