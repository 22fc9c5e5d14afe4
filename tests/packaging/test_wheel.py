"""The wheel holds the package and nothing else, and works where only the wheel is."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "maturin", "build", "--quiet", "--release", "--strip", "--out", folder],
        cwd=REPOSITORY,
        check=True,
        timeout=800,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_the_wheel_holds_the_package_its_types_and_its_licences(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "torch_strata").rglob("*.py")}
    assert sources <= set(names)
    assert {"torch_strata/py.typed", "torch_strata/_native.pyi", "torch_strata/_native.abi3.so"} <= set(names)
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE-APACHE", "LICENSE-MIT"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"torch_strata"}


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # The unpacked wheel stands before the checkout that the development install put on the path.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch_strata, torch_strata._native\n"
        "from torch_strata import StrataReader, StrataWriter\n"
        "print(torch_strata._native.__file__)"
    )
    assert run_python(code, str(tmp_path), cwd=tmp_path).strip() == str(tmp_path / "torch_strata/_native.abi3.so")


ENTRY_POINTS = """
import importlib.metadata, sys, tomllib
sys.path.insert(0, sys.argv[1])
(wheel,) = importlib.metadata.distributions(name="torch-strata", path=[sys.argv[1]])
project = tomllib.loads(open(sys.argv[2]).read())["project"]
promised = {("console_scripts", name): value for name, value in project["scripts"].items()}
for group, points in project["entry-points"].items():
    promised |= {(group, name): value for name, value in points.items()}
assert {(point.group, point.name): point.value for point in wheel.entry_points} == promised
import fsspec
for point in wheel.entry_points:
    found = point.load()
    if point.group == "fsspec.specs":
        assert fsspec.get_filesystem_class(point.name) is found, point.name
    home = found.__module__ if point.group == "fsspec.specs" else "torch_strata.cli"
    print(importlib.import_module(home).__file__)
"""


def test_what_the_wheel_promises_to_others_is_found_where_only_the_wheel_is(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    files = run_python(ENTRY_POINTS, str(tmp_path), str(REPOSITORY / "pyproject.toml"), cwd=tmp_path).split()
    assert len(files) >= 6 and all(Path(file).is_relative_to(tmp_path) for file in files)
