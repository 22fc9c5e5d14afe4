"""The pickle inside a torch.save archive, read and written without torch and without running anything it names.

Known is what torch's own ``weights_only`` loads by default: numbers, text, containers, tensors, dtypes, devices.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_strata.checkpoint._boxes import contiguous
from torch_strata.checkpoint._dtypes import dtype_named, known_dtypes
from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["Call", "Global", "Ordered", "Storage", "TensorRef", "dump", "load"]

_STORAGE_DTYPES = {row.storage: row.name for row in known_dtypes() if row.storage is not None}
_UNTYPED = "UntypedStorage"


class _Sealed:
    """Refuses what a hostile pickle would change after it was checked."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"a state for a {type(self).__name__}")


@dataclass(frozen=True)
class Global(_Sealed):
    """A name of torch that stands for itself, such as a dtype."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call(_Sealed):
    """A value that loading makes by a call, such as a device."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Storage(_Sealed):
    """Memory that tensors look into: one record of the archive.

    Attributes:
        key: The record's name below ``data/``.
        dtype: Torch's name of its elements' dtype; None for bare bytes.
        num_elements: Of `dtype`, or bytes.
        source: What holds its bytes, for whoever writes it.
    """

    key: str
    dtype: str | None
    num_elements: int
    source: Any = None

    @property
    def num_bytes(self) -> int:
        """Its length in bytes."""
        return self.num_elements * (1 if self.dtype is None else dtype_named(self.dtype).num_bytes)


@dataclass(frozen=True, eq=False)
class TensorRef(_Sealed):
    """A tensor, or a Parameter, that looks into a storage; `offset` and `strides` in elements of `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False

    @property
    def span(self) -> int:
        """Elements from its first to behind its last in memory; 0 if it has none."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are a row-major run."""
        wanted = contiguous(self.shape)
        return 0 in self.shape or all(
            n == 1 or have == want for n, have, want in zip(self.shape, self.strides, wanted, strict=True)
        )


class Ordered(dict[Any, Any]):
    """An OrderedDict; what was set on it as attributes, such as a module's versions, is in `state`."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(data: bytes, where: str) -> Any:
    """The value of a data.pkl, with stand-ins of this module for what is torch's.

    Raises:
        CheckpointError: If it needs a class or a function that is not known here; nothing of it was run.
        CorruptionError: If it is damaged.
    """
    try:
        return _Unpickler(data).load()
    except _Refused as refusal:
        raise CheckpointError(f"{where}: {refusal}") from refusal
    except Exception as error:
        raise CorruptionError(f"{where}: damaged pickle: {type(error).__name__}: {error!s:.300}") from error


class _Refused(pickle.UnpicklingError):
    """It names what nobody vouches for."""


class _Unpickler(pickle.Unpickler):
    """Makes new stand-ins for each name, so that no pickle can change one that another sees."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("__builtin__", "builtins")
        if (module, name) == ("collections", "OrderedDict"):
            return type("Ordered", (Ordered,), {})
        if module == "torch._utils" and name in _REBUILDERS:
            rebuild = _REBUILDERS[name]
            return lambda *arguments: rebuild(*arguments)
        if (module, name) in _CALLED:
            function = Global(module, name)
            return lambda *arguments: Call(function, _plain(arguments))
        if (module, name) in _MADE:
            make = _MADE[module, name]
            return lambda *arguments: make(*arguments)
        if module == "torch" and (name in _STORAGE_DTYPES or name == _UNTYPED or name in _DTYPE_NAMES):
            return Global(module, name)
        if (module, name) == ("torch.storage", _UNTYPED):
            return Global(module, name)
        raise _Refused(f"it needs {module:.100}.{name:.100} to load, which could run any code; refused")

    def persistent_load(self, pid: Any) -> Storage:
        kind, of, key, _location, count = pid
        if kind != "storage" or not isinstance(of, Global) or not isinstance(key, str) or not _is_count(count):
            raise pickle.UnpicklingError(f"expected a storage, found {pid!r:.200}")
        known = self._storages.setdefault(key, Storage(key, _STORAGE_DTYPES.get(of.name), count))
        if (known.dtype, known.num_elements) != (_STORAGE_DTYPES.get(of.name), count):
            raise pickle.UnpicklingError(f"the storage {key!r:.100} is described twice")
        return known


