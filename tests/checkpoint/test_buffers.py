"""A buffer in the state, which trainers use for what they pickled themselves, loads without trusting anything."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointError, StrataLoadPlanner, StrataReader


class Progress:
    """Saves its history as bytes that it alone understands."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, object]:
        buffer = io.BytesIO()
        torch.save(self.losses, buffer)
        return {"losses": buffer, "step": torch.tensor(len(self.losses))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


def stock_save(state, path):
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


@pytest.mark.parametrize("write", [save, stock_save])
@pytest.mark.parametrize("planner", [None, StrataLoadPlanner])
def test_a_buffer_comes_back_with_its_bytes(tmp_path, write, planner):
    write({"progress": Progress([0.5, 0.25])}, tmp_path / "c")
    out = {"progress": Progress([])}
    planner = planner and planner()
    dcp.load(out, storage_reader=StrataReader(tmp_path / "c"), planner=planner, no_dist=True)
    assert out["progress"].losses == [0.5, 0.25]


def test_a_buffer_comes_back_at_its_position(tmp_path):
    buffer = io.BytesIO(b"0123456789")
    buffer.seek(4)
    save({"b": buffer}, tmp_path / "c")
    out = {"b": io.BytesIO()}
    load(out, tmp_path / "c")
    assert out["b"].read() == b"456789"


def test_a_buffer_with_attributes_still_trusts_no_class(tmp_path):
    class Carrier(io.BytesIO):
        pass

    Carrier.__module__, Carrier.__qualname__ = __name__, "Carrier"
    globals()["Carrier"] = Carrier
    save({"b": Carrier(b"1")}, tmp_path / "c")
    error = failure_of(lambda: load({"b": io.BytesIO()}, tmp_path / "c"))
    assert isinstance(error, CheckpointError) and "Carrier" in str(error)
