import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"

# Each runs a benchmark, small.
pytestmark = pytest.mark.long


@pytest.fixture
def bench(tmp_path):
    def run(*arguments):
        answer = tmp_path / "answer.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--rounds", "2", "--trials", "1", "--keep", "1"]
        command += ["--stock-threads", "1", "--dir", str(tmp_path), "--json", str(answer)]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        return json.loads(answer.read_text())

    return run


def test_local_compares_raw_stock_and_ours_on_the_same_bytes(bench):
    tables = bench("local", "--size-gb", "0.01", "--no-memory")["tables"]
    assert len(tables) == 3
    for table in tables.values():
        kinds = [row["name"].split(",")[0].split(" ")[0] for row in table]
        assert sorted(kinds) == ["raw", "stock", "torch_strata"]


def test_ours_reads_a_slice_without_the_tensor_around_it(bench):
    tables = bench("slice")["tables"]
    assert tables["slice torch_strata"]["bytes_read"] <= 9 << 20
    assert tables["slice stock, thread_count=1"]["bytes_read"] >= 64 << 20


def test_memory_is_measured_in_a_process_of_its_own(bench):
    peaks = bench("peak", "--kind", "stock", "--size-gb", "0.01")["peaks_mb"]
    assert set(peaks) == {"save", "load"}
