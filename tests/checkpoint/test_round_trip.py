"""Every dtype and shape comes back bit for bit: synchronous, asynchronous, and through the stock reader."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from tests.checkpoint.states import DTYPES, SHAPES, AnyDtypePlanner, load, random_bits, same_bits, save
from torch_strata import StrataReader, StrataWriter


def zoo(seed: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{i}": random_bits(getattr(torch, name), shape, seed)
        for name in DTYPES
        for i, shape in enumerate(SHAPES)
    }


def empty_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: random_bits(value.dtype, tuple(value.shape), 99) for key, value in state.items()}


def wrong_keys(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [key for key, value in expected.items() if not same_bits(found[key], value)]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    state = zoo(1)
    save(state, tmp_path / "c", planner=AnyDtypePlanner())
    out = empty_like(state)
    load(out, tmp_path / "c")
    assert wrong_keys(out, state) == []


def test_verification_before_the_copy_gives_the_same_bits(tmp_path):
    state = zoo(2)
    save(state, tmp_path / "c", planner=AnyDtypePlanner())
    out = empty_like(state)
    load(out, tmp_path / "c", verify="before")
    assert wrong_keys(out, state) == []


@pytest.mark.parametrize(
    "stager", [None, DefaultStager(StagingOptions(False, False, False, False))], ids=["own", "torch"]
)
def test_an_asynchronous_save_holds_the_state_of_its_call(tmp_path, group, stager):
    state = zoo(3)
    if stager is not None:  # torch's own stager cannot copy this dtype
        state = {key: value for key, value in state.items() if "float4" not in key}
    expected = {key: value.clone() for key, value in state.items()}
    future = dcp.async_save(
        dict(state), storage_writer=StrataWriter(tmp_path / "c"), planner=AnyDtypePlanner(), async_stager=stager
    )
    for value in state.values():
        value.untyped_storage().fill_(0)
    future.result(60)
    out = empty_like(expected)
    load(out, tmp_path / "c")
    assert wrong_keys(out, expected) == []


def test_the_writer_is_an_async_stager_of_its_own(tmp_path):
    assert isinstance(StrataWriter(tmp_path), AsyncStager)


def test_staging_keeps_tied_tensors_tied_and_copies_views_without_their_storage(tmp_path):
    big = torch.arange(1 << 16, dtype=torch.float32)
    state = {"a": big[8:16], "b": big[8:16], "other": big[16:24], "nested": {"list": [1, [2]]}}
    staged = StrataWriter(tmp_path).stage(state)
    state["nested"]["list"][1].append(3)
    assert staged["a"].data_ptr() == staged["b"].data_ptr() != staged["other"].data_ptr()
    assert staged["a"].untyped_storage().nbytes() == 32
    assert staged["nested"] == {"list": [1, [2]]}


def test_stock_reader_loads_what_we_wrote(tmp_path):
    state = zoo(4)
    save(state, tmp_path / "c", planner=AnyDtypePlanner())
    out = empty_like(state)
    # Stock narrows every tensor it reads, which torch cannot do for an empty bits16 and the like.
    dcp.load(out, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert wrong_keys(out, state) == []


def test_dcp_to_torch_save_converts_what_we_wrote(tmp_path):
    state = {"w": torch.randn(5, 3), "opt": {"lr": 0.1, "betas": (0.9, 0.99)}, "names": ["a", "b"]}
    save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    out = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(out.pop("w"), state.pop("w"))
    assert out == state


def test_we_load_what_stock_wrote(tmp_path):
    # Stock cannot save these.
    state = {key: value for key, value in zoo(5).items() if "float4" not in key and "bits" not in key}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c"), planner=AnyDtypePlanner(), no_dist=True)
    out = empty_like(state)
    reader = load(out, tmp_path / "c")
    assert wrong_keys(out, state) == []
    assert reader.stats.unverified_bytes < sum(value.nbytes for value in state.values())


def test_values_come_back_equal(tmp_path):
    values = {
        "int": 7,
        "float": 0.1,
        "big": 1 << 100,
        "none": None,
        "str": "é\ud800",
        "bytes": b"\0\1",
        "tuple": (1, (2.5, "x")),
        "set": {1, 2},
        "complex": 1 + 2j,
        "nested": {"list": [1, {"deep": True}], "empty": [], "none": {}},
        "rng": torch.get_rng_state(),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
    }
    save(values, tmp_path / "c")
    out = {
        **dict.fromkeys(values),
        "nested": {"list": [0, {"deep": None}], "empty": [9], "none": {}},
        "rng": torch.zeros_like(values["rng"]),
    }
    load(out, tmp_path / "c")
    assert torch.equal(out.pop("rng"), values.pop("rng"))
    assert out == values


def test_the_writer_reports_what_it_did(tmp_path):
    writer = save({"a": torch.zeros(1000), "b": 1}, tmp_path / "c")
    assert writer.stats.committed and writer.stats.fenced
    assert writer.stats.items == 2 and writer.stats.number == 1
    assert writer.stats.payload_bytes >= 4000
    assert writer.stats.written_bytes >= writer.stats.payload_bytes


def test_the_reader_reports_what_it_read(tmp_path):
    save({"a": torch.zeros(1 << 20), "b": 1}, tmp_path / "c")
    reader = load({"a": torch.zeros(1 << 20), "b": 0}, tmp_path / "c")
    assert reader.stats.bytes_read >= 4 << 20
    assert reader.stats.blocks_verified >= 1
    assert reader.stats.unverified_bytes == 0
    assert reader.stats.seconds > 0


def test_a_path_object_and_a_file_url_name_the_same_place(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "c")
    for place in (str(tmp_path / "c"), f"file://{tmp_path}/c", Path(tmp_path / "c")):
        out = {"a": torch.zeros(3)}
        dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
        assert out["a"].tolist() == [1, 1, 1]
