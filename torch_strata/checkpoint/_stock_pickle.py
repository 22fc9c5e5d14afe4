"""What of the `.metadata` of stock torch only Python can pickle; the Rust core writes the rest, opcode by opcode."""

import dataclasses
import io
import pickle
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from torch_strata.errors import CheckpointError

if TYPE_CHECKING:
    from torch_strata._types import StockParts

__all__ = ["RECORDS_STRIDES", "stock_parts"]

# torch 2.14 and older record none.
RECORDS_STRIDES = any(field.name == "strides" for field in dataclasses.fields(TensorProperties))


def stock_parts(planner_data: Any, storage_meta: StorageMeta, *, version: str) -> "StockParts":
    """Parts of a pickled `torch.distributed.checkpoint.metadata.Metadata`.

    Args:
        planner_data: Pickled as it is.
        storage_meta: Pickled as it is.
        version: DCP's version of the format.

    Raises:
        CheckpointError: If the planner's data cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)  # without frames: its output goes into the middle of another pickle
    parts = []
    try:
        for value in (planner_data, storage_meta):
            pickler.dump(value)
            parts.append(buffer.getvalue()[2:-1])
            buffer.seek(0)
            buffer.truncate()
    except Exception as error:
        raise CheckpointError(f"cannot pickle the checkpoint's metadata (planner_data?): {error}") from error
    # A memo's copy is a dict of all that was pickled; every second key of it would be an object's id.
    return parts[0], parts[1], len(pickler.memo.copy()), version, RECORDS_STRIDES
