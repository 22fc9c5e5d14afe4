"""One rank's part of a load: everything is resolved and compared before the first byte of a destination changes."""

import io
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from torch_strata import _native
from torch_strata.checkpoint._exchange import Exchange, Lent, Region
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._metadata import dtype_of
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._part import Part, bump_versions, copy_into, lent, place_of, takes_bytes
from torch_strata.checkpoint._paths import encode_fqn
from torch_strata.checkpoint._payload import Trusted, load_tensor, load_value
from torch_strata.checkpoint._reads import CompactReads, PlannedReads, whole_read
from torch_strata.checkpoint._resolve import check_framed, check_value, finds_plainly, guarded, resolve_parts
from torch_strata.checkpoint._shortcuts import keeps_methods
from torch_strata.checkpoint._tensors import PLAIN_TYPES, device_number, is_reachable, wait_for_kernels
from torch_strata.checkpoint._ties import address_of, without_ties
from torch_strata.checkpoint._together import separated, share_blobs, share_regions
from torch_strata.checkpoint.planner import StrataLoadPlanner
from torch_strata.checkpoint.store_stats import StoreStats
from torch_strata.errors import CheckpointError, CorruptionError

__all__ = ["LoadSettings", "ReadStats", "load_plan"]

# These would only call torch.load on the payload again: the value that was loaded safely takes its place.
_KNOWN_LOAD_BYTES = (DefaultLoadPlanner.load_bytes, StrataLoadPlanner.load_bytes)


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What the caller of a load decided."""

    verify: str
    allow_dtype_cast: bool
    trusted: Sequence[Trusted]
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """What one load read on this rank.

    Attributes:
        bytes_read: Bytes that came from the store.
        blocks_verified: Blocks whose digest was compared.
        unverified_bytes: Bytes without a digest to compare: parts of stock items.
        requests: Reads sent to the store.
        bytes_received: Bytes that another rank of the group has read and handed on.
        seconds: Time from plan to the last committed tensor, in seconds.
        store: What the store went through, the metadata's reading included.
    """

    bytes_read: int = 0
    blocks_verified: int = 0
    unverified_bytes: int = 0
    requests: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    store: StoreStats = field(default_factory=StoreStats)

    def plus(self, more: _native.ReadStats) -> "ReadStats":
        """The sum of both."""
        return ReadStats(
            bytes_read=self.bytes_read + more.bytes_read,
            blocks_verified=self.blocks_verified + more.blocks_verified,
            unverified_bytes=self.unverified_bytes + more.unverified_bytes,
            requests=self.requests + more.requests,
            bytes_received=self.bytes_received,
        )


@gc_paused()
def load_plan(
    opened: Opened,
    plan: LoadPlan,
    planner: LoadPlanner,
    settings: LoadSettings,
    exchange: Exchange | None = None,
    *,
    beyond: MutableMapping[str, Any],
) -> ReadStats:
    """Read every item of `plan` into `planner`'s state; with an exchange, what other ranks need too only once.

    Pickled values of the names in `beyond` go there.

    Raises:
        LayoutMismatchError: If a destination has another dtype, shape or kind, or is to get two tensors that differ;
            nothing has been changed then.
        CheckpointError: If a value needs a class that is not trusted; nothing has been changed then.
        CorruptionError: If stored bytes are damaged; the destinations named are undefined unless ``verify="before"``.
        ObjectNotFoundError: If an object is missing.
        CoordinationError: If a rank of the exchange has died or is too late.
    """
    items: Sequence[ReadItem] = plan.items
    whole = _Whole()
    if exchange is None and isinstance(items, PlannedReads) and finds_plainly(planner):
        items = whole.take(opened, items, planner)
    parts = _locate(opened, items)
    values = [part for part in parts if part.item.type is LoadItemType.BYTE_IO]
    tensors = [part for part in parts if part.item.type is not LoadItemType.BYTE_IO]
    for part in values:
        check_value(opened, part, planner)
    resolve_parts(opened, tensors, planner, allow_dtype_cast=settings.allow_dtype_cast)
    framed = [part for part in tensors if part.is_blob]
    regions = [part for part in tensors if not part.is_blob]
    regions = without_ties(opened, regions, whole.tied_to(opened, regions), verify=settings.verify)
    wait_for_kernels(device_number(part.target) for part in regions if is_reachable(part.target))
    if exchange is None:
        stats = _read_regions(opened, regions, settings, _read_blobs(opened, parts, settings), whole)
    else:
        stats = _read_together(opened, [part for part in parts if part.is_blob], regions, settings, exchange)
    for part in framed:
        copy_into(part.target, part.value)
    if not keeps_methods(planner, DefaultLoadPlanner, "commit_tensor"):  # which does nothing
        for part in tensors:
            guarded(part, planner.commit_tensor, part.item, part.target)
    for part in values:
        if part.fqn in beyond:
            _, beyond[part.fqn] = part.value
        else:
            guarded(part, _set_value, planner, part)
    return stats


class _Whole:
    """Tensors of the host that take all that is stored under a name, as it lies there."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, torch.Tensor]] = []  # row, address, target
        self.rows: dict[int, int] = {}  # by address: the first of them is read, the others see what it got
        self._names: dict[int, str] = {}  # by row

    def take(self, opened: Opened, items: PlannedReads, planner: DefaultLoadPlanner) -> Sequence[ReadItem]:
        """Take those that are, without an object for each; the other items.

        Raises:
            CorruptionError: If nothing is stored under a name.
        """
        fqns = [fqn for fqn, _ in items.whole]
        starts: dict[int, int] = {}
        places = [starts.setdefault(len(size), len(starts)) for _, size in items.whole]
        rows, numbers, table = _located(opened, fqns, places, [(0,) * dims for dims in starts])
        described = [
            (dtype_of(dtype), tuple(shape)) if kind == _native.TENSOR else None for kind, dtype, shape, _ in table
        ]
        left = CompactReads()
        state = planner.state_dict
        for (fqn, size), row, number in zip(items.whole, rows, numbers, strict=True):
            found = state[fqn]
            stored = described[number]
            is_plain = stored is not None and type(found) in PLAIN_TYPES and found.layout is torch.strided
            if not is_plain or stored != (found.dtype, found.shape) or size != found.shape or not self.add(row, found):
                left.append(whole_read(fqn, size))
            else:
                self._names[row] = fqn
        left += items.others
        return left

    def tied_to(self, opened: Opened, parts: Sequence[Part]) -> list[Part]:
        """Those that begin where the destination of one of `parts` does."""
        if not self.places:
            return []
        addresses = {address_of(part.target) for part in parts}
        tied = [(row, target) for row, address, target in self.places if address in addresses]
        found = _locate(opened, [whole_read(self._names[row], target.shape) for row, target in tied])
        for part, (_, target) in zip(found, tied, strict=True):
            part.target = target
        return found

    def add(self, row: int, target: torch.Tensor) -> bool:
        """Take a strided tensor of the stored dtype and shape, if Rust may fill it as it lies."""
        if not target.is_cpu or not target.is_contiguous() or target.is_conj() or target.is_neg():
            return False
        address = target.data_ptr()
        if not address or self.rows.setdefault(address, row) != row:
            return False
        self.places.append((row, address, target))
        return True


