"""`strata copy`: what arrives is what was there, alone or with its run, or nothing is."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoint.states import load, save
from tests.cli.commands import assert_same, damage_frozen, make_run, state_at, stock_save, strata, strata_json
from torch_strata import StorageConfig, _native
from torch_strata._store import open_store
from torch_strata.checkpoint.run import open_run

STATE = {
    "w": torch.randn(40, 30).t(),
    "tied": None,
    "half": torch.randn(9).to(torch.bfloat16),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5),
    "opt": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "list": [torch.ones(2), torch.zeros(1)]},
}
STATE["tied"] = STATE["half"]


def test_a_copy_is_read_by_stock_torch(tmp_path):
    for name, write in (("ours", save), ("stock", stock_save)):
        write(STATE, tmp_path / name)
        done = strata("copy", tmp_path / name, tmp_path / f"{name}-copy")
        assert done.exit_code == 0, done.output
        dcp_to_torch_save(tmp_path / f"{name}-copy", tmp_path / "x.pt")
        assert_same(STATE, torch.load(tmp_path / "x.pt", weights_only=False))
        assert strata("verify", tmp_path / f"{name}-copy").exit_code == 0
        assert strata("diff", tmp_path / name, tmp_path / f"{name}-copy").exit_code == 0


def test_names_of_one_memory_are_written_once(tmp_path):
    big = torch.randn(100_000)
    save({"a": big, "m": torch.randn(5), "z": big}, tmp_path / "c")
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0
    assert strata_json("inspect", tmp_path / "d")["bytes"] < 500_000


def test_a_chunk_larger_than_a_batch_arrives_in_parts(tmp_path, monkeypatch):
    save({"w": torch.randn(70, 33), "row": torch.randn(1, 3000), "odd": torch.randn(3, 7, 11)}, tmp_path / "c")
    monkeypatch.setattr("torch_strata.checkpoint.copying.BATCH_BYTES", 1000)
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0
    chunks = {key["fqn"]: key["chunks"] for key in strata_json("inspect", tmp_path / "d")["keys"]}
    assert chunks["w"] == 10 and chunks["row"] == 12
    assert strata("diff", tmp_path / "c", tmp_path / "d").exit_code == 0
    found = {"w": torch.zeros(70, 33), "row": torch.zeros(1, 3000), "odd": torch.zeros(3, 7, 11)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "d"), no_dist=True)
    expected = {key: torch.zeros_like(value) for key, value in found.items()}
    load(expected, tmp_path / "c")
    assert_same(expected, found)


def test_an_incremental_checkpoint_stands_alone_where_it_is_copied(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=3)
    assert strata("copy", tmp_path / "run" / "step-3", tmp_path / "alone").exit_code == 0
    shown = strata_json("inspect", tmp_path / "alone")
    assert (shown["step"], shown["type"], shown["refers_to"]) == (3, "full", [])
    assert shown["metrics"] == {"loss": 1 / 3}
    found = state_at(0)
    load(found, tmp_path / "alone")
    assert_same(state_at(3), found)


def test_a_run_keeps_its_references_and_goes_on_where_it_ended(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=4)
    first = strata_json("copy", tmp_path / "run", tmp_path / "copy")
    assert first["copied"] == ["step-1", "step-2", "step-3", "step-4"] and first["referred_bytes"] == 3 * 240_000
    shown = {one["folder"]: one for one in strata_json("ls", tmp_path / "copy")["checkpoints"]}
    assert all(shown[f"step-{n}"]["refers_to"] == ["step-1"] for n in (2, 3, 4))
    assert shown["step-4"]["metrics"] == {"loss": 0.25}
    for path in (tmp_path / "copy" / "step-3" / ".strata").iterdir():
        path.unlink()
    (tmp_path / "copy" / "step-3" / ".metadata").unlink()
    again = strata_json("copy", tmp_path / "run", tmp_path / "copy")
    assert again["copied"] == ["step-3"] and again["found"] == ["step-1", "step-2", "step-4"]
    assert strata("verify", tmp_path / "copy").exit_code == 0


def test_another_run_at_the_destination_is_not_overwritten(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=2)
    save({"other": torch.ones(1)}, tmp_path / "copy" / "step-2")
    done = strata("copy", tmp_path / "run", tmp_path / "copy")
    assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr and "step-2" in done.stderr
    _native.claim_generation(open_store(tmp_path / "copy", StorageConfig()), owner="a run")
    assert strata("diff", tmp_path / "copy" / "step-1", tmp_path / "run" / "step-1").exit_code == 0


def test_damage_at_the_source_commits_nothing(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    damage_frozen(tmp_path / "run" / "step-1")
    done = strata("copy", tmp_path / "run" / "step-1", tmp_path / "copy")
    assert done.exit_code == 1 and "ChecksumError" in done.stderr
    assert strata("ls", tmp_path / "copy").exit_code == 2
    assert not list((tmp_path / "copy").glob("*.distcp"))


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "a")
    save({"w": torch.zeros(3)}, tmp_path / "b")
    done = strata("copy", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 2 and "CheckpointExistsError" in done.stderr
    assert strata("diff", tmp_path / "a", tmp_path / "b").exit_code == 1
    assert strata("copy", tmp_path / "a", tmp_path / "b", "--overwrite").exit_code == 0
    assert strata("diff", tmp_path / "a", tmp_path / "b").exit_code == 0


@pytest.mark.parametrize("ends_at", [1, 2, 3])
def test_a_copy_that_ends_early_leaves_nothing_that_opens(tmp_path, monkeypatch, ends_at):
    save({f"w{n}": torch.randn(300) for n in range(4)}, tmp_path / "c")
    monkeypatch.setattr("torch_strata.checkpoint.copying.BATCH_BYTES", 1200)
    left = iter(range(ends_at))
    write = _native.write_items

    def ends(*args, **kwargs):
        next(left)  # StopIteration stands for whatever ends a process
        return write(*args, **kwargs)

    monkeypatch.setattr(_native, "write_items", ends)
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 2
    monkeypatch.undo()
    assert strata("ls", tmp_path / "d").exit_code == 2 and not list((tmp_path / "d").glob("*.distcp"))
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0


def test_a_copy_of_nothing_and_to_a_read_only_place_fails_by_name(tmp_path):
    assert strata("copy", tmp_path / "nowhere", tmp_path / "d").exit_code == 2
    save({"w": torch.ones(3)}, tmp_path / "c")
    done = strata("copy", tmp_path / "c", "http://127.0.0.1:9/x", "--option", "allow_http=true")
    assert done.exit_code == 2 and "Traceback" not in done.output and "Error" in done.stderr


def test_what_nobody_may_resume_from_is_passed_over(tmp_path):
    make_run(str(tmp_path / "run"), tmp_path, steps=4)
    native = open_run(str(tmp_path / "run"), StorageConfig())
    native.quarantine("step-2", strata_json("inspect", tmp_path / "run" / "step-2")["save_id"], "a test")
    native.rollback(3)
    (tmp_path / "run" / "step-9").mkdir()
    (tmp_path / "run" / "step-9" / "__0_0.0123.distcp").write_bytes(b"half")
    done = strata_json("copy", tmp_path / "run", tmp_path / "copy")
    assert done["copied"] == ["step-1", "step-3"] and set(done["passed_over"]) == {"step-2", "step-4", "step-9"}


def test_a_copy_that_came_out_damaged_is_found(tmp_path, monkeypatch):
    make_run(str(tmp_path / "run"), tmp_path, steps=1)
    commit = _native.commit

    def then_damage(*args, **kwargs):
        done = commit(*args, **kwargs)
        damage_frozen(tmp_path / "copy")
        return done

    monkeypatch.setattr(_native, "commit", then_damage)
    done = strata("copy", tmp_path / "run" / "step-1", tmp_path / "copy")
    assert done.exit_code == 1 and "the copy at" in done.stderr


def test_many_values_are_copied_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_strata.checkpoint._content._VALUE_BYTES", 3000)
    save({f"v{n}": list(range(n)) for n in range(50)} | {"w": torch.ones(2)}, tmp_path / "c")
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0
    assert strata("diff", tmp_path / "c", tmp_path / "d").exit_code == 0


def test_a_tensor_that_only_torch_can_read_is_copied_as_it_is(tmp_path):
    quantized = torch.quantize_per_tensor(torch.arange(8.0), 0.5, 0, torch.quint8)
    save({"q": quantized, "w": torch.ones(2)}, tmp_path / "c")
    assert strata("copy", tmp_path / "c", tmp_path / "d").exit_code == 0
    found = {"q": torch.quantize_per_tensor(torch.zeros(8), 0.5, 0, torch.quint8), "w": torch.zeros(2)}
    load(found, tmp_path / "d")
    assert torch.equal(found["q"].int_repr(), quantized.int_repr()) and found["w"].sum() == 2
    assert strata("diff", tmp_path / "c", tmp_path / "d").exit_code == 0
    assert strata("inspect", tmp_path / "d").exit_code == 0
    for form in ("torch", "safetensors"):
        done = strata("export", "--to", form, tmp_path / "c", tmp_path / f"x-{form}")
        assert done.exit_code == 2 and "'q'" in done.stderr and "Traceback" not in done.output
