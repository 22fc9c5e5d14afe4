"""Whether the index by which others read a checkpoint of ours tells them what the manifest tells us.

That is the `.metadata` of stock torch, or the index of safetensors. Imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_strata import _native
from torch_strata.checkpoint._gc import gc_paused
from torch_strata.checkpoint._opened import Opened, metadata_name
from torch_strata.checkpoint._paths import encode_fqn
from torch_strata.checkpoint._planner_data import decode_planner_data
from torch_strata.checkpoint._safetensors import INDEX_NAME, parse_index
from torch_strata.checkpoint._unpickle import StockMetadata, load_stock_metadata, same_plain
from torch_strata.errors import CorruptionError, ObjectNotFoundError, StorageError

if TYPE_CHECKING:
    from torch_strata._types import TensorEntry

__all__ = ["IndexFindings", "check_safetensors_index", "check_stock_index"]

# One fault of a memo changes every entry that refers to it: the first few say enough.
_SENTENCES = 10


@dataclass(frozen=True, kw_only=True)
class IndexFindings:
    """What was found.

    Attributes:
        problems: One sentence for each damage.
        notes: What is no damage, but means that stock readers see something else.
        unchecked: Why it could not be read, if so.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@gc_paused()
def check_stock_index(store: _native.Store, opened: Opened, *, rank: int | None) -> IndexFindings:
    """Compare `.metadata` with the manifest of a checkpoint that we wrote.

    Args:
        store: The place's store.
        opened: The checkpoint.
        rank: To check the index of what that rank saved on its own, else None.
    """
    name = metadata_name(rank)
    where = f"{opened.where}/{name}"
    needed = "stock readers need it, and the next save here writes it anew"
    try:
        content = store.read(name)
        is_sealed = _native.is_sealed(content)
        if is_sealed is False:
            # Not unpickled: a flipped bit can make opcodes of it that ask for all memory there is.
            return IndexFindings(problems=(f"{where}: its content is not that of the digest behind it; {needed}",))
        stock = load_stock_metadata(content, where)
    except ObjectNotFoundError:
        if opened.native.is_encoded or opened.holds_bytes:
            return IndexFindings()  # stock could not read what is there
        note = f"{where} is not there: a save ended before it was written, and stock readers find nothing here"
        return IndexFindings(notes=(f"{note} until the next save",))
    except StorageError as error:
        return IndexFindings(unchecked=(str(error),))
    except CorruptionError as error:
        return IndexFindings(problems=(f"{error}; {needed}",))
    previous = opened.native.previous_save_id
    if previous and stock.save_id == previous:
        return _of_previous_save(store, stock, where)
    sentences = [f"{where}: {difference}" for difference in _differences(opened, stock)]
    if is_sealed is None and opened.native.run is not None:
        sentences.append(f"{where}: the digest behind it, which every save of a manager writes, is not there")
    if len(sentences) > _SENTENCES:
        sentences[_SENTENCES:] = [f"{where}: and {len(sentences) - _SENTENCES} more differences from the manifest"]
    return IndexFindings(problems=tuple(sentences))


def check_safetensors_index(store: _native.Store, opened: Opened) -> IndexFindings | None:
    """Compare the index of files of safetensors that we wrote with the manifest; None if there are no such files.

    Args:
        store: The place's store.
        opened: The checkpoint.
    """
    expected = opened.native.safetensors_index
    if expected is None:
        return None
    where = f"{opened.where}/{INDEX_NAME}"
    try:
        found = store.read(INDEX_NAME)
        there = {name for name, _ in store.list("")}
    except ObjectNotFoundError:
        note = f"{where} is not there: a save ended before it was written, and readers of safetensors find nothing here"
        return IndexFindings(notes=(note,))
    except StorageError as error:
        return IndexFindings(unchecked=(str(error),))
    if found == expected:
        return IndexFindings()
    problem = f"{where} does not say what the manifest says; readers of safetensors need it"
    try:
        named = set(parse_index(found, where).values())
    except CorruptionError as error:
        return IndexFindings(problems=(problem, str(error)))
    if named <= there and named.isdisjoint(name for name, _ in opened.native.objects()):
        note = f"{where} is that of the save before the newest one, as one leaves it that ended before its last step"
        return IndexFindings(notes=(note,))
    return IndexFindings(problems=(problem,))


def _of_previous_save(store: _native.Store, stock: StockMetadata, where: str) -> IndexFindings:
    """A save ended between its manifest and its `.metadata`, so that nothing of the one before was removed."""
    named = {item.relative_path for item in stock.items if "/" not in item.relative_path}
    try:
        missing = sorted(named - {name for name, _ in store.list("")})
    except StorageError as error:
        return IndexFindings(unchecked=(str(error),))
    note = f"{where} is that of the save before the newest one: stock readers see the previous checkpoint"
    lost = tuple(f"{where} names {name}, which is not there" for name in missing)
    return IndexFindings(problems=lost, notes=(f"{note} until the next save here",))


def _differences(opened: Opened, stock: StockMetadata) -> Iterator[str]:
    if stock.save_id != opened.save_id:
        yield f"save_id: expected {opened.save_id}, found {stock.save_id}"
    expected = {entry[0]: _plain_entry(entry) for entry in opened.entries}
    found = {entry[0]: _plain_entry(entry) for entry in stock.entries}
    yield from _unequal("state_dict_metadata", expected, found)
    placed = {(fqn, _tuple(offsets)): rest for fqn, offsets, *rest in opened.native.items()}
    named = {
        (encode_fqn(item.fqn), item.offsets): [
            *(item.index, item.relative_path, item.offset, item.length),
            *item.transforms,
        ]
        for item in stock.items
    }
    yield from _unequal("storage_data", placed, named)
    if len(stock.items) != len(named):
        yield f"storage_data: {len(stock.items) - len(named)} items stand twice"
    try:
        same = same_plain(decode_planner_data(opened.native.planner_data, opened.where), stock.planner_data)
    except RecursionError:
        same = False
    if not same:
        yield "planner_data: is not the manifest's"


def _unequal(what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> Iterator[str]:
    for key in expected | found:  # in the manifest's order: the first few are the same at every look
        if expected.get(key) != found.get(key):
            yield f"{what}[{key!r:.200}]: expected {expected.get(key)!r:.300}, found {found.get(key)!r:.300}"


def _plain_entry(entry: "TensorEntry") -> tuple[Any, ...]:
    """The entry without its name, its chunks in one order: theirs is only a hint."""
    _, is_tensor, dtype, size, strides, *properties, offsets, sizes = entry
    chunks = sorted((tuple(offset), tuple(lengths)) for offset, lengths in zip(offsets, sizes, strict=True))
    return is_tensor, dtype, tuple(size), _tuple(strides), *properties, chunks


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
