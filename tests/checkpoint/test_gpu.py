"""Tensors on a GPU: saved and loaded bit for bit. Runs where there is one."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.states import DTYPES, SHAPES, AnyDtypePlanner, load, random_bits, same_bits, save
from torch_strata import StorageConfig, StrataWriter, verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20


def large(elements: int, seed: int) -> torch.Tensor:
    return random_bits(torch.float32, (elements,), seed).cuda()


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.cpu().resolve_conj().resolve_neg() for key, value in state.items()}


def other_values(state: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {k: random_bits(v.dtype, tuple(v.shape), 99).to(device) for k, v in state.items()}


def wrong_keys(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [key for key, value in expected.items() if not same_bits(found[key].cpu(), value)]


def of_every_dtype() -> dict[str, torch.Tensor]:
    shapes = [*SHAPES, (1 << 20, 3)]
    return {
        f"{n}/{i}": random_bits(getattr(torch, n), shape, i).cuda() for n in DTYPES for i, shape in enumerate(shapes)
    }


def of_every_layout() -> dict[str, torch.Tensor]:
    base = random_bits(torch.float32, (600, 4000), 7).cuda()
    turned = random_bits(torch.complex64, (300, 500), 8).cuda()
    return {
        "whole": base,
        "transposed": base.t(),
        "columns": base[:, 1000:3000],
        "rows": base[100:500],
        "expanded": base[:1].expand(50, 4000),
        "channels last": base.view(10, 60, 40, 100).to(memory_format=torch.channels_last),
        "conjugate": turned.conj(),
        "negative": turned.conj().imag,
        "odd start": base.view(-1)[3 : 3 + 2 * MIB],
    }


@pytest.mark.parametrize("make", [of_every_dtype, of_every_layout])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_lies_on_a_gpu_comes_back_bit_for_bit(tmp_path, make, device):
    state = make()
    expected = on_host(state)
    save(state, tmp_path / "c", planner=AnyDtypePlanner())
    out = other_values(expected, device)
    load(out, tmp_path / "c")
    assert wrong_keys(out, expected) == []


def test_stock_reads_what_came_from_a_gpu(tmp_path):
    state = {f"t{i}": large(elements, i) for i, elements in enumerate([1, 3000, 5 * MIB + 1, 12 * MIB])}
    expected = on_host(state)
    save(state, tmp_path / "c")
    out = other_values(expected, "cpu")
    dcp.load(out, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert wrong_keys(out, expected) == []
    assert verify(tmp_path / "c").problems == ()


def test_kernels_still_running_at_the_call_are_waited_for_on_any_stream(tmp_path):
    weights = torch.zeros(32 * MIB, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # cycles: about a quarter of a second
        weights.fill_(3.0)
    save({"w": weights}, tmp_path / "c")
    out = {"w": torch.zeros(32 * MIB)}
    load(out, tmp_path / "c")
    assert bool((out["w"] == 3.0).all())


def test_host_memory_for_a_large_gpu_state_stays_within_the_budget(tmp_path):
    budget = 64 * MIB
    state = {f"t{i}": large(64 * MIB, i) for i in range(8)}  # 2 GiB
    config = StorageConfig(max_in_flight_bytes=budget)
    save(state, tmp_path / "warm", config=config)
    before = peak_resident_bytes()
    save(state, tmp_path / "c", config=config)
    assert peak_resident_bytes() - before <= 2 * budget


def test_tied_weights_on_a_gpu_are_stored_once(tmp_path):
    weights = large(2 * MIB, 3)
    writer = save({"in": weights, "out": weights.view(2 * MIB)}, tmp_path / "c")
    assert writer.stats.written_bytes < 1.1 * weights.nbytes


def test_an_asynchronous_save_holds_the_state_of_its_call(tmp_path):
    state: dict[str, Any] = {"w": large(8 * MIB, 4), "step": 3}
    staged = StrataWriter(tmp_path / "c").stage(state)
    expected = copy.deepcopy(state["w"]).cpu()
    state["w"].zero_()
    assert same_bits(staged["w"], expected)


def peak_resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
