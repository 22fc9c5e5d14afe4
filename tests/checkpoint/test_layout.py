"""A load that does not fit says so before anything changes; a load of less than everything works."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.checkpoint.states import failure_of, load, save
from torch_strata import CheckpointError, LayoutMismatchError, StrataLoadPlanner, StrataReader, StrataWriter


@pytest.fixture
def place(tmp_path):
    save({"a": torch.ones(4), "w": torch.arange(6.0).reshape(2, 3), "n": 5, "s": {"t": torch.ones(2)}}, tmp_path / "c")
    return tmp_path / "c"


PLANNERS = [DefaultLoadPlanner, StrataLoadPlanner]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.float16])
def test_another_dtype_is_refused_before_anything_changes(place, planner, dtype):
    out = {"a": torch.zeros(4), "w": torch.zeros(2, 3, dtype=dtype)}
    error = failure_of(lambda: load(out, place, planner=planner()))
    assert isinstance(error, LayoutMismatchError) and isinstance(error, ValueError)
    assert "'w'" in str(error) and "float32" in str(error) and str(dtype) in str(error)
    assert out["a"].eq(0).all() and out["w"].eq(0).all()


def test_another_dtype_is_converted_when_asked_for(place):
    out = {"a": torch.zeros(4, dtype=torch.float64), "w": torch.zeros(3, 2, dtype=torch.bfloat16).t()}
    load(out, place, allow_dtype_cast=True, planner=StrataLoadPlanner(allow_dtype_cast=True))
    assert out["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and out["a"].tolist() == [1] * 4


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (2, 2), ()])
def test_another_shape_is_refused(place, planner, shape):
    out = {"a": torch.zeros(4), "w": torch.zeros(shape)}
    error = failure_of(lambda: load(out, place, planner=planner()))
    assert isinstance(error, ValueError) and "w" in str(error)
    assert out["a"].eq(0).all()


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_value_does_not_replace_a_tensor_unseen(place, planner):
    out = {"a": torch.zeros(4), "n": torch.zeros(1)}
    error = failure_of(lambda: load(out, place, planner=planner()))
    assert isinstance(error, LayoutMismatchError) and "'n'" in str(error)
    assert out["a"].eq(0).all() and isinstance(out["n"], torch.Tensor)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_tensor_does_not_load_into_a_value(place, planner):
    error = failure_of(lambda: load({"w": 3}, place, planner=planner()))
    assert isinstance(error, ValueError) and "w" in str(error)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_missing_key_is_named(place, planner):
    error = failure_of(lambda: load({"a": torch.zeros(4), "gone": torch.zeros(1)}, place, planner=planner()))
    assert "gone" in str(error)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_partial_load_leaves_what_is_not_stored(place, planner):
    out = {"a": torch.zeros(4), "gone": torch.full((1,), 9.0)}
    load(out, place, planner=planner(allow_partial_load=True))
    assert out["a"].tolist() == [1] * 4 and out["gone"].item() == 9


def test_a_subset_of_the_state_reads_only_its_bytes(tmp_path):
    save({"small": torch.ones(4), "big": torch.zeros(4 << 20)}, tmp_path / "c")
    reader = load({"small": torch.zeros(4)}, tmp_path / "c")
    assert reader.stats.bytes_read < 1 << 20


@pytest.mark.parametrize("keys", [None, "w", {"a", "n"}, "s", {"s.t"}])
def test_keys_load_without_a_template(place, keys):
    out = _load_state_dict_from_keys(keys, storage_reader=StrataReader(place))
    expected = {"a": [1] * 4, "w": [[0, 1, 2], [3, 4, 5]], "n": 5, "s": {"t": [1, 1]}}
    wanted = (
        set(expected) if keys is None else {key.split(".")[0] for key in ([keys] if isinstance(keys, str) else keys)}
    )
    plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in out.items() if k != "s"}
    if "s" in out:
        plain["s"] = {"t": out["s"]["t"].tolist()}
    assert plain == {key: expected[key] for key in wanted}


@pytest.fixture
def empty_plan_cache():
    caches = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    yield
    for name in caches:
        getattr(SavePlanner, name).clear()


def test_cached_plans_still_write_new_objects_every_time(tmp_path, empty_plan_cache):
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save({"w": torch.full((1000,), value), "n": value}, tmp_path / "c", planner=planner)
        out = {"w": torch.zeros(1000), "n": 0.0}
        load(out, tmp_path / "c")
        assert out["n"] == value and out["w"].eq(value).all()
    names = {path.name for path in (tmp_path / "c").glob("*.distcp")}
    assert len(names) == 1


def test_a_cached_plan_of_another_dtype_is_refused_and_the_old_state_stays(tmp_path, empty_plan_cache):
    save({"w": torch.ones(4)}, tmp_path / "c", planner=DefaultSavePlanner(enable_plan_caching=True))
    planner = DefaultSavePlanner(enable_plan_caching=True)
    error = failure_of(lambda: save({"w": torch.zeros(4, dtype=torch.float64)}, tmp_path / "c", planner=planner))
    assert isinstance(error, CheckpointError) and "enable_plan_caching" in str(error)
    out = {"w": torch.zeros(4)}
    load(out, tmp_path / "c")
    assert out["w"].tolist() == [1] * 4


def test_saves_with_one_writer_never_use_a_name_twice(tmp_path):
    writer = StrataWriter(tmp_path / "c")
    seen: set[str] = set()
    ids = set()
    for value in (1.0, 2.0, 3.0):
        dcp.save({"w": torch.full((10,), value)}, storage_writer=writer, no_dist=True)
        now = {path.name for path in (tmp_path / "c").glob("*.distcp")}
        assert not now & seen
        seen |= now
        ids.add(writer.stats.save_id)
    assert len(ids) == 3
