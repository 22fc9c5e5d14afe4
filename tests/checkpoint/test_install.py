"""install(): DCP's own choice of storage becomes ours, and uninstall() leaves no trace."""

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat

import torch_strata
from tests.checkpoint.ranks import run_ranks
from torch_strata import StorageConfig, StrataReader, StrataWriter
from torch_strata.checkpoint._fsspec import PLAIN
from torch_strata.checkpoint.install import PATCHES
from torch_strata.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    torch_strata.uninstall()


def state() -> dict:
    return {"w": torch.arange(12.0).reshape(3, 4), "step": 7}


def empty() -> dict:
    return {"w": torch.zeros(3, 4), "step": 0}


def assert_is_state(found: dict) -> None:
    assert found["step"] == 7
    assert torch.equal(found["w"], state()["w"])


def is_ours(place: Path) -> bool:
    """Whether a StrataWriter saved there: stock knows no `.strata`."""
    assert (place / ".metadata").exists()
    return (place / ".strata").exists()


def names_in_torch() -> dict:
    found = {}
    for patch in PATCHES:
        owner, name = patch.owner()
        found[patch.module, patch.name] = vars(owner)[name]
    return found


def test_uninstall_puts_the_very_objects_back():
    known = import_module("fsspec.registry").known_implementations  # fsspec.registry is the mapping in it
    schemes, before_known = dict(fsspec.registry), dict(known)
    before = names_in_torch()
    torch_strata.install()
    assert [key for key, value in names_in_torch().items() if value is before[key]] == []
    torch_strata.install(local=False)
    torch_strata.uninstall()
    assert [key for key, value in names_in_torch().items() if value is not before[key]] == []
    assert (dict(fsspec.registry), known) == (schemes, before_known)
    torch_strata.uninstall()  # does nothing
    assert names_in_torch() == before


# Names are the table's business: this looks for what the table forgot, in whatever torch is here.
def test_the_table_names_every_place_where_dcp_picks_the_storage():
    folder = Path(dcp.__file__).parent
    tables = {(patch.module, patch.name) for patch in PATCHES}
    for path in folder.glob("*.py"):
        module = f"{dcp.__name__}.{path.stem}"
        text = path.read_text()
        if path.stem not in ("_storage_utils", "__init__") and " _storage_setup(" in text:
            assert (module, "_storage_setup") in tables
        if "=FileSystemWriter(" in text:
            assert (module, "FileSystemWriter") in tables
        if "=FileSystemReader(" in text:
            assert (module, "FileSystemReader") in tables


def test_a_fresh_process_gets_torchs_own_names_back():
    # format_utils is imported by install() itself there, after whose import nothing may be left of ours.
    code = (
        "import torch.distributed.checkpoint as dcp, torch_strata\n"
        "with torch_strata.install(): pass\n"
        "from torch.distributed.checkpoint import format_utils, filesystem\n"
        "assert format_utils.FileSystemReader is filesystem.FileSystemReader is dcp.FileSystemReader\n"
        "assert format_utils.FileSystemWriter is filesystem.FileSystemWriter is dcp.FileSystemWriter"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_context_ends_with_what_was_before(tmp_path):
    with torch_strata.install(local=False):
        with torch_strata.install():
            dcp.save(state(), checkpoint_id=tmp_path / "inner")
        dcp.save(state(), checkpoint_id=tmp_path / "outer")
    dcp.save(state(), checkpoint_id=tmp_path / "after")
    assert [is_ours(tmp_path / name) for name in ("inner", "outer", "after")] == [True, False, False]


def test_uninstall_inside_a_context_is_final():
    before = names_in_torch()
    with torch_strata.install(), torch_strata.install():
        torch_strata.uninstall()
    assert names_in_torch() == before
    torch_strata.install()
    assert names_in_torch() != before


def test_a_name_that_somebody_else_replaced_is_left_to_them(monkeypatch):
    torch_strata.install()
    ours = dcp.async_save
    theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "async_save", theirs)
        torch_strata.uninstall()
        assert dcp.async_save is theirs
    dcp.async_save = ours.__wrapped__


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_checkpoint_id_is_enough(tmp_path, as_path):
    place = as_path(tmp_path / "c")
    with torch_strata.install():
        dcp.save(state(), checkpoint_id=place)
        out = empty()
        dcp.load(out, checkpoint_id=place)
    assert is_ours(tmp_path / "c")
    assert_is_state(out)


def test_what_was_saved_inside_loads_with_torch_alone(tmp_path):
    with torch_strata.install():
        dcp.save(state(), checkpoint_id=tmp_path / "c")
    out = empty()
    dcp.load(out, checkpoint_id=tmp_path / "c")
    assert_is_state(out)


def test_local_paths_stay_with_torch_if_asked(tmp_path):
    with torch_strata.install(local=False):
        dcp.save(state(), checkpoint_id=tmp_path / "c")
        assert type(dcp.FileSystemWriter(tmp_path)) is FileSystemWriter
        dcp.save(state(), checkpoint_id=f"file://{tmp_path}/u")
    assert not is_ours(tmp_path / "c")
    assert is_ours(tmp_path / "u")


def test_storage_that_is_passed_stays_what_it_is(tmp_path):
    with torch_strata.install():
        dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "a"))
        dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "b"), checkpoint_id=tmp_path / "c")
        dcp.async_save(state(), storage_writer=FileSystemWriter(tmp_path / "d")).result()
    assert [is_ours(tmp_path / name) for name in "acd"] == [False, False, False]


def test_nothing_to_save_to_is_torchs_error():
    with torch_strata.install(), pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.save(state())


def test_an_async_save_takes_its_copy_with_our_writer(tmp_path):
    changing = {"w": torch.arange(12.0).reshape(3, 4), "step": 7}
    with torch_strata.install():
        done = dcp.async_save(changing, checkpoint_id=tmp_path / "c")
        changing["w"].zero_()
        done.result()
    out = empty()
    dcp.load(out, checkpoint_id=tmp_path / "c")
    assert is_ours(tmp_path / "c")
    assert_is_state(out)


def save_in_a_process(rank: int, place: str, early: bool) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    torch_strata.install()
    save = async_save if early else dcp.async_save
    save(state(), checkpoint_id=place, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    torch_strata.uninstall()


@pytest.mark.parametrize("early", [False, True], ids=["by its name", "taken before install"])
def test_a_process_that_saves_for_us_needs_no_install_of_its_own(tmp_path, early):
    (tmp_path / "ranks").mkdir()
    run_ranks(tmp_path / "ranks", 1, save_in_a_process, str(tmp_path / "c"), early)
    assert is_ours(tmp_path / "c")


def test_format_utils_read_and_write_through_us(tmp_path):
    torch.save(state(), tmp_path / "in.pt")
    with torch_strata.install():
        format_utils.torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "c")
        format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "out.pt")
    assert is_ours(tmp_path / "c")
    assert_is_state(torch.load(tmp_path / "out.pt"))


def test_where_filesystem_storage_is_named_it_is_ours(tmp_path):
    with torch_strata.install():
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
        reader = dcp.FileSystemReader(path=tmp_path / "c")
        out = empty()
        dcp.load(out, storage_reader=reader)
    assert is_ours(tmp_path / "c")
    assert type(reader) is StrataReader
    assert_is_state(out)


def test_the_whole_signature_of_filesystem_writer_is_accepted(tmp_path):
    with torch_strata.install():
        in_order = dcp.FileSystemWriter(tmp_path, False, False, 4, 1, True, False, None, SerializationFormat.TORCH_SAVE)
        named = dcp.FileSystemWriter(
            path=tmp_path,
            single_file_per_rank=False,
            sync_files=False,
            thread_count=4,
            per_thread_copy_ahead=1,
            cache_staged_state_dict=True,
            overwrite=False,
            _extensions=[],
            serialization_format=SerializationFormat.TORCH_SAVE,
        )
        with pytest.raises(TypeError):
            dcp.FileSystemWriter(tmp_path, no_such_option=1)
    for writer in (in_order, named):
        assert type(writer) is StrataWriter
        assert not writer._overwrite


