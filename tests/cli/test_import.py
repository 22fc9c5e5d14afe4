"""`strata import`: files of torch.save, stock checkpoints and safetensors; hostile ones are refused."""

import io
import json
import os
import pickle
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.states import load
from tests.cli.commands import assert_same, stock_save, strata, strata_json


def imported(tmp_path, state, name="c"):
    torch.save(state, tmp_path / f"{name}.pt")
    done = strata("import", tmp_path / f"{name}.pt", tmp_path / name)
    assert done.exit_code == 0, done.output
    assert strata("verify", tmp_path / name).exit_code == 0
    assert strata("export", "--to", "torch", tmp_path / name, tmp_path / f"{name}-back.pt").exit_code == 0
    return torch.load(tmp_path / f"{name}-back.pt", weights_only=True)


def test_a_training_state_comes_in_and_goes_out_the_same(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "rng": torch.get_rng_state(), "epoch": 3}
    found = imported(tmp_path, state)
    assert_same({**state, "model": dict(state["model"])}, found)
    into = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}, "epoch": 0}
    load(into, tmp_path / "c")
    assert_same({"model": dict(model.state_dict()), "epoch": 3}, into)


def test_views_come_in_as_what_they_show(tmp_path):
    base = torch.arange(2000.0).reshape(40, 50)
    state = {
        "transposed": base.t(),
        "strided": base[::3, 5:20:2],
        "expanded": torch.ones(3, 1).expand(3, 7),
        "behind": base[7:9],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "bytes": torch.ones(6, dtype=torch.float8_e5m2)[1:4],
        "empty": torch.zeros(0, 5),
        "half": torch.randn(4, 4).to(torch.bfloat16).t(),
    }
    assert_same(state, imported(tmp_path, state))


def test_stock_and_safetensors_come_in(tmp_path):
    state = {"a": torch.randn(9), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    stock_save({"model": state, "step": 3}, tmp_path / "stock")
    assert strata("import", tmp_path / "stock", tmp_path / "from-stock").exit_code == 0
    assert strata("diff", tmp_path / "stock", tmp_path / "from-stock").exit_code == 0
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    for source, name in ((tmp_path / "hf", "x"), (tmp_path / "hf" / "model.safetensors", "y")):
        assert strata("import", source, tmp_path / name).exit_code == 0
        assert strata("diff", source, tmp_path / name).exit_code == 0
        assert strata_json("inspect", tmp_path / name)["written_by"] == "torch_strata"


def test_a_state_of_only_values_and_an_empty_one_come_in(tmp_path):
    assert imported(tmp_path, {"a": 1, "b": "x"}) == {"a": 1, "b": "x"}
    assert imported(tmp_path, {}, "empty") == {}


class Runs:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("place", ["value", "key", "inside"])
def test_a_pickle_that_would_run_code_is_refused_by_name(tmp_path, place):
    bomb = Runs(tmp_path / "ran")
    state = {"value": {"a": bomb}, "key": {"a": {"b": bomb}}, "inside": {"a": [1, (bomb,)]}}[place]
    torch.save(state, tmp_path / "x.pt")
    done = strata("import", tmp_path / "x.pt", tmp_path / "c")
    assert done.exit_code == 2 and "mkdir" in done.stderr and "Traceback" not in done.output
    assert not (tmp_path / "ran").exists() and not (tmp_path / "c").exists()


def archive(tmp_path, data_pkl, **records):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("x/data.pkl", data_pkl)
        for name, data in records.items():
            file.writestr(f"x/{name.replace('__', '/')}", data)
    return tmp_path / "x.pt"


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
HOOKS = b"ccollections\nOrderedDict\n)R"


def tensor(offset=b"K\x00", shape=b"K\x04\x85", strides=b"K\x01\x85", after=b""):
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + offset + shape + strides + b"\x89" + HOOKS + b"tR"
    return b"\x80\x02}X\x01\x00\x00\x00a" + rebuilt + after + b"s."


@pytest.mark.parametrize(
    "data_pkl",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02K\x01.",
        tensor(offset=b"J\xff\xff\xff\xff"),
        tensor(offset=b"K\x01"),
        tensor(shape=b"K\x05\x85"),
        tensor(shape=b"\x8a\x09" + b"\xff" * 8 + b"\x00\x85"),
        tensor(strides=b"J\xff\xff\xff\xff\x85"),
        tensor(strides=b"K\x01K\x01\x86"),
        tensor(after=b"}X\x06\x00\x00\x00offsetJ\x00\xff\xff\xffsb"),
        b"\x80\x02}X\x01\x00\x00\x00actorch\nfloat32\n}X\x06\x00\x00\x00moduleX\x02\x00\x00\x00ossbs.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n)Rs.",
        b"\x80\x02}X\x01\x00\x00\x00acnumpy\nndarray\n)Rs.",
        b"\x80\x02}X\x01\x00\x00\x00acbuiltins\neval\nX\x01\x00\x00\x001\x85Rs.",
    ],
)
def test_a_hostile_pickle_is_an_error_by_name(tmp_path, data_pkl):
    path = archive(tmp_path, data_pkl, data__0=bytes(16))
    done = strata("import", path, tmp_path / "c")
    assert done.exit_code in (1, 2) and "Traceback" not in done.output, done.output
    assert done.stderr.split(":")[0] in ("CorruptionError", "CheckpointError", "ManifestError")
    assert not list((tmp_path / "c").glob("*.distcp"))


