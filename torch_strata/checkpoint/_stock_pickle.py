"""The `.metadata` of stock torch, written opcode by opcode: half a million index objects are never made, and no torch.

What it unpickles to is what stock torch's own pickle does; `tests/checkpoint/test_stock_pickle.py` compares them.
"""

import io
import pickle
import struct
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch_strata.errors import CheckpointError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = ["DCP_VERSION", "Placed", "stock_pickle"]

# What FileSystemWriter writes; stock readers compare nothing else.
DCP_VERSION = "1.0.0"

# fqn, offsets, index hint or -1, object, offset in it, length there.
Placed = tuple[bytes, Iterable[int] | None, int, str, int, int]

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata"
_BATCH = 1000  # as many pairs as pickle itself puts on the stack before it adds them to a dict


def stock_pickle(
    entries: "Iterable[TensorEntry]",
    placed: Iterable[Placed],
    *,
    planner_data: Any,
    checkpoint_id: str,
    save_id: str,
    records_strides: bool = True,
) -> bytes:
    """A pickled `torch.distributed.checkpoint.metadata.Metadata`.

    Args:
        entries: One for each key of ``state_dict_metadata``, in its order.
        placed: One for each stored item.
        planner_data: Pickled as it is.
        checkpoint_id: The place.
        save_id: Identity of the save.
        records_strides: Whether a tensor's properties say its strides; torch before 2.13 does not take them.

    Raises:
        CheckpointError: If the planner's data cannot be pickled.
    """
    buffer = io.BytesIO()
    common = pickle.Pickler(buffer, protocol=3)  # without frames: its output goes into the middle of another pickle
    try:
        common.dump(planner_data)
    except Exception as error:
        raise CheckpointError(f"cannot pickle the checkpoint's metadata (planner_data?): {error}") from error
    pickler = _Pickler(first_memo=len(common.memo.copy()), records_strides=records_strides)
    body: list[bytes] = []
    pickler.put_dict(body, "state_dict_metadata", map(pickler.entry, entries))
    pickler.put_dict(body, "storage_data", map(pickler.item, placed))
    head = [_global(_METADATA, "Metadata"), b")\x81}(", pickler.text("planner_data"), buffer.getvalue()[2:-1]]
    # At the end, where a reader looks for the save_id.
    tail = [pickler.text("version"), pickler.text(DCP_VERSION), pickler.text("storage_meta")]
    tail += [*pickler.storage_meta(checkpoint_id, save_id), b"ub."]
    return b"".join([b"\x80\x04", *pickler.defined, *head, *body, *tail])


