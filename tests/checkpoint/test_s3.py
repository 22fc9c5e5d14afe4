"""The main job against an S3 server: saved, loaded, resharded, overwritten, verified, and read by stock torch."""

import json
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.ranks import run_ranks
from tests.checkpoint.states import failure_of, load, same_bits, save
from tests.support.kill import in_child
from tests.support.s3 import Answer, Bucket, Request, environment, gateway, options
from torch_strata import (
    CheckpointExistsError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    StorageConfig,
    StrataReader,
    StrataWriter,
    verify,
)
from torch_strata.cli import main

SMALL_PARTS = StorageConfig(part_bytes=5 << 20)
RUN = "run/step-1"


def state(step: int = 1) -> dict[str, Any]:
    """Three parts of 5 MiB; everything differs from step to step."""
    return {
        "big": torch.arange(3_500_000, dtype=torch.float32) + step,
        "half": torch.full((33, 65), 0.5 * step, dtype=torch.bfloat16),
        "column": (torch.arange(24.0) * step).reshape(4, 6)[:, 1],
        "flag": torch.tensor([step % 2 == 0, True]),
        "empty": torch.zeros(0, 3),
        "opt": {"step": step, "betas": (0.9, 0.5 * step), "text": f"{step} " * 3000},
    }


def zeros() -> dict[str, Any]:
    blank = {key: torch.zeros_like(value) for key, value in state().items() if isinstance(value, torch.Tensor)}
    return {**blank, "opt": {"step": 0, "betas": (0.0, 0.0), "text": ""}}


def holds(found: dict[str, Any], step: int) -> bool:
    """Whether `found` is the state of `step`, bit for bit."""
    expected = state(step)
    tensors = [key for key in expected if key != "opt"]
    return found["opt"] == expected["opt"] and all(same_bits(found[key], expected[key]) for key in tensors)


def loaded(url: str, **reader_options: Any) -> dict[str, Any]:
    found = zeros()
    load(found, url, **reader_options)
    return found


def leftovers(bucket: Bucket) -> list[str]:
    """What only an interrupted save leaves: uploads, their records, probes."""
    hidden = [key for key in bucket.sizes() if "/uploads/" in key or "/probe-" in key]
    return [*bucket.open_uploads(), *hidden]


def test_a_save_loads_with_the_environment_alone(bucket):
    writer = save(state(), bucket.url(RUN), config=SMALL_PARTS)
    assert writer.stats.fenced and writer.stats.warnings == ()
    assert holds(loaded(bucket.url(RUN)), 1)
    assert leftovers(bucket) == []
    assert sorted(key.rpartition("/")[2][:3] for key in bucket.sizes(RUN + "/")) == [".me", "000", "__0"]


def test_options_alone_reach_the_store(bucket, monkeypatch):
    for name in environment(""):
        monkeypatch.delenv(name)
    given = options(bucket.endpoint)
    save(state(), bucket.url(RUN), storage_options=given)
    assert holds(loaded(bucket.url(RUN), config=StorageConfig(storage_options=given)), 1)
    assert verify(bucket.url(RUN), storage_options=given).is_sound


def test_options_beat_the_environment(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nothing listens
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    save(state(), bucket.url(RUN), storage_options=options(bucket.endpoint))
    assert holds(loaded(bucket.url(RUN), storage_options=options(bucket.endpoint)), 1)


def test_an_unknown_option_is_refused_when_the_writer_is_used(bucket):
    error = failure_of(lambda: save(state(), bucket.url(RUN), storage_options={"regoin": "x"}))
    assert isinstance(error, ConfigError) and "regoin" in str(error)
    assert bucket.sizes() == {}


def test_a_large_object_goes_up_in_parts_of_the_configured_size(bucket):
    tensor = torch.arange(18 << 20, dtype=torch.float32)  # 72 MiB
    save({"w": tensor}, bucket.url(RUN), config=StorageConfig(part_bytes=6 << 20))
    (key,) = (key for key in bucket.sizes() if key.endswith(".distcp"))
    part = bucket.client.head_object(Bucket=bucket.name, Key=key, PartNumber=1)
    assert (part["PartsCount"], part["ContentLength"]) == (13, 6 << 20)
    found = {"w": torch.zeros_like(tensor)}
    reader = StrataReader(bucket.url(RUN))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["w"], tensor)
    assert reader.stats.blocks_verified == 18 and reader.stats.unverified_bytes == 0
    assert leftovers(bucket) == []


