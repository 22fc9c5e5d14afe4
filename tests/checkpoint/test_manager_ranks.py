"""CheckpointManager on real ranks: sharded states over several steps, and one rank's trouble is told to all."""

import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import flip
from torch_strata import CheckpointError, CorruptionError, StorageError
from torch_strata.checkpoint import restore as restore_module
from torch_strata.checkpoint.manager import CheckpointManager

LIMIT = timedelta(seconds=60)
FROZEN = (1024, 300)  # 1.2 MB; the generators of a rank take 25 KB, which are written each time


def whole(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(7, 30, generator=generator),
        "frozen": torch.arange(FROZEN[0] * FROZEN[1], dtype=torch.float32).reshape(FROZEN),
    }


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Shards of a model, a plain value, and what each rank alone has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole(step).items()}
    history = [{"step": done} for done in range(step)]
    return {"model": model, "step": step, "history": history, "loader": {f"rank{rank}": {"seen": [step, rank]}}}


def empty_state(rank: int) -> dict[str, Any]:
    state = state_of(rank, 0)
    for value in state["model"].values():
        value.to_local().fill_(-1)
    return {**state, "history": [], "loader": {f"rank{rank}": {"seen": []}}}


def holds(state: dict[str, Any], step: int) -> bool:
    expected = whole(step)
    history = [{"step": done} for done in range(step)]
    return (state["step"], state["history"]) == (step, history) and all(
        torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])
        for name, value in state["model"].items()
    )


def save_steps(rank: int, root: str, steps: list[int], **settings: Any) -> list[int]:
    """A full checkpoint first, then incremental ones."""
    with CheckpointManager(root, **settings) as manager:
        for number, step in enumerate(steps):
            kind = "incremental" if number else "full"
            found = manager.save(state_of(rank, step), step=step, checkpoint_type=kind).result(LIMIT)
            assert found is not None and (found.step, found.checkpoint_type) == (step, kind)
        return [found.size_bytes for found in manager.all()]


def load_latest(rank: int, root: str) -> tuple[bool, Any, list[int]]:
    manager = CheckpointManager(root)
    state = empty_state(rank)
    known = manager.load("latest", {key: value for key, value in state.items() if key != "loader"})
    return holds(known, known["step"]), known["step"], [found.step for found in manager.all()]


@pytest.mark.parametrize(("saving", "loading"), [(3, 2), (2, 4), (2, 1)])
def test_steps_are_saved_retained_by_one_rank_and_loaded_by_another_number(tmp_path, saving, loading):
    root = str(tmp_path / "run")
    sizes = run_ranks(tmp_path, saving, save_steps_keeping_two, root)
    assert len({tuple(each) for each in sizes}) == 1, "every rank sees the same run"
    assert max(sizes[0]) < 200_000, "the frozen 1.2 MB are referred to"
    for is_same, step, steps in run_ranks(tmp_path, loading, load_latest, root):
        assert (is_same, step, steps) == (True, 9, [7, 9])


def save_steps_keeping_two(rank: int, root: str) -> list[int]:
    return save_steps(rank, root, [1, 3, 7, 9], keep_count=2)


def train(rank: int, root: str, first: int, last: int) -> list[Any]:
    """FSDP2 training, resumed where there is something to resume from; the model after the last step."""
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    manager = CheckpointManager(root)
    if manager.latest() is not None:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "history": []}
        manager.load("latest", state)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["history"] == [{"step": step} for step in range(first)]
    for step in range(first, last):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(net, optimizer)
        history = [{"step": done} for done in range(step + 1)]
        manager.save({"model": model_state, "optimizer": optimizer_state, "history": history}, step=step)
    manager.wait()
    return [parameter.full_tensor().tolist() for parameter in net.parameters()] + [
        random.random(),
        torch.rand(1).item(),
    ]


