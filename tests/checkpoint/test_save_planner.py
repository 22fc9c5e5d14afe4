"""StrataSavePlanner: the same checkpoint as DCP's planner, a shorter way there."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.checkpoint.states import load, save
from torch_strata import LayoutMismatchError, StrataReader, StrataSavePlanner, StrataWriter
from torch_strata.checkpoint import planning
from torch_strata.checkpoint.planning import finished, local_plan, merge, packed_plan, structure_key


def state_of_everything():
    """Dtypes, views, values, nesting, and nothing at all."""
    base = torch.arange(24.0).view(4, 6)
    return {
        "dtypes": {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.complex64)},
        "views": {"t": base.t(), "part": base[1:3, 2:5], "expanded": torch.ones(1).expand(4), "last": base[:, :1]},
        "empty": [torch.empty(0), torch.empty(0, 3), torch.tensor(1.5)],
        "values": {"lr": 0.1, "name": "x", "betas": (0.9, 0.95), "none": None},
        "weight": torch.nn.Parameter(torch.ones(2, 2)),
    }


def local(planner, state):
    planner.set_up_planner(state, None, True)
    return planner.create_local_plan()


def sent(value):
    return pickle.loads(pickle.dumps(value))


def shard(fqn, offsets, lengths, size, dtype=torch.float32):
    properties = TensorProperties(dtype)
    data = TensorWriteData(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)), properties, torch.Size(size))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def plan_of(*items):
    return packed_plan(items, {item.index.fqn: (item.index.fqn,) for item in items})


def written(plans):
    """Names, regions and ranks of what is written, each once."""
    chunks = [
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for plan in plans
        for item in plan.items
    ]
    assert len(chunks) == len(set(chunks))
    return sorted(chunks)


@pytest.mark.parametrize("flatten", [True, False])
def test_one_rank_plans_what_dcp_plans(flatten):
    state = state_of_everything() if flatten else {"a": torch.ones(3), "b": 1}
    stock, ours = DefaultSavePlanner(flatten_state_dict=flatten), StrataSavePlanner(flatten_state_dict=flatten)
    stock_plan, our_plan = local(stock, state), sent(local(ours, state))
    assert list(our_plan.items) == stock_plan.items
    (stock_global,), stock_metadata = stock.create_global_plan([stock_plan])
    (our_global,), our_metadata = ours.create_global_plan([our_plan])
    assert list(ours.finish_plan(sent(our_global)).items) == stock_global.items
    assert sent(our_metadata) == stock_metadata
    assert our_metadata.planner_data == stock_metadata.planner_data


def test_metadata_pickles_as_stocks_and_short_once_stocks_index_is_written():
    planner = StrataSavePlanner()
    _, metadata = planner.create_global_plan([local(planner, state_of_everything())])
    as_stock = sent(metadata)
    assert type(as_stock) is Metadata and type(as_stock.state_dict_metadata) is dict
    metadata.as_stock = False
    assert sent(metadata) == as_stock


@pytest.mark.parametrize("writer", [StrataWriter, FileSystemWriter])
@pytest.mark.parametrize("reader", [StrataReader, FileSystemReader])
def test_any_writer_and_reader_round_trip(tmp_path, writer, reader):
    state = {
        "m": {"w": torch.randn(5, 4).t(), "b": torch.randn(3).bfloat16()},
        "o": [{"step": torch.tensor(2.0), "lr": 0.5}],
    }
    out = {
        "m": {"w": torch.zeros(5, 4).t(), "b": torch.zeros(3).bfloat16()},
        "o": [{"step": torch.tensor(0.0), "lr": 0.0}],
    }
    for _ in range(2):  # the second one is planned already
        dcp.save(state, storage_writer=writer(tmp_path), planner=StrataSavePlanner(), no_dist=True)
    dcp.load(out, storage_reader=reader(tmp_path), no_dist=True)
    assert torch.equal(out["m"]["w"], state["m"]["w"]) and torch.equal(out["m"]["b"], state["m"]["b"])
    assert out["o"][0]["step"] == 2.0 and out["o"][0]["lr"] == 0.5


def test_without_collectives_each_rank_plans_alone(tmp_path):
    writer = StrataWriter(tmp_path, world_size=1)
    state = {"a": torch.arange(4.0)}
    dcp.save(state, storage_writer=writer, planner=StrataSavePlanner(), no_dist=True, use_collectives=False)
    out = {"a": torch.zeros(4)}
    dcp.load(out, storage_reader=StrataReader(tmp_path), no_dist=True)
    assert torch.equal(out["a"], state["a"])


def test_replicas_share_the_bytes_and_large_tensors_are_cut_by_rows():
    state = {"large": torch.zeros(6000, 4096), **{f"small{i}": torch.zeros(100) for i in range(40)}}
    mine = [local_plan(state) for _ in range(4)]
    plans, metadata = merge([sent(plan) for plan in mine])
    final = [finished(sent(plan), own) for plan, own in zip(plans, mine, strict=True)]
    loads = [sum(item.tensor_data.chunk.sizes.numel() for item in plan.items) for plan in final]
    assert max(loads) < 1.3 * sum(loads) / 4
    assert sum(loads) == 6000 * 4096 + 4000
    chunks = metadata.state_dict_metadata["large"].chunks
    assert len(chunks) >= 4 and sum(chunk.sizes[0] for chunk in chunks) == 6000
    for plan in final:  # hints point at the chunk
        for item in plan.items:
            chunk = metadata.state_dict_metadata[item.index.fqn].chunks[item.index.index]
            assert chunk == item.tensor_data.chunk
    lowest, _ = merge([sent(plan) for plan in mine], to_lowest_rank=True)
    assert [len(plan.items) for plan in lowest] == [41, 0, 0, 0]


def test_a_piece_is_the_rows_that_the_plan_names():
    state = {"large": torch.arange(3000 * 2048.0).view(3000, 2048)}
    planners = [StrataSavePlanner() for _ in range(2)]
    mine = [local(planner, state) for planner in planners]
    plans, _ = planners[0].create_global_plan([sent(plan) for plan in mine])
    rows = 0
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(sent(plan)).items:
            first, count = item.index.offset[0], item.tensor_data.chunk.sizes[0]
            assert torch.equal(planner.resolve_data(item), state["large"][first : first + count])
            rows += count
    assert rows == 3000


def test_uneven_and_empty_shards_keep_what_is_theirs():
    plans = [plan_of(shard("w", (min(2 * r, 3), 0), (max(0, min(2, 3 - 2 * r)), 4), (3, 4))) for r in range(4)]
    final, metadata = merge(plans)
    assert written(final) == [("w", (0, 0), (2, 4)), ("w", (2, 0), (1, 4)), ("w", (3, 0), (0, 4))]
    assert len(metadata.state_dict_metadata["w"].chunks) == 3


def test_several_shards_of_one_tensor_on_a_rank_are_all_written():
    a = [shard("w", (r, 0), (1, 4), (4, 4)) for r in (0, 2)]
    b = [shard("w", (r, 0), (1, 4), (4, 4)) for r in (1, 3)]
    assert written(merge([plan_of(*a), plan_of(*b)])[0]) == [("w", (r, 0), (1, 4)) for r in range(4)]


BAD = {
    "overlap": (
        [shard("w", (0, 0), (3, 4), (4, 4))],
        [shard("w", (2, 0), (2, 4), (4, 4))],
        ["[0:3, 0:4]", "[2:4, 0:4]"],
    ),
    "overlap of a grid": (
        [shard("w", (0, 0), (2, 2), (4, 4)), shard("w", (0, 2), (2, 2), (4, 4)), shard("w", (2, 0), (2, 2), (4, 4))],
        [shard("w", (1, 1), (2, 2), (4, 4))],
        ["overlap", "rank 1"],
    ),
    "one place, two shapes": ([shard("w", (0,), (4,), (4,))], [shard("w", (0,), (2,), (4,))], ["[0:4]", "[0:2]"]),
    "outside": ([shard("w", (0,), (2,), (4,))], [shard("w", (2,), (3,), (4,))], ["outside", "[2:5]"]),
    "hole": ([shard("w", (0,), (2,), (4,))], [shard("w", (3,), (1,), (4,))], ["3 of 4 elements"]),
    "dtypes": ([shard("w", (0,), (2,), (4,))], [shard("w", (2,), (2,), (4,), torch.float64)], ["float32", "float64"]),
    "sizes": ([shard("w", (0,), (2,), (4,))], [shard("w", (2,), (2,), (5,))], ["(4,)", "(5,)"]),
    "a value": (
        [shard("w", (0,), (4,), (4,))],
        [WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)],
        ["pickled value"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_plans_that_do_not_fit_are_refused_with_names_ranks_and_regions(case):
    first, second, words = BAD[case]
    with pytest.raises(LayoutMismatchError) as caught:
        merge([plan_of(*first), plan_of(*second)])
    message = str(caught.value)
    assert "'w'" in message and ("rank" in message)
    for word in words:
        assert word in message


def test_a_grid_that_tiles_is_accepted():
    grid = [shard("w", (2 * i, 3 * j), (2, 3), (4, 6)) for i in range(2) for j in range(2)]
    assert len(written(merge([plan_of(item) for item in grid])[0])) == 4


BASE = {"a": torch.zeros(4, 6), "n": 1}
CHANGES = {
    "dtype": {"a": torch.zeros(4, 6, dtype=torch.int32), "n": 1},
    "shape": {"a": torch.zeros(6, 4), "n": 1},
    "stride": {"a": torch.zeros(6, 4).t(), "n": 1},
    "key": {"b": torch.zeros(4, 6), "n": 1},
    "kind": {"a": torch.zeros(4, 6), "n": torch.tensor(1)},
    "more": {"a": torch.zeros(4, 6), "n": 1, "m": 2},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_changes_with_the_structure(change):
    assert structure_key(CHANGES[change]) != structure_key(BASE)


def test_the_key_does_not_change_with_values():
    assert structure_key({"a": torch.ones(4, 6), "n": 2}) == structure_key(BASE)


def test_a_known_structure_is_not_planned_again_and_a_change_on_one_rank_is(monkeypatch):
    calls = []
    merging = planning.merge_columns
    monkeypatch.setattr(planning, "merge_columns", lambda *a, **k: calls.append(1) or merging(*a, **k))
    planning._merged.clear()

    def save(*states):
        merge([sent(local_plan(state)) for state in states])
        return len(calls)

    assert [save(BASE, BASE), save(BASE, BASE), save(BASE, BASE, BASE)] == [1, 1, 2]
    other = {**BASE, "only here": torch.zeros(3)}
    assert [save(BASE, other), save(other, BASE), save(BASE, other)] == [3, 4, 4]


def test_a_plan_travels_in_a_tenth_of_the_bytes():
    state = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(4, 8) for i in range(1000)}
    stock, ours = local(DefaultSavePlanner(), state), local(StrataSavePlanner(), state)
    assert len(pickle.dumps(ours)) < len(pickle.dumps(stock)) / 10


def test_the_writer_makes_plans_of_any_planner_short(tmp_path):
    state = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(4, 8) for i in range(1000)}
    plan = local(DefaultSavePlanner(), state)
    writer = StrataWriter(tmp_path)
    writer.set_up_storage_writer(True)
    compacted = writer.prepare_local_plan(plan)
    assert len(pickle.dumps(compacted.items)) < len(pickle.dumps(plan.items)) / 10
    assert sent(compacted).items == plan.items and type(sent(compacted).items) is list


def test_items_of_a_foreign_class_are_left_to_dcp():
    class Marked(WriteItem):
        pass

    base = shard("w", (0,), (4,), (4,))
    planner = StrataSavePlanner()
    packed = plan_of(base)
    foreign = SavePlan([Marked(base.index, base.type, None, base.tensor_data)], planner_data=packed.planner_data)
    plans, metadata = planner.create_global_plan([foreign])
    assert type(plans[0].items[0]) is WriteItem or isinstance(plans[0].items[0], Marked)
    assert list(metadata.state_dict_metadata) == ["w"] and metadata.planner_data == {"w": ("w",)}


@pytest.mark.parametrize("state", [{"a": "text", "b": {"c": 3}}, {"s": torch.tensor(1.0)}, {}])
def test_a_state_of_values_scalars_or_nothing_is_planned(tmp_path, state):
    save(state, tmp_path / "c", planner=StrataSavePlanner())
    out = {"a": "", "b": {"c": 0}} if "a" in state else {key: torch.zeros(()) for key in state}
    load(out, tmp_path / "c")
    assert out == state
