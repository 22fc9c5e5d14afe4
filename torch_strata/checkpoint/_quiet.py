"""Our own calls of DCP in a single process, without its warning that this might not be meant."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_alone"]


@contextmanager
def quiet_alone(alone: bool) -> Iterator[None]:
    """Where `alone`, hold back what ``dcp.load`` warns of: that is what was asked for."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
