"""How long training stands still while an asynchronous save takes its copy, beside a memcpy and torch's own stagers.

    python benchmarks/staging.py --size-gb 2 --rounds 7
    python benchmarks/staging.py --state transformer --size-gb 1
    python benchmarks/staging.py --state shards

Prints a markdown table for README.md. All contenders copy the same state on the host in turn; the first copy of each,
which takes memory from the system, is shown alone. A memcpy goes from each tensor to warm memory, on one thread; a
ratio of 1.0 is as long.
"""

import argparse
import ctypes
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure as m
import torch
from _training_states import small_shards, transformer_state
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from torch_strata.checkpoint.staging import snapshot

GB = 1_000_000_000
MIB = 1 << 20
_NUM_SMALL = 2000
_SMALL_BYTES = 4096
_MIDDLE_MIB = (1, 2, 4, 8, 16)
MEMCPY = "memcpy"


def main() -> None:
    """Run the contenders in turn and print their table."""
    args = _arguments()
    makers: dict[str, Callable[[int], dict[str, Any]]] = {
        "mixed": _state,
        "transformer": transformer_state,
        "shards": lambda _: small_shards(),
    }
    state = makers[args.state](int(args.size_gb * GB))
    tensors = {key: value for key, value in flatten_state_dict(state)[0].items() if isinstance(value, torch.Tensor)}
    contenders = {
        MEMCPY: _memcpy(tensors),
        "torch_strata": lambda: snapshot(state),
        "torch, stager kept": _stock(state, kept=True),
        "torch, stager for each save": _stock(state, kept=False),
        "clone of each tensor": lambda: {key: value.clone() for key, value in tensors.items()},
    }
    first = {name: m.timed(copy).seconds for name, copy in contenders.items()}
    samples = m.alternate(contenders, num_rounds=args.rounds)
    size_gb = sum(value.nbytes for value in tensors.values()) / GB
    print(f"`{shlex.join(['python', 'benchmarks/staging.py', *sys.argv[1:]])}`: {m.machine(Path.cwd())}")
    print(f"\n{len(tensors)} tensors, {size_gb:.3f} GB\n")
    print("| | first, s | later, s | x memcpy: min / median / max | CPU s/GB |\n| --- | --- | --- | --- | --- |")
    for name, own in samples.items():
        ratios = m.spread([a.seconds / b.seconds for a, b in zip(own, samples[MEMCPY], strict=True)])
        cpu = m.spread([sample.cpu_seconds / size_gb for sample in own]).median
        print(f"| {name} | {first[name]:.2f} | {m.median_seconds(own):.4f} | {ratios} | {cpu:.2f} |")


def _state(size_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors of 1 to 16 MiB, and 2,000 of 4 KiB."""
    state = {f"small.{i}": torch.full((_SMALL_BYTES // 4,), float(i)) for i in range(_NUM_SMALL)}
    remaining = size_bytes - _NUM_SMALL * _SMALL_BYTES
    while remaining >= MIB:
        mib = min(_MIDDLE_MIB[len(state) % len(_MIDDLE_MIB)], remaining // MIB)
        state[f"layer.{len(state)}"] = torch.full((mib * MIB // 4,), float(len(state)))
        remaining -= mib * MIB
    return state


def _memcpy(state: dict[str, torch.Tensor]) -> Callable[[], object]:
    places = [
        (value.data_ptr(), value.nbytes)
        for value in (value.to_local() if isinstance(value, DTensor) else value for value in state.values())
    ]
    target = torch.zeros(sum(num_bytes for _, num_bytes in places), dtype=torch.uint8)

    def copy() -> None:
        address = target.data_ptr()
        for source, num_bytes in places:
            ctypes.memmove(address, source, num_bytes)
            address += num_bytes

    return copy


def _stock(state: dict[str, Any], *, kept: bool) -> Callable[[], object]:
    # Every option off: pinned and non-blocking copies need an accelerator, shared memory is slower still.
    options = StagingOptions(False, False, False, False)
    one = DefaultStager(options)
    return lambda: (one if kept else DefaultStager(options)).stage(state)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", choices=("mixed", "transformer", "shards"), default="mixed")
    parser.add_argument("--size-gb", type=float, default=2, help="bytes of the state, in GB")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
