"""`strata copy`, `import` and `export`: checkpoints to other places and in other formats."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from torch_strata._store import place_below, resolve_configs
from torch_strata.checkpoint._opened import Opened
from torch_strata.checkpoint.copy_run import CopiedRun, copy_run
from torch_strata.checkpoint.copying import CopyReport, copy_checkpoint, import_checkpoint
from torch_strata.checkpoint.export import ExportReport, export_safetensors, export_torch
from torch_strata.checkpoint.verify import verify
from torch_strata.cli._common import (
    as_json,
    bar,
    config_of,
    guarded,
    parse_options,
    say,
    shown,
    shown_bytes,
    size,
    store_options,
)
from torch_strata.cli._place import look
from torch_strata.config import StorageConfig
from torch_strata.errors import ChecksumError, StorageError

__all__ = ["copy_command", "export_command", "import_command"]


def _both(command: Callable[..., None]) -> Callable[..., None]:
    """What all of them take."""
    text = "A setting of the destination's store; repeatable. Without one, --option counts for both."
    for decorate in (
        guarded,
        store_options,
        click.option("--to-option", "to_options", multiple=True, metavar="KEY=VALUE", help=text),
        click.option("--json", "wants_json", is_flag=True, help="One JSON object instead of text."),
        click.argument("destination"),
        click.argument("source"),
    ):
        command = decorate(command)
    return command


def _to(to_options: Sequence[str]) -> dict[str, str] | None:
    return parse_options(to_options, "--to-option") if to_options else None


@click.command("copy")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at the destination.")
@click.option("--no-verify", is_flag=True, help="Do not read the copy back.")
@_both
def copy_command(
    source: str,
    destination: str,
    rank: int | None,
    overwrite: bool,
    no_verify: bool,
    wants_json: bool,
    to_options: Sequence[str],
    options: Sequence[str],
) -> None:
    """Copy a checkpoint, or every checkpoint of a run, to another place, and read the copy back.

    A copied checkpoint stands alone: what it refers to is written with it. Of a run the references stay, and a second
    call goes on where the first one ended. The commit comes last: a copy that ends early leaves nothing that opens.
    """
    config, to = config_of(options), _to(to_options)
    from_config, to_config = resolve_configs(source, destination, config, None, to)
    found = look(source, rank, from_config)
    copied: CopyReport | CopiedRun
    if isinstance(found, Opened):
        with bar("copy", sum(size for _, size in found.native.objects())) as progress:
            copied = copy_checkpoint(
                source, destination, config=config, to_options=to, rank=rank, overwrite=overwrite, progress=progress
            )
        places = [destination]
    else:
        if overwrite:
            raise click.UsageError("--overwrite: not of a run")
        with bar("copy", sum(one.metadata.size_bytes for one in found if one.metadata)) as progress:
            copied = copy_run(source, destination, config=config, to_options=to, progress=progress)
        places = [place_below(destination, folder) for folder in copied.copied]
    for place in () if no_verify else places:
        _verify(place, to_config)
    if wants_json:
        click.echo(as_json(asdict(copied)))
    elif isinstance(copied, CopyReport):
        _tell(copied, destination)
    else:
        for folder, why in copied.passed_over.items():
            say(f"passed over: {folder}: {why}")
        click.echo(
            f"copied {len(copied.copied)} checkpoints: {shown_bytes(copied.payload_bytes)} written, "
            f"{shown_bytes(copied.referred_bytes)} by reference; {len(copied.found)} were there"
        )


def _verify(place: str, config: StorageConfig) -> None:
    with bar("verify", None) as progress:
        report = verify(place, config=config, progress=progress)
    if report.problems:
        raise ChecksumError(f"the copy at {place} is damaged: {'; '.join(report.problems)}")
    if not report.is_sound:
        raise StorageError(f"the copy at {place} could not be read back: {'; '.join(report.unchecked)}")


@click.command("import")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at the destination.")
@_both
def import_command(
    source: str,
    destination: str,
    overwrite: bool,
    wants_json: bool,
    to_options: Sequence[str],
    options: Sequence[str],
) -> None:
    """Write a file of torch.save, a stock checkpoint or safetensors as a checkpoint of ours.

    Nothing that a pickle names is run: what torch does not load with weights_only is refused.
    """
    with bar("import", None) as progress:
        report = import_checkpoint(
            source,
            destination,
            config=config_of(options),
            to_options=_to(to_options),
            overwrite=overwrite,
            progress=progress,
        )
    if wants_json:
        click.echo(as_json(asdict(report)))
    else:
        _tell(report, destination)


@click.command("export")
@click.option("--to", "form", type=click.Choice(["safetensors", "torch", "dcp"]), required=True, help="What to write.")
@click.option("--key", help="Only what is below this key, named from there: model.")
@click.option("--max-shard-size", type=size, default="5GB", show_default=True, help="Of a safetensors file.")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank saved without collectives.")
@_both
def export_command(
    source: str,
    destination: str,
    form: str,
    key: str | None,
    max_shard_size: int,
    rank: int | None,
    wants_json: bool,
    to_options: Sequence[str],
    options: Sequence[str],
) -> None:
    """Write a checkpoint for others to read.

    safetensors: tensors as Hugging Face lays them out, in the folder DESTINATION. torch: one file that
    torch.load(weights_only=True) reads. dcp: a checkpoint that stands alone, for stock torch too.
    """
    common: dict[str, Any] = {"config": config_of(options), "to_options": _to(to_options), "rank": rank}
    report: CopyReport | ExportReport
    with bar("export", None) as progress:
        if form == "dcp":
            if key is not None:
                raise click.UsageError("--key: not with --to dcp")
            report = copy_checkpoint(source, destination, for_stock=True, progress=progress, **common)
        elif form == "torch":
            report = export_torch(source, destination, key=key, progress=progress, **common)
        else:
            report = export_safetensors(
                source, destination, key=key, max_shard_bytes=max_shard_size, progress=progress, **common
            )
    if wants_json:
        click.echo(as_json(asdict(report)))
    elif isinstance(report, CopyReport):
        _tell(report, destination)
    else:
        if report.left_out:
            names = ", ".join(repr(name) for name in report.left_out)
            say(f"left out, since they are no tensors: {names}")
        click.echo(f"wrote {len(report.files)} files: {report.num_tensors} tensors, {shown_bytes(report.tensor_bytes)}")


def _tell(report: CopyReport, destination: str) -> None:
    for warning in report.warnings:
        say(f"warning: {warning}")
    click.echo(
        f"committed {shown(destination)}: {report.num_tensors} tensors and {report.num_values} other values, "
        f"{shown_bytes(report.payload_bytes)}"
    )
