"""The import rules of ARCHITECTURE.md, read from the syntax trees and the Cargo.toml files."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import REPOSITORY

PACKAGE = REPOSITORY / "torch_strata"

# What any module of the package may import from it. Everything else is a sub-package, private to itself and the cli.
SHARED = {"_native", "_logging", "_store", "_types", "_world", "config", "errors"}
# Which modules stand on which, among the shared ones.
SHARED_MAY_IMPORT = {
    "_native": {"_native_data", "_native_memory", "_native_run", "_types"},
    # Stubs into which _native's own, for its length, is divided.
    "_native_data": {"_native", "_types"},
    "_native_memory": set(),
    "_native_run": {"_native", "_types"},
    "errors": set(),
    "__main__": {"cli"},
    "_types": {"_native"},
    "_world": {"errors"},
    "config": {"errors"},
    "_logging": {"_native", "config", "errors"},
    "_store": {"_native", "config", "errors"},
}
# The one sub-package that may import a library.
OWNER_OF_LIBRARY = {"torch.distributed.checkpoint": "checkpoint", "jax": "jax"}

# A crate may depend on these crates of the workspace; a new crate gets a line here first.
CRATE_MAY_DEPEND_ON = {
    "strata-io": set(),
    "strata-proto": set(),
    "strata-device": {"strata-io"},
    "strata-checkpoint": {"strata-device", "strata-io", "strata-proto"},
    "strata-data": {"strata-io"},
    "strata-coordinator": {"strata-proto"},
    "strata-node": {"strata-io", "strata-proto"},
    "strata-runtime-core": {"strata-io", "strata-checkpoint", "strata-data", "strata-coordinator"},
    "strata-python": {"strata-device", "strata-io", "strata-checkpoint", "strata-data", "strata-coordinator"},
}
# Modules that decide: values in, values out. A module may be a file or a folder.
PURE_MODULES = {
    "strata-checkpoint": {
        *("layout", "container", "geometry", "item", "encoding", "manifest", "plan", "share", "names", "plain"),
        *("record", "packed", "stock_pickle", "servable"),
        *("commit/merge", "save/files", "save/objects", "verify/spans", "run/admission", "run/retention"),
    },
    "strata-data": {"formats", "order", "partition", "permutation", "reads"},
    "strata-coordinator": {"state", "membership", "barrier", "assignment", "recovery"},
}
IMPURE = re.compile(r"\b(async fn|\.await|tokio::|std::net|std::fs|Instant::now|SystemTime|rand::|std::env|dyn Store)")
USES_NEIGHBOURS = re.compile(r"\bsuper::(\w+|\{[^;]*\})")
TEST_CODE = re.compile(r"^#\[cfg\(test\)\]", re.MULTILINE)
ALLOWS_UNSAFE = re.compile(r"\b(?:allow|expect)\(\s*unsafe_code")


def test_sub_packages_import_only_shared_modules_and_themselves() -> None:
    offences = [
        f"{where} imports {target}"
        for path in python_files()
        for where, target in imports_of(path)
        if (room := first_part(target)) is not None and room not in allowed_rooms(path)
    ]
    assert offences == []


def test_a_library_is_imported_only_where_it_belongs() -> None:
    offences = [
        f"{where} imports {target}"
        for path in python_files()
        for where, target in imports_of(path)
        for library, owner in OWNER_OF_LIBRARY.items()
        if (target == library or target.startswith(f"{library}.")) and room_of(path) != owner
    ]
    assert offences == []


def test_imports_are_found_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "torch_strata" / "data" / "sample.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch.distributed.checkpoint as dcp\n"
        "from torch.distributed import checkpoint\n"
        "from . import pipe\n"
        "from ..errors import StrataError\n"
        "from .. import _native\n"
        "def later():\n    from torch_strata.checkpoint import writer\n"
    )
    found = {target for _, target in imports_of(path, root=tmp_path)}
    assert {
        "torch.distributed.checkpoint",
        "torch_strata.data.pipe",
        "torch_strata.errors.StrataError",
        "torch_strata._native",
        "torch_strata.checkpoint.writer",
    } <= found


@pytest.mark.parametrize("manifest", sorted((REPOSITORY / "native").glob("*/Cargo.toml")), ids=lambda m: m.parent.name)
def test_a_crate_depends_only_on_crates_below_it(manifest: Path) -> None:
    allowed = CRATE_MAY_DEPEND_ON[manifest.parent.name]
    assert {name for name in dependencies_of(manifest) if name.startswith("strata-")} <= allowed


def test_only_the_binding_knows_python() -> None:
    manifests = (REPOSITORY / "native").glob("*/Cargo.toml")
    assert {m.parent.name for m in manifests if any(d.startswith("pyo3") for d in dependencies_of(m))} <= {
        "strata-python"
    }


def test_each_crate_has_at_most_one_home_of_unsafe_code() -> None:
    homes: dict[str, list[str]] = {}
    for path in rust_files():
        if ALLOWS_UNSAFE.search(path.read_text()):
            homes.setdefault(path.relative_to(REPOSITORY / "native").parts[0], []).append(path.name)
    assert {crate: files for crate, files in homes.items() if len(files) > 1} == {}


def test_modules_that_decide_are_where_the_rules_say() -> None:
    found = {path.relative_to(REPOSITORY).as_posix() for path in rust_files() if is_pure(path)}
    listed = [
        f"native/{crate}/src/{module}"
        for crate in {path.split("/")[1] for path in found}
        for module in PURE_MODULES[crate]
    ]
    assert [
        module for module in listed if not any(path.startswith((f"{module}.rs", f"{module}/")) for path in found)
    ] == []


def test_modules_that_decide_read_no_clock_and_open_nothing() -> None:
    offences = [
        f"{path.relative_to(REPOSITORY)}: {found.group()}"
        for path in rust_files()
        if is_pure(path)
        for found in IMPURE.finditer(without_comments(TEST_CODE.split(path.read_text())[0]))
    ]
    assert offences == []


def test_neighbours_in_a_folder_of_a_crate_use_each_other_one_way() -> None:
    uses: dict[Path, set[Path]] = {}
    for path in rust_files():
        used = USES_NEIGHBOURS.findall(without_comments(TEST_CODE.split(path.read_text())[0]))
        names = {name for words in used for name in re.findall(r"\w+", words)}
        uses[path] = {neighbour for name in names if (neighbour := path.with_name(f"{name}.rs")).exists()}
    assert circles(uses) == []


def circles(uses: dict[Path, set[Path]]) -> list[Path]:
    """Files from which a way leads back to themselves."""
    reached = {path: set(direct) for path, direct in uses.items()}
    for middle in uses:
        for path in uses:
            if middle in reached[path]:
                reached[path] |= reached[middle]
    return [path for path in uses if path in reached[path]]


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py")) + sorted(PACKAGE.rglob("*.pyi"))


def rust_files() -> list[Path]:
    return sorted((REPOSITORY / "native").glob("*/src/**/*.rs"))


def imports_of(path: Path, *, root: Path = REPOSITORY) -> Iterator[tuple[str, str]]:
    """(file:line, absolute dotted name) of each import, those inside functions too; `from a import b` counts as a.b."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from ((where, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            yield from ((where, ".".join([*base, alias.name])) for alias in node.names)


