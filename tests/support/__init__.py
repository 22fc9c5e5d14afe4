"""Helpers that tests of several packages share."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(code: str, *arguments: str, cwd: Path = REPOSITORY, timeout_seconds: float = 100) -> str:
    """What a fresh interpreter prints when it runs `code`.

    Raises:
        AssertionError: If it exits with anything but 0; the message holds what it wrote to stderr.
        subprocess.TimeoutExpired: If it runs longer than `timeout_seconds`; it is killed.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout
