"""Turns a checkpoint into files that others read: safetensors as Hugging Face lays them out, or one of torch.save.

Streams in bounded memory and verifies what it reads. Imports no torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch_strata import _native
from torch_strata._store import local_folder, open_store, resolve_configs
from torch_strata.checkpoint._boxes import contiguous
from torch_strata.checkpoint._content import Content, Progress, Tensor
from torch_strata.checkpoint._dtypes import PAIRS, dtype_named
from torch_strata.checkpoint._keys import KEYS_KEY, Keys
from torch_strata.checkpoint._paths import Path, dotted, nested
from torch_strata.checkpoint._run_root import check_no_run, holds_checkpoint
from torch_strata.checkpoint._safetensors import INDEX_NAME, why_not_safetensors
from torch_strata.checkpoint._stream import ObjectStream
from torch_strata.checkpoint._torch_file import load_value
from torch_strata.checkpoint._torch_pickle import Storage, TensorRef, dump
from torch_strata.checkpoint._torch_zip import TorchZip, archive_bytes
from torch_strata.checkpoint.copying import open_content, split_place
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError, CheckpointExistsError, ObjectNotFoundError, StorageError

__all__ = ["ExportReport", "export_safetensors", "export_torch"]

# Memory of a batch, of which two are held: half of it is on its way in while the other goes out.
_BATCH_BYTES = 64 << 20
# Hugging Face's own default is 5 GB.
_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written.

    Attributes:
        files: Names of the files at the destination.
        num_tensors: Tensors in them.
        tensor_bytes: What these take, in bytes.
        left_out: Keys that the format cannot hold: those that are no tensor, for safetensors.
    """

    files: tuple[str, ...]
    num_tensors: int
    tensor_bytes: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Chosen:
    """A key to export, and what it is called there."""

    fqn: str
    name: str
    path: Path


