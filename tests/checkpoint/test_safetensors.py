"""Directories of safetensors files load as the safetensors library reads them, and what contradicts itself is named."""

import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import SHAPES, failure_of, load, random_bits, same_bits, save
from tests.checkpoint.test_reshard import load_on_mesh, model, world
from tests.support import run_python
from torch_strata import CheckpointError, CorruptionError, StorageConfig, StrataReader, verify
from torch_strata._store import open_store
from torch_strata.checkpoint._safetensors import parse_header, parse_index
from torch_strata.cli import main
from torch_strata.errors import CheckpointNotFoundError, LayoutMismatchError, ManifestError, ObjectNotFoundError

INDEX = "model.safetensors.index.json"
# Bytes of an element in the file, for each dtype that the library hands to torch.
BYTES_OF = {
    0.5: ["F4"],
    1: ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"],
    2: ["U16", "I16", "F16", "BF16"],
    4: ["U32", "I32", "F32"],
    8: ["U64", "I64", "F64", "C64"],
}


def write(path: Path, header: Any, data: bytes = b"", padding: int = 0) -> Path:
    """A safetensors file, sound or not."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * padding
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def info(first: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def write_index(folder: Path, file_of: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": file_of}))


def emptied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        # Torch cannot fill a float4 tensor.
        key: torch.zeros(value.numel() * value.itemsize, dtype=torch.uint8).view(value.dtype).view(value.shape)
        for key, value in state.items()
    }


def assert_loads(folder: Path, expected: dict[str, torch.Tensor], **options: Any) -> StrataReader:
    out = emptied(expected)
    reader = load(out, folder, **options)
    assert [key for key, value in expected.items() if not same_bits(out[key], value)] == []
    return reader


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Three shards and an index."""
    state = {f"layer.{i}.w": random_bits(torch.bfloat16, (6, 5), seed=i) for i in range(6)}
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    folder.mkdir()
    for i, name in enumerate(names):
        save_file(dict(list(state.items())[2 * i :][:2]), folder / name)
    write_index(folder, {key: names[i // 2] for i, key in enumerate(state)})
    return state


@pytest.mark.parametrize(("itemsize", "dtype"), [(size, name) for size, names in BYTES_OF.items() for name in names])
def test_every_dtype_and_shape_equals_what_the_library_reads(tmp_path, itemsize, dtype):
    header, data = {}, b""
    for i, shape in enumerate(SHAPES):
        stored = [*shape[:-1], 2 * shape[-1]] if dtype == "F4" and shape else list(shape)
        if dtype == "F4" and not shape:
            continue  # half a byte is no tensor
        size = int(math.prod(stored) * itemsize)
        bits = random_bits(torch.bool if dtype == "BOOL" else torch.uint8, (size,), seed=i)
        header[f"t{i}"] = info(len(data), len(data) + size, stored, dtype)
        data += bytes(bits.tolist())
    path = write(tmp_path / "model.safetensors", header, data, padding=3)
    with safe_open(path, "pt") as file:
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert {tuple(value.shape) for value in expected.values()} >= {(0,), (33, 65)}
    assert_loads(tmp_path, expected)
    assert_loads(tmp_path, expected, verify="before")


def test_a_directory_is_read_by_its_index(tmp_path):
    state = sharded(tmp_path / "c")
    save_file({"layer.0.w": torch.ones(1)}, tmp_path / "c" / "consolidated.safetensors")
    expected = {}
    for path in (tmp_path / "c").glob("model-*"):
        expected.update(load_file(path))
    assert expected.keys() == state.keys()
    assert_loads(tmp_path / "c", expected)


def test_shards_without_an_index_and_links_as_in_a_download_cache(tmp_path):
    state = sharded(tmp_path / "blobs")
    (tmp_path / "blobs" / INDEX).unlink()
    assert_loads(tmp_path / "blobs", state)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    assert_loads(tmp_path / "snapshot", state)


def test_a_shard_in_a_folder_of_its_own(tmp_path):
    write(tmp_path / "deep" / "a.safetensors", {"w": info(0, 8, [2])}, struct.pack("<2f", 1, 2))
    write_index(tmp_path, {"w": "deep/a.safetensors"})
    assert_loads(tmp_path, {"w": torch.tensor([1.0, 2.0])})


def test_one_file_wins_over_the_same_weights_under_other_names(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "model.fp16.safetensors")
    assert_loads(tmp_path, {"w": torch.ones(3)})


def test_a_header_longer_than_the_first_read(tmp_path):
    state = {f"a.rather.long.name.for.a.tensor.{i:05}": torch.full((2,), float(i)) for i in range(2000)}
    save_file(state, tmp_path / "model.safetensors")
    assert int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") > 128 << 10
    assert_loads(tmp_path, state)


def test_the_header_tells_the_metadata_as_torchs_own_reader_does(tmp_path):
    state = sharded(tmp_path / "c")
    ours = StrataReader(tmp_path / "c").read_metadata()
    theirs = HuggingFaceStorageReader(str(tmp_path / "c")).read_metadata()
    assert ours.planner_data == {key: (key,) for key in state}
    assert ours.state_dict_metadata.keys() == state.keys()
    for key, value in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[key] == value


def test_a_store_that_is_no_directory(tmp_path):
    place = f"memory://{tmp_path.name}"
    store = open_store(place, StorageConfig())
    write(tmp_path / "x", {"w": info(0, 8, [2])}, struct.pack("<2f", 1, 2))
    store.put("model.safetensors", (tmp_path / "x").read_bytes())
    assert_loads(place, {"w": torch.tensor([1.0, 2.0])})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "fsdp_tp"])
def test_every_mesh_loads_a_safetensors_file(tmp_path, mesh):
    expected = {key: value.tolist() for key, value in model().state_dict().items()}
    (tmp_path / "c").mkdir()
    save_file(model().state_dict(), tmp_path / "c" / "model.safetensors")
    for state in run_ranks(tmp_path, world(mesh), load_on_mesh, mesh, str(tmp_path / "c")):
        assert state == expected


def load_half(rank: int, place: str) -> tuple[int, bool]:
    local = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    reader = StrataReader(place)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])}
    dcp.load(state, storage_reader=reader)
    expected = load_file(Path(place) / "model.safetensors")["w"][2048 * rank :][:2048]
    return reader.stats.bytes_read, same_bits(local, expected)


