"""Ranks as real processes with a process group, bounded in time."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Ranks are forked from a server that has imported torch and started nothing: a fresh interpreter would spend longer
# importing than the test runs.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch_strata.checkpoint.reader",
        "torch_strata.checkpoint.writer",
    ]
)


def run_ranks(
    folder: Path,
    world: int,
    target: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout_seconds: float = 90,
) -> list[Any]:
    """What ``target(rank, *args)`` returns on each of `world` ranks of one group.

    Args:
        folder: Exists, empty, on a file system that all ranks see.
        world: Number of ranks.
        target: A module's function.
        args: Picklable.
        backend: Of the group; nccl wants a GPU for each rank.
        timeout_seconds: Time for all ranks; whoever is left then is killed.

    Raises:
        AssertionError: If a rank raises, dies or runs too long; the message holds its traceback.
    """
    run = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    run.mkdir(parents=True)
    processes = [
        _CONTEXT.Process(target=_main, args=(run, rank, world, backend, target, args)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_seconds)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} were still running after {timeout_seconds} s"
    return [_result(run, rank, process.exitcode) for rank, process in enumerate(processes)]


def _main(run: Path, rank: int, world: int, backend: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{run}/group", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    if backend == "gloo":
        dist.barrier()  # a rank that is done at once would leave while others still connect to it
    try:
        outcome = ("value", target(rank, *args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    (run / f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


def _result(run: Path, rank: int, exit_code: int | None) -> Any:
    path = run / f"{rank}.pickle"
    assert path.exists(), f"rank {rank} ended with {exit_code} and left no result"
    kind, value = pickle.loads(path.read_bytes())
    assert kind == "value", f"rank {rank}:\n{value}"
    return value
