"""One rank's part of a load: everything is resolved and compared before the first byte of a destination changes."""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torch_strata import _native
from torch_strata.checkpoint._exchange import Exchange, Lent, Region
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._metadata import dtype_of, encode_fqn
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._part import Part, bump_versions, copy_into, lent, place_of, takes_bytes
from torch_strata.checkpoint._payload import Trusted, load_tensor, load_value
from torch_strata.checkpoint._reads import CompactReads, PlannedReads, whole_read
from torch_strata.checkpoint._tensors import (
    PLAIN_TYPES,
    device_number,
    is_reachable,
    overlaps_itself,
    settled,
    wait_for_kernels,
)
from torch_strata.checkpoint._together import separated, share_blobs, share_regions
from torch_strata.checkpoint.planner import StrataLoadPlanner
from torch_strata.checkpoint.store_stats import StoreStats
from torch_strata.errors import CheckpointError, CorruptionError, LayoutMismatchError, StrataError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["LoadSettings", "ReadStats", "check_coverage", "load_plan"]

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
    opened: Opened, plan: LoadPlan, planner: LoadPlanner, settings: LoadSettings, exchange: Exchange | None = None
) -> ReadStats:
    """Read every item of `plan` into `planner`'s state; with an exchange, what other ranks need too only once.

    Raises:
        LayoutMismatchError: If a destination has another dtype, shape or kind; nothing has been changed then.
        CheckpointError: If a value needs a class that is not trusted; nothing has been changed then.
        CorruptionError: If stored bytes are damaged; the destinations named are undefined unless ``verify="before"``.
        ObjectNotFoundError: If an object is missing.
        CoordinationError: If a rank of the exchange has died or is too late.
    """
    items: Sequence[ReadItem] = plan.items
    whole = _Whole()
    if exchange is None and isinstance(items, PlannedReads) and _finds_plainly(planner):
        items = whole.take(opened, items, planner)
    parts = _locate(opened, items)
    values = [part for part in parts if part.item.type is LoadItemType.BYTE_IO]
    tensors = [part for part in parts if part.item.type is not LoadItemType.BYTE_IO]
    for part in values:
        _check_value(opened, part, planner)
    resolve = _resolver(planner)
    for part in tensors:
        _resolve(opened, part, resolve, settings)
    framed = [part for part in tensors if part.is_blob]
    regions = [part for part in tensors if not part.is_blob]
    wait_for_kernels(device_number(part.target) for part in regions if is_reachable(part.target))
    if exchange is None:
        stats = _read_regions(opened, regions, settings, _read_blobs(opened, parts, settings), whole)
    else:
        stats = _read_together(opened, [part for part in parts if part.is_blob], regions, settings, exchange)
    for part in framed:
        copy_into(part.target, part.value)
    if getattr(planner.commit_tensor, "__func__", None) is not DefaultLoadPlanner.commit_tensor:  # which does nothing
        for part in tensors:
            _guarded(part, lambda part=part: planner.commit_tensor(part.item, part.target))
    for part in values:
        _guarded(part, lambda part=part: _set_value(planner, part))
    return stats


class _Whole:
    """Tensors of the host that take all that is stored under a name, as it lies there."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, torch.Tensor]] = []  # row, address, target
        self.rows: dict[int, int] = {}  # by address: the first of them is read, the others see what it got

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
        left += items.others
        return left

    def add(self, row: int, target: torch.Tensor) -> bool:
        """Take a strided tensor of the stored dtype and shape, if Rust may fill it as it lies."""
        if not target.is_cpu or not target.is_contiguous() or target.is_conj() or target.is_neg():
            return False
        address = target.data_ptr()
        if not address or self.rows.setdefault(address, row) != row:
            return False
        self.places.append((row, address, target))
        return True


def check_coverage(opened: Opened, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Whether what one rank saved on its own fills every destination; of whole checkpoints the chunks tile each tensor.

    Only of DCP's own planners, which show their state.

    Raises:
        LayoutMismatchError: If a part of a destination would keep its values.
    """
    if not isinstance(planner, DefaultLoadPlanner) or planner.metadata is None:
        return
    filled: Counter[str] = Counter()
    for item in plan.items:
        filled[item.dest_index.fqn] += math.prod(item.lengths)
    for fqn, value in planner.state_dict.items():
        if not isinstance(value, torch.Tensor) or fqn not in planner.metadata.state_dict_metadata:
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        if filled[fqn] < local.numel():
            raise LayoutMismatchError(
                f"{opened.where}: {fqn!r}: of {local.numel()} elements to load this rank saved {filled[fqn]}; ranks "
                "that saved on their own (use_collectives=False) have only their own parts"
            )


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


