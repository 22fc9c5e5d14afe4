"""S3 that is far away and fails now and then: seconds beside s3torchconnector, and how many saves and loads failed.

The server answers late and lets a share of the requests fail as networks and stores do: throttled, reset, without an
answer, with an error, cut in the middle. Raw requests know no second try and so are not beside these.
"""

import argparse
import http.client
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import _contenders as c
import _measure as m
import _s3
import _state

GB = 1_000_000_000
# What the measurement itself asks of the server fails as often as anything else.
TRIES = 50


@dataclass
class Outcomes:
    """Of one contender's saves, or of its loads."""

    samples: list[m.Sample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def attempt(self, action: Callable[[], object]) -> bool:
        """Run `action` and note how long it took, or what it failed at."""
        try:
            self.samples.append(m.timed(action))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # CheckpointException is no Exception
            reasons = getattr(error, "failures", None) or {0: (error, None)}
            self.failures[type(next(iter(reasons.values()))[0]).__name__] += 1
            return False
        return True

    def __str__(self) -> str:
        failed = ", ".join(f"{count} {name}" for name, count in self.failures.items())
        seconds = m.spread([sample.seconds for sample in self.samples]) if self.samples else "-"
        return f"{seconds} | {sum(self.failures.values())}{f' ({failed})' if failed else ''}"


def run(args: argparse.Namespace, directory: Any, report: dict[str, Any]) -> None:
    """Measure and add the table to `report`."""
    state = _state.mixed_state(int(args.size_gb * GB))
    views = _state.buffers(state)
    original, size_gb = [bytes(view) for view in views], sum(map(len, views)) / GB
    flags = ["--latency-ms", str(args.latency_ms), "--faults", str(args.faults)]
    if args.busy_above:
        flags += ["--busy-above", str(args.busy_above)]
    with _s3.server(args, *flags) as endpoint:
        c.use_s3_environment(endpoint)
        bucket = _s3.Bucket(endpoint, args.bucket)
        _insist(bucket.create)
        contenders = _contenders(args, state, endpoint)
        outcomes = {k.label: (Outcomes(), Outcomes()) for k in contenders}
        for number in range(args.rounds):
            turn = number % len(contenders)
            for k in contenders[turn:] + contenders[:turn]:
                _insist(lambda: bucket.empty(""))
                _one(k, f"s3://{args.bucket}/{k.kind}/step-1", views, original, *outcomes[k.label])
    lines = ["| contender | save, s | failed | load, s | failed |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {label} | {saves} | {loads} |" for label, (saves, loads) in outcomes.items()]
    busy = f", busy above {args.busy_above} requests" if args.busy_above else ""
    title = (
        f"### S3, {args.latency_ms} ms late, {args.faults:.1%} faults{busy} ({size_gb:.2f} GB, {args.rounds} rounds)"
    )
    report.setdefault("text", []).extend([title, "", *lines, ""])
    for label, both in outcomes.items():
        for kind, outcome in zip(("save", "load"), both, strict=True):
            seconds = [sample.seconds for sample in outcome.samples]
            report["tables"][f"{kind} {label}"] = {"seconds": seconds, "failures": dict(outcome.failures)}


def _contenders(args: argparse.Namespace, state: dict[str, Any], endpoint: str) -> list[c.Contender]:
    found = [] if c.STRATA in args.without else [c.strata(state)]
    if c.CONNECTOR not in args.without and c.has_connector():
        found += [c.connector(state, endpoint=endpoint, num_threads=n) for n in args.stock_threads]
    return found


def _one(
    contender: c.Contender, url: str, views: list[memoryview], original: list[bytes], saves: Outcomes, loads: Outcomes
) -> None:
    """A save and, if it worked, a load of it, whose bytes are compared."""
    if not saves.attempt(lambda: contender.save(url)):
        return
    _state.clear(contender.state)
    loaded = loads.attempt(lambda: contender.load(url))
    if loaded and any(map(operator.ne, views, original)):
        raise RuntimeError(f"{contender.label}: loaded bytes differ from those saved")
    for view, content in zip(views, original, strict=True):  # a load that failed has left some of it zero
        view[:] = content


def _insist(request: Callable[[], object]) -> None:
    for left in reversed(range(TRIES)):
        try:
            request()
            return
        except (OSError, http.client.HTTPException):
            if not left:
                raise
