"""Small file systems of a test's own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["mounted", "read_only"]


@contextlib.contextmanager
def mounted(folder: Path, *, mib: int) -> Iterator[Path]:
    """A file system with room for `mib` MiB at `folder`. Skips the test where nothing may be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root and mount(8)")
    folder.mkdir()
    done = _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder))
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: what a failed test still has open must not keep it.
        _run("umount", "-l", str(folder))


def read_only(folder: Path, *, on: bool) -> None:
    """Let a mounted folder take no more writes, not even root's, or take them again."""
    done = _run("mount", "-o", f"remount,{'ro' if on else 'rw'}", str(folder))
    assert done.returncode == 0, done.stderr


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
