"""`strata diff`: how two checkpoints differ."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import click

from torch_strata.checkpoint.compare import Comparison, compare
from torch_strata.cli._common import DIFFERENT, FAILED, as_json, bar, config_of, guarded, shown, store_options, table

__all__ = ["diff_command"]


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--json", "wants_json", is_flag=True, help="One JSON object instead of text.")
@store_options
@partial(guarded, damage=FAILED)  # 1 says that they differ
def diff_command(a: str, b: str, wants_json: bool, options: Sequence[str]) -> None:
    """Compare two checkpoints, however they are sharded and whoever wrote them; files of torch.save too.

    Exit status 0: equal bit for bit, 1: different, 2: could not be compared.
    """
    with bar("diff", None) as progress:
        found = compare(a, b, config=config_of(options), progress=progress)
    if wants_json:
        click.echo(as_json({"is_equal": found.is_equal, **asdict(found)}))
    else:
        _tell(found)
    raise SystemExit(0 if found.is_equal else DIFFERENT)


def _tell(found: Comparison) -> None:
    for word, keys in (("only in A", found.only_a), ("only in B", found.only_b), ("changed", found.changed_values)):
        for key in keys:
            click.echo(f"{word}: {key!r:.1000}")
    for key, sentence in found.unlike.items():
        click.echo(f"unlike: {key!r:.1000}: {shown(sentence)}")
    if found.changed:
        head = ("changed", "norm A", "norm B", "norm of B - A", "largest", "key")
        rows = [
            (
                f"{change.changed_fraction:.2%}",
                *(f"{value:.6g}" for value in (change.norm_a, change.norm_b, change.norm_of_difference)),
                f"{change.largest_difference:.6g}",
                f"{change.fqn!r:.1000}",
            )
            for change in found.changed
        ]
        for line in table(head, rows):
            click.echo(line)
    by_digest = f", {found.num_by_digest} known by their digests" if found.num_by_digest else ""
    click.echo(f"{'equal' if found.is_equal else 'different'}: {found.num_equal} keys are the same{by_digest}")
