"""A manifest that refers to objects of another checkpoint of its run: followed, verified, and never out of the run."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint import manifests
from tests.checkpoint.manifests import manifest_of, refer, text, with_fields
from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import failure_of, load, save
from torch_strata import (
    ChecksumError,
    ManifestError,
    ObjectNotFoundError,
    StrataReader,
    StrataWriter,
    verify,
)


def save_two_objects(rank: int, place: str) -> None:
    state = {f"own{rank}": torch.arange(1_500_000.0) + rank, f"value{rank}": "text " * 2000}
    dcp.save(state, storage_writer=StrataWriter(place))


def zeros() -> dict[str, Any]:
    return {**{f"own{rank}": torch.zeros(1_500_000) for rank in (0, 1)}, "value0": "", "value1": ""}


def is_loaded(out: dict[str, Any]) -> bool:
    tensors = all(torch.equal(out[f"own{rank}"], torch.arange(1_500_000.0) + rank) for rank in (0, 1))
    return tensors and out["value0"] == out["value1"] == "text " * 2000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two objects."""
    folder = tmp_path_factory.mktemp("references")
    run_ranks(folder, 2, save_two_objects, str(folder / "c"))
    return folder / "c"


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run whose step-2 holds the object of rank 1 and refers to step-1 for that of rank 0."""
    shutil.copytree(saved, tmp_path / "run" / "step-1")
    step2 = tmp_path / "run" / "step-2"
    shutil.copytree(saved, step2)
    shared(step2).unlink()
    refer_to(step2, "step-1")
    metadata = pickle.loads((step2 / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if info.relative_path.startswith("__0_"):
            metadata.storage_data[index] = replace(info, relative_path=f"../step-1/{info.relative_path}")
    (step2 / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path / "run"


def shared(place: Path) -> Path:
    """The object of rank 0."""
    return next(place.glob("__0_*.distcp"))


def refer_to(step2: Path, checkpoint_id: str) -> None:
    path = manifest_of(step2)
    name = shared(step2.parent / "step-1").name
    path.write_bytes(refer(path.read_bytes(), checkpoint_id, name.split(".")[1], {name}))


def test_referenced_objects_load_with_ours_and_with_stock(run, monkeypatch):
    out = zeros()
    reader = load(out, run / "step-2")
    assert is_loaded(out) and reader.stats.blocks_verified >= 4
    stock = zeros()
    dcp.load(stock, storage_reader=FileSystemReader(run / "step-2"), no_dist=True)
    assert is_loaded(stock)
    report = verify(run / "step-2")
    assert report.is_sound and report.blocks == verify(run / "step-1").blocks
    # However the place is named.
    for folder, place in ((run.parent, "run/step-2/"), (run, "step-2"), (run / "step-2", ".")):
        monkeypatch.chdir(folder)
        out = zeros()
        load(out, place)
        assert is_loaded(out), place
        assert verify(place).is_sound, place


def load_in_group(rank: int, place: str) -> Any:
    out = zeros()
    reader = StrataReader(place, process_group=torch.distributed.group.WORLD)
    dcp.load(out, storage_reader=reader)
    return is_loaded(out), reader.stats.bytes_read


def test_a_group_reads_referenced_objects_once(run):
    results = run_ranks(run.parent, 2, load_in_group, str(run / "step-2"))
    assert all(loaded for loaded, _ in results)
    assert sum(read for _, read in results) < 1.1 * (2 * 6_000_000 + 2 * 10_000)


def test_referenced_objects_are_found_beside_the_prefix_on_an_object_store(run, bucket):
    for path in run.rglob("*"):
        if path.is_file():
            bucket.put(f"a/{path.relative_to(run.parent)}", path.read_bytes())
    out = zeros()
    load(out, bucket.url("a/run/step-2"))
    assert is_loaded(out) and verify(bucket.url("a/run/step-2")).is_sound


def test_nothing_lies_beside_a_whole_bucket(run, bucket):
    for path in (run / "step-2").rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(run / "step-2")), path.read_bytes())
    error = failure_of(lambda: load(zeros(), bucket.url("").rstrip("/")))
    assert "all of the bucket" in str(error)
    assert "all of the bucket" in " ".join(verify(bucket.url("").rstrip("/")).problems)


@pytest.mark.parametrize("checkpoint_id", ["", ".", "..", "/etc", "a/b", "../step-1", "step-1/", "a\\b", "a\0"])
def test_a_reference_that_is_a_path_is_refused(run, checkpoint_id):
    refer_to(run / "step-2", checkpoint_id)
    error = failure_of(lambda: load(zeros(), run / "step-2"))
    assert isinstance(error, ManifestError) and "not a plain name" in str(error)
    with pytest.raises(ManifestError, match="not a plain name"):
        verify(run / "step-2")


def test_a_referenced_object_that_is_missing_is_named_with_its_checkpoint(run):
    gone = shared(run / "step-1")
    gone.unlink()
    error = failure_of(lambda: load(zeros(), run / "step-2"))
    assert isinstance(error, ObjectNotFoundError)
    assert f"step-1/{gone.name}" in str(error) and f"{run / 'step-2'} refers to it" in str(error)
    problems = " ".join(verify(run / "step-2").problems)
    assert f"step-1/{gone.name}" in problems and "refers to it" in problems
    shutil.rmtree(run / "step-1")
    assert isinstance(failure_of(lambda: load(zeros(), run / "step-2")), ObjectNotFoundError)


def test_a_referenced_object_is_verified(run):
    damaged = shared(run / "step-1")
    content = bytearray(damaged.read_bytes())
    at = content.index(torch.arange(64.0).numpy().tobytes())
    content[at + 100] ^= 1
    damaged.write_bytes(content)
    error = failure_of(lambda: load(zeros(), run / "step-2"))
    assert isinstance(error, ChecksumError) and f"step-1/{damaged.name}" in str(error)
    problems = verify(run / "step-2").problems
    assert len(problems) == 1 and f"step-1/{damaged.name}" in problems[0]
    # What a rank does not need of it is no obstacle.
    out = {"own1": torch.zeros(1_500_000)}
    load(out, run / "step-2")
    assert out["own1"][5] == 6


def test_a_reference_to_what_is_encoded_is_refused_by_name(run):
    path = manifest_of(run / "step-2")
    path.write_bytes(with_fields(path.read_bytes(), text(manifests.REQUIRED_FEATURES, "xor-with-parent")))
    error = failure_of(lambda: load(zeros(), run / "step-2"))
    assert isinstance(error, ManifestError) and "'xor-with-parent'" in str(error).replace('"', "'")


class Unsaveable:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be pickled")


def test_the_index_for_stock_is_made_anew_with_its_references(run):
    (run / "step-2" / ".metadata").unlink()
    failure_of(lambda: save({"bad": Unsaveable()}, run / "step-2"))
    stock = zeros()
    dcp.load(stock, storage_reader=FileSystemReader(run / "step-2"), no_dist=True)
    assert is_loaded(stock)


@pytest.mark.parametrize("of_a_rank", [False, True])
def test_what_another_checkpoint_refers_to_outlives_a_save_over_its_own(run, of_a_rank, monkeypatch):
    if of_a_rank:
        manifest = manifest_of(run / "step-2")
        (manifest.parent / "ranks").mkdir()
        manifest.rename(manifest.parent / "ranks" / f"{manifest.name}.0")
    kept = shared(run / "step-1")
    monkeypatch.chdir(run / "step-1")
    save({"own0": torch.ones(5000)}, ".", run_root=run)
    assert kept.exists()
    assert len(list((run / "step-1").glob("*.distcp"))) == 2, "the new one, and the one that step-2 needs"
    if not of_a_rank:
        out = zeros()
        load(out, run / "step-2")
        assert is_loaded(out)
    shutil.rmtree(run / "step-2")
    save({"own0": torch.ones(5000)}, run / "step-1", run_root=run)
    assert not kept.exists()


def test_an_object_whose_name_is_a_path_is_refused(run):
    """Nor does the name of an object lead there."""
    secret = run.parent / "secret.distcp"
    secret.write_bytes(shared(run / "step-1").read_bytes())
    for name in ("../secret.distcp", str(secret)):
        stored = text(manifests.OBJECT_NAME, name) + manifests.number(manifests.OBJECT_SIZE, 1)
        path = manifest_of(run / "step-2")
        before = path.read_bytes()
        path.write_bytes(with_fields(before, text(manifests.OBJECTS, stored)))
        assert isinstance(failure_of(lambda: load(zeros(), run / "step-2")), ManifestError)
        path.write_bytes(before)
