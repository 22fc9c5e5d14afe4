"""How the command starts: by its name, by `python -m`, and where something is missing."""

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
