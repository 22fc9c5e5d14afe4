"""Numbers as text that Prometheus scrapes, and files of it for node_exporter. Pure but for `write_text`.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. Base units, `_total` for
counters, and no name that OpenTelemetry would change. Imports no torch.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_strata.errors import StorageError

__all__ = ["Family", "Sample", "exposition", "write_text"]


@dataclass(frozen=True)
class Sample:
    """One value.

    Attributes:
        value: In the unit that the name says.
        labels: In addition to those of the text.
        suffix: ``_sum`` or ``_count`` in a summary.
    """

    value: float
    labels: Mapping[str, str]
    suffix: str = ""


@dataclass(frozen=True)
class Family:
    """Values of one meaning.

    Attributes:
        name: With the unit, and ``_total`` for a counter.
        kind: As Prometheus calls it.
        help: One line.
        samples: Empty if there are no values yet.
    """

    name: str
    kind: Literal["counter", "gauge", "summary"]
    help: str
    samples: Sequence[Sample]


def exposition(families: Sequence[Family], labels: Mapping[str, str]) -> str:
    """The text of `families`, each sample with `labels` and its own; families without samples are left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for sample in family.samples:
            pairs = {**labels, **sample.labels}.items()
            inner = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in pairs)
            lines.append(f"{family.name}{sample.suffix}{{{inner}}} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file at once: who reads it sees the old text or the new one.

    Raises:
        StorageError: If it cannot be written.
    """
    target = Path(path)
    try:
        # Not `*.prom`, which node_exporter would read half-written.
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp's own are for us alone, and another user scrapes
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StorageError(f"cannot write metrics to {target}: {error}") from error


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
