"""`strata export`: what others read is what was saved."""

import json
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.states import load, save
from tests.cli.commands import assert_same, damage_frozen, make_run, state_at, stock_save, strata, strata_json
from tests.support import run_python
from torch_strata import StorageConfig, _native
from torch_strata._store import open_store
from torch_strata.checkpoint._entries import pack_entries
from torch_strata.checkpoint._stream import ObjectStream

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
MODEL = {f"t{n}": torch.arange(12).reshape(3, 4).to(dtype) for n, dtype in enumerate(DTYPES)} | {
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.5),
    "transposed": torch.randn(5, 3).t(),
    "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}
STATE = {
    "model": MODEL,
    "optim": {"state": {"0": {"step": torch.tensor(3.0), "m": torch.randn(4)}}, "groups": [{"lr": 0.1, "ids": [0, 1]}]},
    "values": {
        "text": "é\ud800",
        "bytes": b"\x00\xff",
        "array": bytearray(b"ab"),
        "set": {1, 2},
        "complex": 1 + 2j,
        "tuple": (1, (2.5, None), True),
        "large": -(2**90),
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "pair": (torch.ones(3), torch.ones(2, dtype=torch.float8_e5m2)),
    },
    "list": [torch.ones(2), {"a": torch.zeros(1)}],
    "step": 7,
}


@pytest.mark.parametrize("write", [save, stock_save])
def test_torch_loads_the_state_as_it_was_saved(tmp_path, write):
    write(STATE, tmp_path / "c")
    done = strata("export", "--to", "torch", tmp_path / "c", tmp_path / "out.pt")
    assert done.exit_code == 0, done.output
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    pair, expected = found["values"].pop("pair"), STATE["values"]["pair"]
    assert_same(list(expected), list(pair))
    assert_same({**STATE, "values": {k: v for k, v in STATE["values"].items() if k != "pair"}}, found)
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert_same(MODEL, mapped["model"])


def test_tied_tensors_stay_tied(tmp_path):
    big = torch.randn(10_000)
    save({"a": big, "b": big, "c": big.clone()}, tmp_path / "c")
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "out.pt").exit_code == 0
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()


def test_a_key_is_exported_as_if_it_were_all(tmp_path):
    save(STATE, tmp_path / "c")
    assert strata("export", "--to", "torch", "--key", "optim.state", tmp_path / "c", tmp_path / "o.pt").exit_code == 0
    assert_same(STATE["optim"]["state"], torch.load(tmp_path / "o.pt", weights_only=True))
    done = strata("export", "--to", "torch", "--key", "nothing", tmp_path / "c", tmp_path / "n.pt")
    assert done.exit_code == 2 and "CheckpointError" in done.stderr and not (tmp_path / "n.pt").exists()


@pytest.mark.parametrize("write", [save, stock_save])
def test_a_list_is_exported_with_the_empty_dicts_in_it(tmp_path, write):
    """DCP stores nothing of these, by which their places could be told from those that are not there."""
    state = {"groups": [torch.ones(2), {}, {"lr": 0.1}]}
    write(state, tmp_path / "c")
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "all.pt").exit_code == 0
    assert_same(state, torch.load(tmp_path / "all.pt", weights_only=True))
    assert strata("export", "--to", "torch", "--key", "groups", tmp_path / "c", tmp_path / "list.pt").exit_code == 0
    assert_same(state["groups"], torch.load(tmp_path / "list.pt", weights_only=True))


def test_a_state_in_many_batches_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_strata.checkpoint.export._BATCH_BYTES", 100)
    state = {f"w{n}": torch.randn(7, 9) for n in range(20)}
    save(state, tmp_path / "c")
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "o.pt").exit_code == 0
    assert_same(state, torch.load(tmp_path / "o.pt", weights_only=True))
    assert strata("export", "--to", "safetensors", tmp_path / "c", tmp_path / "hf").exit_code == 0
    assert_same(state, load_file(tmp_path / "hf" / "model.safetensors") | {})


