"""Checkpoints of bytes, which are no state, before every command."""

import json

import pytest

from tests.cli.commands import strata, strata_json
from torch_strata import AsyncCheckpointWriter


@pytest.fixture
def run(tmp_path):
    with AsyncCheckpointWriter(tmp_path / "run") as writer:
        writer.write(b"what a framework serialised", step=1)
        writer.write(b"and something else", step=2)
    return tmp_path / "run"


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_bytes_are_no_state_to_export_and_not_damaged(run, tmp_path, form):
    done = strata("export", "--to", form, run / "step-1", tmp_path / "out")
    assert done.exit_code == 2 and "CheckpointError" in done.stderr and "holds bytes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_inspect_says_how_many_bytes_there_are(run):
    assert "'bytes': bytes, 27 B" in strata("inspect", run / "step-1").stdout
    found = strata_json("inspect", run / "step-1")
    assert found["keys"] == [{"fqn": "bytes", "dtype": "bytes", "bytes": 27}]


def test_bytes_that_differ_are_different_and_not_damaged(run):
    done = strata("diff", run / "step-1", run / "step-2")
    assert done.exit_code == 1 and "changed: 'bytes'" in done.stdout
    assert strata("diff", run / "step-1", run / "step-1").exit_code == 0


def test_a_copy_of_bytes_is_bytes(run, tmp_path):
    assert strata("copy", run / "step-1", tmp_path / "copy").exit_code == 0
    assert strata("diff", run / "step-1", tmp_path / "copy").exit_code == 0
    assert "27 B" in strata("inspect", tmp_path / "copy").stdout


def test_a_state_without_a_tensor_makes_no_empty_model(tmp_path):
    from tests.checkpoint.states import save

    save({"step": 3, "name": "x"}, tmp_path / "c")
    done = strata("export", "--to", "safetensors", tmp_path / "c", tmp_path / "out")
    assert done.exit_code == 2 and "no tensor is in it" in done.stderr and not (tmp_path / "out").exists()
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "x.pt").exit_code == 0
    assert json.loads(strata("diff", tmp_path / "c", tmp_path / "x.pt", "--json").stdout)["is_equal"]
