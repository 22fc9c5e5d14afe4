"""StrataShardPipe in loaders: every sample once, in one order, resumed exactly, on any number of ranks and workers."""

import copy
import itertools
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.checkpoint.ranks import run_ranks
from tests.data.shards import NUM_SAMPLES, all_numbers, content, numbers, write_tars
from torch_strata.data.pipe import StrataShardPipe
from torch_strata.data.shuffle import Shuffle
from torch_strata.errors import ConfigError, CorruptionError, ForkedProcessError, ObjectNotFoundError

EVERY = list(range(NUM_SAMPLES))
BLOCKS = Shuffle(seed=3, block=4, buffer=16)

MakePipe = Callable[..., StrataShardPipe]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def make_pipe(folder: Path) -> MakePipe:
    def make(**arguments: Any) -> StrataShardPipe:
        return StrataShardPipe(f"{folder}/*.tar", **{"batch_size": 4, "shuffle": BLOCKS, **arguments})

    return make


def test_without_a_shuffle_samples_come_as_they_lie(make_pipe: MakePipe) -> None:
    assert all_numbers(make_pipe(shuffle=None)) == EVERY
    assert [int(one["__key__"][3:]) for one in make_pipe(shuffle=None, batch_size=None)] == EVERY


def test_passes_over_the_data_differ_and_each_has_every_sample(make_pipe: MakePipe) -> None:
    pipe = make_pipe()
    first, second = all_numbers(pipe), all_numbers(pipe)
    assert first != second and sorted(first) == sorted(second) == EVERY
    pipe.set_epoch(0)
    assert all_numbers(pipe) == first


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_every_kind_of_worker_reads(make_pipe: MakePipe, context: str) -> None:
    pipe = make_pipe()
    next(iter(pipe))  # the runtime's threads run when workers are forked
    loader = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert sorted(all_numbers(loader)) == EVERY


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_loader_gives_every_sample_once_and_tells_how_many_batches(make_pipe: MakePipe, num_workers: int) -> None:
    loader = DataLoader(make_pipe(), batch_size=None, num_workers=num_workers)
    batches = list(loader)
    assert sorted(all_numbers(batches)) == EVERY and len(batches) == len(loader) == 26


@pytest.mark.parametrize("shuffle", [None, Shuffle(seed=1, by="samples")], ids=["as they lie", "samples"])
def test_orders_of_single_samples_are_the_same_with_any_number_of_workers(
    make_pipe: MakePipe, shuffle: Shuffle | None
) -> None:
    whole = all_numbers(make_pipe(shuffle=shuffle))
    for num_workers in (1, 2, 3):
        loader = DataLoader(make_pipe(shuffle=shuffle), batch_size=None, num_workers=num_workers)
        assert all_numbers(loader) == whole


def test_persistent_workers_hear_of_the_epoch(make_pipe: MakePipe) -> None:
    pipe = make_pipe()
    loader = DataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True)
    passes = []
    for epoch in (0, 1, 0, 5):
        pipe.set_epoch(epoch)
        passes.append(all_numbers(loader))
    assert passes[0] == passes[2] and len({tuple(one) for one in passes}) == 3
    alone = make_pipe()
    alone.set_epoch(5)
    assert all_numbers(DataLoader(alone, batch_size=None, num_workers=2)) == passes[3]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("consumed", [1, 5, 25])
def test_resume_behind_any_batch_equals_no_interruption(make_pipe: MakePipe, num_workers: int, consumed: int) -> None:
    whole = [numbers(batch) for batch in DataLoader(make_pipe(), batch_size=None, num_workers=num_workers)]
    pipe = make_pipe()
    batches = iter(DataLoader(pipe, batch_size=None, num_workers=num_workers))
    head = list(itertools.islice(batches, consumed))
    state = pickle.loads(pickle.dumps(pipe.state_dict(after=head[-1])))
    resumed = make_pipe()
    resumed.load_state_dict(state)
    rest = [numbers(batch) for batch in DataLoader(resumed, batch_size=None, num_workers=num_workers)]
    assert [numbers(batch) for batch in head] + rest == whole
    assert len(pickle.dumps(state)) < 1024


