"""Clocks, page cache, memory peaks and the tables they end in. Knows nothing of checkpoints."""

import ctypes
import gc
import mmap
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed run. `cpu_seconds` is user and system time of all threads of this process."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Least, median and greatest of a figure over the rounds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return " / ".join(_short(value) for value in (self.low, self.median, self.high))


def spread(values: Sequence[float]) -> Spread:
    """Spread of at least one value."""
    return Spread(low=min(values), median=statistics.median(values), high=max(values))


def timed(action: Callable[[], object]) -> Sample:
    """Run `action` once, with the garbage of whatever ran before collected first."""
    gc.collect()
    cpu_before, started_at = _cpu_seconds(), time.perf_counter()
    action()
    return Sample(seconds=time.perf_counter() - started_at, cpu_seconds=_cpu_seconds() - cpu_before)


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[Sample]]:
    """Run every contender once a round and start each round with another one.

    `before` and `after` get the contender's name and are not timed. Index i of every list is round i, so ratios
    taken index by index compare neighbours in time.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    for round_number in range(num_rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            before(name)
            samples[name].append(timed(contenders[name]))
            after(name)
    return samples


def median_seconds(samples: Sequence[Sample]) -> float:
    """Median wall time."""
    return statistics.median(sample.seconds for sample in samples)


def speed_ratios(samples: Sequence[Sample], reference: Sequence[Sample]) -> Spread:
    """How many times as fast as `reference`, round by round: 1.0 is as fast, above is faster."""
    return spread([ref.seconds / own.seconds for own, ref in zip(samples, reference, strict=True)])


def peak_rss_above(action: Callable[[], object]) -> int:
    """Bytes by which resident memory rose during `action` above what it was just before.

    Source: ``VmHWM`` after writing 5 to ``/proc/self/clear_refs``, which sets it to the present size (proc(5)).
    """
    gc.collect()
    _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    action()
    return max(0, _status_bytes("VmHWM") - before)


def bytes_read() -> int:
    """Bytes that this process has asked read system calls for and got, page cache or not (``rchar`` in proc(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def warm(directory: Path) -> None:
    """Read every file through the page cache once."""
    scratch = memoryview(bytearray(8 << 20))
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def evict(directory: Path) -> None:
    """Drop every file from the page cache and check with mincore(2) that it is gone.

    Raises:
        RuntimeError: If more than 1 % of a file's pages are still resident.
    """
    for path in _files(directory):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resident = resident_share(path)
        if resident > 0.01:
            raise RuntimeError(f"{path} is still in the page cache: expected 0 % resident, found {resident:.0%}")


def resident_share(path: Path) -> float:
    """Share of a file's pages that the page cache holds, from 0 to 1."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    num_pages = -(-size // PAGE)
    flags = (ctypes.c_ubyte * num_pages)()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m,
    ):
        address = (ctypes.c_char * size).from_buffer(m)
        status = _libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(size), flags)
        del address
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(flag & 1 for flag in flags) / num_pages


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender's line of a table."""

    name: str
    rate: Spread
    cpu_seconds_per_gb: float
    vs_raw: Spread
    vs_stock: Spread | None
    peak_rss_mb: float | None = None
    note: str = ""


def rows(
    samples: Mapping[str, Sequence[Sample]],
    *,
    amount: float,
    size_gb: float,
    raw: str,
    stock: str | None,
    peaks_mb: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> list[Row]:
    """Turn samples into lines. `amount` over seconds is the rate: GB, or items."""
    return [
        Row(
            name=name,
            rate=spread([amount / sample.seconds for sample in own]),
            cpu_seconds_per_gb=statistics.median(sample.cpu_seconds for sample in own) / size_gb,
            vs_raw=speed_ratios(own, samples[raw]),
            vs_stock=speed_ratios(own, samples[stock]) if stock else None,
            peak_rss_mb=(peaks_mb or {}).get(name),
            note=(notes or {}).get(name, ""),
        )
        for name, own in samples.items()
    ]


def markdown(title: str, table: Sequence[Row], *, unit: str, beside: str = "stock") -> str:
    """A table of `rows`; each spread is least / median / greatest."""
    lines = [
        f"### {title}",
        "",
        f"| contender | {unit} | x raw | x {beside} | CPU s/GB | peak RSS above state, MB | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        peak = "" if row.peak_rss_mb is None else f"{row.peak_rss_mb:.0f}"
        lines.append(
            f"| {row.name} | {row.rate} | {row.vs_raw} | {row.vs_stock or ''} "
            f"| {row.cpu_seconds_per_gb:.2f} | {peak} | {row.note} |"
        )
    return "\n".join([*lines, ""])


def add(report: dict[str, Any], title: str, table: Sequence[Row], *, unit: str, beside: str = "stock") -> None:
    """Append a table to `report`: markdown under ``text``, plain values under ``tables``."""
    report.setdefault("text", []).append(markdown(title, table, unit=unit, beside=beside))
    report["tables"][title] = [asdict(row) for row in table]


def machine(directory: Path) -> str:
    """One line that names the machine: cores, memory, kernel, file system."""
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE / (1 << 30)
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    resolved = directory.resolve()
    point, kind = max((m for m in mounts if resolved.is_relative_to(m[0])), key=lambda m: len(m[0]))
    cpu = next((ln.split(": ")[1] for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln), "?")
    return (
        f"{os.cpu_count()} cores ({cpu}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"{kind} on {point}, Python {platform.python_version()}"
    )


def _short(value: float) -> str:
    """Three significant digits, or all of them before the point."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{decimals}f}"


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
