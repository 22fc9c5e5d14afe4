"""What counts as committed at a place, who may commit there, and what goes with the state that was superseded."""

import logging
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter

from tests.checkpoint import manifests
from tests.checkpoint.manifests import manifest_of, number, text, with_fields
from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import failure_of, load, save
from torch_strata import (
    CheckpointNotFoundError,
    CorruptionError,
    ManifestError,
    ObjectNotFoundError,
    PreconditionError,
    StaleGenerationError,
    StorageError,
    StrataReader,
    StrataWriter,
    verify,
)


def save_value(value: float, place: Path, **options: Any) -> StrataWriter:
    return save({"w": torch.full((200_000,), value), "n": value}, place, **options)


def found(place: Path, reader: Any = StrataReader) -> float:
    """The one value that all of the state holds."""
    out = {"w": torch.zeros(200_000), "n": 0.0}
    dcp.load(out, storage_reader=reader(place), no_dist=True)
    (value,) = {out["n"], *out["w"].unique().tolist()}
    return value


def objects(place: Path) -> set[str]:
    return {path.name for path in place.glob("*.distcp")}


def test_a_torn_manifest_is_passed_over_for_the_older_one_and_said(tmp_path, caplog):
    place = tmp_path / "c"
    save_value(1.0, place)
    content = manifest_of(place).read_bytes()
    torn = place / ".strata" / f"{2:020}"
    for kept in (0, 7, 40, len(content) - 1):
        torn.write_bytes(content[:kept])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert found(place) == 1
        assert torn.name in caplog.text
        report = verify(place)
        assert report.is_sound and torn.name in report.warnings[0]
    assert save_value(2.0, place).stats.number == 3
    assert found(place) == found(place, FileSystemReader) == 2
    assert [path.name for path in (place / ".strata").iterdir() if path.is_file()] == [f"{3:020}"]


def test_a_torn_manifest_alone_is_damage_and_the_next_save_replaces_it(tmp_path):
    place = tmp_path / "c"
    save_value(1.0, place)
    manifest = manifest_of(place)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    error = failure_of(lambda: found(place))
    assert isinstance(error, ManifestError) and isinstance(error, CorruptionError) and manifest.name in str(error)
    save_value(2.0, place)
    assert found(place) == found(place, FileSystemReader) == 2
    assert len(objects(place)) == 1


NEWER = {
    "version": number(manifests.MIN_READER_VERSION, 2),
    "feature": text(manifests.REQUIRED_FEATURES, "zstd-planes"),
}


@pytest.mark.parametrize("what", NEWER)
@pytest.mark.parametrize("with_older", [False, True])
def test_a_manifest_for_newer_readers_is_an_error_and_no_reason_to_take_an_older_one(tmp_path, what, with_older):
    place = tmp_path / "c"
    save_value(1.0, place)
    content = manifest_of(place).read_bytes()
    newest = place / ".strata" / f"{1 + with_older:020}"
    newest.write_bytes(with_fields(content, NEWER[what]))
    error = failure_of(lambda: found(place))
    assert isinstance(error, ManifestError) and newest.name in str(error)
    assert ("version 2" if what == "version" else "zstd-planes") in str(error)
    # Nor may this version replace what it cannot read.
    assert isinstance(failure_of(lambda: save_value(2.0, place)), ManifestError)
    assert isinstance(failure_of(lambda: save_value(2.0, place, overwrite=False)), ManifestError)
    assert newest.read_bytes() == with_fields(content, NEWER[what])


def test_a_field_that_is_unknown_but_not_required_is_no_obstacle(tmp_path):
    save_value(1.0, tmp_path / "c")
    manifest = manifest_of(tmp_path / "c")
    manifest.write_bytes(with_fields(manifest.read_bytes(), text(1000, "from the future")))
    assert found(tmp_path / "c") == 1


def test_superseded_objects_go_with_the_commit(tmp_path):
    save_value(1.0, tmp_path / "c")
    before = objects(tmp_path / "c")
    assert save_value(2.0, tmp_path / "c").stats.collected == 1
    assert not before & objects(tmp_path / "c")


