"""Stock and ours take turns at one place: whoever saved last is what both read."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import Extension, StreamTransformExtension
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CorruptionError, LayoutMismatchError, StrataReader


def stock_save(value: float, path) -> None:
    dcp.save({"w": torch.full((5000,), value), "n": value}, storage_writer=FileSystemWriter(path), no_dist=True)


def our_save(value: float, path) -> None:
    save({"w": torch.full((5000,), value), "n": value}, path)


def found(path, reader) -> set[float]:
    out = {"w": torch.zeros(5000), "n": 0.0}
    dcp.load(out, storage_reader=reader(path), no_dist=True)
    return {out["n"], *out["w"].unique().tolist()}


@pytest.mark.parametrize("turns", ["so", "os", "oo", "sos", "oso", "osso", "soos"])
def test_the_last_save_is_what_everybody_reads(tmp_path, turns):
    for number, who in enumerate(turns, start=1):
        (stock_save if who == "s" else our_save)(float(number), tmp_path / "c")
        assert found(tmp_path / "c", StrataReader) == {number}, f"ours after {turns[:number]}"
        assert found(tmp_path / "c", FileSystemReader) == {number}, f"stock after {turns[:number]}"


def test_metadata_that_cannot_be_read_does_not_stop_the_next_save(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(b"garbage")
    our_save(2.0, tmp_path / "c")
    assert found(tmp_path / "c", StrataReader) == {2.0}


def test_what_the_metadata_says_is_what_stock_would_write(tmp_path):
    state = {"w": torch.ones(3, 4).t(), "opt": {"lr": 0.1, "l": [torch.ones(1), 2]}}
    stock_state = dict(state)
    save(state, tmp_path / "ours")
    dcp.save(stock_state, storage_writer=FileSystemWriter(tmp_path / "stock"), no_dist=True)
    ours, stock = (pickle.loads((tmp_path / who / ".metadata").read_bytes()) for who in ("ours", "stock"))
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.storage_data.keys() == stock.storage_data.keys()
    assert ours.version == stock.version
    assert ours.storage_meta.checkpoint_id == str(tmp_path / "ours") and ours.storage_meta.save_id


def test_our_metadata_reads_back_as_it_was_planned(tmp_path):
    state = {
        "w": torch.ones(3, 4).t(),
        "z": {"lr": 0.1, "l": [torch.ones(1, requires_grad=True), 2]},
        "\ud800": torch.ones(1),
    }
    save(state, tmp_path / "c")
    ours = StrataReader(tmp_path / "c").read_metadata()
    stock = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert ours.planner_data == stock.planner_data and list(ours.planner_data) == list(stock.planner_data)


def test_a_quantized_tensor_is_not_loaded_as_other_numbers(tmp_path):
    save({"q": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.quint8)}, tmp_path / "c")
    out = {"q": torch.quantize_per_tensor(torch.zeros(4), 0.25, 2, torch.quint8)}
    error = failure_of(lambda: load(out, tmp_path / "c"))
    assert isinstance(error, LayoutMismatchError) and "0.25" in str(error)
    assert bool((out["q"].dequantize() == 0).all())


def test_sparse_and_quantized_tensors_go_through_torch_save(tmp_path):
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.quint8)
    save({"q": quantized, "w": torch.ones(2)}, tmp_path / "c")
    for reader in (StrataReader, FileSystemReader):
        out = {"q": torch.quantize_per_tensor(torch.zeros(4), 0.5, 2, torch.quint8), "w": torch.zeros(2)}
        dcp.load(out, storage_reader=reader(tmp_path / "c"), no_dist=True)
        assert torch.equal(out["q"].int_repr(), quantized.int_repr())


class Xor(StreamTransformExtension):
    """A stream transform that no registry knows."""

    @staticmethod
    def from_descriptor(version: str) -> Extension:
        return Xor()

    @staticmethod
    def registry_name() -> str:
        return "test.xor"

    def get_descriptor(self) -> str:
        return "test.xor/1"

    def transform_to(self, output):
        return output

    def transform_from(self, input):
        return input


def test_a_stream_transform_that_is_unknown_is_named(tmp_path):
    writer = FileSystemWriter(tmp_path / "c", _extensions=[Xor()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    error = failure_of(lambda: load({"w": torch.zeros(3)}, tmp_path / "c"))
    assert "test.xor" in str(error) and "'w'" in str(error)


@pytest.mark.parametrize("chunks", [[], [(0, 2)], [(0, 3), (2, 2)], [(0, 5)], [(-1, 4)], [(0, 2), (3, 1)]])
def test_chunks_that_do_not_tile_their_tensor_are_refused(tmp_path, chunks):
    dcp.save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks = [
        ChunkStorageMetadata(torch.Size([offset]), torch.Size([size])) for offset, size in chunks
    ]
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: load({"w": torch.zeros(4)}, tmp_path / "c"))
    assert isinstance(error, CorruptionError) and "'w'" in str(error)


def test_a_stock_payload_decides_its_dtype_not_the_metadata(tmp_path):
    dcp.save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    out = torch.full((4,), 7, dtype=torch.int32)
    assert "float32" in str(failure_of(lambda: load({"w": out}, tmp_path / "c")))
    assert out.tolist() == [7] * 4
