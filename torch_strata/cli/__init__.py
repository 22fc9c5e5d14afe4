"""The command `strata`: look at checkpoints and check them, without importing torch."""

import json
import os
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import click

from torch_strata.checkpoint._opened import Opened, open_checkpoint
from torch_strata.checkpoint._store import open_store
from torch_strata.checkpoint.verify import VerifyReport, verify
from torch_strata.config import StorageConfig
from torch_strata.errors import CorruptionError, StrataError

__all__ = ["main"]

# As cmp and diff: nobody may take a failure to look for damage, and only 0 is sound.
_DAMAGED = 1
_FAILED = 2
_INTERRUPTED = 130


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """Arguments of every command, and exit status 1 for damage alone, 2 for anything else that goes wrong."""

    @click.argument("url")
    @click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
    @click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="A setting of the store; repeatable.")
    @click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
    @wraps(command)
    def run(url: str, rank: int | None, options: Sequence[str], as_json: bool) -> None:
        try:
            config = StorageConfig.from_env(os.environ, storage_options=_parse_options(options))
            command(url, rank, config, as_json)
        except CorruptionError as error:
            _fail(error, _DAMAGED)
        except StrataError as error:
            _fail(error, _FAILED)
        except click.ClickException:
            raise
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(_FAILED) from None
        except Exception:  # Python's own status for these is 1
            traceback.print_exc()
            raise SystemExit(_FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None

    return run


def _parse_options(options: Sequence[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in options]
    for key, separator, _ in pairs:
        if not key or not separator:
            raise click.UsageError("--option: expected KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _fail(error: StrataError, status: int) -> NoReturn:
    click.echo(f"{type(error).__name__}: {error}", err=True)
    raise SystemExit(status)


@click.group()
@click.version_option(package_name="torch-strata")
def main() -> None:
    """Look at checkpoints and check them. URL is a local path or a URL such as s3://bucket/run/step-100."""


@main.command("verify")
@_common
def verify_command(url: str, rank: int | None, config: StorageConfig, as_json: bool) -> None:
    """Read everything and compare it with its digests.

    Exit status 0: sound, 1: damaged, 2: could not be checked, or not all of it (not found, not readable, wrong usage).
    """
    report = verify(url, config=config, rank=rank)
    if as_json:
        click.echo(json.dumps({**vars(report), "is_sound": report.is_sound}))
    else:
        for warning in report.warnings:
            click.echo(f"warning: {warning}", err=True)
        for problem in report.problems:
            click.echo(f"damaged: {problem}")
        for sentence in report.unchecked:
            click.echo(f"not checked: {sentence}")
        click.echo(
            f"{_verdict(report)}: {report.objects} objects, {report.read_bytes} bytes read, "
            f"{report.blocks} blocks verified, {report.unverified_bytes} bytes without a digest"
        )
    if not report.is_sound:
        raise SystemExit(_DAMAGED if report.problems else _FAILED)


def _verdict(report: VerifyReport) -> str:
    if report.is_sound:
        return "sound"
    count, word = (len(report.problems), "DAMAGED") if report.problems else (len(report.unchecked), "NOT CHECKED")
    return f"{word} ({count} {'problem' if count == 1 else 'problems'})"


@main.command("ls")
@_common
def ls_command(url: str, rank: int | None, config: StorageConfig, as_json: bool) -> None:
    """List the objects of a checkpoint with their sizes in bytes."""
    objects = _open(url, rank, config).native.objects()
    if as_json:
        click.echo(json.dumps([{"name": name, "bytes": size} for name, size in objects]))
        return
    for name, size in objects:
        click.echo(f"{size:>15} {name}")


@main.command("inspect")
@_common
def inspect_command(url: str, rank: int | None, config: StorageConfig, as_json: bool) -> None:
    """Show what a checkpoint holds: each key with dtype, shape and number of chunks."""
    opened = _open(url, rank, config)
    keys = [_describe(entry) for entry in opened.entries]
    native = opened.native
    head = {
        "url": url,
        "written_by": opened.written_by,
        "save_id": opened.save_id,
        "number": native.number,
        "world_size": native.world_size,
        "objects": len(native.objects()),
        "bytes": sum(size for _, size in native.objects()),
        "warnings": native.warnings,
    }
    if as_json:
        click.echo(json.dumps({**head, "keys": keys}))
        return
    for name, value in head.items():
        click.echo(f"{name}: {value}")
    for key in keys:
        # A name may hold anything, control characters included.
        click.echo(f"  {key['fqn']!r}: {key.get('dtype', 'pickled value')} {key.get('shape', '')}".rstrip())


def _describe(entry: Any) -> dict[str, Any]:
    fqn = entry[0].decode("utf-8", "backslashreplace")
    if not entry[1]:
        return {"fqn": fqn}
    return {"fqn": fqn, "dtype": entry[2], "shape": list(entry[3]), "chunks": len(entry[9])}


def _open(url: str, rank: int | None, config: StorageConfig) -> Opened:
    return open_checkpoint(open_store(url, config), url, rank=rank)
