"""What training loses to asynchronous saves: the stall at each call, and slower steps while a save is in flight.

    python benchmarks/async_training.py --rounds 5 --json training.json

A small transformer trains on the CPU with AdamW and saves its state every few steps with torch_strata.async_save, with
dcp.async_save as torch ships it (a thread, FileSystemWriter, its own stager), or not at all. All take turns in one
process: a turn is one save and the steps until the next. Prints a markdown table for README.md.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
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
from torch.distributed.checkpoint import FileSystemWriter

import torch_strata

NOTHING = "no save"
_VOCABULARY = 8192

# Returns a future of some kind.
Save = Callable[[], Any]


@dataclass
class Turn:
    """One save and the steps after it, in seconds.

    Attributes:
        stall: Time of the call.
        steps: Times of the steps that began while the save was in flight.
        later_steps: Times of the others.
        until_done: From the call to the end of the save, as seen between two steps.
        wall: Of the whole turn.
    """

    stall: float = 0.0
    steps: list[float] = field(default_factory=list)
    later_steps: list[float] = field(default_factory=list)
    until_done: float = 0.0
    wall: float = 0.0


def main() -> None:
    """Let the contenders take turns and print their table."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    training = Training(Transformer(layers=args.layers, width=args.width, vocabulary=_VOCABULARY))
    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = Path(folder)
        contenders: dict[str, Save | None] = {
            NOTHING: None,
            "torch_strata.async_save": lambda: torch_strata.async_save(
                training.state(), checkpoint_id=place / "ours", no_dist=True
            ),
            "dcp.async_save, stock": lambda: dcp.async_save(
                training.state(), storage_writer=FileSystemWriter(place / "stock", overwrite=True), no_dist=True
            ),
        }
        for save in contenders.values():  # the first save of each takes memory from the system
            _turn(training, save, args.every)
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}

        def take_turn(name: str) -> None:
            turns[name].append(_turn(training, contenders[name], args.every))

        m.alternate({name: partial(take_turn, name) for name in contenders}, num_rounds=args.rounds)
    _report(training, turns, args)


def _turn(training: Training, save: Save | None, num_steps: int) -> Turn:
    turn, started = Turn(), time.perf_counter()
    handle = None if save is None else save()
    turn.stall = 0.0 if save is None else time.perf_counter() - started
    is_in_flight = handle is not None
    for _ in range(num_steps):
        began = time.perf_counter()
        training.step()
        (turn.steps if is_in_flight else turn.later_steps).append(time.perf_counter() - began)
        if handle is not None and is_in_flight and handle.done():
            is_in_flight, turn.until_done = False, time.perf_counter() - started
    turn.wall = time.perf_counter() - started
    if handle is not None:
        handle.result()
        turn.until_done = turn.until_done or time.perf_counter() - started
    return turn


def _report(training: Training, turns: dict[str, list[Turn]], args: argparse.Namespace) -> None:
    tensors = [*training.model.parameters(), *(t for s in training.optimizer.state.values() for t in s.values())]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    base = statistics.median(step for turn in turns[NOTHING] for step in turn.later_steps)
    print(f"`{shlex.join(['python', 'benchmarks/async_training.py', *sys.argv[1:]])}`: {m.machine(Path.cwd())}")
    print(f"\n{len(tensors)} tensors, {num_bytes / 1e9:.2f} GB; a step alone takes {base * 1e3:.0f} ms\n")
    print(
        "| | stall, ms | step in flight, x alone | step later, x alone | save takes, s | a turn, x without a save |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name, own in turns.items():
        during = [step / base for turn in own for step in turn.steps]
        later = [step / base for turn in own for step in turn.later_steps]
        walls = [turn.wall / other.wall for turn, other in zip(own, turns[NOTHING], strict=True)]
        cells = [
            str(m.spread([turn.stall * 1e3 for turn in own])) if during else "",
            f"{statistics.median(during):.2f}" if during else "",
            f"{statistics.median(later):.2f}" if later else "",
            f"{statistics.median(turn.until_done for turn in own):.2f}" if during else "",
            str(m.spread(walls)),
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.json:
        figures = {name: [asdict(turn) for turn in own] for name, own in turns.items()}
        args.json.write_text(json.dumps({"bytes": num_bytes, "step_seconds": base, "turns": figures}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1, help="of training; the cores beyond are for saves")
    parser.add_argument("--every", type=int, default=10, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to save; three times the state's size")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
