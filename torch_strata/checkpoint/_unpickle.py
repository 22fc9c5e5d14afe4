"""Reads the pickle of a stock `.metadata` without running anything that it names.

Every global of the allow-list is replaced by a stand-in made for this one call, so that a hostile pickle can neither
call nor change an object of this process. What comes out are plain values. Imports no torch.
"""

import io
import logging
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_strata import _native
from torch_strata.errors import CorruptionError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = [
    "StockItem",
    "StockMetadata",
    "check_object_path",
    "load_plain",
    "load_stock_metadata",
    "previous_save_id",
    "same_plain",
]

_logger = logging.getLogger(__name__)

_DTYPE_NAME = re.compile(r"(bool|bits|b?float|b?complex|q?u?int)\w*")
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Where torch 2.1, for one, kept what checkpoints say about tensors; every later torch still reads it.
_OLDER_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
# Written by Python 3.13, where pathlib is a package.
_PATH_MODULES = ("pathlib", "pathlib._local")


class _Bag:
    """Stands in for one allow-listed class: keeps the state, does nothing else."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Whatever arguments a pickle has: the state follows them (`PlannedMetadata`)."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default) if isinstance(self.state, dict) else default


_BAG_KINDS = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_OLDER_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}

_ENCODINGS = {(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (_OLDER_MODULE, "MEM_FORMAT_ENCODING")}


@dataclass(frozen=True)
class _DType:
    name: str


def _size(dims: Any = ()) -> tuple[int, ...]:
    return _ints(tuple(dims), "torch.Size")


def _encoding(value: Any) -> int:
    # Of the enumeration's three members; what torch refuses must not pass here.
    if type(value) is not int or value not in range(3):
        raise pickle.UnpicklingError(f"expected a memory format from 0 to 2, found {value!r:.200}")
    return value


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError(f"expected the name of a layout, found {name!r:.200}")
    return name.removeprefix("torch.")


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


class _Unpickler(pickle.Unpickler):
    """Knows the globals that DCP puts into a `.metadata`, and no others."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._bags = {key: type(key[1], (_Bag,), {"kind": key[1]}) for key in _BAG_KINDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._bags:
            return self._bags[module, name]
        if (module, name) == ("torch", "Size"):
            return lambda dims=(): _size(dims)
        if (module, name) in _ENCODINGS:
            return lambda value: _encoding(value)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: _layout(layout)
        if module in _PATH_MODULES and name == "PosixPath":
            return lambda *parts: _path(*parts)
        if module == "torch" and _DTYPE_NAME.fullmatch(name):
            return _DType(name)
        raise pickle.UnpicklingError(f"global {module}.{name} is not allowed in a checkpoint's metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids are not allowed in a checkpoint's metadata")


@dataclass(frozen=True)
class StockItem:
    """Where stock DCP stored one item. `offsets` is None for a pickled value."""

    fqn: str
    offsets: tuple[int, ...] | None
    index: int
    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class StockMetadata:
    """A stock `.metadata` as plain values; the entries have the manifest's form."""

    entries: "list[TensorEntry]"
    items: list[StockItem]
    planner_data: Any
    save_id: str | None
    version: str | None


def load_plain(data: bytes, where: str) -> Any:
    """The value in a pickle that may name only what a `.metadata` may name.

    Raises:
        CorruptionError: If the pickle is damaged or names anything else.
    """
    try:
        return _Unpickler(data).load()
    except Exception as error:
        raise CorruptionError(f"refused the pickle in {where}: {error or type(error).__name__}") from error


def load_stock_metadata(data: bytes, where: str) -> StockMetadata:
    """Read a stock `.metadata`.

    Raises:
        CorruptionError: If the pickle is refused, or its content is not what DCP writes.
    """
    top = load_plain(data, where)
    try:
        return _convert(top)
    except CorruptionError as error:
        raise CorruptionError(f"{where}: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{where} is not DCP metadata: {error}") from error


def previous_save_id(base: _native.Base) -> str:
    """The save_id of the `.metadata` that is there, by which a reader between two writes can tell it.

    Empty where stock left none: such a reader then takes `.metadata` for the newest state, which is the old one, whole.
    """
    data = base.foreign_metadata
    if data is None:
        return base.save_id
    try:
        return load_stock_metadata(data, ".metadata").save_id or ""
    except CorruptionError as error:
        # About to be replaced: that nobody can read it must not keep a new checkpoint from being saved.
        _logger.warning("replacing a .metadata that cannot be read: %s", error)
        return ""


