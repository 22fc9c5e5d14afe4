"""What the memory of a tensor looks like, and whether Rust may read or write it as it is."""

import functools
from collections.abc import Iterable

import torch

__all__ = [
    "HOST",
    "PLAIN_TYPES",
    "contiguous_strides",
    "device_number",
    "is_dense",
    "is_plain",
    "is_reachable",
    "overlaps_itself",
    "settled",
    "wait_for_kernels",
    "why_no_memory",
]

# As the number of a device: memory of the host.
HOST = -1

# What the Rust core frames itself. Left out: quantized dtypes, whose tensors need a quantizer, and integers below a
# byte, which torch.save refuses too.
_FRAMED_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
        *("uint64", "uint32", "uint16", "uint8", "bool", "complex128", "complex64", "complex32", "bcomplex32"),
        *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)  # the youngest are not in every torch
)

# Exactly these: a subclass may keep its data elsewhere than its own storage says.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, detached; a pending collective is waited for."""
    if type(tensor).__name__ == "AsyncCollectiveTensor" and callable(wait := getattr(tensor, "wait", None)):
        tensor = wait()
    return tensor.detach()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in its own storage as size, stride and offset say, in a dtype that Rust frames."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and tensor.dtype in _FRAMED_DTYPES


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Why its elements lie in no one memory, and DCP gives a reader nothing to load it into; None if they do."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return None
    kind = "it is a nested tensor" if tensor.is_nested else f"its layout is {tensor.layout}"
    return f"{kind}, DCP loads torch.strided only"


def is_reachable(tensor: torch.Tensor) -> bool:
    """Whether Rust can copy from and to its memory: the host's, or an NVIDIA GPU's."""
    # torch calls AMD's devices cuda as well; their driver is another one.
    return tensor.is_cpu or (tensor.is_cuda and torch.version.cuda is not None)


def device_number(tensor: torch.Tensor) -> int:
    """`HOST`, or the number of the CUDA device that holds it."""
    return HOST if tensor.is_cpu else tensor.get_device()


def wait_for_kernels(devices: Iterable[int]) -> None:
    """Return once nothing on any stream of `devices` may still use memory that is about to be read or written."""
    for number in set(devices) - {HOST}:
        torch.cuda.synchronize(number)


@functools.lru_cache(maxsize=1024)  # layers have the same shapes
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill one run of memory without gap or overlap, in some order of the dims."""
    expected = 1
    for stride, extent in sorted((st, sh) for st, sh in zip(strides, shape, strict=True) if sh != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements may share memory: exact for what torch's own views make, careful for `as_strided`."""
    if 0 in shape:
        return False
    reach = 0
    for stride, extent in sorted((st, sh) for st, sh in zip(strides, shape, strict=True) if sh != 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False
