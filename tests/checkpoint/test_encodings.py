"""Encoded tensors of incremental checkpoints: exact, verified, never more than one content away, nothing for stock."""

import random
import re
import shutil
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.manifests import manifest_of
from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import assert_same, failure_of, flip, largest_object, load, random_bits, same_bits
from tests.cli.commands import strata, strata_json
from torch_strata import ChecksumError, ManifestError, ObjectNotFoundError, StrataReader, verify
from torch_strata._store import open_store
from torch_strata.checkpoint import _run_writer
from torch_strata.checkpoint._content import Content, content_of
from torch_strata.checkpoint._opened import open_checkpoint
from torch_strata.checkpoint.manager import CheckpointManager
from torch_strata.checkpoint.retention import KeepLast
from torch_strata.checkpoint.run import CheckpointType
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.config import StorageConfig

XORED, PLANES = "xor-planes-zstd", "planes-zstd"


class Training:
    """AdamW steps on a few layers, one of which is longer than a block."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        self.dtype = dtype
        layers = [torch.nn.Linear(512, 512), torch.nn.Linear(512, 4500), torch.nn.Linear(4500, 512)]
        self.model = torch.nn.Sequential(*layers).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        # What no optimizer makes: NaNs with payloads, subnormals, negative zeros.
        self.odd = random_bits(torch.bfloat16, (50, 401))

    def step(self) -> None:
        given = torch.randn(8, 512, dtype=self.dtype)
        (self.model(given) - given).float().pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.odd.view(torch.int16)[::7] ^= 3

    def state(self) -> dict[str, Any]:
        moments = {str(number): state for number, state in self.optimizer.state_dict()["state"].items()}
        return {"model": {**self.model.state_dict(), "odd": self.odd}, "optimizer": moments}


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def saved(manager: CheckpointManager, state: Any, step: int, kind: str = "incremental") -> SaveStats:
    handle = manager.save(state, step=step, checkpoint_type=kind)
    handle.result(timedelta(seconds=60))
    assert handle.stats is not None
    return handle.stats


def opened(place: Path) -> Any:
    return open_checkpoint(open_store(place, StorageConfig()), place, rank=None)


def encodings(place: Path) -> dict[str, str]:
    return {fqn.decode(): encoding for fqn, encoding, *_ in opened(place).native.encodings()}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of bf16 with a full checkpoint and two encoded ones, and what each holds."""
    root, training, states = tmp_path_factory.mktemp("encodings") / "run", Training(torch.bfloat16), []
    with CheckpointManager(root, compress=True) as manager:
        for step in (1, 2, 3):
            training.step()
            states.append(copied(training.state()))
            saved(manager, states[-1], step)
    return root, states


@pytest.fixture
def run(states: tuple[Path, list[Any]], tmp_path: Path) -> Iterator[tuple[Path, list[Any]]]:
    root, found = states
    shutil.copytree(root, tmp_path / "run")
    yield tmp_path / "run", found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_of_ten_saves_of_a_training_loads_bit_for_bit_also_after_retention(tmp_path: Path, dtype: Any) -> None:
    training, kept = Training(dtype), {}
    with CheckpointManager(tmp_path / "run", retention=KeepLast(3), compress=True) as manager:
        for step in range(1, 11):
            training.step()
            kept[step] = copied(training.state())
            stats = saved(manager, kept[step], step)
            assert_same(manager.load(step), kept[step])
            if step > 1:
                assert stats.encoded_bytes < stats.encoded_payload_bytes <= stats.payload_bytes
                assert stats.written_bytes < 0.9 * stats.payload_bytes
                assert 0 < stats.encoded_ratio < (0.8 if dtype is torch.bfloat16 else 0.95)
        assert [found.step for found in manager.all()] == [8, 9, 10]
    again = CheckpointManager(tmp_path / "run", compress=True)
    for step in (8, 9, 10):
        assert_same(again.load(step), kept[step])
        assert again.verify(step).is_sound
        kinds = encodings(tmp_path / f"run/step-{step}")
        assert kinds["model.1.weight"] == (XORED if dtype is torch.bfloat16 else PLANES)


