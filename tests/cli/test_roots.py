"""The roots of runs: no checkpoint hides one, a new one is empty, and one that cannot be read is not taken for none."""

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.states import save
from tests.cli.commands import make_run, strata, strata_json
from torch_strata import CheckpointManager, StorageConfig, _native
from torch_strata._store import open_store
from torch_strata.errors import StoragePermissionError


def begin_run(root) -> None:
    """What a manager does before its first save."""
    _native.claim_generation(open_store(str(root), StorageConfig()), owner="a run")


@pytest.mark.parametrize("begun", [True, False], ids=["a run", "the copy of a run"])
@pytest.mark.parametrize(
    "command",
    [("copy",), ("copy", "--overwrite"), ("import",), ("export", "--to", "dcp"), ("export", "--to", "safetensors")],
    ids=" ".join,
)
def test_no_checkpoint_is_written_to_the_root_of_a_run(tmp_path, command, begun):
    root = tmp_path / "run"
    make_run(str(root), tmp_path, steps=2)
    if begun:
        begin_run(root)
    before = sorted(path for path in root.rglob("*") if "probe" not in path.name)
    done = strata(*command, root / "step-1", root)
    assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr and "root of a run" in done.stderr
    assert sorted(path for path in root.rglob("*") if "probe" not in path.name) == before
    assert [one["folder"] for one in strata_json("ls", root)["checkpoints"]] == ["step-1", "step-2"]


def test_no_run_is_copied_to_where_a_checkpoint_is(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    save({"w": torch.ones(3)}, tmp_path / "there")
    done = strata("copy", tmp_path / "run", tmp_path / "there")
    assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr
    assert not (tmp_path / "there" / "step-1").exists()


@pytest.mark.parametrize("what", ["a checkpoint", "weights"])
def test_what_was_saved_to_the_root_of_a_run_does_not_hide_the_run(tmp_path, what):
    root = tmp_path / "run"
    make_run(str(root), tmp_path, steps=2)
    begin_run(root)
    if what == "weights":
        save_file({"w": torch.ones(3)}, root / "model.safetensors")
    else:
        save({"w": torch.ones(3)}, root)
    done = strata("ls", root)
    assert "step-2" in done.stdout and "note" in done.stderr and "passed over" in done.stderr
    assert strata("verify", root, "--mark").exit_code == 0
    assert strata_json("copy", root, tmp_path / "backup")["copied"] == ["step-1", "step-2"]
    assert strata("prune", root, "--keep-last", 1, "--yes").exit_code == 0


def test_checkpoints_in_the_folders_of_a_checkpoint_are_named(tmp_path):
    make_run(str(tmp_path / "c"), tmp_path, steps=1)
    save({"w": torch.ones(3)}, tmp_path / "c")
    done = strata("verify", tmp_path / "c")
    assert done.exit_code == 0 and "note" in done.stderr and "is a checkpoint itself" in done.stderr


def test_a_run_that_has_saved_nothing_yet_is_an_empty_run(tmp_path):
    root = tmp_path / "run"
    begin_run(root)
    done = strata("ls", root)
    assert done.exit_code == 0 and "no checkpoint yet" in done.stderr
    assert strata_json("ls", root) == {"url": str(root), "checkpoints": []}
    assert strata("verify", root, "--mark").exit_code == 0
    assert strata("prune", root, "--dry-run").exit_code == 0
    for command in (("inspect", root), ("copy", root, tmp_path / "copy")):
        done = strata(*command)
        assert done.exit_code == 2 and "CheckpointNotFoundError" in done.stderr
    assert strata("ls", tmp_path / "nowhere").exit_code == 2


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
    CheckpointManager(tmp_path / "run").save({"w": torch.ones(2)}, step=1).result()

    def denied(run):
        raise StoragePermissionError("permission denied at run/step-1")

    monkeypatch.setattr("torch_strata.cli._place.listed_in", denied)
    for command in (("ls",), ("verify", "--mark"), ("inspect",), ("copy", tmp_path / "copy")):
        done = strata(command[0], tmp_path / "run", *command[1:])
        assert done.exit_code == 2 and "StoragePermissionError" in done.stderr, done.output