def test_each_rank_reads_only_its_rows(tmp_path):
    (tmp_path / "c").mkdir()
    save_file({"w": random_bits(torch.bfloat16, (4096, 2048))}, tmp_path / "c" / "model.safetensors")
    assert run_ranks(tmp_path, 2, load_half, str(tmp_path / "c")) == [(8 << 20, True), (8 << 20, True)]


class Box(DefaultLoadPlanner):
    """Reads a box of one tensor into `part`."""

    def __init__(self, part: torch.Tensor, first: tuple[int, ...]) -> None:
        super().__init__()
        self.part, self.first = part, first

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        item = plan.items[0]
        zero, first = torch.Size([0] * self.part.dim()), torch.Size(self.first)
        plan.items = [type(item)(item.type, item.dest_index, zero, item.storage_index, first, self.part.shape)]
        return plan

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_slice_equals_the_librarys_and_reads_from_its_first_byte_to_its_last(tmp_path, dtype):
    whole = random_bits(dtype, (8192, 2048))
    save_file({"before": torch.ones(5), "w": whole}, tmp_path / "model.safetensors")
    for first, shape in [((3000, 0), (64, 2048)), ((17, 100), (3, 7)), ((8188, 2047), (4, 1))]:
        part = torch.zeros(shape, dtype=dtype)
        reader = load({"w": torch.empty(8192, 2048, dtype=dtype)}, tmp_path, planner=Box(part, first))
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            slices = tuple(slice(f, f + n) for f, n in zip(first, shape, strict=True))
            assert same_bits(part, file.get_slice("w")[slices].contiguous())
        assert reader.stats.bytes_read == ((shape[0] - 1) * 2048 + shape[1]) * dtype.itemsize
        assert reader.stats.unverified_bytes == reader.stats.bytes_read


