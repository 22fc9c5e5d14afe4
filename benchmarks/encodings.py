"""What encoding costs and saves: incremental checkpoints of a training, with and without ``compress``.

Trains a small transformer for the ratios, and saves a large state for the rates. On local disk::

    python benchmarks/encodings.py [--folder DIR] [--megabytes 400] [--rounds 3]
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _training_states import Training, Transformer

from torch_strata import CheckpointManager, StorageConfig
from torch_strata._store import open_store
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint.save_stats import SaveStats


def saved(manager: CheckpointManager, state: Any, step: int) -> SaveStats:
    """A save's numbers; the first of a run is full, those after it incremental."""
    handle = manager.save(state, step=step, checkpoint_type="incremental")
    handle.result()
    assert handle.stats is not None
    return handle.stats


def training(dtype: torch.dtype, between: int) -> Iterator[Any]:
    """The state of a small transformer each `between` steps; its moments have its dtype."""
    torch.manual_seed(1)
    running = Training(Transformer(layers=2, width=256, vocabulary=1024).to(dtype), lr=3e-4)
    while True:
        for _ in range(between):
            running.step()
        yield running.state()


def ratios(root: Path, dtype: torch.dtype, between: int, saves: int) -> None:
    """Print what the weights and the moments take, of what they have, averaged over some saves."""
    taken, had = {"model": 0, "optimizer": 0}, {"model": 0, "optimizer": 0}
    written, payload = 0, 0
    states = training(dtype, between)
    with CheckpointManager(root, compress=True) as manager:
        for _ in range(3):  # the first steps of Adam are like no others
            next(states)
        saved(manager, next(states), 1)
        for step in range(2, saves + 2):
            stats = saved(manager, next(states), step)
            written, payload = written + stats.written_bytes, payload + stats.payload_bytes
            place = root / f"step-{step}"
            opened = open_checkpoint(open_store(place, StorageConfig()), place, rank=None)
            for fqn, _, stored_bytes, tensor_bytes, _ in opened.native.encodings():
                key = fqn.decode().partition(".")[0]
                taken[key], had[key] = taken[key] + stored_bytes, had[key] + tensor_bytes
    shown = ", ".join(f"{key} {taken[key] / had[key]:.2f}" for key in taken if had[key])
    name = str(dtype).removeprefix("torch.")
    print(f"{name}, {between} steps between saves: {written / payload:.2f} of all written; encoded {shown}")
    shutil.rmtree(root)


def moved_on(state: dict[str, torch.Tensor]) -> None:
    """As a few steps of training would: each weight by a part of its own size, each moment by a tenth of it."""
    for name, tensor in state.items():
        scale = 3e-3 if name.startswith("weight") else 0.1
        tensor.mul_(1 + scale * torch.randn(tensor.shape, dtype=torch.float32).to(tensor.dtype))


def rates(root: Path, num_bytes: int, rounds: int) -> None:
    """Print how fast a large state is saved and loaded, encoded and as it is, alternating."""
    count = num_bytes // (2 + 4) // 4
    state = {f"weight{n}": torch.randn(count).mul_(0.02).to(torch.bfloat16) for n in range(4)}
    state |= {f"moment{n}": torch.randn(count).mul_(1e-4) for n in range(4)}
    payload = sum(tensor.nbytes for tensor in state.values())
    seconds: dict[tuple[str, bool], list[float]] = {}
    ratio = 1.0
    managers = {compress: CheckpointManager(root / str(compress), compress=compress) for compress in (False, True)}
    for manager in managers.values():
        saved(manager, state, 1)
    for step in range(2, rounds + 2):
        moved_on(state)
        for compress, manager in managers.items():
            stats = saved(manager, state, step)
            seconds.setdefault(("save", compress), []).append(stats.write_seconds)
            ratio = stats.written_bytes / stats.payload_bytes if compress else ratio
            loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            started = time.perf_counter()
            manager.load(step, loaded)
            seconds.setdefault(("load", compress), []).append(time.perf_counter() - started)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    for (what, compress), times in sorted(seconds.items()):
        rate = payload / statistics.median(times) / 1e9
        print(f"{what} {'encoded' if compress else 'as it is'}: {rate:.2f} GB/s of {payload / 1e6:.0f} MB")
    print(f"written: {ratio:.2f} of it")


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder if not given")
    parser.add_argument("--megabytes", type=int, default=400, help="of the large state")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rates(Path(folder), options.megabytes * 1_000_000, options.rounds)
        for dtype in (torch.bfloat16, torch.float32):
            for between in (1, 10):
                ratios(Path(folder) / f"{dtype}-{between}", dtype, between, options.rounds + 1)


if __name__ == "__main__":
    main()