@pytest.mark.parametrize("shuffle", [None, BLOCKS, Shuffle(by="samples"), Shuffle(by="shards")], ids=str)
@pytest.mark.parametrize("world", [(1, 0, 4), (2, 1, 3), (3, 2, 1)], ids=str)
def test_other_ranks_and_workers_go_on_with_nothing_lost_and_nothing_twice(
    make_pipe: MakePipe, shuffle: Shuffle | None, world: tuple[int, int, int]
) -> None:
    pipes = [make_pipe(shuffle=shuffle, rank=rank, world_size=2) for rank in range(2)]
    heads = [list(itertools.islice(DataLoader(pipe, batch_size=None, num_workers=2), 5)) for pipe in pipes]
    states = [pipe.state_dict(after=head[-1]) for pipe, head in zip(pipes, heads, strict=True)]
    assert states[0] == states[1]
    world_size, num_workers, batch_size = world
    rest = []
    for rank in range(world_size):
        resumed = make_pipe(shuffle=shuffle, rank=rank, world_size=world_size, batch_size=batch_size)
        resumed.load_state_dict(states[0])
        rest.append(list(DataLoader(resumed, batch_size=None, num_workers=num_workers)))
    assert len({len(batches) for batches in rest}) == 1, "a rank runs dry"
    assert sorted(all_numbers(itertools.chain(*heads, *rest))) == EVERY


@pytest.mark.parametrize(("ending", "steps", "repeated"), [("short", 9, 0), ("drop", 8, 0), ("pad", 9, 5)])
def test_the_end_of_an_epoch_is_as_was_said_and_no_rank_runs_dry(
    make_pipe: MakePipe, ending: str, steps: int, repeated: int
) -> None:
    ranks = [list(make_pipe(rank=rank, world_size=3, ending=ending)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [steps] * 3
    batches = [batch for batches in ranks for batch in batches]
    assert sum(batch.num_repeated for batch in batches) == repeated
    own = [number for batch in batches for number in numbers(batch)[: len(batch["__key__"]) - batch.num_repeated]]
    assert len(set(own)) == len(own) == (96 if ending == "drop" else NUM_SAMPLES)


def test_continued_epochs_have_every_sample_as_often(make_pipe: MakePipe) -> None:
    pipes = [make_pipe(rank=rank, world_size=3, ending="continue") for rank in range(3)]
    seen: list[int] = []
    for _ in range(4):
        steps = [list(pipe) for pipe in pipes]
        assert len({len(batches) for batches in steps}) == 1
        seen += all_numbers(itertools.chain(*steps))
    counts = [seen.count(number) for number in EVERY]
    assert len(seen) % 12 == 0 and set(counts) <= {4, 5} and counts.count(5) < 12
    # The epoch that is set begins where it would have.
    again = make_pipe(rank=0, world_size=3, ending="continue")
    again.set_epoch(4)
    assert [numbers(b) for b in again] == [numbers(b) for b in pipes[0]]


def test_a_loader_with_workers_and_no_batch_to_ask_is_told(make_pipe: MakePipe) -> None:
    pipe = make_pipe()
    loader = iter(DataLoader(pipe, batch_size=None, num_workers=2))
    next(loader)
    with pytest.raises(ConfigError, match="expected the last batch that was consumed"):
        pipe.state_dict()
    with pytest.raises(ConfigError, match="without position"):
        pipe.state_dict(after={"bin": []})  # type: ignore[arg-type]


def test_a_transform_is_applied_in_the_workers_and_the_position_stays(make_pipe: MakePipe) -> None:
    def lengths(batch: dict[str, Any]) -> dict[str, Any]:
        return {"length": torch.tensor([len(field) for field in batch["bin"]])}

    pipe = make_pipe(shuffle=None, transform=lengths)
    loader = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context="fork")
    first = next(iter(loader))
    assert first["length"].tolist() == [len(content(number, "bin")) for number in range(4)]
    assert pipe.state_dict(after=first)["samples"] == 4


def test_states_of_other_data_are_refused(make_pipe: MakePipe, tmp_path: Path) -> None:
    state = make_pipe().state_dict()
    other = StrataShardPipe(write_tars(tmp_path, [5]) / "*.tar", shuffle=BLOCKS)
    for pipe in (other, make_pipe(shuffle=None)):
        with pytest.raises(ConfigError, match="other data or another shuffle"):
            pipe.load_state_dict(state)


def test_what_is_wrong_is_told_when_the_pipe_is_made(folder: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"batch_size": 0},
        {"rank": 2, "world_size": 2},
        {"rank": 0},
        {"ending": "stop"},
        {"format": "zip"},
        {"shuffle": True},
        {"max_ahead_bytes": "1"},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            StrataShardPipe(f"{folder}/*.tar", **arguments)


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"\*\.tar"):
        len(StrataShardPipe(f"{tmp_path}/*.tar"))
    shard = write_tars(tmp_path, [3]) / "000.tar"
    pipe = StrataShardPipe(f"{tmp_path}/*.tar")
    assert len(pipe) == 3
    damaged = bytearray(shard.read_bytes())
    damaged[3] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"000\.tar.*at byte 0"):
        list(pipe)
    with pytest.raises(CorruptionError, match=r"000\.tar"):
        len(StrataShardPipe(f"{tmp_path}/*.tar"))