def test_a_part_of_the_state_loads_alone(tmp_path):
    state = sharded(tmp_path / "c")
    out = {"layer.4.w": torch.zeros(6, 5, dtype=torch.bfloat16), "new": torch.full((2,), 7.0)}
    load(out, tmp_path / "c", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same_bits(out["layer.4.w"], state["layer.4.w"]) and out["new"].tolist() == [7, 7]
    nested = {"layer": {"0": {"w": torch.zeros(6, 5, dtype=torch.bfloat16)}}}
    load(nested, tmp_path / "c")
    assert same_bits(nested["layer"]["0"]["w"], state["layer.0.w"])


def test_another_dtype_is_refused_before_anything_changes_and_converted_when_asked(tmp_path):
    state = sharded(tmp_path / "c")
    out = {key: torch.full((6, 5), 3.0) for key in state}
    out["layer.0.w"] = torch.zeros(6, 5, dtype=torch.bfloat16)
    error = failure_of(lambda: load(out, tmp_path / "c"))
    assert isinstance(error, LayoutMismatchError)
    assert "'layer.1.w'" in str(error) and "bfloat16" in str(error) and "float32" in str(error)
    assert not out["layer.0.w"].any() and all((out[f"layer.{i}.w"] == 3).all() for i in range(1, 6))
    load(out, tmp_path / "c", allow_dtype_cast=True)
    for key, value in state.items():
        assert torch.equal(out[key].nan_to_num(), value.to(out[key].dtype).nan_to_num())


def test_a_checkpoint_beside_such_files_wins(tmp_path):
    save({"w": torch.ones(2)}, tmp_path)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert_loads(tmp_path, {"w": torch.ones(2)})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.tmp", None])
def test_without_such_files_nothing_is_found(tmp_path, name):
    if name:
        (tmp_path / name).write_bytes(b"{}")
    place = tmp_path if name else tmp_path / "missing"
    assert isinstance(failure_of(lambda: load({"w": torch.zeros(1)}, place)), CheckpointNotFoundError)


def test_what_torchs_writer_consolidates_is_read_and_its_parts_are_refused(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(whole), {"a": 1, "b": 2}), no_dist=True)
    assert (whole / INDEX).exists()
    assert_loads(whole, state)
    note = {"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [4]}}
    parts.mkdir()
    save_file(state, parts / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": json.dumps(note)})
    error = failure_of(lambda: load(emptied(state), parts))
    assert isinstance(error, CheckpointError)
    assert "shard-00001" in str(error) and "'b'" in str(error) and "consolidate_safetensors_files" in str(error)


ONE = info(0, 8, [2])
HOSTILE = {
    "not an object": (b"[]", 0, "no JSON object"),
    "not JSON": (b"{", 0, "damaged JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "damaged JSON"),
    "UTF-16": ("{}".encode("utf-16"), 0, "damaged JSON"),
    "nested": (b"[" * 100_000, 0, "damaged JSON"),
    "NaN": (b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', 8, "NaN"),
    "digits": (b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', 8, "damaged JSON"),
    "same tensor twice": (json.dumps({"w": ONE})[:-1].encode() + b"," + json.dumps({"w": ONE})[1:].encode(), 8, "'w'"),
    "same field twice": (b'{"w": {"dtype": "F32", "dtype": "F32"}}', 8, "'dtype'"),
    "notes": ({"__metadata__": {"a": 1}, "w": ONE}, 8, "__metadata__"),
    "damaged note of DCP": ({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "w": ONE}, 8, "DCP_SHARDING_INFO"),
    "no description": ({"w": 3}, 0, "'w'"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, 8, "'w': the dtype None"),
    "unknown dtype": ({"w": info(0, 8, [2], "F33")}, 8, "'w': the dtype 'F33'"),
    "dtype that torch lacks": ({"w": info(0, 6, [8], "F6_E2M3")}, 6, "'w': the dtype 'F6_E2M3'"),
    "dtype that cannot be looked up": ({"w": {**ONE, "dtype": []}}, 8, "'w': the dtype"),
    "negative shape": ({"w": info(0, 8, [-2])}, 8, "'w': bad shape"),
    "shape of truths": ({"w": {**ONE, "shape": [True, 2]}}, 8, "'w': bad shape"),
    "fractional shape": ({"w": {**ONE, "shape": [2.0]}}, 8, "'w': bad shape"),
    "no shape": ({"w": {**ONE, "shape": None}}, 8, "'w': bad shape"),
    "huge shape": ({"w": info(0, 8, [1 << 62] * 10_000)}, 8, "'w': F32"),
    "too large a shape": ({"w": info(0, 8, [3])}, 8, "'w': F32 of shape [3] does not fill exactly 8"),
    "too small a shape": ({"w": info(0, 8, [1])}, 8, "'w': F32 of shape [1] does not fill exactly 8"),
    "bytes of an empty tensor": ({"w": info(0, 8, [0])}, 8, "'w': F32"),
    "half a byte": ({"w": info(0, 3, [2, 3], "F4")}, 3, "'w': the last dim"),
    "behind the file": ({"w": info(0, 16, [4])}, 8, "'w': data_offsets"),
    "backwards": ({"w": info(8, 0, [2])}, 8, "'w': data_offsets"),
    "one offset": ({"w": {**ONE, "data_offsets": [0]}}, 8, "'w': data_offsets"),
    "negative offset": ({"w": info(-8, 0, [2])}, 8, "'w': data_offsets"),
    "hole": ({"v": ONE, "w": info(12, 20, [2])}, 20, "'w' begins"),
    "hole at the start": ({"w": info(4, 12, [2])}, 12, "'w' begins"),
    "overlap": ({"v": ONE, "w": info(4, 12, [2])}, 12, "'w' begins"),
    "twice the same bytes": ({"v": ONE, "w": ONE}, 8, "'w' begins"),
    "empty tensor inside another": ({"v": ONE, "w": info(4, 4, [0])}, 8, "'w' begins"),
    "bytes of nobody": ({"w": ONE}, 9, "the tensors end at byte"),
    "nothing but bytes": ({}, 1, "the tensors end at byte"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_contradicts_itself_or_its_file_is_refused_by_name(tmp_path, case):
    header, data_bytes, message = HOSTILE[case]
    path = write(tmp_path / "model.safetensors", header, bytes(data_bytes))
    text = path.read_bytes()[8 : path.stat().st_size - data_bytes]
    with pytest.raises(ManifestError) as caught:
        parse_header(text, first=8 + len(text), file_bytes=path.stat().st_size, where="here/x.safetensors")
    assert "here/x.safetensors" in str(caught.value) and message in str(caught.value)
    assert len(str(caught.value)) < 1000
    error = failure_of(lambda: load({"w": torch.zeros(2)}, tmp_path))
    assert isinstance(error, ManifestError) and str(path) in str(error)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(8), struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 3) + b"{}"]
)
def test_a_file_too_short_for_its_header_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    error = failure_of(lambda: load({"w": torch.zeros(2)}, tmp_path))
    assert isinstance(error, ManifestError) and str(tmp_path / "model.safetensors") in str(error)


def test_a_header_over_the_limit_is_not_read(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)  # sparse
    error = failure_of(lambda: load({"w": torch.zeros(2)}, tmp_path))
    assert isinstance(error, ManifestError) and "100000000" in str(error)


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_truncated_file_is_damage(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-cut] if cut < 4000 else path.read_bytes()[:60])
    out = {"w": torch.zeros(1000)}
    error = failure_of(lambda: load(out, tmp_path))
    assert isinstance(error, ManifestError) and str(path) in str(error)
    assert not out["w"].any()
    with pytest.raises(CorruptionError, match=r"model\.safetensors"):
        verify(tmp_path)


class Truncating(DefaultLoadPlanner):
    """Cuts a file between the plan and the read."""

    path: Path

    def finish_plan(self, central_plan: Any) -> Any:
        self.path.write_bytes(self.path.read_bytes()[:-8])
        return super().finish_plan(central_plan)


def test_a_file_that_shrinks_after_its_header_was_read_is_damage(tmp_path):
    planner = Truncating()
    planner.path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1000)}, planner.path)
    error = failure_of(lambda: load({"w": torch.zeros(1000)}, tmp_path, planner=planner))
    assert isinstance(error, CorruptionError) and "model.safetensors" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../x", "../c/model.safetensors", "a/../x", "..", "", "a\\b", "s3://b/x", "a\0b"),
        *(3, None, ["x"]),
    ],
)
def test_an_index_that_leaves_its_directory_is_refused(tmp_path, name):
    data = json.dumps({"weight_map": {"w": name}}).encode()
    with pytest.raises(ManifestError) as caught:
        parse_index(data, "here/index")
    assert "here/index" in str(caught.value) and "'w'" in str(caught.value)
    (tmp_path / INDEX).write_bytes(data)
    assert isinstance(failure_of(lambda: load({"w": torch.zeros(2)}, tmp_path)), ManifestError)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"w": "a", "w": "b"}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_index_is_refused(data):
    with pytest.raises(ManifestError, match="here"):
        parse_index(data, "here")


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path):
    sharded(tmp_path / "c")
    file_of = json.loads((tmp_path / "c" / INDEX).read_text())["weight_map"]
    write_index(tmp_path / "c", {**file_of, "layer.0.w": file_of["layer.5.w"]})
    error = failure_of(lambda: load({"layer.1.w": torch.zeros(6, 5, dtype=torch.bfloat16)}, tmp_path / "c"))
    assert isinstance(error, ManifestError)
    assert "'layer.0.w'" in str(error) and file_of["layer.5.w"] in str(error)


