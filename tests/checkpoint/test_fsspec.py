"""fsspec's view of our stores: what torch's own fsspec storage and any user of fsspec needs."""

import os
import pickle
import tomllib
from importlib import import_module

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FsspecReader, FsspecWriter

from tests.support import REPOSITORY, run_python
from tests.support.s3 import gateway, options, refusal
from torch_strata import StorageConfig
from torch_strata.checkpoint import _fsspec
from torch_strata.checkpoint._fsspec import S3FileSystem
from torch_strata.errors import ConfigError, StoragePermissionError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:fsync not supported")


@pytest.fixture
def files(bucket):
    """A file system in whose bucket lie run/step-1/{a,b}, run/step-20/.metadata and run/log."""
    for key, data in (("step-1/a", b"aa"), ("step-1/b", b""), ("step-20/.metadata", b"m"), ("log", b"line")):
        bucket.put(f"run/{key}", data)
    return S3FileSystem(**options(bucket.endpoint))


@pytest.fixture
def registered(monkeypatch):
    """As if the package were installed: a checkout need not be."""
    known = import_module("fsspec.registry").known_implementations
    for scheme, home in entry_points().items():
        monkeypatch.setitem(known, scheme, {"class": home.replace(":", ".")})


def entry_points() -> dict[str, str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["fsspec.specs"]


def test_every_entry_point_leads_to_the_file_system_of_its_scheme(registered):
    assert {"strata+s3", "strata+gs", "strata+az"} <= set(entry_points())
    for scheme in entry_points():
        assert f"strata+{fsspec.get_filesystem_class(scheme).scheme}" == scheme


def test_the_schemes_of_others_are_not_taken_without_install():
    assert [scheme for scheme in entry_points() if not scheme.startswith("strata+")] == []


def test_the_file_system_needs_no_torch():
    code = "import sys, torch_strata.checkpoint._fsspec\nassert 'torch' not in sys.modules"
    run_python(code)


def test_torchs_fsspec_storage_saves_and_loads(bucket, registered):
    place = f"strata+s3://{bucket.name}/run/step-1"
    state = {"w": torch.arange(600_000.0), "n": {"a": 1}}
    for value in (1, 2):  # the second replaces the first
        state["n"]["a"] = value
        dcp.save(state, storage_writer=FsspecWriter(place, thread_count=2))
    out = {"w": torch.zeros(600_000), "n": {"a": 0}}
    dcp.load(out, storage_reader=FsspecReader(place))
    assert out["n"]["a"] == 2
    assert torch.equal(out["w"], state["w"])
    assert bucket.sizes().keys() >= {"run/step-1/.metadata", "run/step-1/__0_0.distcp", "run/step-1/__0_1.distcp"}
    assert bucket.open_uploads() == []


def test_a_checkpoint_id_with_our_scheme_is_enough(bucket, registered):
    place = f"strata+s3://{bucket.name}/run/step-1"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=place)
    out = {"w": torch.zeros(3)}
    dcp.load(out, checkpoint_id=place)
    assert out["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [0, 1, 5_000_000, 40_000_000])
def test_a_file_comes_back_at_any_position(bucket, files, size):
    data = os.urandom(size)
    path = f"{bucket.name}/big"
    with files.open(path, "wb") as file:
        for start in range(0, size, 3_000_001):
            file.write(data[start : start + 3_000_001])
    assert bucket.get("big") == data
    assert bucket.open_uploads() == []
    with files.open(path, "rb") as file:
        for start in (size // 2, 0, max(size - 5, 0)):
            file.seek(start)
            assert file.read(1000) == data[start : start + 1000]
    assert files.cat_file(path) == data


def test_a_write_that_fails_leaves_nothing_and_keeps_what_was_there(bucket, files):
    with pytest.raises(RuntimeError, match="in the middle"), files.open(f"{bucket.name}/run/log", "wb") as file:
        file.write(b"x" * 20_000_000)
        raise RuntimeError("in the middle")
    with pytest.raises(RuntimeError), files.open(f"{bucket.name}/run/new", "wb"):
        raise RuntimeError("before the first byte")
    assert bucket.get("run/log") == b"line"
    assert "run/new" not in bucket.sizes()
    assert bucket.open_uploads() == []


def test_a_file_is_not_there_before_it_is_closed(bucket, files):
    with files.open(f"{bucket.name}/run/new", "wb") as file:
        file.write(b"x" * 20_000_000)
        assert "run/new" not in bucket.sizes()
    assert bucket.sizes()["run/new"] == 20_000_000


def test_a_transaction_keeps_all_or_nothing(bucket, files):
    with files.transaction, files.open(f"{bucket.name}/kept", "wb") as file:
        file.write(b"x")
    with pytest.raises(RuntimeError), files.transaction:
        with files.open(f"{bucket.name}/dropped", "wb") as file:
            file.write(b"x")
        raise RuntimeError
    assert "kept" in bucket.sizes()
    assert "dropped" not in bucket.sizes()


def test_folders_are_listed_as_a_trainer_looks_for_steps(bucket, files):
    run = f"{bucket.name}/run"
    assert sorted(files.ls(f"s3://{run}", detail=False)) == [f"{run}/log", f"{run}/step-1", f"{run}/step-20"]
    assert [files.isdir(f"{run}/{name}") for name in ("step-1", "step-2", "log", "")] == [True, False, False, True]
    assert [files.isfile(f"{run}/{name}") for name in ("step-20/.metadata", "step-1", "log")] == [True, False, True]
    assert files.exists(bucket.name)
    assert not files.exists(f"{run}/step-2")  # of step-20 only the name begins like it
    assert files.find(run) == [f"{run}/{name}" for name in ("log", "step-1/a", "step-1/b", "step-20/.metadata")]
    assert files.glob(f"{run}/step-*/a") == [f"{run}/step-1/a"]
    assert files.size(f"{run}/step-1/a") == 2
    assert files.ls(f"{run}/log") == [{"name": f"{run}/log", "size": 4, "type": "file"}]


@pytest.mark.parametrize("call", ["info", "ls", "cat_file", "size"])
def test_what_is_not_there_is_file_not_found(bucket, files, call):
    with pytest.raises(FileNotFoundError):
        getattr(files, call)(f"{bucket.name}/run/none")


@pytest.mark.parametrize("call", ["exists", "isdir", "isfile", "find", "glob", "ls", "rm"])
def test_a_store_that_refuses_is_not_taken_for_an_empty_one(bucket, monkeypatch, call):
    monkeypatch.setattr(_fsspec, "_default", StorageConfig(max_tries=1))
    with gateway(bucket.endpoint, lambda request, forward: refusal(403, "AccessDenied")) as endpoint:
        files = S3FileSystem(**options(endpoint), skip_instance_cache=True)
        path = f"{bucket.name}/run/step-*" if call == "glob" else f"{bucket.name}/run/step-1"
        with pytest.raises(StoragePermissionError):
            getattr(files, call)(path)


def test_a_file_that_was_never_closed_is_not_written(bucket, files):
    file = files.open(f"{bucket.name}/run/new", "wb")
    file.write(b"half of it")
    del file
    assert "run/new" not in bucket.sizes()


def test_a_folder_is_removed_with_all_that_is_in_it(bucket, files):
    with dcp_saved(bucket, "run/step-1"):
        files.rm(f"{bucket.name}/run/step-1", recursive=True)
    assert set(bucket.sizes()) == {"run/step-20/.metadata", "run/log"}


class dcp_saved:
    """A checkpoint of ours below `prefix`, with all the objects it needs."""

    def __init__(self, bucket, prefix):
        self._place = bucket.url(prefix)

    def __enter__(self):
        from torch_strata import StrataWriter

        dcp.save({"w": torch.ones(3)}, storage_writer=StrataWriter(self._place))

    def __exit__(self, *error):
        pass


def test_files_are_copied_and_renamed(bucket, files):
    run = f"{bucket.name}/run"
    files.cp_file(f"{run}/log", f"{run}/log-2")
    files.rename(f"{run}/step-1/a", f"{run}/step-1/c")
    files.mv(f"{run}/step-20", f"{run}/step-30", recursive=True)
    assert bucket.get("run/log-2") == b"line"
    assert set(bucket.sizes()) == {f"run/{n}" for n in ("log", "log-2", "step-1/b", "step-1/c", "step-30/.metadata")}


def test_folders_need_no_making(bucket, files):
    files.mkdir(f"{bucket.name}/folder")
    files.makedirs(f"{bucket.name}/folder/deep", exist_ok=True)
    assert not files.exists(f"{bucket.name}/folder")


def test_a_file_system_is_pickled_with_its_options(bucket, files):
    copy = pickle.loads(pickle.dumps(files))
    assert copy.cat_file(f"{bucket.name}/run/log") == b"line"


@pytest.mark.parametrize("mode", ["ab", "xb", "r+b"])
def test_other_modes_are_refused_by_name(files, bucket, mode):
    with pytest.raises(ConfigError, match="rb"):
        files.open(f"{bucket.name}/run/log", mode)


def test_unknown_options_are_refused_by_name(bucket):
    with pytest.raises(ConfigError, match="no_such_option"):
        S3FileSystem(no_such_option="x").ls(bucket.name)
