"""What the types of checkpoints write and cost over a run, and how fast `verify` reads.

    python benchmarks/lifecycle.py types --rounds 5
    python benchmarks/lifecycle.py verify --size-gb 4 --rounds 5

``types`` trains a transformer in three ways and saves each state by every type in turn: AdamW on all of it, AdamW on
low-rank adapters of a frozen model, and bf16 weights of which only the model is published. ``verify`` compares with the
fastest way of only reading the same files, cold and warm. Prints markdown tables for README.md.
"""

import argparse
import json
import mmap
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _measure as m
import torch
import torch.distributed.checkpoint as dcp
from _training_states import Training, Transformer
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter

from torch_strata import CheckpointManager, CheckpointType, StrataWriter, verify

_VOCABULARY, _RANK = 8192, 8
_PIECE_BYTES = 16 << 20


@dataclass
class Costs:
    """What one contender's saves took.

    Attributes:
        written_bytes: Of each save, on disk.
        stall: Seconds for which the caller was held up.
        until_done: Seconds until it was durable.
    """

    written_bytes: list[int] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    until_done: list[float] = field(default_factory=list)


class Adapted(torch.nn.Module):
    """A linear layer that stays, and what is trained beside it: two matrices of rank `_RANK` (arXiv:2106.09685)."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(_RANK, base.in_features) / base.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, _RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives and what the adapter adds; shapes as of the layer."""
        given: torch.Tensor = self.base(x)
        return given + x @ self.down.T @ self.up.T


class Published(Training):
    """One of which only the weights are saved, in bf16."""

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": {name: value.bfloat16() for name, value in self.model.state_dict().items()}}


def training_of(kind: str, layers: int, width: int) -> Training:
    """A training that has done its first steps."""
    torch.manual_seed(1)
    model = Transformer(layers=layers, width=width, vocabulary=_VOCABULARY)
    if kind == "lora":
        model.requires_grad_(requires_grad=False)
        for layer in model.layers.layers:
            layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    training = (Published if kind == "bf16" else Training)(model, lr=1e-4)
    for _ in range(3):
        training.step()
    return training


# A save gets state and step; it returns what it wrote, in bytes, and for how many seconds the caller was held up.
Save = Callable[[dict[str, Any], int], "tuple[int, float]"]


def managed(root: Path, kind: CheckpointType, **settings: Any) -> Save:
    """Saves by a manager in `root`; for incremental ones the first is full."""
    manager = CheckpointManager(root, keep_count=2, no_dist=True, **settings)

    def save(state: dict[str, Any], step: int) -> tuple[int, float]:
        started = time.perf_counter()
        is_first = kind is CheckpointType.INCREMENTAL and manager.latest() is None
        handle = manager.save(state, step=step, checkpoint_type=CheckpointType.FULL if is_first else kind)
        stall = time.perf_counter() - started
        saved = handle.result()
        assert saved is not None
        return saved.size_bytes, stall

    return save


def stock(place: Path) -> Save:
    """Torch's own writer, which holds the caller up until all is written."""

    def save(state: dict[str, Any], step: int) -> tuple[int, float]:
        started = time.perf_counter()
        dcp.save(state, storage_writer=FileSystemWriter(place / f"step-{step}"), no_dist=True)
        return _size_and_remove(place / f"step-{step}"), time.perf_counter() - started

    return save