def test_a_missing_shard_is_named(tmp_path):
    state = sharded(tmp_path / "c")
    (tmp_path / "c" / "model-00002-of-00003.safetensors").unlink()
    error = failure_of(lambda: load(emptied(state), tmp_path / "c"))
    assert isinstance(error, ObjectNotFoundError)
    assert "model-00002-of-00003.safetensors" in str(error) and INDEX in str(error)
    assert isinstance(pickle.loads(pickle.dumps(error)), ObjectNotFoundError)  # it goes to the other ranks
    assert run_verify(tmp_path / "c")[0] == 1  # as a missing object of ours


def test_an_index_that_names_nothing_is_refused(tmp_path):
    state = sharded(tmp_path / "c")
    write_index(tmp_path / "c", {})
    error = failure_of(lambda: load(emptied(state), tmp_path / "c"))
    assert isinstance(error, ManifestError) and f"{INDEX}: the weight_map is empty" in str(error)
    assert run_verify(tmp_path / "c")[0] == 1


def test_files_that_are_not_looked_at_are_named(tmp_path):
    sharded(tmp_path / "c")
    save_file({"w": torch.ones(2)}, tmp_path / "c" / "left-over.safetensors")
    report = verify(tmp_path / "c")
    assert report.is_sound and report.warnings == (
        f"left-over.safetensors was not looked at: {INDEX} does not name it",
    )
    assert run_verify(tmp_path / "c") == (0, f"warning: {report.warnings[0]}\n")
    for name in ("model.safetensors", "consolidated.safetensors"):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    assert "consolidated.safetensors was not looked at" in verify(tmp_path).warnings[0]


