"""Which run may commit below a root: read, without becoming it. Imports no torch."""

from torch_strata import _native
from torch_strata.errors import ObjectNotFoundError

__all__ = ["newest_generation"]

# Create-only records whose names are numbers, see native/strata-checkpoint/src/base.rs.
_FOLDER = ".strata/generations/"


def newest_generation(root: _native.Store) -> int:
    """The highest generation that was claimed below `root`; 0 if none was.

    Raises:
        StorageError: If the root cannot be listed.
    """
    try:
        names = [name.removeprefix(_FOLDER) for name, _ in root.list(_FOLDER)]
    except ObjectNotFoundError:
        return 0
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)