def test_a_state_that_shares_itself_without_end_is_refused(tmp_path):
    value = {"x": 1}
    for _ in range(60):
        value = {"a": value, "b": value}
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=2).dump(value)
    path = archive(tmp_path, buffer.getvalue())
    import torch_strata.checkpoint._torch_file as module

    module_limit, module._MOST_LEAVES = module._MOST_LEAVES, 100_000
    try:
        done = strata("import", path, tmp_path / "c")
    finally:
        module._MOST_LEAVES = module_limit
    assert done.exit_code == 1 and "more than" in done.stderr


def test_damaged_archives_are_refused(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "good.pt")
    data = (tmp_path / "good.pt").read_bytes()
    for name, content in {
        "empty": b"",
        "short": data[: len(data) // 2],
        "legacy": pickle.dumps({"w": 1}),
        "text": b"PK\x03\x04 but no archive",
        "no-storage": data.replace(b"data/0", b"data/7"),
    }.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
        done = strata("import", tmp_path / f"{name}.pt", tmp_path / f"c-{name}")
        assert done.exit_code in (1, 2) and "Traceback" not in done.output, (name, done.output)
        assert strata("ls", tmp_path / f"c-{name}").exit_code == 2
    with zipfile.ZipFile(tmp_path / "good.pt") as good:
        records = {name: good.read(name) for name in good.namelist()}
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            packed.writestr(name, content)
    assert "compressed" in strata("import", tmp_path / "packed.pt", tmp_path / "p").stderr


def test_two_values_of_one_key_are_refused(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, tmp_path / "x.pt")
    done = strata("import", tmp_path / "x.pt", tmp_path / "c")
    assert done.exit_code == 2 and "'a.b'" in done.stderr


@pytest.mark.parametrize("cut", [0, 4, 8, 60, 120, -1])
def test_truncated_safetensors_are_refused(tmp_path, cut):
    save_file({"w": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    for source in (tmp_path, tmp_path / "model.safetensors"):
        done = strata("import", source, tmp_path / "c")
        assert done.exit_code == 1 and done.stderr.startswith("ManifestError")


def test_hostile_safetensors_are_refused(tmp_path):
    def write(header):
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))

    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for header in (
        {"w": {**good, "shape": [1 << 62, 1 << 62]}},
        {"w": {**good, "data_offsets": [0, 1 << 62]}},
        {"w": {**good, "dtype": "F31"}},
        {"w": good, "x": good},
    ):
        write(header)
        done = strata("import", tmp_path / "model.safetensors", tmp_path / "c")
        assert done.exit_code == 1 and done.stderr.startswith("ManifestError")
    write({"\x1b[2J": good})
    assert strata("import", tmp_path / "model.safetensors", tmp_path / "c").exit_code == 0


def test_nothing_there_is_said(tmp_path):
    for source in ("nowhere", "nowhere.pt", "nowhere.safetensors"):
        done = strata("import", tmp_path / source, tmp_path / "c")
        assert done.exit_code == 2 and "NotFound" in done.stderr


def test_what_is_no_checkpoint_and_no_file_is_said_to_be_neither(tmp_path):
    done = strata("import", tmp_path / "missing.pt", tmp_path / "c")
    assert done.exit_code == 2 and "CheckpointNotFoundError" in done.stderr and "no file of that name" in done.stderr
    torch.save(torch.ones(3), tmp_path / "bare.pt")
    done = strata("import", tmp_path / "bare.pt", tmp_path / "c")
    assert done.exit_code == 2 and "holds a tensor, not a state_dict" in done.stderr