def plain_safetensors(place: Path) -> Save:
    """Safetensors' own `save_file` of the model, made durable."""

    def save(state: dict[str, Any], step: int) -> tuple[int, float]:
        started = time.perf_counter()
        (place / f"step-{step}").mkdir(parents=True)
        path = place / f"step-{step}" / "model.safetensors"
        # It takes no tensors that share memory.
        save_file({name: value.clone() for name, value in state["model"].items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return _size_and_remove(place / f"step-{step}"), time.perf_counter() - started

    return save


def _size_and_remove(folder: Path) -> int:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return size


def contenders(kind: str, place: Path) -> dict[str, Save]:
    """Every way to save that fits the run."""
    ours = {
        "full": managed(place / "full", CheckpointType.FULL),
        "incremental": managed(place / "incremental", CheckpointType.INCREMENTAL),
        "incremental, compressed": managed(place / "compressed", CheckpointType.INCREMENTAL, compress=True),
        "model_only": managed(place / "model", CheckpointType.MODEL_ONLY),
    }
    if kind == "bf16":
        return {**ours, "safetensors.save_file": plain_safetensors(place / "safetensors")}
    optimizer = managed(place / "optimizer", CheckpointType.OPTIMIZER_ONLY)
    return {**ours, "optimizer_only": optimizer, "dcp.save, stock": stock(place / "stock")}


def run_types(args: argparse.Namespace) -> dict[str, Any]:
    """Each training with every way to save in turn; prints a table for each."""
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {}
    for kind in args.trainings:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            costs = _run_one(training_of(kind, args.layers, args.width), contenders(kind, Path(folder)), args)
        _print_types(kind, costs)
        found[kind] = {name: asdict(own) for name, own in costs.items()}
    return found


def _run_one(training: Training, ways: dict[str, Save], args: argparse.Namespace) -> dict[str, Costs]:
    costs = {name: Costs() for name in ways}
    step = 0

    def save(name: str) -> None:
        started = time.perf_counter()
        size, stall = ways[name](training.state(), step)
        costs[name].until_done.append(time.perf_counter() - started)
        costs[name].written_bytes.append(size)
        costs[name].stall.append(stall)

    for save_number in range(args.rounds + 1):
        for _ in range(args.every):
            training.step()
        step += args.every
        if save_number == 0:  # takes memory from the system, and is full
            for name in ways:
                save(name)
            for own in costs.values():
                own.written_bytes, own.stall, own.until_done = [], [], []
            continue
        names = list(ways)
        turn = save_number % len(names)
        for name in names[turn:] + names[:turn]:
            save(name)
    return costs


def _print_types(kind: str, costs: dict[str, Costs]) -> None:
    whole = costs["full"].written_bytes
    print(f"\n### {kind}: a full checkpoint is {whole[-1] / 1e6:.0f} MB\n")
    print(
        "| | written, x full | stall, ms | durable after, s | durable after, x full |\n| --- | --- | --- | --- | --- |"
    )
    for name, own in costs.items():
        shares = [own / full for own, full in zip(own.written_bytes, whole, strict=True)]
        times = [own / full for own, full in zip(own.until_done, costs["full"].until_done, strict=True)]
        stall = m.spread([seconds * 1e3 for seconds in own.stall])
        print(f"| {name} | {m.spread(shares)} | {stall} | {m.spread(own.until_done)} | {m.spread(times)} |")


def run_verify(args: argparse.Namespace) -> dict[str, Any]:
    """`verify` in turn with reading the same files; prints a table for the cold and the warm page cache."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = Path(folder) / "checkpoint"
        tensors = {f"tensor.{i}": torch.randn(1 << 22) for i in range(max(1, int(args.size_gb * 1e9 / (4 << 22))))}
        dcp.save(tensors, storage_writer=StrataWriter(place), no_dist=True)
        tensors.clear()
        files = [path for path in place.rglob("*") if path.is_file()]
        size_gb = sum(path.stat().st_size for path in files) / 1e9
        raw = {
            f"raw, {'O_DIRECT' if direct else 'buffered'}, {threads} thr": partial(
                read_all, files, threads, direct=direct
            )
            for direct, threads in ((False, 2), (False, 4), (True, 4))
        }
        ways: dict[str, Callable[[], object]] = {**raw, "torch_strata.verify": partial(_check_sound, place)}
        for cache, prepare in (("cold", m.evict), ("warm", m.warm)):

            def before(_name: str, prepare: Callable[[Path], None] = prepare) -> None:
                prepare(place)

            samples = m.alternate(ways, num_rounds=args.rounds, before=before)
            fastest = min(raw, key=lambda name: m.median_seconds(samples[name]))
            table = m.rows(samples, amount=size_gb, size_gb=size_gb, raw=fastest, stock=None)
            print(m.markdown(f"Verify, page cache {cache} ({size_gb:.2f} GB)", table, unit="GB/s"))
            found[cache] = [asdict(row) for row in table]
    return found


def _check_sound(place: Path) -> None:
    if not verify(place).is_sound:
        raise RuntimeError(f"{place}: expected a sound checkpoint")


def read_all(files: list[Path], num_threads: int, *, direct: bool) -> None:
    """Read every file whole, in pieces that threads take in turn, into memory that is used again."""
    pieces = iter([(path, at) for path in files for at in range(0, path.stat().st_size, _PIECE_BYTES)])
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    open_files = {path: os.open(path, flags) for path in files}
    lock = threading.Lock()

    def work() -> None:
        with mmap.mmap(-1, _PIECE_BYTES) as buffer:
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                os.preadv(open_files[piece[0]], [buffer], piece[1])

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in open_files.values():
        os.close(descriptor)


def main() -> None:
    """Measure what was asked for."""
    args = _arguments()
    print(f"`{shlex.join(['python', 'benchmarks/lifecycle.py', *sys.argv[1:]])}`: {m.machine(args.dir or Path.cwd())}")
    found = run_types(args) if args.what == "types" else run_verify(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["types", "verify"])
    parser.add_argument("--trainings", nargs="+", choices=["adamw", "lora", "bf16"], default=["adamw", "lora", "bf16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="steps from save to save")
    parser.add_argument("--size-gb", type=float, default=4.0, help="of what is verified")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to save; three times what is kept")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
