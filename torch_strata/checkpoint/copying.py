"""Writes what any checkpoint holds anew, as one of ours: copies between stores, imports, checkpoints that stand alone.

Reads and writes in bounded memory, verifies what it reads, and commits last: whatever ends it before leaves at the
destination what was there. Imports no torch.
"""

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_strata import _native
from torch_strata._store import open_store, resolve_configs
from torch_strata.checkpoint._boxes import Box, contiguous, parts_of
from torch_strata.checkpoint._content import BATCH_BYTES, Content, Piece, Progress, Tensor, content_of
from torch_strata.checkpoint._entries import pack_entries
from torch_strata.checkpoint._opened import open_checkpoint, opened_safetensors
from torch_strata.checkpoint._paths import encode_fqn
from torch_strata.checkpoint._planner_data import encode_planner_data
from torch_strata.checkpoint._run_root import check_no_run
from torch_strata.checkpoint._safetensors import holds_safetensors, open_safetensors_file
from torch_strata.checkpoint._stock_pickle import stock_parts
from torch_strata.checkpoint._torch_file import open_torch_file
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.config import StorageConfig
from torch_strata.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ObjectNotFoundError,
    StorageError,
)

if TYPE_CHECKING:
    from torch_strata._types import RunInfo, TensorEntry

__all__ = ["CopyReport", "Destination", "copy_checkpoint", "import_checkpoint", "open_content", "write_content"]

# offsets, kind, device, bytes, dtype, shape, strides.
_Template = tuple["tuple[int, ...] | None", int, int, int, str, "tuple[int, ...]", "tuple[int, ...]"]


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """What was written.

    Attributes:
        save_id: Identity of the new save.
        num_tensors: Keys with a tensor.
        num_values: Keys with another value.
        payload_bytes: What the tensors and values take, in bytes.
        referred_bytes: How much of it stands in earlier checkpoints of the same run and was not written again.
        warnings: What should be known.
    """

    save_id: str
    num_tensors: int
    num_values: int
    payload_bytes: int
    referred_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint is written.

    Attributes:
        place: URL or local path.
        config: Settings of its store.
        overwrite: Whether a checkpoint there may be replaced.
        run_info: Where in a run it stands.
        run_root: The run's store; a run that claims it ends the copy.
        generation: Of the run's root when the copy began.
        parent: What of the run it may refer to.
        as_safetensors: Whether tensors are written whole to files of safetensors, with their index.
    """

    place: str
    config: StorageConfig
    overwrite: bool = False
    run_info: "RunInfo | None" = None
    run_root: _native.Store | None = None
    generation: int = 0
    parent: _native.Parent | None = None
    as_safetensors: bool = False


def copy_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    for_stock: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Write a checkpoint of ours, of stock torch or of safetensors to another place, standing alone there.

    What it refers to in other checkpoints is written with it. What a manager said of it stays with it. A model that a
    manager has saved in files of safetensors is written in such files again.

    Args:
        source: URL or local path of a checkpoint.
        destination: URL or local path of a folder.
        config: Limits of both stores.
        storage_options: The source's own settings; win over those of `config`.
        to_options: The destination's own settings; those of the source if not given. Local stores have none.
        rank: To copy what that rank saved on its own.
        overwrite: Whether a checkpoint at the destination may be replaced.
        for_stock: Whether stock torch has to read the copy, which it cannot if there are safetensors in it.
        progress: Told of bytes that are written.

    Raises:
        CheckpointNotFoundError: If nothing is committed at the source.
        CheckpointExistsError: If a checkpoint is at the destination and may not be replaced, or the destination is the
            root of a run.
        CheckpointError: If a value cannot be copied without torch; if it is no state but bytes, which stock torch
            cannot read.
        CorruptionError: If what is read is damaged; nothing is committed then.
        StorageError: If a store fails.
    """
    config, to_config = resolve_configs(source, destination, config, storage_options, to_options)
    opened = open_checkpoint(open_store(source, config), source, rank=rank)
    to = Destination(
        place=os.fspath(destination),
        config=to_config,
        overwrite=overwrite,
        run_info=opened.native.run,
        as_safetensors=opened.native.has_safetensors and not for_stock,
    )
    content = content_of(opened)
    if for_stock:
        content.check_state()
    return write_content(content, to, progress)