def test_a_base_outlives_its_checkpoint_and_goes_with_the_last_that_needs_it(tmp_path: Path) -> None:
    training = Training(torch.bfloat16)
    with CheckpointManager(tmp_path / "run", keep_count=1, compress=True) as manager:
        for step in (1, 2, 3):
            training.step()
            saved(manager, training.state(), step)
        assert manager.verify(3).is_sound
        assert not (tmp_path / "run/step-1/.metadata").exists() and list((tmp_path / "run/step-1").glob("*.distcp"))
        training.step()
        saved(manager, training.state(), 4, "full")
        assert manager.verify(4).is_sound
        manager.apply_retention()
    assert {path.parent.name for path in (tmp_path / "run").rglob("*.distcp")} == {"step-4"}


def test_the_encoding_is_seen(run: Any) -> None:
    root, _ = run
    shown = strata("inspect", root / "step-3").output
    assert XORED in shown and "ratio" in shown
    described = strata_json("inspect", root / "step-3")
    assert described["encoded"]["stored_bytes"] < 0.8 * described["encoded"]["tensor_bytes"]
    assert described["refers_to"] == ["step-1"]
    key = next(key for key in described["keys"] if key["fqn"] == "model.1.weight")
    assert key["encoding"] == XORED and key["stored_bytes"] < key["bytes"]
    assert strata("verify", root).exit_code == 0
    assert strata("diff", root / "step-3", root / "step-3").exit_code == 0


def test_any_box_of_an_encoded_tensor_is_what_was_saved(run: Any) -> None:
    root, states = run
    content: Content = content_of(opened(root / "step-3"))
    tensor = content.tensors["model.1.weight"]
    expected = states[2]["model"]["1.weight"].view(torch.int16).numpy()
    generator = random.Random(5)
    boxes = []
    for _ in range(40):
        first = generator.randrange(4500), generator.randrange(512)
        lengths = generator.randrange(1, 4501 - first[0]), generator.randrange(1, 513 - first[1])
        boxes.append((tensor, (first, lengths)))
    for batch, buffer in content.stream(iter(boxes), 3 << 20):
        for wanted in batch:
            (row, column), (rows, columns) = wanted.box
            found = buffer.of(wanted).view(np.int16).reshape(rows, columns)
            assert np.array_equal(found, expected[row : row + rows, column : column + columns])


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state)


@pytest.mark.parametrize("verify_mode", ["inplace", "before"])
def test_a_load_in_place_fills_every_destination(run: Any, verify_mode: Any) -> None:
    root, states = run
    state = zeros_like(states[2])
    reader = load(state, root / "step-3", verify=verify_mode)
    assert_same(state, states[2])
    assert reader.stats.unverified_bytes == 0
    transposed = torch.zeros(512, 4500, dtype=torch.bfloat16).t()
    load({"model": {"1.weight": transposed}}, root / "step-3")
    assert same_bits(transposed, states[2]["model"]["1.weight"])


def load_in_group(rank: int, place: str) -> Any:
    state = {"model": {"1.weight": torch.zeros(4500, 512, dtype=torch.bfloat16)}}
    reader = StrataReader(place, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader)
    return state["model"]["1.weight"], reader.stats.bytes_read


def test_a_group_reads_and_decodes_each_block_once(run: Any, tmp_path: Path) -> None:
    root, states = run
    results = run_ranks(tmp_path, 2, load_in_group, str(root / "step-3"))
    assert all(same_bits(weight, states[2]["model"]["1.weight"]) for weight, _ in results)
    frames = {fqn: taken for fqn, _, taken, *_ in opened(root / "step-3").native.encodings()}
    # The frames and what they were XORed with, each once.
    expected = frames[b"model.1.weight"] + 4500 * 512 * 2
    assert expected <= sum(read for _, read in results) < 1.02 * expected


def save_on_two_ranks(rank: int, root: str) -> bool:
    training = Training(torch.bfloat16)
    same = []
    with CheckpointManager(root, compress=True) as manager:
        for step in (1, 2, 3):
            training.step()
            state = {f"rank{rank}": {**training.state()["model"]}}
            manager.save(state, step=step, checkpoint_type="incremental").result(timedelta(seconds=60))
            empty = zeros_like(state)
            manager.load(step, empty)
            assert_same(empty, state)
            same.append(True)
    return all(same)


def test_ranks_encode_each_its_own(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, save_on_two_ranks, str(tmp_path / "run")) == [True, True]
    kinds = encodings(tmp_path / "run/step-3")
    assert {kinds[f"rank{rank}.1.weight"] for rank in (0, 1)} == {XORED}
    assert len(list((tmp_path / "run/step-3").glob("__1_*.distcp"))) >= 1


