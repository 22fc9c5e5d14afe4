"""Damage to any file of a checkpoint: `verify` and `strata verify` say which object, and of a payload which bytes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from tests.checkpoint.manifests import manifest_of
from tests.checkpoint.states import failure_of, flip, load, save
from torch_strata import CorruptionError, ManifestError, StrataReader, verify
from torch_strata.cli import main

# Two blocks of 4 MiB, a value too large for the manifest, one that is in it too.
LARGE = torch.arange(2_000_000, dtype=torch.float32)
STATE = {"large": LARGE, "text": "x" * 10_000, "small": torch.arange(3.0)}
BLOCK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sound") / "c"
    save(STATE, place)
    return place


@pytest.fixture
def place(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "c"))


def object_of(place: Path) -> Path:
    (path,) = place.glob("*.distcp")
    return path


def start_of_large(path: Path) -> int:
    return path.read_bytes().index(LARGE[:100].numpy().tobytes())


def payload_bit(path: Path) -> None:
    flip(path, start_of_large(path) + BLOCK_BYTES + 12_345)


def prefix_bit(path: Path) -> None:
    flip(path, start_of_large(path) - 1000)


def suffix_bit(path: Path) -> None:
    flip(path, start_of_large(path) + LARGE.nbytes + 20)


def last_byte_lost(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def half_lost(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


def of_another_save(path: Path) -> None:
    """As long as the right one, and sound in itself."""
    other = path.parent.parent / "other"
    save({**STATE, "large": LARGE + 1}, other)
    shutil.copy(object_of(other), path)


def zeros_in_a_hole(path: Path) -> None:
    """As after a power cut on a file system that had the size and not the data."""
    size = path.stat().st_size
    path.write_bytes(b"\0" * size)


DAMAGES = [
    *(payload_bit, prefix_bit, suffix_bit, last_byte_lost, half_lost, emptied, missing, of_another_save),
    zeros_in_a_hole,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_an_object_is_found_and_named(place, damage: Callable[[Path], None]):
    path = object_of(place)
    damage(path)
    report = verify(place)
    assert not report.is_sound and path.name in report.problems[0]
    done = CliRunner().invoke(main, ["verify", str(place)])
    assert done.exit_code == 1 and path.name in done.output


def test_damage_to_a_payload_is_named_with_the_bytes_of_its_block_alone(place):
    path = object_of(place)
    start = start_of_large(path)
    payload_bit(path)
    (problem,) = verify(place).problems
    first, end = map(int, re.search(r"bytes (\d+)\.\.(\d+)", problem).groups())
    assert (first, end) == (start + BLOCK_BYTES, start + LARGE.nbytes) and '"large"' in problem


def test_a_load_names_the_same_bytes(place):
    path = object_of(place)
    start = start_of_large(path)
    payload_bit(path)
    error = failure_of(lambda: load({"large": torch.zeros(2_000_000)}, place))
    assert isinstance(error, CorruptionError) and path.name in str(error)
    assert f"bytes {start + BLOCK_BYTES}..{start + LARGE.nbytes}" in str(error)


def test_damage_elsewhere_does_not_stop_the_load_of_what_is_sound(place):
    payload_bit(object_of(place))
    out = {"text": "", "small": torch.zeros(3)}
    dcp.load(out, storage_reader=StrataReader(place), no_dist=True)
    assert out["text"] == STATE["text"] and torch.equal(out["small"], STATE["small"])


def test_a_value_that_is_in_the_manifest_too_is_checked_in_the_object(place):
    path = object_of(place)
    flip(path, path.read_bytes().rindex(STATE["small"].numpy().tobytes()) + 2)
    (problem,) = verify(place).problems
    assert path.name in problem and '"small"' in problem
    out = {"small": torch.zeros(3)}
    load(out, place)
    assert torch.equal(out["small"], STATE["small"]), "from the manifest's copy, which is sound"


def test_a_flipped_bit_anywhere_in_the_manifest_is_found_and_named(place):
    path = manifest_of(place)
    for at in range(path.stat().st_size):
        flip(path, at)
        with pytest.raises(ManifestError, match=path.name):
            verify(place)
        flip(path, at)
    assert verify(place).is_sound


@pytest.mark.parametrize("damage", [last_byte_lost, half_lost, emptied])
def test_a_manifest_that_was_cut_is_found_and_named(place, damage):
    path = manifest_of(place)
    damage(path)
    with pytest.raises(ManifestError, match=path.name):
        verify(place)
    done = CliRunner().invoke(main, ["verify", str(place)])
    assert done.exit_code == 1 and path.name in done.output + done.stderr
