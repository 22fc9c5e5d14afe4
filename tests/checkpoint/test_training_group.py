"""Who saves in the background on the group of training is told so, once, and nobody else is."""

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.checkpoint.ranks import run_ranks
from torch_strata import StrataWriter, async_save
from torch_strata.checkpoint.staging import forget_process


class Heard(logging.Handler):
    """What torch_strata logs as warnings about groups."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "process group" in record.getMessage():
            self.lines.append(record.getMessage())


def save_as(rank: int, place: str, how: str) -> list[str]:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # for the group of processes
    heard = Heard()
    logging.getLogger("torch_strata").addHandler(heard)
    options: dict[str, dict[str, Any]] = {
        "no group": {},
        "the default group": {"process_group": dist.group.WORLD},
        "a group of its own": {"process_group": dist.new_group(backend="gloo")},
        "alone": {"no_dist": True},
        "a process": {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
    }
    state = {"w": torch.ones(100)}
    for i in range(2):
        if how == "ours":
            async_save(state, checkpoint_id=f"{place}-{i}").result()
            continue
        where = f"{place}-{i}-{rank}" if how == "alone" else f"{place}-{i}"
        dcp.async_save(state, storage_writer=StrataWriter(where), **options[how]).result()
    forget_process()
    return heard.lines


@pytest.mark.parametrize("how", ["no group", "the default group"])
def test_collectives_in_the_background_on_training_s_group_are_warned_of_once(tmp_path, how):
    for lines in run_ranks(tmp_path, 2, save_as, str(tmp_path / "c"), how):
        assert len(lines) == 1
        assert "process_group=dist.new_group(backend='gloo')" in lines[0] and "torch_strata.async_save" in lines[0]


@pytest.mark.parametrize("how", ["a group of its own", "alone", "a process", "ours"])
def test_a_save_that_training_does_not_meet_is_not_warned_of(tmp_path, how):
    assert run_ranks(tmp_path, 2, save_as, str(tmp_path / "c"), how) == [[], []]


def test_a_single_rank_is_not_warned(tmp_path):
    assert run_ranks(tmp_path, 1, save_as, str(tmp_path / "c"), "no group") == [[]]
