"""`.metadata` is what stock readers need: `verify` compares it with the manifest, and its loss never hides a state."""

import io
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from tests.checkpoint.states import failure_of, same_bits, save
from torch_strata import ManifestError, StrataReader, StrataWriter, verify

SIZE = 2000


def state_of(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((SIZE,), value),
        "t": torch.full((3, 4), value, dtype=torch.bfloat16).t(),
        "scalar": torch.tensor(value),
        "opt": {"lr": [value, torch.full((2,), value, dtype=torch.float64)], "n": {"text": str(value)}},
    }


def zeros() -> dict[str, Any]:
    state = state_of(0.0)
    return {**state, "t": torch.zeros(4, 3, dtype=torch.bfloat16)}


def save_value(value: float, place: Path, **options: Any) -> None:
    save(state_of(value), place, **options)


def stock_save(value: float, place: Path) -> None:
    dcp.save(state_of(value), storage_writer=FileSystemWriter(place), no_dist=True)


def found(place: Path, reader: Any = StrataReader) -> float:
    out = {"w": torch.zeros(SIZE)}
    dcp.load(out, storage_reader=reader(place), no_dist=True)
    (value,) = out["w"].unique().tolist()
    return value


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in (key, *leaves(value[key]))]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def same(left: Any, right: Any) -> bool:
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    return all(same_bits(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b for a, b in pairs)


def stock_finds(place: Path, state: Any) -> bool:
    """Whether stock loads the state whole, into a given one and into an empty one as dcp_to_torch_save does."""
    logging.disable(logging.CRITICAL)
    try:
        out = zeros()
        dcp.load(out, storage_reader=FileSystemReader(place), planner=DefaultLoadPlanner(), no_dist=True)
        everything: dict[str, Any] = {}
        planner = dcp.default_planner._EmptyStateDictLoadPlanner()
        dcp.state_dict_loader._load_state_dict(everything, FileSystemReader(place), planner=planner, no_dist=True)
        return same(out, state) and same(everything, state)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return False
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture
def place(tmp_path) -> Path:
    save_value(1.0, tmp_path / "c")
    return tmp_path / "c"


def sweep(place: Path, flips: list[tuple[int, int]]) -> int:
    """Flips one bit after another; the number of those that are no damage since stock reads the same."""
    path, harmless = place / ".metadata", 0
    content = path.read_bytes()
    for at, bit in flips:
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            is_sound = verify(place).is_sound
        except ManifestError:
            is_sound = False
        if is_sound:
            assert stock_finds(place, state_of(1.0)), f"verify says sound: bit {bit} of byte {at} of {len(content)}"
            harmless += 1
        assert found(place) == 1, f"bit {bit} of byte {at}"
    path.write_bytes(content)
    assert verify(place).is_sound
    return harmless


def test_a_flipped_bit_in_metadata_is_found_wherever_stock_would_read_something_else(place):
    num_bytes = (place / ".metadata").stat().st_size
    harmless = sweep(place, [(at, at * 5 % 8) for at in range(num_bytes)])
    assert harmless < num_bytes / 4


def cut(kept: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * kept)]


