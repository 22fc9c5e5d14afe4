import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lifecycle.py"

# Each runs a benchmark, small.
pytestmark = pytest.mark.long


def run(tmp_path, *arguments):
    command = [sys.executable, str(SCRIPT), *arguments, "--rounds", "2", "--dir", str(tmp_path)]
    subprocess.run([*command, "--json", str(tmp_path / "found.json")], check=True, capture_output=True, timeout=150)
    return json.loads((tmp_path / "found.json").read_text())


def test_each_type_writes_what_it_says(tmp_path):
    found = run(tmp_path, "types", "--layers", "1", "--width", "64", "--every", "1")
    for costs in found.values():
        assert all(len(own["written_bytes"]) == 2 for own in costs.values())

    def share(training, kind):
        return found[training][kind]["written_bytes"][-1] / found[training]["full"]["written_bytes"][-1]

    assert share("lora", "incremental") < 0.2
    assert share("adamw", "incremental") > 0.9
    # So small a model is mostly its embedding, tied to the output layer: safetensors hold it under each name.
    assert 0.6 < share("adamw", "model_only") < 0.66
    assert 0.64 < share("adamw", "optimizer_only") < 0.7
    assert share("bf16", "incremental, compressed") < 0.6


def test_verify_is_compared_with_reading_the_same_files(tmp_path):
    found = run(tmp_path, "verify", "--size-gb", "0.05")
    for table in found.values():
        assert [row["name"].split(",")[0].split(" ")[0] for row in table].count("raw") == 3
        assert table[-1]["name"] == "torch_strata.verify"