@pytest.mark.parametrize(
    "asked",
    [{"_extensions": [object()]}, {"serialization_format": SerializationFormat.SAFETENSORS}],
    ids=["extensions", "safetensors"],
)
def test_what_we_do_not_write_is_refused_by_name(tmp_path, asked):
    (name,) = asked
    with torch_strata.install(), pytest.raises(ConfigError, match=name):
        dcp.FileSystemWriter(tmp_path, **asked)


def test_extensions_on_the_way_back_are_refused_by_name(tmp_path):
    with torch_strata.install(), pytest.raises(ConfigError, match="_extension_registry"):
        dcp.FileSystemReader(tmp_path, _extension_registry=object())


def test_a_subclass_of_the_named_class_is_torchs(tmp_path):
    with torch_strata.install():

        class Theirs(dcp.FileSystemWriter):
            pass

        dcp.save(state(), storage_writer=Theirs(tmp_path / "c"))
    assert not is_ours(tmp_path / "c")


def test_torchs_own_writers_are_still_instances_and_pickle(tmp_path):
    with torch_strata.install():
        writer = FileSystemWriter(tmp_path)
        assert isinstance(writer, dcp.FileSystemWriter)
        assert isinstance(FileSystemReader(tmp_path), dcp.FileSystemReader)
        assert issubclass(dcp.HuggingFaceStorageWriter, dcp.FileSystemWriter)
        assert not isinstance(object(), dcp.FileSystemWriter)
        assert type(pickle.loads(pickle.dumps(writer))) is FileSystemWriter


def test_a_url_that_went_through_pathlib_is_an_error_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch_strata.install(local=False), pytest.raises(ConfigError, match="pass URLs as str"):
        dcp.save(state(), checkpoint_id=Path("s3://bucket/c"))
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_store_are_for_urls(tmp_path):
    with torch_strata.install(storage_options={"region": "nowhere"}):
        dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert is_ours(tmp_path / "c")


@pytest.mark.parametrize(
    "setting",
    [
        {"local": "no"},
        {"config": {"fsync": False}},
        {"storage_options": {"region": 1}},
        {"allow_dtype_cast": 1},
        {"trusted_classes": ["collections.Counter"]},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_wrong_setting_is_refused_when_given_and_changes_nothing(setting):
    before = names_in_torch()
    with pytest.raises(ConfigError):
        torch_strata.install(**setting)
    assert names_in_torch() == before


def test_settings_reach_the_reader(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "c")
    halves = {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "step": 0}
    with torch_strata.install(allow_dtype_cast=True):
        dcp.load(halves, checkpoint_id=tmp_path / "c")
    assert torch.equal(halves["w"], state()["w"].bfloat16())


def test_a_url_goes_to_the_store_with_the_settings(bucket, monkeypatch):
    from tests.support.s3 import options

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    place = bucket.url("run/step-1")
    with torch_strata.install(config=StorageConfig(storage_options=options(bucket.endpoint))):
        dcp.save(state(), checkpoint_id=place)
        out = empty()
        dcp.load(out, checkpoint_id=place)
        assert fsspec.filesystem("s3").exists(f"{place}/.metadata")
    assert_is_state(out)
    assert any(key.startswith("run/step-1/.strata/") for key in bucket.sizes())


def test_every_scheme_of_others_is_theirs_again():
    def owners() -> list:
        return [fsspec.registry.get(scheme) for scheme in PLAIN]

    before = owners()
    with torch_strata.install():
        assert [fsspec.get_filesystem_class(scheme) for scheme in PLAIN] == list(PLAIN.values())
    assert owners() == before


def test_a_spare_install_is_cheap_on_import():
    code = "import sys, torch_strata\nassert 'fsspec' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert import_module("torch_strata").install is torch_strata.install
