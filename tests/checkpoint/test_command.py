"""`strata verify`, `ls` and `inspect`: exit status 0 sound, 1 damaged, 2 could not be checked."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemWriter

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointNotFoundError, ConfigError, StorageError, StrataWriter, verify
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


def test_a_verification_tells_of_all_that_it_reads(tmp_path):
    save({**STATE, "large": torch.arange(8_000_000)}, tmp_path / "c")
    told = []
    report = verify(tmp_path / "c", progress=told.append)
    assert all(more > 0 for more in told) and sum(told) == report.read_bytes


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


def test_what_cannot_be_looked_at_is_neither_sound_nor_damaged(tmp_path):
    save(STATE, tmp_path / "c")
    path = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)  # the system refuses to follow it, whoever asks
    report = verify(tmp_path / "c")
    assert not report.is_sound and not report.problems and path.name in report.unchecked[0]
    done = strata("verify", tmp_path / "c")
    assert done.exit_code == 2 and path.name in done.output and "NOT CHECKED (1 problem)" in done.output
    assert not json.loads(strata("verify", "--json", tmp_path / "c").output)["is_sound"]
    path.unlink()
    path.write_bytes(content)
    (tmp_path / "c" / ".metadata").unlink()
    (tmp_path / "c" / ".metadata").symlink_to(".metadata")
    assert strata("verify", tmp_path / "c").exit_code == 2


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, 2), (OSError, 2), (MemoryError, 2), (KeyboardInterrupt, 130)]
)
def test_a_check_that_breaks_off_does_not_look_like_damage(tmp_path, monkeypatch, error, status):
    def breaks_off(*args, **kwargs):
        raise error("on the way")

    save({"a": torch.ones(1)}, tmp_path / "c")
    monkeypatch.setattr("torch_strata.cli.verify.verify", breaks_off)
    assert strata("verify", tmp_path / "c").exit_code == status


@pytest.mark.parametrize(("count", "words"), [(1, "(1 problem)"), (2, "(2 problems)")])
def test_problems_are_counted_in_words(tmp_path, count, words):
    save({"a": torch.ones(2000), "b": torch.ones(2000) * 2}, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.distcp")
    content = bytearray(path.read_bytes())
    for value in range(count):
        content[content.index((torch.ones(2000) * (value + 1)).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert words in strata("verify", tmp_path / "c").output


@pytest.mark.parametrize("make_writer", [StrataWriter, FileSystemWriter])
def test_what_ranks_saved_on_their_own_is_asked_for_by_rank(tmp_path, make_writer):
    dcp.save(STATE, storage_writer=make_writer(tmp_path / "c"), no_dist=True, use_collectives=False)
    done = strata("verify", tmp_path / "c")
    assert done.exit_code == 2 and CheckpointNotFoundError.__name__ in done.stderr and "--rank 0" in done.stderr
    assert strata("verify", "--rank", "0", tmp_path / "c").exit_code == 0


@pytest.mark.parametrize("below", ["", "step-1"])
def test_a_file_where_a_checkpoint_is_looked_for_is_named(tmp_path, below):
    (tmp_path / "file.pt").write_bytes(b"x")
    place = tmp_path / "file.pt" / below
    expected = f"expected a directory at {tmp_path / 'file.pt'}, found a file"
    done = strata("verify", place)
    assert done.exit_code == 2 and expected in done.stderr
    for call in (lambda: save(STATE, place), lambda: load(dict(STATE), place)):
        error = failure_of(call)
        assert isinstance(error, StorageError) and expected in str(error)


def test_a_url_of_a_relative_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = strata("verify", "file://run/step-1")
    assert done.exit_code == 2 and "ConfigError" in done.stderr and 'here "run"; expected file:///' in done.stderr
    assert isinstance(failure_of(lambda: save(STATE, "file://run/step-1")), ConfigError)
    assert list(tmp_path.iterdir()) == []
    save(STATE, f"file://{tmp_path}/c")
    assert strata("verify", f"file://{tmp_path}/c").exit_code == 0


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
