"""A training that is stopped and goes on as if it had not been: CheckpointManager in one process."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from torch_strata import CheckpointManager, CheckpointNotFoundError, KeepAny, KeepBest, KeepLast, export_safetensors


def train(root: Path, *, until: int) -> dict[int, float]:
    """Go on from the newest checkpoint below `root` to step `until`; the loss of each step done here."""
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    losses = {}
    # The newest two stay, and the best. Leaving the block waits until the last save is committed.
    with CheckpointManager(root, retention=KeepAny(KeepLast(2), KeepBest("loss"))) as manager:
        try:
            found = manager.load("latest", state(0))  # the random numbers go on, too
        except CheckpointNotFoundError:
            found = state(0)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        for step in range(found["step"] + 1, until + 1):
            inputs = torch.randn(16, 8)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step % 2 == 0:
                manager.save(state(step), step=step, metrics={"loss": losses[step]})
    return losses


with tempfile.TemporaryDirectory() as folder:  # a URL such as s3://bucket/run does as well
    uninterrupted = train(Path(folder, "whole"), until=10)
    root = Path(folder, "run")
    interrupted = {**train(root, until=6), **train(root, until=10)}
    assert interrupted == uninterrupted
    print("resumed at step 6: the same losses to the last bit")

    manager = CheckpointManager(root, retention=KeepBest("loss"))
    best = manager.best()
    assert best is not None
    print(f"kept steps {[found.step for found in manager.all()]}, the best is step {best.step}")
    report = export_safetensors(best.path, Path(folder, "published"), key="model")
    print(f"published {report.num_tensors} tensors in {', '.join(report.files)}")
