"""The documents: links lead somewhere, snippets run, and every file can be read in a sitting."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_python

MAX_LINES = 500
READ_BY_PEOPLE = {".py", ".pyi", ".rs", ".md", ".toml", ".proto", ".sh"}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# ```python run: the snippet stands alone and needs no server, no GPU and no second rank.
RUNNABLE = re.compile(r"^python\b.*\brun\b")
# ```python run continues: it goes on after the one before it, in the same process.
CONTINUES = re.compile(r"^python run continues\b")


def committed_files() -> list[Path]:
    """Files that git tracks or would track, so that build outputs do not count."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [REPOSITORY / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file()]


def documents() -> list[Path]:
    return [path for path in committed_files() if path.suffix == ".md"]


def runnable_snippets() -> list[tuple[str, str]]:
    """(name, code) of each snippet of README.md and the guides that says it runs, with those that continue it."""
    found: list[tuple[str, str]] = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs/guide").glob("*.md"))]:
        for k, (info, code) in enumerate(FENCE.findall(page.read_text())):
            if CONTINUES.match(info):
                name, before = found.pop()
                found.append((name, f"{before}\n{code}"))
            elif RUNNABLE.match(info):
                found.append((f"{page.stem} snippet {k}", code))
    return found


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_relative_links_lead_to_a_file(path: Path) -> None:
    text = FENCE.sub("", path.read_text())
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_files_are_short_enough_to_be_read_in_a_sitting() -> None:
    lengths = {
        str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines())
        for path in committed_files()
        if path.suffix in READ_BY_PEOPLE or path.name == "Makefile"
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_the_documents_have_snippets_that_run() -> None:
    assert {name.split()[0] for name, _ in runnable_snippets()} >= {"README", "plain-dcp"}


@pytest.mark.parametrize("snippet", runnable_snippets(), ids=lambda snippet: snippet[0])
def test_a_snippet_runs(snippet: tuple[str, str], tmp_path: Path) -> None:
    run_python(snippet[1], cwd=tmp_path)


def test_every_fault_on_the_faults_page_has_the_test_that_it_names() -> None:
    rows = [line for line in (REPOSITORY / "docs/guide/faults.md").read_text().splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(\w+)`", row.rsplit("|", 2)[1]) for row in rows if not row.startswith(("| Fault", "| ---"))]
    code = "\n".join(path.read_text() for path in committed_files() if path.suffix in {".py", ".rs"})
    assert all(named) and len(named) > 30
    assert [name for names in named for name in names if not re.search(rf"(def|fn) {name}\b", code)] == []
