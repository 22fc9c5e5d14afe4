"""Shards of known samples, and pipes over them."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# As many samples in each shard; one has none.
COUNTS = (30, 1, 0, 45, 27)
NUM_SAMPLES = sum(COUNTS)


def content(number: int, field: str) -> bytes:
    """What sample `number` holds: of a length that tells it from its neighbours."""
    return f"{number} {field}. ".encode() * (number % 7 + (field == "bin") * 300)


def write_tars(folder: Path, counts: Iterable[int] = COUNTS, **arguments: Any) -> Path:
    """Archives of samples ``d/s000`` and so on, of two fields each, as WebDataset would write them."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"{shard:03}.tar", "w", **arguments) as archive:
            for _ in range(count):
                for field in ("bin", "cls"):
                    data = content(number, field)
                    info = tarfile.TarInfo(f"d/s{number:03}.{field}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                number += 1
    return folder


def numbers(batch: Any) -> list[int]:
    """The samples of a batch, each of which must be whole."""
    found = [int(key.removeprefix("d/s")) for key in batch["__key__"]]
    for at, number in enumerate(found):
        assert bytes(batch["bin"][at]) == content(number, "bin")
        assert bytes(batch["cls"][at]) == content(number, "cls")
    return found


def all_numbers(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]
