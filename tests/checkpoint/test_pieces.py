"""The parts that decide without reading anything: tiling, geometry, names, metadata, settings, errors."""

import itertools
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import torch_strata
from torch_strata import ConfigError, CorruptionError, StorageConfig, StrataError, StrataReader, StrataWriter, errors
from torch_strata.checkpoint._planner_data import decode_planner_data, encode_planner_data
from torch_strata.checkpoint._tensors import contiguous_strides, is_dense, overlaps_itself
from torch_strata.checkpoint._tiling import tiling_fault

ERRORS = [getattr(errors, name) for name in errors.__all__]


def covers_by_counting(size, boxes) -> bool:
    counts = torch.zeros(size, dtype=torch.int64)
    for offset, extents in boxes:
        counts[tuple(slice(o, o + e) for o, e in zip(offset, extents, strict=True))] += 1
    return bool((counts == 1).all())


def test_tiling_agrees_with_counting_every_element():
    size = (3, 4)
    boxes = [
        ((r, c), (h, w))
        for r, c, h, w in itertools.product(range(3), range(4), range(1, 4), range(1, 5))
        if r + h <= 3 and c + w <= 4
    ]
    checked = 0
    for chosen in itertools.chain(
        itertools.combinations(boxes, 1),
        itertools.combinations(boxes, 2),
        itertools.islice(itertools.combinations(boxes, 3), 0, None, 7),
    ):
        fault = tiling_fault(size, [o for o, _ in chosen], [e for _, e in chosen])
        assert (fault is None) == covers_by_counting(size, chosen), chosen
        checked += 1
    assert checked > 3000


@pytest.mark.parametrize(
    ("size", "chunks", "sound"),
    [
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((), [], False),
        ((0,), [((0,), (0,))], True),
        ((0,), [], False),
        ((4,), [((0,), (4,)), ((4,), (0,))], True),
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        ((4,), [((0, 0), (4, 1))], False),
        ((-1,), [((0,), (0,))], False),
        ((1 << 62, 2), [((0, 0), (1 << 62, 1)), ((0, 1), (1 << 62, 1))], True),
        ((2,) * 20, [((0,) * 20, (1,) * 20)], False),
    ],
)
def test_tiling_of_edge_cases(size, chunks, sound):
    assert (tiling_fault(size, [o for o, _ in chunks], [e for _, e in chunks]) is None) is sound


def test_tiling_of_many_chunks_takes_linear_time():
    offsets = [(row, column) for row in range(300) for column in range(300)]
    assert tiling_fault((300, 300), offsets, [(1, 1)] * len(offsets)) is None
    assert tiling_fault((300, 300), offsets[1:], [(1, 1)] * (len(offsets) - 1)) is not None


def test_a_part_of_one_rank_needs_only_bounds():
    assert tiling_fault((4,), [(2,)], [(2,)], whole=False) is None
    assert tiling_fault((4,), [(2,)], [(3,)], whole=False) is not None


VIEWS = {
    "contiguous": (torch.zeros(2, 3), True, False),
    "transposed": (torch.zeros(2, 3).t(), True, False),
    "channels_last": (torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last), True, False),
    "column": (torch.zeros(4, 4)[:, 1], False, False),
    "stepped": (torch.zeros(10)[::2], False, False),
    "expanded": (torch.zeros(3, 1).expand(3, 4), False, True),
    "expanded_one": (torch.zeros(1).expand(1), True, False),
    "overlapping": (torch.zeros(9).as_strided((3, 3), (1, 1)), False, True),
    "scalar": (torch.zeros(()), True, False),
    "odd_stride_of_one": (torch.zeros(8).as_strided((1, 3), (99, 1)), True, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_geometry_of_views(name):
    view, dense, overlapping = VIEWS[name]
    shape, strides = tuple(view.shape), tuple(view.stride())
    assert is_dense(shape, strides) is dense
    assert overlaps_itself(shape, strides) is overlapping
    # torch says 0: no overlap, 1: overlap, 2: it does not know.
    assert torch._debug_has_internal_overlap(view) in ((1, 2) if overlapping else (0, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (1, 1), (5, 1, 2)])
def test_contiguous_strides_are_those_of_torch(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"b.0": ("b", 0), "a": ("a",), "\ud800": ("\ud800",), "": ("",)},
        [1, "x"],
        {"k": ("a", True)},
        {"k": 1.5},
    ],
)
def test_planner_data_comes_back_as_it_was_in_order(value):
    found = decode_planner_data(encode_planner_data(value), "here")
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("data", [b"J{", b"J[1]", b"Q", b"P", b"Pcos\nsystem\n."])
def test_planner_data_that_is_damaged_or_hostile_is_refused(data):
    with pytest.raises(CorruptionError):
        decode_planner_data(data, "here")


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_has_one_message_and_survives_pickling(cls):
    error = cls("what failed, on which object")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and str(copy) == str(error) == "what failed, on which object"
    assert isinstance(error, StrataError)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.StorageError, OSError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.StoragePermissionError, PermissionError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, FileExistsError),
        (errors.LayoutMismatchError, ValueError),
        (errors.CoordinatorTimeoutError, TimeoutError),
        (errors.ForkedProcessError, RuntimeError),
    ],
)
def test_an_error_is_the_builtin_it_names(cls, builtin):
    assert issubclass(cls, builtin)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("part_bytes", 1),
        ("part_bytes", 6 << 30),
        ("max_in_flight_bytes", 1),
        ("max_concurrency", 0),
        ("max_concurrency", True),
        ("max_tries", 0),
        ("fsync", 1),
        ("direct_io", "yes"),
        ("deadline", timedelta(0)),
        ("deadline", 30),
        ("storage_options", {"region": 1}),
        ("storage_options", ["region"]),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        StorageConfig(**{field: value})


