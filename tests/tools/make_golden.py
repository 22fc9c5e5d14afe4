"""Writes tests/golden/v1: run once for each format version, and never again for a released one."""

import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp

from tests.golden.state import golden_state
from torch_strata import StrataWriter

place = Path(__file__).parents[1] / "golden" / "v1"
shutil.rmtree(place, ignore_errors=True)
dcp.save(golden_state(), storage_writer=StrataWriter(place))
metadata = place / ".metadata"
# The path of the machine that wrote it is of no interest to readers; same length, so that the pickle stays one.
path = str(place).encode()
metadata.write_bytes(metadata.read_bytes().replace(path, b"golden".ljust(len(path), b"-")))
