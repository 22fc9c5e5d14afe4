"""A state of three parts, and what a save of it leaves at an S3 store."""

from collections.abc import Callable
from typing import Any

import torch

from tests.checkpoint.states import load
from tests.support.s3 import Answer, Bucket
from torch_strata import StorageConfig

SMALL_PARTS = StorageConfig(part_bytes=5 << 20)
RUN = "run/step-1"
Forward = Callable[[], Answer]


def state(step: int = 1) -> dict[str, Any]:
    """Three parts of 5 MiB."""
    return {"w": torch.arange(3_500_000, dtype=torch.float32) + step, "step": step}


def loaded_step(url: str, **reader_options: Any) -> int:
    """The step whose state loads whole."""
    found = {"w": torch.zeros(3_500_000), "step": 0}
    load(found, url, **reader_options)
    assert torch.equal(found["w"], state(found["step"])["w"])
    return int(found["step"])


def leftovers(bucket: Bucket) -> list[str]:
    """What only an interrupted save leaves: uploads, their records, probes."""
    hidden = [key for key in bucket.sizes() if "/uploads/" in key or "/probe-" in key]
    return [*bucket.open_uploads(), *hidden]