def _locate(opened: Opened, items: Sequence[ReadItem]) -> list[Part]:
    numbers: dict[tuple[int, ...] | None, int] = {}
    indices = [item.storage_index for item in items]
    places = [numbers.setdefault(index.offset, len(numbers)) for index in indices]
    offsets = [None if offset is None else tuple(offset) for offset in numbers]
    rows, described, table = _located(opened, [index.fqn for index in indices], places, offsets)
    known = [(kind, dtype, tuple(shape), tuple(strides)) for kind, dtype, shape, strides in table]
    parts = [Part(item, row, *known[number]) for item, row, number in zip(items, rows, described, strict=True)]
    if opened.transforms:
        for part, index, place in zip(parts, indices, places, strict=True):
            part.transforms = opened.transforms.get((encode_fqn(index.fqn), offsets[place]), ())
    return parts


def _located(
    opened: Opened, fqns: Sequence[str], places: Sequence[int], offsets: Sequence[tuple[int, ...] | None]
) -> tuple[list[int], list[int], list[tuple[int, str, list[int], list[int]]]]:
    """As `_native.Checkpoint.locate`.

    Raises:
        CorruptionError: If nothing is stored under a name.
    """
    rows, described, table = opened.native.locate([encode_fqn(fqn) for fqn in fqns], places, offsets)
    if min(rows, default=0) < 0:
        row = next(row for row, found in enumerate(rows) if found < 0)
        at = "" if offsets[places[row]] is None else f" at {offsets[places[row]]}"
        name = encode_fqn(fqns[row]).decode("utf-8", "replace")
        raise CorruptionError(f"{opened.where}: no object holds {name!r}{at}")
    return rows, described, table


def _read_together(
    opened: Opened, blobs: Sequence[Part], regions: Sequence[Part], settings: LoadSettings, exchange: Exchange
) -> ReadStats:
    """As `_read_blobs`, then `_read_regions`, with what several ranks need read once."""
    # What stock has transformed may be found to be a tensor, which is not to be read as one.
    rows = list(dict.fromkeys(part.row for part in blobs if part.kind != _native.TENSOR))
    joint, apart = separated(regions)
    wanted: list[list[Region]] = [
        [(row, (), ()) for row in rows],
        [(part.row, tuple(part.item.storage_offsets), tuple(part.item.lengths)) for part in joint],
    ]
    pickled, tensors = exchange.share(opened.native, wanted, verify=settings.verify)
    payloads, checked = share_blobs(opened, rows, pickled, exchange)
    stats = _read_blobs(opened, blobs, settings, payloads).plus(checked)
    apart += [part for part, span in zip(joint, tensors.spans, strict=True) if span is None]
    stats = _read_regions(opened, apart, settings, stats)
    stats = stats.plus(share_regions(joint, tensors, exchange))
    exchange.close()
    return replace(
        stats,
        bytes_read=stats.bytes_read + exchange.bytes_read,
        requests=stats.requests + exchange.requests,
        bytes_received=exchange.bytes_received,
    )


