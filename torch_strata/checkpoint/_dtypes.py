"""What a dtype is on disk: its size, its names in other formats, and how numpy shows its values. Imports no torch."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_strata.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PAIRS", "Dtype", "as_floats", "dtype_named", "known_dtypes"]


# Two 4-bit numbers in a byte: a shape counts such pairs in torch, and numbers in safetensors.
PAIRS = "float4_e2m1fn_x2"


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """A dtype of torch.

    Attributes:
        name: Torch's, such as ``float32``.
        num_bytes: Size of an element in bytes.
        storage: Class of torch that pickles know its storage by; None for those that have only bytes.
        safetensors: Its name there; None if that format has none.
        numpy: Numpy's name of it, or of integers with the same bytes.
    """

    name: str
    num_bytes: int
    storage: str | None
    safetensors: str | None
    numpy: str


def _rows() -> tuple[Dtype, ...]:
    typed = (
        ("float64", 8, "DoubleStorage", "F64", "float64"),
        ("float32", 4, "FloatStorage", "F32", "float32"),
        ("float16", 2, "HalfStorage", "F16", "float16"),
        ("bfloat16", 2, "BFloat16Storage", "BF16", "uint16"),
        ("int64", 8, "LongStorage", "I64", "int64"),
        ("int32", 4, "IntStorage", "I32", "int32"),
        ("int16", 2, "ShortStorage", "I16", "int16"),
        ("int8", 1, "CharStorage", "I8", "int8"),
        ("uint8", 1, "ByteStorage", "U8", "uint8"),
        ("bool", 1, "BoolStorage", "BOOL", "uint8"),
        ("complex128", 16, "ComplexDoubleStorage", None, "complex128"),
        ("complex64", 8, "ComplexFloatStorage", "C64", "complex64"),
        ("float8_e5m2", 1, None, "F8_E5M2", "uint8"),
        ("float8_e4m3fn", 1, None, "F8_E4M3", "uint8"),
        ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ", "uint8"),
        ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ", "uint8"),
        ("float8_e8m0fnu", 1, None, "F8_E8M0", "uint8"),
        (PAIRS, 1, None, "F4", "uint8"),
        ("uint16", 2, None, "U16", "uint16"),
        ("uint32", 4, None, "U32", "uint32"),
        ("uint64", 8, None, "U64", "uint64"),
        ("complex32", 4, None, None, "uint32"),
        ("bcomplex32", 4, None, None, "uint32"),
        ("bits8", 1, None, None, "uint8"),
        ("bits16", 2, None, None, "uint16"),
        ("bits1x8", 1, None, None, "uint8"),
        ("bits2x4", 1, None, None, "uint8"),
        ("bits4x2", 1, None, None, "uint8"),
    )
    return tuple(
        Dtype(name=name, num_bytes=size, storage=storage, safetensors=other, numpy=shown)
        for name, size, storage, other, shown in typed
    )


_BY_NAME = {row.name: row for row in _rows()}


def known_dtypes() -> tuple[Dtype, ...]:
    """All that the Rust core frames itself."""
    return tuple(_BY_NAME.values())


def dtype_named(name: str) -> Dtype:
    """The dtype that torch calls `name`.

    Raises:
        CheckpointError: If there is none, or its elements are no whole bytes.
    """
    found = _BY_NAME.get(name)
    if found is None:
        raise CheckpointError(f"the dtype {name!r:.100} cannot be converted")
    return found


# Sign, exponent and mantissa bits, the exponent's bias, and what stands for no number. From the OCP's "8-bit Floating
# Point Specification" and "Microscaling Formats", and arXiv 2206.02915 for the fnuz ones.
_SMALL_FLOATS: dict[str, tuple[int, int, int]] = {
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e4m3fnuz": (4, 3, 8),
}


def as_floats(raw: "np.ndarray[Any, Any]", dtype: str) -> "np.ndarray[Any, Any]":
    """The values of elements of `dtype`: float64, or complex128 for complex ones.

    Args:
        raw: The elements' bytes, uint8, 1-dimensional.
        dtype: Torch's name of it; of packed dtypes the bytes are taken for numbers.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _as_floats(raw.view(dtype_named(dtype).numpy), raw, dtype)


def _as_floats(shown: "np.ndarray[Any, Any]", raw: "np.ndarray[Any, Any]", dtype: str) -> "np.ndarray[Any, Any]":
    import numpy as np

    if dtype == "bfloat16":
        return (shown.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _SMALL_FLOATS or dtype == "float8_e8m0fnu":
        table: np.ndarray[Any, Any] = _table(dtype)[shown]
        return table
    if dtype in ("complex32", "bcomplex32"):
        half = as_floats(raw, "float16" if dtype == "complex32" else "bfloat16")
        pairs: np.ndarray[Any, Any] = half.view(np.complex128)
        return pairs
    values: np.ndarray[Any, Any] = shown.astype(np.complex128 if shown.dtype.kind == "c" else np.float64)
    return values


@functools.cache
def _table(dtype: str) -> "np.ndarray[Any, Any]":
    import numpy as np

    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    num_exponent, num_mantissa, bias = _SMALL_FLOATS[dtype]
    mantissa, exponent = codes & ((1 << num_mantissa) - 1), (codes >> num_mantissa) & ((1 << num_exponent) - 1)
    fraction = np.where(exponent == 0, mantissa, mantissa + (1 << num_mantissa))
    size = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - bias - num_mantissa)
    value: np.ndarray[Any, Any] = np.where(codes & 128, -size, size)
    if dtype.endswith("fnuz"):  # no infinities, no negative zero: its place is taken by what is no number
        value[128] = np.nan
    elif dtype == "float8_e4m3fn":
        value[[0x7F, 0xFF]] = np.nan
    else:
        value[exponent == (1 << num_exponent) - 1] = np.nan
        value[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return value
