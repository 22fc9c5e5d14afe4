"""Nothing that a checkpoint names is run: not in `.metadata`, not in a value's pickle, not in ours, not in stock's."""

import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointError, CorruptionError
from torch_strata.checkpoint._unpickle import check_object_path, load_stock_metadata


class Boom:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


def stock_save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def test_no_file_of_a_checkpoint_can_run_code(tmp_path):
    for write in (save, stock_save):
        place = tmp_path / write.__name__
        write({"w": torch.ones(8), "cfg": {"a": 1}}, place)
        for path in [p for p in place.rglob("*") if p.is_file()]:
            original, mark = path.read_bytes(), tmp_path / "mark"
            path.write_bytes(pickle.dumps(Boom(mark)))
            try:
                load({"w": torch.zeros(8), "cfg": {"a": 0}}, place)
            except BaseException as error:
                assert "failures" in dir(error)
            assert not mark.exists(), path
            path.write_bytes(original)


def test_a_hostile_metadata_names_what_was_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Boom(tmp_path / "mark")))
    error = failure_of(lambda: load({"w": torch.zeros(1)}, tmp_path))
    assert isinstance(error, CorruptionError)
    assert "open" in str(error) and ".metadata" in str(error)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("write", [save, stock_save])
def test_a_value_that_needs_a_class_says_which_and_how_to_trust_it(tmp_path, write):
    write({"w": torch.ones(2), "point": Point(3)}, tmp_path / "c")
    out = {"w": torch.zeros(2), "point": None}
    error = failure_of(lambda: load(out, tmp_path / "c"))
    assert isinstance(error, CheckpointError)
    assert "'point'" in str(error) and f"{Point.__module__}.Point" in str(error) and "trusted_classes" in str(error)
    assert out["w"].tolist() == [0, 0]
    load(out, tmp_path / "c", trusted_classes=[Point])
    assert out["point"] == Point(3) and out["w"].tolist() == [1, 1]


@pytest.mark.parametrize("write", [save, stock_save])
@pytest.mark.parametrize("value", [Point(3), (Point(3),), print, Boom(Path("never"))])
def test_a_refusal_is_told_in_our_words_and_not_in_advice_for_users_of_torch(tmp_path, write, value):
    write({"point": value}, tmp_path / "c")
    message = str(failure_of(lambda: load({"point": None}, tmp_path / "c")))
    assert "'point'" in message and "\x1b" not in message and "weights_only" not in message, message
    assert "add_safe_globals" not in message and "\n" not in message and "PyTorch 2.6" not in message, message


def test_a_value_that_torch_refuses_for_another_reason_says_which(tmp_path):
    archive, damaged = io.BytesIO(), io.BytesIO()
    torch.save([1, 2], archive)
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"\x80\x02\xfe." if name.endswith("data.pkl") else source.read(name))
    planner = RawBytes()
    planner.content = damaged.getvalue()
    save({"v": 1}, tmp_path / "c", planner=planner)
    message = str(failure_of(lambda: load({"v": 0}, tmp_path / "c")))
    assert "254" in message and "weights_only" not in message and "PyTorch 2.6" not in message, message


class Tagged(torch.Tensor):
    """A subclass: stored verbatim, so that loading it needs its class."""


def test_a_tensor_subclass_loads_only_with_its_class_trusted(tmp_path):
    save({"t": torch.arange(6.0).as_subclass(Tagged), "w": torch.ones(2)}, tmp_path / "c")
    out = {"t": torch.zeros(6), "w": torch.zeros(2)}
    error = failure_of(lambda: load(out, tmp_path / "c"))
    assert isinstance(error, CheckpointError) and "Tagged" in str(error)
    assert out["w"].tolist() == [0, 0]
    load(out, tmp_path / "c", trusted_classes=[Tagged])
    assert out["t"].tolist() == [0, 1, 2, 3, 4, 5] and out["w"].tolist() == [1, 1]


