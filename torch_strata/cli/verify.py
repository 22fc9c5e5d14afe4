"""`strata verify`: reads everything and compares it with its digests, of one checkpoint or of a run."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from torch_strata import _native
from torch_strata._store import place_below
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint.run import ListedCheckpoint, open_run
from torch_strata.checkpoint.verify import VerifyReport, verify
from torch_strata.cli._common import DAMAGED, FAILED, as_json, bar, config_of, guarded, say, shown, store_options
from torch_strata.cli._place import look
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError, CorruptionError, StorageError

__all__ = ["verify_command"]

# Of each exit status.
_WORDS = {0: "sound", DAMAGED: "damaged", FAILED: "not checked"}


@click.command("verify")
@click.argument("url")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
@click.option("--mark", is_flag=True, help="Of a run: note sound checkpoints as verified, damaged ones as quarantined.")
@click.option("--json", "wants_json", is_flag=True, help="One JSON object instead of text.")
@store_options
@guarded
def verify_command(url: str, rank: int | None, mark: bool, wants_json: bool, options: Sequence[str]) -> None:
    """Read everything and compare it with its digests: of a checkpoint, or of every checkpoint of a run.

    Exit status 0: sound, 1: damaged, 2: could not be checked, or not all of it (not found, not readable, wrong usage).
    """
    config = config_of(options)
    found = look(url, rank, config)
    if not isinstance(found, Opened):
        _verify_run(url, found, config, mark=mark, wants_json=wants_json)
        return
    if mark:
        raise click.UsageError("--mark: only of a run; give its root")
    with bar("verify", sum(size for _, size in found.native.objects())) as progress:
        report = verify(url, config=config, rank=rank, progress=progress)
    if wants_json:
        click.echo(as_json(_described(report)))
    else:
        for warning in report.warnings:
            say(f"warning: {warning}")
        _tell(report)
    raise SystemExit(_status(report))


def _verify_run(
    root: str, listed: Sequence[ListedCheckpoint], config: StorageConfig, *, mark: bool, wants_json: bool
) -> None:
    run = open_run(root, config)
    found: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(_WORDS, 0)
    with bar("verify", sum(one.metadata.size_bytes for one in listed if one.metadata)) as progress:
        for one in listed:
            if one.state in ("uncommitted", "kept"):
                continue
            described, status = _verify_one(place_below(root, one.folder), one, config, progress)
            found[one.folder] = described
            counts[status] += 1
            if mark and one.state == "committed" and described.get("save_id"):
                _mark(run, one.folder, described, status)
            if not wants_json:
                _tell_one(one.folder, described, status)
    # Damage that was found counts, whatever else could not be looked at.
    status = next((status for status in (DAMAGED, FAILED) if counts[status]), 0)
    if wants_json:
        click.echo(as_json({"url": root, "is_sound": status == 0, "checkpoints": found}))
    else:
        click.echo(f"{len(found)} checkpoints: {', '.join(f'{counts[code]} {word}' for code, word in _WORDS.items())}")
    raise SystemExit(status)


def _verify_one(
    place: str, one: ListedCheckpoint, config: StorageConfig, progress: Callable[[int], object]
) -> tuple[dict[str, Any], int]:
    try:
        report = verify(place, config=config, progress=progress)
    except CorruptionError as error:
        identity = one.metadata.id if one.metadata else ""
        return {"save_id": identity, "problems": [str(error)], "unchecked": []}, DAMAGED
    except CheckpointNotFoundError:
        if one.state == "unreadable":
            return {"problems": [one.detail], "unchecked": []}, DAMAGED
        return {"problems": [], "unchecked": ["it was removed meanwhile"]}, 0
    except StorageError as error:
        return {"problems": [], "unchecked": [str(error)]}, FAILED
    return _described(report), _status(report)


def _mark(run: _native.Run, folder: str, described: dict[str, Any], status: int) -> None:
    if status == 0:
        run.note_verified(folder, described["save_id"])
    elif described["problems"]:
        run.quarantine(folder, described["save_id"], "; ".join(described["problems"])[:1000])


def _described(report: VerifyReport) -> dict[str, Any]:
    return {**vars(report), "is_sound": report.is_sound}


def _status(report: VerifyReport) -> int:
    return 0 if report.is_sound else DAMAGED if report.problems else FAILED


def _tell_one(folder: str, described: dict[str, Any], status: int) -> None:
    click.echo(f"{shown(folder, 100)}: {_shouted(status)}")
    for sentence in (*described["problems"], *described["unchecked"]):
        click.echo(f"  {shown(sentence)}")


def _tell(report: VerifyReport) -> None:
    for problem in report.problems:
        click.echo(f"damaged: {shown(problem)}")
    for sentence in report.unchecked:
        click.echo(f"not checked: {shown(sentence)}")
    click.echo(
        f"{_verdict(report)}: {report.objects} objects, {report.read_bytes} bytes read, "
        f"{report.blocks} blocks verified, {report.unverified_bytes} bytes without a digest"
    )


def _verdict(report: VerifyReport) -> str:
    if report.is_sound:
        return _WORDS[0]
    count = len(report.problems or report.unchecked)
    return f"{_shouted(_status(report))} ({count} {'problem' if count == 1 else 'problems'})"


def _shouted(status: int) -> str:
    return _WORDS[status] if status == 0 else _WORDS[status].upper()