def check_object_path(path: Any) -> str:
    """`path`, if it stays inside the checkpoint.

    Raises:
        CorruptionError: If it is no text, absolute, or leads anywhere else.
    """
    try:
        if isinstance(path, str) and _native.is_inside(path):
            return path
    except UnicodeEncodeError:
        pass  # lone surrogates: no store has such a name
    raise CorruptionError(f"object name {path!r:.200} does not lead to an object inside the checkpoint")


def _check_stored_path(path: Any) -> str:
    """`path`, if it stays inside the checkpoint or one beside it, where a manifest may refer to.

    Whether it may be followed there is decided by the manifest: without one, nothing outside is read.
    """
    if isinstance(path, str) and path.startswith("../") and "/" in path[3:]:
        return "../" + check_object_path(path[3:])
    return check_object_path(path)


def same_plain(left: Any, right: Any) -> bool:
    """Whether two values of `load_plain` are the same, types and order included.

    Raises:
        RecursionError: If they are nested too deeply.
    """
    if isinstance(left, _Bag) and isinstance(right, _Bag):
        return left.kind == right.kind and same_plain(left.state, right.state)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same_plain(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_plain, left, right))
    return bool(left == right)


def _convert(top: Any) -> StockMetadata:
    _expect(top, "Metadata")
    state = top.state
    storage_data = state.get("storage_data")
    if not isinstance(storage_data, dict):
        raise CorruptionError(f"storage_data: expected a dict, found {type(storage_data).__name__}")
    meta = state.get("storage_meta")
    save_id = meta.get("save_id") if isinstance(meta, _Bag) else None
    return StockMetadata(
        entries=[_entry(fqn, value) for fqn, value in state["state_dict_metadata"].items()],
        items=[_item(key, info) for key, info in storage_data.items()],
        planner_data=state.get("planner_data"),
        save_id=save_id if isinstance(save_id, str) and save_id else None,
        version=state.get("version") if isinstance(state.get("version"), str) else None,
    )


def _expect(value: Any, kind: str) -> None:
    if not isinstance(value, _Bag) or value.kind != kind:
        found = value.kind if isinstance(value, _Bag) else type(value).__name__
        raise CorruptionError(f"expected a {kind}, found a {found}")


def _ints(values: Any, what: str) -> tuple[int, ...]:
    # Signs and bounds are judged with the tensor's shape; here only that these are numbers that fit.
    if not isinstance(values, tuple) or not all(type(v) is int and abs(v) < 1 << 63 for v in values):
        raise CorruptionError(f"{what}: expected integers, found {values!r:.100}")
    return values


def _name(fqn: Any) -> bytes:
    if not isinstance(fqn, str):
        raise CorruptionError(f"expected a name, found {fqn!r:.100}")
    return fqn.encode("utf-8", "surrogatepass")


def _entry(fqn: Any, value: Any) -> "TensorEntry":
    if isinstance(value, _Bag) and value.kind == "BytesStorageMetadata":
        return (_name(fqn), False, "", (), None, False, False, 0, "", [], [])
    _expect(value, "TensorStorageMetadata")
    properties = value.get("properties")
    _expect(properties, "TensorProperties")
    # Before strides were recorded the state had five fields.
    dtype, layout, requires_grad, encoding, pin_memory, *rest = properties.state
    strides = rest[0] if rest else None
    if not isinstance(dtype, _DType) or encoding not in (0, 1, 2):
        raise CorruptionError(f"{fqn!r:.200}: bad dtype or memory format")
    chunks = value.get("chunks")
    for chunk in chunks:
        _expect(chunk, "ChunkStorageMetadata")
    return (
        _name(fqn),
        True,
        dtype.name,
        _ints(value.get("size"), "size"),
        None if strides is None else _ints(tuple(strides), "strides"),
        requires_grad is True,
        pin_memory is True,
        encoding,
        layout,
        [_ints(chunk.get("offsets"), "chunk offsets") for chunk in chunks],
        [_ints(chunk.get("sizes"), "chunk sizes") for chunk in chunks],
    )


def _item(key: Any, info: Any) -> StockItem:
    _expect(key, "MetadataIndex")
    _expect(info, "_StorageInfo")
    fqn, offsets, index = key.get("fqn"), key.get("offset"), key.get("index")
    _name(fqn)
    offset, length = _ints((info.get("offset"), info.get("length")), "position of an item")
    if offset < 0 or length < 0:
        raise CorruptionError(f"{fqn!r:.200}: item at {offset} of {length} bytes")
    return StockItem(
        fqn=fqn,
        offsets=None if offsets is None else _ints(offsets, "offsets"),
        index=index if type(index) is int and 0 <= index < 1 << 31 else -1,
        relative_path=_check_stored_path(info.get("relative_path")),
        offset=offset,
        length=length,
        transforms=tuple(str(name) for name in info.get("transform_descriptors") or ()),
    )
