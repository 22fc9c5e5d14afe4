"""The command, and runs for it to look at."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

from tests.checkpoint.states import flip, largest_object, save
from torch_strata import StorageConfig, _native
from torch_strata._store import open_store
from torch_strata.checkpoint.copying import Destination, open_content, write_content
from torch_strata.cli import main


def strata(*arguments: object, **settings: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **settings)


def strata_json(*arguments: object) -> Any:
    done = strata(*arguments, "--json")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return json.loads(done.stdout)


def stock_save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def state_at(step: int) -> dict[str, Any]:
    """A frozen part, a part that changes with the step, and a value."""
    frozen = torch.arange(60_000, dtype=torch.float32).reshape(300, 200)
    return {"model": {"frozen": frozen, "head": torch.full((5, 4), float(step))}, "step": step}


def make_run(root: str, scratch: Path, steps: int = 4, *, metrics: bool = True) -> None:
    """Checkpoints of steps 1 to `steps` as a manager writes them: a full one, then incremental ones."""
    config = StorageConfig()
    for step in range(1, steps + 1):
        save(state_at(step), scratch / f"state-{step}")
        parent = None
        if step > 1:
            before = f"step-{step - 1}"
            parent = _native.Parent.open(open_store(f"{root}/{before}", config), before)
        to = Destination(
            place=f"{root}/step-{step}",
            config=config,
            run_info=(step, 0, "full" if step == 1 else "incremental", {"note": "a\x1b[2Jb"}, {"loss": 1 / step}),
            run_root=open_store(root, config),
            parent=parent,
        )
        write_content(open_content(scratch / f"state-{step}", config), to)


def damage_frozen(checkpoint: Path) -> Path:
    """Change a bit of the frozen part of a checkpoint made by `make_run`."""
    path = largest_object(checkpoint)
    flip(path, path.read_bytes().index(state_at(1)["model"]["frozen"].numpy().tobytes()[4:4000]) + 100)
    return path


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal bit for bit, types of containers and dtypes included."""
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        if left.numel():
            bits = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (left, right)]
            assert torch.equal(*bits), where
    elif isinstance(left, dict):
        assert [str(key) for key in left] == [str(key) for key in right], where
        for (key, inner), other in zip(left.items(), right.values(), strict=True):
            assert_same(inner, other, f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for at, (inner, other) in enumerate(zip(left, right, strict=True)):
            assert_same(inner, other, f"{where}[{at}]")
    else:
        assert type(left) is type(right) and left == right, where