def test_a_load_with_a_lease_outlives_saves_that_supersede_what_it_reads(tmp_path):
    place, planner, out = tmp_path / "c", DefaultLoadPlanner(), {"w": torch.zeros(200_000), "n": 0.0}
    save_value(1.0, place)
    reader = StrataReader(place, lease=timedelta(minutes=5))
    metadata = reader.read_metadata()
    save_value(2.0, place)
    save_value(3.0, place)
    planner.set_up_planner(out, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    assert out["n"] == 1.0 and bool((out["w"] == 1.0).all())
    assert os.listdir(place / ".strata" / "leases") == []
    assert save_value(4.0, place).stats.collected == 3
    assert len(objects(place)) == 1 and found(place) == 4


def test_a_reader_with_a_lease_leaves_nothing_where_no_checkpoint_is(tmp_path):
    error = failure_of(lambda: load({"n": 0.0}, tmp_path / "c", lease=timedelta(minutes=5)))
    assert isinstance(error, CheckpointNotFoundError)
    assert os.listdir(tmp_path) == []


def test_a_load_that_cannot_read_the_metadata_gives_its_lease_back(tmp_path, monkeypatch):
    def damaged(*_: object, **__: object) -> None:
        raise CorruptionError("damaged")

    save_value(1.0, tmp_path)
    monkeypatch.setattr("torch_strata.checkpoint.reader.read_metadata", damaged)
    assert isinstance(failure_of(lambda: load({"n": 0.0}, tmp_path, lease=timedelta(minutes=5))), CorruptionError)
    assert os.listdir(tmp_path / ".strata" / "leases") == []


def test_superseded_objects_stay_while_a_reader_holds_a_lease(tmp_path):
    place = tmp_path / "c"
    save_value(1.0, place)
    first = objects(place)
    lease = place / ".strata" / "leases" / f"{int(time.time()) + 3600:020}-reader"
    lease.parent.mkdir()
    lease.write_bytes(b"")
    opened = StrataReader(place)
    opened.read_metadata()
    assert save_value(2.0, place).stats.collected == 0
    assert first < objects(place) and found(place) == found(place, FileSystemReader) == 2
    lease.rename(lease.with_name(f"{int(time.time()) - 1:020}-reader"))
    assert save_value(3.0, place).stats.collected == 2
    assert len(objects(place)) == 1 and found(place) == 3


def test_objects_of_saves_that_were_killed_go_with_the_next_commit_and_other_files_stay(tmp_path):
    place = tmp_path / "c"
    save_value(1.0, place)
    for name in ("__0_0.0123.distcp", "__7_3.4567.distcp", "notes.txt", "model.distcp"):
        (place / name).write_bytes(b"x")
    assert save_value(2.0, place).stats.collected == 3
    assert {"notes.txt", "model.distcp"} <= set(os.listdir(place)) and len(objects(place)) == 2


def test_an_object_that_another_checkpoint_of_the_run_refers_to_stays(tmp_path):
    root, first, second = tmp_path / "run", tmp_path / "run" / "step-1", tmp_path / "run" / "step-2"
    save_value(1.0, first, run_root=root)
    save_value(2.0, second, run_root=root)
    (shared,) = objects(first)
    stored = text(manifests.OBJECT_NAME, shared) + number(manifests.OBJECT_SIZE, 1)
    fields = text(manifests.OBJECTS, stored + number(manifests.OBJECT_REFERENCE, 1))
    fields += text(manifests.REFERENCES, text(manifests.REFERENCE_CHECKPOINT_ID, "step-1"))
    manifest_of(second).write_bytes(with_fields(manifest_of(second).read_bytes(), fields))
    assert save_value(3.0, first, run_root=root).stats.collected == 0
    assert shared in objects(first) and found(first) == 3
    save_value(4.0, second, run_root=root)
    assert save_value(5.0, first, run_root=root).stats.collected == 2
    assert shared not in objects(first)


def test_stage_files_of_writers_that_were_killed_go_from_every_folder_and_those_at_work_stay(tmp_path):
    place = tmp_path / "c"
    for alone in (False, True):
        stages = []
        for folder in (place, place / ".strata", place / ".strata" / "ranks"):
            folder.mkdir(exist_ok=True, parents=True)
            for name, age in ((".tmp-dead", 7200), (".tmp-alive", 10)):
                (folder / name).write_bytes(b"x")
                os.utime(folder / name, (time.time() - age,) * 2)
                stages.append(folder / name)
        dcp.save({"w": torch.ones(3)}, storage_writer=StrataWriter(place), no_dist=True, use_collectives=not alone)
        assert {path for path in stages if path.exists()} == {path for path in stages if path.name == ".tmp-alive"}


class CannotWriteMetadata(StrataWriter):
    """The store fails between the manifest and `.metadata`."""

    def finish(self, metadata: Any, results: Any) -> None:
        path = Path(self.checkpoint_id, ".metadata")
        old = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.mkdir()
        try:
            super().finish(metadata, results)
        finally:
            path.rmdir()
            if old is not None:
                path.write_bytes(old)


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_after_the_manifest_is_a_warning_since_the_save_is_committed(tmp_path, exists):
    place = tmp_path / "c"
    if exists:
        save_value(1.0, place)
    writer = CannotWriteMetadata(place)
    dcp.save({"w": torch.full((200_000,), 2.0), "n": 2.0}, storage_writer=writer, no_dist=True)
    assert writer.stats.committed and writer.stats.collected == 0
    (warning,) = writer.stats.warnings
    assert ".metadata" in warning and "committed" in warning
    assert found(place) == 2
    report = verify(place)
    assert report.is_sound and ".metadata" in report.warnings[0] and "stock readers" in report.warnings[0]
    if exists:
        assert found(place, FileSystemReader) == 1, "what the old .metadata names has not been removed"
    save_value(3.0, place)
    assert found(place) == found(place, FileSystemReader) == 3 and len(objects(place)) == 1
    assert verify(place).is_sound and not verify(place).warnings


def test_a_failure_to_replace_an_index_that_still_counts_is_an_error(tmp_path):
    """Of older torch, without a save_id: readers cannot tell it from one that was written after our manifest."""
    place = tmp_path / "c"
    state = {"w": torch.full((200_000,), 1.0), "n": 1.0}
    dcp.save(state, storage_writer=FileSystemWriter(place), no_dist=True)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.storage_meta = None
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"w": torch.full((200_000,), 2.0), "n": 2.0}
    error = failure_of(lambda: dcp.save(state, storage_writer=CannotWriteMetadata(place), no_dist=True))
    assert isinstance(error, StorageError) and ".metadata" in str(error)
    assert found(place) == found(place, FileSystemReader) == 1
    save_value(3.0, place)
    assert found(place) == found(place, FileSystemReader) == 3


