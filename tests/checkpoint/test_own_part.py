"""From the second save on a rank copies only what it writes, and whatever changes meanwhile, what is saved is right."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import same_bits
from torch_strata import CheckpointError, StrataReader, StrataSavePlanner, StrataWriter, async_save, verify
from torch_strata.checkpoint import _arena
from torch_strata.checkpoint._assignment import assignment_of, rows_only
from torch_strata.checkpoint._leaves import Leaves
from torch_strata.checkpoint.planning import finished, local_plan, merge
from torch_strata.checkpoint.staging import snapshot

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _new_arena(monkeypatch):
    monkeypatch.setattr(_arena, "_arenas", {})


def weights(seed: float, elements: int = MIB) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.float32) * 0.5 + seed


class Replicas:
    """A model on every rank, its optimizer's state with it, and something of each rank's own."""

    def __init__(self, rank: int, seed: float = 0.0) -> None:
        self.model = {"large": weights(seed, 8 * MIB).view(512, -1), "turned": weights(seed + 1).view(1024, -1).t()}
        self.model |= {f"layer.{i}": weights(seed + i, 50_000) for i in range(12)}
        self.model["tied"] = self.model["layer.3"]
        self.own = weights(seed + 100 + rank, 1000)
        self.in_tuple = weights(seed + 7, 300)
        self.rank = rank

    def state(self) -> dict[str, Any]:
        lists = [self.model["layer.1"], {"x": self.model["layer.2"]}]
        own = {f"own{self.rank}": self.own, "pair": (self.in_tuple, 3), "step": float(self.own[0])}
        return {"model": self.model, "lists": lists, **own}

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.values(), self.own, self.in_tuple]

    def change(self, by: float) -> None:
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in self.tensors()}.values():
                tensor += by


def loaded(place: str, rank: int) -> list[torch.Tensor]:
    out = Replicas(rank, -1000.0)
    state = out.state()
    dcp.load(state, storage_reader=StrataReader(place), no_dist=True)
    out.in_tuple = state["pair"][0]  # a tuple is a value to DCP
    return out.tensors()


def is_saved(place: str, rank: int, expected: list[torch.Tensor]) -> bool:
    return all(same_bits(*pair) for pair in zip(loaded(place, rank), expected, strict=True))


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def save(state: dict[str, Any], place: str, **options: Any) -> Any:
    return async_save(state, checkpoint_id=place, **options)


def save_three_times(rank: int, place: str) -> Any:
    training, staged, right = Replicas(rank), [], []
    for i in range(3):
        expected = clones(training.tensors())
        handle = save(training.state(), f"{place}-{i}")
        training.change(1.0)  # at once
        staged.append(handle.result().staged_bytes)
        dist.barrier()
        right.append(is_saved(f"{place}-{i}", rank, expected))
    return staged, right


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_share_the_copying_from_the_second_save_on(tmp_path, world):
    results = run_ranks(tmp_path, world, save_three_times, str(tmp_path / "c"))
    of_one = sum({id(t): t.nbytes for t in Replicas(0).tensors()}.values())
    # A tied tensor has two names, which two ranks may write; "pair" is a value on every rank.
    most = of_one // world + 4 * MIB
    for staged, right in results:
        assert right == [True, True, True]
        assert staged[0] == of_one and staged[1] == staged[2] <= most
    assert sum(staged[1] for staged, _ in results) < of_one + MIB * world
    assert all(verify(tmp_path / f"c-{i}").problems == () for i in range(3))


def save_sharded(rank: int, place: str, overlapped: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    local = torch.nn.Parameter(weights(float(mesh.get_coordinate()[1]), 3 * MIB).view(768, -1))
    parameter = DTensor.from_local(local, mesh, [Replicate(), Shard(0)])
    plain = torch.nn.Parameter(weights(5.0, 2 * MIB))
    optimizer = torch.optim.SGD([local, plain], lr=1.0)
    staged, right = [], []
    for i in range(3):
        expected = clones([local.detach(), plain.detach()])
        writer = StrataWriter(f"{place}-{i}", overlap=optimizer if overlapped else ())
        handle = async_save({"w": parameter, "p": plain}, storage_writer=writer)
        local.grad, plain.grad = torch.ones_like(local), torch.ones_like(plain)
        optimizer.step()
        staged.append(handle.result().staged_bytes)
        dist.barrier()
        out = {
            "w": DTensor.from_local(torch.zeros_like(local), mesh, [Replicate(), Shard(0)]),
            "p": torch.zeros(2 * MIB),
        }
        dcp.load(out, storage_reader=StrataReader(f"{place}-{i}"))
        right.append([same_bits(*pair) for pair in zip([out["w"].to_local(), out["p"]], expected, strict=True)])
    return staged, right


@pytest.mark.parametrize("overlapped", [False, True], ids=["at the call", "overlapped"])
def test_shards_that_are_replicated_are_copied_once_too(tmp_path, overlapped):
    results = run_ranks(tmp_path, 4, save_sharded, str(tmp_path / "c"), overlapped)
    for staged, right in results:
        assert right == [[True, True]] * 3
        assert staged[0] == 20 * MIB and staged[1] == staged[2] < 12 * MIB
    assert sum(staged[1] for staged, _ in results) == 32 * MIB  # two shards and the plain one


def change_one_rank(rank: int, place: str, changed: int, how: str) -> Any:
    training, told, staged, right = Replicas(rank), [], [], []
    for i in range(5):
        state = training.state()
        if rank == changed and i == 2:
            if how == "more":
                state["more"] = weights(1.0)
            if how == "fewer":
                state["model"] = {k: v for k, v in training.model.items() if k.startswith("large")}
        expected = clones(training.tensors())
        handle = save(state, f"{place}-{i}")
        training.change(1.0)
        error = handle.exception()
        told.append("" if error is None else f"{type(error).__name__}: {error}")
        staged.append(0 if error else handle.result().staged_bytes)
        dist.barrier()
        right.append(bool(error) or is_saved(f"{place}-{i}", rank, expected))
    return told, staged, right


@pytest.mark.parametrize("changed", [0, 1])
def test_a_rank_with_more_than_before_copies_all_of_it_and_the_others_their_part(tmp_path, changed):
    results = run_ranks(tmp_path, 3, change_one_rank, str(tmp_path / "c"), changed, "more")
    for rank, (told, staged, right) in enumerate(results):
        assert told == [""] * 5 and right == [True] * 5
        assert staged[2] == (staged[0] + 4 * MIB if rank == changed else staged[1])
        assert staged[3] == staged[0]  # what the others copied holds for that save alone
        assert staged[4] == staged[1]
    assert all(verify(tmp_path / f"c-{i}").problems == () for i in range(5))


@pytest.mark.parametrize("changed", [0, 2])
def test_what_only_the_rank_that_wrote_it_last_held_a_copy_of_is_named_and_the_next_save_has_it(tmp_path, changed):
    results = run_ranks(tmp_path, 3, change_one_rank, str(tmp_path / "c"), changed, "fewer")
    for told, staged, right in results:
        assert [not error for error in told] == [True, True, False, True, True]
        assert told[2].startswith("CheckpointError: 'model.") and "the next save copies it everywhere" in told[2]
        assert right == [True] * 5
        assert staged[3] == staged[0] and staged[4] == staged[1]
    assert not list((tmp_path / "c-2").rglob("*.distcp"))


def change_all_ranks(rank: int, place: str) -> Any:
    right, staged = [], []
    for i, elements in enumerate([MIB, MIB, 3 * MIB, 3 * MIB, MIB]):
        state = {"w": weights(i, elements), "v": weights(i, 1000), f"own{rank}": weights(rank, 10)}
        handle = save(state, f"{place}-{i}")
        expected = clones(list(state.values()))
        for tensor in state.values():
            tensor.zero_()
        staged.append(handle.result().staged_bytes)
        dist.barrier()
        out = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        dcp.load(out, storage_reader=StrataReader(f"{place}-{i}"), no_dist=True)
        right += [same_bits(*pair) for pair in zip(out.values(), expected, strict=True)]
    return right, staged


def test_a_new_shape_on_all_ranks_is_copied_by_all(tmp_path):
    for right, staged in run_ranks(tmp_path, 2, change_all_ranks, str(tmp_path / "c")):
        assert all(right)
        assert staged[2] == 3 * 4 * MIB + 4040 and staged[4] == staged[0] == 4 * MIB + 4040
        assert staged[1] < staged[0] and staged[3] < staged[2]


def save_without_waiting(rank: int, place: str) -> bool:
    training, chance, saves = Replicas(rank), random.Random(rank), []
    for i in range(12):
        state = training.state()
        if chance.random() < 0.2:
            state[f"now{rank}"] = weights(i, 2000)
        saves.append((f"{place}-{i}", clones(training.tensors()), save(state, f"{place}-{i}")))
        training.change(1.0)
        if chance.random() < 0.5:
            saves[-1][2].result()
    right = []
    for where, expected, handle in saves:
        handle.result()
        right.append(is_saved(where, rank, expected))
    return all(right)


def test_saves_that_overtake_one_another_while_ranks_change_hold_what_was_there_at_their_call(tmp_path):
    assert run_ranks(tmp_path, 3, save_without_waiting, str(tmp_path / "c")) == [True] * 3


def save_with(rank: int, place: str, kind: str) -> Any:
    training = Replicas(rank)
    planners = {
        "DCP's": DefaultSavePlanner,
        "nested": lambda: StrataSavePlanner(flatten_state_dict=False),
        "lowest": lambda: StrataSavePlanner(dedup_save_to_lowest_rank=True),
    }
    # The last one assigns otherwise than the planner before.
    makers = [planners[kind]] * 3 + [StrataSavePlanner]
    state = training.model if kind == "nested" else training.state()
    staged = [save(state, place, planner=make()).result().staged_bytes for make in makers]
    dist.barrier()
    return staged, kind == "nested" or is_saved(place, rank, training.tensors())


@pytest.mark.parametrize(("kind", "shares"), [("DCP's", False), ("nested", False), ("lowest", True)])
def test_only_a_planner_that_is_known_to_repeat_itself_is_relied_on(tmp_path, kind, shares):
    results = run_ranks(tmp_path, 2, save_with, str(tmp_path / "c"), kind)
    for rank, (staged, right) in enumerate(results):
        assert right and staged[0] == staged[3]
        assert staged[1] == staged[2] and (staged[1] < staged[0]) == (shares and rank == 1)


# Without ranks.


def offers(states: list[dict[str, Any]]) -> list[Any]:
    return [local_plan(state) for state in states]


def assignments(states: list[dict[str, Any]]) -> list[Any]:
    plans = offers(states)
    final, _ = merge(plans)
    found = []
    for state, plan, assigned in zip(states, plans, final, strict=True):
        chosen = finished(assigned, plan).items
        names = {name: (name,) for name in state}
        outline = Leaves(state).outline()
        found.append(assignment_of(outline, number=1, options=(True, False), offer=plan, chosen=chosen, names=names))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_whatever_changes_on_some_ranks_each_tensor_is_written_from_copies_or_is_named(seed):
    chance = random.Random(seed)
    world = chance.randint(2, 5)
    tensors = {f"t{i}": torch.empty(chance.choice([7, 5000, 3 * MIB]), device="meta") for i in range(8)}
    states = [{name: t for name, t in tensors.items() if chance.random() < 0.8} for _ in range(world)]
    last = assignments(states)
    changed = [rank for rank in range(world) if chance.random() < 0.4]
    for rank in changed:
        states[rank] = {name: t for name, t in tensors.items() if chance.random() < 0.8}
    plans = [local_plan(state) if rank in changed else last[rank].repeated() for rank, state in enumerate(states)]
    copied: dict[str, list[tuple[int, int]]] = {name: [] for state in states for name in state}
    for rank, state in enumerate(states):
        for name, share in zip(state, [None] * len(state) if rank in changed else last[rank].shares, strict=True):
            whole = [(0, tensors[name].numel())]
            copied[name] += whole if share is None else share
    # Of one assignment, so that they do not overlap unless they are the whole.
    missing = {name for name, rows in copied.items() if sum(n for _, n in set(rows)) < tensors[name].numel()}
    if missing:
        with pytest.raises(CheckpointError) as caught:
            merge(plans)
        assert any(f"'{name}'" in str(caught.value) for name in missing)
        return
    final, metadata = merge(plans)
    written: dict[str, list[tuple[int, int]]] = {name: [] for name in copied}
    for rank, (plan, assigned) in enumerate(zip(plans, final, strict=True)):
        names = list(states[rank])
        for place, item in enumerate(finished(assigned, plan).items):
            chunk = item.tensor_data.chunk
            rows = (chunk.offsets[0], chunk.sizes[0])
            written[item.index.fqn].append(rows)
            share = None if rank in changed else last[rank].shares[names.index(item.index.fqn)]
            assert share is None or rows in share, (rank, item.index.fqn, place)
    for name, rows in written.items():
        ends = [0, *(first + count for first, count in sorted(rows))]
        assert [first for first, _ in sorted(rows)] == ends[:-1] and ends[-1] == tensors[name].numel()
        assert len(metadata.state_dict_metadata[name].chunks) == len(rows)


def test_the_copies_of_a_plan_that_holds_are_all_that_it_needs():
    states = [{f"t{i}": torch.empty(MIB, device="meta") for i in range(9)} for _ in range(3)]
    last = assignments(states)
    final, _ = merge([assignment.repeated() for assignment in last])
    for plan, assignment in zip(final, last, strict=True):
        assert plan.items.key == assignment.copied.key
        assert plan.items.selection.rows.tolist() == assignment.copied.selection.rows.tolist()


class Marked(WriteItem):
    """An item that columns cannot hold."""


def test_where_dcp_has_to_plan_nothing_is_left_to_ranks_that_copied_a_part():
    states = [{"w": torch.empty(MIB, device="meta")} for _ in range(2)]
    partial, other = assignments(states)[0].repeated(), local_plan(states[1])
    (item,) = other.items
    foreign = SavePlan([Marked(item.index, item.type, None, item.tensor_data)], planner_data=other.planner_data)
    with pytest.raises(CheckpointError, match="the next save copies everything"):
        StrataSavePlanner().create_global_plan([partial, foreign])


def test_a_state_of_another_structure_is_copied_whole():
    state = {"a": torch.ones(5), "n": {"b": torch.ones(3, 4)}, "l": [torch.ones(2)], "v": 3}
    (last,) = assignments([{"a": state["a"]}])
    assert snapshot({"a": torch.ones(5)}, last=last).assignment is last
    for other in ({"b": torch.ones(5)}, {"a": torch.ones(6)}, {"a": torch.ones(5).double()}, {"a": 3}, state):
        assert snapshot(other, last=last).assignment is None
    shard = torch.ones(5)
    shard.global_shape = torch.Size((10,))
    assert snapshot({"a": shard}, last=last).assignment is None


def test_what_was_not_copied_cannot_be_written():
    planner = StrataSavePlanner()
    state = {"w": torch.ones(10), "v": torch.ones(2)}
    planner.set_up_planner(state)
    (item, _) = planner.create_local_plan().items
    planner.set_up_planner({"w": rows_only({(0, 5): torch.ones(5)}), "v": state["v"]})
    with pytest.raises(CheckpointError, match="'w': this rank left it to another one"):
        planner.resolve_data(item)