def test_settings_come_from_the_environment_only_when_asked_and_arguments_win():
    env = {"STRATA_MAX_TRIES": "3", "STRATA_FSYNC": "off", "STRATA_DEADLINE": "1.5", "STRATA_MAX_CONCURRENCY": "2"}
    config = StorageConfig.from_env(env, max_concurrency=5)
    assert (config.max_tries, config.fsync, config.deadline, config.max_concurrency) == (
        3,
        False,
        timedelta(seconds=1.5),
        5,
    )
    assert StorageConfig().max_tries != 3
    with pytest.raises(ConfigError, match="STRATA_MAX_TRIES"):
        StorageConfig.from_env({"STRATA_MAX_TRIES": "many"})


def test_settings_are_frozen_can_be_pickled_and_do_not_show_secrets():
    config = StorageConfig(storage_options={"secret": "hunter2"})
    assert pickle.loads(pickle.dumps(config)) == config and hash(pickle.loads(pickle.dumps(config))) == hash(config)
    assert "hunter2" not in repr(config)
    with pytest.raises(TypeError):
        config.storage_options["secret"] = "x"  # type: ignore[index]


def test_writer_and_reader_keep_what_dcp_asks_of_them(tmp_path):
    for storage in (StrataWriter(tmp_path), StrataReader(tmp_path)):
        assert storage
        assert storage.checkpoint_id == tmp_path
        storage.reset(tmp_path / "other")
        assert storage.checkpoint_id == tmp_path / "other"
        storage.reset()
        assert storage.checkpoint_id == tmp_path / "other"
        assert storage.stats is None
    for cls in (StrataWriter, StrataReader):
        assert cls.validate_checkpoint_id(tmp_path / "new" / "deep") and cls.validate_checkpoint_id(
            str(tmp_path / "new")
        )
        assert cls.validate_checkpoint_id("s3://bucket/run")
        assert not cls.validate_checkpoint_id("ftp://host/run") and not cls.validate_checkpoint_id("")
    with pytest.raises(ConfigError):
        StrataWriter("ftp://host/run")
    with pytest.raises(ConfigError, match="verify"):
        StrataReader(tmp_path, verify="later")  # type: ignore[arg-type]


def test_the_writer_names_a_new_save_each_time_it_is_asked_after_one(tmp_path):
    writer = StrataWriter(tmp_path)
    first = writer.storage_meta().save_id
    assert writer.storage_meta().save_id == first
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    assert writer.storage_meta().save_id == first
    writer.reset()
    assert writer.storage_meta().save_id != first


def test_importing_the_package_or_the_command_imports_no_torch():
    code = "import sys, torch_strata, torch_strata.cli, torch_strata.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(torch_strata.__file__).parents[1])


def test_every_exported_name_exists():
    for name in torch_strata.__all__:
        assert getattr(torch_strata, name) is not None
    with pytest.raises(AttributeError):
        _ = torch_strata.nothing


def test_metadata_of_an_empty_state_is_metadata(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({}, storage_writer=StrataWriter(tmp_path / "c"), no_dist=True)
    dcp.load({}, storage_reader=StrataReader(tmp_path / "c"), no_dist=True)
    assert isinstance(StrataReader(tmp_path / "c").read_metadata(), Metadata)
