"""Save and load of many small tensors: stock, ours with DCP's planners, and ours with our own, in turn.

    python benchmarks/small_tensors.py --items 20000 100000 --rounds 3

Prints microseconds for each tensor and how many times as fast as stock. Stock's planners are DefaultSavePlanner and
DefaultLoadPlanner, its writer and reader FileSystemWriter and FileSystemReader with their defaults. Page cache warm.
Each number of tensors is taken twice: in ``{"model": {...}}``, as trainers save, and as keys of the state itself, of
each of which ``dcp.save`` logs twice, and ``dcp.load`` asks twice whether it is Stateful, before any planner is called.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import _contenders as c
import _measure as m
import _state
import torch.distributed.checkpoint as dcp

from torch_strata import StrataLoadPlanner, StrataReader, StrataSavePlanner, StrataWriter


def main() -> None:
    """Run every number of tensors and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| tensors of 1 KiB | save, us each | x stock | load, us each | x stock |")
    print("| --- | --- | --- | --- | --- |")
    for num_items in args.items:
        for is_nested in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                run(num_items, args.rounds, Path(folder), is_nested=is_nested)


def run(num_items: int, num_rounds: int, folder: Path, *, is_nested: bool) -> None:
    """Time all contenders on one state and print their rows."""
    state = _state.small_state(num_items, 1024)
    if is_nested:
        state = {"model": state}
    views = _state.buffers(state)
    ways: dict[str, tuple[Any, Any, Any, Any]] = {
        "stock": (dcp.FileSystemWriter, dcp.FileSystemReader, lambda: None, lambda: None),
        "torch_strata": (StrataWriter, StrataReader, lambda: None, lambda: None),
        "torch_strata, own planners": (StrataWriter, StrataReader, StrataSavePlanner, StrataLoadPlanner),
    }
    saves, loads = {}, {}
    for name, (writer, reader, save_planner, load_planner) in ways.items():
        saves[name] = partial(_save, state, folder / name, writer, save_planner)
        loads[name] = partial(_load, state, folder / name, reader, load_planner)
    saved = m.alternate(saves, num_rounds=num_rounds)
    expected = _state.digest(views)
    for name, load in loads.items():
        c.check_load(name, load, state, views, expected)
    loaded = m.alternate(loads, num_rounds=num_rounds)
    for name in ways:
        cells = []
        for samples in (saved, loaded):
            seconds = statistics.median(sample.seconds for sample in samples[name])
            stock = statistics.median(sample.seconds for sample in samples["stock"])
            cells += [f"{seconds * 1e6 / num_items:.0f}", f"{stock / seconds:.1f}"]
        where = "in a model" if is_nested else "as keys"
        print(f"| {num_items} {where}, {name} | {' | '.join(cells)} |", flush=True)


def _save(state: dict[str, Any], place: Path, writer: Any, planner: Any) -> None:
    dcp.save(state, storage_writer=writer(place), planner=planner(), no_dist=True)


def _load(state: dict[str, Any], place: Path, reader: Any, planner: Any) -> None:
    dcp.load(state, storage_reader=reader(place), planner=planner(), no_dist=True)


if __name__ == "__main__":
    main()
