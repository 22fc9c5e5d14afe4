"""What cannot be saved, and what is damaged: a named error, and the checkpoint that was there still loads."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from tests.checkpoint.states import AnyDtypePlanner, failure_of, flip, load, save
from torch_strata import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StrataError,
    StrataReader,
    StrataWriter,
    _native,
    verify,
)


class Unpicklable(Exception):
    """An error that cannot travel to another rank."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__("from __reduce__")
        self.lock = threading.Lock()


class RaisesWhenPickled:
    def __reduce__(self) -> Any:
        raise Unpicklable(1, 2)


def freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSTORABLE = {
    "lambda": lambda: lambda x: x,
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(2)),
    "raises": RaisesWhenPickled,
    "meta": lambda: torch.ones(3, device="meta"),
    "freed": freed,
    "sub_byte": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_a_value_that_cannot_be_stored_is_named_and_the_old_checkpoint_stays(tmp_path, name):
    save({"w": torch.ones(4), "extra": 1}, tmp_path / "c")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    state = {"w": torch.full((4,), 2.0), "extra": {"slot": UNSTORABLE[name]()}}
    error = failure_of(lambda: save(state, tmp_path / "c", planner=AnyDtypePlanner()))
    assert type(error) is CheckpointError and "'extra.slot'" in str(error)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    out = {"w": torch.zeros(4), "extra": 0}
    load(out, tmp_path / "c")
    assert out["w"].tolist() == [1] * 4 and out["extra"] == 1


