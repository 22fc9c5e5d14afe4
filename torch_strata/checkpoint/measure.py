"""What this machine and a store can do: rates and latencies, with objects that are removed again. Imports no torch."""

import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch_strata import _native
from torch_strata._store import local_folder, open_store, place_below, resolve_config
from torch_strata.config import StorageConfig
from torch_strata.errors import ConfigError, StorageError

__all__ = ["Measurement", "measure"]

_MIB = 1 << 20
_SMALL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Objects of one size, written and read by so many at a time.

    Attributes:
        object_bytes: Size of each object in bytes.
        concurrency: Objects in flight.
        num_objects: Written and read.
        write_bytes_per_second: Of all together, durable when counted.
        read_bytes_per_second: Of all together; of a local store mostly what the system's cache can do.
        write_seconds: Median time of one write.
        read_seconds: Median time of one read.
    """

    object_bytes: int
    concurrency: int
    num_objects: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    write_seconds: float
    read_seconds: float


def measure(
    place: str | os.PathLike[str],
    *,
    sizes: Sequence[int] = (_SMALL_BYTES, _MIB, 64 * _MIB),
    concurrencies: Sequence[int] = (1, 4, 16),
    total_bytes: int = 256 * _MIB,
    config: StorageConfig | None = None,
    storage_options: Mapping[str, str] | None = None,
    said: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Write and read objects in a new folder at a place, and remove them.

    Args:
        place: URL or local path of a folder that may be written to.
        sizes: Of the objects, in bytes.
        concurrencies: Objects in flight.
        total_bytes: About what is written for each of both, in bytes: at most 64 objects, at least one for each in
            flight.
        config: Limits of the store.
        storage_options: Its own settings; win over those of `config`.
        said: Told of each measurement as it is made.

    Raises:
        ConfigError: If a size or a concurrency is less than 1.
        StorageError: If the store fails; what was written is removed.
    """
    if min((*sizes, *concurrencies, total_bytes)) < 1:
        raise ConfigError("expected sizes and concurrencies of at least 1")
    settings = resolve_config(config, storage_options)
    folder = f"strata-bench-{uuid.uuid4().hex}"
    url = place_below(place, folder)
    found = []
    try:
        for size in sizes:
            for concurrency in concurrencies:
                store = open_store(url, replace(settings, max_concurrency=max(settings.max_concurrency, concurrency)))
                count = max(concurrency, min(64, total_bytes // size))
                measured = _measure(store, size, concurrency, count)
                found.append(measured)
                if said is not None:
                    said(measured)
    finally:
        if (made := local_folder(url)) is not None:
            with suppress(OSError):
                os.rmdir(made)
    return found


def _measure(store: _native.Store, size: int, concurrency: int, count: int) -> Measurement:
    # Not zeros, which some stores and disks make less of.
    data = os.urandom(min(size, _MIB)) * -(-size // _MIB)
    data = data[:size]
    names = [f"{size}-{concurrency}-{number}" for number in range(count)]
    try:
        wrote = _clocked(concurrency, [partial(store.put, name, data) for name in names])
        read = _clocked(concurrency, [partial(store.read, name) for name in names])
    finally:
        for name in names:
            with suppress(StorageError):
                store.delete(name)
    return Measurement(
        object_bytes=size,
        concurrency=concurrency,
        num_objects=count,
        write_bytes_per_second=size * count / wrote[0],
        read_bytes_per_second=size * count / read[0],
        write_seconds=wrote[1],
        read_seconds=read[1],
    )


def _clocked(concurrency: int, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Seconds for all, and the median of one."""

    def clocked(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        each: Iterator[float] = pool.map(clocked, calls)
        seconds = list(each)
    return max(time.perf_counter() - began, 1e-9), statistics.median(seconds)
