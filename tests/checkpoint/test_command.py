"""`strata verify`, `ls` and `inspect`: exit status 0 sound, 1 damaged, 2 not found or usage."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemWriter

from tests.checkpoint.states import save
from torch_strata import CheckpointNotFoundError, verify
from torch_strata.cli import main

STATE = {"w": torch.arange(100_000.0), "opt": {"step": 3}, "new\nline": torch.ones(2, dtype=torch.bfloat16)}


def stock_save(state, path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def strata(*arguments: str):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("write", [save, stock_save])
def test_a_sound_checkpoint_verifies(tmp_path, write):
    write(STATE, tmp_path / "c")
    assert verify(tmp_path / "c").is_sound
    done = strata("verify", tmp_path / "c")
    assert done.exit_code == 0 and done.output.startswith("sound")
    report = json.loads(strata("verify", "--json", tmp_path / "c").output)
    assert report["is_sound"] and report["blocks"] >= 1 and report["read_bytes"] >= 400_000


@pytest.mark.parametrize("write", [save, stock_save])
def test_a_damaged_checkpoint_says_where(tmp_path, write):
    write(STATE, tmp_path / "c")
    path = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[content.index(STATE["w"].numpy().tobytes()) + 1234] ^= 1
    path.write_bytes(content)
    done = strata("verify", tmp_path / "c")
    assert done.exit_code == 1 and path.name in done.output and "DAMAGED" in done.output
    path.unlink()
    assert strata("verify", tmp_path / "c").exit_code == 1


def test_every_byte_of_an_object_is_checked(tmp_path):
    save({"w": torch.arange(300.0), "n": [1, 2]}, tmp_path / "c")
    for path in (tmp_path / "c").glob("*.distcp"):
        content = path.read_bytes()
        for at in range(0, len(content), 97):
            damaged = bytearray(content)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            assert not verify(tmp_path / "c").is_sound, f"byte {at} of {len(content)}"
        path.write_bytes(content)


def test_nothing_there_has_status_two(tmp_path):
    done = strata("verify", tmp_path / "nowhere")
    assert done.exit_code == 2 and CheckpointNotFoundError.__name__ in done.stderr
    assert strata("verify").exit_code == 2
    assert strata("inspect", "ftp://host/x").exit_code == 2


@pytest.mark.parametrize("write", [save, stock_save])
def test_inspect_and_ls_show_what_is_there(tmp_path, write):
    write(STATE, tmp_path / "c")
    shown = json.loads(strata("inspect", "--json", tmp_path / "c").output)
    assert {key["fqn"]: (key.get("dtype"), key.get("shape")) for key in shown["keys"]} == {
        "w": ("float32", [100_000]),
        "opt.step": (None, None),
        "new\nline": ("bfloat16", [2]),
    }
    text = strata("inspect", tmp_path / "c").output
    assert "'new\\nline': bfloat16 [2]" in text
    names = {path.name for path in (tmp_path / "c").glob("*.distcp")}
    assert {entry["name"] for entry in json.loads(strata("ls", "--json", tmp_path / "c").output)} == names
