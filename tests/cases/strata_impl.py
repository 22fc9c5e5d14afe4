"""Adapter for case scripts that try one kind of fault against any checkpoint library: names ours."""

import os

from torch_strata import StrataReader, StrataWriter


def writer(path: str | os.PathLike[str]) -> StrataWriter:
    """A StorageWriter to `path`."""
    return StrataWriter(path)


def reader(path: str | os.PathLike[str]) -> StrataReader:
    """A StorageReader of `path`."""
    return StrataReader(path)
