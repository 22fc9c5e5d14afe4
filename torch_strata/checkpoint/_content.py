"""What a checkpoint holds, read piece by piece into memory that is used again and again. Imports no torch.

For whoever turns a checkpoint into something else or compares two: whatever was opened, tensors come out as runs of
row-major memory, and every stored block that is touched is verified.
"""

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_strata import _native
from torch_strata.checkpoint._boxes import Box, contiguous, overlap, parts_of
from torch_strata.checkpoint._dtypes import Dtype, dtype_named
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._paths import Path, decode_fqn
from torch_strata.checkpoint._planner_data import decode_planner_data
from torch_strata.checkpoint._tiling import tiling_fault
from torch_strata.errors import CheckpointError, CorruptionError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = ["BATCH_BYTES", "Buffer", "Content", "Piece", "Progress", "Tensor", "Wanted", "content_of"]

# Memory of a batch: large enough that its requests keep a store busy, small beside any training job's.
BATCH_BYTES = 256 << 20
# What values are read at a time: most have some hundred bytes, and each has a request of its own.
_VALUE_BYTES = 16 << 20
# Where parts of a batch begin: what the core asks of memory for direct I/O is a multiple of a page at best.
_ALIGN = 64

# Told how many bytes more are done.
Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor as it is stored.

    Attributes:
        row: Of the open checkpoint.
        offsets: First element in the tensor.
        shape: In elements.
        strides: In the stored memory, in elements; dense in some order.
        gathered: Strides of a view into the row, which then is 1-dimensional and holds more or fewer elements than the
            piece; None for all that the core reads itself.
    """

    row: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    gathered: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the state.

    Attributes:
        fqn: Its key.
        entry: What the index says of it, `dtype` included.
        dtype: Of what is stored.
        shape: Of all of it.
        pieces: Which cover it exactly once.
        framed: Whether torch.save framed its pieces, as it does with subclasses: their values are not known here.
    """

    fqn: str
    entry: "TensorEntry"
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    framed: bool = False

    @property
    def num_bytes(self) -> int:
        """What its elements take, in bytes."""
        return math.prod(self.shape) * self.layout.num_bytes

    @property
    def layout(self) -> Dtype:
        """What an element looks like.

        Raises:
            CheckpointError: If it was framed in a dtype that is not known here.
        """
        return dtype_named(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A box of a tensor, and where it begins in a buffer, in bytes."""

    tensor: Tensor
    box: Box
    at: int

    @property
    def num_bytes(self) -> int:
        """What it takes, in bytes."""
        return math.prod(self.box[1]) * self.tensor.layout.num_bytes


class Buffer:
    """Memory of pages that is kept: the first touch of a fresh page takes far longer than a copy of it."""

    def __init__(self, num_bytes: int = BATCH_BYTES) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=np.uint8)

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.bytes.ctypes.data)

    def of(self, wanted: Wanted) -> "np.ndarray[Any, Any]":
        """The bytes of a box that was read into it."""
        return self.bytes[wanted.at : wanted.at + wanted.num_bytes]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one committed state holds.

    Attributes:
        where: The place, for messages.
        native: The Rust core's handle.
        tensors: By key.
        values: Row of each pickled value, or its bytes where no object holds it, by key.
        order: All keys, in the state's order.
        paths: Where in the nested state each key is; keys that are not in it stand at its top.
        planner_data: As a manifest holds it.
        holds_bytes: Whether its one value is no pickle but what one process serialised itself.
    """

    where: str
    native: _native.Checkpoint
    tensors: Mapping[str, Tensor]
    values: Mapping[str, "int | bytes"]
    order: Sequence[str]
    paths: Mapping[str, Path]
    planner_data: Any = None
    holds_bytes: bool = False

    def path_of(self, fqn: str) -> Path:
        """Where in the nested state a key is."""
        return self.paths.get(fqn, (fqn,))

    def check_state(self) -> None:
        """Refuse what holds no state.

        Raises:
            CheckpointError: If it holds bytes.
        """
        if self.holds_bytes:
            raise CheckpointError(
                f"{self.where} holds bytes that one process serialised itself, not a state; "
                "CheckpointManager.load gives them back"
            )

    def boxes(self, tensors: Iterable[Tensor], max_bytes: int = BATCH_BYTES) -> Iterator[tuple[Tensor, Box]]:
        """All of `tensors` in their order, in boxes that are runs of row-major memory of `max_bytes` at most."""
        for tensor in tensors:
            for box in parts_of(tensor.shape, max(max_bytes // tensor.layout.num_bytes, 1)):
                yield tensor, box

    def stream(
        self, boxes: Iterable[tuple[Tensor, Box]], max_bytes: int = BATCH_BYTES
    ) -> Iterator[tuple[list[Wanted], Buffer]]:
        """Read boxes, one batch while the caller works on another; what was yielded is overwritten two batches later.

        Raises:
            As `read`.
        """
        buffers: list[Buffer] = []
        with ThreadPoolExecutor(1) as pool:
            reading: tuple[list[Wanted], Buffer, Future[None]] | None = None
            for number, batch in enumerate(_batches(boxes, max_bytes)):
                if len(buffers) <= number % 2:
                    buffers.append(Buffer(max(max_bytes, batch[-1].at + batch[-1].num_bytes)))
                buffer = buffers[number % 2]
                begun = batch, buffer, pool.submit(self.read, batch, buffer)
                if reading is not None:
                    reading[2].result()
                    yield reading[:2]
                reading = begun
            if reading is not None:
                reading[2].result()
                yield reading[:2]

    def read(self, batch: Sequence[Wanted], buffer: Buffer) -> None:
        """Read the boxes of a batch into a buffer, each row-major.

        Raises:
            CheckpointError: If torch.save framed a tensor of it.
            CorruptionError: If stored bytes are damaged.
            StorageError: If an object cannot be read.
        """
        reads = []
        for wanted in batch:
            for piece in wanted.tensor.pieces:
                shared = overlap((piece.offsets, piece.shape), wanted.box)
                if shared is None:
                    continue
                if wanted.tensor.framed:
                    raise CheckpointError(
                        f"{self.where}: {wanted.tensor.fqn!r:.200} is a tensor subclass or of a dtype that only torch "
                        "can read; only copies that torch reads back can hold it"
                    )
                if piece.gathered is not None:
                    self._gather(piece, wanted, shared, buffer)
                    continue
                reads.append((piece.row, *_placed(piece, wanted, shared, buffer), buffer))
        if reads:
            self.native.read(reads, [], [], verify="inplace")

    def _gather(self, piece: Piece, wanted: Wanted, shared: Box, buffer: Buffer) -> None:
        """From a view whose memory has gaps or overlaps: all that it spans is read, then what is wanted is taken."""
        assert piece.gathered is not None
        item = wanted.tensor.layout.num_bytes
        span = 1 + sum((n - 1) * stride for n, stride in zip(piece.shape, piece.gathered, strict=True))
        whole = Buffer(span * item)
        self.native.read([(piece.row, (0,), (span,), -1, whole.address, (1,), whole)], [], [], verify="inplace")
        strides = [stride * item for stride in piece.gathered]
        view = np.lib.stride_tricks.as_strided(whole.bytes.view(f"V{item}")[:1], piece.shape, strides, writeable=False)
        first = [a - b for a, b in zip(shared[0], piece.offsets, strict=True)]
        part = view[tuple(slice(a, a + n) for a, n in zip(first, shared[1], strict=True))]
        buffer.of(wanted)[:] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)

    def read_values(self, fqns: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Pickled values as torch.save wrote them, in the order of their keys, some megabytes at a time.

        Raises:
            CorruptionError: If stored bytes are damaged.
            StorageError: If an object cannot be read.
        """
        wanted = list(fqns)
        stored = {fqn: row for fqn in wanted if isinstance(row := self.values[fqn], int)}
        sizes = dict(zip(stored, self.native.blob_bytes(list(stored.values())), strict=True))
        while wanted:
            held, count = 0, 0
            while count < len(wanted) and (count == 0 or held + sizes.get(wanted[count], 0) <= _VALUE_BYTES):
                held += sizes.get(wanted[count], 0)
                count += 1
            batch, wanted = wanted[:count], wanted[count:]
            rows = [stored[fqn] for fqn in batch if fqn in stored]
            read = iter(self.native.read([], rows, [], verify="inplace")[0])
            for fqn in batch:
                found = self.values[fqn]
                yield fqn, found if isinstance(found, bytes) else next(read)


def _batches(boxes: Iterable[tuple[Tensor, Box]], max_bytes: int) -> Iterator[list[Wanted]]:
    batch: list[Wanted] = []
    at = 0
    for tensor, box in boxes:
        wanted = Wanted(tensor=tensor, box=box, at=at)
        if batch and at + wanted.num_bytes > max_bytes:
            yield batch
            batch, wanted = [], replace(wanted, at=0)
        batch.append(wanted)
        at = -(-(wanted.at + wanted.num_bytes) // _ALIGN) * _ALIGN
    if batch:
        yield batch


def _placed(piece: Piece, wanted: Wanted, shared: Box, buffer: Buffer) -> tuple[Any, ...]:
    """As `_native.Checkpoint.read` takes it, behind the row and before the owner."""
    first, lengths = wanted.box
    strides = contiguous(lengths)
    elements = sum((a - b) * stride for a, b, stride in zip(shared[0], first, strides, strict=True))
    address = buffer.address + wanted.at + elements * wanted.tensor.layout.num_bytes
    return tuple(a - b for a, b in zip(shared[0], piece.offsets, strict=True)), shared[1], -1, address, strides


@gc_paused()
def content_of(opened: Opened) -> Content:
    """What an open checkpoint holds.

    Raises:
        CorruptionError: If its index contradicts itself or what is stored.
        CheckpointError: If a file was written through transforms of the stream, which only torch can undo.
    """
    if opened.transforms:
        (fqn, _), names = next(iter(opened.transforms.items()))
        raise CheckpointError(
            f"{opened.where}: {decode_fqn(fqn)!r:.200} was stored through {', '.join(names)}; not supported"
        )
    fqns: list[bytes] = []
    places: list[int] = []
    numbers: dict[tuple[int, ...] | None, int] = {}
    for fqn, is_tensor, *_, offsets, _sizes in opened.entries:
        for offset in offsets if is_tensor else (None,):
            fqns.append(fqn)
            places.append(numbers.setdefault(None if offset is None else tuple(offset), len(numbers)))
    rows, forms, table = opened.native.locate(fqns, places, list(numbers))
    for fqn, row in zip(fqns, rows, strict=True):
        if row < 0:
            raise CorruptionError(f"{opened.where}: no object holds {decode_fqn(fqn)!r:.200}")
    described = [table[form] for form in forms]
    tensors: dict[str, Tensor] = {}
    values: dict[str, int | bytes] = {}
    found = iter(zip(rows, described, strict=True))
    for entry in opened.entries:
        name = decode_fqn(entry[0])
        if entry[1]:
            tensors[name] = _tensor(name, entry, [next(found) for _ in entry[9]], opened.where)
        else:
            values[name], (kind, *_) = next(found)
            if kind != _native.BYTES:
                raise CorruptionError(f"{opened.where}: {name!r:.200}: a pickled value is promised, a tensor is stored")
    planner_data = opened.foreign_planner_data
    if opened.native.number and not opened.native.is_stock:
        planner_data = decode_planner_data(opened.native.planner_data, opened.where)
    return Content(
        where=opened.where,
        native=opened.native,
        tensors=tensors,
        values=values,
        order=[decode_fqn(entry[0]) for entry in opened.entries],
        paths=planner_data if _are_paths(planner_data) else {},
        planner_data=planner_data,
        holds_bytes=opened.holds_bytes,
    )


def _tensor(fqn: str, entry: "TensorEntry", rows: list[tuple[int, Any]], where: str) -> Tensor:
    name = f"{where}: {fqn!r:.200}"
    size, offsets, sizes = tuple(entry[3]), [tuple(o) for o in entry[9]], [tuple(s) for s in entry[10]]
    fault = tiling_fault(size, offsets, sizes)
    if fault is not None:
        raise CorruptionError(f"{name}: {fault}")
    kinds = {kind for _, (kind, *_) in rows}
    dtypes = {dtype for _, (kind, dtype, *_) in rows if kind == _native.TENSOR} or {entry[2]}
    if len(dtypes) != 1 or _native.BYTES in kinds:
        raise CorruptionError(f"{name}: its chunks are stored as {', '.join(sorted(dtypes))} or as pickled values")
    framed = _native.TORCH_SAVE in kinds
    pieces = []
    for (row, (_, _, shape, strides)), offset, extents in zip(rows, offsets, sizes, strict=True):
        if not framed and tuple(shape) != extents:
            raise CorruptionError(f"{name}: a chunk of {extents} is promised, {tuple(shape)} is stored")
        pieces.append(Piece(row=row, offsets=offset, shape=extents, strides=tuple(strides)))
    return Tensor(fqn=fqn, entry=entry, dtype=dtypes.pop(), shape=size, pieces=tuple(pieces), framed=framed)


def _are_paths(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        for key, path in value.items()
    )