class OddPlannerData(DefaultSavePlanner):
    """Leaves something in the metadata that cannot be pickled."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=lambda: None)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda place: StrataWriter(place, overwrite="no"),
        lambda place: StrataWriter(place, world_size=-1),
        lambda place: StrataWriter(place, run_root=3),
        lambda place: StrataWriter(place, storage_options=["a"]),
        lambda place: StrataWriter(None),
        lambda place: StrataReader(5),
        lambda place: StrataReader(place, allow_dtype_cast="no"),
        lambda place: StrataReader(place, trusted_classes=["decimal.Decimal"]),
        lambda place: StrataReader(place, trusted_classes=3),
        lambda place: StrataReader(place, lease=3),
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_given(tmp_path, wrong):
    with pytest.raises(ConfigError):
        wrong(tmp_path / "c")


def test_planner_data_that_cannot_be_stored_leaves_no_object_behind(tmp_path):
    save({"w": torch.ones(4)}, tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    error = failure_of(lambda: save({"w": torch.zeros(4)}, tmp_path / "c", planner=OddPlannerData()))
    assert isinstance(error, CheckpointError) and "planner_data" in str(error)
    assert sorted(tmp_path.rglob("*")) == before


class OddEntry(DefaultSavePlanner):
    """Promises what the manifest cannot say."""

    change: Any = None

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        type(self).change(metadata.state_dict_metadata)
        return plans, metadata


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update({3: state["w"]}),
        lambda state: setattr(state["w"].properties, "memory_format", torch.channels_last_3d),
        lambda state: setattr(state["w"], "size", (-1,)),
        lambda state: state.update(more=state["w"]),
    ],
)
def test_metadata_that_cannot_be_committed_leaves_no_object_behind(tmp_path, change):
    save({"w": torch.ones(4)}, tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    planner = type("Odd", (OddEntry,), {"change": staticmethod(change)})()
    failure_of(lambda: save({"w": torch.zeros(4)}, tmp_path / "c", planner=planner))
    assert sorted(tmp_path.rglob("*")) == before
    out = {"w": torch.zeros(4)}
    load(out, tmp_path / "c")
    assert out["w"].tolist() == [1] * 4


def test_a_key_that_is_not_a_str_is_named(tmp_path):
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    error = failure_of(lambda: save({3: torch.ones(1)}, tmp_path / "c", planner=planner))
    assert isinstance(error, CheckpointError) and "3" in str(error)


def test_overwriting_can_be_forbidden(tmp_path):
    save({"w": torch.ones(1)}, tmp_path / "c", overwrite=False)
    error = failure_of(lambda: save({"w": torch.zeros(1)}, tmp_path / "c", overwrite=False))
    assert isinstance(error, CheckpointExistsError) and isinstance(error, FileExistsError)
    out = {"w": torch.zeros(1)}
    load(out, tmp_path / "c")
    assert out["w"].item() == 1


def test_nothing_there_is_said_with_its_class(tmp_path):
    error = failure_of(lambda: load({"w": torch.zeros(1)}, tmp_path / "nowhere"))
    assert isinstance(error, CheckpointNotFoundError) and isinstance(error, FileNotFoundError)
    assert "nowhere" in str(error)


def test_metadata_that_was_not_read_raises_its_reason_when_looked_at(tmp_path):
    metadata = StrataReader(tmp_path / "nowhere").read_metadata()
    with pytest.raises(CheckpointNotFoundError):
        _ = metadata.state_dict_metadata


def test_a_place_that_is_a_file_is_an_error_of_the_store(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert isinstance(failure_of(lambda place=place: save({"w": torch.ones(1)}, place)), StorageError)
        assert isinstance(failure_of(lambda place=place: load({"w": torch.ones(1)}, place)), StrataError)


def saved(tmp_path: Path) -> tuple[Path, Path]:
    save({"a": torch.arange(300_000.0), "n": "x" * 10_000, "b": torch.ones(3)}, tmp_path / "c")
    return tmp_path / "c", max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)


def template() -> dict[str, Any]:
    return {"a": torch.zeros(300_000), "n": "", "b": torch.zeros(3)}


@pytest.mark.parametrize("verify", ["inplace", "before"])
def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path, verify):
    place, data = saved(tmp_path)
    flip(data, data.read_bytes().index(torch.arange(300_000.0)[1000:1010].numpy().tobytes()))
    out = template()
    error = failure_of(lambda: load(out, place, verify=verify))
    assert isinstance(error, CorruptionError) and data.name in str(error)
    assert out["n"] == ""
    if verify == "before":
        assert out["a"].eq(0).all()


def test_a_flipped_bit_in_a_value_is_noticed(tmp_path):
    place, _ = saved(tmp_path)
    for path in place.glob("*.distcp"):
        if b"x" * 10_000 in path.read_bytes():
            flip(path, path.read_bytes().index(b"x" * 10_000) + 5000)
    out = template()
    assert isinstance(failure_of(lambda: load(out, place)), CorruptionError)
    assert out["a"].eq(0).all()


def test_a_truncation_behind_the_last_payload_is_found_by_verify(tmp_path):
    place, data = saved(tmp_path)
    data.write_bytes(data.read_bytes()[:-1])
    report = verify(place)
    assert not report.is_sound and data.name in report.problems[0]


@pytest.mark.parametrize("keep", [0, 1, 0.5])
def test_a_truncated_object_is_noticed(tmp_path, keep):
    place, data = saved(tmp_path)
    content = data.read_bytes()
    data.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    error = failure_of(lambda: load(template(), place))
    assert isinstance(error, CorruptionError) and data.name in str(error)


def test_a_missing_object_is_named(tmp_path):
    place, data = saved(tmp_path)
    data.unlink()
    error = failure_of(lambda: load(template(), place))
    assert isinstance(error, ObjectNotFoundError) and isinstance(error, FileNotFoundError) and data.name in str(error)


def test_an_object_of_another_save_under_this_name_is_noticed(tmp_path):
    place, data = saved(tmp_path)
    save({"a": torch.arange(300_000.0) + 1, "n": "y" * 10_000, "b": torch.ones(3)}, tmp_path / "other")
    other = max((tmp_path / "other").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(other.read_bytes())
    assert isinstance(failure_of(lambda: load(template(), place)), CorruptionError)


def test_every_bit_flip_in_the_manifest_is_noticed_or_harmless(tmp_path):
    place, _ = saved(tmp_path)
    manifest = next(path for path in (place / ".strata").iterdir() if path.is_file())
    content = manifest.read_bytes()
    for at in range(0, len(content), max(1, len(content) // 60)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        manifest.write_bytes(damaged)
        out = template()
        try:
            load(out, place)
        except BaseException as error:
            assert isinstance(next(iter(error.failures.values()))[0], StrataError)
            continue
        assert torch.equal(out["a"], torch.arange(300_000.0)) and out["n"] == "x" * 10_000


class SavesWhileLoading(DefaultLoadPlanner):
    """Supersedes the checkpoint between the plan and the first read."""

    place = Path()
    done = False

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if not self.done:
            type(self).done = True
            save({"w": torch.full((200_000,), 2.0), "n": 2}, self.place)
        return super().resolve_tensor(read_item)


def test_a_load_that_is_superseded_reads_the_new_state(tmp_path):
    save({"w": torch.ones(200_000), "n": 1}, tmp_path / "c")
    planner = SavesWhileLoading()
    planner.place = tmp_path / "c"
    SavesWhileLoading.done = False
    out = {"w": torch.zeros(200_000), "n": 0}
    load(out, tmp_path / "c", planner=planner)
    assert {out["n"], *out["w"].unique().tolist()} in ({1}, {2})


@pytest.mark.parametrize("scheme", _native.SCHEMES)
def test_a_place_of_every_scheme_of_the_core_can_be_named(scheme):
    assert StrataReader.validate_checkpoint_id(f"{scheme}://place/run")
    with pytest.raises(ConfigError, match="pass URLs as str"):
        StrataReader(Path(f"{scheme}://place/run"))


def test_a_scheme_that_the_core_does_not_know_is_answered_with_those_it_does():
    assert not StrataReader.validate_checkpoint_id("ftp://place/run")
    with pytest.raises(ConfigError, match=r"'ftp'.*" + ", ".join(_native.SCHEMES)):
        StrataReader("ftp://place/run")


def test_a_checkpoint_can_be_moved(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "c")
    shutil.move(tmp_path / "c", tmp_path / "elsewhere")
    out = {"w": torch.zeros(3)}
    load(out, tmp_path / "elsewhere")
    assert out["w"].tolist() == [1] * 3