def export_safetensors(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    key: str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the tensors as `model.safetensors`, or as shards and their index.

    The index is written before the shards that it names: with one of them missing nobody takes the rest for the model.

    Args:
        source: URL or local path of a checkpoint that `StrataReader` opens, or of a file of torch.save.
        destination: URL or local path of a folder without safetensors.
        key: Only what is below this key, named from there: ``model`` makes ``w`` of ``model.w``.
        max_shard_bytes: Largest file, in bytes of tensors; one tensor may be larger.
        config: Limits of both stores.
        storage_options: The source's own settings; win over those of `config`.
        to_options: The destination's own settings; those of the source if not given. Local stores have none.
        rank: To export what that rank saved on its own.
        progress: Told of bytes that are written.

    Raises:
        CheckpointNotFoundError: If nothing is committed at the source.
        CheckpointExistsError: If a checkpoint is at the destination, or it is the root of a run.
        CheckpointError: If a tensor cannot be held by the format, or there is none; nothing is written then.
        CorruptionError: If what is read is damaged; what was written is removed.
        StorageError: If a store fails.
    """
    config, to_config = resolve_configs(source, destination, config, storage_options, to_options)
    content = open_content(source, config, rank=rank)
    content.check_state()
    store = open_store(destination, to_config)
    check_no_run(destination, to_config)
    _check_free(store, os.fspath(destination))
    chosen = _choose(content, key)
    tensors = [(item.name, content.tensors[item.fqn]) for item in chosen if item.fqn in content.tensors]
    if not tensors:
        below = "" if key is None else f" below the key {key!r:.200}"
        raise CheckpointError(f"{content.where}: no tensor is{below or ' in it'}, and safetensors hold nothing else")
    for name, tensor in tensors:
        _check_safetensors(content, name, tensor)
    shards = _shards(tensors, max_shard_bytes)
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    total = sum(tensor.num_bytes for _, tensor in tensors)
    written: list[str] = []
    try:
        if len(shards) > 1:
            where = {name: names[number] for number, shard in enumerate(shards) for name, _ in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            written.append(INDEX_NAME)
            store.put(INDEX_NAME, json.dumps(index, indent=2).encode())
        for name, shard in zip(names, shards, strict=True):
            _write_safetensors(content, store, local_folder(destination), name, shard, progress)
            written.append(name)
    except BaseException:
        _remove(store, reversed(written))
        raise
    left_out = tuple(item.fqn for item in chosen if item.fqn not in content.tensors)
    return ExportReport(files=tuple(written), num_tensors=len(tensors), tensor_bytes=total, left_out=left_out)


def export_torch(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    key: str | None = None,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the state as one file that ``torch.load(weights_only=True)`` reads, nested as it was saved.

    Args:
        source: URL or local path of a checkpoint that `StrataReader` opens, or of a file.
        destination: URL or local path of a file that is not there yet.
        key: Only what is below this key, as if it were all.
        config: Limits of both stores.
        storage_options: The source's own settings; win over those of `config`.
        to_options: The destination's own settings; those of the source if not given. Local stores have none.
        rank: To export what that rank saved on its own.
        progress: Told of bytes that are written.

    Raises:
        CheckpointExistsError: If the file is there.
        CheckpointError: If a value is of a class that ``weights_only`` does not load, or there is no state but bytes;
            nothing is written then.
        CheckpointNotFoundError, CorruptionError, StorageError: As `export_safetensors`.
    """
    config, to_config = resolve_configs(source, destination, config, storage_options, to_options)
    content = open_content(source, config, rank=rank)
    content.check_state()
    folder, name = split_place(destination)
    store = open_store(folder, to_config)
    with suppress(ObjectNotFoundError):
        store.size(name)
        raise CheckpointExistsError(f"{os.fspath(destination)} already exists")
    chosen = _choose(content, key)
    state = _state(content, chosen)
    keys = _keys(content)
    keys = keys if key is None else keys.below(key)
    keys.give_back(state, [()])
    data_pkl, storages = dump(state)
    records = [(f"data/{number}", storage.num_bytes) for number, storage in enumerate(storages)]
    stream = ObjectStream(store, name, archive_bytes(data_pkl, records), local_folder(folder))
    try:
        archive = TorchZip(stream.write)
        archive.begin(data_pkl)
        feed = _Feed(content, [storage.source for storage in storages if isinstance(storage.source, Tensor)])
        for (record, num_bytes), storage in zip(records, storages, strict=True):
            chunks = feed.next_tensor() if isinstance(storage.source, Tensor) else [storage.source]
            archive.add(record, num_bytes, _counted(chunks, progress))
        archive.finish()
        stream.finish()
    except BaseException:
        stream.abort()
        raise
    total = sum(size for _, size in records)
    return ExportReport(files=(name,), num_tensors=len(storages), tensor_bytes=total)


def _choose(content: Content, key: str | None) -> list[_Chosen]:
    if key is None:
        return [_Chosen(fqn, fqn, content.path_of(fqn)) for fqn in content.order if not _is_note(content, fqn)]
    chosen = []
    for fqn in content.order:
        if not fqn.startswith(f"{key}."):
            continue
        name, path = fqn[len(key) + 1 :], content.path_of(fqn)
        heads = [at for at in range(1, len(path)) if dotted(path[:at]) == key]
        chosen.append(_Chosen(fqn, name, path[heads[0] :] if heads else (name,)))
    if not chosen:
        raise CheckpointError(f"{content.where}: nothing is below the key {key!r:.200}")
    return chosen


def _check_free(store: _native.Store, place: str) -> None:
    if holds_checkpoint(store):
        raise CheckpointExistsError(f"a checkpoint already exists at {place}, or what is left of one")


def _remove(store: _native.Store, names: Any) -> None:
    for name in names:
        with suppress(StorageError):  # the first failure is the one to tell
            store.delete(name)


def _check_safetensors(content: Content, name: str, tensor: Tensor) -> None:
    why = "a tensor subclass" if tensor.framed else why_not_safetensors(name, tensor.dtype, tensor.shape)
    if why is not None:
        raise CheckpointError(f"{content.where}: {tensor.fqn!r:.200}: safetensors cannot hold {why}")


def _shards(tensors: Sequence[tuple[str, Tensor]], max_bytes: int) -> list[list[tuple[str, Tensor]]]:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    held = 0
    for name, tensor in tensors:
        if shards[-1] and held + tensor.num_bytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append((name, tensor))
        held += tensor.num_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write_safetensors(
    content: Content,
    store: _native.Store,
    folder: str | None,
    name: str,
    shard: Sequence[tuple[str, Tensor]],
    progress: Progress | None,
) -> None:
    # Larger elements first: each tensor then begins at a multiple of its element.
    ordered = sorted(shard, key=lambda item: -item[1].layout.num_bytes)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, tensor in ordered:
        shape = list(tensor.shape)
        if tensor.dtype == PAIRS:
            shape[-1] *= 2
        end = at + tensor.num_bytes
        header[key] = {"dtype": tensor.layout.safetensors, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream = ObjectStream(store, name, 8 + len(text) + at, folder)
    try:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        boxes = content.boxes((tensor for _, tensor in ordered), _BATCH_BYTES)
        for batch, buffer in content.stream(boxes, _BATCH_BYTES):
            for wanted in batch:
                stream.write(buffer.of(wanted), progress)
        stream.finish()
    except BaseException:
        stream.abort()
        raise


def _state(content: Content, chosen: Sequence[_Chosen]) -> Any:
    """The state with tensors as references: what torch.save would have been given."""
    storages: dict[tuple[Any, ...], Storage] = {}
    values = content.read_values(item.fqn for item in chosen if item.fqn not in content.tensors)

    def value_of(fqn: str) -> Any:
        tensor = content.tensors.get(fqn)
        if tensor is None:
            return load_value(next(values)[1], f"{content.where}: {fqn!r:.200}")
        return _reference(content, tensor, storages)

    return nested([(item.path, value_of(item.fqn)) for item in chosen], f"{content.where}: planner_data")


def _keys(content: Content) -> Keys:
    """What the one who saved has noted of keys; it is no part of the state."""
    notes = content.read_values(fqn for fqn in content.order if _is_note(content, fqn))
    return Keys.of_entries(load_value(data, f"{content.where}: {KEYS_KEY}") for _, data in notes)


def _is_note(content: Content, fqn: str) -> bool:
    return fqn in content.values and content.path_of(fqn)[:1] == (KEYS_KEY,)


def _reference(content: Content, tensor: Tensor, storages: dict[tuple[Any, ...], Storage]) -> TensorRef:
    if tensor.framed:
        raise CheckpointError(f"{content.where}: {tensor.fqn!r:.200} is a tensor subclass, which needs torch to read")
    typed = dtype_named(tensor.dtype).storage is not None
    count = tensor.num_bytes // (tensor.layout.num_bytes if typed else 1)
    # Names of one stored payload stay tied.
    key = tuple((piece.row, piece.offsets, piece.gathered) for piece in tensor.pieces), tensor.shape
    storage = storages.setdefault(key, Storage("", tensor.dtype if typed else None, count, tensor))
    return TensorRef(storage, tensor.dtype, 0, tensor.shape, contiguous(tensor.shape), tensor.entry[5])


def _counted(chunks: Any, progress: Progress | None) -> Any:
    for chunk in chunks:
        yield chunk
        if progress is not None:
            progress(memoryview(chunk).nbytes)


class _Feed:
    """The bytes of tensors, one after another, out of batches that do not end where they do."""

    def __init__(self, content: Content, tensors: Sequence[Tensor]) -> None:
        stream = content.stream(content.boxes(tensors, _BATCH_BYTES), _BATCH_BYTES)
        self._parts = ((wanted, buffer) for batch, buffer in stream for wanted in batch)
        self._tensors = iter(tensors)

    def next_tensor(self) -> Any:
        """The next tensor's bytes, in as many parts as it has; all are to be taken before the next call."""
        left = next(self._tensors).num_bytes
        while True:
            wanted, buffer = next(self._parts)
            yield buffer.of(wanted)
            left -= wanted.num_bytes
            if left == 0:
                return
