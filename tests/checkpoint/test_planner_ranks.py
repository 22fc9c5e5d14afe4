"""Our planners on real ranks: sharded, replicated, and ranks whose states differ."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.ranks import run_ranks
from torch_strata import StrataLoadPlanner, StrataReader, StrataSavePlanner, StrataWriter
from torch_strata.checkpoint import planning
from torch_strata.checkpoint.planning import local_plan, structure_key

LARGE = (6000, 1024)  # 24 MB: replicas share its rows


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator)


def sharded_state(kind: str, *, zero: bool = False) -> dict[str, Any]:
    """A state of four ranks; `kind` names how it is laid out."""
    if kind == "fsdp":
        mesh, placements = init_device_mesh("cpu", (4,)), [Shard(0)]
    elif kind == "hsdp":
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    elif kind == "tp":
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
    else:
        mesh, placements = init_device_mesh("cpu", (4,)), [Replicate()]
    shapes = {"even": (8, 6), "uneven": (7, 5), "few": (2, 3), "large": LARGE}
    state: dict[str, Any] = {
        name: distribute_tensor(whole(name, shape), mesh, placements) for name, shape in shapes.items()
    }
    state |= {"plain": whole("plain", (30, 3)), "step": torch.tensor(4.0), "lr": 0.5}
    if zero:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        state["lr"] = 0.0
    return state


def save_and_load(rank: int, place: str, kind: str, save_with: str) -> tuple[int, int]:
    state = sharded_state(kind)
    writer = StrataWriter(place) if save_with == "strata" else FileSystemWriter(place)
    metadata = None
    for _ in range(2):
        metadata = dcp.save(state, storage_writer=writer, planner=StrataSavePlanner())
        dist.barrier()
    for reader, planner in (
        (StrataReader(place), StrataLoadPlanner()),
        (StrataReader(place), None),
        (FileSystemReader(place), StrataLoadPlanner()),
        (FileSystemReader(place), None),
    ):
        out = sharded_state(kind, zero=True)
        dcp.load(out, storage_reader=reader, planner=planner)
        assert out["lr"] == 0.5
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                mine, wanted = (t.to_local() if hasattr(t, "to_local") else t for t in (out[name], value))
                assert torch.equal(mine, wanted), (kind, name, rank)
    local_bytes = writer.stats.written_bytes if isinstance(writer, StrataWriter) else 0
    return local_bytes, len(metadata.state_dict_metadata["large"].chunks)


@pytest.mark.parametrize("save_with", ["strata", "stock"])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp", "replicated"])
def test_four_ranks_save_and_load_what_they_hold(tmp_path, kind, save_with):
    results = run_ranks(tmp_path, 4, save_and_load, str(tmp_path / "c"), kind, save_with)
    assert len({chunks for _, chunks in results}) == 1, "every rank is told the same metadata"
    if kind in ("hsdp", "replicated") and save_with == "strata":
        written = [size for size, _ in results]
        assert max(written) < 1.5 * min(written), "replicas share the writing"


def one_changes(rank: int, place: str) -> list[bool]:
    counts = []
    for step in range(4):
        state = {"shared": torch.full((4,), float(step)), f"own{rank}": torch.ones(3)}
        if rank == 1 and step >= 2:
            state["only here"] = torch.full((2,), 7.0)
        dcp.save(state, storage_writer=StrataWriter(place), planner=StrataSavePlanner())
        dist.barrier()
        out: dict[str, Any] = {"shared": torch.zeros(4), "only here": torch.zeros(2)}
        known = "only here" in FileSystemReader(place).read_metadata().state_dict_metadata
        if not known:
            del out["only here"]
        dcp.load(out, storage_reader=StrataReader(place), planner=StrataLoadPlanner())
        assert out["shared"][0] == step and (not known or out["only here"][0] == 7)
        counts.append(known)
    return counts


def test_a_change_on_one_rank_is_planned_by_all(tmp_path):
    assert run_ranks(tmp_path, 2, one_changes, str(tmp_path / "c")) == [[False, False, True, True]] * 2


def keys(rank: int) -> list[bytes]:
    mesh = init_device_mesh("cpu", (2,))
    base = whole("w", (4, 4))
    return [structure_key({"w": distribute_tensor(base, mesh, [place])}) for place in (Shard(0), Shard(1), Replicate())]


def test_the_key_changes_with_the_placement_and_the_rank(tmp_path):
    first, second = run_ranks(tmp_path, 2, keys)
    assert len(set(first)) == 3
    assert first[0] != second[0] and first[2] == second[2]


def equal_plans(rank: int, kind: str) -> bool:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = sharded_state(kind)
    stock, ours = DefaultSavePlanner(), StrataSavePlanner()
    for planner in (stock, ours):
        planner.set_up_planner(state, None, rank == 0)
    assert isinstance(local_plan(state).items, planning.PackedItems)
    return list(ours.create_local_plan().items) == stock.create_local_plan().items


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp", "replicated"])
def test_each_rank_offers_what_dcp_offers(tmp_path, kind):
    assert all(run_ranks(tmp_path, 4, equal_plans, kind))
