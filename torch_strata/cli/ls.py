"""`strata ls`: the checkpoints of a run, or the objects of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import click

from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint.run import ListedCheckpoint
from torch_strata.cli._common import as_json, config_of, guarded, say, shown, shown_bytes, store_options, table
from torch_strata.cli._place import look

__all__ = ["describe_listed", "ls_command"]


@click.command("ls")
@click.argument("url")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
@click.option("--json", "wants_json", is_flag=True, help="One JSON value instead of text.")
@store_options
@guarded
def ls_command(url: str, rank: int | None, wants_json: bool, options: Sequence[str]) -> None:
    """List the checkpoints of a run, or the objects of one checkpoint with their sizes in bytes."""
    found = look(url, rank, config_of(options))
    if isinstance(found, Opened):
        _list_objects(found, wants_json)
    elif wants_json:
        click.echo(as_json({"url": url, "checkpoints": [describe_listed(one) for one in found]}))
    else:
        head = ("folder", "step", "type", "epoch", "size", "created", "state", "refers to", "metrics")
        for line in table(head, [_row(one) for one in found]):
            click.echo(line)
        if not found:
            say(f"{url} is the root of a run that has no checkpoint yet")


def _list_objects(opened: Opened, wants_json: bool) -> None:
    elsewhere = {path.rpartition("/")[2]: path for _, _, _, path, _, _ in opened.native.items() if path[:3] == "../"}
    objects = opened.native.objects()
    if wants_json:
        paths = [{"path": elsewhere[name]} if name in elsewhere else {} for name, _ in objects]
        click.echo(
            as_json([{"name": name, "bytes": size, **path} for (name, size), path in zip(objects, paths, strict=True)])
        )
        return
    for name, size in objects:
        click.echo(f"{size:>15} {shown(elsewhere.get(name, name))}")


def describe_listed(one: ListedCheckpoint) -> dict[str, Any]:
    """A checkpoint of a run, for JSON."""
    found = {
        "folder": one.folder,
        "state": one.state,
        "detail": one.detail,
        "is_verified": one.is_verified,
        "is_quarantined": one.is_quarantined,
        "is_abandoned": one.is_abandoned,
        "pins": list(one.pins),
        "refers_to": list(one.refers_to),
    }
    if one.metadata is None:
        return found
    known = {name: getattr(one.metadata, name) for name in ("id", "step", "epoch", "path", "size_bytes", "model_hash")}
    return {
        **found,
        **known,
        "type": one.metadata.checkpoint_type.value,
        "metadata": dict(one.metadata.metadata),
        "metrics": dict(one.metadata.metrics),
        "created_at": one.metadata.created_at.isoformat(),
    }


def _row(one: ListedCheckpoint) -> tuple[str, ...]:
    marks = [("quarantined", one.is_quarantined), ("abandoned", one.is_abandoned), ("verified", one.is_verified)]
    words = [word for word, applies in marks if applies]
    words += [f"held by {pin}" for pin in one.pins]
    if one.state != "committed":
        words.insert(0, f"{one.state}: {one.detail}" if one.detail else one.state)
    state, refers = ", ".join(words) or "committed", ", ".join(one.refers_to) or "-"
    found = one.metadata
    if found is None:
        return (shown(one.folder, 100), "-", "-", "-", "-", "-", shown(state, 300), shown(refers, 100), "")
    metrics = " ".join(f"{name}={value:g}" for name, value in sorted(found.metrics.items()))
    kind, created = found.checkpoint_type.value, found.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return (
        *(shown(one.folder, 100), str(found.step), kind, str(found.epoch), shown_bytes(found.size_bytes), created),
        *(shown(state, 300), shown(refers, 100), shown(metrics, 300)),
    )
