"""What each format is to a user of a pipe; native/strata-data/tests/formats.rs has their bytes."""

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.shards import all_numbers, write_tars
from torch_strata.data.dataset import ShardDataset
from torch_strata.data.pipe import StrataShardPipe
from torch_strata.data.shuffle import Shuffle
from torch_strata.errors import ConfigError, CorruptionError


def write_mds(folder: Path, records: list[dict[str, Any]], columns: dict[str, str]) -> Path:
    """One shard as MosaicML lays it out: sizes of the columns of variable size, then all contents."""
    samples = []
    for record in records:
        sizes, contents = b"", b""
        for name, encoding in columns.items():
            content = {
                "str": lambda value: value.encode(),
                "json": lambda value: json.dumps(value).encode(),
                "int": lambda value: struct.pack("<q", value),
                "bytes": lambda value: value,
            }[encoding](record[name])
            sizes += b"" if encoding == "int" else struct.pack("<I", len(content))
            contents += content
        samples.append(sizes + contents)
    names = sorted(columns)
    config = json.dumps(
        {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": None,
            "column_names": names,
            "column_encodings": [columns[name] for name in names],
            "column_sizes": [8 if columns[name] == "int" else None for name in names],
        }
    ).encode()
    first = 4 + 4 * (len(samples) + 1) + len(config)
    ends = np.cumsum([first, *map(len, samples)]).astype("<u4")
    data = struct.pack("<I", len(samples)) + ends.tobytes() + config + b"".join(samples)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.00000.mds").write_bytes(data)
    shard = {**json.loads(config), "samples": len(samples), "zip_data": None}
    shard["raw_data"] = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def test_flat_tokens_are_windows_in_one_tensor(tmp_path: Path) -> None:
    tokens = np.arange(70_000, dtype=np.uint32) % 50_000
    tokens.astype(np.uint16).tofile(tmp_path / "train.bin")
    pipe = StrataShardPipe(tmp_path / "train.bin", window=129, stride=128, batch_size=4, ending="drop")
    batches = list(pipe)
    assert len(batches) == len(pipe) == 136 and batches[0]["tokens"].dtype == torch.uint16
    together = torch.cat([batch["tokens"] for batch in batches]).long().numpy()
    expected = np.lib.stride_tricks.sliding_window_view(tokens, 129)[::128][: 136 * 4]
    assert np.array_equal(together, expected)
    loaded = next(iter(DataLoader(pipe, batch_size=None, num_workers=1)))
    assert torch.equal(loaded["tokens"], batches[0]["tokens"])


def test_without_torch_tokens_are_arrays(tmp_path: Path) -> None:
    np.arange(40, dtype=np.int32).tofile(tmp_path / "a.bin")
    dataset = ShardDataset(tmp_path, window=10, dtype="int32")
    assert [sample["tokens"].tolist() for sample in dataset] == np.arange(40).reshape(4, 10).tolist()


def test_megatron_s_pairs_say_their_own_dtype(tmp_path: Path) -> None:
    lengths, tokens = [3, 5, 4], np.arange(12, dtype=np.int32) + 70_000
    tokens.tofile(tmp_path / "corpus.bin")
    pointers = np.cumsum([0, *lengths[:-1]]) * 4
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    body = np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + np.arange(4, dtype="<i8").tobytes()
    (tmp_path / "corpus.idx").write_bytes(head + body)
    pipe = StrataShardPipe(tmp_path / "*.bin", format="megatron", window=4)
    assert [sample["tokens"].tolist() for sample in pipe] == tokens.reshape(3, 4).tolist()


def test_mds_gives_the_values_of_its_columns(tmp_path: Path) -> None:
    columns = {"id": "int", "text": "str", "meta": "json", "raw": "bytes"}
    columns = {name: columns[name] for name in sorted(columns)}
    records = [{"id": n, "text": f"naïve {n}", "meta": {"n": [n]}, "raw": bytes([n] * n)} for n in range(10)]
    pipe = StrataShardPipe(write_mds(tmp_path / "mds", records, columns) / "index.json", batch_size=4)
    found = []
    for batch in pipe:
        assert batch["id"].dtype == torch.int64
        for at, number in enumerate(batch["id"].tolist()):
            values = {name: batch[name][at] for name in ("text", "meta")}
            found.append({**values, "id": number, "raw": bytes(batch["raw"][at])})
    assert found == records


