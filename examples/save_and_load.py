"""Save a state dict, load it, and handle a named error: torch_strata in its smallest use, in one process."""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torch_strata import StrataReader, StrataWriter
from torch_strata.errors import CheckpointNotFoundError

with tempfile.TemporaryDirectory() as run:  # a URL such as s3://bucket/run does as well
    weight = torch.arange(6.0).reshape(2, 3)
    dcp.save({"weight": weight, "step": 7}, storage_writer=StrataWriter(f"{run}/step-7"))

    # Tensors are loaded in place, so the state to load into has the right shapes and dtypes.
    loaded = {"weight": torch.zeros(2, 3), "step": 0}
    dcp.load(loaded, storage_reader=StrataReader(f"{run}/step-7"))
    print(f"step {loaded['step']}, weight {loaded['weight']}")

    # DCP gathers what went wrong on each rank. Its exception is not an `Exception`: catch it by its name.
    try:
        dcp.load(loaded, storage_reader=StrataReader(f"{run}/step-8"))
    except CheckpointException as error:
        cause, _ = error.failures[0]  # rank 0's
        print(f"{type(cause).__name__}: {cause}")
        assert isinstance(cause, CheckpointNotFoundError)
