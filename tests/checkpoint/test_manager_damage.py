"""CheckpointManager: a checkpoint that has lost its manifest is damaged, not somebody else's, and stops no training."""

import logging
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import flip, largest_object
from tests.checkpoint.test_manager import another_process_claims
from tests.cli.commands import strata, strata_json
from torch_strata import CheckpointManager, StrataReader, verify
from torch_strata.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    StaleGenerationError,
    StorageError,
)

LIMIT = timedelta(seconds=60)


def manifest_of(place: Path) -> Path:
    (path,) = (place / ".strata").glob("0*")
    return path


def zero(place: Path) -> None:
    path = manifest_of(place)
    path.write_bytes(bytes(path.stat().st_size))


WAYS: dict[str, Callable[[Path], None]] = {
    "deleted": lambda place: manifest_of(place).unlink(),
    "folder deleted": lambda place: shutil.rmtree(place / ".strata"),
    "empty": lambda place: os.truncate(manifest_of(place), 0),
    "zeroed": zero,
    "cut": lambda place: os.truncate(manifest_of(place), 99),
}


def saved(manager: CheckpointManager, *steps: int, kind: str = "full") -> None:
    for step in steps:
        state = {"model": {"weight": torch.full((9000,), float(step))}}
        manager.save(state, step=step, checkpoint_type=kind).result(LIMIT)