class SavesInBetween(DefaultSavePlanner):
    """Another writer saves here after this save has looked at the place and before it writes."""

    def __init__(self, place: Path, **options: Any) -> None:
        super().__init__()
        self._other = (place, options)

    def create_global_plan(self, all_plans: Any) -> Any:
        place, options = self._other
        save_value(2.0, place, **options)
        return super().create_global_plan(all_plans)


def test_of_two_saves_at_once_one_commits_and_the_other_is_told(tmp_path):
    place = tmp_path / "c"
    save_value(1.0, place)
    error = failure_of(lambda: save_value(3.0, place, planner=SavesInBetween(place)))
    assert isinstance(error, PreconditionError) and str(place) in str(error)
    assert found(place) == found(place, FileSystemReader) == 2
    assert len(objects(place)) == 1 and verify(place).is_sound


def test_of_two_first_saves_at_once_one_commits_and_the_other_is_told(tmp_path):
    error = failure_of(lambda: save_value(3.0, tmp_path / "c", planner=SavesInBetween(tmp_path / "c")))
    assert isinstance(error, PreconditionError)
    assert found(tmp_path / "c") == 2 and len(objects(tmp_path / "c")) == 1


class FinishesLast(StrataWriter):
    """Another writer commits, and collects our objects as it finds no manifest with them, after we have written."""

    def finish(self, metadata: Any, results: Any) -> None:
        save_value(2.0, Path(self.checkpoint_id))
        super().finish(metadata, results)


def test_a_save_whose_objects_another_one_has_collected_is_told_of_that_one(tmp_path):
    place = tmp_path / "c"
    save_value(1.0, place)
    state = {"w": torch.full((200_000,), 3.0), "n": 3.0}
    error = failure_of(lambda: dcp.save(state, storage_writer=FinishesLast(place), no_dist=True))
    assert isinstance(error, PreconditionError), error
    assert found(place) == found(place, FileSystemReader) == 2 and len(objects(place)) == 1


def save_many(rank: int, place: str, rounds: int) -> list[str]:
    outcomes = []
    for i in range(rounds):
        try:
            save_value(float(1 + rank + 10 * i), Path(place))
            outcomes.append("committed")
        except BaseException as error:
            (failure,) = error.failures.values()
            outcomes.append(type(failure[0]).__name__)
    return outcomes


def test_processes_that_save_to_one_place_all_the_time_leave_a_whole_checkpoint(tmp_path):
    place = tmp_path / "c"
    outcomes = run_ranks(tmp_path, 3, save_many, str(place), 12)
    assert {name for rank in outcomes for name in rank} <= {"committed", PreconditionError.__name__}
    committed = sum(rank.count("committed") for rank in outcomes)
    assert committed >= 1 and int(manifest_of(place).name) == committed
    assert verify(place).is_sound and found(place) in {1 + rank + 10 * i for rank in range(3) for i in range(12)}
    save_value(500.0, place)
    assert len(objects(place)) == 1 and found(place) == found(place, FileSystemReader) == 500