def test_training_that_was_interrupted_ends_like_one_that_was_not(tmp_path):
    at_once = run_ranks(tmp_path, 2, train, str(tmp_path / "a"), 0, 5)
    run_ranks(tmp_path, 2, train, str(tmp_path / "b"), 0, 3)
    resumed = run_ranks(tmp_path, 2, train, str(tmp_path / "b"), 3, 5)
    assert [ours[:-2] for ours in resumed] == [theirs[:-2] for theirs in at_once]
    assert [ours[-1] for ours in resumed] == [theirs[-1] for theirs in at_once]


def draws() -> tuple[float, float]:
    return torch.rand(1).item(), random.random()


def save_generators(rank: int, root: str) -> Any:
    torch.manual_seed(rank), random.seed(rank)
    with CheckpointManager(root) as manager:
        manager.save(state_of(rank, 1), step=1)
    return draws()


def load_generators(rank: int, root: str) -> Any:
    torch.manual_seed(50 + rank), random.seed(50 + rank)
    untouched = draws()
    torch.manual_seed(50 + rank), random.seed(50 + rank)
    state = empty_state(rank)
    del state["loader"]
    CheckpointManager(root).load(1, state)
    return draws(), untouched


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path):
    root = str(tmp_path / "run")
    expected = run_ranks(tmp_path, 2, save_generators, root)
    assert expected[0] != expected[1]
    found = run_ranks(tmp_path, 3, load_generators, root)
    assert [drawn for drawn, _ in found[:2]] == expected
    drawn, untouched = found[2]
    assert drawn == untouched, "a rank that there was not goes on with its own"


def load_positions(rank: int, root: str, template: bool) -> Any:
    state: dict[str, Any] | None = {"loader": {}} if template else None
    loaded = CheckpointManager(root).load("latest", state)
    assert state is None or loaded is state
    return loaded["loader"], {} if template else {name: value.tolist() for name, value in loaded["model"].items()}


@pytest.mark.parametrize("template", [True, False])
def test_what_each_rank_carries_comes_back_on_all(tmp_path, template):
    root = str(tmp_path / "run")
    run_ranks(tmp_path, 3, save_one, root)
    expected = {} if template else {name: value.tolist() for name, value in whole(5).items()}
    for positions, model in run_ranks(tmp_path, 2, load_positions, root, template):
        assert positions == {f"rank{rank}": {"seen": [5, rank]} for rank in range(3)}
        assert model == expected


def save_one(rank: int, root: str) -> None:
    save_steps(rank, root, [5])


class Odd:
    def __reduce__(self) -> Any:
        raise ValueError("not today")


def save_what_one_rank_cannot(rank: int, root: str) -> Any:
    manager = CheckpointManager(root, timeout=timedelta(seconds=20))
    manager.save(state_of(rank, 1), step=1).result(LIMIT)
    state = {**state_of(rank, 2), f"more{rank}": Odd() if rank == 1 else 0}
    started, failure = time.monotonic(), None
    try:
        manager.save(state, step=2).result(LIMIT)
    except CheckpointError as error:
        failure = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    between = sorted(path.name for path in Path(root).iterdir() if not path.name.startswith("."))
    dist.barrier()
    manager.save(state_of(rank, 2), step=2).result(LIMIT)
    out = empty_state(rank)
    manager.load("latest", out)
    return failure, seconds, between, holds(out, 2)


def test_what_one_rank_cannot_save_fails_on_all_leaves_nothing_and_can_be_saved_again(tmp_path):
    for failure, seconds, between, is_same in run_ranks(tmp_path, 3, save_what_one_rank_cannot, str(tmp_path / "run")):
        assert failure is not None and "more1" in failure and "not today" in failure
        assert seconds < 20 and between == ["step-1"] and is_same


def flip_in_shard_of(rank: int, folder: Path) -> None:
    """One bit in the middle of what a rank wrote."""
    (path,) = folder.glob(f"__{rank}_*.distcp")
    flip(path)


def load_past_damage(rank: int, root: str, template: bool) -> Any:
    manager = CheckpointManager(root)
    state = {**empty_state(rank), "loader": {}} if template else None
    loaded = manager.load("latest", state)
    return holds(loaded, loaded["step"]), loaded["step"], loaded["loader"], [found.step for found in manager.all()]


