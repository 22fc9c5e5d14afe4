"""What a planning rank does for many ranks, and what each rank does with the index at load; without the others.

    python benchmarks/planning.py --ranks 64 256 1024 --stock-ranks 64 256

Each contender and each number of ranks has a process of its own for the save and another for the load, whose peak
resident memory is taken. A rank's plan is that of a transformer with AdamW whose tensors are sharded over all ranks
along their first dim: weight, `exp_avg` and `exp_avg_sq` of every parameter. It is pickled as DCP's gather pickles it;
the time to make and pickle it is not counted, nor are the buffers of the gather, nor is writing data. Results are what
the writer's ranks report; those of torch_strata were written by a process before it, whose objects are then files
without content. The load is one rank's: the index read, and the plan for its shards.
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
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

STOCK, STRATA = "stock", "torch_strata"
_ROWS, _COLUMNS = 8, 256  # more than travels inside a manifest
_PARTS = ("weight", "exp_avg", "exp_avg_sq")

_RESULTS = "results"

# The first rank's plan; the others differ in their offsets only.
_packed: list[Any] = []


def main() -> None:
    """Run every contender in its own processes and print a table."""
    args = _arguments()
    if args.child:
        do = {"prepare": prepare, "save": run, "load": load}[args.step]
        print(json.dumps(do(args.child, args.ranks[0], args.items, Path(args.folder))))
        return
    columns = (
        "plan, s",
        "again, s",
        "index, s",
        "broadcast, s",
        "MB a plan",
        "peak RSS, MB",
        "load, s",
        "its peak, MB",
    )
    print(f"| {args.items} items a rank | ranks | {' | '.join(columns)} |")
    print("| --- " * (len(columns) + 2) + "|")
    for ranks in args.ranks:
        for kind in [STOCK, STRATA] if ranks in args.stock_ranks else [STRATA]:
            with tempfile.TemporaryDirectory() as folder:
                child = ["--child", kind, "--ranks", str(ranks), "--items", str(args.items), "--folder", folder]
                found: dict[str, float] = {}
                for step in ("prepare", "save", "load"):
                    command = [sys.executable, __file__, *child, "--step", step]
                    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
                    found |= json.loads(answer.stdout.splitlines()[-1])
            print(f"| {kind} | {ranks} | " + " | ".join(f"{value:.3g}" for value in found.values()) + " |", flush=True)


def prepare(kind: str, num_ranks: int, num_items: int, folder: Path) -> dict[str, float]:
    """Write what ranks of torch_strata report, and objects of the right sizes."""
    if kind == STOCK:
        return {}
    from torch_strata import StorageConfig, _native
    from torch_strata._store import open_store

    store = open_store("memory://prepared", StorageConfig())
    length, names = _ROWS * _COLUMNS * 4, [name.encode() for name in _names(num_items)]
    memory = torch.zeros(length + 64 * num_items, dtype=torch.uint8)
    with (folder / _RESULTS).open("wb") as file:
        for rank in range(num_ranks):
            template = ((_ROWS * rank, 0), _native.TENSOR, -1, length, "float32", (_ROWS, _COLUMNS), (_COLUMNS, 1))
            items = [(name, rank, 0, memory.data_ptr() + 64 * n, memory) for n, name in enumerate(names)]
            transfer = _native.Transfer()
            record = _native.write_items(
                store, items, [template], rank=rank, save_id="0" * 32, parent=None, transfer=transfer
            )
            for name, size in _native.record_objects(record):
                store.delete(name)
                with (folder / name).open("wb") as data:
                    data.truncate(size)
            pickle.dump([WriteResult(MetadataIndex(f"rank {rank}"), length * num_items, record)], file)
    return {}


def run(kind: str, num_ranks: int, num_items: int, folder: Path) -> dict[str, float]:
    """Seconds of each step of a save, megabytes of a pickled plan, and the peak above what was there before."""
    planner: Any = DefaultSavePlanner()
    if kind == STRATA:
        from torch_strata import StrataSavePlanner, StrataWriter

        planner, writer = StrataSavePlanner(), StrataWriter(folder)
        writer.set_up_storage_writer(True, rank=0)
        writer.prepare_local_plan(SavePlan([]))
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = _names(num_items)
    sizes: list[int] = []
    plan_seconds, (plans, metadata) = _plan(planner, kind, names, num_ranks, sizes)
    again_seconds = plan_seconds
    if kind == STRATA:
        again_seconds, (plans, metadata) = _plan(planner, kind, names, num_ranks, sizes)
    started = time.perf_counter()
    if kind == STRATA:
        with (folder / _RESULTS).open("rb") as file:
            results = [pickle.load(file) for _ in range(num_ranks)]
        writer.finish(metadata, results)
        del results
    else:
        found = _stock_results(plans)
        metadata.storage_data = {result.index: result.storage_data for of_rank in found for result in of_rank}
        with (folder / ".metadata").open("wb") as data:
            pickle.dump(metadata, data)
        metadata.storage_data = None
    index_seconds = time.perf_counter() - started
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


def load(kind: str, num_ranks: int, num_items: int, folder: Path) -> dict[str, float]:
    """Seconds until one rank has its plan, and the peak above what was there before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=num_ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (num_ranks,))
    local = torch.zeros(_ROWS, _COLUMNS)
    state = {name: DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for name in _names(num_items)}
    reader: Any = FileSystemReader(folder)
    planner: Any = DefaultLoadPlanner()
    if kind == STRATA:
        from torch_strata import StrataLoadPlanner, StrataReader

        reader, planner = StrataReader(folder), StrataLoadPlanner()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, False)
    reader.set_up_storage_reader(metadata, False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    seconds = time.perf_counter() - started
    if len(plan.items) != num_items:
        raise RuntimeError(f"expected {num_items} items to read, found {len(plan.items)}")
    return {"load": seconds, "load_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3}


def _names(num_items: int) -> list[str]:
    return [f"model.layers.{i // 27}.part_{i % 27}.{_PARTS[i % 3]}" for i in range(num_items)]


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


def _stock_results(plans: list[Any]) -> Iterator[Any]:
    """What each rank of the stock writer reports of its items."""
    length = _ROWS * _COLUMNS * 4
    for rank, plan in enumerate(plans):
        infos = (_StorageInfo(f"__{rank}_0.distcp", length * n, length) for n in range(len(plan.items)))
        results = [WriteResult(item.index, length, info) for item, info in zip(plan.items, infos, strict=True)]
        yield pickle.loads(pickle.dumps(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--stock-ranks", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--items", type=int, default=2200)
    for own in ("--child", "--step", "--folder"):
        parser.add_argument(own, help="used by itself")
    return parser.parse_args()


if __name__ == "__main__":
    main()
