"""The examples run as they are, end to end, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A demo starts eleven processes that import torch: on a busy machine that takes more time than the training.
pytestmark = pytest.mark.timeout(500)

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps=6", "--save-every=2", "--width=64", "--layers=2", "--context=64"]


def run(script: str, *options: str, tmp_path: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """Run an example with its temporary files under `tmp_path`; fail if it takes more than `limit` seconds."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *options],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    finally:
        # Asked to end, it takes its training processes and its S3 server along; SIGKILL would leave them running.
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def rows(output: str) -> dict[str, str]:
    """The table at the end of the demo's output, by the name of the row."""
    table = output.rstrip().rpartition("\n\n")[2]
    return dict(line.split("  ", 1) for line in table.splitlines())


def expect_whole_story(finished: subprocess.CompletedProcess[str]) -> None:
    """The kill at step 4 of 6 left the checkpoint of step 2 or that of step 4, and all else came out equal."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    table = {name: value.strip() for name, value in rows(finished.stdout).items()}
    assert table["resumed step"] in ("2", "4")
    redone = 6 - int(table["resumed step"])
    assert table["losses, 2 ranks"] == f"{redone} of {redone} equal bit for bit"
    assert table["losses, 1 rank"].startswith(f"{redone} of {redone} equal but for the order of summation")
    assert table["kept"] == "the newest 2, of steps 4 and 6"
    assert table["verified"].endswith("blocks, no problem")
    assert table["stock torch"].endswith("values equal bit for bit")


def test_save_and_load_prints_the_state_and_the_named_error(tmp_path):
    finished = run("save_and_load.py", tmp_path=tmp_path, limit=120)
    assert finished.returncode == 0, finished.stderr
    *state, error = finished.stdout.splitlines()
    assert "".join(state).replace(" ", "") == "step7,weighttensor([[0.,1.,2.],[3.,4.,5.]])"
    assert error.startswith("CheckpointNotFoundError: ")
    assert "step-8" in error
    assert list(tmp_path.iterdir()) == []


def test_manager_lesson_goes_on_where_it_was_stopped_and_publishes_the_best(tmp_path):
    finished = run("manager.py", tmp_path=tmp_path, limit=120)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[0] == "resumed at step 6: the same losses to the last bit"
    kept = json.loads(lines[1].removeprefix("kept steps ").partition(", the")[0])
    assert kept[-2:] == [8, 10] and int(lines[1].rpartition(" ")[2]) in kept
    assert lines[2] == "published 2 tensors in model.safetensors"
    assert list(tmp_path.glob("tmp*")) == []


def test_demo_on_disk_keeps_every_promise_and_leaves_nothing_behind(tmp_path):
    finished = run("demo.py", *SMALL, tmp_path=tmp_path, limit=400)
    expect_whole_story(finished)
    assert list(tmp_path.glob("strata-demo-*")) == []


@pytest.mark.long
def test_demo_on_s3_keeps_every_promise(tmp_path):
    finished = run("demo.py", "--storage=s3://demo/runs", *SMALL, tmp_path=tmp_path, limit=400)
    expect_whole_story(finished)


def test_demo_names_a_training_run_that_fails_and_exits_with_1(tmp_path):
    finished = run("demo.py", *SMALL, "--batch=7", tmp_path=tmp_path, limit=200)
    assert finished.returncode == 1
    assert "--batch 7 does not divide among 2 processes" in finished.stderr
    assert finished.stderr.splitlines()[-1].startswith("demo failed: a training run ended with status ")


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that nobody has collected yet."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state != "" and not state.startswith("Z")


def test_demo_that_is_terminated_ends_its_training_processes(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py"), *SMALL[1:], "--steps=20000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        give_up_at = time.monotonic() + 120
        while not (journals := [path.read_text() for path in tmp_path.glob("strata-demo-*/*.jsonl")]) or (
            "\n" not in journals[0]
        ):
            assert demo.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        pids = json.loads(journals[0].splitlines()[0])["pids"]
        assert all(map(is_running, pids))
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 143
        assert not any(map(is_running, pids))
        assert list(tmp_path.glob("strata-demo-*")) == []
    finally:
        demo.kill()
        demo.wait()