def test_verify_finds_any_flipped_bit_of_a_frame(run: Any) -> None:
    root, _ = run
    victim = largest_object(root / "step-3")
    generator = random.Random(1)
    content = victim.read_bytes()
    for _ in range(60):
        at = generator.randrange(len(content))
        if not content[max(at - 64, 0) : at + 64].strip(b"\0"):
            continue  # between two items
        flip(victim, at, generator.randrange(8))
        report = verify(root / "step-3")
        if len(report.problems) != 1 or f"step-3/{victim.name}" not in report.problems[0]:
            # Of what stands between two items nothing is read.
            assert content[at] == 0 and not report.problems, (at, report.problems)
        victim.write_bytes(content)
    for end in (len(content) - 1, len(content) // 2, 0):
        victim.write_bytes(content[:end])
        assert verify(root / "step-3").problems
    victim.write_bytes(content)
    assert verify(root / "step-3").is_sound


def test_a_damaged_frame_or_base_is_named_with_its_key(run: Any) -> None:
    root, states = run
    victim = largest_object(root / "step-3")
    before = victim.read_bytes()
    flip(victim, len(before) // 3)
    error = failure_of(lambda: load(zeros_like(states[2]), root / "step-3"))
    assert isinstance(error, ChecksumError)
    assert f"step-3/{victim.name}" in str(error)
    assert re.search(r'\(bytes \d+\.\.\d+, in "(model|optimizer)\.', str(error)), error
    victim.write_bytes(before)
    # What the weight was XORed with stands in step-1.
    weight = states[0]["model"]["1.weight"].view(torch.int16).numpy().tobytes()
    base = next(path for path in (root / "step-1").glob("*.distcp") if weight in path.read_bytes())
    flip(base, base.read_bytes().index(weight) + 100)
    error = failure_of(lambda: load(zeros_like(states[2]), root / "step-3"))
    assert isinstance(error, ChecksumError)
    assert f"step-1/{base.name}" in str(error) and "model.1.weight" in str(error)
    problems = verify(root / "step-3").problems
    assert len(problems) == 1 and f"step-1/{base.name}" in problems[0]


def test_a_checkpoint_whose_base_is_gone_says_so(run: Any) -> None:
    root, states = run
    shutil.rmtree(root / "step-1")
    error = failure_of(lambda: load(zeros_like(states[2]), root / "step-3"))
    assert isinstance(error, ObjectNotFoundError)
    assert "step-1/" in str(error) and f"{root / 'step-3'} refers to it" in str(error)
    problems = verify(root / "step-3").problems
    assert problems and all("refers to it" in problem for problem in problems)


def test_stock_torch_finds_nothing_and_an_export_is_for_it(run: Any, tmp_path: Path) -> None:
    root, states = run
    assert not (root / "step-3/.metadata").exists()
    assert not verify(root / "step-3").warnings
    with pytest.raises(BaseException, match=r"\.metadata|metadata"):
        dcp.load(zeros_like(states[2]), storage_reader=FileSystemReader(root / "step-3"), no_dist=True)
    for kind, target in (("dcp", "d"), ("torch", "t.pt"), ("safetensors", "s")):
        done = strata("export", "--to", kind, root / "step-3", tmp_path / target)
        assert done.exit_code == 0, done.output
    state = zeros_like(states[2])
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "d"), no_dist=True)
    assert_same(state, states[2])
    whole = torch.load(tmp_path / "t.pt", weights_only=True)
    assert_same(whole["model"], states[2]["model"])
    tensors = {key: value for path in (tmp_path / "s").glob("*.safetensors") for key, value in load_file(path).items()}
    assert any(same_bits(value, states[2]["model"]["1.weight"]) for value in tensors.values())
    assert strata("copy", root / "step-3", tmp_path / "alone").exit_code == 0
    assert verify(tmp_path / "alone").is_sound and not encodings(tmp_path / "alone")
    assert strata("diff", root / "step-3", tmp_path / "alone").exit_code == 0


