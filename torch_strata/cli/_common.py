"""What the commands share: exit status, options, output that suits a terminal and a pipe."""

import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn

import click
from tqdm import tqdm

from torch_strata.checkpoint._gc import gc_paused
from torch_strata.config import StorageConfig
from torch_strata.errors import CorruptionError, StrataError

__all__ = [
    "DAMAGED",
    "DIFFERENT",
    "FAILED",
    "INTERRUPTED",
    "as_json",
    "bar",
    "config_of",
    "duration",
    "guarded",
    "parse_options",
    "say",
    "shown",
    "shown_bytes",
    "size",
    "store_options",
    "table",
]

# As cmp and diff: nobody may take a failure to look for damage, and only 0 is sound.
DAMAGED = 1
DIFFERENT = 1
FAILED = 2
INTERRUPTED = 130


def guarded(command: Callable[..., None], damage: int = DAMAGED) -> Callable[..., None]:
    """Exit status `damage` for damage alone, 2 for anything else that goes wrong, 130 after Ctrl-C."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with gc_paused():  # a large index is a million objects, which the collector would look at again and again
                command(*args, **kwargs)
        except CorruptionError as error:
            _fail(error, damage)
        except StrataError as error:
            _fail(error, FAILED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except click.Abort:  # the answer to a question was no, or none came
            click.echo("Aborted: nothing was done", err=True)
            raise SystemExit(FAILED) from None
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(FAILED) from None
        except (OSError, MemoryError, ImportError) as error:
            _fail(error, FAILED)
        except Exception:  # a fault of ours; Python's own status for it is 1
            traceback.print_exc()
            raise SystemExit(FAILED) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return run


def _fail(error: BaseException, status: int) -> NoReturn:
    click.echo(f"{type(error).__name__}: {shown(str(error))}", err=True)
    raise SystemExit(status)


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """The option that every command has."""
    text = "A setting of the store; repeatable."
    return click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=text)(command)


def config_of(options: Sequence[str]) -> StorageConfig:
    """Settings from the environment and `--option`."""
    return StorageConfig.from_env(os.environ, storage_options=parse_options(options))


def parse_options(options: Sequence[str], flag: str = "--option") -> dict[str, str]:
    """`KEY=VALUE` pairs. The value may be a secret and is never shown."""
    pairs = [option.partition("=") for option in options]
    for key, separator, _ in pairs:
        if not key or not separator:
            raise click.UsageError(f"{flag}: expected KEY=VALUE")
    return {key: value for key, _, value in pairs}


def say(text: str) -> None:
    """A line on stderr, for people: progress, notes, warnings."""
    tqdm.write(shown(text), file=sys.stderr)


def shown(text: str, at_most: int = 2000) -> str:
    """`text` such that it cannot move a terminal's cursor, change its colours or fill it."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= at_most else f"{safe[:at_most]}…"


def as_json(value: Any) -> str:
    """One line of JSON; numbers that JSON has not are null."""
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def bar(what: str, total: int | None, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """A bar on stderr while something takes long, if that is a terminal; yields what is to be told of progress."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    scales = unit == "B"
    with tqdm(total=total, desc=what, unit=unit, unit_scale=scales, leave=False, file=sys.stderr) as progress:
        yield progress.update


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the last one as long as it is."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def shown_bytes(num_bytes: float) -> str:
    """In the largest decimal unit of which there is at least one."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3 only
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Bytes of a text such as 5GB or 64MiB."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", value.strip().lower())
        num_bytes = float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""] if found else 0
        if num_bytes < 1:
            self.fail(f"{value!r} is no size such as 5GB, 64MiB or 4096", param, ctx)
        return int(num_bytes)


class _Duration(click.ParamType):  # type: ignore[type-arg]
    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> timedelta:
        """Time of a text such as 90s, 6h or 7d."""
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value.strip().lower())
        seconds = float(found[1]) * _SECONDS[found[2]] if found else 0
        if not 0 < seconds < 1e9:
            self.fail(f"{value!r} is no time such as 90s, 30m, 6h, 7d or 2w", param, ctx)
        return timedelta(seconds=seconds)


size, duration = _Size(), _Duration()
