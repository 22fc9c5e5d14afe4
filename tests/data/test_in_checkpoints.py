"""A pipe's state rides in a checkpoint: training that was killed goes on with the next sample."""

import itertools
from pathlib import Path
from typing import Any

from tests.checkpoint.ranks import run_ranks
from tests.data.shards import NUM_SAMPLES, numbers, write_tars
from torch_strata import CheckpointManager, Shuffle, StrataShardPipe

SHUFFLE = Shuffle(seed=2, block=4, buffer=16)


def train(rank: int, folder: str, run: str, num_steps: int) -> list[int]:
    """Resumes if it can, makes so many steps and saves every second; the samples of those that were saved."""
    pipe = StrataShardPipe(f"{folder}/*.tar", shuffle=SHUFFLE, batch_size=3)
    step, kept, since = 0, [], []
    with CheckpointManager(run, keep_count=2) as manager:
        if manager.latest() is not None:
            found = manager.load("latest")
            step = found["step"]
            pipe.load_state_dict(found["data"])
        for batch in itertools.islice(pipe, num_steps):
            step += 1
            since += numbers(batch)
            if step % 2 == 0:
                manager.save({"step": step, "data": pipe.state_dict(after=batch)}, step=step).result()
                kept, since = kept + since, []
    return kept


def test_what_comes_after_a_resume_on_other_ranks_is_what_was_not_seen(tmp_path: Path) -> None:
    folder, run = str(write_tars(tmp_path / "shards")), str(tmp_path / "run")
    seen: list[int] = []
    # The last step of the first two is made, and lost: its state was not saved.
    for world_size, num_steps in ((2, 5), (1, 9), (3, 4)):
        ranks: list[Any] = run_ranks(tmp_path, world_size, train, folder, run, num_steps)
        seen += itertools.chain(*ranks)
    assert len(seen) == 2 * 4 * 3 + 8 * 3 + 3 * 4 * 3 and len(set(seen)) == len(seen) < NUM_SAMPLES
