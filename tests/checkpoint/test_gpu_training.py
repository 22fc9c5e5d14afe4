"""Training on a GPU: sharded there, saved while it goes on, with the groups that such runs have."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import same_bits
from torch_strata import ConfigError, StrataReader, StrataWriter, verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NCCL = "cpu:gloo,cuda:nccl"
# One GPU is shared by both ranks, which nccl refuses.
GLOO = "cpu:gloo,cuda:gloo"
WIDTH = 1024

State = dict[str, Any]


class Training:
    """A model sharded over all ranks with its optimizer; `seed` sets the weights."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """Gradients without a collective: gloo reduces and scatters nothing that lies on a GPU."""
        for parameter in self.model.parameters():
            local = parameter.to_local()
            gradient = torch.sin(local.detach() * 3)
            parameter.grad = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False)
        self.optimizer.step()

    def trained_step(self) -> None:
        self.model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 3}

    def resume(self, place: str) -> None:
        self.step()  # of an optimizer that has taken no step the state is empty
        state = self.state()
        dcp.load(state, storage_reader=StrataReader(place))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def tensors_of(state: Any) -> list[torch.Tensor]:
    """This rank's parts on the host, in the order of the keys."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, DTensor):
        return [state.to_local().detach().cpu().clone()]
    return [state.detach().cpu().clone()] if isinstance(state, torch.Tensor) else []


def are_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(same_bits(*pair) for pair in zip(found, expected, strict=True))


def save_and_resume(rank: int, place: str) -> bool:
    training = Training(1)
    for _ in range(3):
        training.step()
    expected = tensors_of(training.state())
    dcp.save(training.state(), storage_writer=StrataWriter(place))
    other = Training(2)
    other.resume(place)
    return are_same(tensors_of(other.state()), expected)


@pytest.mark.parametrize(("backend", "world"), [(NCCL, 1), ("nccl", 1), (GLOO, 2)])
def test_what_is_sharded_on_a_gpu_is_resumed_bit_for_bit(tmp_path, backend, world):
    results = run_ranks(tmp_path, world, save_and_resume, str(tmp_path / "c"), backend=backend)
    assert results == [True] * world
    assert verify(tmp_path / "c").problems == ()


def save_sharded(rank: int, place: str) -> list[torch.Tensor]:
    training = Training(1)
    training.step()
    dcp.save(training.state(), storage_writer=StrataWriter(place))
    return tensors_of(training.state())


def resume(rank: int, place: str) -> list[torch.Tensor]:
    other = Training(3)
    other.resume(place)
    return tensors_of(other.state())


def whole(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of which each rank has its rows; an optimizer's step counter is the same on all."""
    return [rows[0] if rows[0].dim() == 0 else torch.cat(rows) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_sharded_on_gpus_is_resumed_on_another_number_of_ranks(tmp_path, world):
    place = str(tmp_path / "c")
    saved = run_ranks(tmp_path, world, save_sharded, place, backend=GLOO)
    resumed = run_ranks(tmp_path, 3 - world, resume, place, backend=GLOO)
    assert are_same(whole(resumed), whole(saved))


def train_while_saving(rank: int, place: str, mode: str) -> bool:
    from torch.distributed.checkpoint import _async_process_executor

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    training = Training(1)
    for _ in range(2):
        training.trained_step()
    expected = tensors_of(training.state())
    future = dcp.async_save(
        training.state(), storage_writer=StrataWriter(place), async_checkpointer_type=AsyncCheckpointerType(mode)
    )
    for _ in range(5):
        training.trained_step()
    future.result(80)
    _async_process_executor._ProcessBasedAsyncCheckpointExecutor._checkpoint_process = None
    changed = not are_same(tensors_of(training.state()), expected)
    other = Training(2)
    other.resume(place)
    return changed and are_same(tensors_of(other.state()), expected)


@pytest.mark.parametrize("mode", [kind.value for kind in AsyncCheckpointerType])
def test_an_asynchronous_save_from_a_gpu_holds_the_state_of_its_call(tmp_path, mode):
    assert run_ranks(tmp_path, 1, train_while_saving, str(tmp_path / "c"), mode, backend=NCCL) == [True]


def read_with_a_group_of_gpus(rank: int, place: str) -> str:
    dcp.save({"w": torch.ones(4, device="cuda")}, storage_writer=StrataWriter(place))
    try:
        StrataReader(place, process_group=dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_group_that_only_moves_memory_of_gpus_is_refused_for_reading_once(tmp_path):
    (message,) = run_ranks(tmp_path, 1, read_with_a_group_of_gpus, str(tmp_path / "c"), backend="nccl")
    assert "dist.new_group(backend='gloo')" in message


def read_once_onto_gpus(rank: int, place: str) -> bool:
    weights = torch.arange(6 << 20, dtype=torch.float32, device="cuda")
    dcp.save({"w": weights}, storage_writer=StrataWriter(place))
    out = {"w": torch.zeros_like(weights)}
    reader = StrataReader(place, process_group=dist.new_group(backend="gloo"))
    dcp.load(out, storage_reader=reader)
    return torch.equal(out["w"], weights)


@pytest.mark.parametrize(("backend", "world"), [(NCCL, 1), ("nccl", 1), (GLOO, 2)])
def test_replicas_on_gpus_are_read_once_through_a_group_of_the_host(tmp_path, backend, world):
    results = run_ranks(tmp_path, world, read_once_onto_gpus, str(tmp_path / "c"), backend=backend)
    assert results == [True] * world
