"""Copies of a writer, in this process or another, and writers that are used wrongly: no save harms another one's."""

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from tests.checkpoint.states import load, save
from torch_strata import (
    CheckpointExistsError,
    ConfigError,
    PreconditionError,
    StorageConfig,
    StrataReader,
    StrataWriter,
    _native,
    verify,
)
from torch_strata._store import open_store


def save_with(writer: StrataWriter, value: float) -> None:
    dcp.save({"w": torch.full((5000,), value)}, storage_writer=writer, no_dist=True)


def value_at(place: Any) -> float:
    out = {"w": torch.zeros(5000)}
    load(out, place)
    return float(out["w"].unique())


def in_a_fork(call: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def save_pickled(writer: bytes, value: float) -> None:
    save_with(pickle.loads(writer), value)


def in_a_spawned_process(writer: StrataWriter, value: float) -> None:
    process = multiprocessing.get_context("spawn").Process(target=save_pickled, args=(pickle.dumps(writer), value))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda writer: pickle.loads(pickle.dumps(writer))])
def test_a_copy_of_a_writer_makes_saves_of_its_own(tmp_path, copied):
    writer = StrataWriter(tmp_path / "c")
    for value, saves_with in enumerate([writer, copied(writer), writer, copied(writer)]):
        save_with(saves_with, float(value))
        assert verify(tmp_path / "c").problems == ()
        assert value_at(tmp_path / "c") == value


def test_a_writer_saves_in_a_fork_and_in_its_parent(tmp_path):
    writer = StrataWriter(tmp_path / "c")
    in_a_fork(lambda: save_with(writer, 1.0))
    assert value_at(tmp_path / "c") == 1.0
    save_with(writer, 2.0)
    assert (value_at(tmp_path / "c"), verify(tmp_path / "c").problems) == (2.0, ())


def test_a_writer_that_is_sent_to_a_process_again_and_again_saves_each_time(tmp_path):
    writer = StrataWriter(tmp_path / "c")
    for value in (1.0, 2.0):
        in_a_spawned_process(writer, value)
        assert (value_at(tmp_path / "c"), verify(tmp_path / "c").problems) == (value, ())


def test_a_name_that_is_taken_is_left_alone(tmp_path):
    store = open_store(tmp_path, StorageConfig())
    template = (None, _native.BYTES, -1, 0, "", (), ())
    item = (b"v", -1, 0, 0, b"first")

    def write() -> None:
        _native.write_items(store, [item], [template], rank=0, save_id="same", parent=None, transfer=_native.Transfer())

    write()
    with pytest.raises(PreconditionError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["__0_0.same.distcp"]


def test_a_process_that_saves_for_another_is_of_the_same_run(tmp_path):
    writer = StrataWriter(tmp_path / "run" / "c", run_root=tmp_path / "run")
    for value in (1.0, 3.0):
        save_with(writer, value)
        in_a_spawned_process(writer, value + 1)
        assert value_at(tmp_path / "run" / "c") == value + 1


@pytest.mark.parametrize("root", ["run/c", "run/c/d", "elsewhere", "ru", "memory://run", "file:///elsewhere"])
def test_a_run_root_that_is_not_above_the_checkpoint_is_refused(tmp_path, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run_root"):
        StrataWriter("run/c", run_root=root)
    writer = StrataWriter("run/c", run_root="run")
    with pytest.raises(ConfigError, match="run_root"):
        writer.reset("elsewhere/c")


def test_memory_of_a_process_is_not_saved_to_from_another(tmp_path):
    pickled = pickle.dumps(StrataWriter("memory://c"))
    with pytest.raises(AssertionError):
        in_a_fork(lambda: pickle.loads(pickled))
    pickle.loads(pickled)


def test_overwrite_false_protects_pretrained_weights(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.zeros(4)}, tmp_path, overwrite=False)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


def test_identities_are_those_of_the_metadata(tmp_path):
    writer, reader = StrataWriter(tmp_path / "c"), StrataReader(tmp_path / "c")
    save_with(writer, 1.0)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert (meta.save_id, meta.load_id) == (writer.save_id, reader.load_id)
