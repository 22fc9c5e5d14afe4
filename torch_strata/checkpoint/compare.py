"""How two checkpoints differ, tensor by tensor, in bounded memory. Imports no torch."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_strata._store import resolve_configs
from torch_strata.checkpoint._boxes import Box
from torch_strata.checkpoint._content import Content, Progress, Tensor
from torch_strata.checkpoint._dtypes import as_floats, dtype_named
from torch_strata.checkpoint._torch_file import load_value
from torch_strata.checkpoint._torch_pickle import dump
from torch_strata.checkpoint.copying import open_content
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointError

__all__ = ["Comparison", "TensorChange", "compare", "compare_contents"]

_BATCH_BYTES = 64 << 20
# Elements whose values are held as doubles at a time.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """A tensor of equal dtype and shape whose elements are not all the same, bit for bit.

    Attributes:
        fqn: Its key.
        changed_fraction: Changed elements, of all.
        norm_a: L2 norm in the first checkpoint.
        norm_b: In the second.
        norm_of_difference: Of the second minus the first.
        largest_difference: Largest absolute value of that; NaN if a number became none.
    """

    fqn: str
    changed_fraction: float
    norm_a: float
    norm_b: float
    norm_of_difference: float
    largest_difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        only_a: Keys that only the first has.
        only_b: Keys that only the second has.
        unlike: Keys of another dtype, shape or kind, each with a sentence.
        changed: Tensors with changed elements.
        changed_values: Keys of other values that changed.
        num_equal: Keys that are the same in both.
        num_by_digest: How many of these are known to be by their digests: nothing of them was read.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unlike: Mapping[str, str]
    changed: tuple[TensorChange, ...]
    changed_values: tuple[str, ...]
    num_equal: int
    num_by_digest: int

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same."""
        return not (self.only_a or self.only_b or self.unlike or self.changed or self.changed_values)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints, each ours, stock's, safetensors or a file of torch.save.

    Tensors are equal if their elements are, bit for bit, however they are sharded.

    Args:
        a: URL or local path of the first.
        b: Of the second.
        config: Limits of both stores.
        storage_options: Their own settings; win over those of `config`.
        progress: Told of bytes of the first that are compared.

    Raises:
        CheckpointNotFoundError: If nothing is committed at one of the places.
        CheckpointError: If a tensor differs that only torch can read.
        CorruptionError: If what is read is damaged.
        StorageError: If a store fails.
    """
    config_a, config_b = resolve_configs(a, b, config, storage_options)
    return compare_contents(open_content(a, config_a), open_content(b, config_b), progress)


def compare_contents(first: Content, second: Content, progress: Progress | None = None) -> Comparison:
    """As `compare`, of what is open already."""
    shared = [fqn for fqn in first.order if fqn in second.tensors or fqn in second.values]
    unlike = {fqn: sentence for fqn in shared if (sentence := _unlike(first, second, fqn)) is not None}
    tensors = [first.tensors[fqn] for fqn in shared if fqn in first.tensors and fqn not in unlike]
    values = [fqn for fqn in shared if fqn in first.values and fqn not in unlike]
    known = _same_digests(first, second, tensors)
    done = progress or (lambda num_bytes: None)
    for tensor in tensors:
        if tensor.fqn in known:
            done(0 if tensor.framed else tensor.num_bytes)
    left = [tensor for tensor in tensors if tensor.fqn not in known]
    changed = tuple(_changes(first, second, left, done))
    pairs = zip(first.read_values(values), second.read_values(values), strict=True)
    changed_values = tuple(fqn for (fqn, a), (_, b) in pairs if not _same_value(first, second, a, b))
    return Comparison(
        only_a=tuple(fqn for fqn in first.order if fqn not in second.tensors and fqn not in second.values),
        only_b=tuple(fqn for fqn in second.order if fqn not in first.tensors and fqn not in first.values),
        unlike=unlike,
        changed=changed,
        changed_values=changed_values,
        num_equal=len(tensors) + len(values) - len(changed) - len(changed_values),
        num_by_digest=len(known),
    )


def _unlike(first: Content, second: Content, fqn: str) -> str | None:
    a, b = first.tensors.get(fqn), second.tensors.get(fqn)
    if a is None or b is None:
        kinds = ["a pickled value" if found is None else "a tensor" for found in (a, b)]
        return None if a is b else f"{kinds[0]} became {kinds[1]}"
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        return None
    return f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}"


def _same_digests(first: Content, second: Content, tensors: list[Tensor]) -> set[str]:
    """Those whose parts are the same in both and have the same digests."""
    alike = []
    for a in tensors:
        b = second.tensors[a.fqn]
        places = [[(p.offsets, p.shape, p.strides, p.gathered) for p in tensor.pieces] for tensor in (a, b)]
        if places[0] == places[1] and a.framed == b.framed:
            alike.append((a, b))
    digests = [
        iter(content.native.digests([piece.row for pair in alike for piece in pair[at].pieces]))
        for at, content in enumerate((first, second))
    ]
    same = set()
    for a, b in alike:
        pairs = [(next(digests[0]), next(digests[1])) for _ in a.pieces]
        if all(left and left == right for left, right in pairs):
            same.add(a.fqn)
        assert len(a.pieces) == len(b.pieces)
    return same


@dataclass
class _Sums:
    """What is known of a tensor so far."""

    changed: int = 0
    a: float = 0.0
    b: float = 0.0
    difference: float = 0.0
    largest: float = 0.0


def _changes(first: Content, second: Content, tensors: list[Tensor], done: Progress) -> list[TensorChange]:
    sums: dict[str, _Sums] = {}
    for tensor in tensors:
        if tensor.framed:
            raise CheckpointError(
                f"{first.where}: {tensor.fqn!r:.200} can only be compared by torch, which wrote it whole"
            )
    others = [second.tensors[tensor.fqn] for tensor in tensors]
    streams = [
        content.stream(content.boxes(wanted, _BATCH_BYTES), _BATCH_BYTES)
        for content, wanted in ((first, tensors), (second, others))
    ]
    # Parts that are the same: only for the norms of a tensor that changed elsewhere are they looked at again.
    same: list[tuple[Tensor, Box]] = []
    for (batch, buffer), (_, other) in zip(*streams, strict=True):
        for wanted in batch:
            found = sums.setdefault(wanted.tensor.fqn, _Sums())
            left, right = buffer.of(wanted), other.of(wanted)
            if np.array_equal(left, right):
                same.append((wanted.tensor, wanted.box))
            else:
                _add(found, left, right, wanted.tensor.dtype)
            done(wanted.num_bytes)
    again = [(tensor, box) for tensor, box in same if sums[tensor.fqn].changed]
    for batch, buffer in first.stream(again, _BATCH_BYTES):
        for wanted in batch:
            _add(sums[wanted.tensor.fqn], buffer.of(wanted), buffer.of(wanted), wanted.tensor.dtype)
    return [
        TensorChange(
            fqn=tensor.fqn,
            changed_fraction=found.changed / math.prod(tensor.shape),
            norm_a=math.sqrt(found.a),
            norm_b=math.sqrt(found.b),
            norm_of_difference=math.sqrt(found.difference),
            largest_difference=found.largest,
        )
        for tensor in tensors
        if (found := sums[tensor.fqn]).changed
    ]


def _add(sums: _Sums, left: "np.ndarray[Any, Any]", right: "np.ndarray[Any, Any]", dtype: str) -> None:
    step = _AT_ONCE * dtype_named(dtype).num_bytes
    for at in range(0, len(left), step):
        a, b = left[at : at + step], right[at : at + step]
        x = as_floats(a, dtype)
        same = np.array_equal(a, b)
        y = x if same else as_floats(b, dtype)
        sums.a += _squares(x)
        sums.b += _squares(y)
        if same:
            continue
        size = dtype_named(dtype).num_bytes
        sums.changed += int((a.reshape(-1, size) != b.reshape(-1, size)).any(axis=1).sum())
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            difference = y - x
        sums.difference += _squares(difference)
        largest = float(np.abs(difference).max())
        sums.largest = largest if math.isnan(largest) or largest > sums.largest else sums.largest


def _squares(values: "np.ndarray[Any, Any]") -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.vdot(values, values).real)


def _same_value(first: Content, second: Content, a: bytes, b: bytes) -> bool:
    """By its bytes; where torch wrote other ones for it, by what they say."""
    if a == b:
        return True
    if first.holds_bytes or second.holds_bytes:
        return False
    try:
        (left, of_left), (right, of_right) = dump(load_value(a, first.where)), dump(load_value(b, second.where))
    except CheckpointError:
        return False  # of a class that is not known here: equal only if its bytes are
    return left == right and [storage.source for storage in of_left] == [storage.source for storage in of_right]
