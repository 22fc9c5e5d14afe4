"""What has become of the saves of one manager in this process: counted, told in the log, shown as metrics."""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta

from torch_strata import _native
from torch_strata.checkpoint._order import SaveOrder
from torch_strata.checkpoint.alarms import StaleAlarm
from torch_strata.checkpoint.handle import SaveHandle
from torch_strata.checkpoint.metrics import Family, Sample, exposition
from torch_strata.checkpoint.run import CheckpointMetadata, CheckpointType
from torch_strata.checkpoint.save_stats import SaveStats
from torch_strata.checkpoint.store_stats import StoreStats
from torch_strata.errors import CheckpointError

__all__ = ["RunRecord"]

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Attempt:
    """A save that has begun."""

    order: SaveOrder
    handle: SaveHandle
    began_at: float
    is_noted: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Totals:
    """Of the saves of one type."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))

    def took(self, what: str, seconds: float) -> None:
        count_and_sum = self.seconds[what]
        count_and_sum[0] += 1
        count_and_sum[1] += seconds


class RunRecord:
    """Of one manager. Threads may use it at once."""

    def __init__(self, root: str, wanted_metrics: Sequence[str] = ()) -> None:
        self._root = root
        self._wanted_metrics = set(wanted_metrics)
        self._lock = threading.Lock()
        self._attempts: list[_Attempt] = []
        self._totals: defaultdict[str, _Totals] = defaultdict(_Totals)
        self._swept: Counter[str] = Counter()
        self._store = StoreStats()
        self._num_kept: int | None = None
        self._durable_at = time.monotonic()
        self._durable_clock: float | None = None
        self._durable_step: int | None = None
        self._last_failure: BaseException | None = None
        self._stale = StaleAlarm()

    def follow(self, handle: SaveHandle, order: SaveOrder) -> None:
        """Take notice of a save that has begun, and of its end."""
        began_at = time.monotonic() - handle.stage_time.total_seconds()
        attempt = _Attempt(order=order, handle=handle, began_at=began_at)
        with self._lock:
            self._attempts.append(attempt)
        handle.add_done_callback(lambda _: self._note(attempt))

    def note_metrics(self, order: SaveOrder) -> None:
        """Say, once of each, that a policy is by a metric which a save with metrics does not have."""
        missing = self._wanted_metrics - order.metrics.keys() if order.metrics else set()
        self._wanted_metrics -= missing
        for metric in sorted(missing):
            _logger.warning(
                "%s: step %s is saved without the metric %r, by which KeepBest compares; it has %s",
                *(self._root, order.step, metric, ", ".join(map(repr, order.metrics))),
            )

    def note_refused(self, order: SaveOrder) -> None:
        """Take notice of a save that failed before it went on in the background."""
        with self._lock:
            self._totals[order.checkpoint_type].counts["failures"] += 1

    def note_torn(self, order: SaveOrder) -> None:
        """Take notice of a state that changed while it was copied."""
        with self._lock:
            self._totals[order.checkpoint_type].counts["torn"] += 1

    def learn_newest(self, run: _native.Run, order: SaveOrder) -> None:
        """Look, once, at what the run has: a resumed training that stands still is found at its first save."""
        kind = _kind(order.checkpoint_type)
        if self._stale.knows(kind):
            return
        there = map(CheckpointMetadata.of_native, run.all())
        before = [found for found in there if _kind(found.checkpoint_type) == kind and found.step < order.step]
        if before:
            self._stale.note(kind, before[-1].step, before[-1].model_hash)

    def note_commit(self, order: SaveOrder, model_hash: str | None) -> None:
        """Compare what was committed with the checkpoint before it. Called where this rank committed."""
        is_stale, words = self._stale.note(_kind(order.checkpoint_type), order.step, model_hash)
        if words:
            _logger.warning("%s: %s", self._root, words)
        with self._lock:
            self._totals[order.checkpoint_type].counts["stale"] += is_stale

    def note_sweep(self, removed: int, num_kept: int, num_objects: int, freed_bytes: int) -> None:
        """Take notice of what a policy has removed."""
        with self._lock:
            self._num_kept = num_kept
            self._swept.update(removed=removed, removed_objects=num_objects, freed_bytes=freed_bytes)

    @property
    def last_durable_age(self) -> timedelta:
        """Time since a save was committed last, on all ranks; since the start if none was."""
        self._settle()
        return timedelta(seconds=time.monotonic() - self._durable_at)

    def check_age(self, limit: timedelta) -> None:
        """Refuse to go on if saves have been of no avail for longer than `limit`.

        Time in which nobody saved is not held against anyone: since the last commit a save must have failed, or be
        under way for as long.

        Raises:
            CheckpointError: So, from what the last save failed at.
        """
        age = self.last_durable_age
        oldest = min((attempt.began_at for attempt in list(self._attempts)), default=time.monotonic())
        hangs = time.monotonic() - oldest > limit.total_seconds()
        if age > limit and (self._last_failure is not None or hangs):
            why = "a save is still under way" if self._last_failure is None else "saves fail"
            raise CheckpointError(
                f"{self._root}: nothing was committed for {age}, more than max_age={limit}: {why}"
            ) from self._last_failure

    def text(self, *, rank: int) -> str:
        """All of it as metrics, see `exposition`."""
        self._settle()
        with self._lock:
            families = self._families()
        return exposition(families, {"run": self._root, "rank": str(rank)})

    def _settle(self) -> None:
        """Wait until every save that has ended is noted: whoever waits for one may be told before we are."""
        for attempt in list(self._attempts):
            if attempt.handle.done():
                attempt.is_noted.wait(timeout=1)  # in a forked child nobody is there to note it

    def _note(self, attempt: _Attempt) -> None:
        """The end of a save, in the thread that saved."""
        stats, order = attempt.handle.stats, attempt.order
        try:
            with self._lock:
                totals = self._totals[order.checkpoint_type]
                totals.took("stage", attempt.handle.stage_time.total_seconds())
                self._attempts.remove(attempt)
                if stats is None:
                    self._last_failure = attempt.handle.failure
                    totals.counts["failures"] += 1
                    return
                self._last_failure = None
                self._durable_at, self._durable_clock, self._durable_step = time.monotonic(), time.time(), order.step
                totals.counts.update(saves=1, written=stats.written_bytes, referred=stats.referred_bytes)
                totals.took("write", stats.write_seconds)
                if stats.commit_seconds:  # of bytes it is in the time to write them
                    totals.took("commit", stats.commit_seconds)
                self._store = self._store.plus(stats.store)
            if stats.committed:
                self._tell(stats, order, time.monotonic() - attempt.began_at)
        finally:
            attempt.is_noted.set()

    def _tell(self, stats: SaveStats, order: SaveOrder, seconds: float) -> None:
        all_bytes = max(stats.own_bytes + stats.referred_bytes, 1)
        _logger.info(
            "%s/%s: %s, %.1f MB written and %.1f MB referred to: %.1f %% of the whole; %.2f s after the call",
            *(self._root, order.folder, order.checkpoint_type.value, stats.own_bytes / 1e6, stats.referred_bytes / 1e6),
            *(100 * stats.own_bytes / all_bytes, seconds),
        )

    def _families(self) -> list[Family]:
        gauges = (
            (
                "last_durable_age_seconds",
                "Time since a save was committed last, since the start if none was, when this was written.",
                time.monotonic() - self._durable_at,
            ),
            ("last_durable_timestamp_seconds", "When a save was committed last.", self._durable_clock),
            ("last_durable_step", "Step of the save that was committed last.", self._durable_step),
            ("saves_in_flight", "Saves that go on in the background.", len(self._attempts)),
            ("kept", "Checkpoints that the policy has left in place.", self._num_kept),
        )
        return [
            *(Family(f"strata_checkpoint_{name}", "gauge", told, _only(value)) for name, told, value in gauges),
            *(self._counter(*row) for row in _COUNTERS),
            *(self._summary(*row) for row in _SUMMARIES),
            *(
                Family(f"strata_checkpoint_{name}_total", "counter", told, _only(self._swept[name]))
                for name, told in _SWEPT
            ),
            *(
                Family(f"strata_store_{f.name}_total", "counter", told, _only(getattr(self._store, f.name)))
                for f, told in zip(fields(StoreStats), _STORE, strict=True)
            ),
        ]

    def _counter(self, name: str, key: str, told: str) -> Family:
        samples = [Sample(of_type.counts[key], {"type": kind}) for kind, of_type in self._totals.items()]
        return Family(f"strata_checkpoint_{name}_total", "counter", told, samples)

    def _summary(self, what: str, told: str) -> Family:
        samples = []
        for kind, of_type in self._totals.items():
            count, total = of_type.seconds[what]
            samples += [Sample(total, {"type": kind}, "_sum"), Sample(int(count), {"type": kind}, "_count")]
        return Family(f"strata_checkpoint_{what}_seconds", "summary", told, samples)


# Name, key in `_Totals.counts`, what it counts.
_COUNTERS = (
    ("saves", "saves", "Saves that were committed."),
    ("save_failures", "failures", "Saves that failed."),
    ("torn_saves", "torn", "Saves of a state that changed while it was copied."),
    ("stale_saves", "stale", "Checkpoints with the model of the one before, of another step."),
    ("written_bytes", "written", "Bytes that this rank wrote."),
    ("referred_bytes", "referred", "Bytes that were not written because an earlier checkpoint holds them."),
)
_SUMMARIES = (
    ("stage", "Time for which training stood while the state was copied."),
    ("write", "Time in which this rank wrote its part."),
    ("commit", "Time for a commit, on the rank that commits."),
)
_SWEPT = (
    ("removed", "Checkpoints that the policy has removed."),
    ("removed_objects", "Objects that went with them, or that dead saves had left."),
    ("freed_bytes", "Bytes of these objects."),
)
# As the fields of StoreStats.
_STORE = (
    "Requests sent to write and commit checkpoints, every try counted.",
    "Tries after the first of a request.",
    "Answers by which the store asked for fewer requests.",
    "Transfers begun again because too few bytes moved.",
    "Second requests for what a first one was slow to bring.",
)


def _kind(checkpoint_type: CheckpointType) -> str:
    """The same for types that hold the same part of the state."""
    return _native.run_folder(0, checkpoint_type.value)


def _only(value: float | None) -> list[Sample]:
    """The one sample of a family without labels of its own; none if there is no value yet."""
    return [] if value is None else [Sample(value, {})]
