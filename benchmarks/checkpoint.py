"""Save and load speed of torch_strata beside stock DCP and beside plain system calls on the same bytes.

    python benchmarks/checkpoint.py local --size-gb 4 --rounds 5
    python benchmarks/checkpoint.py slice
    python benchmarks/checkpoint.py small
    python benchmarks/checkpoint.py manifest
    python benchmarks/checkpoint.py s3 --size-gb 4
    python benchmarks/checkpoint.py troubled --size-gb 1

Prints markdown tables for README.md, which also says how each figure is taken. Needs Linux (mincore, /proc).
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import _contenders as c
import _local
import _manifest
import _measure as m
import _memory
import _raw
import _s3
import _state
import _troubled
import torch
import torch.distributed.checkpoint as dcp

GB = 1_000_000_000
MIB = 1 << 20


def main() -> None:
    """Run one benchmark and print its tables."""
    args = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=args.dir))
    report: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
        "machine": m.machine(directory),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "tables": {},
    }
    try:
        args.run(args, directory, report)
    finally:
        c.remove(directory)
    print(f"`{report['command']}`, {report['date']}: {report['machine']}, torch {report['torch']}.\n")
    print("\n".join(report.pop("text", [])))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def run_slice(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """Rows worth 1 MiB out of a tensor of 64 MiB: how many bytes are read, how long it takes."""
    rows, first_row = 64, 1000
    whole = {"weight": torch.arange(4096 * 4096, dtype=torch.float32).view(4096, 4096)}
    contenders = [c.stock(whole, num_threads=1)] + ([] if c.STRATA in args.without else [c.strata(whole)])
    lines = ["| contender | MiB read | ms, least / median / greatest |", "| --- | --- | --- |"]
    for contender in contenders:
        place = directory / contender.kind
        contender.save(place)
        part = {"weight": torch.zeros(rows, 4096)}

        def load_rows(k: c.Contender = contender, place: Path = place, part: dict[str, Any] = part) -> None:
            planner = c.RowSlice("weight", first_row=first_row)
            dcp.load(part, storage_reader=k.reader(place), planner=planner, no_dist=True)

        load_rows()
        if not torch.equal(part["weight"], whole["weight"][first_row : first_row + rows]):
            raise RuntimeError(f"{contender.label}: the rows differ from those saved")
        before = m.bytes_read()
        load_rows()
        num_read = m.bytes_read() - before
        samples = m.alternate({contender.label: load_rows}, num_rounds=args.rounds)[contender.label]
        times = m.spread([sample.seconds * 1e3 for sample in samples])
        lines.append(f"| {contender.label} | {num_read / MIB:.2f} | {times} |")
        report["tables"][f"slice {contender.label}"] = {"bytes_read": num_read, "seconds": [s.seconds for s in samples]}
    report["text"] = ["### 1 MiB of rows out of a 64 MiB tensor", "", *lines, ""]


def run_small(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """Many tensors of 1 KiB: items a second."""
    state = _state.small_state(args.items, 1024)
    views = _state.buffers(state)
    raw = _raw.RawFiles(views)
    way = _raw.Way(num_threads=2)
    size_gb = sum(map(len, views)) / GB
    contenders = [c.stock(state, num_threads=1)] + ([] if c.STRATA in args.without else [c.strata(state)])
    places = {kind: directory / kind for kind in (c.RAW, c.STOCK, c.STRATA)}
    saves: dict[str, Callable[[], object]] = {"raw": lambda: raw.save(places[c.RAW], way)}
    loads: dict[str, Callable[[], object]] = {"raw": lambda: raw.load(places[c.RAW], way)}
    for k in contenders:
        saves[k.label] = partial(k.save, places[k.kind])
        loads[k.label] = partial(k.load, places[k.kind])
    save_samples = m.alternate(saves, num_rounds=args.rounds, before=lambda name: os.sync())
    expected = _state.digest(views)
    for k in contenders:
        c.check_load(k.label, loads[k.label], state, views, expected)
    load_samples = m.alternate(loads, num_rounds=args.rounds)
    for title, samples in (("save", save_samples), ("load, warm", load_samples)):
        table = m.rows(samples, amount=args.items, size_gb=size_gb, raw="raw", stock=contenders[0].label)
        m.add(report, f"{args.items} tensors of 1 KiB, {title}", table, unit="items/s")


def _arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--size-gb", type=float, default=4.0, help="size of the mixed state, 1e9 bytes (default 4)")
    common.add_argument("--rounds", type=int, default=5, help="timed runs of each contender (default 5)")
    common.add_argument("--trials", type=int, default=2, help="runs of each way before the best are kept")
    common.add_argument("--keep", type=int, default=2, help="raw ways that stay for the timed rounds (default 2)")
    common.add_argument("--stock-threads", type=int, nargs="+", default=list(c.STOCK_THREADS))
    common.add_argument("--without", nargs="*", default=[], help=f"leave out contenders, for instance {c.STRATA}")
    common.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary directory)")
    common.add_argument("--json", type=Path, default=None, help="also write every figure to this file")
    common.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak RSS")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("local", parents=[common]).set_defaults(run=_local.run)
    commands.add_parser("slice", parents=[common]).set_defaults(run=run_slice)
    small = commands.add_parser("small", parents=[common])
    small.add_argument("--items", type=int, default=100_000)
    small.set_defaults(run=run_small)
    manifest = commands.add_parser("manifest", parents=[common])
    manifest.add_argument("--items", type=int, default=500_000)
    manifest.set_defaults(run=_manifest.run)
    s3 = commands.add_parser("s3", parents=[common])
    s3.add_argument("--server", type=Path, default=Path("target/release/strata-bench-s3"))
    s3.add_argument("--endpoint", default=None, help="use this running server instead, for instance http://[::1]:9000")
    s3.add_argument("--bucket", default="bench")
    s3.set_defaults(run=_s3.run)
    troubled = commands.add_parser("troubled", parents=[common], help="S3 that is late and fails now and then")
    troubled.add_argument("--server", type=Path, default=Path("target/release/strata-bench-s3"))
    troubled.add_argument("--bucket", default="bench")
    troubled.add_argument("--latency-ms", type=int, default=20)
    troubled.add_argument("--faults", type=float, default=0.01, help="share of the requests that fail (default 0.01)")
    troubled.add_argument("--busy-above", type=int, default=None, help="requests at a time above which it says 503")
    troubled.set_defaults(run=_troubled.run, endpoint=None)
    peak = commands.add_parser("peak", parents=[common], help="used by the others: one contender's memory")
    peak.add_argument("--kind", choices=(c.STOCK, c.STRATA, c.CONNECTOR), required=True)
    peak.add_argument("--endpoint", default=None)
    peak.add_argument("--bucket", default="bench")
    peak.set_defaults(run=_memory.run)
    return parser.parse_args()


if __name__ == "__main__":
    main()
