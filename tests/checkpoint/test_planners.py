"""Load planners of the caller: where they say a tensor goes, it goes, though DCP's own are not asked so much."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.checkpoint.states import save
from torch_strata import StrataReader


def load_with(planner, state, place) -> None:
    dcp.load(state, storage_reader=StrataReader(place), planner=planner, no_dist=True)


def test_a_planner_that_looks_tensors_up_itself_is_asked(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "c")
    elsewhere = torch.zeros(6)

    class Elsewhere(DefaultLoadPlanner):
        def lookup_tensor(self, index):
            return elsewhere

    state = {"w": torch.zeros(6)}
    load_with(Elsewhere(), state, tmp_path / "c")
    assert (elsewhere.tolist(), state["w"].tolist()) == ([0, 1, 2, 3, 4, 5], [0] * 6)


def test_a_method_replaced_on_one_planner_is_asked(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "c")
    elsewhere = torch.zeros(6)
    planner = DefaultLoadPlanner()
    planner.resolve_tensor = lambda read_item: elsewhere
    state = {"w": torch.zeros(6)}
    load_with(planner, state, tmp_path / "c")
    assert (elsewhere.tolist(), state["w"].tolist()) == ([0, 1, 2, 3, 4, 5], [0] * 6)


def test_a_planner_that_transforms_what_it_found_is_asked(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "c")

    class EverySecond(DefaultLoadPlanner):
        def create_local_plan(self):
            target, self.state_dict["w"] = self.state_dict["w"], torch.zeros(6)
            plan = super().create_local_plan()
            self.state_dict["w"] = target
            return plan

        def transform_tensor(self, read_item, tensor):
            return tensor[1::2]

    state = {"w": torch.zeros(12)}
    load_with(EverySecond(), state, tmp_path / "c")
    assert state["w"].tolist() == [0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5]


def test_a_plain_tensor_that_says_where_its_shards_lie_gets_them_there(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "c")
    # torch's CheckpointableTensor: elements 0 and 1 of the tensor stand at 2, elements 4 and 5 at 0.
    local = torch.full((4,), -1.0)
    local.global_shape, local.global_offsets = (6,), ((0,), (4,))
    local.local_offsets, local.local_sizes = ((2,), (0,)), ((2,), (2,))
    load_with(None, {"w": local}, tmp_path / "c")
    assert local.tolist() == [4, 5, 0, 1]
