"""`strata ls`, `inspect` and `verify` of runs and checkpoints, whatever they are called and whatever is broken."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.states import save
from tests.cli.commands import damage_frozen, make_run, state_at, strata, strata_json
from torch_strata import StorageConfig, StrataWriter
from torch_strata.checkpoint.run import open_run


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    make_run(str(root), tmp_path)
    (root / "step-9").mkdir()
    (root / "step-9" / "__0_0.0123.distcp").write_bytes(b"half")
    return root


def test_ls_shows_every_checkpoint_of_a_run(run):
    native = open_run(str(run), StorageConfig())
    native.pin("step-2", "evaluation")
    native.rollback(3)
    shown = {one["folder"]: one for one in strata_json("ls", run)["checkpoints"]}
    assert list(shown) == ["step-1", "step-2", "step-3", "step-4", "step-9"]
    first, second = shown["step-1"], shown["step-2"]
    assert (first["step"], first["type"], first["refers_to"]) == (1, "full", [])
    assert (second["type"], second["refers_to"], second["pins"]) == ("incremental", ["step-1"], ["evaluation"])
    assert second["metrics"] == {"loss": 0.5} and second["size_bytes"] < 10_000 < 240_000 < first["size_bytes"]
    assert shown["step-4"]["is_abandoned"] and not shown["step-3"]["is_abandoned"]
    assert shown["step-9"]["state"] == "uncommitted"
    lines = strata("ls", run).stdout.splitlines()
    assert len(lines) == 6 and lines[0].split()[:3] == ["folder", "step", "type"]
    assert "held by evaluation" in lines[2] and "loss=0.5" in lines[2]
    assert "abandoned" in lines[4] and "uncommitted" in lines[5]


def test_ls_shows_a_folder_whose_manifest_cannot_be_read(run):
    (manifest,) = (run / "step-3" / ".strata").glob("0*")
    manifest.write_bytes(b"not a manifest")
    shown = {one["folder"]: one for one in strata_json("ls", run)["checkpoints"]}
    assert shown["step-3"]["state"] == "unreadable" and manifest.name in shown["step-3"]["detail"]


def test_ls_of_plain_saves_takes_the_step_from_the_folder(tmp_path):
    for step in (2, 10):
        dcp.save(state_at(step), storage_writer=StrataWriter(tmp_path / f"step-{step}"), no_dist=True)
    assert [one["step"] for one in strata_json("ls", tmp_path)["checkpoints"]] == [2, 10]


def test_ls_of_an_incremental_checkpoint_says_where_its_objects_are(run):
    paths = [entry.get("path") for entry in strata_json("ls", run / "step-2")]
    assert any(path and path.startswith("../step-1/") for path in paths)
    assert "../step-1/" in strata("ls", run / "step-2").stdout


def test_inspect_says_where_in_its_run_a_checkpoint_stands(run):
    shown = strata_json("inspect", run / "step-3")
    assert (shown["step"], shown["epoch"], shown["type"]) == (3, 0, "incremental")
    assert shown["metrics"] == {"loss": 1 / 3} and shown["metadata"] == {"note": "a\x1b[2Jb"}
    assert shown["refers_to"] == ["step-1"]
    assert shown["by_dtype"]["float32"] == {"keys": 2, "tensor_bytes": 4 * 60_020}
    assert shown["by_key"]["model"]["tensor_bytes"] == 4 * 60_020 and shown["by_key"]["step"]["keys"] == 1
    done = strata("inspect", run)
    assert done.exit_code == 2 and "step-4" in done.stderr


def test_no_name_reaches_a_terminal_as_it_is(run, tmp_path):
    hostile = {"\x1b]0;owned\x07" + "x" * 5_000: torch.ones(2), "\ud800": torch.ones(1), "a\rb": 3}
    save(hostile, tmp_path / "hostile")
    for arguments in (("inspect", tmp_path / "hostile"), ("inspect", run / "step-1"), ("ls", run)):
        done = strata(*arguments)
        assert done.exit_code == 0
        assert not set(done.output) & {"\x1b", "\x07", "\r"} and max(map(len, done.output.splitlines())) < 2500
    assert {key["fqn"] for key in strata_json("inspect", tmp_path / "hostile")["keys"]} >= {"a\rb", "\ud800"}


def test_an_error_about_a_hostile_name_is_harmless_too(tmp_path):
    done = strata("ls", f"{tmp_path}/\x1b[31mred")
    assert done.exit_code == 2 and "\x1b" not in done.output and "CheckpointNotFoundError" in done.stderr


def test_verify_of_a_run_names_what_is_damaged(run):
    done = strata("verify", run)
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == "4 checkpoints: 4 sound, 0 damaged, 0 not checked"
    path = damage_frozen(run / "step-1")
    done = strata("verify", run)
    # All four refer to it.
    assert done.exit_code == 1 and "step-1: DAMAGED" in done.stdout and path.name in done.stdout
    report = strata_json("verify", run)
    assert not report["is_sound"] and report["checkpoints"]["step-4"]["problems"]


def test_verify_marks_what_it_found(run):
    (changed,) = (run / "step-3").glob("__1_*.distcp")
    content = bytearray(changed.read_bytes())
    content[content.index(b"\x00\x00\x40\x40\x00\x00\x40\x40")] ^= 1  # 3.0 twice
    changed.write_bytes(content)
    assert strata("verify", run, "--mark").exit_code == 1
    shown = {one["folder"]: one for one in strata_json("ls", run)["checkpoints"]}
    assert shown["step-3"]["is_quarantined"] and not shown["step-3"]["is_verified"]
    assert all(shown[folder]["is_verified"] for folder in ("step-1", "step-2", "step-4"))
    assert strata("verify", run / "step-1", "--mark").exit_code == 2


def test_verify_of_a_run_with_an_unreadable_manifest_is_no_success(run):
    (manifest,) = (run / "step-3" / ".strata").glob("0*")
    manifest.write_bytes(b"not a manifest")
    done = strata("verify", run)
    assert done.exit_code == 1 and "step-3: DAMAGED" in done.stdout


def test_what_is_not_there_has_status_two(tmp_path):
    for command in ("ls", "inspect", "verify"):
        done = strata(command, tmp_path / "nowhere")
        assert done.exit_code == 2 and done.stderr.startswith("CheckpointNotFoundError") and not done.stdout
        assert strata(command, tmp_path, "--option", "no-equals-sign").exit_code == 2
        assert strata(command, tmp_path, "--option", "secret=of-mine").exit_code == 2
        assert "of-mine" not in strata(command, tmp_path, "--option", "secret=of-mine").output


def test_json_is_json_even_where_a_metric_is_no_number(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)

    def refuse(name):
        raise ValueError(name)

    text = strata("ls", tmp_path / "run", "--json").stdout
    json.loads(text, parse_constant=refuse)