UNREADABLE = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": cut(0.5),
    "without its end": cut(0.97),
    "zeros": lambda content: bytes(len(content)),
    "other": lambda content: pickle.dumps(io.BytesIO(b"x" * 3000)),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_metadata_that_cannot_be_read_does_not_stop_a_load_from_the_manifest_and_is_said(place, damage, caplog):
    path = place / ".metadata"
    save_id = pickle.loads(path.read_bytes()).storage_meta.save_id
    path.write_bytes(UNREADABLE[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert found(place) == 1
    if save_id.encode() not in path.read_bytes():  # else nobody had a reason to look closer
        assert ".metadata" in caplog.text
    report = verify(place)
    assert not report.is_sound and ".metadata" in report.problems[0]
    assert report.blocks > 0, "the data was checked all the same"
    save_value(2.0, place)
    assert found(place) == found(place, FileSystemReader) == 2 and verify(place).is_sound


@pytest.mark.parametrize("padding", [0, 5000])
def test_metadata_whose_save_id_alone_is_damaged_is_not_taken_for_stocks(place, padding, caplog):
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    save_id, metadata.storage_meta.save_id = metadata.storage_meta.save_id, "f" * 32
    # The names of the objects carry the save_id too, and are at the end of a small index.
    metadata.storage_meta.modules.append("x" * padding)
    path.write_bytes(pickle.dumps(metadata))
    with caplog.at_level(logging.WARNING):
        assert found(place) == 1
    assert bool(padding) == ("save_id" in caplog.text)
    (problem,) = verify(place).problems
    assert ".metadata" in problem and save_id in problem


@pytest.mark.parametrize("damage", UNREADABLE)
def test_metadata_that_cannot_be_read_hides_no_save_of_stock(place, damage):
    path = place / ".metadata"
    stock_save(2.0, place)
    path.write_bytes(UNREADABLE[damage](path.read_bytes()))
    error = failure_of(lambda: found(place))
    assert isinstance(error, ManifestError)
    assert "__0_0.distcp" in str(error) and "manifest 1" in str(error) and ".metadata" in str(error)
    with pytest.raises(ManifestError):
        verify(place)
    path.unlink()  # one of the two ways out that the message names
    assert found(place) == 1
    save_value(3.0, place)
    assert found(place) == found(place, FileSystemReader) == 3 and verify(place).is_sound


def test_metadata_that_cannot_be_read_hides_no_save_whose_manifest_is_damaged(place):
    (place / ".strata" / f"{2:020}").write_bytes(b"STRATAM\n")
    (place / ".metadata").write_bytes(b"")
    error = failure_of(lambda: found(place))
    assert isinstance(error, ManifestError) and "manifest 1" in str(error)


def test_the_index_of_one_rank_is_checked_as_well(tmp_path):
    place = tmp_path / "c"
    dcp.save(state_of(1.0), storage_writer=StrataWriter(place), no_dist=True, use_collectives=False)
    path = place / "__0.metadata"
    content = path.read_bytes()
    assert verify(place, rank=0).is_sound
    for damage in UNREADABLE.values():
        path.write_bytes(damage(content))
        report = verify(place, rank=0)
        assert path.name in report.problems[0] and report.blocks > 0
    path.unlink()
    report = verify(place, rank=0)
    assert report.is_sound and path.name in report.warnings[0]


def test_metadata_that_a_save_did_not_come_to_is_no_damage_and_is_said(place, tmp_path):
    (place / ".metadata").rename(tmp_path / "kept")
    report = verify(place)
    assert report.is_sound and "stock readers find nothing" in report.warnings[0]


def test_metadata_of_the_save_before_is_no_damage_while_what_it_names_is_there(place, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(place, first)
    save_value(2.0, place)
    for path in first.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    report = verify(place)
    assert report.is_sound and "previous checkpoint" in report.warnings[0]
    assert found(place) == 2 and found(place, FileSystemReader) == 1
    for path in first.glob("*.distcp"):
        (place / path.name).unlink()
    report = verify(place)
    assert not report.is_sound and ".metadata" in report.problems[0] and "not there" in report.problems[0]


def test_data_of_ours_without_its_manifest_is_a_problem_and_a_load_says_so(place, caplog):
    shutil.rmtree(place / ".strata")
    with caplog.at_level(logging.WARNING):
        assert found(place) == 1
    assert "manifest" in caplog.text and str(place) in caplog.text
    report = verify(place)
    assert not report.is_sound and "manifest" in report.problems[0] and not report.warnings
    stock_save(2.0, place)
    assert found(place) == 2 and verify(place).is_sound, "what stock saved since needs no manifest"


def test_a_wrong_index_is_not_mended_by_looking(place):
    """Stock's index says other things than the manifest, each told by name."""
    path = place / ".metadata"
    content = path.read_bytes()
    changes: dict[str, Callable[[Any], Any]] = {
        "'w'": lambda m: m.state_dict_metadata.pop("w"),
        "'more'": lambda m: m.state_dict_metadata.update(more=m.state_dict_metadata["w"]),
        "planner_data": lambda m: m.planner_data.update(w=("v",)),
        "storage_data": lambda m: m.storage_data.popitem(),
        "int32": lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32),
        "save_id": lambda m: setattr(m.storage_meta, "save_id", "0" * 32),
    }
    for word, change in changes.items():
        metadata = pickle.loads(content)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        problems = verify(place).problems
        assert problems and all(".metadata" in p for p in problems) and word in problems[0], (word, problems)
    path.write_bytes(content)
    assert verify(place).is_sound


def test_differences_are_told_in_the_order_of_the_manifest(place):
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    names = list(metadata.state_dict_metadata)
    metadata.state_dict_metadata.clear()
    path.write_bytes(pickle.dumps(metadata))
    problems = verify(place).problems
    assert [problem.split("'")[1] for problem in problems] == names
