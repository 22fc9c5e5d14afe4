"""Write the golden bytes that the container's Rust tests compare with, as the installed torch saves them.

Two files under ``native/strata-checkpoint/tests/data``, one case a line, fields separated by ``|``:

``data_pkl.txt``
    dtype, shape, strides, storage length in bytes, data.pkl in hex.
``stock_items.txt``
    label, expected (``unrecognised``, or dtype, shape, strides, storage offset, payload in hex), whole item in hex.

Run it again only for a new torch, and read the difference: a change here is a change of the format.
"""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

DATA = Path(__file__).parents[2] / "native" / "strata-checkpoint" / "tests" / "data"

LEGACY = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex128 complex64"
UNTYPED = (
    "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits16 bits1x8 bits2x4 bits4x2 complex32 bcomplex32 uint16 uint32 uint64"
)
DTYPES = [*LEGACY.split(), *UNTYPED.split()]

Geometry = tuple[tuple[int, ...], tuple[int, ...]]

# Shape and strides. Enough for every dtype: no dim, one, a transposed pair.
FEW: list[Geometry] = [((), ()), ((3,), (1,)), ((3, 2), (1, 3))]
# Every way a tuple and an integer are pickled, for one dtype of each kind.
MANY: list[Geometry] = [
    ((0,), (1,)),
    ((0, 3), (3, 1)),
    ((2, 0, 4), (4, 4, 1)),
    ((2, 3, 4), (12, 4, 1)),
    ((2, 3, 4, 5), (60, 1, 15, 3)),  # channels_last
    ((1, 2, 3, 4, 5), (120, 60, 20, 5, 1)),
    ((1,) * 9, (1,) * 9),
    ((255,), (1,)),
    ((256, 1), (1, 65_535)),
    ((65_535,), (0,)),
    ((65_536,), (0,)),
    ((2**31 - 1,), (0,)),
    ((2**31,), (0,)),
    ((2**39 - 1, 1), (0, 2**39)),
    ((1, 1), (2**47, 2**62)),
    ((2, 3), (5, 1)),  # rows with a gap
]


def tensor(dtype: str, geometry: Geometry) -> torch.Tensor:
    """A tensor whose storage is exactly the span of memory that it reaches."""
    shape, strides = geometry
    span = 0 if 0 in shape else 1 + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    kind = getattr(torch, dtype)
    storage = torch.zeros(span * kind.itemsize, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=kind).set_(storage, 0, shape, strides)


def saved(obj: object) -> bytes:
    """The item that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def data_pkl(value: torch.Tensor) -> bytes:
    """The data.pkl of a tensor's item."""
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        return archive.read("archive/data.pkl")


class Head(io.BytesIO):
    """Keeps the first bytes written and forgets the rest, so that a large storage costs no memory."""

    def write(self, data) -> int:  # type: ignore[no-untyped-def, override]
        size = memoryview(data).nbytes
        super().write(memoryview(data)[: max(0, 4096 - self.tell())])
        return size


def large_data_pkl(num_bytes: int) -> str:
    """The line of a uint8 tensor too large to keep."""
    head = Head()
    torch.save(torch.empty(num_bytes, dtype=torch.uint8), head)
    start = head.getvalue().index(b"\x80\x02ctorch")
    data = head.getvalue()[start : head.getvalue().index(b"PK\x07\x08", start)]
    return f"uint8|{num_bytes}|1|{num_bytes}|{data.hex()}"


def pickles() -> Iterator[str]:
    """Lines of ``data_pkl.txt``."""
    cases = [(dtype, geometry) for dtype in DTYPES for geometry in FEW]
    cases += [(dtype, geometry) for dtype in ("float32", "uint16") for geometry in MANY]
    for dtype, geometry in cases:
        value = tensor(dtype, geometry)
        shape, strides = (",".join(map(str, numbers)) for numbers in geometry)
        yield f"{dtype}|{shape}|{strides}|{value.untyped_storage().nbytes()}|{data_pkl(value).hex()}"
    yield large_data_pkl(2**31)
    yield large_data_pkl(2**32 + 8)


def described(value: torch.Tensor) -> str:
    """What a reader must find in the item of ``value``."""
    numbers = [",".join(map(str, value.shape)), ",".join(map(str, value.stride())), str(value.storage_offset())]
    payload = bytes(value.untyped_storage().tolist()).hex()
    return "|".join([str(value.dtype).removeprefix("torch."), *numbers, payload])


def saved_without_crc(value: torch.Tensor) -> bytes:
    """The item as written under ``set_crc32_options(False)``."""
    torch.serialization.set_crc32_options(False)
    try:
        return saved(value)
    finally:
        torch.serialization.set_crc32_options(True)


def items() -> Iterator[str]:
    """Lines of ``stock_items.txt``."""
    base = torch.arange(24, dtype=torch.float32)
    readable = {
        "plain": base.reshape(4, 6),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "view into a larger storage": base.reshape(4, 6)[1:3, 2:4].t(),
        "without a legacy storage": torch.arange(5).to(torch.uint16),
        "parameter": torch.nn.Parameter(base[:4].clone()),
        "requires grad": base[:4].clone().requires_grad_(),
    }
    for label, value in readable.items():
        yield f"{label}|{described(value)}|{saved(value).hex()}"
    yield f"without crc|{described(base)}|{saved_without_crc(base).hex()}"

    legacy = io.BytesIO()
    # No tensor: this format names storages by address, and the file would differ each time.
    torch.save({"step": 5}, legacy, _use_new_zipfile_serialization=False)
    others = {
        "not a tensor": saved(5),
        "two tensors": saved({"a": base[:2].clone(), "b": base[:2].clone()}),
        "buffer with state": saved(torch.nn.Buffer(base[:4].clone())),
        "conjugate view": saved(torch.zeros(2, dtype=torch.complex64).conj()),
        "sparse": saved(torch.eye(2).to_sparse()),
        "legacy format": legacy.getvalue(),
    }
    for label, item in others.items():
        yield f"{label}|unrecognised|||||{item.hex()}"


if __name__ == "__main__":
    for name, lines in (("data_pkl.txt", pickles()), ("stock_items.txt", items())):
        (DATA / name).write_text("".join(line + "\n" for line in lines))