def test_a_load_of_some_keys_reads_only_those(bucket):
    save(state(), bucket.url(RUN))
    reader = StrataReader(bucket.url(RUN))
    found = {"half": torch.zeros(33, 65, dtype=torch.bfloat16)}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert same_bits(found["half"], state()["half"])
    assert reader.stats.bytes_read < 20_000
    by_key = _load_state_dict_from_keys({"opt"}, storage_reader=StrataReader(bucket.url(RUN)))
    assert by_key == {"opt": state()["opt"]}


ROWS = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)


def save_rows(rank: int, endpoint: str, url: str) -> None:
    os.environ.update(environment(endpoint))
    mesh = init_device_mesh("cpu", (2,))
    local = ROWS[rank * 512 :][:512].clone()
    sharded = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "own": {f"rank{rank}": rank}}
    dcp.save(sharded, storage_writer=StrataWriter(url))


def load_columns(rank: int, endpoint: str, url: str) -> bool:
    os.environ.update(environment(endpoint))
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(1024, 512)
    own = {f"rank{rank}": -1}
    dcp.load({"w": DTensor.from_local(local, mesh, [Shard(1)]), "own": own}, storage_reader=StrataReader(url))
    return torch.equal(local, ROWS[:, rank * 512 :][:, :512]) and own == {f"rank{rank}": rank}


def test_ranks_load_other_shards_than_they_saved(bucket, tmp_path):
    run_ranks(tmp_path, 2, save_rows, bucket.endpoint, bucket.url(RUN))
    assert run_ranks(tmp_path, 2, load_columns, bucket.endpoint, bucket.url(RUN)) == [True, True]
    whole = {"w": torch.zeros(1024, 1024), "own": {"rank0": -1, "rank1": -1}}
    load(whole, bucket.url(RUN))
    assert torch.equal(whole["w"], ROWS) and whole["own"] == {"rank0": 0, "rank1": 1}
    assert leftovers(bucket) == []


def test_stock_torch_reads_the_downloaded_checkpoint_bit_for_bit(bucket, tmp_path):
    save(state(), bucket.url(RUN), config=SMALL_PARTS)
    found = zeros()
    copy = bucket.download(RUN, tmp_path / "copy")
    dcp.load(found, storage_reader=FileSystemReader(copy), no_dist=True)
    assert holds(found, 1)
    assert holds(loaded(copy), 1)


def test_stock_checkpoints_are_read_from_s3(bucket, tmp_path):
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for path in (tmp_path / "stock").iterdir():
        bucket.put(f"{RUN}/{path.name}", path.read_bytes())
    assert holds(loaded(bucket.url(RUN)), 1)


def test_overwriting_removes_what_it_supersedes(bucket):
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    first = set(bucket.sizes())
    writer = save(state(2), bucket.url(RUN), config=SMALL_PARTS)
    assert (writer.stats.number, writer.stats.collected) == (2, 1)
    second = set(bucket.sizes())
    assert len(second) == 3 and first & second == {f"{RUN}/.metadata"}
    assert holds(loaded(bucket.url(RUN)), 2)
    error = failure_of(lambda: save(state(3), bucket.url(RUN), overwrite=False))
    assert isinstance(error, CheckpointExistsError) and bucket.url(RUN) in str(error)
    assert set(bucket.sizes()) == second and holds(loaded(bucket.url(RUN)), 2)


def test_a_neighbour_whose_name_begins_the_same_is_left_alone(bucket):
    save(state(1), bucket.url("run/step-1"))
    save(state(10), bucket.url("run/step-10"))
    save(state(2), bucket.url("run/step-1"))
    assert holds(loaded(bucket.url("run/step-10")), 10) and holds(loaded(bucket.url("run/step-1")), 2)


def test_a_bucket_without_a_prefix_is_a_place_too(bucket):
    save(state(), f"s3://{bucket.name}")
    assert holds(loaded(f"s3://{bucket.name}/"), 1)


def test_names_with_odd_characters_come_back(bucket):
    place = bucket.url("run ü/a+b=c&d%20e/step 1")
    save(state(), place)
    assert holds(loaded(place), 1)
    assert all(key.startswith("run ü/a+b=c&d%20e/step 1/") for key in bucket.sizes())


def test_a_writer_can_go_on_to_the_next_place(bucket):
    writer = StrataWriter(bucket.url("run/step-1"))
    for step in (1, 2):
        dcp.save(state(step), storage_writer=writer, checkpoint_id=bucket.url(f"run/step-{step}"), no_dist=True)
    assert holds(loaded(bucket.url("run/step-1")), 1) and holds(loaded(bucket.url("run/step-2")), 2)


