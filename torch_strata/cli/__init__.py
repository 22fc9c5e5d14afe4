"""The command `strata`: look at checkpoints and runs, check, convert and prune them, without importing torch."""

from typing import Any

import click

from torch_strata.cli._common import INTERRUPTED
from torch_strata.cli.bench import bench_command
from torch_strata.cli.convert import copy_command, export_command, import_command
from torch_strata.cli.diff import diff_command
from torch_strata.cli.inspect import inspect_command
from torch_strata.cli.ls import ls_command
from torch_strata.cli.prune import prune_command
from torch_strata.cli.verify import verify_command

__all__ = ["main"]


class _Strata(click.Group):
    """For Ctrl-C while the line is read click ends with 1, by which this command says damage."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


@click.group(cls=_Strata)
@click.version_option(package_name="torch-strata")
def main() -> None:
    """Look at checkpoints and runs, check, convert and prune them.

    URL is a local path or a URL such as s3://bucket/run/step-100. Exit status 0: done and well, 1: damaged or
    different, 2: it could not be done, or was called wrongly, 130: interrupted, 143: terminated.
    """


for _command in (
    *(ls_command, inspect_command, verify_command, diff_command, prune_command),
    *(copy_command, import_command, export_command, bench_command),
):
    main.add_command(_command)
