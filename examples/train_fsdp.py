"""Train a small GPT with FSDP2, save it through torch_strata, and resume it after a crash.

Run it with any number of processes, on any storage that torch_strata opens:

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --storage /tmp/run
    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --storage s3://bucket/run --resume

The text is the language reference that ships with Python (`pydoc_data.topics`), one token a byte, so nothing
is downloaded. Everything that a step depends on is either a function of (seed, step) or part of the checkpoint:
a run that was killed and resumed on the same number of processes repeats the losses of an uninterrupted run bit
for bit. `examples/demo.py` proves that, with a real SIGKILL.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_strata import CheckpointHandle, CheckpointManager
from torch_strata.errors import CheckpointNotFoundError

NUM_TOKENS = 256  # one for each value of a byte
NOISE = 0.02  # share of the input bytes that are blanked, drawn anew in each step


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape ``(rows, context, width)`` to the same shape."""
        rows, context, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(rows, context, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, context, width))
        output: Tensor = x + self.mlp(self.norm_mlp(x))
        return output


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_TOKENS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids, shape ``(rows, context)``, to logits, shape ``(rows, context, NUM_TOKENS)``."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def read_corpus() -> Tensor:
    """Python's own reference documentation as byte values, shape ``(num_bytes,)``, int64."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(corpus: Tensor, *, seed: int, step: int, rows: range, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of some global rows of a step, each of shape ``(len(rows), context)``.

    A row is chosen by (seed, step, row) and nothing else. So there is no data position to save, and a step sees
    the same global batch on any number of processes.
    """
    starts = [random.Random(f"{seed}/{step}/{row}").randrange(len(corpus) - context) for row in rows]
    windows = torch.stack([corpus[start : start + context + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Tensor, step: int, args: Any) -> float:
    """Do one optimizer step on this rank's rows and return the loss over the global batch. Every rank must call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = range(rank * args.batch // world_size, (rank + 1) * args.batch // world_size)
    inputs, targets = batch_of(corpus, seed=args.seed, step=step, rows=rows, context=args.context)
    # Each rank draws the noise of the whole batch and keeps its rows: then the random state is the same on all
    # ranks, one copy of it in the checkpoint is enough, and it fits any number of ranks.
    noise = torch.rand(args.batch, args.context)[rows.start : rows.stop] < NOISE
    logits = model(inputs.masked_fill(noise, 0))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world_size
    dist.all_reduce(mean)
    return mean.item()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What the next step depends on, but for the random number generators, which the manager looks after itself."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save(manager: CheckpointManager, state: dict[str, Any], loss: float, journal: "Journal") -> None:
    """Begin to write a checkpoint; when this returns the state is copied, and may change. Every rank must call.

    A save that fails is raised by the next call, or by the manager's `wait`.
    """
    step, started_at = state["step"], time.perf_counter()
    journal.write("saving", step=step)
    handle = manager.save(state, step=step, metrics={"loss": loss})
    journal.write("copied", step=step, seconds=handle.stage_time.total_seconds())

    def note(ended: CheckpointHandle) -> None:
        if ended.stats is not None:
            journal.write("saved", step=step, seconds=time.perf_counter() - started_at)

    handle.add_done_callback(note)


def memcpy_seconds(state: Any) -> float:
    """How long it takes to copy this rank's tensors into memory that is in use already: the least a copy can take."""
    if isinstance(state, dict):
        return sum(map(memcpy_seconds, state.values()))
    if not isinstance(state, Tensor):
        return 0.0
    source = state.to_local() if isinstance(state, DTensor) else state
    target = source.clone()
    started_at = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started_at


def resume(manager: CheckpointManager, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the newest checkpoint. Every rank must call.

    A save that was cut short was never committed, so it is none. Blocks are verified as they are read.

    Returns:
        The number of steps done in the state now loaded; 0, with nothing changed, where there is no checkpoint.
    """
    state = training_state(model, optimizer, 0)
    try:
        manager.load("latest", state)
    except CheckpointNotFoundError:
        return 0
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


class Journal:
    """What happened, one JSON object a line, from rank 0: printed, and appended to a file where one is named."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, event: str, **fields: Any) -> None:
        """Add one line. It is in the file when this returns, so a reader sees it even if we are killed next."""
        if dist.get_rank() != 0:
            return
        line = json.dumps({"event": event, **fields})
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def train(args: argparse.Namespace) -> None:
    """Build, resume if asked to, train, and save every few steps while training goes on. Every rank must call."""
    # The same sums in the same order: one thread, and no kernel that is free to reorder.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # All generators are part of a checkpoint; two runs are alike if all begin alike.
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    model = GPT(width=args.width, num_layers=args.layers, num_heads=args.width // 32, context=args.context)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = read_corpus()

    journal = Journal(args.journal)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    journal.write("started", pids=pids)
    manager = CheckpointManager(args.storage, keep_count=args.keep)
    first = 0
    if args.resume:
        first = resume(manager, model, optimizer)
        journal.write("resumed", step=first)
    state = None
    for step in range(first, args.steps):
        loss = train_step(model, optimizer, corpus, step, args)
        # As text a float may be rounded; its hexadecimal form is exact.
        journal.write("loss", step=step + 1, loss=round(loss, 4), exact=loss.hex())
        if (step + 1) % args.save_every == 0 and not args.no_save:
            state = training_state(model, optimizer, step + 1)
            save(manager, state, loss, journal)
    manager.wait()  # the last checkpoint is durable, on every rank
    if state is not None:
        journal.write("memcpy", seconds=memcpy_seconds(state))


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2 and checkpoint it.")
    parser.add_argument("--storage", required=True, help="where the step-N checkpoints go: a path or a URL")
    parser.add_argument("--resume", action="store_true", help="go on from the newest committed checkpoint")
    parser.add_argument("--no-save", action="store_true", help="leave the storage as it is")
    parser.add_argument("--journal", type=Path, help="append losses and saves to this file, as JSON lines")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=3, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=int, default=2, help="how many of the newest checkpoints stay")
    parser.add_argument("--width", type=int, default=256, help="size of an activation, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--context", type=int, default=128, help="bytes of text in a row")
    parser.add_argument("--batch", type=int, default=8, help="rows in the global batch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size == 0:
        parser.error("start me with torchrun, for instance: torchrun --standalone --nproc-per-node 2 " + __file__)
    if args.batch % world_size:
        # Ranks average over their own rows first, and FSDP weighs all ranks alike.
        parser.error(f"--batch {args.batch} does not divide among {world_size} processes")
    if args.width % 32 or args.save_every < 1:
        parser.error("--width must be a multiple of 32 and --save-every at least 1")
    return args


def main() -> None:
    """Join the other processes, train, leave."""
    args = parse_arguments()
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