def test_a_tensor_in_two_files_needs_an_index(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    error = failure_of(lambda: load({"w": torch.zeros(2)}, tmp_path))
    assert isinstance(error, ManifestError)
    assert all(word in str(error) for word in ("'w'", "a.safetensors", "b.safetensors"))


def run_verify(place):
    """Exit status of the command, and what it says beside its findings."""
    done = CliRunner().invoke(main, ["verify", str(place)])
    return done.exit_code, done.stderr


LOOK = """
import sys
from click.testing import CliRunner
from torch_strata.cli import main
for command in ("inspect", "verify", "ls"):
    done = CliRunner().invoke(main, [command, sys.argv[1]])
    print(done.exit_code, done.output)
print("torch" in sys.modules)
"""


def test_the_command_looks_at_such_a_directory_without_torch(tmp_path):
    state = sharded(tmp_path / "c")
    lines = run_python(LOOK, str(tmp_path / "c")).splitlines()
    assert lines[-1] == "False"
    assert [line for line in lines if line[:2] in ("1 ", "2 ")] == []
    assert "  'layer.0.w': bfloat16 [6, 5], 60 B" in lines
    report = verify(tmp_path / "c")
    assert report.is_sound and report.objects == 3 and report.blocks == 0
    assert report.unverified_bytes == sum(value.nbytes for value in state.values())


def test_single_keys_load_without_a_template(tmp_path):
    state = sharded(tmp_path / "c")
    key = next(iter(state))
    loaded = _load_state_dict_from_keys(key, storage_reader=StrataReader(tmp_path / "c"))
    assert loaded.keys() == {key}
    assert torch.equal(loaded[key], state[key])
