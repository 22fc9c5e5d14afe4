"""How the command starts and ends: by its name, by `python -m`, where something is missing, and by a signal."""

import signal
import subprocess
import sys

import pytest

from tests.cli.commands import make_run
from tests.support import REPOSITORY

# Refuses a package as if it were not installed.
WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["strata", "ls", {place!r}]
from torch_strata.__main__ import main
main()
"""

# Gets a signal when it imports a package, or when click reads its arguments.
SIGNALLED = """
import os, sys
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Signal())
sys.argv = ["strata", "--version"]
from torch_strata.__main__ import main
if {at!r}.endswith(("line", "command")):
    import click
if {at!r} == "its own line":
    click.Group.parse_args = lambda *args: os.kill(os.getpid(), {number})
elif {at!r} == "the line of a command":
    sys.argv = ["strata", "ls", "x"]
    click.Command.parse_args = lambda *args: os.kill(os.getpid(), {number})
main()
"""


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)


def test_python_runs_it_as_a_module(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    done = python("-m", "torch_strata", "ls", str(tmp_path / "run"))
    assert done.returncode == 0 and "step-1" in done.stdout
    assert "python -m torch_strata" in python("-m", "torch_strata", "--help").stdout
    assert python("-m", "torch_strata", "ls", str(tmp_path / "nosuch")).returncode == 2


@pytest.mark.parametrize("name", ["numpy", "click", "tqdm"])
def test_a_package_that_is_missing_is_no_damage(tmp_path, name):
    done = python("-c", WITHOUT.format(name=name, place=str(tmp_path)))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ModuleNotFoundError: No module named") and len(done.stderr.splitlines()) == 1
    assert "pip install" in done.stderr


@pytest.mark.parametrize("at", ["click", "numpy", "torch_strata.cli.verify", "its own line", "the line of a command"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_starts_ends_it_without_a_word_of_python(at, number, status):
    done = python("-c", SIGNALLED.format(at=at, number=int(number)))
    assert done.returncode == status and "Traceback" not in done.stderr and not done.stdout
