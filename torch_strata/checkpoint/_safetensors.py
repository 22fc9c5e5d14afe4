"""Finds the tensors of a directory of safetensors files, as Hugging Face lays them out. Imports no torch.

Only headers are read here. The format: eight bytes that give the header's length, a header in JSON, the tensors'
bytes without a gap (https://huggingface.co/docs/safetensors/index#format). It has no digests, so what can be checked
is that header, file and index agree; all of that is checked before a tensor is read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from torch_strata import _native
from torch_strata.checkpoint._dtypes import PAIRS, dtype_named, known_dtypes
from torch_strata.checkpoint._paths import encode_fqn
from torch_strata.checkpoint._unpickle import check_object_path
from torch_strata.errors import CheckpointError, CorruptionError, ManifestError, ObjectNotFoundError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = [
    "INDEX_NAME",
    "MissingShardError",
    "PlainTensor",
    "holds_safetensors",
    "open_safetensors",
    "open_safetensors_file",
    "parse_header",
    "parse_index",
    "unread_files",
    "why_not_safetensors",
]

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_SUFFIX = ".safetensors"

# The library's own limit on a header, `MAX_HEADER_SIZE`; an index is held to the same.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
# One request for most headers: a tensor takes about 120 bytes there, a shard rarely holds a thousand.
_HEAD_BYTES = 128 << 10
# Headers read at a time: each is one or two small requests, and what they wait for is the store's latency.
_HEADERS_AT_ONCE = 16
# What torch can count.
_MAX_EXTENT = (1 << 63) - 1

# By their names there: what safetensors 0.8 hands to torch.
_DTYPES = {row.safetensors: row for row in known_dtypes() if row.safetensors is not None}
# Where torch's HuggingFaceStorageWriter says which part of a tensor a file holds.
_SHARDING_INFO = "DCP_SHARDING_INFO"


class MissingShardError(ManifestError, ObjectNotFoundError):
    """A file that an index names is not there: damage, as a missing object of a checkpoint of ours is."""


@dataclass(frozen=True)
class PlainTensor:
    """One whole tensor in a file.

    Attributes:
        fqn: Its name.
        offset: First byte in the file.
        num_bytes: Its length in bytes.
        dtype: Torch's name of the dtype.
        shape: In torch's elements.
    """

    fqn: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


def open_safetensors(store: _native.Store, where: str) -> "tuple[_native.Checkpoint, list[TensorEntry]] | None":
    """The tensors of the safetensors files at a place; None if there are no such files.

    What `INDEX_NAME` lists, if it is there; else `model.safetensors`; else every file of that suffix, but for those of
    a save of ours: they count once it is committed, and then there is a manifest.

    Args:
        store: The place's store.
        where: The place, for messages.

    Raises:
        ManifestError: If an index or a header is damaged, or they contradict each other or the files.
        MissingShardError: If the index names a file that is not there.
        CheckpointError: If the files hold parts of tensors, as DCP writes them before consolidation.
        StorageError: If the place cannot be read.
    """
    try:
        listed = dict(store.list(""))
    except ObjectNotFoundError:
        return None
    file_of = _read_index(store, listed[INDEX_NAME], where) if INDEX_NAME in listed else None
    names = _names(listed) if file_of is None else list(dict.fromkeys(file_of.values()))
    if file_of is None and not names:
        return None
    with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
        headers = pool.map(lambda name: _read_header(store, name, _size(store, name, listed, where), where), names)
        tensors_in = dict(zip(names, headers, strict=True))
    return _opened(store, _all_of(tensors_in, where) if file_of is None else _indexed(tensors_in, file_of, where))


def open_safetensors_file(
    store: _native.Store, name: str, where: str
) -> "tuple[_native.Checkpoint, list[TensorEntry]]":
    """The tensors of the one file `name` at a place.

    Raises:
        As `open_safetensors`.
    """
    return _opened(store, [(name, tensor) for tensor in _read_header(store, name, store.size(name), where)])


def _opened(
    store: _native.Store, chosen: Sequence[tuple[str, PlainTensor]]
) -> "tuple[_native.Checkpoint, list[TensorEntry]]":
    plain = [(encode_fqn(t.fqn), name, t.offset, t.num_bytes, t.dtype, t.shape) for name, t in chosen]
    return _native.Checkpoint.plain(store, plain), [_entry(tensor) for _, tensor in chosen]


def holds_safetensors(store: _native.Store) -> bool:
    """Whether `open_safetensors` would find files at a place.

    Raises:
        StorageError: If the place cannot be read.
    """
    try:
        listed = dict(store.list(""))
    except ObjectNotFoundError:
        return False
    return INDEX_NAME in listed or bool(_names(listed))


def unread_files(store: _native.Store, read: Sequence[str]) -> list[str]:
    """Why each safetensors file at a place that is not among those `read` was left out.

    Raises:
        StorageError: If the place cannot be read.
    """
    names = {name for name, _ in store.list("")}
    why = f"{INDEX_NAME} does not name it" if INDEX_NAME in names else f"{_SINGLE_NAME} is taken where it is there"
    left = sorted(name for name in names if name.endswith(_SUFFIX) and name not in read)
    return [f"{name} was not looked at: {why}" for name in left]


def why_not_safetensors(name: str, dtype: str, shape: Sequence[int]) -> str | None:
    """Why the format cannot hold a tensor under a name; None if it can.

    Args:
        name: In the file.
        dtype: Torch's name of it.
        shape: In torch's elements.

    Raises:
        CheckpointError: If the dtype is unknown.
    """
    if dtype_named(dtype).safetensors is None:
        return f"the dtype {dtype}"
    if dtype == PAIRS and not shape:
        return "a pair of 4-bit numbers without a dim"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "its name"
    return "its name, which it keeps for itself" if name == "__metadata__" else None


def _names(listed: Mapping[str, int]) -> list[str]:
    # Beside the one file that Hugging Face's own loaders take there may be the same weights under other names.
    if _SINGLE_NAME in listed:
        return [_SINGLE_NAME]
    return [name for name in listed if name.endswith(_SUFFIX) and not _native.is_our_data_object(name)]


def _size(store: _native.Store, name: str, listed: Mapping[str, int], where: str) -> int:
    if name in listed:
        return listed[name]
    try:
        return store.size(name)
    except ObjectNotFoundError as error:
        raise MissingShardError(f"{where}/{name} does not exist, but {INDEX_NAME} names it") from error


def _all_of(tensors_in: Mapping[str, Sequence[PlainTensor]], where: str) -> list[tuple[str, PlainTensor]]:
    holder: dict[str, str] = {}
    for name, tensors in tensors_in.items():
        for tensor in tensors:
            if (other := holder.setdefault(tensor.fqn, name)) != name:
                raise ManifestError(
                    f"{where}/{name}: {tensor.fqn!r:.200} is also in {other}, and no {INDEX_NAME} says which to read"
                )
    return [(name, tensor) for name, tensors in tensors_in.items() for tensor in tensors]


def _indexed(
    tensors_in: Mapping[str, Sequence[PlainTensor]], file_of: Mapping[str, str], where: str
) -> list[tuple[str, PlainTensor]]:
    by_name = {name: {tensor.fqn: tensor for tensor in tensors} for name, tensors in tensors_in.items()}
    for fqn, name in file_of.items():
        if fqn not in by_name[name]:
            raise ManifestError(f"{where}/{name}: {fqn!r:.200} is not in it, but {INDEX_NAME} says so")
    return [(name, by_name[name][fqn]) for fqn, name in file_of.items()]


def _entry(tensor: PlainTensor) -> "TensorEntry":
    shape, first = tensor.shape, (0,) * len(tensor.shape)
    return (encode_fqn(tensor.fqn), True, tensor.dtype, shape, None, False, False, 0, "strided", [first], [shape])


def _read_index(store: _native.Store, size: int, where: str) -> dict[str, str]:
    where = f"{where}/{INDEX_NAME}"
    if size > _MAX_HEADER_BYTES:
        raise ManifestError(f"{where}: {size} bytes; at most {_MAX_HEADER_BYTES} are read")
    return parse_index(store.read(INDEX_NAME), where)


def _read_header(store: _native.Store, name: str, size: int, where: str) -> list[PlainTensor]:
    where = f"{where}/{name}"
    if size < _LENGTH_BYTES:
        raise ManifestError(f"{where}: {size} bytes are too few for a safetensors file")
    head = store.read_range(name, 0, min(size, _HEAD_BYTES))
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or end > size:
        raise ManifestError(
            f"{where}: a header of {length} bytes in a file of {size}; at most {_MAX_HEADER_BYTES} are read"
        )
    if end > len(head):
        head += store.read_range(name, len(head), end)
    return parse_header(head[_LENGTH_BYTES:end], first=end, file_bytes=size, where=where)


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """The file that holds each tensor, from the content of an index.

    Args:
        data: JSON, an object with a `weight_map`.
        where: The index, for messages.

    Raises:
        ManifestError: If it is damaged, or names a file outside its own directory.
    """
    top = _json(data, where)
    file_of = top.get("weight_map") if isinstance(top, dict) else None
    if not isinstance(file_of, dict):
        raise ManifestError(f"{where}: expected an object with a weight_map")
    if not file_of:
        raise ManifestError(f"{where}: the weight_map is empty: it names no tensor")
    known: set[str] = set()
    for fqn, name in file_of.items():
        if isinstance(name, str) and name in known:
            continue
        try:
            known.add(check_object_path(name))
        except CorruptionError as error:
            raise ManifestError(f"{where}: {fqn!r:.200}: {error}") from error
    return file_of


def parse_header(data: bytes, *, first: int, file_bytes: int, where: str) -> list[PlainTensor]:
    """The tensors that a header describes, in the file's order.

    Args:
        data: The header alone, JSON.
        first: The first byte behind the header in the file.
        file_bytes: The file's size in bytes.
        where: The file, for messages.

    Raises:
        ManifestError: If the header is damaged, or does not describe exactly the rest of the file.
        CheckpointError: If the file holds parts of tensors.
    """
    top = _json(data, where)
    if not isinstance(top, dict):
        raise ManifestError(f"{where}: the header is no JSON object")
    _check_notes(top.pop("__metadata__", None), where)
    tensors = [_tensor(fqn, info, first, file_bytes, where) for fqn, info in top.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = first
    for tensor in tensors:
        if tensor.offset != end:
            word = "overlaps what is before it" if tensor.offset < end else "leaves a hole before it"
            raise ManifestError(f"{where}: {tensor.fqn!r:.200} begins at byte {tensor.offset}, not {end}: {word}")
        end += tensor.num_bytes
    if end != file_bytes:
        raise ManifestError(f"{where}: the tensors end at byte {end}, the file at byte {file_bytes}")
    return tensors


def _tensor(fqn: str, info: Any, first: int, file_bytes: int, where: str) -> PlainTensor:
    where = f"{where}: {fqn!r:.200}"
    if not isinstance(info, dict):
        raise ManifestError(f"{where}: expected an object, found {info!r:.100}")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ManifestError(f"{where}: the dtype {dtype!r:.100} is unknown")
    if not _are_counts(shape):
        raise ManifestError(f"{where}: bad shape {shape!r:.100}")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= file_bytes - first:
        found = f"{offsets!r:.100} of {file_bytes - first} bytes"
        raise ManifestError(f"{where}: data_offsets {found} lie outside the file")
    begin, end = offsets
    stored = _DTYPES[dtype]
    per_byte = 2 if stored.name == PAIRS else 1
    bits = 8 * stored.num_bytes // per_byte
    if not _fills(shape, bits, end - begin):
        raise ManifestError(f"{where}: {dtype} of shape {shape!r:.100} does not fill exactly {end - begin} bytes")
    if per_byte > 1:
        shape = _packed(shape, per_byte, where)
    return PlainTensor(fqn, first + begin, end - begin, stored.name, tuple(shape))


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= _MAX_EXTENT for v in values)


def _fills(shape: Sequence[int], bits: int, num_bytes: int) -> bool:
    if 0 in shape:
        return num_bytes == 0
    total = bits
    for extent in shape:
        total *= extent
        # Stopped early: a hostile shape may have a million extents.
        if total > 8 * num_bytes:
            return False
    return total == 8 * num_bytes


def _packed(shape: Sequence[int], per_byte: int, where: str) -> list[int]:
    if not shape or shape[-1] % per_byte:
        raise ManifestError(f"{where}: the last dim of {shape!r:.100} does not end at a whole byte")
    return [*shape[:-1], shape[-1] // per_byte]


def _check_notes(notes: Any, where: str) -> None:
    """Refuse what is not text, and the note by which DCP marks parts of tensors.

    A rank's file does not say how large the whole tensor is, so parts cannot be told from a set with a file missing.
    """
    if notes is None:
        return
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ManifestError(f"{where}: __metadata__ is not an object of strings")
    if _SHARDING_INFO not in notes:
        return
    info = _json(notes[_SHARDING_INFO].encode("utf-8", "surrogatepass"), f"{where}: {_SHARDING_INFO}")
    try:
        parts = [fqn for fqn, value in info.items() if any(value["saved_offsets"])]
    except (AttributeError, KeyError, TypeError) as error:
        raise ManifestError(f"{where}: {_SHARDING_INFO} is damaged: {error!r}") from error
    if parts:
        raise CheckpointError(
            f"{where} holds a part of {parts[0]!r:.200}, as HuggingFaceStorageWriter(save_distributed=True) writes it; "
            "join the parts with torch.distributed.checkpoint's consolidate_safetensors_files, then read the result"
        )


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: damaged JSON: {error!s:.300}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.200} stands twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
