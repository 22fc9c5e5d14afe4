"""Tensors on a GPU: saved and loaded bit for bit. Runs where there is one."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.states import DTYPES, SHAPES, AnyDtypePlanner, load, random_bits, same_bits, save
from torch_strata import StorageConfig, StrataWriter, verify
from torch_strata.checkpoint.staging import arena_stats, snapshot

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


def test_staging_from_a_gpu_has_every_bit_and_waits_for_kernels():
    state = of_every_dtype() | of_every_layout()
    expected = on_host(state)
    late = torch.zeros(16 * MIB, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # cycles: about a quarter of a second
        late.fill_(3.0)
    for _ in range(2):  # into fresh memory, then into kept memory
        staged = snapshot({**state, "late": late})
        assert wrong_keys(staged, expected) == []
        assert bool((staged["late"] == 3.0).all())
        del staged


def test_memory_for_states_of_a_gpu_is_page_locked_and_kept():
    state = {"w": large(64 * MIB, 5)}
    first = snapshot(state)
    address = first["w"].data_ptr()
    assert first["w"].is_pinned()
    del first
    assert snapshot(state)["w"].data_ptr() == address


def test_page_locked_memory_is_given_back():
    writer = StrataWriter("unused")
    for elements in (8 * MIB, 32 * MIB, 64 * MIB):  # each too large for the slot before
        snapshot({"w": large(elements, 6)})
        assert arena_stats().slots == 1
    writer.close()
    assert arena_stats().slot_bytes == 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overlapped_copy_from_a_gpu_has_the_bits_from_before_the_step(tmp_path, fused):
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    def backward() -> None:
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()

    backward()
    optimizer.step()
    expected = on_host(model.state_dict())
    for step in range(3):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        writer = StrataWriter(tmp_path / str(step), overlap=optimizer)
        response = dcp.async_save(state, storage_writer=writer, no_dist=True)
        expected = on_host({key: value.clone() for key, value in model.state_dict().items()})
        backward()
        optimizer.step()
        response.upload_completion.result(60)
        out = {"model": other_values(expected, "cpu")}
        load(out, tmp_path / str(step))
        assert wrong_keys(out["model"], expected) == []
    assert wrong_keys(model.state_dict(), expected) != []


def peak_resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
