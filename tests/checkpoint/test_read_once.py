"""A reader with a process group: each stored byte leaves the store once, and a failure reaches every rank."""

import io
import os
import pickle
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import same_bits, save
from torch_strata import (
    ChecksumError,
    ConfigError,
    CoordinationError,
    LayoutMismatchError,
    ObjectNotFoundError,
    StorageConfig,
    StrataReader,
    StrataWriter,
)
from torch_strata.checkpoint._exchange import Exchange, group_fault

# Rounds of one block.
SMALL = StorageConfig(part_bytes=5 << 20, max_in_flight_bytes=5 << 20)
ROWS, COLUMNS = 3000, 2048
# What is thrown away: the frames between small items, of which there is one in each rank's file.
FRAMES = 1.002


def state() -> dict[str, Any]:
    """24 MB in one tensor, others below and above a block, and a value of 130 KB."""
    return {
        "big": torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS),
        "layers": [torch.arange(1_500_000, dtype=torch.int64) + 7, torch.full((90_001,), 0.5, dtype=torch.bfloat16)],
        "text": "of some length " * 9000,
        "step": 3,
    }


def stored_bytes() -> int:
    whole = state()
    return sum(t.nbytes for t in (whole["big"], *whole["layers"])) + len(whole["text"])


def zeros() -> dict[str, Any]:
    whole = state()
    return {
        "big": torch.zeros_like(whole["big"]),
        "layers": [torch.zeros_like(t) for t in whole["layers"]],
        "text": "",
        "step": 0,
    }


def is_loaded(found: dict[str, Any]) -> bool:
    expected = state()
    tensors = zip([found["big"], *found["layers"]], [expected["big"], *expected["layers"]], strict=True)
    return all(same_bits(*pair) for pair in tensors) and (found["text"], found["step"]) == (expected["text"], 3)


def load_replicated(rank: int, place: str, options: dict[str, Any]) -> Any:
    out = zeros()
    reader = StrataReader(place, process_group=dist.group.WORLD, **options)
    dcp.load(out, storage_reader=reader)
    return is_loaded(out), reader.stats


def assert_read_once(results: list[Any], expected_bytes: int) -> None:
    assert all(equal for equal, _ in results)
    read = sum(stats.bytes_read for _, stats in results)
    assert expected_bytes <= read <= expected_bytes * FRAMES, f"{read / expected_bytes:.4f} of {expected_bytes} bytes"


@pytest.mark.parametrize(
    ("world", "options"), [(2, {}), (4, {}), (2, {"config": SMALL}), (3, {"config": SMALL, "verify": "before"})]
)
def test_replicas_read_each_byte_once(tmp_path, world, options):
    save(state(), tmp_path / "c")
    results = run_ranks(tmp_path, world, load_replicated, str(tmp_path / "c"), options)
    assert_read_once(results, stored_bytes())
    for _, stats in results:
        assert stats.bytes_received + stats.bytes_read >= stored_bytes()
        assert stats.bytes_read < 2 * stored_bytes() / world, "the ranks take their part"
        assert stats.blocks_verified >= stored_bytes() / (4 << 20)


def test_replicas_read_what_stock_wrote_once(tmp_path):
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    results = run_ranks(tmp_path, 2, load_replicated, str(tmp_path / "c"), {"config": SMALL})
    assert_read_once(results, stored_bytes())
    # Tensors have the checksum of their archive; a pickled value is read with its archive, which has none.
    assert [stats.unverified_bytes for _, stats in results] == [saved_bytes(state()["text"]) + saved_bytes(3)] * 2


def saved_bytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


def load_safetensors(rank: int, place: str) -> Any:
    out = {"w": torch.zeros(ROWS, COLUMNS)}
    reader = StrataReader(place, process_group=dist.group.WORLD)
    dcp.load(out, storage_reader=reader)
    return same_bits(out["w"], state()["big"]), reader.stats


def test_replicas_read_safetensors_once(tmp_path):
    (tmp_path / "c").mkdir()
    save_file({"w": state()["big"]}, tmp_path / "c" / "model.safetensors")
    assert_read_once(run_ranks(tmp_path, 2, load_safetensors, str(tmp_path / "c")), state()["big"].nbytes)


