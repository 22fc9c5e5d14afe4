"""States to save, and how to compare them bit for bit without the code under test."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.api import CheckpointException

from torch_strata import StrataReader, StrataWriter

DTYPES = [
    name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32"),
        *("uint16", "uint8", "bool", "complex128", "complex64", "complex32", "bcomplex32", "float8_e5m2"),
        *("float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (1, 1), (7,), (2, 3, 5), (33, 65)]


class AnyDtypePlanner(DefaultSavePlanner):
    """Lets through dtypes whose size torch cannot tell, which stock needs to share work among ranks."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Any bit pattern: NaN payloads, negative zeros and subnormals too."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, byte for byte."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def assert_same(found: Any, expected: Any, where: str = "the state") -> None:
    """Equal bit for bit, in containers of the same kinds: the key 1 is not "1"."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert same_bits(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for at, value in enumerate(expected):
            assert_same(found[at], value, f"{where}.{at}")
    else:
        assert found == expected, where


def largest_object(place: Path) -> Path:
    """The data object of a checkpoint that has the most bytes."""
    return max(place.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Change one bit of the byte `at` of a file, of the one in the middle if not given."""
    at = path.stat().st_size // 2 if at is None else at
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(at)
        file.write(bytes([byte]))


def save(state: dict[str, Any], path: Path, **options: Any) -> StrataWriter:
    """Save on this process alone. Keywords of `dcp.save` go there, the others to the writer."""
    planner = options.pop("planner", None)
    writer = StrataWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return writer


def load(state: dict[str, Any], path: Path, **options: Any) -> StrataReader:
    """Load on this process alone, in place."""
    planner = options.pop("planner", None)
    reader = StrataReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return reader


def failure_of(call: Any) -> BaseException:
    """The first error inside the CheckpointException that `call` raises."""
    try:
        call()
    except CheckpointException as error:
        return next(iter(error.failures.values()))[0]
    raise AssertionError("expected a CheckpointException")