def test_trust_ends_with_the_load(tmp_path):
    save({"point": Point(3)}, tmp_path / "c")
    load({"point": None}, tmp_path / "c", trusted_classes=[Point])
    assert isinstance(failure_of(lambda: load({"point": None}, tmp_path / "c")), CheckpointError)


class OwnLoadBytes(DefaultLoadPlanner):
    """Loads values as stock does: with everything allowed."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)


def test_a_planner_of_the_user_never_sees_a_hostile_value(tmp_path):
    save({"bad": Boom(tmp_path / "mark")}, tmp_path / "c")
    error = failure_of(lambda: load({"bad": 0}, tmp_path / "c", planner=OwnLoadBytes()))
    assert isinstance(error, CheckpointError)
    assert not (tmp_path / "mark").exists()
    save({"good": [1, 2]}, tmp_path / "c")
    out = {"good": None}
    load(out, tmp_path / "c", planner=OwnLoadBytes())
    assert out == {"good": [1, 2]}


class RawBytes(dcp.DefaultSavePlanner):
    """Stores bytes that torch.save did not frame."""

    content = b""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(self.content)


def test_a_value_in_an_older_format_is_refused_since_torch_may_read_it_in_two_ways(tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    for content in (archive.getvalue(), pickle.dumps(Boom(tmp_path / "mark")), b""):
        planner = RawBytes()
        planner.content = content
        save({"v": 1}, tmp_path / "c", planner=planner)
        assert isinstance(failure_of(lambda: load({"v": 0}, tmp_path / "c")), CorruptionError)
    assert not (tmp_path / "mark").exists()


def reduced(target: Any, *args: Any, state: Any = None) -> bytes:
    class Call:
        def __reduce__(self) -> Any:
            return (target, args) if state is None else (target, args, state)

    return pickle.dumps(Call())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x80\x04K\x01.",
        pickle.dumps(Metadata({})),
        pickle.dumps({"state_dict_metadata": {}}),
        reduced(eval, "1"),
        reduced(getattr, torch.Size, "mro"),
        reduced(torch.Size, ("a",)),
        pickle.dumps(Metadata({"k": 1}, storage_data={})),
        pickle.dumps(Metadata({1: TensorStorageMetadata}, storage_data={})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("k"): 3})),
        b"cos\nsystem\n.",
        b"\x80\x02Pid\n.",
        pickle.dumps(torch.load),
    ],
)
def test_metadata_that_is_damaged_or_names_anything_else_is_refused(data):
    with pytest.raises(CorruptionError, match="here"):
        load_stock_metadata(data, "here")


def test_a_pickle_cannot_change_the_classes_it_names():
    attack = (
        pickle.PROTO + b"\x04" + b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x03\x00\x00\x00badK\x01s\x86b."
    )
    with pytest.raises(CorruptionError):
        load_stock_metadata(attack, "here")
    assert not hasattr(Metadata, "bad")


@pytest.mark.parametrize("path", ["__0_0.distcp", "data/x.distcp", "..x", "a..b"])
def test_a_name_inside_the_checkpoint_is_followed(path):
    assert check_object_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        *("", "/etc/passwd", "..", "../x", "../step-1/x.distcp", "../../x/y", "a/../b", "a//b", "./a", "a\\b", "c:/x"),
        *("s3://b/x", "a\0", "\ud800", 3, None),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(path):
    with pytest.raises(CorruptionError):
        check_object_path(path)


def test_a_stock_metadata_that_names_a_file_elsewhere_is_refused(tmp_path):
    stock_save({"w": torch.ones(4)}, tmp_path / "c")
    (tmp_path / "secret").write_bytes(next((tmp_path / "c").glob("*.distcp")).read_bytes())
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = str(tmp_path / "secret")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: load({"w": torch.zeros(4)}, tmp_path / "c"))
    assert isinstance(error, CorruptionError) and "secret" in str(error)
