"""`strata prune`: removes the checkpoints of a run that no policy keeps."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import click

from torch_strata._store import open_store
from torch_strata.checkpoint._generation import newest_generation
from torch_strata.checkpoint.retention import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEverySteps,
    KeepLast,
    KeepYounger,
    Retention,
)
from torch_strata.checkpoint.run import ListedCheckpoint, listed_in, open_run
from torch_strata.cli._common import (
    as_json,
    config_of,
    duration,
    guarded,
    say,
    shown,
    shown_bytes,
    store_options,
    table,
)
from torch_strata.cli._place import look
from torch_strata.config import StorageConfig
from torch_strata.errors import CheckpointNotFoundError

__all__ = ["prune_command"]


class _Best(click.ParamType):  # type: ignore[type-arg]
    name = "METRIC:min|max:COUNT"

    def convert(self, value: Any, param: Any, ctx: Any) -> KeepBest:
        """A policy, such as loss:min:3."""
        if isinstance(value, KeepBest):
            return value
        metric, _, rest = value.rpartition(":")
        metric, _, mode = metric.rpartition(":")
        if not metric or mode not in ("min", "max") or not (rest.isascii() and rest.isdigit() and int(rest)):
            self.fail(f"{value!r}: expected a metric, min or max and a count, such as loss:min:3", param, ctx)
        return KeepBest(metric, mode, int(rest))


_COUNT = click.IntRange(min=1, max=(1 << 63) - 1)


@click.command("prune")
@click.argument("root")
@click.option("--keep-last", type=_COUNT, help="Keep that many with the highest steps.")
@click.option("--keep-every-steps", type=_COUNT, help="Keep those whose step is a multiple.")
@click.option("--keep-every", type=duration, help="Keep one in that time, such as 6h.")
@click.option(
    "--keep-best", type=_Best(), multiple=True, help="Keep the best by a metric, such as loss:min:3; repeatable."
)
@click.option("--younger", type=duration, help="Keep those that are younger, such as 7d.")
@click.option("--dry-run", is_flag=True, help="Only say what would stay and what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "wants_json", is_flag=True, help="One JSON object instead of text; needs --dry-run or --yes.")
@store_options
@guarded
def prune_command(
    root: str,
    keep_last: int | None,
    keep_every_steps: int | None,
    keep_every: timedelta | None,
    keep_best: Sequence[KeepBest],
    younger: timedelta | None,
    dry_run: bool,
    yes: bool,
    wants_json: bool,
    options: Sequence[str],
) -> None:
    """Remove the checkpoints of a run that none of the given policies keeps, and what dead saves have left.

    Without a policy all checkpoints stay. Always kept: the newest checkpoint, the newest one that was verified, those
    that somebody holds, and objects to which others refer. What no manager saved is not touched.

    The run is not fenced off: no generation is claimed. If a run starts and claims it meanwhile, this ends with
    StaleGenerationError, and what is left is for that run's own retention.
    """
    if wants_json and not (dry_run or yes):
        raise click.UsageError("--json: needs --dry-run or --yes, since nobody can be asked")
    config = config_of(options)
    policy = _policy(keep_last, keep_every_steps, keep_every, keep_best, younger)
    generation = newest_generation(open_store(root, config))
    run = open_run(root, config, policy=policy)
    run.hold(generation)
    listed = listed_in(run)
    if not listed and not generation:
        _refuse(root, config)
    decisions, notes = run.plan()
    if not wants_json:
        rows = [("stays" if keeps else "goes", shown(folder, 100), shown(why)) for folder, keeps, why in decisions]
        for line in table(("", "folder", "because"), rows):
            click.echo(line)
    num_going = sum(not keeps for _, keeps, _ in decisions)
    report: dict[str, Any] = {
        "url": root,
        "decisions": [{"folder": folder, "keeps": keeps, "because": why} for folder, keeps, why in decisions],
    }
    told = f"{num_going} of {len(decisions)} checkpoints would go"
    if not dry_run:
        if not yes:
            click.confirm(f"Remove {num_going} of {len(decisions)} checkpoints?", abort=True, err=True)
        removed, _, num_objects, freed_bytes, notes = run.retain()
        report.update(removed=removed, objects=num_objects, freed_bytes=freed_bytes)
        told = f"removed {len(removed)} checkpoints: {num_objects} objects, {shown_bytes(freed_bytes)}"
    report["notes"] = [*_unknown_metrics(keep_best, listed), *notes]
    if wants_json:
        click.echo(as_json(report))
        return
    for note in report["notes"]:
        say(f"note: {note}")
    click.echo(told)


def _refuse(root: str, config: StorageConfig) -> NoReturn:
    """Say why a place that no run was ever saved to cannot be pruned."""
    look(root, None, config)  # which says that nothing is there
    raise CheckpointNotFoundError(f"{root} is one checkpoint: name the root of its run, the folder above it")


def _unknown_metrics(wanted: Sequence[KeepBest], listed: Sequence[ListedCheckpoint]) -> list[str]:
    """A note for each metric that no checkpoint has: a policy by it keeps nothing."""
    known = sorted({metric for one in listed if one.metadata for metric in one.metadata.metrics})
    there = f"those that there are: {', '.join(known):.300}" if known else "no checkpoint has any"
    names = dict.fromkeys(best.metric for best in wanted)
    return [
        f"no checkpoint has the metric {name!r:.100}, which keeps none: {there}" for name in names if name not in known
    ]


def _policy(
    last: int | None, every_steps: int | None, every: timedelta | None, best: Sequence[KeepBest], age: timedelta | None
) -> Retention:
    policies: list[Retention] = [
        *best,
        *([] if last is None else [KeepLast(last)]),
        *([] if every_steps is None else [KeepEverySteps(every_steps)]),
        *([] if every is None else [KeepEvery(every)]),
        *([] if age is None else [KeepYounger(age)]),
    ]
    return KeepAny(*policies) if policies else KeepAll()
