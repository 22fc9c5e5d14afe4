"""The manifest with many items: time to write and commit, size, time to open. Half a million by default.

Goes below dcp on purpose: its planner alone needs most of a minute for as many items, and is not what is asked here.
"""

import argparse
import importlib
import pickle
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_ITEM_BYTES = 64
_ROW_LOOKUPS = 1000


def run(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """Save `args.items` tensors of 64 B straight through the core, open the result, add a table to `report`."""
    native = importlib.import_module("torch_strata._native")
    config = importlib.import_module("torch_strata.config").StorageConfig()
    store = importlib.import_module("torch_strata._store").open_store(directory, config)
    memory = torch.zeros(args.items * _ITEM_BYTES // 4)
    save_id = uuid.uuid4().hex
    names = [f"model.layers.{i // 1000}.experts.{i % 1000}.weight".encode() for i in range(args.items)]
    shape, strides, offsets = (_ITEM_BYTES // 4,), (1,), (0,)
    template = (offsets, native.TENSOR, -1, _ITEM_BYTES, "float32", shape, strides)
    items = [(name, -1, 0, memory.data_ptr() + i * _ITEM_BYTES, memory) for i, name in enumerate(names)]
    ones, counts = np.ones(len(names), dtype=np.int64), np.arange(len(names) + 1)
    columns = [ones - 1, ones, ones * shape[0], ones, counts, counts, ones - 1]
    entries = (names, [("float32", False, False, 1, "strided", True)], columns)
    seconds: dict[str, float] = {}
    base = native.open_base(store, rank=None)
    record = _clock(
        seconds,
        "write items",
        lambda: native.write_items(
            store, items, [template], rank=0, save_id=save_id, parent=None, transfer=native.Transfer()
        ),
    )
    _clock(
        seconds,
        "commit",
        lambda: native.commit(
            store,
            base,
            [record],
            entries,
            planner_data=b"",
            stock=(b"N", pickle.dumps(save_id, protocol=3)[2:-1], 1, "1.0.0", True),  # the save_id, for readers
            save_id=save_id,
            previous_save_id="",
            rank=None,
            world_size=1,
            generation=0,
            run_root=None,
            run=None,
        ),
    )
    opened = _clock(seconds, "open", lambda: native.Checkpoint.open(store, rank=None))
    found = _clock(seconds, "entries", opened.entries)
    if len(found[0]) != args.items:
        raise RuntimeError(f"manifest: expected {args.items} entries, found {len(found[0])}")
    keys = names[:: max(1, args.items // _ROW_LOOKUPS)]
    _clock(seconds, f"rows of {len(keys)} keys", lambda: opened.locate(keys, [0] * len(keys), [offsets]))
    manifest_bytes = max(path.stat().st_size for path in (directory / ".strata").iterdir() if path.is_file())
    report["tables"]["manifest"] = {"items": args.items, "bytes": manifest_bytes, "seconds": seconds}
    report["text"] = [
        f"### Manifest of {args.items} items: {manifest_bytes / 1e6:.1f} MB, {manifest_bytes / args.items:.0f} B each",
        "",
        "| step | seconds |",
        "| --- | --- |",
        *(f"| {step} | {value:.3f} |" for step, value in seconds.items()),
        "",
    ]


def _clock(seconds: dict[str, float], step: str, action: Callable[[], Any]) -> Any:
    started_at = time.perf_counter()
    result = action()
    seconds[step] = time.perf_counter() - started_at
    return result
