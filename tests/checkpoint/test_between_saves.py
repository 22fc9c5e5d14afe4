"""What a save that ended half-way leaves for the next one, and who may commit after a newer run has started."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.states import failure_of, load, save
from tests.support import run_python
from torch_strata import StaleGenerationError, StorageConfig, StrataReader, StrataWriter


def found(place, reader=StrataReader) -> float:
    out = {"w": torch.zeros(1000)}
    dcp.load(out, storage_reader=reader(place), no_dist=True)
    (value,) = out["w"].unique().tolist()
    return value


def save_value(value: float, place, **options) -> None:
    save({"w": torch.full((1000,), value)}, place, **options)


@pytest.fixture
def ended_before_metadata(tmp_path):
    """As after a crash between the second save's manifest and its `.metadata`."""
    place = tmp_path / "c"
    save_value(1.0, place)
    shutil.copytree(place, tmp_path / "first")
    save_value(2.0, place)
    for path in (tmp_path / "first").iterdir():
        if path.is_file():
            shutil.copy(path, place)
    return place


def test_a_save_that_ended_before_its_metadata_counts_for_us_and_not_for_stock(ended_before_metadata):
    assert found(ended_before_metadata) == 2
    assert found(ended_before_metadata, FileSystemReader) == 1


def test_whoever_saves_next_first_publishes_the_metadata_that_is_missing(ended_before_metadata):
    failure_of(lambda: save({"w": lambda: None}, ended_before_metadata))
    assert found(ended_before_metadata) == 2
    assert found(ended_before_metadata, FileSystemReader) == 2


def test_the_next_save_replaces_what_was_left_half_way(ended_before_metadata):
    save_value(3.0, ended_before_metadata)
    assert found(ended_before_metadata) == found(ended_before_metadata, FileSystemReader) == 3
    assert len(list(ended_before_metadata.glob("*.distcp"))) == 1


def test_objects_without_a_manifest_are_not_a_checkpoint(tmp_path):
    save_value(1.0, tmp_path / "c")
    for path in (tmp_path / "c").rglob("*"):
        if path.is_file() and path.suffix != ".distcp":
            path.unlink()
    with pytest.raises(BaseException, match="CheckpointNotFoundError"):
        found(tmp_path / "c")


NEWER_RUN = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch_strata import StrataWriter
state = {"w": torch.full((1000,), 2.0)}
dcp.save(state, storage_writer=StrataWriter(sys.argv[1], run_root=sys.argv[2]), no_dist=True)
"""


def test_a_run_that_was_replaced_cannot_commit_over_its_successor(tmp_path):
    place, root = tmp_path / "run" / "c", tmp_path / "run"
    save_value(1.0, place, run_root=root)
    save_value(1.5, place, run_root=root)
    run_python(NEWER_RUN, str(place), str(root))
    assert found(place) == 2
    error = failure_of(lambda: save_value(3.0, place, run_root=root))
    assert isinstance(error, StaleGenerationError)
    assert found(place) == found(place, FileSystemReader) == 2
    assert len(list(place.glob("*.distcp"))) == 1


def test_conversion_of_more_than_the_memory_budget_goes_in_steps(tmp_path):
    state = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(5)}
    save(state, tmp_path / "c")
    out = {key: torch.zeros(1 << 20, dtype=torch.float64) for key in state}
    config = StorageConfig(part_bytes=5 << 20, max_in_flight_bytes=5 << 20)
    load(out, tmp_path / "c", allow_dtype_cast=True, config=config)
    assert [value.unique().tolist() for value in out.values()] == [[float(i)] for i in range(5)]


def test_a_writer_for_every_step_keeps_the_others(tmp_path):
    for step in range(3):
        dcp.save(
            {"w": torch.full((1000,), float(step))},
            storage_writer=StrataWriter(tmp_path / f"step-{step}"),
            no_dist=True,
        )
    assert [found(tmp_path / f"step-{step}") for step in range(3)] == [0, 1, 2]