@pytest.mark.parametrize("template", [True, False])
def test_all_ranks_fall_back_together_though_one_alone_sees_the_damage(tmp_path, template):
    root = tmp_path / "run"
    run_ranks(tmp_path, 2, save_full, str(root))
    flip_in_shard_of(1, root / "step-3")
    expected = {f"rank{rank}": {"seen": [2, rank]} for rank in range(2)}
    for is_same, step, positions, steps in run_ranks(tmp_path, 2, load_past_damage, str(root), template):
        assert (is_same, step, positions, steps) == (True, 2, expected, [1, 2])


def save_full(rank: int, root: str) -> None:
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(rank, step), step=step)


def load_where_one_rank_fails(rank: int, root: str, at: str, template: bool) -> Any:
    """On rank 1 the first call of what `restore` knows as `at` fails: once of damage, once of the store."""
    save_full(rank, root)
    dist.barrier()
    original = getattr(restore_module, at)
    failures: list[Exception] = []

    def failing(*args: Any, **settings: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*args, **settings)

    setattr(restore_module, at, failing)
    manager, outcomes = CheckpointManager(root), []
    for error in (CorruptionError("seen by one rank only"), StorageError("the network was away on one rank")):
        failures.extend([error] if rank == 1 else [])
        try:
            loaded = manager.load("latest", empty_state(rank) if template else None)
            outcomes.append((loaded["step"], holds(loaded, loaded["step"])))
        except StorageError as failure:
            outcomes.append(str(failure))
    return outcomes


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("at", ["StrataReader", "restore_rng"])
def test_an_error_of_one_rank_before_or_after_reading_is_one_of_all(tmp_path, at, template):
    told = run_ranks(tmp_path, 2, load_where_one_rank_fails, str(tmp_path / "run"), at, template)
    assert told == [[(2, True), "the network was away on one rank"]] * 2


def take_back(rank: int, root: str) -> Any:
    manager = CheckpointManager(root, keep_count=5)
    for step in (1, 2, 3):
        manager.save(state_of(rank, step), step=step)
    left = manager.rollback(1)
    manager.save(state_of(rank, 2), step=2, epoch=1).result(LIMIT)
    manager.apply_retention()
    dist.barrier()
    manager.save(state_of(rank, 4), step=4).result(LIMIT)
    out = empty_state(rank)
    manager.load("latest", out)
    return left, [(found.step, found.epoch) for found in manager.all()], holds(out, 4)


def test_a_run_is_taken_back_on_all_ranks(tmp_path):
    for left, steps, is_same in run_ranks(tmp_path, 2, take_back, str(tmp_path / "run")):
        assert sorted(left) == ["step-2", "step-3"]
        assert (steps, is_same) == ([(1, 0), (2, 1), (4, 0)], True)


def save_parts(rank: int, root: str) -> None:
    with CheckpointManager(root) as manager:
        model = state_of(rank, 6)["model"]
        state = {"model": model, "optimizer": {"exp_avg": model["weight"]}}
        manager.save(state, step=6, checkpoint_type="model_only")
        manager.save(state, step=6, checkpoint_type="optimizer_only")


def load_parts(rank: int, root: str) -> Any:
    model = empty_state(rank)["model"]
    state = {"model": model, "optimizer": {"exp_avg": distribute_like(model["weight"])}}
    loaded = CheckpointManager(root).load(6, state)
    return [
        torch.equal(value.full_tensor(), whole(6)[name])
        for value, name in ((loaded["model"]["weight"], "weight"), (loaded["optimizer"]["exp_avg"], "weight"))
    ]


def distribute_like(value: DTensor) -> DTensor:
    return distribute_tensor(torch.zeros(value.shape), value.device_mesh, value.placements)


def test_parts_of_a_step_load_sharded(tmp_path):
    root = str(tmp_path / "run")
    run_ranks(tmp_path, 2, save_parts, root)
    assert run_ranks(tmp_path, 3, load_parts, root) == [[True, True]] * 3
