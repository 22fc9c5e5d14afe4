"""What the memory of a tensor looks like, and whether Rust may read or write it as it is."""

import torch

__all__ = ["PLAIN_TYPES", "contiguous_strides", "is_dense", "is_plain", "overlaps_itself", "settled"]

# What the Rust core frames itself. Left out: quantized dtypes, whose tensors need a quantizer, and integers below a
# byte, which torch.save refuses too.
_FRAMED_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex128, torch.complex64, torch.complex32, torch.bcomplex32),
        *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
        *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
    }
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
