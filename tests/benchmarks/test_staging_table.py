import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "staging.py"

# Each runs a benchmark, small.
pytestmark = pytest.mark.long


def test_every_contender_is_compared_with_a_memcpy_of_the_same_state():
    command = [sys.executable, str(SCRIPT), "--size-gb", "0.02", "--rounds", "2"]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    assert [line[0].strip().split(",")[0] for line in lines] == [
        *("memcpy", "torch_strata", "torch", "torch", "clone of each tensor"),
    ]
    assert [float(figure) for figure in lines[0][3].split("/")] == [1.0, 1.0, 1.0]
