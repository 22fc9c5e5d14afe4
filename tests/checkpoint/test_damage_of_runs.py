"""`verify` finds every bit that flips and every file that is cut, wherever in the checkpoints of a run."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.commands import strata
from torch_strata import CorruptionError, StorageConfig, verify
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.run import open_run

TRIES = 1000
BY_COMMAND = 12


def state_of(step: int) -> dict[str, Any]:
    """Payloads that are aligned and such that are not, values, and a part that does not change."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "frozen": torch.arange(70_000.0),
            "weight": torch.randn(300, 500, generator=generator),
            "bias": torch.randn(7, generator=generator).bfloat16(),
            "flags": torch.tensor([True, False, True]),
        },
        "optimizer": {"m": torch.randn(300, 500, generator=generator), "v": torch.randn(33, generator=generator)},
        "loop": {"step": step, "text": f"{step} " * 3000, "none": torch.zeros(0)},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged") / "run"
    with CheckpointManager(root) as manager:
        manager.save(state_of(1), step=1)
        for step in (2, 3):
            manager.save(state_of(step), step=step, checkpoint_type="incremental", metrics={"loss": 1 / step})
        manager.save(state_of(3), step=3, checkpoint_type="model_only")
        manager.save(state_of(3), step=3, checkpoint_type="optimizer_only", metadata={"who": "me"})
        manager.save(os.urandom(9000), step=4)
    return root


def files(root: Path) -> dict[Path, list[str]]:
    """Every file that belongs to a checkpoint, and the folders of the checkpoints that it belongs to."""
    users: dict[str, list[str]] = {}
    for one in open_run(str(root), StorageConfig()).catalog():
        for folder in {one[0], *one[-1]}:
            users.setdefault(folder, []).append(one[0])
    found = sorted(path for path in root.glob("step-*/**/*") if path.is_file())
    data = {path: users[path.relative_to(root).parts[0]] for path in found if path.suffix == ".distcp"}
    return {path: data.get(path, [path.relative_to(root).parts[0]]) for path in found}


@contextmanager
def damaged(path: Path, dice: random.Random) -> Iterator[str]:
    """With one bit flipped, or an end lost; as it was afterwards."""
    sound = path.read_bytes()
    at = dice.randrange(len(sound))
    if dice.random() < 0.8:
        bit = dice.randrange(8)
        what, bad = f"bit {bit} of byte {at} of {len(sound)}", bytearray(sound)
        bad[at] ^= 1 << bit
    else:
        what, bad = f"cut to {at} of {len(sound)} bytes", bytearray(sound[:at])
    path.write_bytes(bad)
    try:
        yield f"{path.parent.name}/{path.name}: {what}"
    finally:
        path.write_bytes(sound)


def finds_damage(place: Path) -> bool:
    try:
        report = verify(place)
    except CorruptionError:
        return True
    return bool(report.problems)


@pytest.mark.timeout(300)
def test_every_flipped_bit_and_every_cut_is_found(run: Path) -> None:
    dice, missed = random.Random(5), []
    places = files(run)
    kinds = {path.suffix or path.name for path in places}
    assert len(places) > 15 and ".metadata" in kinds, kinds
    for number in range(TRIES):
        path = list(places)[number % len(places)]
        with damaged(path, dice) as what:
            missed += [what + f", seen from {folder}" for folder in places[path] if not finds_damage(run / folder)]
    assert not missed, f"{len(missed)} of {TRIES}:\n" + "\n".join(missed[:30])
    assert all(verify(run / folder).is_sound for folder in {folder for users in places.values() for folder in users})


def test_the_command_says_so_by_its_exit_status(run: Path) -> None:
    assert strata("verify", run).exit_code == 0
    dice, places = random.Random(7), files(run)
    for path in dice.sample(list(places), BY_COMMAND):
        with damaged(path, dice) as what:
            done = strata("verify", run)
            assert done.exit_code == 1, (what, done.stdout)
            assert "DAMAGED" in done.stdout, what
    assert strata("verify", run).exit_code == 0
