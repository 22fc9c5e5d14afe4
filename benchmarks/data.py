"""How fast samples of tar shards come: ours beside webdataset, tarfile, and reading the same bytes raw.

Makes shards of JPEG-sized samples, and reads them all in batches, each contender in a process of its own::

    python benchmarks/data.py [--dir DIR] [--size-gb 2] [--rounds 3] [--workers 0 2]

Contenders that are not installed are left out: `pip install webdataset`.
"""

import argparse
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _measure import machine, spread, warm

BATCH_SIZE = 32
SAMPLE_BYTES = 100_000
NUM_SHARDS = 64


def write_shards(folder: Path, num_bytes: int) -> None:
    """`NUM_SHARDS` archives of samples with an image's bytes and a class, as WebDataset would write them."""
    each = max(1, num_bytes // SAMPLE_BYTES // NUM_SHARDS)
    image = random.Random(0).randbytes(SAMPLE_BYTES)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"train-{shard:04}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in range(each):
                for field, content in (("jpg", image), ("cls", str(sample % 1000).encode())):
                    info = tarfile.TarInfo(f"{shard:04}-{sample:06}.{field}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


def raw(folder: Path, workers: int) -> Iterator[int]:
    """The bytes of the shards into one warm buffer; no samples."""
    memory = memoryview(bytearray(8 << 20))
    for shard in sorted(folder.glob("*.tar")):
        with shard.open("rb", buffering=0) as file:
            while count := file.readinto(memory):
                yield count


def ours(folder: Path, workers: int, **arguments: Any) -> Iterator[int]:
    """`StrataShardPipe`, in a DataLoader where there are workers."""
    from torch.utils.data import DataLoader

    from torch_strata import StrataShardPipe

    pipe = StrataShardPipe(folder / "*.tar", batch_size=BATCH_SIZE, **arguments)
    for batch in DataLoader(pipe, batch_size=None, num_workers=workers) if workers else pipe:
        yield sum(len(image) for image in batch["jpg"])


def ours_shuffled(folder: Path, workers: int) -> Iterator[int]:
    """With the default shuffle."""
    from torch_strata import Shuffle

    return ours(folder, workers, shuffle=Shuffle(seed=0))


def webdataset(folder: Path, workers: int) -> Iterator[int]:
    """webdataset, without decoding and shuffling."""
    from torch.utils.data import DataLoader
    from webdataset import WebDataset

    shards = [str(shard) for shard in sorted(folder.glob("*.tar"))]
    samples = WebDataset(shards, shardshuffle=False).batched(BATCH_SIZE, collation_fn=list)
    for batch in DataLoader(samples, batch_size=None, num_workers=workers) if workers else samples:
        yield sum(len(sample["jpg"]) for sample in batch)


def plain_tar(folder: Path, workers: int) -> Iterator[int]:
    """The standard library's tarfile, in this process."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and member.name.endswith(".jpg"):
                    yield len(content.read())


CONTENDERS: dict[str, Callable[[Path, int], Iterator[int]]] = {
    "raw": raw,
    "torch_strata": ours,
    "torch_strata, shuffled": ours_shuffled,
    "webdataset": webdataset,
    "tarfile": plain_tar,
}
WITHOUT_WORKERS = {"raw", "tarfile"}


def measured(name: str, folder: Path, workers: int) -> dict[str, float]:
    """What one pass takes: bytes, seconds, seconds to the first batch, CPU seconds of this process and its children."""
    cpu_before, started_at = sum(os.times()[:4]), time.perf_counter()
    num_bytes, first = 0, None
    for count in CONTENDERS[name](folder, workers):
        first = first or time.perf_counter() - started_at
        num_bytes += count
    seconds = time.perf_counter() - started_at
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "first": first or seconds,
        "cpu_seconds": sum(os.times()[:4]) - cpu_before,
    }


def in_a_process(name: str, folder: Path, workers: int) -> dict[str, float]:
    """As `measured`, alone in a process of its own, imports not counted."""
    command = [sys.executable, __file__, "--measure", name, "--dir", str(folder), "--workers", str(workers)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return dict(json.loads(answer.splitlines()[-1]))


def table(folder: Path, workers: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Print a line for each contender: least, median and greatest of the rounds, in which they take turns."""
    names = [name for name in CONTENDERS if not (workers and name in WITHOUT_WORKERS)]
    if importlib.util.find_spec("webdataset") is None:
        names.remove("webdataset")
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for at in range(rounds):
        for name in names[at % len(names) :] + names[: at % len(names)]:
            turns[name].append(in_a_process(name, folder, workers))
    print(f"\n### {workers} workers\n\n| reader | MB/s | x {names[0]} | first batch, s | CPU s/GB |")
    print("| --- " * 5 + "|")
    rates = {name: [turn["bytes"] / turn["seconds"] / 1e6 for turn in turns[name]] for name in names}
    for name in names:
        beside = spread([own / other for own, other in zip(rates[name], rates[names[0]], strict=True)])
        first = spread([turn["first"] for turn in turns[name]])
        cpu = spread([turn["cpu_seconds"] / turn["bytes"] * 1e9 for turn in turns[name]])
        print(f"| {name} | {spread(rates[name])} | {beside} | {first} | {cpu} |")
    return turns


def main() -> None:
    """Make the shards, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size-gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        for module in ("torch.utils.data", "torch_strata.data.pipe"):
            importlib.import_module(module)
        print(json.dumps(measured(args.measure, args.dir, args.workers[0])))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        folder = Path(made)
        write_shards(folder, int(args.size_gb * 1e9))
        warm(folder)
        print(machine(folder))
        turns = {str(workers): table(folder, workers, args.rounds) for workers in args.workers}
    if args.json:
        args.json.write_text(json.dumps({"turns": turns}))


if __name__ == "__main__":
    main()