def load_hsdp(rank: int, place: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.zeros(ROWS // 2, COLUMNS)
    reader = StrataReader(place, process_group=dist.group.WORLD)
    dcp.load({"big": DTensor.from_local(local, mesh, [Replicate(), Shard(0)])}, storage_reader=reader)
    half = rank % 2 * (ROWS // 2)
    return same_bits(local, state()["big"][half : half + ROWS // 2]), reader.stats


def test_two_by_two_replicas_and_shards_read_each_byte_once(tmp_path):
    save(state(), tmp_path / "c")
    results = run_ranks(tmp_path, 4, load_hsdp, str(tmp_path / "c"))
    assert_read_once(results, state()["big"].nbytes)
    # The block in the middle is for all of them; of the rest each pair reads its half.
    half = state()["big"].nbytes // 2
    assert all(abs(results[i][1].bytes_read + results[i + 2][1].bytes_read - half) <= 4 << 20 for i in range(2))


def save_in_shards(rank: int, place: str, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    rows = state()["big"].chunk(world)[rank].clone()
    size = torch.Size([ROWS, COLUMNS])
    sharded = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=size, stride=(COLUMNS, 1))
    dcp.save({"big": sharded, "step": 3}, storage_writer=StrataWriter(place))


def load_in_shards(rank: int, place: str, world: int, transposed: bool) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    expected = state()["big"].chunk(world)[rank]
    # A column-major destination takes no run of bytes as it is.
    local = torch.zeros(expected.shape[::-1]).T if transposed else torch.zeros(expected.shape)
    size = torch.Size([ROWS, COLUMNS])
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=(COLUMNS, 1))
    reader = StrataReader(place, process_group=dist.group.WORLD, config=SMALL)
    dcp.load({"big": sharded}, storage_reader=reader)
    return same_bits(local, expected), reader.stats


@pytest.mark.parametrize(("saved", "loaded", "transposed"), [(3, 2, False), (2, 4, False), (3, 4, True)])
def test_resharded_each_byte_is_read_once(tmp_path, saved, loaded, transposed):
    place = str(tmp_path / "c")
    run_ranks(tmp_path, saved, save_in_shards, place, saved)
    results = run_ranks(tmp_path, loaded, load_in_shards, place, loaded, transposed)
    assert_read_once(results, state()["big"].nbytes)


def load_mixed(rank: int, place: str) -> Any:
    """Rank 0 wants all; rank 1 a part, in another dtype and tied; rank 2 what the others do not share."""
    whole, tied = state(), torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    wanted = [zeros(), {"big": tied, "layers": [torch.zeros(1_500_000, dtype=torch.int32)]}, {"step": 0}][rank]
    reader = StrataReader(place, process_group=dist.group.WORLD, allow_dtype_cast=True)
    dcp.load(wanted, storage_reader=reader)
    equal = [
        lambda: is_loaded(wanted),
        lambda: torch.equal(tied, whole["big"].double()) and torch.equal(wanted["layers"][0], whole["layers"][0].int()),
        lambda: wanted["step"] == 3,
    ][rank]()
    return equal, reader.stats


def test_ranks_that_want_different_things_each_get_theirs(tmp_path):
    save(state(), tmp_path / "c")
    assert_read_once(run_ranks(tmp_path, 3, load_mixed, str(tmp_path / "c")), stored_bytes())


def load_tied(rank: int, place: str) -> Any:
    weight = torch.zeros(ROWS, COLUMNS)
    overlapping = torch.zeros(1000)
    out = {"head": weight, "embedding": weight, "a": overlapping[:600], "b": overlapping[400:]}
    reader = StrataReader(place, process_group=dist.group.WORLD)
    dcp.load(out, storage_reader=reader)
    equal = same_bits(weight, state()["big"]) and overlapping[:400].eq(1).all() and overlapping[600:].eq(2).all()
    return bool(equal), reader.stats


def test_tied_and_overlapping_destinations_hold_what_a_load_without_a_group_gives(tmp_path):
    big = state()["big"]
    save({"head": big, "embedding": big, "a": torch.ones(600), "b": torch.full((600,), 2.0)}, tmp_path / "c")
    results = run_ranks(tmp_path, 2, load_tied, str(tmp_path / "c"))
    # The overlapping ones are read by each rank for itself.
    assert_read_once(results, big.nbytes)


def load_in_two_groups(rank: int, place: str) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    out = zeros()
    reader = StrataReader(place, process_group=groups[rank % 2])
    dcp.load(out, storage_reader=reader)
    return is_loaded(out), reader.stats


def test_several_groups_of_one_load_read_once_each(tmp_path):
    save(state(), tmp_path / "c")
    results = run_ranks(tmp_path, 4, load_in_two_groups, str(tmp_path / "c"))
    for pair in (results[::2], results[1::2]):
        assert_read_once(pair, stored_bytes())


def failing_load(rank: int, places: list[str], wrong: int | None, grouped: list[int], no_dist: bool) -> Any:
    """Class and message of each rank's failure, the seconds it took, and whether this rank's state is untouched."""
    out = zeros()
    if rank == wrong:
        out["big"] = out["big"].double()
    group = dist.group.WORLD if rank in grouped else None
    started = time.monotonic()
    try:
        dcp.load(out, storage_reader=StrataReader(places[rank], process_group=group, config=SMALL), no_dist=no_dist)
    except CheckpointException as error:
        found = {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
        return found, time.monotonic() - started, not out["big"].any()
    raise AssertionError("the load should have failed")


def failures_of(tmp_path: Path, places: list[Path], **options: Any) -> list[Any]:
    given = {"wrong": None, "grouped": list(range(len(places))), "no_dist": False, **options}
    results = run_ranks(tmp_path, len(places), failing_load, [str(place) for place in places], *given.values())
    assert all(seconds < 20 for _, seconds, _ in results), results
    return results


@pytest.mark.parametrize("at", [0.1, 0.9])
def test_a_damaged_block_is_named_on_every_rank(tmp_path, at):
    save(state(), tmp_path / "c")
    path = next((tmp_path / "c").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    start = content.index(torch.arange(64.0).numpy().tobytes())
    content[start + int(at * state()["big"].nbytes)] ^= 1
    path.write_bytes(content)
    for found, _, _ in failures_of(tmp_path, [tmp_path / "c"] * 4):
        assert sorted(found) == [0, 1, 2, 3]
        assert {name for name, _ in found.values()} == {ChecksumError.__name__}
        assert all("'big'" in message or '"big"' in message for _, message in found.values()), found


def test_a_wrong_destination_of_one_rank_is_named_on_every_rank_before_anything_is_read(tmp_path):
    save(state(), tmp_path / "c")
    for found, _, untouched in failures_of(tmp_path, [tmp_path / "c"] * 2, wrong=1):
        assert {name for name, _ in found.values()} == {LayoutMismatchError.__name__} and sorted(found) == [0, 1]
        assert found[0][1].startswith("rank 1: ") and "'big'" in found[0][1]
        assert untouched


def test_a_store_that_fails_one_rank_fails_all(tmp_path):
    save(state(), tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "half")
    next((tmp_path / "half").glob("*.distcp")).unlink()
    for found, _, _ in failures_of(tmp_path, [tmp_path / "c", tmp_path / "half", tmp_path / "c"]):
        assert {name for name, _ in found.values()} == {ObjectNotFoundError.__name__} and sorted(found) == [0, 1, 2]
        assert str(tmp_path / "half") in found[0][1]


def test_a_group_of_which_a_rank_loads_without_it_is_refused(tmp_path):
    save(state(), tmp_path / "c")
    for found, _, untouched in failures_of(tmp_path, [tmp_path / "c"] * 2, grouped=[0]):
        assert found[0][0] == ConfigError.__name__ and "of which 1 take part" in found[0][1]
        assert untouched


def test_a_group_is_refused_where_each_rank_loads_for_itself(tmp_path):
    save(state(), tmp_path / "c")
    for found, _, untouched in failures_of(tmp_path, [tmp_path / "c"] * 2, no_dist=True):
        assert found[0][0] == ConfigError.__name__ and "no_dist" in found[0][1]
        assert untouched


def load_with_a_death(rank: int, place: str, outcome: str) -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=5))
    if rank == 1:
        Exchange._hand_on = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        reader = StrataReader(place, process_group=group, config=SMALL)
        dcp.load(zeros(), storage_reader=reader, process_group=group)
    except (CheckpointException, RuntimeError):
        Path(f"{outcome}{rank}").write_text(str(time.monotonic() - started))


def test_a_rank_that_dies_ends_the_load_of_the_others_within_the_time_of_the_group(tmp_path):
    save(state(), tmp_path / "c")
    with pytest.raises(AssertionError, match="rank 1 ended with -9"):
        run_ranks(tmp_path, 3, load_with_a_death, str(tmp_path / "c"), str(tmp_path / "outcome"))
    for rank in (0, 2):
        # Once for the exchange, once for DCP's own gathering of what became of it.
        assert float((tmp_path / f"outcome{rank}").read_text()) < 15


def exchange_with_a_death(rank: int, outcome: str) -> None:
    from torch_strata.checkpoint._exchange import Group

    group = Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with Exchange(group, where="here", round_bytes=1) as exchange:
            exchange.close()
    except CoordinationError as error:
        Path(outcome).write_text(str(error))


def test_a_rank_that_died_is_a_named_error(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 ended with -9"):
        run_ranks(tmp_path, 2, exchange_with_a_death, str(tmp_path / "outcome"))
    assert (tmp_path / "outcome").read_text().startswith("here: the ranks that read together lost each other")


def save_alone(rank: int, place: str) -> None:
    dcp.save({"own": torch.full((9000,), float(rank))}, storage_writer=StrataWriter(place), use_collectives=False)


def load_alone(rank: int, place: str) -> Any:
    out = {"own": torch.zeros(9000)}
    dcp.load(out, storage_reader=StrataReader(place, process_group=dist.group.WORLD))
    return out["own"].unique().tolist()


def test_what_ranks_saved_on_their_own_is_read_on_their_own(tmp_path):
    run_ranks(tmp_path, 2, save_alone, str(tmp_path / "c"))
    assert run_ranks(tmp_path, 2, load_alone, str(tmp_path / "c")) == [[0.0], [1.0]]


def use_groups_oddly(rank: int, place: str) -> Any:
    """How many groups a reader refuses that are none, or not this rank's; and what its pickled copy loads."""
    others = dist.new_group([0])
    refusals = []
    for group in ("gloo", others if rank == 1 else object()):
        try:
            StrataReader(place, process_group=group)
        except ConfigError as error:
            refusals.append(str(error))
    copied = pickle.loads(pickle.dumps(StrataReader(place, process_group=dist.group.WORLD)))
    out = zeros()
    dcp.load(out, storage_reader=copied)
    return len(refusals), is_loaded(out), copied.stats.bytes_received


def test_a_group_is_checked_and_not_pickled(tmp_path):
    save(state(), tmp_path / "c")
    assert run_ranks(tmp_path, 2, use_groups_oddly, str(tmp_path / "c")) == [(2, True, 0)] * 2


def refuse_a_group_of_gpus(rank: int, place: str) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

    make = lambda common, _: FakeProcessGroup._create_internal(common.group_rank, common.group_size)  # noqa: E731
    dist.Backend.register_backend("gpus_only", make, extended_api=True, devices=["cuda"])
    group = dist.new_group([0, 1], backend="gpus_only")
    try:
        StrataReader(place, process_group=group)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_group_that_only_moves_what_is_on_gpus_is_refused(tmp_path):
    for message in run_ranks(tmp_path, 2, refuse_a_group_of_gpus, str(tmp_path / "c")):
        assert "gloo" in message


def test_a_fault_is_found_in_the_groups_that_ranks_were_given():
    assert group_fault([None, None]) is None
    assert group_fault([(2, 7), None, (2, 7), (2, 9), (2, 9)]) is None
    assert "3 ranks, of which 2" in str(group_fault([(3, 7), (3, 7), (2, 1), (2, 1)]))
