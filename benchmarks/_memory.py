"""Peak resident memory of one save and one load, each contender in a fresh process.

A process of its own, because buffers that an earlier contender left with the allocator would hide a later peak.
The speeds are taken in one process instead, where every contender meets the same warm pages.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _contenders as c
import _measure as m
import _state

GB = 1_000_000_000


def peaks(
    args: argparse.Namespace, directory: Path, *, labels: dict[str, str], endpoint: str | None = None
) -> dict[str, dict[str, float]]:
    """Peak resident MB above the state, by label, then by ``save`` and ``load``.

    `labels` gives each kind's label; a number after its last ``=`` is the thread_count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {}
    for kind, label in labels.items():
        answer = directory / f"peak-{kind}.json"
        command = [sys.executable, str(Path(__file__).with_name("checkpoint.py")), "peak", "--kind", kind]
        command += ["--size-gb", str(args.size_gb), "--dir", str(directory), "--json", str(answer)]
        command += ["--stock-threads", label.rpartition("=")[2]] if "=" in label else []
        command += ["--endpoint", endpoint, "--bucket", args.bucket] if endpoint else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        found[label] = json.loads(answer.read_text())["peaks_mb"]
    return found


def run(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """The child's side: build the state, save and load once with `args.kind`, report both peaks."""
    state = _state.mixed_state(int(args.size_gb * GB))
    place: Path | str = directory / "peak"
    if args.endpoint:
        c.use_s3_environment(args.endpoint)
        place = f"s3://{args.bucket}/peak"
    num_threads = args.stock_threads[0]
    if args.kind == c.STRATA:
        contender = c.strata(state)
    elif args.kind == c.STOCK:
        contender = c.stock(state, num_threads=num_threads)
    else:
        contender = c.connector(state, endpoint=args.endpoint, num_threads=num_threads)
    # Code and tables that a process loads once are not what a save costs.
    c.stock({"step": 1}, num_threads=1).save(directory / "tiny")
    report["peaks_mb"] = {
        "save": m.peak_rss_above(lambda: contender.save(place)) / 1e6,
        "load": m.peak_rss_above(lambda: contender.load(place)) / 1e6,
    }