def test_lines_are_parsed_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    records = [{"n": n, "text": "a\u2028b"} for n in range(7)]
    shard = tmp_path / "a.jsonl"
    shard.write_text("".join(json.dumps(record, ensure_ascii=False) + "\r\n" for record in records), newline="")
    assert [
        line for batch in StrataShardPipe(tmp_path, format="jsonl", batch_size=3) for line in batch["json"]
    ] == records
    raw = StrataShardPipe(shard, decode=False)
    assert bytes(next(iter(raw))["json"]) == json.dumps(records[0], ensure_ascii=False).encode()
    shard.write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(CorruptionError, match=r"a\.jsonl: 'json' of the sample at byte 9.*JSONDecodeError"):
        list(StrataShardPipe(shard))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_compressed_shards_give_what_plain_ones_do(tmp_path: Path, num_workers: int) -> None:
    plain, packed = write_tars(tmp_path / "plain"), tmp_path / "packed"
    packed.mkdir()
    for shard in plain.iterdir():
        (packed / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    shuffle = Shuffle(seed=1, block=4, buffer=16)
    pipes = [StrataShardPipe(folder, format="tar", shuffle=shuffle, batch_size=4) for folder in (plain, packed)]
    first, second = (all_numbers(DataLoader(pipe, batch_size=None, num_workers=num_workers)) for pipe in pipes)
    assert first == second and len(first) == 103
    lines = tmp_path / "a.jsonl.gz"
    lines.write_bytes(gzip.compress(b'{"n": 1}\n') + gzip.compress(b'{"n": 2}\n'))
    assert [sample["json"]["n"] for sample in StrataShardPipe(lines)] == [1, 2]
    lines.write_bytes(lines.read_bytes()[:-3])
    with pytest.raises(CorruptionError, match=r"a\.jsonl\.gz"):
        len(StrataShardPipe(lines))


def test_files_are_samples_of_one_field(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    for name in ("cats/1.txt", "cats/2.txt"):
        (tmp_path / name).write_text(name)
    samples = list(StrataShardPipe(f"{tmp_path}/**/*.txt", format="files", decode=True))
    assert [(sample["__key__"], sample["txt"]) for sample in samples] == [
        (f"cats/{n}", f"cats/{n}.txt") for n in (1, 2)
    ]


def test_fields_are_decoded_by_their_names_and_decoders_can_be_replaced(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.eye(3))
    (tmp_path / "a.npy").write_bytes(array.getvalue())
    (tmp_path / "a.cls").write_text("7")
    (tmp_path / "a.own").write_text("mine")
    url = f"{tmp_path}/a.*"
    found = {
        name: value for sample in StrataShardPipe(url, format="files", decode=True) for name, value in sample.items()
    }
    assert found["cls"] == 7 and np.array_equal(found["npy"], np.eye(3)) and bytes(found["own"]) == b"mine"
    decoders = {"own": bytes, "cls": lambda data: -int(bytes(data))}
    samples = list(StrataShardPipe(url, format="files", decode=decoders))
    assert [sample.get("cls", sample.get("own")) for sample in samples] == [-7, None, b"mine"]


def test_several_places_are_one_data_set(tmp_path: Path) -> None:
    first, second = write_tars(tmp_path / "one", [3, 4]), tmp_path / "two"
    second.mkdir()
    (first / "001.tar").rename(second / "x.tar")
    urls = [f"{second}/*.tar", first / "000.tar"]
    assert all_numbers(StrataShardPipe(urls, batch_size=2)) == [3, 4, 5, 6, 0, 1, 2]
    mixed = StrataShardPipe(urls, batch_size=2, shuffle=Shuffle(by="samples"))
    assert sorted(all_numbers(mixed)) == list(range(7))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"window": 0}, "window"),
        ({"window": 8, "stride": 0}, "stride"),
        ({"window": 8, "dtype": "float32"}, "dtype"),
        ({"format": "tokens"}, "window"),
        ({"format": "tar", "window": 8}, "window"),
        ({"format": "jsonl", "decode": {"json": 3}}, "decode"),
        ({"format": "zip"}, "format"),
    ],
)
def test_wrong_arguments_of_formats_are_named(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        StrataShardPipe(tmp_path, **arguments)
