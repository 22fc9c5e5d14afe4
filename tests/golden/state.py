"""What the golden checkpoints hold; never changed once a version is written."""

from typing import Any

import torch


def golden_state() -> dict[str, Any]:
    """Dtypes, shapes, strides, a tied weight, values: one of each kind of item that format version 1 has."""
    weight = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        "fp8": torch.tensor([0.5, 1.0, -448.0]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "large": torch.arange(3000, dtype=torch.int32),  # too large to be inline
        "step": 7,
        "config": {"name": "gölden", "betas": (0.9, 0.95), "flags": [True, None]},
    }
