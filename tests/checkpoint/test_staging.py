"""The staged state of an asynchronous save: right whatever training does next, and never in memory of another save."""

import logging
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

import torch_strata
from tests.checkpoint.states import DTYPES, SHAPES, AnyDtypePlanner, load, random_bits, same_bits
from torch_strata import CheckpointError, ConfigError, StorageConfig, StrataWriter, verify
from torch_strata.checkpoint import _arena
from torch_strata.checkpoint.staging import arena_stats, snapshot

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _new_arena(monkeypatch):
    monkeypatch.setattr(_arena, "_arenas", {})


class Gated(DefaultSavePlanner):
    """Holds a save until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create_local_plan(self):
        assert self.gate.wait(60)
        return super().create_local_plan()


def async_save(state: dict[str, Any], place: Any, *, planner: Any = None, **options: Any) -> "Future[Any]":
    return dcp.async_save(state, storage_writer=StrataWriter(place, **options), planner=planner, no_dist=True)


def full(value: float, elements: int = MIB) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), value)}


def found(place: Any, elements: int = MIB) -> list[float]:
    out = full(-1.0, elements)
    load(out, place)
    return out["w"].unique().tolist()


def of_every_layout() -> dict[str, torch.Tensor]:
    base = random_bits(torch.float32, (600, 400), 7)
    turned = random_bits(torch.complex64, (300, 500), 8)
    return {
        "whole": base,
        "transposed": base.t(),
        "columns": base[:, 100:300],
        "rows": base[100:500],
        "expanded": base[:1].expand(50, 400),
        "channels last": base.view(10, 60, 20, 20).to(memory_format=torch.channels_last),
        "conjugate": turned.conj(),
        "negative": turned.conj().imag,
        "parameter": torch.nn.Parameter(base[3:5].clone()),
    }


def test_the_copy_has_every_bit_of_the_state_at_the_call_and_none_of_what_came_later():
    state = of_every_layout()
    for name in DTYPES:
        state |= {f"{name}/{i}": random_bits(getattr(torch, name), shape, i) for i, shape in enumerate(SHAPES)}
    expected = {key: value.detach().resolve_conj().resolve_neg().clone() for key, value in state.items()}
    staged = snapshot(state)
    for value in state.values():
        value.untyped_storage().fill_(0)
    assert [key for key, value in expected.items() if not same_bits(staged[key], value)] == []


def test_values_are_those_of_the_call_and_containers_are_of_their_kind():
    state: dict[str, Any] = {"list": [1, [2]], "tuple": (torch.ones(2), {"a": 3}), "none": None}
    staged = snapshot(state)
    state["list"][1].append(3)
    state["tuple"][0].zero_()
    state["tuple"][1]["a"] = 4
    assert staged["list"] == [1, [2]] and staged["none"] is None
    assert staged["tuple"][0].tolist() == [1, 1] and staged["tuple"][1] == {"a": 3}


def test_strides_stay_and_a_view_takes_no_more_memory_than_it_shows():
    big = torch.zeros(64 * MIB)
    weights = torch.randn(300, 500)
    staged = snapshot({"view": big[: MIB // 4], "t": weights.t()})
    assert arena_stats().slot_bytes <= 4 * MIB
    assert staged["t"].stride() == weights.t().stride()
    assert staged["view"].untyped_storage().nbytes() == MIB


def test_tied_tensors_are_copied_once_and_stay_tied():
    weights = torch.randn(MIB)
    staged = snapshot({"in": weights, "out": weights.view(1024, 1024).view(-1), "nested": {"again": weights}})
    assert staged["in"] is staged["nested"]["again"]
    assert staged["in"].data_ptr() == staged["out"].data_ptr()
    assert arena_stats().slot_bytes < 8 * MIB


def test_a_shard_keeps_what_dcp_knows_it_by():
    shard = torch.randn(4, 5)
    shard.global_shape, shard.global_offsets = torch.Size((8, 5)), (4, 0)
    staged = snapshot({"s": shard})["s"]
    assert (staged.global_shape, staged.global_offsets) == (torch.Size((8, 5)), (4, 0))


def test_large_tensors_begin_where_direct_io_can():
    staged = snapshot({f"t{i}": torch.zeros(elements) for i, elements in enumerate([3, MIB, 17, 128 * 1024, 5, MIB])})
    assert all(t.data_ptr() % (4096 if t.nbytes >= 512 * 1024 else 64) == 0 for t in staged.values())


def test_memory_is_lent_again_once_nothing_refers_to_it():
    addresses = set()
    for value in range(20):
        staged = snapshot(full(float(value)))
        addresses.add(staged["w"].data_ptr())
        del staged
    assert len(addresses) == 1
    assert (arena_stats().slots, arena_stats().busy_slots) == (1, 0)


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w[5:7], lambda w: w.detach(), lambda w: w.numpy()])
def test_memory_that_somebody_still_refers_to_is_not_lent(keep):
    kept = keep(snapshot(full(1.0))["w"])
    other = snapshot(full(2.0))
    assert float(kept.min()) == float(kept.max()) == 1.0
    assert other["w"].unique().tolist() == [2.0]
    assert arena_stats().busy_slots == 2


def test_a_slot_that_has_become_too_small_is_replaced():
    for elements in (MIB, 4 * MIB, 2 * MIB):
        snapshot(full(1.0, elements))
    assert arena_stats().slots == 1
    assert arena_stats().slot_bytes < 24 * MIB


def test_two_saves_in_flight_both_write_the_state_of_their_call(tmp_path):
    planners, futures, state = [Gated(), Gated()], [], full(0.0)
    for i, planner in enumerate(planners):
        state["w"].fill_(float(i + 1))
        futures.append(torch_strata.async_save(state, checkpoint_id=tmp_path / str(i), planner=planner))
    state["w"].fill_(9.0)
    for planner in reversed(planners):
        planner.gate.set()
    for future in futures:
        future.result(timedelta(seconds=60))
    assert [found(tmp_path / str(i)) for i in range(2)] == [[1.0], [2.0]]


def test_a_second_save_of_dcp_waits_for_the_first(tmp_path, caplog):
    writer, state = StrataWriter(tmp_path / "c"), full(0.0)
    first = Gated()
    saved = dcp.async_save(state, storage_writer=writer, planner=first, no_dist=True)
    threading.Timer(0.3, first.gate.set).start()
    with caplog.at_level(logging.WARNING):
        futures = [dcp.async_save(full(float(i)), storage_writer=writer, no_dist=True) for i in range(1, 4)]
    assert "waits for the save before it" in caplog.text
    for future in [saved, *futures]:
        future.result(60)
    assert (found(tmp_path / "c"), verify(tmp_path / "c").problems) == ([3.0], ())


def test_a_save_of_dcp_that_waits_for_ever_for_the_one_before_fails(tmp_path):
    config = StorageConfig(deadline=timedelta(seconds=0.2))
    first = Gated()
    saved = async_save(full(1.0), tmp_path / "c", planner=first)
    with pytest.raises(CheckpointError, match=r"waited 0\.2 s for the save before it"):
        StrataWriter(tmp_path / "c", config=config).stage(full(2.0))
    first.gate.set()
    saved.result(60)
    assert found(tmp_path / "c") == [1.0]


def test_a_save_beyond_the_budget_waits_for_one_before_it_and_says_so(tmp_path, caplog):
    config = StorageConfig(max_staging_bytes=6 * MIB)
    first = Gated()
    writers = [StrataWriter(tmp_path / name, config=config) for name in "12"]
    saved = torch_strata.async_save(full(1.0), storage_writer=writers[0], planner=first)
    threading.Timer(0.3, first.gate.set).start()
    with caplog.at_level(logging.WARNING):
        torch_strata.async_save(full(2.0), storage_writer=writers[1]).result(timedelta(seconds=60))
    assert saved.done()
    assert [found(tmp_path / "1"), found(tmp_path / "2")] == [[1.0], [2.0]]
    assert arena_stats().waits == 1
    (said,) = [record.getMessage() for record in caplog.records if "waits for memory" in record.getMessage()]
    assert str(tmp_path / "1") in said and str(tmp_path / "2") in said


def test_a_save_that_waits_longer_than_the_deadline_fails(tmp_path):
    config = StorageConfig(max_staging_bytes=6 * MIB, deadline=timedelta(seconds=0.2))
    kept = snapshot(full(1.0), user="the save before")
    with pytest.raises(CheckpointError, match=r"the save to .*c .*waited 0\.2 s for .*the save before"):
        StrataWriter(tmp_path / "c", config=config).stage(full(2.0))
    assert kept["w"].unique().tolist() == [1.0]


def test_without_a_budget_two_states_of_any_size_may_be_staged(tmp_path):
    kept = [snapshot(full(1.0, 4 * MIB)), snapshot(full(2.0, 1000))]
    with pytest.raises(CheckpointError, match="waited"):
        snapshot(full(3.0), config=StorageConfig(deadline=timedelta(seconds=0.05)))
    assert len(kept) == 2


def test_a_state_larger_than_the_budget_is_refused_by_name(tmp_path):
    config = StorageConfig(max_staging_bytes=MIB)
    with pytest.raises(CheckpointError, match=r"4194304 bytes.*max_staging_bytes=1048576"):
        StrataWriter(tmp_path / "c", config=config).stage(full(1.0))


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(value):
    with pytest.raises(ConfigError, match="max_staging_bytes"):
        StorageConfig(max_staging_bytes=value)


def test_memory_is_free_again_when_a_save_reports_its_end(tmp_path):
    seen: list[int] = []
    planner = Gated()
    future = async_save(full(1.0), tmp_path / "c", planner=planner)
    future.add_done_callback(lambda _: seen.append(arena_stats().busy_slots))
    planner.gate.set()
    future.result(60)
    assert until(lambda: bool(seen)) and seen == [0]


def test_whoever_keeps_the_futures_and_planners_of_saves_keeps_no_memory(tmp_path):
    kept = []
    for i in range(6):
        planner = DefaultSavePlanner()
        kept.append((async_save(full(float(i)), tmp_path / str(i), planner=planner), planner))
        kept[-1][0].result(60)
    assert (arena_stats().slots, arena_stats().waits) == (1, 0)
    assert [found(tmp_path / str(i)) for i in range(6)] == [[float(i)] for i in range(6)]


def test_whoever_keeps_the_errors_of_failed_saves_keeps_no_memory(tmp_path):
    kept = []
    for _ in range(6):
        future = dcp.async_save(full(1.0) | {"f": Unpicklable()}, storage_writer=StrataWriter(tmp_path), no_dist=True)
        kept.append(future.exception(60))
        assert kept[-1] is not None and until(lambda: arena_stats().busy_slots == 0)
    assert (arena_stats().slots, arena_stats().waits) == (1, 0)


class Unpicklable:
    """Can be copied, but not stored."""

    def __reduce__(self):
        raise TypeError("not to be pickled")

    def __deepcopy__(self, memo):
        return self


def test_a_state_that_was_written_is_not_saved_again_by_mistake(tmp_path):
    writer = StrataWriter(tmp_path / "c")
    staged = writer.stage(full(1.0))
    dcp.save(staged, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match="written already"):
        dcp.save(staged, storage_writer=StrataWriter(tmp_path / "d"), no_dist=True)
    assert found(tmp_path / "c") == [1.0]


def test_a_snapshot_may_be_saved_to_several_places(tmp_path):
    staged = snapshot(full(1.0))
    for name in ("a", "b"):
        dcp.save(staged, storage_writer=StrataWriter(tmp_path / name), no_dist=True)
    assert found(tmp_path / "a") == found(tmp_path / "b") == [1.0]


def test_a_value_that_cannot_be_copied_is_named_and_keeps_no_memory(tmp_path):
    with pytest.raises(CheckpointError, match=r"'m\.lock'") as raised:
        StrataWriter(tmp_path / "c").stage({**full(1.0), "m": {"lock": threading.Lock()}})
    assert arena_stats().busy_slots == 0
    assert raised.value is not None


def test_another_writer_may_save_what_ours_has_staged(tmp_path):
    future = dcp.async_save(
        full(3.0) | {"pair": (torch.ones(2), 1)},
        storage_writer=FileSystemWriter(tmp_path / "c"),
        async_stager=StrataWriter(tmp_path / "unused"),
        no_dist=True,
    )
    future.result(60)
    assert found(tmp_path / "c") == [3.0]
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 4.2 * MIB


def test_values_inside_an_entry_that_dcp_pickles_are_stored_alone(tmp_path):
    planner = AnyDtypePlanner(flatten_state_dict=False)
    async_save({"big": torch.zeros(4 * MIB), "m": {"w": torch.ones(3)}}, tmp_path / "c", planner=planner).result(60)
    assert sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file()) < 17 * MIB


def test_closing_gives_memory_that_is_not_in_use_back(tmp_path):
    writer = StrataWriter(tmp_path / "c")
    kept = snapshot(full(1.0))
    snapshot(full(2.0))
    assert arena_stats().slots == 2
    writer.close()
    assert arena_stats().slots == 1
    assert kept["w"].unique().tolist() == [1.0]


def test_the_memory_itself_goes_when_a_slot_is_dropped(tmp_path):
    before = mappings()
    snapshot(full(1.0))
    assert mappings() == before + 1
    StrataWriter(tmp_path / "c").close()
    assert mappings() == before and arena_stats().slots == 0


def mappings() -> int:
    """Slots that this process maps."""
    return sum("memfd:torch_strata" in line for line in Path("/proc/self/maps").read_text().splitlines())


def until(condition: Any) -> bool:
    """Whether `condition` comes true within 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
