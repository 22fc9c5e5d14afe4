"""What any mesh saved, any other mesh and a plain process load: FSDP2, HSDP, TP and FSDP2 over TP."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import load
from torch_strata import StrataReader, StrataWriter

# Not divisible by any mesh used here.
SIZES = (7, 11, 5)
MESHES = {
    "plain": (1, 1, 1),
    "fsdp": (1, 2, 1),
    "hsdp": (2, 2, 1),
    "tp": (1, 1, 2),
    "fsdp_tp": (1, 2, 2),
    "fsdp4": (1, 4, 1),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.ReLU(), nn.Linear(SIZES[1], SIZES[2]))


def on_mesh(name: str) -> nn.Module:
    replicas, shards, tensors = MESHES[name]
    net = model()
    if replicas * shards * tensors == 1:
        return net
    mesh = init_device_mesh("cpu", (replicas, shards, tensors), mesh_dim_names=("dp", "fsdp", "tp"))
    if tensors > 1:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if replicas > 1:
        fully_shard(net, mesh=mesh["dp", "fsdp"])
    elif shards > 1:
        fully_shard(net, mesh=mesh["fsdp"])
    return net


def save_on_mesh(rank: int, name: str, place: str) -> None:
    dcp.save(on_mesh(name).state_dict(), storage_writer=StrataWriter(place))


def load_on_mesh(rank: int, name: str, place: str) -> dict[str, Any]:
    state = on_mesh(name).state_dict()
    with torch.no_grad():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            local.fill_(-1)
    dcp.load(state, storage_reader=StrataReader(place))
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).tolist() for k, v in state.items()}


def world(name: str) -> int:
    replicas, shards, tensors = MESHES[name]
    return replicas * shards * tensors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("saved", ["fsdp", "hsdp", "tp", "fsdp_tp"])
def test_every_mesh_loads_what_another_saved(tmp_path, saved):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, world(saved), save_on_mesh, saved, place)
    expected = {key: value.tolist() for key, value in model().state_dict().items()}
    for reader in (StrataReader, FileSystemReader):
        plain = {key: torch.full_like(value, -1) for key, value in model().state_dict().items()}
        dcp.load(plain, storage_reader=reader(place), no_dist=True)
        assert {key: value.tolist() for key, value in plain.items()} == expected, reader
    for loaded in {"fsdp": ["fsdp_tp"], "hsdp": ["fsdp4"], "tp": ["fsdp"], "fsdp_tp": ["tp", "hsdp"]}[saved]:
        for state in run_ranks(tmp_path, world(loaded), load_on_mesh, loaded, place):
            assert state == expected, f"{saved} into {loaded}"


def load_a_row(rank: int, place: str) -> int:
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(1024, 512)
    reader = StrataReader(place)
    dcp.load({"w": DTensor.from_local(local, mesh, [Shard(0)])}, storage_reader=reader)
    assert torch.equal(local, torch.arange(1 << 20, dtype=torch.float32).reshape(2048, 512)[rank * 1024 :][:1024])
    return reader.stats.bytes_read


def test_each_rank_reads_only_its_part_in_whole_blocks(tmp_path):
    dcp.save(
        {"w": torch.arange(1 << 20, dtype=torch.float32).reshape(2048, 512)},
        storage_writer=StrataWriter(tmp_path / "c"),
        no_dist=True,
    )
    # 4 MiB in one block: both ranks need it whole.
    assert all(read <= (4 << 20) + (1 << 16) for read in run_ranks(tmp_path, 2, load_a_row, str(tmp_path / "c")))


def test_a_slice_of_a_large_tensor_reads_the_blocks_it_touches(tmp_path):
    class Slice(torch.distributed.checkpoint.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            item = plan.items[0]
            rows = torch.Size([256, 1024])
            zero, first = torch.Size([0, 0]), torch.Size([5000, 0])
            plan.items = [type(item)(item.type, item.dest_index, zero, item.storage_index, first, rows)]
            return plan

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return part

    whole = torch.arange(16 << 20, dtype=torch.float32).reshape(16384, 1024)
    dcp.save({"w": whole}, storage_writer=StrataWriter(tmp_path / "c"), no_dist=True)
    part = torch.zeros(256, 1024)
    reader = load({"w": torch.zeros(16384, 1024)}, tmp_path / "c", planner=Slice())
    assert torch.equal(part, whole[5000:5256])
    assert reader.stats.bytes_read <= 9 << 20
