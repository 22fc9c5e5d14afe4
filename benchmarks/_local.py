"""The local disk: save with fsync, load warm, load cold; raw ways, stock and torch_strata in turn."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _contenders as c
import _measure as m
import _memory
import _raw
import _state

GB = 1_000_000_000
Samples = dict[str, list[m.Sample]]


def run(args: argparse.Namespace, directory: Path, report: dict[str, Any]) -> None:
    """Measure and add the three tables to `report`."""
    bench = _Local(args, directory)
    saved = bench.save()
    bench.leave_one_save_of_each()
    warm = bench.load(_raw.WARM_READ_WAYS, m.warm)
    cold = bench.load(_raw.COLD_READ_WAYS, m.evict)
    labels, stock_label, size_gb = bench.labels, bench.labels[c.STOCK], bench.size_gb
    bench.remove_all()
    # The state is let go of first: the processes that measure memory build one of their own.
    del bench
    peaks = _memory.peaks(args, directory, labels=labels) if args.memory else {}
    for title, kind, samples in (
        ("Save with fsync", "save", saved),
        ("Load, page cache warm", "load", warm),
        ("Load, page cache cold", "load", cold),
    ):
        table = m.rows(
            samples,
            amount=size_gb,
            size_gb=size_gb,
            raw=c.fastest(samples, prefix=c.RAW)[0],
            stock=stock_label,
            peaks_mb={label: peak[kind] for label, peak in peaks.items()},
        )
        m.add(report, f"{title} ({size_gb:.2f} GB)", table, unit="GB/s")


class _Local:
    """One state in memory and one directory for each kind of contender."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args = args
        self._state = _state.mixed_state(int(args.size_gb * GB))
        self._views = _state.buffers(self._state)
        self._raw = _raw.RawFiles(self._views)
        self._places = {kind: directory / kind for kind in (c.RAW, c.STOCK, c.STRATA)}
        self._stock = {k.label: k for k in (c.stock(self._state, num_threads=n) for n in args.stock_threads)}
        self._chosen = [] if c.STRATA in args.without else [c.strata(self._state)]
        self.size_gb = sum(map(len, self._views)) / GB

    @property
    def labels(self) -> dict[str, str]:
        """Label of each chosen kind."""
        return {k.kind: k.label for k in self._chosen}

    def save(self) -> Samples:
        """Find the best raw ways and the best thread_count, then alternate them with torch_strata.

        Every save goes to a fresh directory on a disk with nothing left to write; removal is not timed.
        """
        raw = {f"raw {way}": self._raw_save(way) for way in _raw.WRITE_WAYS}
        stock = {label: self._saving(k) for label, k in self._stock.items()}
        rounds = {"num_rounds": self._args.trials, "before": self._clean}
        contenders = {label: raw[label] for label in c.trial(raw, keep=self._args.keep, **rounds)}
        self._chosen.append(self._stock[c.trial(stock, keep=1, **rounds)[0]])
        contenders |= {k.label: self._saving(k) for k in self._chosen}
        return m.alternate(contenders, num_rounds=self._args.rounds, before=self._clean)

    def leave_one_save_of_each(self) -> None:
        """Save once with every kind, and check that each loads bit for bit."""
        self._clean()
        self._raw_save(_raw.WRITE_WAYS[0])()
        loads = {c.RAW: self._raw_load(_raw.WARM_READ_WAYS[0])} | {k.label: self._loading(k) for k in self._chosen}
        for k in self._chosen:
            self._saving(k)()
        expected = _state.digest(self._views)
        for label, load in loads.items():
            c.check_load(label, load, self._state, self._views, expected)

    def load(self, ways: tuple[_raw.Way, ...], prepare: Callable[[Path], None]) -> Samples:
        """Alternate the best raw ways of loading with the chosen kinds; `prepare` sets the page cache, untimed."""
        kinds = {k.label: k.kind for k in self._chosen}

        def before(label: str) -> None:
            prepare(self._places[kinds.get(label, c.RAW)])

        raw = {f"raw {way}": self._raw_load(way) for way in ways}
        kept = c.trial(raw, keep=self._args.keep, num_rounds=self._args.trials, before=before)
        contenders = {label: raw[label] for label in kept} | {k.label: self._loading(k) for k in self._chosen}
        return m.alternate(contenders, num_rounds=self._args.rounds, before=before)

    def remove_all(self) -> None:
        """Delete every save."""
        for place in self._places.values():
            c.remove(place)

    def _clean(self, label: str = "") -> None:
        self.remove_all()
        os.sync()

    def _raw_save(self, way: _raw.Way) -> Callable[[], object]:
        return lambda: self._raw.save(self._places[c.RAW], way)

    def _raw_load(self, way: _raw.Way) -> Callable[[], object]:
        return lambda: self._raw.load(self._places[c.RAW], way)

    def _saving(self, contender: c.Contender) -> Callable[[], object]:
        return lambda: contender.save(self._places[contender.kind])

    def _loading(self, contender: c.Contender) -> Callable[[], object]:
        return lambda: contender.load(self._places[contender.kind])
