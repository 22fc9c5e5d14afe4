"""Each trainer's page in docs/guide, with the real packages: two ranks, stopped and resumed, lose nothing."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.packaging.test_docs import FENCE
from tests.support import REPOSITORY
from torch_strata import verify

# A trainer takes ten seconds to import, more on a busy machine, and each test starts several runs of two ranks.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PYTHON = REPOSITORY / ".venv-peers/bin/python"
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def script_of(page: str) -> str:
    """The one script of a page that says how to start it."""
    fences = FENCE.findall((REPOSITORY / f"docs/guide/{page}.md").read_text())
    (script,) = [code for info, code in fences if info == "python torchrun"]
    return script


def train(script: str, folder: Path, place: object, steps: int) -> dict[int, float]:
    """Run a page's script up to `steps` on two ranks; the loss that it printed for each step."""
    assert PYTHON.exists(), "the trainers are missing: make setup-peers"
    path = folder / "train.py"
    path.write_text(script)
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if "fsdp_" in script:  # through Accelerate
        command.append(REPOSITORY / "tests/peers/on_cpu.py")
    environment = {"PYTHONPATH": str(REPOSITORY), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, path, str(place), str(steps)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=180)
    finally:
        if process.poll() is None:  # its ranks hold the pipes, too
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{output[-3000:]}\n{errors[-6000:]}"
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


@pytest.fixture(scope="module")
def expected() -> dict[int, float]:
    """Losses of the pages' small model, without any trainer: on all ranks the data are the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = {}
    for step in range(1, 7):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = pytest.approx(loss.item(), rel=1e-3)
    return losses


def saved_by_us(folder: Path) -> list[Path]:
    """The checkpoints below `folder`: all ours, sound, and readable by stock torch."""
    found = sorted(path.parent for path in folder.rglob(".metadata"))
    for place in found:
        assert (place / ".strata").exists(), f"torch saved {place}"
        assert verify(place).is_sound
        assert FileSystemReader(place).read_metadata().state_dict_metadata
    return found


def test_accelerate_resumes_and_its_own_tool_merges_what_we_saved(tmp_path, expected):
    script, place = script_of("accelerate"), tmp_path / "run"
    assert train(script, tmp_path, place, 4) | train(script, tmp_path, place, 6) == expected
    assert [str(path.relative_to(place)) for path in saved_by_us(place)] == [
        f"{step}/{part}" for step in (2, 4, 6) for part in ("optimizer_0", "pytorch_model_fsdp_0")
    ]
    merged = tmp_path / "merged"
    code = (
        "import sys; from accelerate.utils import merge_fsdp_weights\n"
        "merge_fsdp_weights(sys.argv[1], sys.argv[2], safe_serialization=False)"
    )
    command = [PYTHON, "-c", code, place / "6/pytorch_model_fsdp_0", merged]
    subprocess.run(command, check=True, timeout=150, cwd=tmp_path)
    shapes = {name: tuple(value.shape) for name, value in torch.load(merged / "pytorch_model.bin").items()}
    assert shapes == {"0.weight": (16, 8), "0.bias": (16,), "2.weight": (4, 16), "2.bias": (4,)}


def test_the_trainer_of_transformers_resumes(tmp_path):
    script, place = script_of("transformers"), tmp_path / "run"
    whole = train(script, tmp_path, tmp_path / "whole", 6)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    head, rest = train(script, tmp_path, place, 4), train(script, tmp_path, place, 6)
    assert (list(head), list(rest)) == ([1, 2, 3, 4], [5, 6])
    assert head | rest == whole
    assert len(saved_by_us(place)) == 4  # model and optimizer of the last two


def test_lightnings_own_strategy_resumes_on_a_file_system(tmp_path, expected):
    script, place = script_of("lightning"), tmp_path / "run"
    script = script.replace("strategy=AnywhereStrategy()", "strategy=ModelParallelStrategy()")
    head, rest = train(script, tmp_path, place, 4), train(script, tmp_path, place, 6)
    assert list(rest) == [5, 6]
    assert head | rest == expected
    assert [path.name for path in saved_by_us(place)] == ["step=4.ckpt", "step=6.ckpt"]


@pytest.mark.parametrize("page", ["lightning", "torchtitan"])
def test_a_run_in_a_bucket_resumes_and_leaves_nothing_on_disk(page, tmp_path, bucket, expected):
    script = script_of(page)
    head, rest = train(script, tmp_path, bucket.url("run"), 4), train(script, tmp_path, bucket.url("run"), 6)
    assert list(rest) == [5, 6]
    assert head | rest == expected
    saved = {key.removesuffix("/.metadata") for key in bucket.sizes("run/") if key.endswith("/.metadata")}
    assert saved
    for place in saved:
        assert any(key.startswith(f"{place}/.strata/") for key in bucket.sizes("run/")), f"torch saved {place}"
        assert verify(bucket.url(place)).is_sound
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert bucket.open_uploads() == []


def test_a_run_that_torch_saved_goes_on_with_us(tmp_path, expected):
    script, place = script_of("torchtitan"), tmp_path / "run"
    without = script.replace("torch_strata.install()\n", "")
    assert without != script
    head = train(without, tmp_path, place, 4)
    assert not any(place.rglob(".strata"))
    assert head | train(script, tmp_path, place, 6) == expected
    assert (place / "step-6/.strata").exists()
