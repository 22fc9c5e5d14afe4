import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "async_training.py"

# Each runs a benchmark, small.
pytestmark = pytest.mark.long


def test_every_way_to_save_is_compared_with_training_that_does_not(tmp_path):
    small = ["--layers", "1", "--width", "64", "--every", "2", "--rounds", "2", "--dir", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *small, "--json", str(tmp_path / "found.json")]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    names = [line[0].strip() for line in lines]
    assert names == ["no save", "torch_strata.async_save", "dcp.async_save, stock"]
    assert [float(figure) for figure in lines[0][-1].split("/")] == [1.0, 1.0, 1.0]
    turns = json.loads((tmp_path / "found.json").read_text())["turns"]
    assert all(len(turns[name]) == 2 for name in names)
    assert all(turn["stall"] > 0 and turn["until_done"] > 0 for name in names[1:] for turn in turns[name])
