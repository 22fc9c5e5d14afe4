"""The states that the benchmarks save and load, and their bytes as memory views.

A state is built once and kept, so every contender writes from and reads into the same warm pages. No timing here.
"""

import zlib
from typing import Any

import torch

MIB = 1 << 20

# A transformer checkpoint in small: embeddings, projections, then norms and biases.
_LARGE_MIB = (256, 192, 128, 96, 64)
_MID_MIB = (16, 12, 8, 6, 4, 3, 2, 1)
_NUM_SMALL = 400
_LARGE_SHARE = 0.45


def mixed_state(size_bytes: int) -> dict[str, Any]:
    """A nested state of about `size_bytes`: large, middle and small tensors, fp32 and bf16, and Python scalars.

    Tensors of 64 to 256 MiB hold 45 % of the bytes (none under 0.3 GB), tensors of 1 to 16 MiB the rest, and
    400 tensors of 4 B to 32 KiB come with them. Every tensor has bytes of its own, so nothing can be shared.
    """
    noise = torch.randint(-(2**62), 2**62, (max(_LARGE_MIB) * MIB // 8,), dtype=torch.int64)
    model: dict[str, torch.Tensor] = {}
    remaining = int(size_bytes * _LARGE_SHARE)
    while remaining >= min(_LARGE_MIB) * MIB:
        mib = _next_fitting(_LARGE_MIB, len(model), remaining)
        model[f"embed.{len(model)}.weight"] = _tensor(noise, mib * MIB, len(model))
        remaining -= mib * MIB
    remaining += size_bytes - int(size_bytes * _LARGE_SHARE)
    while remaining >= MIB:
        mib = _next_fitting(_MID_MIB, len(model), remaining)
        model[f"layers.{len(model)}.weight"] = _tensor(noise, mib * MIB, len(model))
        remaining -= mib * MIB
    norms = {f"layers.{i}.bias": _tensor(noise, 4 << (i % 14), 10_000 + i) for i in range(_NUM_SMALL)}
    counters = {f"group.{i}": {"lr": 1e-3 * i, "betas": [0.9, 0.95], "step": i} for i in range(20)}
    return {"model": model, "norms": norms, "optim": counters, "step": 1000}


def small_state(num_items: int, item_bytes: int) -> dict[str, Any]:
    """`num_items` fp32 tensors of `item_bytes` each, all different."""
    return {f"t.{i:06d}": torch.full((item_bytes // 4,), float(i)) for i in range(num_items)}


def buffers(state: Any) -> list[memoryview]:
    """The bytes of every tensor in `state`, in order, as writable views: no copy is made."""
    if isinstance(state, torch.Tensor):
        return [state.reshape(-1).view(torch.uint8).numpy().data]
    if isinstance(state, dict):
        return [view for value in state.values() for view in buffers(value)]
    return []


def digest(views: list[memoryview]) -> int:
    """CRC-32 over all views in order."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc


def clear(state: Any) -> None:
    """Set every tensor to zero in place, so that a load that does nothing cannot pass for one that worked."""
    if isinstance(state, torch.Tensor):
        state.zero_()
    elif isinstance(state, dict):
        for value in state.values():
            clear(value)


def _next_fitting(sizes_mib: tuple[int, ...], index: int, remaining_bytes: int) -> int:
    """The size at `index` in the cycle, or the largest one that still fits."""
    wanted = sizes_mib[index % len(sizes_mib)]
    if wanted * MIB <= remaining_bytes:
        return wanted
    return next(mib for mib in sizes_mib if mib * MIB <= remaining_bytes)


def _tensor(noise: torch.Tensor, num_bytes: int, index: int) -> torch.Tensor:
    """A tensor of `num_bytes` that differs from every other index; every third one is bf16."""
    dtype = torch.bfloat16 if index % 3 == 2 else torch.float32
    tensor = torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
    words = num_bytes // 8
    if words == 0:
        return tensor.fill_(float(index))
    torch.add(noise[:words], index, out=tensor.view(torch.int64))
    rows = 1 if num_bytes < MIB else 256
    return tensor.view(rows, -1) if rows > 1 else tensor