def _check_value(opened: Opened, part: Part, planner: LoadPlanner) -> None:
    """A value replaces its destination unseen; DCP's own planners let us look at it before."""
    if part.kind != _native.BYTES and not part.transforms:
        raise CorruptionError(f"{opened.where}: {part.fqn!r}: the index says a pickled value, a tensor is stored")
    if isinstance(planner, DefaultLoadPlanner):
        template = planner.state_dict.get(part.item.dest_index.fqn)
        if isinstance(template, torch.Tensor):
            raise LayoutMismatchError(
                f"{opened.where}: {part.fqn!r} is stored as a pickled value, the state to load into holds a tensor "
                f"of {template.dtype} {tuple(template.shape)}"
            )


def _resolver(planner: LoadPlanner) -> Callable[[ReadItem], Any]:
    """`planner.resolve_tensor`; where that is DCP's own, a tensor that nothing shards is found without a search.

    DCP asks of each object whether it implements a protocol, which takes longer than all that a load does with it.
    """
    if not isinstance(planner, DefaultLoadPlanner) or not _looks_up_plainly(planner):
        return planner.resolve_tensor
    transforms = not _finds_plainly(planner)

    def resolve(item: ReadItem) -> Any:
        index = item.dest_index
        found = planner.state_dict.get(index.fqn)
        # An attribute could make a plain tensor one that DCP asks for its shards.
        if not isinstance(found, torch.Tensor) or type(found) not in PLAIN_TYPES or vars(found):
            return planner.resolve_tensor(item)
        if index.offset is None or any(index.offset) or len(index.offset) != found.dim():
            return planner.resolve_tensor(item)
        if transforms or item.lengths != found.shape or any(item.dest_offsets):
            return planner.transform_tensor(item, found)
        return found

    return resolve


def _looks_up_plainly(planner: DefaultLoadPlanner) -> bool:
    own = [getattr(method, "__func__", None) for method in (planner.resolve_tensor, planner.lookup_tensor)]
    return own == [DefaultLoadPlanner.resolve_tensor, DefaultLoadPlanner.lookup_tensor]


def _finds_plainly(planner: LoadPlanner) -> "TypeIs[DefaultLoadPlanner]":
    """Whether a tensor goes into what the planner's state holds under its name, and nobody is told of it."""
    if not isinstance(planner, DefaultLoadPlanner) or not _looks_up_plainly(planner):
        return False
    methods = planner.transform_tensor, planner.commit_tensor
    own = [getattr(method, "__func__", None) for method in methods]
    return own == [DefaultLoadPlanner.transform_tensor, DefaultLoadPlanner.commit_tensor]


def _resolve(opened: Opened, part: Part, resolve: Callable[[ReadItem], Any], settings: LoadSettings) -> None:
    item = part.item
    try:
        found = resolve(item)
    except StrataError:
        raise
    except Exception as error:
        raise _as_ours(part, error) from error
    if type(found) in PLAIN_TYPES and not part.is_blob and part.kind == _native.TENSOR:
        target = part.target = found.detach()
        shape = tuple(target.shape)
        # What nearly every tensor is: as it was stored, in the host's memory.
        if (
            shape == part.shape == item.lengths
            and target.device.type == "cpu"
            and target.is_contiguous()
            and target.dtype == dtype_of(part.dtype)
            and not any(item.storage_offsets)
        ):
            part.is_whole = True
            return
    _resolve_unlike(opened, part, found, settings)


