"""Saving a GPU's state: how far copies from the device and writes to the disk overlap, beside stock DCP.

    python benchmarks/gpu.py --size-gb 8 --rounds 5

Prints a markdown table for README.md. `copies alone` moves the same bytes from the device into one warm, page-locked
buffer; `writes alone` saves the same state from host memory; if a save of the GPU's state takes as long as the slower
of the two, the overlap is complete.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import _contenders as c
import _measure as m
import torch
import torch.distributed.checkpoint as dcp

import torch_strata

GB = 1_000_000_000
SHARE = 64 << 20


def main() -> None:
    """Run the contenders in turn and print their table."""
    args = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=args.dir))
    num_tensors = max(1, int(args.size_gb * GB) // SHARE)
    on_gpu = {f"layer.{i}": torch.rand(SHARE // 4, device="cuda") for i in range(num_tensors)}
    on_host = {key: value.cpu() for key, value in on_gpu.items()}
    locked = torch.empty(SHARE // 4, pin_memory=True)
    place = directory / "step"

    def copies_alone() -> None:
        for value in on_gpu.values():
            locked.copy_(value, non_blocking=True)
        torch.cuda.synchronize()

    def ours(state: dict[str, torch.Tensor]) -> None:
        dcp.save(state, storage_writer=torch_strata.StrataWriter(place), no_dist=True)

    def stock() -> None:
        writer = dcp.FileSystemWriter(place, thread_count=args.threads)
        dcp.save(on_gpu, storage_writer=writer, no_dist=True)

    def load() -> None:
        dcp.load(on_gpu, storage_reader=torch_strata.StrataReader(directory / "kept"), no_dist=True)

    def stock_load() -> None:
        dcp.load(on_gpu, storage_reader=dcp.FileSystemReader(directory / "kept"), no_dist=True)

    contenders = {
        "copies alone": copies_alone,
        "writes alone (ours, from the host)": lambda: ours(on_host),
        "ours, from the GPU": lambda: ours(on_gpu),
        f"stock, from the GPU, {args.threads} threads": stock,
        "ours, load to the GPU": load,
        "stock, load to the GPU": stock_load,
    }
    try:
        dcp.save(on_gpu, storage_writer=torch_strata.StrataWriter(directory / "kept"), no_dist=True)
        runs = m.alternate(contenders, num_rounds=args.rounds, before=lambda name: c.remove(place))
    finally:
        c.remove(directory)
    size = num_tensors * SHARE
    print(f"`{shlex.join(['python', 'benchmarks/gpu.py', *sys.argv[1:]])}`: {torch.cuda.get_device_name()}\n")
    print("| | GB/s: min / median / max | CPU s/GB |\n| --- | --- | --- |")
    for name, samples in runs.items():
        speed = m.spread([size / GB / sample.seconds for sample in samples])
        cpu = m.spread([sample.cpu_seconds / (size / GB) for sample in samples]).median
        print(f"| {name} | {speed} | {cpu:.2f} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gb", type=float, default=8, help="bytes of the state, in GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4, help="of the stock writer")
    parser.add_argument("--dir", type=Path, help="where to write; the system's temporary directory if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