def import_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Write a file of torch.save, a stock checkpoint or safetensors as a checkpoint of ours.

    Pickles are read with what torch's ``weights_only`` knows by default, and nothing that they name is run. Tensors are
    read as they are written, never all at once; one that is not contiguous in a torch.save file is read whole.

    Args:
        source: URL or local path: of a file for torch.save and single safetensors, else of a folder.
        destination: URL or local path of a folder.
        config: Limits of both stores.
        storage_options: The source's own settings; win over those of `config`.
        to_options: The destination's own settings; those of the source if not given. Local stores have none.
        overwrite: Whether a checkpoint at the destination may be replaced.
        progress: Told of bytes that are written.

    Raises:
        As `copy_checkpoint`.
    """
    config, to_config = resolve_configs(source, destination, config, storage_options, to_options)
    to = Destination(place=os.fspath(destination), config=to_config, overwrite=overwrite)
    return write_content(open_content(source, config), to, progress)


def open_content(source: str | os.PathLike[str], config: StorageConfig, *, rank: int | None = None) -> Content:
    """What is at a place: a checkpoint, or a file of torch.save or of safetensors.

    Raises:
        CheckpointNotFoundError: If it is neither.
        CheckpointError, CorruptionError: If it cannot be read.
        StorageError: If the place cannot be reached.
    """
    try:
        return content_of(open_checkpoint(open_store(source, config), source, rank=rank))
    except (CheckpointNotFoundError, StorageError) as error:
        folder, name = split_place(source)
        if rank is not None or not folder or not name:
            raise
        store = open_store(folder, config)
        try:
            store.size(name)
        except ObjectNotFoundError:
            if isinstance(error, StorageError):
                raise error from None
            raise CheckpointNotFoundError(f"{error}; there is no file of that name either") from None
        except StorageError:
            raise error from None
    if name.endswith(".safetensors"):
        return content_of(opened_safetensors(*open_safetensors_file(store, name, folder), os.fspath(source)))
    return open_torch_file(store, name, os.fspath(source))


def split_place(place: str | os.PathLike[str]) -> tuple[str, str]:
    """Folder and name of a file at a place."""
    text = os.fspath(place).rstrip("/")
    if "://" not in text:
        text = os.path.abspath(text)
    folder, _, name = text.rpartition("/")
    return folder or "/", name


def write_content(content: Content, to: Destination, progress: Progress | None = None) -> CopyReport:
    """Write `content` as one committed checkpoint.

    Raises:
        As `copy_checkpoint`.
    """
    save_id, stats = commit_content(content, to, progress)
    return CopyReport(
        save_id=save_id,
        num_tensors=len(content.tensors),
        num_values=len(content.values),
        payload_bytes=stats.payload_bytes,
        referred_bytes=stats.referred_bytes,
        warnings=tuple(stats.warnings),
    )


def commit_content(
    content: Content, to: Destination, progress: Progress | None = None
) -> tuple[str, _native.CommitStats]:
    """As `write_content`; the new save's identity, and what the commit did.

    Raises:
        As `copy_checkpoint`.
    """
    store = open_store(to.place, to.config)
    if to.run_root is None:
        check_no_run(to.place, to.config)
    base = _native.open_base(store, rank=None)
    if not to.overwrite and (base.exists or holds_safetensors(store)):
        raise CheckpointExistsError(f"a checkpoint already exists at {to.place}")
    # Before anything is written: what cannot be described is not begun.
    planner_data = encode_planner_data(content.planner_data)
    if content.planner_data is not None and not content.paths and content.order:
        raise CheckpointError(f"{content.where}: its planner_data is not DCP's own mapping of keys to paths")
    save_id = uuid.uuid4().hex
    stock = None
    if not to.as_safetensors:
        stock = stock_parts(content.planner_data, checkpoint_id=to.place, save_id=save_id)
    try:
        write = _write_whole if to.as_safetensors else _write_pieces
        records, entries = write(content, to, store, save_id, progress or (lambda num_bytes: None))
        stats = _native.commit(
            store,
            base,
            records,
            pack_entries(entries),
            planner_data=planner_data,
            stock=stock,
            save_id=save_id,
            previous_save_id=base.save_id,
            rank=None,
            world_size=1,
            generation=to.generation,
            run_root=to.run_root,
            run=_said(to),
        )
    except BaseException:
        _discard(store, save_id, base)
        raise
    return save_id, stats


def _write_whole(
    content: Content, to: Destination, store: _native.Store, save_id: str, done: Progress
) -> "tuple[list[bytes], list[TensorEntry]]":
    """Write each tensor whole, into files of safetensors; the record, and what the index says of the keys."""
    record = _native.rewrite_safetensors(content.native, store, save_id=save_id, transfer=_native.Transfer())
    done(sum(tensor.num_bytes for tensor in content.tensors.values()))
    return [record], _whole_entries(content)


def _write_pieces(
    content: Content, to: Destination, store: _native.Store, save_id: str, done: Progress
) -> "tuple[list[bytes], list[TensorEntry]]":
    """Write each tensor in the pieces in which it is stored; the records, and what the index says of the keys."""
    plan = _Plan(content)
    records: list[bytes] = []
    for items, num_bytes in plan.batches():
        records.append(items.write(store, rank=len(records), save_id=save_id, parent=to.parent))
        done(num_bytes)
    return records, plan.entries()


def _whole_entries(content: Content) -> "list[TensorEntry]":
    """What the index says of keys whose tensors are stored whole."""
    found: list[TensorEntry] = []
    for fqn in content.order:
        tensor = content.tensors.get(fqn)
        if tensor is None:
            found.append(_value_entry(fqn))
        else:
            found.append((*tensor.entry[:9], [(0,) * len(tensor.shape)], [tensor.shape]))
    return found


def _value_entry(fqn: str) -> "TensorEntry":
    return encode_fqn(fqn), False, "", (), None, False, False, 0, "", [], []


def _said(to: Destination) -> "RunInfo | None":
    """What is said of the copy: one that cannot refer to others is whole by itself."""
    if to.run_info is None or to.parent is not None or to.run_info[2] != CheckpointType.INCREMENTAL:
        return to.run_info
    step, epoch, _, metadata, metrics = to.run_info
    return step, epoch, CheckpointType.FULL.value, metadata, metrics


def _discard(store: _native.Store, save_id: str, base: _native.Base) -> None:
    """Remove what a copy wrote that nobody can commit any more; what stays goes with the next save there."""
    try:
        if _native.open_base(store, rank=None).save_id == save_id:
            return  # the failure came after the commit
        for name, _ in store.list(""):
            if f".{save_id}." in name:
                store.delete(name)
    except StorageError:
        pass  # the first failure is the one to tell


class _Items:
    """Items as `_native.write_items` takes them."""

    def __init__(self) -> None:
        self.rows: list[tuple[bytes, int, int, int, Any]] = []  # fqn, index, template, address, keeper
        self.templates: dict[_Template, int] = {}

    def add(self, fqn: str, index: int, template: _Template, address: int, keeper: Any) -> None:
        """Add one; `keeper`: of the memory, or the bytes of what is no plain tensor."""
        number = self.templates.setdefault(template, len(self.templates))
        self.rows.append((encode_fqn(fqn), index, number, address, keeper))

    def write(self, store: _native.Store, *, rank: int, save_id: str, parent: _native.Parent | None) -> bytes:
        """Write them; the record of `rank`."""
        return _native.write_items(
            store,
            self.rows,
            list(self.templates),
            rank=rank,
            save_id=save_id,
            parent=parent,
            transfer=_native.Transfer(),
        )


class _Plan:
    """Which items hold a content: its own pieces, those that are too large for a batch in parts."""

    def __init__(self, content: Content) -> None:
        self._content = content
        # Of each tensor, with the number of each.
        self._parts: dict[str, dict[Box, int]] = {}
        # Names of equal memory stand together, so that it is written once.
        self._names: dict[tuple[Any, ...], list[tuple[Tensor, Box]]] = {}
        self._framed: list[tuple[Tensor, Piece]] = []
        for tensor, piece in self._pieces():
            if tensor.framed:
                self._framed.append((tensor, piece))
                self._add_part(tensor, (piece.offsets, piece.shape))
                continue
            for first, lengths in parts_of(piece.shape, BATCH_BYTES // tensor.layout.num_bytes):
                box = tuple(a + b for a, b in zip(piece.offsets, first, strict=True)), lengths
                key = (piece.row, piece.gathered, first, lengths)
                self._names.setdefault(key, []).append((tensor, box))
                self._add_part(tensor, box)

    def _add_part(self, tensor: Tensor, box: Box) -> None:
        parts = self._parts.setdefault(tensor.fqn, {})
        parts[box] = len(parts)

    def _pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        pairs = [(tensor, piece) for tensor in self._content.tensors.values() for piece in tensor.pieces]
        return iter(sorted(pairs, key=lambda pair: pair[1].row))

    def batches(self) -> Iterator[tuple[_Items, int]]:
        """Items in memory with their bytes; of one batch until the next is asked for."""
        yield from self._value_batches()
        names = iter(self._names.values())
        boxes = (group[0] for group in self._names.values())
        for batch, buffer in self._content.stream(boxes, BATCH_BYTES):
            items = _Items()
            for wanted in batch:
                address = buffer.address + wanted.at if wanted.num_bytes else 0
                for tensor, (first, shape) in next(names):
                    memory = (_native.TENSOR, -1, wanted.num_bytes, tensor.dtype, shape, contiguous(shape))
                    items.add(tensor.fqn, self._index(tensor, (first, shape)), (first, *memory), address, buffer)
            yield items, sum(wanted.num_bytes for wanted in batch)

    def _value_batches(self) -> Iterator[tuple[_Items, int]]:
        """First, and even if there are none: a checkpoint of nothing has one record too."""
        items, held = _Items(), 0
        for fqn, index, template, data in self._values():
            items.add(fqn, index, template, 0, data)
            held += len(data)
            if held >= BATCH_BYTES:
                yield items, held
                items, held = _Items(), 0
        yield items, held

    def _values(self) -> Iterable[tuple[str, int, _Template, bytes]]:
        for fqn, data in self._content.read_values(self._content.values):
            yield fqn, -1, (None, _native.BYTES, -1, 0, "", (), ()), data
        for tensor, piece in self._framed:
            (data,), _ = self._content.native.read([], [piece.row], [], verify="inplace")
            shape = piece.shape
            template = (piece.offsets, _native.TORCH_SAVE, -1, 0, tensor.entry[2], shape, contiguous(shape))
            yield tensor.fqn, self._index(tensor, (piece.offsets, shape)), template, data

    def _index(self, tensor: Tensor, box: Box) -> int:
        return self._parts[tensor.fqn][box]

    def entries(self) -> "list[TensorEntry]":
        """What the index says of the keys, in the state's order."""
        found: list[TensorEntry] = []
        for fqn in self._content.order:
            tensor = self._content.tensors.get(fqn)
            if tensor is None:
                found.append(_value_entry(fqn))
                continue
            name, _, _, size, strides, grad, pin, memory_format, layout, _, _ = tensor.entry
            strides = None if strides is None else tuple(strides)
            boxes = self._parts[fqn]
            dtype = tensor.entry[2] if tensor.framed else tensor.dtype
            offsets, sizes = [box[0] for box in boxes], [box[1] for box in boxes]
            found.append((name, True, dtype, size, strides, grad, pin, memory_format, layout, offsets, sizes))
        return found