def test_sharded_tensors_come_out_whole(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    done = strata("export", "--to", "safetensors", "--key", "model", tmp_path / "run" / "step-2", tmp_path / "hf")
    assert done.exit_code == 0
    assert_same(state_at(2)["model"], load_file(tmp_path / "hf" / "model.safetensors"))


def test_a_grid_of_chunks_comes_out_as_the_tensor(tmp_path, monkeypatch):
    """As a mesh of two axes saves it, each rank its own block."""
    monkeypatch.setattr("torch_strata.checkpoint.export._BATCH_BYTES", 100)
    whole = torch.arange(7 * 11 * 2, dtype=torch.float32).reshape(7, 11, 2)
    store = open_store(tmp_path / "c", StorageConfig())
    items, templates, boxes = [], [], []
    for rows in ((0, 3), (3, 7)):
        for columns in ((0, 5), (5, 6), (6, 11)):
            block = whole[slice(*rows), slice(*columns)].contiguous()
            first = (rows[0], columns[0], 0)
            templates.append((first, _native.TENSOR, -1, block.nbytes, "float32", tuple(block.shape), block.stride()))
            items.append((b"w", len(items), len(items), block.data_ptr(), block))
            boxes.append((first, tuple(block.shape)))
    base = _native.open_base(store, rank=None)
    save_id = "0" * 32
    transfer = _native.Transfer()
    written = _native.write_items(store, items, templates, rank=0, save_id=save_id, parent=None, transfer=transfer)
    chunks = [list(parts) for parts in zip(*boxes, strict=True)]
    entry = (b"w", True, "float32", (7, 11, 2), None, False, False, 0, "strided", *chunks)
    names = {"save_id": save_id, "previous_save_id": "", "planner_data": b"", "stock": None}
    rest = {"rank": None, "world_size": 1, "generation": 0, "run_root": None, "run": None}
    _native.commit(store, base, [written], pack_entries([entry]), **names, **rest)
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "o.pt").exit_code == 0
    assert_same({"w": whole}, torch.load(tmp_path / "o.pt", weights_only=True))
    assert strata("diff", tmp_path / "c", tmp_path / "o.pt").exit_code == 0
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0
    assert strata_json("diff", tmp_path / "c", tmp_path / "d")["num_by_digest"] == 1


def test_safetensors_hold_every_dtype_that_they_know(tmp_path):
    save(STATE, tmp_path / "c")
    report = strata_json("export", "--to", "safetensors", "--key", "model", tmp_path / "c", tmp_path / "hf")
    assert report["files"] == ["model.safetensors"] and not report["left_out"]
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = [f"t{n}" for n, dtype in enumerate(DTYPES) if "fnuz" not in str(dtype)]
        for name in (*names, "empty", "scalar", "transposed", "last"):
            assert_same(MODEL[name], file.get_tensor(name), name)
    assert strata("diff", tmp_path / "hf", tmp_path / "hf").exit_code == 0


def test_shards_and_their_index_are_as_hugging_face_lays_them_out(tmp_path):
    state = {f"layer.{n}": torch.randn(1000) for n in range(10)}
    save({"model": state, "step": 1}, tmp_path / "c")
    arguments = ("--to", "safetensors", "--key", "model", "--max-shard-size", "12kB")
    assert strata("export", *arguments, tmp_path / "c", tmp_path / "hf").exit_code == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 40_000} and list(index["weight_map"]) == list(state)
    names = [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert sorted(set(index["weight_map"].values())) == names
    found = {}
    for name in names:
        found |= load_file(tmp_path / "hf" / name)
    assert_same(state, dict(sorted(found.items())))
    ours = {key: torch.zeros_like(value) for key, value in state.items()}
    load(ours, tmp_path / "hf")
    assert_same(state, ours)


def test_what_safetensors_cannot_hold_is_said(tmp_path):
    save({"w": torch.ones(1), "step": 7}, tmp_path / "c")
    done = strata("export", "--to", "safetensors", tmp_path / "c", tmp_path / "hf")
    assert done.exit_code == 0 and "left out" in done.stderr and "'step'" in done.stderr
    save({"w": torch.ones(1, dtype=torch.complex128)}, tmp_path / "d")
    done = strata("export", "--to", "safetensors", tmp_path / "d", tmp_path / "hf2")
    assert done.exit_code == 2 and "complex128" in done.stderr and not list((tmp_path / "hf2").glob("*"))


def test_a_value_that_weights_only_refuses_is_refused_by_name(tmp_path):
    class Odd:
        pass

    globals()["Odd"] = Odd
    Odd.__qualname__ = "Odd"
    save({"w": torch.ones(1), "odd": Odd()}, tmp_path / "c")
    done = strata("export", "--to", "torch", tmp_path / "c", tmp_path / "o.pt")
    assert done.exit_code == 2 and "'odd'" in done.stderr and "Odd" in done.stderr
    assert not (tmp_path / "o.pt").exists()


def test_dcp_export_stands_alone(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    assert strata("export", "--to", "dcp", tmp_path / "run" / "step-2", tmp_path / "d").exit_code == 0
    found = state_at(0)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "d"), no_dist=True)
    assert_same(state_at(2), found)
    assert strata("export", "--to", "dcp", "--key", "x", tmp_path / "d", tmp_path / "e").exit_code == 2