_DTYPE_NAMES = frozenset(row.name for row in known_dtypes())
_CALLED = {("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")}


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) > 2 or not all(isinstance(a, str | int | tuple | list) for a in arguments):
        raise pickle.UnpicklingError(f"unexpected arguments {arguments!r:.200}")
    return arguments


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = False, hooks: Any = None) -> TensorRef:
    return _checked(storage, storage.dtype, offset, shape, strides, grad)


def _tensor_of_bytes(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    if not isinstance(dtype, Global) or storage.dtype is not None:
        raise pickle.UnpicklingError("expected bare bytes and a dtype")
    return _checked(storage, dtype.name, offset, shape, strides, grad)


def _checked(storage: Storage, dtype: str | None, offset: Any, shape: Any, strides: Any, grad: Any) -> TensorRef:
    shape, strides = (tuple(v.arguments[0]) if isinstance(v, Call) else tuple(v) for v in (shape, strides))
    numbers = (offset, *shape, *strides)
    if dtype is None or len(shape) != len(strides) or not all(map(_is_count, numbers)):
        raise pickle.UnpicklingError(f"a tensor of shape {shape!r:.100}, strides {strides!r:.100}")
    found = TensorRef(storage, dtype, offset, shape, strides, grad is True)
    # An expanded view may have more elements than its storage, but no element of it lies outside.
    if found.span and (offset + found.span) * dtype_named(dtype).num_bytes > storage.num_bytes:
        raise pickle.UnpicklingError(f"a tensor of shape {shape!r:.100} reaches outside its storage")
    return found


def _parameter(data: Any, requires_grad: Any, hooks: Any = None) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise pickle.UnpicklingError("a parameter of what is no tensor")
    return TensorRef(data.storage, data.dtype, data.offset, data.shape, data.strides, requires_grad is True, True)


def _encoded(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("expected text in latin1")
    return text.encode("latin1")


_REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_of_bytes,
    "_rebuild_parameter": _parameter,
}
_MADE: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encoded,
    ("builtins", "set"): lambda items=(): set(items),
    ("builtins", "bytearray"): lambda data=b"": bytearray(data if isinstance(data, bytes) else b""),
    ("builtins", "complex"): lambda real=0.0, imaginary=0.0: complex(float(real), float(imaginary)),
}


def dump(value: Any) -> tuple[bytes, list[Storage]]:
    """A data.pkl of `value`, in the opcodes that ``torch.load(weights_only=True)`` knows, and its storages.

    The storages' records are ``data/0``, ``data/1``, … in the order of the list, whatever their keys say.

    Raises:
        CheckpointError: If it holds what such a pickle cannot.
    """
    pickler = _Pickler()
    try:
        pickler.put(value)
    except RecursionError as error:
        raise CheckpointError("a value is nested too deeply") from error
    return b"\x80\x02" + b"".join(pickler.out) + b".", list(pickler.storages)