def _read_blobs(
    opened: Opened, parts: Iterable[Part], settings: LoadSettings, known: Mapping[int, bytes] | None = None
) -> ReadStats:
    """Read, but for the rows that are `known`, and load what is pickled, before any tensor's destination changes."""
    blobs = [part for part in parts if part.is_blob]
    data_of = dict(known or {})
    rows = list(dict.fromkeys(part.row for part in blobs if part.row not in data_of))
    stats = ReadStats()
    if rows:
        payloads, more = opened.native.read([], rows, [], verify=settings.verify)
        data_of.update(zip(rows, payloads, strict=True))
        stats = stats.plus(more)
    for part in blobs:
        part.value = _load_blob(opened, part, data_of[part.row], settings)
    return stats


def _load_blob(opened: Opened, part: Part, data: bytes, settings: LoadSettings) -> Any:
    if part.transforms:
        data = _undo_transforms(opened, part, data)
    where, trusted = opened.where, settings.trusted
    if part.item.type is LoadItemType.BYTE_IO:
        return data, load_value(data, fqn=part.fqn, where=where, trusted=trusted)
    tensor = load_tensor(data, fqn=part.fqn, where=where, trusted=trusted)
    check_framed(where, part, tensor, allow_dtype_cast=settings.allow_dtype_cast)
    return narrow_tensor_by_index(tensor, part.item.storage_offsets, part.item.lengths)


def _undo_transforms(opened: Opened, part: Part, data: bytes) -> bytes:
    try:
        stream = _StorageReaderTransforms().transform_load_stream(part.item, part.transforms, io.BytesIO(data))
        return stream.read(-1)
    except Exception as error:
        names = ", ".join(part.transforms)
        raise CheckpointError(f"{opened.where}: cannot undo {names} of {part.fqn!r}: {error}") from error


def _read_regions(
    opened: Opened, parts: Sequence[Part], settings: LoadSettings, stats: ReadStats, whole: _Whole | None = None
) -> ReadStats:
    """Read straight into every destination that lets us, through kept-small temporaries into the others."""
    whole = whole or _Whole()
    direct: list[Lent] = []
    bounced: list[Part] = []
    rest = [part for part in parts if not (part.is_whole and whole.add(part.row, part.target))]
    seen = {place_of(target) for _, _, target in whole.places} if rest else set()
    for part in rest:
        if not part.target.numel():
            continue
        place = place_of(part.target)
        if not takes_bytes(part):
            bounced.append(part)
        elif place not in seen:
            seen.add(place)
            direct.append(lent(part, part.target))
    if direct or whole.places:
        _, more = opened.native.read(direct, [], whole.places, verify=settings.verify)
        stats = stats.plus(more)
        bump_versions([*(region[-1] for region in direct), *(target for _, _, target in whole.places)])
    for batch in _batches(bounced, settings.budget_bytes):
        temporaries = [torch.empty(tuple(p.item.lengths), dtype=dtype_of(p.dtype)) for p in batch]
        regions = [lent(part, temporary) for part, temporary in zip(batch, temporaries, strict=True)]
        _, more = opened.native.read(regions, [], [], verify=settings.verify)
        stats = stats.plus(more)
        for part, temporary in zip(batch, temporaries, strict=True):
            copy_into(part.target, temporary)
    return stats


def _batches(parts: Sequence[Part], budget_bytes: int) -> Iterable[list[Part]]:
    batch: list[Part] = []
    held = 0
    for part in parts:
        size = part.target.numel() * dtype_of(part.dtype).itemsize
        if batch and held + size > budget_bytes:
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += size
    if batch:
        yield batch


def _set_value(planner: LoadPlanner, part: Part) -> None:
    data, value = part.value
    fqn = part.item.dest_index.fqn
    if type(planner).load_bytes not in _KNOWN_LOAD_BYTES:
        planner.load_bytes(part.item, io.BytesIO(data))
    # What DefaultLoadPlanner.load_bytes does, without its torch.load(weights_only=False).
    elif isinstance(planner, DefaultLoadPlanner) and planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[fqn], value)
    elif isinstance(planner, DefaultLoadPlanner):
        planner.state_dict[fqn] = value
