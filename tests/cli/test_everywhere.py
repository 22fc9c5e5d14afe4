"""The command on every store, in a terminal and in a pipe, and without torch."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch

from tests.checkpoint.states import flip, save
from tests.cli.commands import assert_same, make_run, state_at, strata, strata_json
from tests.packaging.test_import import WITHOUT_TORCH
from tests.support import REPOSITORY, run_python
from tests.support.s3 import SECRET, options

COMMAND = WITHOUT_TORCH + "from torch_strata.cli import main\nsys.argv = ['strata', *sys.argv[1:]]\nmain()"


def test_every_command_works_on_s3(tmp_path, bucket):
    root = bucket.url("run")
    make_run(root, tmp_path, steps=3)
    assert [one["folder"] for one in strata_json("ls", root)["checkpoints"]] == ["step-1", "step-2", "step-3"]
    assert strata("inspect", f"{root}/step-2").exit_code == 0
    assert strata("verify", root, "--mark").exit_code == 0
    assert all(one["is_verified"] for one in strata_json("ls", root)["checkpoints"])
    assert strata("diff", f"{root}/step-1", f"{root}/step-2").exit_code == 1
    assert strata("copy", root, bucket.url("other")).exit_code == 0
    assert strata("copy", root, tmp_path / "here").exit_code == 0
    assert strata("diff", f"{root}/step-3", tmp_path / "here" / "step-3").exit_code == 0
    for place in (bucket.url("out.pt"), tmp_path / "out.pt"):
        assert strata("export", "--to", "torch", f"{root}/step-3", place).exit_code == 0
    assert_same(state_at(3), torch.load(tmp_path / "out.pt", weights_only=True))
    assert bucket.get("out.pt") == (tmp_path / "out.pt").read_bytes()
    assert strata("export", "--to", "safetensors", "--key", "model", f"{root}/step-3", bucket.url("hf")).exit_code == 0
    for source in ("out.pt", "hf", "hf/model.safetensors"):
        assert strata("import", bucket.url(source), bucket.url(f"from-{source}")).exit_code == 0
    assert strata("diff", bucket.url("from-out.pt"), f"{root}/step-3").exit_code == 0
    assert strata("prune", root, "--keep-last", 1, "--yes").exit_code == 0
    assert [one["folder"] for one in strata_json("ls", root)["checkpoints"] if one["state"] == "committed"] == [
        "step-3"
    ]
    before = bucket.sizes()
    assert strata("bench", bucket.url("bench"), "--size", "1kB", "--total", "4kB", "--concurrency", 2).exit_code == 0
    assert bucket.sizes() == before and not bucket.open_uploads()


def test_a_large_export_to_s3_is_whole(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("STRATA_PART_BYTES", str(5 << 20))
    state = {"w": torch.randn(3_000_000), "v": torch.randn(1000)}
    save(state, tmp_path / "c")
    assert strata("export", "--to", "torch", tmp_path / "c", bucket.url("x.pt")).exit_code == 0
    (tmp_path / "x.pt").write_bytes(bucket.get("x.pt"))
    assert_same(state, torch.load(tmp_path / "x.pt", weights_only=True))
    assert strata("diff", bucket.url("x.pt"), tmp_path / "c").exit_code == 0


def test_no_command_shows_a_secret(tmp_path, bucket):
    for command in ("ls", "inspect", "verify", "bench"):
        done = strata(command, bucket.url("nowhere"), "--option", f"secret_access_key={SECRET}", "--option", "no=way")
        assert done.exit_code == 2 and SECRET not in done.output


def test_what_only_reads_works_over_http(tmp_path, web):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    http = ("--option", "allow_http=true")
    assert strata("verify", f"{web}/run/step-2", *http).exit_code == 0
    assert strata_json("inspect", f"{web}/run/step-2", *http)["step"] == 2
    assert [one["folder"] for one in strata_json("ls", f"{web}/run", *http)["checkpoints"]] == ["step-1", "step-2"]
    assert strata("diff", f"{web}/run/step-2", tmp_path / "run" / "step-2", *http).exit_code == 0
    assert strata("copy", f"{web}/run", tmp_path / "copy", *http).exit_code == 0
    assert strata("export", "--to", "torch", f"{web}/run/step-2", tmp_path / "o.pt", *http).exit_code == 0
    assert strata("import", f"{web}/o.pt", tmp_path / "imported", *http).exit_code == 0
    for writes in (("copy", tmp_path / "run", f"{web}/x"), ("bench", web), ("prune", f"{web}/run", "--yes")):
        done = strata(*writes, *http)
        assert done.exit_code in (0, 2) and "Traceback" not in done.output
        assert not (tmp_path / "x").exists()


def test_every_command_runs_without_torch(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    root, one, two = (str(tmp_path / "run" / name) for name in ("", "step-1", "step-2"))
    for arguments in (
        ["ls", root],
        ["ls", two],
        ["inspect", two],
        ["verify", root],
        ["diff", two, two],
        ["export", "--to", "torch", one, f"{tmp_path}/x.pt"],
        ["export", "--to", "safetensors", one, f"{tmp_path}/hf"],
        ["export", "--to", "dcp", two, f"{tmp_path}/dcp"],
        ["import", f"{tmp_path}/x.pt", f"{tmp_path}/imported"],
        ["copy", root, f"{tmp_path}/copy"],
        ["prune", root, "--keep-last", "1", "--yes"],
        ["bench", str(tmp_path), "--size", "1kB", "--total", "1kB", "--concurrency", "1"],
    ):
        assert run_python(COMMAND, *arguments), arguments


def run_in_terminal(*arguments: str) -> tuple[int, str]:
    """Exit status and all that a terminal shows, which is both of its outputs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY
    )
    os.close(theirs)
    shown, until = b"", time.monotonic() + 60
    try:
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    data = os.read(ours, 1 << 16)
                except OSError:  # the other end is closed
                    break
                if not data:
                    break
                shown += data
        return process.wait(timeout=10), shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_gets_bars_and_a_pipe_does_not(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    status, shown = run_in_terminal("copy", str(tmp_path / "run"), str(tmp_path / "copy"))
    assert status == 0 and "copied 2 checkpoints" in shown and "copy:" in shown and "\r" in shown
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "copy", str(tmp_path / "run"), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr and "\r" not in done.stdout
    status, shown = run_in_terminal("ls", str(tmp_path / "run"))
    assert status == 0 and "step-2" in shown


def test_a_reader_that_has_seen_enough_is_no_failure_of_ours(tmp_path):
    save({f"w{n}": torch.ones(1) for n in range(20_000)}, tmp_path / "c")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "inspect", str(tmp_path / "c")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 2 and b"Traceback" not in said


def test_bench_measures_and_leaves_nothing(tmp_path):
    found = strata_json("bench", tmp_path, "--size", "4KiB", "--size", "1MB", "--concurrency", 1, "--concurrency", 3)
    assert [(one["object_bytes"], one["concurrency"]) for one in found] == [
        (4096, 1),
        (4096, 3),
        (10**6, 1),
        (10**6, 3),
    ]
    assert all(one["write_bytes_per_second"] > 0 and one["read_seconds"] > 0 for one in found)
    assert not list(tmp_path.iterdir())
    done = strata("bench", "/proc/nowhere", "--size", "1kB")
    assert done.exit_code == 2 and "Traceback" not in done.output


BENCH = (
    WITHOUT_TORCH
    + """
import os, signal
from torch_strata import errors
from torch_strata.checkpoint import measure
clocked, calls = measure._clocked, []
def ending(*args):
    calls.append(clocked(*args))
    if len(calls) == 3:  # the second objects are written
        ENDING
    return calls[-1]
measure._clocked = ending
from torch_strata.__main__ import main
sys.argv = ["strata", "bench", *sys.argv[1:], "--size", "4KiB", "--concurrency", "1", "--concurrency", "2"]
main()
"""
)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.kill(os.getpid(), signal.SIGINT)", 130),
        ("raise errors.StorageError('no space left on device')", 2),
    ],
)
def test_bench_that_ends_early_leaves_nothing(tmp_path, bucket, ending, status):
    for place in (tmp_path, bucket.url("bench")):
        done = subprocess.run(
            [sys.executable, "-c", BENCH.replace("ENDING", ending), str(place)],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=60,
            check=False,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir()) and not bucket.sizes()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_be_taught_to_complete(shell, monkeypatch):
    monkeypatch.setenv("_STRATA_COMPLETE", f"{shell}_source")
    done = strata(prog_name="strata")
    assert done.exit_code == 0 and "_STRATA_COMPLETE" in done.output


