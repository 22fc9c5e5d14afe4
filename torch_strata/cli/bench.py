"""`strata bench`: what this machine and a store can do."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from torch_strata.checkpoint.measure import Measurement, measure
from torch_strata.cli._common import as_json, bar, config_of, guarded, shown_bytes, size, store_options

__all__ = ["bench_command"]

_HEAD = f"{'object':>10} {'at a time':>9} {'write':>12} {'read':>12} {'one write':>10} {'one read':>10}"


@click.command("bench")
@click.argument("url")
@click.option("--size", "sizes", type=size, multiple=True, default=("4KiB", "1MiB", "64MiB"), help="Repeatable.")
@click.option(
    "--concurrency",
    "concurrencies",
    type=click.IntRange(1, 1024),
    multiple=True,
    default=(1, 4, 16),
    help="Repeatable.",
)
@click.option("--total", type=size, default="256MiB", show_default=True, help="To write for each of both, about.")
@click.option("--json", "wants_json", is_flag=True, help="One JSON list instead of text.")
@store_options
@guarded
def bench_command(
    url: str,
    sizes: Sequence[int],
    concurrencies: Sequence[int],
    total: int,
    wants_json: bool,
    options: Sequence[str],
) -> None:
    """Write and read objects in a new folder below URL, and remove them again."""
    if not wants_json:
        click.echo(_HEAD)
    with bar("bench", len(sizes) * len(concurrencies), "measurements") as progress:

        def said(measured: Measurement) -> None:
            progress(1)
            if not wants_json:
                click.echo(_line(measured))

        found = measure(
            url, sizes=sizes, concurrencies=concurrencies, total_bytes=total, config=config_of(options), said=said
        )
    if wants_json:
        click.echo(as_json([asdict(measured) for measured in found]))


def _line(measured: Measurement) -> str:
    write, read = (
        f"{shown_bytes(rate)}/s" for rate in (measured.write_bytes_per_second, measured.read_bytes_per_second)
    )
    return (
        f"{shown_bytes(measured.object_bytes):>10} {measured.concurrency:>9} {write:>12} {read:>12} "
        f"{1e3 * measured.write_seconds:>7.2f} ms {1e3 * measured.read_seconds:>7.2f} ms"
    )
