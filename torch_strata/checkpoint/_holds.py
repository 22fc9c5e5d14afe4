"""Holds on checkpoints of a run, which no retention removes and no save replaces. Imports no torch."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from torch_strata import _native
from torch_strata._store import open_store
from torch_strata.checkpoint._order import check_name
from torch_strata.config import StorageConfig
from torch_strata.errors import ObjectNotFoundError

__all__ = ["held", "release"]

# As strata-checkpoint's catalog.rs: pins are "pin-<who>.<nonce>", beside the manifests.
_PINS = ".strata/"
_PIN = "pin-"
_NONCE_BYTES = 8


@contextmanager
def held(run: _native.Run, folder: str, who: str) -> Iterator[None]:
    """Hold the checkpoint in `folder` as `who`, of which there may be several at once.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
    """
    check_name(who)
    pin = f"{who}.{secrets.token_hex(_NONCE_BYTES)}"
    run.pin(folder, pin)
    try:
        yield
    finally:
        run.unpin(folder, pin)


def release(run: _native.Run, root: str, config: StorageConfig, folder: str, who: str) -> int:
    """End every hold of `who`; how many there were.

    Raises:
        StorageError: If the store fails.
    """
    check_name(who)
    try:
        names = [name for name, _ in open_store(root, config).list(f"{folder}/{_PINS}")]
    except ObjectNotFoundError:
        return 0
    pins = [pin for name in names if (pin := name.rpartition("/")[2]).startswith(_PIN)]
    his = [pin for pin in pins if _holder(pin.removeprefix(_PIN)) == who]
    for pin in his:
        run.unpin(folder, pin.removeprefix(_PIN))
    return len(his)


def _holder(pin: str) -> str:
    """Who a pin is of; one of before there were nonces is a name alone."""
    who, dot, nonce = pin.rpartition(".")
    is_nonce = len(nonce) == 2 * _NONCE_BYTES and all(digit in "0123456789abcdefABCDEF" for digit in nonce)
    return who if dot and is_nonce else pin