def test_copies_of_a_pipe_and_of_an_iterator_go_on_by_themselves(make_pipe: MakePipe) -> None:
    whole = all_numbers(make_pipe())
    for copied in (copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))):
        assert all_numbers(copied(make_pipe())) == whole
        batches = iter(make_pipe())
        head = all_numbers(itertools.islice(batches, 3))
        assert head + all_numbers(copied(batches)) == head + all_numbers(batches) == whole


def read_in_a_child(batches: Any, answer: Any) -> None:
    try:
        answer.put(all_numbers(batches))
    except ForkedProcessError as error:
        answer.put(str(error))


def test_an_iterator_of_another_process_is_refused_after_a_fork(make_pipe: MakePipe) -> None:
    batches = iter(make_pipe())
    next(batches)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=read_in_a_child, args=(batches, answer))
    child.start()
    assert "forked" in answer.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and len(all_numbers(batches)) == NUM_SAMPLES - 4


def iterate_alone(rank: int, folder: str) -> list[int]:
    """Only rank 0 evaluates: nobody waits for rank 1."""
    pipe = StrataShardPipe(f"{folder}/*.tar", batch_size=4)
    return all_numbers(DataLoader(pipe, batch_size=None, num_workers=1)) if rank == 0 else []


@pytest.mark.timeout(120)
def test_one_rank_may_iterate_alone(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, iterate_alone, str(folder))
    assert 50 <= len(first) < NUM_SAMPLES and second == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stateful_loader_resumes_by_itself_twice_in_a_pass(
    make_pipe: MakePipe, num_workers: int, persistent: bool
) -> None:
    arguments = {"persistent_workers": True} if persistent and num_workers else {}
    whole = [
        numbers(batch)
        for batch in StatefulDataLoader(make_pipe(), batch_size=None, num_workers=num_workers, **arguments)
    ]
    found, state = [], None
    for consumed in (3, 8, 100):
        pipe = make_pipe()
        loader = StatefulDataLoader(pipe, batch_size=None, num_workers=num_workers, **arguments)
        if state is not None:
            loader.load_state_dict(state)
        found += [numbers(batch) for batch in itertools.islice(loader, consumed)]
        state = loader.state_dict()
    assert found == whole
    pipe.set_epoch(1)
    assert sorted(all_numbers(loader)) == EVERY


def test_a_state_of_a_stateful_loader_goes_on_with_other_workers(make_pipe: MakePipe) -> None:
    loader = StatefulDataLoader(make_pipe(), batch_size=None, num_workers=2)
    head = list(itertools.islice(loader, 5))
    resumed = make_pipe(rank=0, world_size=1)
    resumed.load_state_dict(loader.state_dict())
    rest = list(StatefulDataLoader(resumed, batch_size=None, num_workers=3))
    assert sorted(all_numbers([*head, *rest])) == EVERY


def test_a_state_of_other_streams_is_refused_by_a_stream(make_pipe: MakePipe) -> None:
    stream = iter(make_pipe())
    state = stream.state_dict()
    for name in ("num_workers", "samples_a_step"):
        with pytest.raises(ConfigError, match=f"expected {name} {state[name]}, found 99"):
            iter(make_pipe()).load_state_dict({**state, name: 99})
    with pytest.raises(ConfigError, match="other data"):
        stream.load_state_dict({**state, "data": {}})
