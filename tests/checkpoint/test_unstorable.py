"""What no checkpoint can hold is refused before anything is written, and the error names the key."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointManager, StrataSavePlanner, StrataWriter, async_save
from torch_strata.errors import CheckpointError, ConfigError

UNPLANNED = {
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr(2),
    "bsc": lambda: torch.eye(4).to_sparse_bsc(2),
    "coo": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


def with_manager(state, path):
    CheckpointManager(path).save(state, step=1).result()


def in_background(state, path):
    async_save(state, checkpoint_id=path).result()


def with_our_planner(state, path):
    raise failure_of(
        lambda: dcp.save(state, storage_writer=StrataWriter(path), planner=StrataSavePlanner(), no_dist=True)
    )


SAVES = pytest.mark.parametrize("write", [with_manager, in_background, with_our_planner])


@SAVES
@pytest.mark.parametrize("kind", UNPLANNED)
def test_sparse_and_nested_tensors_are_refused_by_name(tmp_path, kind, write):
    with pytest.raises(CheckpointError, match=r"'model\.odd'.*(sparse|nested|jagged).*torch\.strided only"):
        write({"model": {"w": torch.ones(2), "odd": UNPLANNED[kind]()}}, tmp_path / "c")
    assert not list(tmp_path.rglob("*.distcp"))


def loop_of_dicts():
    held = {"w": torch.ones(1)}
    held["again"] = held
    return held


def loop_of_lists():
    held = [1]
    held.append([held, held])
    return held


def deep(levels=5000):
    held = {"w": torch.ones(1)}
    for _ in range(levels):
        held = {"in": held}
    return held


@SAVES
@pytest.mark.parametrize("make", [loop_of_dicts, loop_of_lists, deep])
def test_what_contains_itself_or_has_no_end_is_refused_by_name(tmp_path, make, write):
    with pytest.raises(ConfigError, match=r"'odd' is nested too deeply, or holds a dict or list that contains itself"):
        write({"w": torch.ones(2), "odd": make(), "more": [1, {"a": 2}]}, tmp_path / "c")
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_state_is_saved_after_one_that_was_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    for refused in (UNPLANNED["csr"](), loop_of_dicts()):
        with pytest.raises((CheckpointError, ConfigError)):
            manager.save({"odd": refused}, step=1)
    manager.save({"w": torch.ones(2)}, step=1).result()
    assert manager.load(1)["w"].eq(1).all()


def quantized(values):
    return torch.quantize_per_tensor(torch.tensor(values), 0.5, 0, torch.qint8)


def test_a_quantized_tensor_is_loaded_where_there_is_one_and_else_refused_by_name(tmp_path):
    save({"q": quantized([0.0, 1.0, 2.0, 3.0])}, tmp_path / "c")
    found = {"q": quantized([0.0, 0.0, 0.0, 0.0])}
    load(found, tmp_path / "c")
    assert found["q"].dequantize().tolist() == [0, 1, 2, 3]
    manager = CheckpointManager(tmp_path / "run")
    manager.save({"q": quantized([4.0, 5.0, 6.0, 7.0]), "w": torch.ones(1)}, step=1).result()
    with pytest.raises(CheckpointError, match=r"'q': it is quantized"):
        manager.load("latest")
    manager.load("latest", found)
    assert found["q"].dequantize().tolist() == [4, 5, 6, 7]