def test_a_forked_child_loads_and_saves_after_its_parent_has(bucket):
    save(state(1), bucket.url(RUN), config=SMALL_PARTS)
    reader = StrataReader(bucket.url(RUN))
    dcp.load(zeros(), storage_reader=reader, no_dist=True)

    def in_the_child() -> bool:
        found = zeros()
        dcp.load(found, storage_reader=reader, no_dist=True)  # with the parent's own handle
        save(state(2), bucket.url("run/step-2"), config=SMALL_PARTS)
        return holds(found, 1)

    assert in_child(in_the_child)
    assert holds(loaded(bucket.url("run/step-2")), 2)
    found = zeros()
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert holds(found, 1)


def test_the_command_verifies_and_lists(bucket):
    save(state(), bucket.url(RUN), config=SMALL_PARTS)
    sound = CliRunner().invoke(main, ["verify", "--json", bucket.url(RUN)])
    assert sound.exit_code == 0 and json.loads(sound.output)["is_sound"]
    given = [word for pair in options(bucket.endpoint).items() for word in ("--option", "=".join(pair))]
    listed = CliRunner().invoke(main, ["ls", *given, bucket.url(RUN)], env=dict.fromkeys(environment("")))
    (key,) = (key for key in bucket.sizes() if key.endswith(".distcp"))
    assert listed.exit_code == 0 and listed.output.split() == [str(bucket.sizes()[key]), key.removeprefix(RUN + "/")]
    nothing = CliRunner().invoke(main, ["verify", bucket.url("run/step-2")])
    assert nothing.exit_code == 2 and "CheckpointNotFoundError" in nothing.stderr


def test_a_flipped_bit_is_noticed_by_load_and_by_verify(bucket):
    save(state(), bucket.url(RUN))
    (key,) = (key for key in bucket.sizes() if key.endswith(".distcp"))
    content = bytearray(bucket.get(key))
    content[content.index(state()["big"][1_000_000:1_000_010].numpy().tobytes())] ^= 1
    bucket.put(key, bytes(content))
    error = failure_of(lambda: loaded(bucket.url(RUN)))
    assert isinstance(error, CorruptionError) and key.rpartition("/")[2] in str(error)
    done = CliRunner().invoke(main, ["verify", bucket.url(RUN)])
    assert done.exit_code == 1 and key.rpartition("/")[2] in done.output


def test_a_missing_object_is_named_with_its_url(bucket):
    save(state(), bucket.url(RUN))
    (key,) = (key for key in bucket.sizes() if key.endswith(".distcp"))
    bucket.client.delete_object(Bucket=bucket.name, Key=key)
    error = failure_of(lambda: loaded(bucket.url(RUN)))
    assert isinstance(error, ObjectNotFoundError) and f"s3://{bucket.name}/{key}" in str(error)


def test_a_load_asks_for_few_things(bucket):
    save(state(), bucket.url(RUN))
    requests: list[Request] = []

    def counted(request: Request, forward: Any) -> Answer:
        requests.append(request)
        return forward()

    with gateway(bucket.endpoint, counted) as endpoint:
        assert holds(loaded(bucket.url(RUN), storage_options=options(endpoint)), 1)
    assert {request.method for request in requests} <= {"GET", "HEAD"}
    assert len(requests) <= 8, requests


def test_a_pickled_writer_keeps_its_options(bucket, monkeypatch):
    writer = StrataWriter(bucket.url(RUN), storage_options=options(bucket.endpoint))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    dcp.save(state(), storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
    assert holds(loaded(bucket.url(RUN), storage_options=options(bucket.endpoint)), 1)


@pytest.mark.parametrize("by_option", [True, False])
def test_a_profile_that_is_not_there_is_refused_although_there_are_keys(bucket, tmp_path, monkeypatch, by_option):
    config = tmp_path / "config"
    config.write_text("[profile team]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    if not by_option:
        monkeypatch.setenv("AWS_PROFILE", "tema")
    given = {"profile": "tema"} if by_option else {}
    error = failure_of(lambda: save({"w": torch.ones(3)}, bucket.url("run"), storage_options=given))
    named_by = "the option profile" if by_option else "AWS_PROFILE"
    assert type(error) is ConfigError
    assert f'no AWS profile "tema", which {named_by} names, in {config} or ' in str(error)
    monkeypatch.setenv("AWS_PROFILE", "team")
    save({"w": torch.ones(3)}, bucket.url("run"))  # with the keys of the environment, as boto3 does


def test_a_flag_that_is_neither_on_nor_off_is_refused(bucket):
    given = {"allow_http": "maybe"}
    error = failure_of(lambda: save({"w": torch.ones(3)}, bucket.url("run"), storage_options=given))
    assert type(error) is ConfigError and str(error) == 'allow_http: expected true or false, found "maybe"'
