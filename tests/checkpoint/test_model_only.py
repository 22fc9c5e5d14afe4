"""Checkpoints of type ModelOnly: what Hugging Face's loaders read is what was saved, and ours read the same."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import DTYPES, SHAPES, assert_same, flip, random_bits
from torch_strata import StorageConfig, StrataReader, _native, verify
from torch_strata._store import open_store
from torch_strata.checkpoint._content import content_of
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint.copy_run import copy_run
from torch_strata.checkpoint.copying import copy_checkpoint
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.errors import CheckpointError, CheckpointNotFoundError, StorageError

INDEX = "model.safetensors.index.json"
WAIT = timedelta(seconds=60)
# Those that torch.load and safetensors 0.8 both know.
UNKNOWN = {"complex128", "complex32", "bcomplex32", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
KNOWN = [name for name in DTYPES if name not in UNKNOWN]
# Parts end within tensors, and the first one at no multiple of anything.
SMALL_PARTS = StorageConfig(part_bytes=5 << 20)


def manager_at(root: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(root, no_dist=True, **settings)


def save(root: Path, model: dict[str, Any], step: int = 1, **settings: Any) -> Path:
    """Save `model` among other state; the folder of it."""
    state = {"model": model, "optimizer": {"exp_avg": torch.ones(3)}, "step": step}
    handle = manager_at(root).save(state, step=step, checkpoint_type="model_only", **settings)
    handle.result(WAIT)
    return Path(handle.path)


def served(place: Path) -> dict[str, torch.Tensor]:
    """What a loader finds that follows the index, which names all files and all that is in them."""
    index = json.loads((place / INDEX).read_text())
    assert set(index["weight_map"].values()) == {path.name for path in place.glob("*.safetensors")}
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        inside = load_file(place / name)
        assert set(inside) == {key for key, file in index["weight_map"].items() if file == name}
        with safe_open(place / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        found |= inside
    assert index["metadata"] == {"format": "pt", "total_size": sum(tensor.nbytes for tensor in found.values())}
    return found


def every_dtype() -> dict[str, torch.Tensor]:
    state = {}
    for name in KNOWN:
        shapes = SHAPES if name != "float4_e2m1fn_x2" else [shape for shape in SHAPES if shape]
        for number, shape in enumerate(shapes):
            state[f"{name}.{number}"] = random_bits(getattr(torch, name), shape, seed=number)
    return state


def a_model(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.full((300, 1000), fill),
        "norm": torch.full((1000,), fill, dtype=torch.bfloat16),
        "done": torch.tensor(True),
    }


def head_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def only_file(place: Path) -> Path:
    (path,) = place.glob("*.safetensors")
    return path


def test_files_and_index_hold_the_model_in_every_dtype(tmp_path: Path) -> None:
    expected = every_dtype()
    place = save(tmp_path / "run", expected)
    assert place.name == "step-1-model"
    assert_same(served(place), expected)
    assert not list(place.glob("*.distcp")) and not (place / ".metadata").exists()


def test_our_reader_and_the_manager_load_the_same(tmp_path: Path) -> None:
    expected = every_dtype()
    place = save(tmp_path / "run", expected)
    manager = manager_at(tmp_path / "run")
    assert_same(manager.load(1)["model"], expected)
    into = {"model": {name: torch.empty_like(tensor) for name, tensor in expected.items()}}
    dcp.load(into, storage_reader=StrataReader(place), no_dist=True)
    assert_same(into["model"], expected)
    (found,) = manager.all()
    assert found.checkpoint_type is CheckpointType.MODEL_ONLY and found.model_hash is not None
    assert found.size_bytes == sum(path.stat().st_size for path in place.glob("*.safetensors"))
    report = verify(place)
    assert report.is_sound and not report.warnings
    assert report.read_bytes == found.size_bytes and not report.unverified_bytes


def test_every_flip_in_a_head_in_a_payload_and_in_the_index_is_found(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model())
    path = only_file(place)
    first, size = head_bytes(path), path.stat().st_size
    positions = [*range(8), *range(8, first, 37), first - 1, first, (first + size) // 2, size - 1]
    for number, at in enumerate(positions):
        flip(path, at, bit=number % 8)
        assert verify(place).problems, f"bit {number % 8} of byte {at}"
        flip(path, at, bit=number % 8)
    for at in range(0, (place / INDEX).stat().st_size, 11):
        flip(place / INDEX, at)
        assert verify(place).problems, f"byte {at} of the index"
        flip(place / INDEX, at)
    assert verify(place).is_sound


@pytest.mark.parametrize("change", [-1, 1, -1_000_000])
def test_a_file_that_is_shorter_or_longer_is_found(tmp_path: Path, change: int) -> None:
    place = save(tmp_path / "run", a_model())
    path = only_file(place)
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    assert verify(place).problems


def test_a_damaged_payload_does_not_load(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model())
    flip(only_file(place), only_file(place).stat().st_size - 5000)
    with pytest.raises(BaseException, match="checksum mismatch"):
        manager_at(tmp_path / "run").load(1)


def test_tensors_are_row_major_in_the_file_whatever_they_were(tmp_path: Path) -> None:
    base = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    model = {
        "channels": base.to(memory_format=torch.channels_last),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "gaps": torch.arange(10.0)[::3],
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    place = save(tmp_path / "run", model)
    assert_same(served(place), {name: tensor.resolve_conj() for name, tensor in model.items()})
    opened = open_checkpoint(open_store(place, StorageConfig()), place, rank=None)
    for name, tensor in content_of(opened).tensors.items():
        assert tensor.pieces[0].strides == tuple(torch.empty(tensor.shape).stride()), name
    assert_same(manager_at(tmp_path / "run").load(1)["model"], served(place))


def test_what_is_no_tensor_stays_with_it_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"scale": 3, "name": "x"}
    model = {"weight": torch.ones(3), "_extra_state": extra, "steps": 7}
    with caplog.at_level(logging.INFO):
        place = save(tmp_path / "run", model)
    assert "no tensors, and not in safetensors: model._extra_state.scale, model._extra_state.name, model.steps" in (
        caplog.text
    )
    assert_same(served(place), {"weight": torch.ones(3)})
    loaded = manager_at(tmp_path / "run").load(1)["model"]
    assert loaded["_extra_state"] == extra and loaded["steps"] == 7
    assert verify(place).is_sound


def test_a_model_without_a_tensor_is_saved_without_an_index(tmp_path: Path) -> None:
    place = save(tmp_path / "run", {"n": 3})
    assert not (place / INDEX).exists()
    assert manager_at(tmp_path / "run").load(1) == {"model": {"n": 3}}


def test_both_names_of_tied_weights_are_there_for_loaders_that_know_no_ties(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    place = save(tmp_path / "run", {"embed": weight, "head": weight})
    assert_same(served(place), {"embed": weight, "head": weight})
    assert_same(manager_at(tmp_path / "run").load(1)["model"], {"embed": weight, "head": weight})
    assert verify(place).is_sound


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), "the dtype complex128"),
    "complex32": (lambda: torch.ones(2, dtype=torch.complex32), "the dtype complex32"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a tensor subclass|qint8"),
    "subclass": (lambda: torch.ones(2).as_subclass(Subclass), "a tensor subclass"),
    "pair": (lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "4-bit numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(CheckpointError, match=rf"'model\.odd'.*({words})"):
        save(tmp_path / "run", {"fine": torch.ones(3), "odd": make()})
    assert not [path for path in (tmp_path / "run").glob("step-*/**/*") if path.is_file()]


def test_an_overwrite_replaces_files_and_index(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model(1.0))
    before = only_file(place)
    save(tmp_path / "run", a_model(2.0), overwrite=True)
    assert only_file(place) != before
    assert_same(served(place), a_model(2.0))
    assert verify(place).is_sound


def test_bytes_over_a_model_leave_no_index_behind(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model())
    manager_at(tmp_path / "run").save(b"x", step=1, checkpoint_type="model_only", overwrite=True).result(WAIT)
    assert not (place / INDEX).exists() and not list(place.glob("*.safetensors"))
    assert manager_at(tmp_path / "run").load(1) == b"x"


def test_an_index_that_a_killed_save_left_behind_is_told_and_mended(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model(1.0))
    old, kept = (place / INDEX).read_bytes(), only_file(place)
    content = kept.read_bytes()
    save(tmp_path / "run", a_model(2.0), overwrite=True)
    (place / INDEX).write_bytes(old)
    kept.write_bytes(content)
    report = verify(place)
    assert report.is_sound and "is that of the save before" in report.warnings[0]
    (place / INDEX).unlink()
    report = verify(place)
    assert report.is_sound and "is not there" in report.warnings[0]
    save(tmp_path / "run", a_model(3.0), overwrite=True)
    assert_same(served(place), a_model(3.0))


def test_retention_removes_all_of_a_model_and_only_that(tmp_path: Path) -> None:
    manager = manager_at(tmp_path / "run", keep_count=1)
    for step in (1, 2):
        state = {"model": a_model(step), "step": step}
        manager.save(state, step=step).result(WAIT)
        manager.save(state, step=step, checkpoint_type="model_only").result(WAIT)
        if step == 1:
            (tmp_path / "run/step-1-model/notes.txt").write_text("a person's")
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-1-model", "step-2", "step-2-model"]
    assert [path.name for path in (tmp_path / "run/step-1-model").rglob("*") if path.is_file()] == ["notes.txt"]
    assert_same(served(tmp_path / "run/step-2-model"), a_model(2))


def test_files_that_were_not_committed_are_no_checkpoint_and_go_when_they_are_old(tmp_path: Path) -> None:
    place = save(tmp_path / "run", a_model())
    for path in [*(place / ".strata").iterdir(), place / INDEX]:
        path.unlink()
    with pytest.raises(CheckpointNotFoundError):
        manager_at(tmp_path / "run").load(1)
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(open_store(place, StorageConfig()), place, rank=None)
    (listed,) = manager_at(tmp_path / "run").listed()
    assert listed.state == "uncommitted"
    run = _native.Run(open_store(tmp_path / "run", StorageConfig()), owner="me", policy=("all",), orphan_age_s=0.0)
    run.retain()
    assert not place.exists()


def test_a_copy_is_as_servable(tmp_path: Path) -> None:
    model = {**a_model(), "n": 3}
    place = save(tmp_path / "run", model)
    tensors = {name: value for name, value in model.items() if name != "n"}
    copy_checkpoint(place, tmp_path / "copy")
    copy_run(str(tmp_path / "run"), str(tmp_path / "other"))
    for copied in (tmp_path / "copy", tmp_path / "other/step-1-model"):
        assert_same(served(copied), tensors)
        assert verify(copied).is_sound and not verify(copied).warnings
    assert manager_at(tmp_path / "other").load(1)["model"]["n"] == 3
    assert [found.model_hash for found in manager_at(tmp_path / "other").all()] == [
        found.model_hash for found in manager_at(tmp_path / "run").all()
    ]


def test_the_files_alone_are_a_model_of_others(tmp_path: Path) -> None:
    place = save(tmp_path / "run", {"model.layer": torch.arange(3.0)})
    (tmp_path / "plain").mkdir()
    for path in [*place.glob("*.safetensors"), place / INDEX]:
        (tmp_path / "plain" / path.name).write_bytes(path.read_bytes())
    into = {"model.layer": torch.zeros(3)}
    dcp.load(into, storage_reader=StrataReader(tmp_path / "plain"), no_dist=True)
    assert_same(into, {"model.layer": torch.arange(3.0)})
    assert verify(tmp_path / "plain").is_sound


def whole_of(rank: int) -> dict[str, torch.Tensor]:
    """What ranks shard; the same on all of them."""
    return {
        "rows": torch.arange(18_000_000.0).reshape(4500, 4000),
        "columns": torch.arange(1_000_003.0).reshape(1, -1).repeat(3, 1),
        "small": torch.arange(5, dtype=torch.bfloat16),
        "copied": torch.arange(7, dtype=torch.int8),
    }


def shards(kinds: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [kinds[name]]) for name, tensor in whole_of(0).items()}


KINDS = {"rows": Shard(0), "columns": Shard(1), "small": Shard(0), "copied": Replicate()}


def save_sharded(rank: int, root: Path, kinds: dict[str, Any], **settings: Any) -> str | None:
    manager = CheckpointManager(root, config=SMALL_PARTS)
    model = {**shards(kinds), "steps": 3}
    handle = manager.save({"model": model}, step=1, checkpoint_type="model_only", **settings)
    failure = handle.exception(WAIT)
    return None if failure is None else f"{type(failure).__name__}: {failure} {getattr(failure, '__notes__', '')}"


def assert_is_served(root: Path) -> None:
    place = root / "step-1-model"
    assert_same(served(place), whole_of(0))
    assert not list(place.glob("__*.distcp")) or len(list(place.glob("__*.distcp"))) == 1, "one, of the value"
    loaded = manager_at(root).load(1)["model"]
    assert loaded.pop("steps") == 3
    assert_same(loaded, whole_of(0))
    report = verify(place)
    assert report.is_sound and not report.warnings
    named = {
        name
        for name, _ in content_of(open_checkpoint(open_store(place, SMALL_PARTS), place, rank=None)).native.objects()
    }
    assert {path.name for path in place.iterdir() if path.is_file()} == named | {INDEX}


def test_shards_of_two_ranks_are_made_whole(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, save_sharded, tmp_path / "run", KINDS) == [None, None]
    assert_is_served(tmp_path / "run")
    assert len(list((tmp_path / "run/step-1-model/.strata").glob("0*"))) == 1


def load_sharded(rank: int, root: Path) -> bool:
    state = {"model": {name: torch.zeros_like(value) for name, value in shards(KINDS).items()}}
    CheckpointManager(root).load(1, state)
    return all(torch.equal(state["model"][name].full_tensor(), whole) for name, whole in whole_of(0).items())


def test_replicas_write_each_tensor_once_and_whole(tmp_path: Path) -> None:
    replicas = dict.fromkeys(KINDS, Replicate())
    assert run_ranks(tmp_path, 2, save_sharded, tmp_path / "run", replicas) == [None, None]
    assert_is_served(tmp_path / "run")
    assert len(list((tmp_path / "run/step-1-model").glob("*.safetensors"))) == 2, "each rank wrote a part"
    assert run_ranks(tmp_path, 2, load_sharded, tmp_path / "run") == [True, True]


def save_broken(rank: int, root: Path, where: str) -> str | None:
    """As `save_sharded`; ends as a kill at `where` would, with all that was written until then."""
    commits = []
    commit, rewrite = _native.commit, _native.rewrite_safetensors

    def second_commit_fails(*args: Any, **kwargs: Any) -> Any:
        commits.append(args)
        if len(commits) == 2:
            raise StorageError("cut off")
        return commit(*args, **kwargs)

    def rewrite_fails(*args: Any, **kwargs: Any) -> Any:
        if where == "before":
            raise StorageError("cut off")
        return rewrite(*args, **kwargs)

    import torch_strata.checkpoint.copying as copying

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "commit", second_commit_fails)
        patch.setattr(_native, "rewrite_safetensors", rewrite_fails)
        patch.setattr(copying, "_discard", lambda *args: None)
        return save_sharded(rank, root, KINDS)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_save_that_is_cut_off_before_whole_tensors_are_committed_leaves_a_model_that_loads(
    tmp_path: Path, where: str
) -> None:
    root = tmp_path / "run"
    for told in run_ranks(tmp_path, 2, save_broken, root, where):
        assert told is not None and "cut off" in told and "committed, in shards that only DCP reads" in told
    place = root / "step-1-model"
    assert bool(list(place.glob("*.safetensors"))) == (where == "behind")
    assert not (place / INDEX).exists()
    loaded = manager_at(root).load(1)["model"]
    assert loaded.pop("steps") == 3
    assert_same(loaded, whole_of(0))
    assert verify(place).is_sound
    assert run_ranks(tmp_path, 2, load_sharded, root) == [True, True]
    assert run_ranks(tmp_path, 2, save_again, root) == [None, None]
    assert_is_served(root)


def save_again(rank: int, root: Path) -> str | None:
    return save_sharded(rank, root, KINDS, overwrite=True)


def save_odd(rank: int, root: Path) -> str | None:
    mesh = init_device_mesh("cpu", (2,))
    odd = distribute_tensor(torch.ones(4, dtype=torch.complex128), mesh, [Shard(0)])
    handle = CheckpointManager(root).save({"model": {"odd": odd}}, step=1, checkpoint_type="model_only")
    return str(handle.exception(WAIT))


def test_shards_that_the_format_cannot_hold_leave_nothing(tmp_path: Path) -> None:
    for told in run_ranks(tmp_path, 2, save_odd, tmp_path / "run"):
        assert "'model.odd'" in told and "complex128" in told
    assert not [path for path in (tmp_path / "run").glob("step-*/**/*") if path.is_file()]