def test_a_run_claims_one_generation_and_a_newer_claim_ends_its_right(tmp_path):
    root = tmp_path / "run"
    save_value(1.0, root / "a", run_root=root)
    save_value(1.0, root / "b", run_root=root)
    generations = root / ".strata" / "generations"
    assert os.listdir(generations) == [f"{1:020}"]
    (generations / f"{2:020}").write_bytes(b"a newer run")
    error = failure_of(lambda: save_value(2.0, root / "a", run_root=root))
    assert isinstance(error, StaleGenerationError) and str(root) in str(error)
    assert found(root / "a") == found(root / "a", FileSystemReader) == 1
    assert len(objects(root / "a")) == 1
    for place in (root / "new", root / "deep" / "new"):
        assert isinstance(failure_of(lambda place=place: save_value(2.0, place, run_root=root)), StaleGenerationError)
    assert {path.name for path in root.iterdir()} == {".strata", "a", "b"}


def test_a_failed_save_removes_no_folder_that_was_there_or_is_in_use(tmp_path):
    root = tmp_path / "run"
    save_value(1.0, root / "a", run_root=root)
    (root / ".strata" / "generations" / f"{2:020}").write_bytes(b"a newer run")
    (root / "empty").mkdir()
    (root / "used").mkdir()
    (root / "used" / "notes").write_text("mine")
    for name in ("empty", "used"):
        failure_of(lambda name=name: save_value(2.0, root / name, run_root=root))
    assert list((root / "empty").iterdir()) == [] and os.listdir(root / "used") == ["notes"]


class LosesAnObject(StrataWriter):
    """A rank's object is not where the planning rank looks, as on a path that ranks do not share."""

    def finish(self, metadata: Any, results: Any) -> None:
        self.lost = max(Path(self.checkpoint_id).glob("__0_0*.distcp"), key=lambda path: path.stat().st_mtime_ns)
        self.change(self.lost)
        super().finish(metadata, results)

    def change(self, path: Path) -> None:
        path.unlink()


class CutsAnObject(LosesAnObject):
    def change(self, path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("kind", [LosesAnObject, CutsAnObject])
def test_an_object_that_is_not_there_whole_stops_the_commit(tmp_path, kind):
    place = tmp_path / "c"
    save_value(1.0, place)
    writer = kind(place)
    state = {"w": torch.full((200_000,), 2.0), "n": 2.0}
    error = failure_of(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    assert isinstance(error, ObjectNotFoundError if kind is LosesAnObject else CorruptionError)
    assert writer.lost.name in str(error)
    if kind is LosesAnObject:
        assert "do all ranks share this place?" in str(error)
    assert found(place) == found(place, FileSystemReader) == 1
    assert len(objects(place)) == 1


class SavesBeforeReading(DefaultLoadPlanner):
    """Another writer supersedes the checkpoint between its opening and the first read, `times` times."""

    def __init__(self, place: Path, times: int) -> None:
        super().__init__()
        self._place, self._left, self.value = place, times, 1.0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if self._left:
            self._left -= 1
            self.value += 1
            save_value(self.value, self._place)
        return super().resolve_tensor(read_item)


def test_a_load_whose_objects_went_reads_the_newer_state_once(tmp_path):
    save_value(1.0, tmp_path / "c")
    out = {"w": torch.zeros(200_000), "n": 0.0}
    load(out, tmp_path / "c", planner=SavesBeforeReading(tmp_path / "c", 1))
    assert out["w"].unique().tolist() == [2] and out["n"] == 2
    planner = SavesBeforeReading(tmp_path / "c", 100)
    assert isinstance(failure_of(lambda: load(out, tmp_path / "c", planner=planner)), ObjectNotFoundError)
    assert planner.value == 3, "opened again once, not for ever"


def test_small_values_travel_in_the_manifest_and_are_the_same_in_the_object(tmp_path):
    state = {"lr": 0.1, "rng": torch.arange(500, dtype=torch.uint8), "step": torch.tensor(7), "edge": b"x" * 1000}
    empty = {"lr": 0.0, "rng": torch.zeros(500, dtype=torch.uint8), "step": torch.tensor(0), "edge": b""}
    save(state, tmp_path / "c")
    stock = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in empty.items()}
    dcp.load(stock, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    for path in (tmp_path / "c").glob("*.distcp"):
        path.unlink()
    load(empty, tmp_path / "c")
    for out in (stock, empty):
        assert out["lr"] == 0.1 and out["edge"] == b"x" * 1000
        assert torch.equal(out["rng"], state["rng"]) and out["step"].item() == 7
