"""What of the `.metadata` of stock torch only Python can pickle; the Rust core writes the rest, opcode by opcode.

What it unpickles to is what stock torch's own pickle does; `tests/checkpoint/test_stock_pickle.py` compares them.
Imports no torch.
"""

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any

from torch_strata.errors import CheckpointError

if TYPE_CHECKING:
    from torch_strata._types import StockParts

__all__ = ["DCP_VERSION", "stock_parts"]

# What FileSystemWriter writes; stock readers compare nothing else.
DCP_VERSION = "1.0.0"


def stock_parts(planner_data: Any, *, checkpoint_id: str, save_id: str, records_strides: bool = True) -> "StockParts":
    """Parts of a pickled `torch.distributed.checkpoint.metadata.Metadata`.

    Args:
        planner_data: Pickled as it is.
        checkpoint_id: The place.
        save_id: Identity of the save.
        records_strides: Whether a tensor's properties say its strides; torch 2.14 and older do not take them.

    Raises:
        CheckpointError: If the planner's data cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)  # without frames: its output goes into the middle of another pickle
    try:
        pickler.dump(planner_data)
    except Exception as error:
        raise CheckpointError(f"cannot pickle the checkpoint's metadata (planner_data?): {error}") from error
    # A memo's copy is a dict of all that was pickled; every second key of it would be an object's id.
    first_memo = len(pickler.memo.copy())
    return buffer.getvalue()[2:-1], _storage_meta(checkpoint_id, save_id), first_memo, DCP_VERSION, records_strides


def _storage_meta(checkpoint_id: str, save_id: str) -> bytes:
    """Opcodes of a StorageMeta, which nothing else shares."""
    state = {"checkpoint_id": _text(checkpoint_id), "save_id": _text(save_id), "load_id": b"N", "modules": b"]"}
    pairs = b"".join(_text(key) + value for key, value in state.items())
    return b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81}(" + pairs + b"ub"


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data