@dataclass
class _Pickler:
    out: list[bytes] = field(default_factory=list)
    memo: dict[Any, int] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # alive, so that no identity is given away twice
    storages: dict[Storage, int] = field(default_factory=dict)

    def put(self, value: Any) -> None:
        kind = type(value)
        if value is None:
            self.out.append(b"N")
        elif kind is bool:
            self.out.append(b"\x88" if value else b"\x89")
        elif kind is int:
            self.out.append(_int(value))
        elif kind is float:
            self.out.append(b"G" + struct.pack(">d", value))
        elif kind is str:
            data = value.encode("utf-8", "surrogatepass")
            self.out.append(b"X" + struct.pack("<I", len(data)) + data)
        elif isinstance(value, Global):
            self._global(value.module, value.name)
        elif id(value) in self.memo:
            self._get(self.memo[id(value)])
        else:
            self._put_object(value)

    def _put_object(self, value: Any) -> None:
        if isinstance(value, dict):
            self._dict(value)
        elif type(value) is list:
            self.out.append(b"]")
            self._remember(value)
            self._many(value, b"e")
        elif type(value) is tuple:
            self._tuple(value)
            self._remember(value)
        elif isinstance(value, TensorRef):
            self._tensor(value)
            self._remember(value)
        elif isinstance(value, Call):
            self._call(value.function.module, value.function.name, value.arguments)
            self._remember(value)
        elif type(value) in (bytes, bytearray, set, complex):
            self._made(value)
            self._remember(value)
        else:
            raise CheckpointError(f"a {type(value).__name__} cannot be written for torch.load(weights_only=True)")

    def _dict(self, value: dict[Any, Any]) -> None:
        if isinstance(value, Ordered):
            self._call("collections", "OrderedDict", ())
        else:
            self.out.append(b"}")
        self._remember(value)
        self._many([part for pair in value.items() for part in pair], b"u")
        if isinstance(value, Ordered) and value.state is not None:
            self.put(value.state)
            self.out.append(b"b")

    def _many(self, parts: "list[Any]", opcode: bytes) -> None:
        if parts:
            self.out.append(b"(")
            for part in parts:
                self.put(part)
            self.out.append(opcode)

    def _made(self, value: Any) -> None:
        if isinstance(value, bytes):
            self._call("_codecs", "encode", (value.decode("latin1"), "latin1"))
        elif isinstance(value, bytearray):
            self._call("builtins", "bytearray", (bytes(value),))
        elif isinstance(value, set):
            self._call("builtins", "set", (list(value),))
        else:
            self._call("builtins", "complex", (value.real, value.imag))

    def _tensor(self, value: TensorRef) -> None:
        if value.is_parameter:
            self._global("torch._utils", "_rebuild_parameter")
            self.out.append(b"(")
            self._plain_tensor(value, grad=False)
            self.put(value.requires_grad)
            self._call("collections", "OrderedDict", ())
            self.out.append(b"tR")
        else:
            self._plain_tensor(value, grad=value.requires_grad)

    def _plain_tensor(self, value: TensorRef, *, grad: bool) -> None:
        storage = value.storage
        typed = None if storage.dtype is None else dtype_named(storage.dtype).storage
        self._global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.out.append(b"((")
        self.put("storage")
        self._global("torch" if typed else "torch.storage", typed or _UNTYPED)
        self.put(str(self.storages.setdefault(storage, len(self.storages))))
        self.put("cpu")
        self.put(storage.num_elements if typed else storage.num_bytes)
        self.out.append(b"tQ")
        for part in (value.offset, value.shape, value.strides, grad):
            self.put(part)
        self._call("collections", "OrderedDict", ())
        if not typed:
            self._global("torch", value.dtype)
        self.out.append(b"tR")

    def _call(self, module: str, name: str, arguments: tuple[Any, ...]) -> None:
        self._global(module, name)
        self._tuple(arguments)
        self.out.append(b"R")

    def _tuple(self, parts: tuple[Any, ...]) -> None:
        if not parts:
            self.out.append(b")")
            return
        self.out.append(b"(")
        for part in parts:
            self.put(part)
        self.out.append(b"t")

    def _global(self, module: str, name: str) -> None:
        known = self.memo.get((module, name))
        if known is not None:
            self._get(known)
            return
        self.out.append(f"c{module}\n{name}\n".encode())
        self.memo[module, name] = self._memoize()

    def _remember(self, value: Any) -> None:
        self.kept.append(value)
        self.memo[id(value)] = self._memoize()

    def _memoize(self) -> int:
        self.out.append(b"r" + struct.pack("<I", len(self.memo)))
        return len(self.memo)

    def _get(self, memo: int) -> None:
        self.out.append(b"j" + struct.pack("<I", memo))


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if -1 << 31 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(1 + math.ceil(value.bit_length() / 8), "little", signed=True)
    if len(data) > 255:
        raise CheckpointError("an integer is too large for torch.load(weights_only=True)")
    return b"\x8a" + len(data).to_bytes(1, "little") + data
