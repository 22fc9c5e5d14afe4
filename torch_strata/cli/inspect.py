"""`strata inspect`: what a checkpoint holds."""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from torch_strata.checkpoint._dtypes import dtype_named
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint._paths import decode_fqn
from torch_strata.cli._common import as_json, config_of, guarded, shown, shown_bytes, store_options
from torch_strata.cli._place import look
from torch_strata.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["inspect_command"]


@click.command("inspect")
@click.argument("url")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
@click.option("--json", "wants_json", is_flag=True, help="One JSON object instead of text.")
@store_options
@guarded
def inspect_command(url: str, rank: int | None, wants_json: bool, options: Sequence[str]) -> None:
    """Show what a checkpoint holds: where in its run it stands, totals, and each key with dtype, shape and size."""
    opened = look(url, rank, config_of(options))
    if not isinstance(opened, Opened):
        folders = ", ".join(one.folder for one in opened)
        which = f"name one of its checkpoints: {folders:.1000}" if opened else "it has no checkpoint yet"
        raise CheckpointNotFoundError(f"{url} is the root of a run: {which}")
    stored = _encodings(opened)
    keys = [{**(key := _describe(entry)), **stored.get(key["fqn"], {})} for entry in opened.entries]
    if opened.holds_bytes:
        keys = [_describe_bytes(opened)]
    head = _head(url, opened, keys)
    if wants_json:
        click.echo(as_json({**head, "keys": keys}))
        return
    for name, value in head.items():
        click.echo(f"{name}: {_text(name, value)}")
    for key in keys:
        # A name may hold anything, control characters included.
        what = f"{key['dtype']} {key['shape']}" if "shape" in key else key.get("dtype", "pickled value")
        chunks = f" in {key['chunks']} chunks" if key.get("chunks", 1) > 1 else ""
        size = f", {shown_bytes(key['bytes'])}" if key.get("bytes") is not None else ""
        stored_as = f", {key['encoding']} in {shown_bytes(key['stored_bytes'])}" if "encoding" in key else ""
        click.echo(f"  {key['fqn']!r:.1000}: {what}{chunks}{size}{stored_as}")


def _head(url: str, opened: Opened, keys: Sequence[dict[str, Any]]) -> dict[str, Any]:
    native = opened.native
    objects = native.objects()
    head: dict[str, Any] = {
        "url": url,
        "written_by": opened.written_by,
        "save_id": opened.save_id,
        "number": native.number,
        "world_size": native.world_size,
        "objects": len(objects),
        "bytes": sum(size for _, size in objects),
        "warnings": native.warnings,
    }
    if native.created_at:
        head["created_at"] = datetime.fromtimestamp(native.created_at, UTC).isoformat()
    if native.run is not None:
        step, epoch, kind, metadata, metrics = native.run
        head.update(step=step, epoch=epoch, type=kind, metrics=metrics, metadata=metadata)
    encoded = native.encodings()
    paths = {path for _, _, _, path, _, _ in native.items()} | {base for *_, base in encoded if base}
    head["refers_to"] = sorted({path.split("/")[1] for path in paths if path.startswith("../")})
    if encoded:
        taken, payload = sum(one[2] for one in encoded), sum(one[3] for one in encoded)
        head["encoded"] = {"tensor_bytes": payload, "stored_bytes": taken, "ratio": round(taken / payload, 4)}
    head["by_dtype"] = _totals(keys, lambda key: key.get("dtype", "pickled value"))
    head["by_key"] = _totals(keys, lambda key: key["fqn"].partition(".")[0])
    return head


def _encodings(opened: Opened) -> dict[str, dict[str, Any]]:
    """How the chunks of each key are stored that are not stored as they are, and what these take, in bytes."""
    found: dict[str, dict[str, Any]] = {}
    for fqn, encoding, stored_bytes, *_ in opened.native.encodings():
        key = found.setdefault(decode_fqn(fqn), {"encoding": encoding, "stored_bytes": 0})
        key["stored_bytes"] += stored_bytes
    return found


def _totals(keys: Sequence[dict[str, Any]], group: Any) -> dict[str, dict[str, int]]:
    num_keys, num_bytes = Counter[str](), Counter[str]()
    for key in keys:
        num_keys[group(key)] += 1
        num_bytes[group(key)] += key.get("bytes") or 0
    return {name: {"keys": count, "tensor_bytes": num_bytes[name]} for name, count in num_keys.items()}


def _text(name: str, value: Any) -> str:
    if name not in ("by_dtype", "by_key"):
        return shown(str(value))
    parts = [f"{shown(key, 100)}: {of['keys']} keys, {shown_bytes(of['tensor_bytes'])}" for key, of in value.items()]
    return "".join(f"\n  {part}" for part in parts)


def _describe_bytes(opened: Opened) -> dict[str, Any]:
    rows, _, _ = opened.native.locate([opened.entries[0][0]], [0], [None])
    return {"fqn": "bytes", "dtype": "bytes", "bytes": opened.native.blob_bytes(rows)[0]}


def _describe(entry: Any) -> dict[str, Any]:
    fqn = decode_fqn(entry[0])
    if not entry[1]:
        return {"fqn": fqn}
    try:
        num_bytes = math.prod(entry[3]) * dtype_named(entry[2]).num_bytes
    except CheckpointError:
        num_bytes = None
    return {"fqn": fqn, "dtype": entry[2], "shape": list(entry[3]), "chunks": len(entry[9]), "bytes": num_bytes}