def first_part(target: str) -> str | None:
    """The room of torch_strata that `target` lies in; None for another package or torch_strata itself."""
    package, _, rest = target.partition(".")
    return rest.partition(".")[0] if package == "torch_strata" and rest else None


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def allowed_rooms(path: Path) -> set[str]:
    room = room_of(path)
    # The face of the package and its command may name every room; test_import.py keeps them from importing torch.
    if room in ("__init__", "cli"):
        return {p.name.partition(".")[0] for p in PACKAGE.iterdir()} | SHARED
    return SHARED_MAY_IMPORT.get(room, SHARED) | {room}


def dependencies_of(manifest: Path) -> set[str]:
    """Names of what a crate needs to build; its tests may need more."""
    crate = tomllib.loads(manifest.read_text())
    tables = [crate, *crate.get("target", {}).values()]
    return {name for table in tables for kind in ("dependencies", "build-dependencies") for name in table.get(kind, {})}


def is_pure(path: Path) -> bool:
    crate, _, *parts = path.relative_to(REPOSITORY / "native").with_suffix("").parts
    return any("/".join(parts[:end]) in PURE_MODULES.get(crate, set()) for end in range(1, len(parts) + 1))


def without_comments(source: str) -> str:
    return re.sub(r"//.*", "", source)