class _Pickler:
    """Opcodes of the parts, and what they take from the memo."""

    def __init__(self, *, first_memo: int, records_strides: bool) -> None:
        self._first_memo, self._records_strides = first_memo, records_strides
        self.defined: list[bytes] = []  # comes first: puts into the memo what the parts share
        self._memo: dict[Any, int] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._properties: dict[Any, bytes] = {}
        begin = b")\x81}("
        text = self.text
        self._chunk = self._class(_METADATA, "ChunkStorageMetadata") + begin + text("offsets")
        self._sizes_key = text("sizes")
        self._tensor = self._class(_METADATA, "TensorStorageMetadata") + begin + text("properties")
        self._bytes = self._class(_METADATA, "BytesStorageMetadata") + b")\x81"
        self._size_key, self._chunks_key = text("size"), text("chunks")
        self._index = self._class(_METADATA, "MetadataIndex") + begin + text("fqn")
        self._index_key, self._offset_key = text("index"), text("offset")
        self._info = self._class(f"{_DCP}.filesystem", "_StorageInfo") + begin + text("relative_path")
        self._length_key = text("length")
        self._torch_size = self._class("torch", "Size")

    def put_dict(self, body: list[bytes], key: str, pairs: Iterable[bytes]) -> None:
        """A key of the object's state, and a dict of `pairs`."""
        body += [self.text(key), b"}"]
        while batch := list(islice(pairs, _BATCH)):
            body += [b"(", b"".join(batch), b"u"]

    def entry(self, entry: "TensorEntry") -> bytes:
        """A name and what state_dict_metadata says of it."""
        fqn, is_tensor, dtype, size, strides, grad, pin, encoding, layout, offsets, sizes = entry
        if not is_tensor:
            return self._name(fqn) + self._bytes
        start, middle, dims = self._chunk, self._sizes_key, self._dims
        chunks = [start + dims(o) + middle + dims(n) + b"ub" for o, n in zip(offsets, sizes, strict=True)]
        properties = self._described(dtype, strides, grad, pin, encoding, layout)
        head = (self._name(fqn), self._tensor, properties, self._size_key, dims(size))
        return b"".join([*head, self._chunks_key, b"](", *chunks, b"eub"])

    def item(self, placed: Placed) -> bytes:
        """A MetadataIndex and where it is stored."""
        fqn, offsets, index, path, offset, length = placed
        where = b"" if offsets is None else self._offset_key + self._dims(offsets)
        hint = b"N" if index < 0 else _int(index)
        key = self._index + self._name(fqn) + self._index_key + hint + where + b"ub"
        info = self._info + self.text(path) + self._offset_key + _int(offset)
        return key + info + self._length_key + _int(length) + b"ub"

    def storage_meta(self, checkpoint_id: str, save_id: str) -> list[bytes]:
        """Whose save it is. Both values stand there in full, not in the memo."""
        values = {"checkpoint_id": _whole_text(checkpoint_id), "save_id": _whole_text(save_id), "load_id": b"N"}
        state = [part for key, value in values.items() for part in (self.text(key), value)]
        return [self._class(_METADATA, "StorageMeta"), b")\x81}(", *state, self.text("modules"), b"]ub"]

    def text(self, value: str) -> bytes:
        """A str that occurs often."""
        memo = self._memo.get(value)
        if memo is None:
            memo = self._next_memo(value)
            self.defined.append(_text(value.encode("utf-8", "surrogatepass")) + _put(memo) + b"0")
        return _get(memo)

    def _name(self, fqn: bytes) -> bytes:
        memo = self._memo.get(fqn)
        if memo is not None:
            return _get(memo)
        return _text(fqn) + _put(self._next_memo(fqn))

    def _next_memo(self, key: Any) -> int:
        memo = self._memo[key] = self._first_memo + len(self._memo)
        return memo

    def _class(self, module: str, name: str) -> bytes:
        memo = self._memo.get((module, name))
        if memo is None:
            memo = self._next_memo((module, name))
            self.defined.append(_global(module, name) + _put(memo) + b"0")
        return _get(memo)

    def _dims(self, dims: Iterable[int]) -> bytes:
        key = tuple(dims)
        made = self._sizes.get(key)
        if made is None:
            made = self._sizes[key] = self._torch_size + _tuple([_int(n) for n in key]) + b"\x85R"
        return made

    def _described(self, dtype: str, strides: Any, requires_grad: bool, pin: bool, encoding: int, layout: str) -> bytes:
        key = (dtype, strides, requires_grad, pin, encoding, layout)
        made = self._properties.get(key)
        if made is None:
            fields = [
                self._class("torch", dtype),
                self._class("torch.serialization", "_get_layout") + _text(f"torch.{layout}".encode()) + b"\x85R",
                _BOOLS[requires_grad],
                self._class(_METADATA, "_MEM_FORMAT_ENCODING") + _int(encoding) + b"\x85R",
                _BOOLS[pin],
            ]
            if self._records_strides:
                fields.append(b"N" if strides is None else _tuple([_int(n) for n in strides]))
            properties = self._class(_METADATA, "TensorProperties")
            made = self._properties[key] = properties + b")\x81" + _tuple(fields) + b"b"
        return made


_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_BOOLS = {False: b"\x89", True: b"\x88"}


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: bytes) -> bytes:
    if len(value) < 1 << 8:
        return b"\x8c" + len(value).to_bytes(1, "little") + value
    return b"X" + struct.pack("<I", len(value)) + value


def _whole_text(value: str) -> bytes:
    return _text(value.encode("utf-8", "surrogatepass"))


def _put(memo: int) -> bytes:
    return b"q" + memo.to_bytes(1, "little") if memo < 1 << 8 else b"r" + struct.pack("<I", memo)


def _get(memo: int) -> bytes:
    return b"h" + memo.to_bytes(1, "little") if memo < 1 << 8 else b"j" + struct.pack("<I", memo)


def _tuple(parts: list[bytes]) -> bytes:
    if len(parts) < len(_TUPLES):
        return b"".join([*parts, _TUPLES[len(parts)]])
    return b"".join([b"(", *parts, b"t"])


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if -1 << 31 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return pickle.dumps(value, protocol=2)[2:-1]