def test_every_json_output_is_one_value(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    run, one = tmp_path / "run", tmp_path / "run" / "step-1"
    for arguments in (
        ("ls", run),
        ("ls", one),
        ("inspect", one),
        ("verify", run),
        ("verify", one),
        ("diff", one, run / "step-2"),
        ("prune", run, "--keep-last", 1, "--dry-run"),
        ("copy", run, tmp_path / "copy"),
        ("copy", one, tmp_path / "one"),
        ("export", "--to", "torch", one, tmp_path / "o.pt"),
        ("import", tmp_path / "o.pt", tmp_path / "imported"),
    ):
        json.loads(strata(*arguments, "--json").stdout)


def test_a_failed_export_to_s3_leaves_no_upload(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("STRATA_PART_BYTES", str(5 << 20))
    save({"v": torch.randn(2_000_000), "w": torch.randn(20_000)}, tmp_path / "c")
    path = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size - 10_000)
    for form, place in (("torch", "x.pt"), ("safetensors", "hf"), ("dcp", "d")):
        assert strata("export", "--to", form, tmp_path / "c", bucket.url(place)).exit_code == 1
    left = {key for key in bucket.sizes() if "/probe-" not in key}
    assert not left and not bucket.open_uploads()


def test_settings_of_two_stores_are_kept_apart(tmp_path, bucket, monkeypatch):
    given = options(bucket.endpoint)
    for name in [name for name in os.environ if name.startswith("AWS_") and "CONFIG" not in name]:
        monkeypatch.delenv(name)
    save({"w": torch.ones(300)}, tmp_path / "c")
    own = [part for pair in given.items() for part in ("--option", "=".join(pair))]
    other = [part for pair in given.items() for part in ("--to-option", "=".join(pair))]
    done = strata("copy", tmp_path / "c", bucket.url("a"), *own)
    assert done.exit_code == 0, done.output
    assert strata("copy", tmp_path / "c", bucket.url("b"), *other).exit_code == 0
    assert strata("copy", bucket.url("a"), bucket.url("c"), *own).exit_code == 0
    assert strata("copy", bucket.url("a"), bucket.url("d"), *own, "--to-option", "endpoint=x").exit_code == 2
    assert strata("export", "--to", "torch", bucket.url("b"), tmp_path / "o.pt", *own).exit_code == 0
    assert strata("diff", bucket.url("c"), tmp_path / "o.pt", *own).exit_code == 0
