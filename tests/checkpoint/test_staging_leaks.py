"""A hundred asynchronous saves: memory, descriptors and threads are what they were after a few."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.states import load
from torch_strata import StrataWriter
from torch_strata.checkpoint import _arena
from torch_strata.checkpoint.staging import arena_stats

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _new_arena(monkeypatch):
    monkeypatch.setattr(_arena, "_arenas", {})


def held() -> tuple[int, int, int]:
    """Resident bytes besides the arena's slots, descriptors and threads of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    return resident - arena_stats().slot_bytes, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlapped", [False, True], ids=["at the call", "overlapped"])
def test_a_hundred_saves_leave_nothing_behind(tmp_path, overlapped):
    parameters = [torch.nn.Parameter(torch.zeros(2 * MIB)) for _ in range(8)]  # 64 MiB
    for parameter in parameters:
        # Once: the allocator's heap grows by itself where large gradients come and go.
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    kept: list[Any] = []
    for step in range(100):
        writer = StrataWriter(tmp_path / "c", overlap=optimizer if overlapped else ())
        state = {"model": {str(i): p for i, p in enumerate(parameters)}, "step": step}
        answer = dcp.async_save(state, storage_writer=writer, no_dist=True)
        optimizer.step()
        saved = answer.upload_completion if overlapped else answer
        kept.append(saved)
        saved.result(60)
        if step == 10:
            before = held()
    after = held()
    assert after[0] - before[0] <= 32 * MIB
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 1
    assert arena_stats().slots <= 2
    out = {"model": {str(i): torch.zeros(2 * MIB) for i in range(8)}}
    load(out, tmp_path / "c")
    assert [value.unique().tolist() for value in out["model"].values()] == [[99.0]] * 8