def test_nothing_is_overwritten(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "c")
    for form, place in (("torch", "o.pt"), ("safetensors", "hf"), ("dcp", "d")):
        assert strata("export", "--to", form, tmp_path / "c", tmp_path / place).exit_code == 0
        done = strata("export", "--to", form, tmp_path / "c", tmp_path / place)
        assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_damage_leaves_nothing(tmp_path, form):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    damage_frozen(tmp_path / "run" / "step-1")
    (tmp_path / "out").mkdir()
    done = strata("export", "--to", form, tmp_path / "run" / "step-1", tmp_path / "out" / "x")
    assert done.exit_code == 1 and "ChecksumError" in done.stderr
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


KILLED = """
import os, sys
from torch_strata import _native
from torch_strata.checkpoint import export, _stream, copying
from torch_strata.cli import main
left = int(sys.argv[1])
def counted(call):
    def counting(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*args, **kwargs)
    return counting
copying.BATCH_BYTES, export._BATCH_BYTES = 4 << 20, 1 << 20
os.environ["STRATA_PART_BYTES"] = str(5 << 20)
class Store:
    def __init__(self, native): self.native = native
    def create(self, *args): return Upload(self.native.create(*args))
    def put(self, *args): return counted(self.native.put)(*args)
    def __getattr__(self, name): return getattr(self.native, name)
class Upload(Store):
    def write_part(self, *args): return counted(self.native.write_part)(*args)
    def finish(self): return counted(self.native.finish)()
open_store = export.open_store
if "dcp" not in sys.argv:
    export.open_store = lambda *args: Store(open_store(*args))
    export._check_free = lambda store, place: None
_native.write_items = counted(_native.write_items)
_native.commit = counted(_native.commit)
sys.argv = ["strata", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_a_kill_after_any_write_leaves_nothing_that_opens_or_all(tmp_path, form):
    state = {f"w{n}": torch.randn(1 << 20) for n in range(3)}
    save(state, tmp_path / "c")
    for left in range(12):
        out = tmp_path / f"out-{left}"
        place = out / "x.pt" if form == "torch" else out
        out.mkdir()
        arguments = ["export", "--to", form, "--max-shard-size", "4MB", str(tmp_path / "c"), str(place)]
        if form != "safetensors":
            arguments[3:5] = []
        try:
            run_python(KILLED, str(left), *arguments)
        except AssertionError as error:
            assert "exit status 9" in str(error), error
            # All, if only the last word on it was missing.
            status = strata("diff", tmp_path / "c", place).exit_code
            assert status in (0, 2)
            if form == "torch":
                assert place.exists() == (status == 0)
            elif form == "safetensors":
                for shard in out.glob("*.safetensors"):
                    assert all(torch.equal(value, state[name]) for name, value in load_file(shard).items())
        else:
            assert left >= 3 and strata("diff", tmp_path / "c", place).exit_code == 0
            return
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_file_that_comes_to_be_there_meanwhile_is_not_replaced(tmp_path, form, monkeypatch):
    save({"w": torch.randn(100)}, tmp_path / "c")
    place = tmp_path / "x.pt" if form == "torch" else tmp_path / "out" / "model.safetensors"
    publish = ObjectStream._publish

    def late(stream, folder):
        place.write_bytes(b"of somebody else")
        publish(stream, folder)

    monkeypatch.setattr(ObjectStream, "_publish", late)
    done = strata("export", "--to", form, tmp_path / "c", place if form == "torch" else place.parent)
    assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr
    assert place.read_bytes() == b"of somebody else" and not list(tmp_path.rglob("*.partial"))


def test_an_export_goes_to_a_file_system_without_links_too(tmp_path, monkeypatch):
    save({"w": torch.randn(100)}, tmp_path / "c")

    def no_links(*args):
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", no_links)
    assert strata("export", "--to", "torch", tmp_path / "c", tmp_path / "x.pt").exit_code == 0
    assert strata("diff", tmp_path / "c", tmp_path / "x.pt").exit_code == 0
    assert not list(tmp_path.rglob("*.partial"))
