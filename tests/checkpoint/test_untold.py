"""What a save and a load of a manager say in the log: what can be acted on, once, and nothing that was asked for."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.states import flip, largest_object
from torch_strata import CheckpointManager
from torch_strata.checkpoint import _payload
from torch_strata.errors import CheckpointError, LayoutMismatchError


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_payload, "_looked_at", set(_payload._PLAIN))
    monkeypatch.setattr(_payload, "_told", {"_io.BytesIO"})


def is_told(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING and record.name.startswith("torch_strata")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if is_told(record)]


def save(place: Path, state: dict[str, Any], step: int = 1, **settings: Any) -> CheckpointManager:
    manager = CheckpointManager(place, **settings)
    manager.save(state, step=step).result()
    return manager


@pytest.mark.parametrize("value", [np.float64(1.5), np.ones(3), (1, [np.float64(1.5)], {"a": 1}), {np.int64(3)}])
def test_a_value_that_loads_only_if_trusted_is_told_at_its_save(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match=r"trusted_classes=\[\.\.\.\] to StrataReader or CheckpointManager"):
        save(tmp_path / "run", {"best": value, "step": 1}).load(1)
    (words,) = told(caplog)
    assert words.startswith("'best' is saved, but loads only where") and "numpy" in words and "trusted_classes" in words
    save(tmp_path / "run", {"best": value, "other": value, "step": 2}, step=2)
    assert len(told(caplog)) == 1


def test_what_any_load_takes_is_saved_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "plain": (1, 2.5, None, True, "x", b"y", 1j, {"a": [1, {2}]}),
        "torch": (torch.Size([2]), torch.float16, torch.device("cpu"), torch.ones(2)),
        "empty": [],
    }
    save(tmp_path / "run", state).load(1)
    assert told(caplog) == []


def test_a_manager_converts_where_that_is_allowed(tmp_path: Path) -> None:
    manager = save(tmp_path / "run", {"w": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(LayoutMismatchError, match="allow_dtype_cast=True to CheckpointManager"):
        manager.load(1, {"w": torch.zeros(3)})
    state = {"w": torch.zeros(3)}
    CheckpointManager(tmp_path / "run", allow_dtype_cast=True).load(1, state)
    assert state["w"].dtype is torch.float32 and state["w"].tolist() == [1, 1, 1]


def test_damage_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = save(tmp_path / "run", {"w": torch.ones(50_000)}, step=1)
    save(tmp_path / "run", {"w": torch.ones(50_000)}, step=2)
    flip(largest_object(tmp_path / "run/step-2"))
    with caplog.at_level(logging.DEBUG):
        manager.load("latest", {"w": torch.zeros(50_000)})
    (words,) = told(caplog)
    assert "step-2 is damaged and is passed over" in words and "checksum mismatch" in words and "\n" not in words
    assert all(record.exc_info is None for record in caplog.records if is_told(record))
    assert any(record.exc_info for record in caplog.records if record.levelno == logging.DEBUG)


def test_a_single_process_is_told_of_no_missing_group(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = save(tmp_path / "run", {"w": torch.ones(3), "step": 1})
        assert manager.load()["step"] == 1
        manager.load("latest", {"w": torch.zeros(3), "step": 0})


def test_what_is_named_for_numpy_is_all_that_has_to_be_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save(tmp_path / "run", {"rng": np.random.get_state(), "step": 1})
    (words,) = told(caplog)
    with pytest.raises(CheckpointError) as caught:
        manager.load("latest")
    reconstruct, *_ = np.ones(1).__reduce__()
    needed = (reconstruct, np.dtype, np.ndarray, np.dtypes.UInt32DType)
    for said in (words, str(caught.value)):
        assert all(f"{kind.__module__}.{kind.__qualname__}" in said for kind in needed)
    found = CheckpointManager(tmp_path / "run", trusted_classes=needed).load("latest")
    assert np.array_equal(found["rng"][1], np.random.get_state()[1])
