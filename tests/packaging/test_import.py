"""Nothing happens on import, and the command needs no torch."""

import json

import pytest

from tests.support import run_python

# Refuses a package as if it were not installed, so that an import of it fails where it stands.
WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax"):
            raise ModuleNotFoundError(f"{name} is not needed here", name=name)
sys.meta_path.insert(0, Refuse())
"""

# Notes each read whose caller is a file of the package: the standard library may read what it likes.
WATCH_ENVIRONMENT = """
import os, sys
reads = []
def watched(original):
    def read(self, key, *rest):
        frame = sys._getframe(1)
        # os.getenv and environ.get stand between.
        while frame and frame.f_code.co_filename.endswith(("os.py", "os>", "_collections_abc.py", "_collections_abc>")):
            frame = frame.f_back
        if frame and "torch_strata" in frame.f_code.co_filename:
            reads.append(key)
        return original(self, key, *rest)
    return read
kind = type(os.environ)
kind.__getitem__ = watched(kind.__getitem__)
kind.__contains__ = watched(kind.__contains__)
"""


def test_import_leaves_torch_and_jax_alone() -> None:
    run_python(WITHOUT_TORCH + "import torch_strata, torch_strata.errors, torch_strata.config")


def test_import_starts_no_thread() -> None:
    printed = run_python(
        "import json, os\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import torch_strata, torch_strata._native\n"
        "print(json.dumps([before, len(os.listdir('/proc/self/task'))]))"
    )
    before, after = json.loads(printed)
    assert after == before


def test_import_reads_no_environment() -> None:
    printed = run_python(WATCH_ENVIRONMENT + "import torch_strata, torch_strata.config\nprint(reads)")
    assert printed.strip() == "[]"


def test_import_sets_up_no_logger() -> None:
    printed = run_python(
        "import logging, torch_strata\n"
        "names = ['', *logging.root.manager.loggerDict]\n"
        "print([n for n in names if logging.getLogger(n).handlers and n.partition('.')[0] in ('', 'torch_strata')])"
    )
    # A library's NullHandler would do no harm, but it is not needed either.
    assert printed.strip() == "[]"


COMMANDS = ("ls", "inspect", "verify", "diff", "prune", "copy", "import", "export", "bench")


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_the_command_runs_without_torch(arguments: list[str]) -> None:
    code = WITHOUT_TORCH + "from torch_strata.cli import main\nsys.argv = ['strata', *sys.argv[1:]]\nmain()"
    assert "Usage: strata" in run_python(code, *arguments)


def test_every_public_name_can_be_imported() -> None:
    run_python("import torch_strata\nfor name in torch_strata.__all__: getattr(torch_strata, name)")


def test_an_unknown_name_is_an_attribute_error() -> None:
    run_python(
        "import torch_strata\n"
        "try: torch_strata.no_such_name\n"
        "except AttributeError as error: assert 'no_such_name' in str(error)\n"
        "else: raise AssertionError('no error')"
    )
