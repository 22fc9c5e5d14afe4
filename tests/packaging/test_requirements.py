"""What `make setup` and pip install is enough to work with."""

import json
import re
from importlib import metadata
from pathlib import Path

from tests.support import REPOSITORY, run_python

# Refuses what other distributions of this environment brought, as if they were not installed.
SAVE_AND_LOAD = """
import json, sys
refused = frozenset(json.loads(sys.argv[1]))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in refused:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Refuse())

import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch_strata import StrataReader, StrataWriter
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/group", rank=0, world_size=1)
place = sys.argv[2] + "/c"
dcp.save({"w": torch.ones(3), "step": 1}, storage_writer=StrataWriter(place))
out = {"w": torch.zeros(3), "step": 0}
dcp.load(out, storage_reader=StrataReader(place))
dist.destroy_process_group()
print(out["w"].tolist(), out["step"])
"""


def locked() -> set[str]:
    lines = (REPOSITORY / "requirements/run.txt").read_text().splitlines()
    return {normal(re.split(r"[=<>;\s]", line)[0]) for line in lines if line}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_ranks_save_and_load_with_what_make_setup_installs(tmp_path: Path) -> None:
    installed = locked() | {"torch-strata"}
    others = [
        module
        for module, owners in metadata.packages_distributions().items()
        if not {normal(owner) for owner in owners} & installed and "." not in module
    ]
    assert "pytest" in others
    assert run_python(SAVE_AND_LOAD, json.dumps(others), str(tmp_path)) == "[1.0, 1.0, 1.0] 1\n"


def test_the_lock_holds_every_requirement_of_the_package() -> None:
    requirements = (REPOSITORY / "pyproject.toml").read_text()
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", requirements, re.MULTILINE)
    assert {normal(re.split(r"[=<>]", name)[0]) for name in re.findall(r'"([^"]+)"', line)} <= locked()