def step_of(manager: CheckpointManager) -> float:
    return float(manager.load("latest")["model"]["weight"][0])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def told(caplog: pytest.LogCaptureFixture, level: int, words: str) -> int:
    return sum(record.levelno == level and words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("way", WAYS)
def test_a_newest_that_has_lost_its_manifest_is_passed_over_said_so_and_saved_again(
    root: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(CheckpointManager(root), 1, 2, 3)
    WAYS[way](root / "step-3")
    manager = CheckpointManager(root, keep_count=2)
    assert [step_of(manager), step_of(manager)] == [2, 2]
    assert told(caplog, logging.ERROR, "step-3 is passed over, for its manifest cannot be read") == 1
    with pytest.raises(CorruptionError, match="step-3"):
        manager.load(3)
    for call in (lambda: manager.verify(3), lambda: manager.hold(3, "me").__enter__()):
        with pytest.raises(CorruptionError, match="step-3"):
            call()
    assert [one.step for one in manager.all()] == [1, 2]
    manager.apply_retention()
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1", "step-2", "step-3"]
    saved(manager, 3)
    assert told(caplog, logging.WARNING, "step-3: is damaged, and this save replaces it") == 1
    assert step_of(CheckpointManager(root)) == 3
    saved(manager, 4)
    assert [one.folder for one in manager.listed()] == ["step-3", "step-4"]


@pytest.mark.parametrize("way", WAYS)
def test_commands_call_a_checkpoint_damaged_that_has_lost_its_manifest(root: Path, way: str) -> None:
    saved(CheckpointManager(root), 1, 2)
    WAYS[way](root / "step-2")
    shown = {one["folder"]: one for one in strata_json("ls", root)["checkpoints"]}
    assert shown["step-2"]["state"] == "unreadable" and "step-2" in shown["step-2"]["detail"]
    done = strata("verify", "--mark", root)
    assert done.exit_code == 1 and "step-2: DAMAGED" in done.stdout and "step-1: sound" in done.stdout
    copied = strata("copy", root, root.parent / "copy")
    assert [path.name for path in (root.parent / "copy").glob("step-*")] == ["step-1"] and "step-2" in copied.output


def test_a_model_that_has_lost_its_manifest_is_damaged(root: Path) -> None:
    saved(CheckpointManager(root), 1, kind="model_only")
    WAYS["deleted"](root / "step-1-model")
    manager = CheckpointManager(root)
    (one,) = manager.listed()
    assert one.state == "unreadable" and "model.safetensors.index.json" in one.detail
    with pytest.raises(CorruptionError, match="step-1-model"):
        manager.load(1)
    saved(manager, 1, kind="model_only")
    assert [one.step for one in manager.all()] == [1]


def test_what_has_lost_its_manifest_is_still_read_by_the_index(root: Path) -> None:
    saved(CheckpointManager(root), 1)
    WAYS["deleted"](root / "step-1")
    assert "model.weight" in StrataReader(root / "step-1").read_metadata().state_dict_metadata


def test_a_run_whose_only_checkpoint_is_damaged_does_not_look_like_a_new_one(root: Path) -> None:
    saved(CheckpointManager(root), 1)
    WAYS["deleted"](root / "step-1")
    with pytest.raises(CorruptionError, match="the manifest of what was committed here is lost"):
        CheckpointManager(root).load("latest")


def test_a_save_that_was_cut_short_is_no_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(CheckpointManager(root), 1, 2)
    WAYS["deleted"](root / "step-2")
    (root / "step-2/.metadata").unlink()
    manager = CheckpointManager(root)
    assert step_of(manager) == 1 and "passed over" not in caplog.text
    assert {one.folder: one.state for one in manager.listed()} == {"step-1": "committed", "step-2": "uncommitted"}
    saved(manager, 2)
    assert "replaces" not in caplog.text


@pytest.mark.parametrize("state", [b"two", {"model": {"weight": torch.full((9000,), 2.0)}}], ids=["bytes", "state"])
def test_a_save_that_replaces_a_damaged_checkpoint_says_so(
    root: Path, state: object, caplog: pytest.LogCaptureFixture
) -> None:
    saved(CheckpointManager(root), 1, 2)
    flip(largest_object(root / "step-2"))
    assert step_of(CheckpointManager(root)) == 1
    caplog.clear()
    manager = CheckpointManager(root)
    assert step_of(manager) == 1
    assert told(caplog, logging.WARNING, "step-2 was found damaged before and is passed over") == 1
    manager.save(state, step=2).result(LIMIT)
    assert told(caplog, logging.WARNING, "step-2: is damaged, and this save replaces it: it was found damaged") == 1
    assert verify(root / "step-2").is_sound and [one.step for one in manager.all()] == [1, 2]
    with pytest.raises(CheckpointExistsError):
        manager.save(state, step=2).result(LIMIT)


def test_a_folder_that_is_kept_for_its_data_says_for_whom(root: Path) -> None:
    manager = CheckpointManager(root, keep_count=1)
    saved(manager, 1)
    frozen = manager.load(1)
    manager.save(frozen, step=2, checkpoint_type="incremental").result(LIMIT)
    shown = {one["folder"]: one for one in strata_json("ls", root)["checkpoints"]}
    assert (shown["step-1"]["state"], shown["step-1"]["detail"]) == ("kept", "for step-2")
    assert "kept: for step-2" in strata("ls", root).stdout
    done = strata("verify", root)
    assert done.exit_code == 0 and "step-1" not in done.stdout
    with pytest.raises(CheckpointNotFoundError, match="step-1: kept only for their data, which others need"):
        manager.load(1)


def test_bytes_have_no_index_that_could_be_missed(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save(b"one", step=1).result(LIMIT)
    report = manager.verify(1)
    assert report.is_sound and not report.warnings


def test_a_process_that_was_replaced_is_told_to_start_anew(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 1)
    another_process_claims(root)
    for one in (manager, CheckpointManager(root)):
        with pytest.raises(StaleGenerationError, match=r"another process has taken the run over.*start a new process"):
            saved(one, 2)
    shutil.rmtree(root)
    with pytest.raises(StaleGenerationError, match="the folder of the run was removed; a new CheckpointManager begins"):
        saved(manager, 2)
    saved(CheckpointManager(root), 2)


def test_a_step_below_the_newest_is_told_what_to_take_the_run_back_to(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 10, 20)
    for step, to in ((15, 10), (5, 0)):
        with pytest.raises(Exception, match=rf"call rollback\({to}\) first"):
            saved(manager, step)
        manager.rollback(to)
    saved(manager, 5)


def test_a_root_that_is_a_link_to_nowhere_is_named(root: Path) -> None:
    root.symlink_to(root.parent / "unmounted")
    with pytest.raises(StorageError, match="found a link to what is not there"):
        saved(CheckpointManager(root), 1)


def test_nothing_is_left_of_a_step_that_was_saved_and_taken_back_twice(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 1, 2)
    for _ in range(2):
        manager.rollback(1)
        saved(manager, 2)
    manager.rollback(1)
    manager.apply_retention()
    assert [path.name for path in root.glob("step-*")] == ["step-1"]
