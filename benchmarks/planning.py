"""What the planning rank does for many ranks, without them: plans in, one plan out, `.metadata` written, metadata out.

    python benchmarks/planning.py --ranks 64 256 1024 --stock-ranks 64 256

Each contender and each number of ranks has a process of its own, whose peak resident memory is taken. A rank's plan is
that of a transformer with AdamW whose tensors are sharded over all ranks along their first dim: weight, `exp_avg` and
`exp_avg_sq` of every parameter. It is pickled as DCP's gather pickles it; the time to make and pickle it is not
counted, nor are the buffers of the gather, nor is writing data. Results are what the writer's ranks report.
"""

import argparse
import gc
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

STOCK, STRATA = "stock", "torch_strata"
_ROWS, _COLUMNS = 8, 1024
_PARTS = ("weight", "exp_avg", "exp_avg_sq")

# The first rank's plan; the others differ in their offsets only.
_packed: list[Any] = []


def main() -> None:
    """Run every contender in its own process and print a table."""
    args = _arguments()
    if args.child:
        print(json.dumps(run(args.child, args.ranks[0], args.items)))
        return
    columns = ("ranks", "plan, s", "again, s", "index, s", "broadcast, s", "MB a plan", "peak RSS, MB")
    print(f"| {args.items} items a rank | {' | '.join(columns)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in args.ranks:
        for kind in [STOCK, STRATA] if ranks in args.stock_ranks else [STRATA]:
            command = [sys.executable, __file__, "--child", kind, "--ranks", str(ranks), "--items", str(args.items)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
            found = json.loads(answer.stdout.splitlines()[-1])
            print(f"| {kind} | {ranks} | " + " | ".join(f"{value:.3g}" for value in found.values()) + " |", flush=True)


def run(kind: str, num_ranks: int, num_items: int) -> dict[str, float]:
    """Seconds of each step, megabytes of a pickled plan, and the peak above what was there before."""
    planner: Any = DefaultSavePlanner()
    if kind == STRATA:
        from torch_strata import StrataSavePlanner

        planner = StrataSavePlanner()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = [f"model.layers.{i // 27}.part_{i % 27}.{_PARTS[i % 3]}" for i in range(num_items)]
    sizes: list[int] = []
    plan_seconds, (plans, metadata) = _plan(planner, kind, names, num_ranks, sizes)
    again_seconds = plan_seconds
    if kind == STRATA:
        again_seconds, (plans, metadata) = _plan(planner, kind, names, num_ranks, sizes)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        write = _write_index if kind == STRATA else _write_stock_index
        write(metadata, _results(kind, plans), Path(folder) / ".metadata")
        index_seconds = time.perf_counter() - started
    if kind == STRATA:
        metadata.as_stock = False
    else:
        metadata.storage_data = None
    started = time.perf_counter()
    pickle.loads(pickle.dumps(metadata))
    broadcast_seconds = time.perf_counter() - started
    return {
        "plan": plan_seconds,
        "again": again_seconds,
        "index": index_seconds,
        "broadcast": broadcast_seconds,
        "plan_mb": max(sizes) / 1e6,
        "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }


def _plan(planner: Any, kind: str, names: list[str], num_ranks: int, sizes: list[int]) -> tuple[float, Any]:
    """What arrives is unpickled, planned, and pickled for its rank."""
    seconds = 0.0
    plans = []
    for rank in range(num_ranks):
        sent = _sent(kind, names, rank, num_ranks)
        sizes.append(len(sent))
        started = time.perf_counter()
        plans.append(pickle.loads(sent))
        seconds += time.perf_counter() - started
    started = time.perf_counter()
    found = planner.create_global_plan(plans)
    for plan in found[0]:
        pickle.dumps(plan)
    return seconds + time.perf_counter() - started, found


def _sent(kind: str, names: list[str], rank: int, num_ranks: int) -> bytes:
    items = [] if _packed else list(_items(names, rank, num_ranks))
    paths = {name: tuple(name.split(".")) for name in names}
    if kind == STOCK:
        return pickle.dumps(SavePlan(items, planner_data=paths))
    from torch_strata.checkpoint.planning import PackedItems, packed_plan

    if not _packed:
        _packed.append(packed_plan(items, paths))
    columns = _packed[0].items.columns
    mine = replace(columns, offsets=columns.offsets * 0)
    mine.offsets[::2] = _ROWS * rank
    return pickle.dumps(replace(_packed[0], items=PackedItems(mine)))


def _items(names: list[str], rank: int, num_ranks: int) -> Iterator[WriteItem]:
    size, lengths = torch.Size((_ROWS * num_ranks, _COLUMNS)), torch.Size((_ROWS, _COLUMNS))
    offsets = torch.Size((_ROWS * rank, 0))
    for name in names:
        data = TensorWriteData(ChunkStorageMetadata(offsets, lengths), _properties(), size)
        yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _properties() -> TensorProperties:
    properties = TensorProperties(torch.float32)
    properties.strides = (_COLUMNS, 1)
    return properties


def _results(kind: str, plans: list[Any]) -> Iterator[Any]:
    """What each rank reports of its items: WriteResults as the stock writer's, or places as our records hold them."""
    length = _ROWS * _COLUMNS * 4
    for rank, plan in enumerate(plans):
        path = f"__{rank}_0.distcp"
        if kind == STOCK:
            infos = (_StorageInfo(path, length * n, length) for n in range(len(plan.items)))
            results = [WriteResult(item.index, length, info) for item, info in zip(plan.items, infos, strict=True)]
            yield pickle.loads(pickle.dumps(results))
        else:
            names, at = plan.items.offered.columns.shared.names, (_ROWS * rank, 0)
            yield [(name.encode(), at, rank, path, length * n, length) for n, name in enumerate(names)]


def _write_stock_index(metadata: Any, results: Iterator[Any], path: Path) -> None:
    metadata.storage_data = {result.index: result.storage_data for found in results for result in found}
    with path.open("wb") as file:
        pickle.dump(metadata, file)


def _write_index(metadata: Any, results: Iterator[Any], path: Path) -> None:
    from torch_strata.checkpoint._gc import gc_paused
    from torch_strata.checkpoint._metadata import entries_of
    from torch_strata.checkpoint._stock_pickle import stock_pickle

    with gc_paused():
        placed = (place for found in results for place in found)
        planned = metadata.planner_data
        path.write_bytes(
            stock_pickle(entries_of(metadata), placed, planner_data=planned, checkpoint_id="/", save_id="0" * 32)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--stock-ranks", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--items", type=int, default=2200)
    parser.add_argument("--child", choices=(STOCK, STRATA), help="used by itself")
    return parser.parse_args()


if __name__ == "__main__":
    main()