def _resolve_unlike(opened: Opened, part: Part, found: Any, settings: LoadSettings) -> None:
    item, name = part.item, f"{opened.where}: {part.fqn!r}"
    if not isinstance(found, torch.Tensor):
        raise LayoutMismatchError(f"{name} is a tensor, the state to load into holds a {type(found).__name__}")
    part.target = settled(found)
    lengths = tuple(item.lengths)
    if tuple(part.target.shape) != lengths:
        raise LayoutMismatchError(f"{name}: {lengths} were planned, the destination is {tuple(part.target.shape)}")
    if part.target.is_meta:
        raise LayoutMismatchError(f"{name}: the destination is on the meta device and has no memory")
    if part.target.layout is torch.strided and overlaps_itself(lengths, tuple(part.target.stride())):
        raise LayoutMismatchError(
            f"{name}: the destination's elements share memory (an expanded view, strides {tuple(part.target.stride())})"
        )
    if part.kind == _native.BYTES and not part.is_blob:
        raise CorruptionError(f"{name}: the index says a tensor, a pickled value is stored")
    if part.is_blob:
        return
    _check_dtype(name, dtype_of(part.dtype), part.target.dtype, settings)
    _check_region(name, part.shape, item)


def _check_dtype(name: str, stored: torch.dtype, wanted: torch.dtype, settings: LoadSettings) -> None:
    if stored != wanted and not settings.allow_dtype_cast:
        raise LayoutMismatchError(
            f"{name}: stored dtype {stored}, destination dtype {wanted}; pass allow_dtype_cast=True to StrataReader "
            "to convert"
        )


def _check_quantizer(name: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
    # copy_() between quantized tensors moves the integers and leaves scale and zero point: other numbers.
    if stored.is_quantized and wanted.is_quantized and _quantizer(stored) != _quantizer(wanted):
        raise LayoutMismatchError(
            f"{name}: stored with the quantizer {_quantizer(stored)}, the destination has {_quantizer(wanted)}"
        )


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), tensor.q_per_channel_axis(), *(values.tolist() for values in channels)


def _check_region(name: str, shape: tuple[int, ...], item: ReadItem) -> None:
    first, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    inside = len(first) == len(lengths) == len(shape) and all(
        f >= 0 and n >= 0 and f + n <= s for f, n, s in zip(first, lengths, shape, strict=True)
    )
    if not inside:
        raise CorruptionError(f"{name}: {lengths} at {first} do not lie in the stored {shape}")


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
    name = f"{where}: {part.fqn!r}"
    tensor = load_tensor(data, fqn=part.fqn, where=where, trusted=trusted)
    _check_dtype(name, tensor.dtype, part.target.dtype, settings)
    _check_quantizer(name, tensor, part.target)
    _check_region(name, tuple(tensor.shape), part.item)
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
    seen: dict[Any, Any] = {}
    if rest:
        seen = {place_of(target): (row, (0,) * target.dim()) for row, _, target in whole.places}
    for part in rest:
        if not part.target.numel():
            continue
        place, source = place_of(part.target), (part.row, tuple(part.item.storage_offsets))
        if not takes_bytes(part) or seen.get(place, source) != source:
            bounced.append(part)
        elif place not in seen:
            seen[place] = source
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


def _guarded(part: Part, call: Any) -> Any:
    """Run a planner's code; its errors become ours, which can be pickled to the other ranks."""
    try:
        return call()
    except StrataError:
        raise
    except Exception as error:
        raise _as_ours(part, error) from error


def _as_ours(part: Part, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot load {part.fqn!r}: {type(error).__name__}: {error}")
