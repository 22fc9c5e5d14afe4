"""A copy that runs beside the next forward and backward: what it holds, and what waits for it."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from tests.checkpoint.states import load, same_bits
from torch_strata import CheckpointError, ConfigError, StrataWriter
from torch_strata.checkpoint import _arena, _optimizers, staging
from torch_strata.checkpoint.staging import arena_stats


@pytest.fixture(autouse=True)
def _new_arena(monkeypatch):
    monkeypatch.setattr(_arena, "_arenas", {})
    monkeypatch.setattr(_optimizers, "_fences", [])


class Training:
    """A model with weights, a buffer and an optimizer that has taken a step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.run()
        self.optimizer.step()

    def run(self) -> None:
        """A forward, which changes the buffer, and a backward."""
        self.model(torch.randn(8, 256)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state.detach().clone()] if isinstance(state, torch.Tensor) else []


class HeldCopies:
    """`_native.start_copy` that begins the second copy of each save when it is let through."""

    def __init__(self, monkeypatch, error: Exception | None = None) -> None:
        self.gate = threading.Event()
        self._error = error
        self._start = staging._native.start_copy
        self._calls = 0
        monkeypatch.setattr(staging._native, "start_copy", self)

    def __call__(self, pieces: Any, owner: Any) -> Any:
        self._calls += 1
        if self._calls % 2:
            return self._start(pieces, owner)
        return _Later(lambda: self._run(pieces, owner))

    def _run(self, pieces: Any, owner: Any) -> None:
        assert self.gate.wait(30)
        if self._error is not None:
            raise self._error
        self._start(pieces, owner).wait()


class _Later:
    def __init__(self, run: Any) -> None:
        self.wait = run


def test_the_step_waits_for_the_copy_and_the_copy_has_the_bits_from_before_it(tmp_path, monkeypatch):
    training, copies = Training(), HeldCopies(monkeypatch)
    expected = tensors(training.state())
    response = dcp.async_save(
        training.state(), storage_writer=StrataWriter(tmp_path / "c", overlap=training.optimizer), no_dist=True
    )
    assert isinstance(response, AsyncSaveResponse)
    training.run()  # changes gradients and the buffer, while the copy has not begun
    stepped = threading.Event()
    thread = threading.Thread(target=lambda: (training.optimizer.step(), stepped.set()))
    thread.start()
    assert not stepped.wait(0.2)
    copies.gate.set()
    thread.join(30)
    assert stepped.is_set()
    response.upload_completion.result(60)
    out = Training()
    loaded = out.state()
    load(loaded, tmp_path / "c")
    assert all(same_bits(*pair) for pair in zip(tensors(loaded), expected, strict=True))
    assert not all(same_bits(*pair) for pair in zip(tensors(training.state()), expected, strict=True))


def test_what_anything_but_the_step_changes_is_copied_at_the_call(tmp_path, monkeypatch):
    training, copies = Training(), HeldCopies(monkeypatch)
    buffer = training.model[1].running_mean
    expected = buffer.clone()
    future = StrataWriter(tmp_path / "c", overlap=training.optimizer).stage(training.state())
    buffer.fill_(7.0)
    copies.gate.set()
    assert same_bits(future.result(30)["model"]["1.running_mean"], expected)


def test_a_save_without_a_step_after_it_ends_too(tmp_path):
    training = Training()
    expected = tensors(training.state())
    for i in range(3):
        writer = StrataWriter(tmp_path / str(i), overlap=[training.optimizer])
        dcp.async_save(training.state(), storage_writer=writer, no_dist=True).upload_completion.result(60)
    loaded = Training().state()
    load(loaded, tmp_path / "2")
    assert all(same_bits(*pair) for pair in zip(tensors(loaded), expected, strict=True))
    assert arena_stats().busy_slots == 0


def test_hooks_do_not_pile_up(tmp_path):
    training = Training()
    for i in range(5):
        StrataWriter(tmp_path / str(i), overlap=training.optimizer).stage(training.state()).result(30)
        training.run()
        training.optimizer.step()
    assert len(training.optimizer._optimizer_step_pre_hooks) <= 1


def test_a_copy_that_fails_is_the_future_s_error_and_blocks_no_step(tmp_path, monkeypatch):
    training, copies = Training(), HeldCopies(monkeypatch, CheckpointError("cuda:0 is gone"))
    response = dcp.async_save(
        training.state(), storage_writer=StrataWriter(tmp_path / "c", overlap=training.optimizer), no_dist=True
    )
    copies.gate.set()
    with pytest.raises(CheckpointError, match="cuda:0 is gone"):
        response.upload_completion.result(30)
    training.optimizer.step()
    assert not list(tmp_path.rglob("*.distcp"))


def test_two_optimizers_both_wait(tmp_path, monkeypatch):
    one, other, copies = Training(), Training(), HeldCopies(monkeypatch)
    state = {"one": one.state(), "other": other.state()}
    future: Future[Any] = StrataWriter(tmp_path, overlap=(one.optimizer, other.optimizer)).stage(state)
    threads = [threading.Thread(target=training.optimizer.step) for training in (one, other)]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    copies.gate.set()
    for thread in threads:
        thread.join(30)
    assert future.result(30) is not None


@pytest.mark.parametrize("value", ["adam", [1], None])
def test_what_is_no_optimizer_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="overlap"):
        StrataWriter(tmp_path, overlap=value)