def test_a_reader_that_does_not_know_encodings_must_refuse(run: Any) -> None:
    root, states = run
    manifest = manifest_of(root / "step-3")
    content = manifest.read_bytes()
    header = content[16 : 16 + int.from_bytes(content[8:12], "little")]
    # required_features, field 2, by which readers of before refuse the file.
    assert b"\x12\x10encoded-payloads" in header
    assert b"encoded-payloads" not in manifest_of(root / "step-1").read_bytes()
    unknown = header.replace(b"encoded-payloads", b"encoded-somehow!")
    start = content[:12] + zlib.crc32(unknown).to_bytes(4, "little")
    manifest.write_bytes(start + unknown + content[16 + len(header) :])
    error = failure_of(lambda: load(zeros_like(states[2]), root / "step-3"))
    assert isinstance(error, ManifestError) and "encoded-somehow!" in str(error)


def test_after_enough_encoded_ones_a_full_one_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_writer, "_MOST_ENCODED", 2)
    training = Training(torch.bfloat16)
    with CheckpointManager(tmp_path / "run", compress=True) as manager:
        for step in range(1, 8):
            training.step()
            saved(manager, training.state(), step)
        types = [found.checkpoint_type for found in manager.all()]
    full, incremental = CheckpointType.FULL, CheckpointType.INCREMENTAL
    assert types == [full, incremental, incremental, full, incremental, incremental, full]
    for step in (1, 4, 7):
        assert (tmp_path / f"run/step-{step}/.metadata").exists() and not encodings(tmp_path / f"run/step-{step}")
    assert strata_json("inspect", tmp_path / "run/step-6")["refers_to"] == ["step-4"]


def test_what_has_moved_away_from_its_base_is_a_new_one(tmp_path: Path) -> None:
    """From step 3 on nothing is alike; step 4 is like step 3."""
    one, other = (random_bits(torch.bfloat16, (300, 300), seed) for seed in (1, 2))
    near = [tensor.clone() for tensor in (one, other)]
    for tensor in near:
        tensor.view(torch.int16)[:, ::9] ^= 1
    with CheckpointManager(tmp_path / "run", compress=True) as manager:
        for step, tensor in enumerate((one, near[0], other, near[1]), start=1):
            saved(manager, {"w": tensor}, step)
            assert_same(manager.load(step), {"w": tensor})
    kinds = [encodings(tmp_path / f"run/step-{step}").get("w") for step in (1, 2, 3, 4)]
    assert kinds == [None, XORED, None, XORED]
    assert [strata_json("inspect", tmp_path / f"run/step-{step}")["refers_to"] for step in (2, 4)] == [
        ["step-1"],
        ["step-3"],
    ]


def test_what_stands_encoded_and_has_not_changed_is_referred_to(tmp_path: Path) -> None:
    training = Training(torch.bfloat16)
    with CheckpointManager(tmp_path / "run", compress=True) as manager:
        for step in (1, 2):
            training.step()
            saved(manager, training.state(), step)
        stats = saved(manager, training.state(), 3)
        assert stats.written_bytes < 200_000 and stats.encoded_bytes == 0
        assert_same(manager.load(3), training.state())
        assert encodings(tmp_path / "run/step-3")["model.1.weight"] == XORED
        assert manager.verify(3).is_sound
        training.step()
        saved(manager, training.state(), 4)
        assert_same(manager.load(4), training.state())
    assert strata_json("inspect", tmp_path / "run/step-4")["refers_to"] == ["step-1"]


def test_a_base_that_is_damaged_is_not_used(run: Any) -> None:
    root, states = run
    for path in (root / "step-1").glob("*.distcp"):
        content = bytearray(path.read_bytes())
        for at in range(5000, len(content), 100_000):
            content[at] ^= 1
        path.write_bytes(content)
    state = copied(states[2])
    for tensor in state["model"].values():
        tensor.view(torch.int16)[..., ::5] ^= 1
    with CheckpointManager(root, compress=True) as manager:
        saved(manager, state, 4)
        assert encodings(root / "step-4").get("model.1.weight") != XORED
        assert same_bits(manager.load(4)["model"]["1.weight"], state["model"]["1.weight"])


def test_nothing_is_encoded_unless_asked_for(tmp_path: Path) -> None:
    training = Training(torch.bfloat16)
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            training.step()
            assert saved(manager, training.state(), step).encoded_payload_bytes == 0
    assert (tmp_path / "run/step-2/.metadata").exists() and not encodings(tmp_path / "run/step-2")
