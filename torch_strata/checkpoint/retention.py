"""Which checkpoints of a run are kept: small policies that can be combined. Imports no torch.

What is decided, and why, is worked out in Rust (native/strata-checkpoint/src/run/retention.rs). Whatever the policy
says, the newest checkpoint, the newest one that was verified, and those that somebody holds stay.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch_strata.errors import ConfigError

__all__ = [
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepEverySteps",
    "KeepLast",
    "KeepYounger",
    "Retention",
    "best_of",
    "best_policies",
]


@dataclass(frozen=True)
class KeepAll:
    """Everything."""

    def as_native(self) -> tuple[Any, ...]:
        """As `_native.Run` takes it; so for all policies."""
        return ("all",)


@dataclass(frozen=True)
class KeepLast:
    """The `count` checkpoints with the highest steps."""

    count: int

    def __post_init__(self) -> None:
        _check_count("KeepLast.count", self.count)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("last", self.count)


@dataclass(frozen=True)
class KeepEverySteps:
    """Those whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEverySteps.steps", self.steps)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("every_steps", self.steps)


@dataclass(frozen=True)
class KeepEvery:
    """The first, and each that was saved `span` or more after the last that was kept for this."""

    span: timedelta

    def __post_init__(self) -> None:
        _check_span("KeepEvery.span", self.span)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("every", self.span.total_seconds())


@dataclass(frozen=True)
class KeepYounger:
    """Those that were saved less than `age` ago."""

    age: timedelta

    def __post_init__(self) -> None:
        _check_span("KeepYounger.age", self.age)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("younger", self.age.total_seconds())


@dataclass(frozen=True)
class KeepBest:
    """The `count` best by a metric that was given to ``save``; those without it, or with NaN, are not compared."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest.metric: expected a name, found {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"KeepBest.mode: expected 'min' or 'max', found {self.mode!r}")
        _check_count("KeepBest.count", self.count)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("best", self.metric, self.mode == "max", self.count)

    def best_of(self, metrics: list[dict[str, float]]) -> int | None:
        """Position of the best; of equal ones the last. None if none has the metric."""
        values = [(at, found[self.metric]) for at, found in enumerate(metrics) if self.metric in found]
        values = [(at, value) for at, value in values if not math.isnan(value)]
        sign = 1 if self.mode == "max" else -1
        return max(values, key=lambda pair: (sign * pair[1], pair[0]))[0] if values else None


@dataclass(frozen=True, init=False)
class KeepAny:
    """What any of `policies` keeps."""

    policies: tuple["Retention", ...]

    def __init__(self, *policies: "Retention") -> None:
        if not policies:
            raise ConfigError("KeepAny: expected at least one policy; KeepAll() keeps everything")
        for policy in policies:
            if not isinstance(policy, Retention):
                raise ConfigError(f"KeepAny: expected policies, found {policy!r}")
        object.__setattr__(self, "policies", policies)

    def as_native(self) -> tuple[Any, ...]:  # noqa: D102
        return ("any", [policy.as_native() for policy in self.policies])


Retention = KeepAll | KeepLast | KeepEverySteps | KeepEvery | KeepYounger | KeepBest | KeepAny


def best_policies(policy: Retention) -> list[KeepBest]:
    """Each KeepBest in a policy."""
    if isinstance(policy, KeepAny):
        return [best for inner in policy.policies for best in best_policies(inner)]
    return [policy] if isinstance(policy, KeepBest) else []


def best_of(policy: Retention, metric: str | None) -> KeepBest:
    """The one KeepBest in a policy, or the one for `metric`.

    Raises:
        ConfigError: If there is none, or it is not clear which.
    """
    there = best_policies(policy)
    found = [best for best in there if metric is None or best.metric == metric]
    if not found:
        by = "" if metric is None else f" for the metric {metric!r}"
        raise ConfigError(f"best: the manager's retention has no KeepBest{by}; it has {policy!r}")
    if len({(best.metric, best.mode) for best in found}) > 1:
        told = ", ".join(f"{best.metric!r} ({best.mode})" for best in found)
        raise ConfigError(f"best: not clear by which of {told}; name one: manager.load(manager.best(metric).step)")
    return found[0]


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 1 << 63:
        raise ConfigError(f"{name}: expected an int of at least 1, found {value!r}")


def _check_span(name: str, value: object) -> None:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{name}: expected a timedelta above 0, found {value!r}")
