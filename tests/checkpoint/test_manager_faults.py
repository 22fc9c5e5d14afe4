"""CheckpointManager: what a user does wrong, or finds in the store, is told and costs no checkpoint."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import assert_same, flip, largest_object
from tests.checkpoint.test_manager import another_process_claims, saved, state_of
from torch_strata import export_torch, import_checkpoint
from torch_strata.checkpoint.async_save import async_save
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    LayoutMismatchError,
    StaleGenerationError,
    StorageError,
)

LIMIT = timedelta(seconds=60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def small(step: int) -> dict[str, Any]:
    return {"weight": torch.full((4,), float(step))}


def frozen(step: int) -> dict[str, Any]:
    return {"model": {"frozen": torch.arange(65536.0)}, "step": step}


def save_frozen(manager: CheckpointManager, *steps: int, kind: str = "incremental") -> None:
    for step in steps:
        manager.save(frozen(step), step=step, checkpoint_type=kind).result(LIMIT)


def refers_to(manager: CheckpointManager) -> dict[str, tuple[str, ...]]:
    return {one.folder: one.refers_to for one in manager.listed()}


def fails_to_save(manager: CheckpointManager, root: Path, step: int) -> None:
    """A save that fails, and of which nobody asks."""
    (root / f"step-{step}").write_text("a file in the way")
    handle = manager.save(b"x", step=step)
    while not handle.done():
        pass
    (root / f"step-{step}").unlink()


def test_a_save_never_refers_to_what_a_damaged_checkpoint_holds_or_refers_to(root: Path) -> None:
    manager = CheckpointManager(root)
    save_frozen(manager, 1, 2, 3)
    assert refers_to(manager)["step-3"] == ("step-1",)
    flip(largest_object(root / "step-1"))
    assert not manager.verify(3).is_sound
    save_frozen(manager, 4, 5, 6)
    assert refers_to(manager) | {"step-1": (), "step-2": (), "step-3": ()} == {
        **{f"step-{step}": () for step in (1, 2, 3, 4)},
        "step-5": ("step-4",),
        "step-6": ("step-4",),
    }
    assert torch.equal(manager.load()["model"]["frozen"], torch.arange(65536.0))


@pytest.mark.parametrize("state", [small(9), b"nine"])
def test_somebody_else_s_checkpoint_is_replaced_only_if_that_is_asked_for(root: Path, state: Any) -> None:
    theirs = small(7)
    dcp.save(theirs, checkpoint_id=root / "step-9")
    manager = CheckpointManager(root)
    with pytest.raises(CheckpointExistsError, match="step-9"):
        manager.save(state, step=9).result(LIMIT)
    found = {"weight": torch.zeros(4)}
    dcp.load(found, checkpoint_id=root / "step-9")
    assert torch.equal(found["weight"], theirs["weight"])
    manager.save(state, step=9, overwrite=True).result(LIMIT)
    assert [one.step for one in manager.all()] == [9]


def test_what_there_is_instead_of_what_was_asked_for_is_told(root: Path) -> None:
    dcp.save(small(50), checkpoint_id=root / "step-50")
    manager = CheckpointManager(root)
    for which in ("latest", 50):
        with pytest.raises(CheckpointNotFoundError, match="step-50: of somebody else"):
            manager.load(which)
    saved(manager, 60, checkpoint_type="model_only")
    with pytest.raises(CheckpointNotFoundError, match="step-60-model: of parts, which load by their step"):
        manager.load("latest")
    assert "weight" in manager.load(60)["model"]


def test_a_failure_that_nobody_asked_for_is_told_by_the_next_save_or_by_wait_whichever_comes_first(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save(b"1", step=1).result(LIMIT)
    fails_to_save(manager, root, 2)
    with pytest.raises(StorageError, match="step-2"):
        manager.save(b"3", step=3)
    manager.wait()
    assert [one.step for one in manager.all()] == [1]
    fails_to_save(manager, root, 4)
    with pytest.raises(StorageError, match="step-4"):
        manager.wait()
    manager.save(b"5", step=5).result(LIMIT)


def test_a_failure_that_comes_after_the_next_save_began_is_not_lost(root: Path) -> None:
    manager = CheckpointManager(root)
    root.mkdir()
    (root / "step-1").write_text("a file in the way")
    manager.save(small(1), step=1)  # fails while the next ones are being handed over, or before
    told = 0
    for step in (2, 3, 4):
        try:
            manager.save(small(step), step=step)
        except StorageError:
            told += 1
    try:
        manager.wait()
    except StorageError:
        told += 1
    assert told == 1


def test_a_failure_is_told_to_the_manager_whose_it_was_and_to_no_other(root: Path, tmp_path: Path) -> None:
    one, other = CheckpointManager(root), CheckpointManager(tmp_path / "other")
    one.save(b"1", step=1).result(LIMIT)
    fails_to_save(one, root, 2)
    other.save(b"1", step=1).result(LIMIT)
    async_save(small(1), checkpoint_id=tmp_path / "plain").result(LIMIT)
    with pytest.raises(StorageError, match="step-2"):
        one.wait()


def test_a_rollback_to_a_step_that_is_not_there_takes_nothing_back(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 100, 200, 300)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 20 "):
        manager.rollback(20)
    assert [one.step for one in manager.all()] == [100, 200, 300]
    assert manager.rollback(200) == ["step-300"]
    assert manager.rollback(0) == ["step-100", "step-200"]


INTEGERS = {
    "model": {"weight": torch.arange(6.0)},
    "counts": {0: torch.tensor([1.0]), -3: {"seen": 7, 12: "x"}, "name": 1},
    "lists": [{5: 1}, {}, {"deep": [{}, {9: torch.ones(2)}]}, {}],
    "empty": {},
    "below": {"a": {"b": {}}},
    "nothing": [],
    "tuple": ({1: 2}, {}),
}


def test_integer_keys_and_empty_dicts_come_back_as_they_were(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save(INTEGERS, step=1).result(LIMIT)
    assert_same(manager.load(), INTEGERS)
    grown: dict[str, Any] = {"model": {"weight": torch.zeros(6)}, "counts": {}, "lists": [], "below": {}, "empty": {}}
    manager.load("latest", grown)
    assert_same(grown, {key: INTEGERS[key] for key in grown})


def test_keys_of_a_state_that_is_given_stay_as_they_are(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save({"held": {0: torch.ones(2), 1: torch.ones(3)}}, step=1).result(LIMIT)
    for key in (0, "0"):
        state = {"held": {key: torch.zeros(2)}}
        manager.load(1, state)
        assert_same(state, {"held": {key: torch.ones(2)}})


def test_an_optimizer_s_own_state_dict_goes_through_a_manager_unharmed(root: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(root)
    manager.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, step=1).result(LIMIT)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    template = {"model": torch.nn.Linear(3, 2).state_dict(), "optimizer": fresh.state_dict()}
    for loaded in (manager.load(), manager.load(1, template)):
        other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
        other.load_state_dict(loaded["optimizer"])
        assert_same(other.state_dict(), optimizer.state_dict())


def test_plain_readers_load_what_has_integer_keys(root: Path) -> None:
    CheckpointManager(root).save({"held": {0: torch.ones(2)}}, step=1).result(LIMIT)
    state = {"held": {0: torch.zeros(2)}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(root / "step-1"))
    assert torch.equal(state["held"][0], torch.ones(2))


def test_a_key_that_will_come_back_as_text_is_told_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(root)
    for step in (1, 2):
        manager.save({"held": {(1, 2): torch.ones(1)}}, step=step).result(LIMIT)
    told = [record.getMessage() for record in caplog.records if "is saved as text" in record.getMessage()]
    assert len(told) == 1 and "(held) has the key (1, 2)" in told[0]


@pytest.mark.parametrize("kind", ["full", "bytes"])
def test_a_new_manager_of_a_run_that_was_deleted_begins_anew(root: Path, kind: str) -> None:
    manager = CheckpointManager(root)
    saved(manager, 1)
    shutil.rmtree(root)
    again = CheckpointManager(root)
    again.save(b"1" if kind == "bytes" else small(1), step=1).result(LIMIT)
    assert [one.step for one in again.all()] == [1]
    another_process_claims(root)
    with pytest.raises(StaleGenerationError):
        CheckpointManager(root).save(small(2), step=2).result(LIMIT)


def test_two_holders_of_one_name_let_go_for_themselves(root: Path) -> None:
    manager = CheckpointManager(root, keep_count=1)
    saved(manager, 1)
    with manager.hold(1, "evaluation"):
        with CheckpointManager(root).hold(1, "evaluation"):
            pass
        saved(manager, 2)
        assert [(one.folder, one.pins) for one in manager.listed()] == [("step-1", ("evaluation",)), ("step-2", ())]
    saved(manager, 3)
    assert [one.step for one in manager.all()] == [3]


def test_what_somebody_who_is_gone_holds_can_be_released(root: Path) -> None:
    manager = CheckpointManager(root, keep_count=1)
    saved(manager, 1)
    dead = [manager.hold(1, "evaluation 2.5") for _ in range(2)]
    for hold in dead:
        hold.__enter__()
    manager._run.pin("step-1", "of before there were nonces")
    assert manager.release(1, "evaluation") == 0
    assert manager.release(1, "evaluation 2.5") == 2
    saved(manager, 2)
    assert [one.step for one in manager.all()] == [1, 2]
    assert manager.release(1, "of before there were nonces") == 1
    saved(manager, 3)
    assert [one.step for one in manager.all()] == [3]


def test_what_somebody_holds_is_not_replaced(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 1)
    with manager.hold(1, "evaluation"):
        with pytest.raises(CheckpointError, match=r'"evaluation" holds it.*release\(1, "evaluation"\)'):
            saved(manager, 1, overwrite=True)
        with pytest.raises(CheckpointError, match="holds it"):
            manager.save(b"x", step=1, overwrite=True).result(LIMIT)
    saved(manager, 1, overwrite=True)


def test_a_hold_that_fails_leaves_nothing_behind(root: Path) -> None:
    manager = CheckpointManager(root)
    saved(manager, 1)
    with pytest.raises(CheckpointNotFoundError), manager.hold(99, "evaluation"):
        pass
    assert sorted(path.name for path in root.glob("step-*")) == ["step-1"]


def test_looking_makes_nothing(root: Path) -> None:
    manager = CheckpointManager(root, keep_count=1)
    manager.apply_retention()
    assert manager.rollback(0) == [] and manager.release(1, "me") == 0
    assert manager.retention_plan() == [] and manager.latest() is None
    for ask in (lambda: manager.rollback(3), lambda: manager.load(), lambda: manager.verify(1)):
        with pytest.raises(CheckpointNotFoundError):
            ask()
    assert not root.exists()


def test_records_of_starts_do_not_pile_up(root: Path) -> None:
    for _ in range(40):
        another_process_claims(root)
    records = sorted(path.name for path in (root / ".strata/generations").iterdir())
    assert [int(name) for name in records] == list(range(25, 41))


def test_a_process_that_only_applies_the_policy_does_not_fence_off_the_training(root: Path) -> None:
    training = CheckpointManager(root)
    saved(training, 1, 2)
    code = "import sys; from torch_strata import CheckpointManager as M; M(sys.argv[1], keep_count=1).apply_retention()"
    in_another_process(code, root)
    assert [one.step for one in training.all()] == [2]
    saved(training, 3)
    assert [one.step for one in training.all()] == [2, 3]


def in_another_process(code: str, *arguments: object) -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, timeout=120)


def test_a_fork_cannot_take_the_run_of_its_parent_by_accident(root: Path) -> None:
    code = """if True:
        import os, sys
        from torch_strata import CheckpointManager
        from torch_strata.errors import ForkedProcessError
        manager = CheckpointManager(sys.argv[1])
        manager.save(b"1", step=1).result()
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (lambda: manager.save(b"2", step=2), lambda: manager.rollback(0), manager.apply_retention):
                try:
                    use()
                except ForkedProcessError:
                    refused += 1
            os._exit(refused if manager.load(1) == b"1" else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        manager.save(b"2", step=2).result()
    """
    in_another_process(code, root)
    assert [one.step for one in CheckpointManager(root).all()] == [1, 2]


def test_a_manager_made_before_the_fork_serves_a_child_that_alone_saves(root: Path) -> None:
    code = """if True:
        import os, sys
        from torch_strata import CheckpointManager
        manager = CheckpointManager(sys.argv[1])
        child = os.fork()
        if child == 0:
            manager.save(b"1", step=1).result()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert manager.load() == b"1"
    """
    in_another_process(code, root)


class App:
    def __init__(self, value: float) -> None:
        self.net = torch.nn.Linear(3, 2)
        self.seen = {int(value): value}
        torch.nn.init.constant_(self.net.weight, value)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "seen": dict(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.seen = state["seen"]


class Blank(App):
    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "seen": {}}


def test_a_stateful_is_loaded_as_it_is_saved(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save(App(3), step=3).result(LIMIT)
    manager.save({"app": App(4)}, step=4).result(LIMIT)
    whole, inside = Blank(0), {"app": Blank(0)}
    assert manager.load(3, whole) is whole
    manager.load(4, inside)
    for app, value in ((whole, 3), (inside["app"], 4)):
        assert app.seen == {value: value} and torch.all(app.net.weight == value)
    with pytest.raises(ConfigError, match="expected a state dict or a Stateful, found a list"):
        manager.load(3, [1])


def test_bytes_are_not_loaded_into_a_state(root: Path) -> None:
    manager = CheckpointManager(root)
    manager.save(b"1", step=1).result(LIMIT)
    with pytest.raises(LayoutMismatchError, match="holds bytes"):
        manager.load("latest", small(0))
    assert manager.load() == b"1"


def test_parts_are_held_and_verified_by_their_type(root: Path) -> None:
    manager = CheckpointManager(root, keep_count=1)
    for step in (1, 2):
        manager.save(state_of(step), step=step, checkpoint_type="model_only").result(LIMIT)
    with pytest.raises(CheckpointNotFoundError):
        manager.verify(2)
    assert manager.verify(2, checkpoint_type="model_only").is_sound
    with manager.hold(2, "serving", checkpoint_type="model_only"):
        saved(manager, 3, checkpoint_type="model_only")
        assert [one.pins for one in manager.listed()] == [("serving",), ()]
    with pytest.raises(ConfigError, match="expected full, incremental"):
        manager.hold(2, "serving", checkpoint_type="half")
    assert os.path.isdir(root / "step-2-model")


def save_seeded(rank: int, root: str) -> bytes:
    torch.manual_seed(77 + rank)
    manager = CheckpointManager(root)
    for step in (1, 2, 3):
        manager.save({"step": step, "counts": {rank: step}}, step=step).result(LIMIT)
    return torch.get_rng_state().numpy().tobytes()


def load_counts(rank: int, root: str) -> Any:
    return CheckpointManager(root).load()


def test_damage_in_one_rank_s_generators_sends_all_to_the_same_step(tmp_path: Path, root: Path) -> None:
    _, generator = run_ranks(tmp_path, 2, save_seeded, str(root))
    (path,) = (root / "step-3").glob("__1_*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(generator) + 100] ^= 1
    path.write_bytes(data)
    for loaded in run_ranks(tmp_path, 2, load_counts, str(root)):
        assert loaded == {"step": 2, "counts": {0: 2, 1: 2}}
    assert [one.folder for one in CheckpointManager(root).listed() if one.is_quarantined] == ["step-3"]


def ask_for_different_things(rank: int, root: str) -> list[str]:
    manager, told = CheckpointManager(root), []
    state = {"step": 0} if rank else None
    for ask in (lambda: manager.load(2 + rank), lambda: manager.load(2, state), lambda: manager.rollback(1 + rank)):
        try:
            ask()
        except CheckpointError as error:
            told.append(str(error))
    return told


def test_ranks_that_ask_for_different_things_are_refused_on_all(tmp_path: Path, root: Path) -> None:
    run_ranks(tmp_path, 2, save_seeded, str(root))
    head = "ranks ask for different things: "
    expected = [
        head + "load(2) without a state on rank 0, load(3) without a state on rank 1",
        head + "load(2) without a state on rank 0, load(2) with a state on rank 1",
        head + "rollback(1) on rank 0, rollback(2) on rank 1",
    ]
    assert run_ranks(tmp_path, 2, ask_for_different_things, str(root)) == [expected] * 2
    assert [one.step for one in CheckpointManager(root).all()] == [1, 2, 3]


def test_integer_keys_come_through_files_of_torch_save(root: Path, tmp_path: Path) -> None:
    CheckpointManager(root).save(INTEGERS, step=1).result(LIMIT)
    export_torch(root / "step-1", tmp_path / "whole.pt")
    export_torch(root / "step-1", tmp_path / "counts.pt", key="counts")
    import_checkpoint(tmp_path / "whole.pt", tmp_path / "imported")
    export_torch(tmp_path / "imported", tmp_path / "again.pt")
    whole, again = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "again.pt"))
    whole.pop("strata_rng"), again.pop("strata_rng")
    assert_same(whole, INTEGERS)
    assert_same(again, INTEGERS)
    assert_same(torch.load(tmp_path / "counts.pt", weights_only=True), INTEGERS["counts"])
