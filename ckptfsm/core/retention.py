"""Which checkpoints to keep: policies, and how they combine.

Policies are pure and may be wrong: the ledger keeps the latest, the pinned and the leased checkpoints
in any case (I7), and a policy that raises keeps everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from ckptfsm.core.errors import ConfigError
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The facts that a policy may look at. ``run_seconds``: see ``Checkpoint``."""

    step: int
    run_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def immutable(checkpoints: Iterable[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """``checkpoints`` for policies that might change them: copies, but of those that are read-only."""
    return tuple(
        c
        if isinstance(c.metrics, MappingProxyType)
        else replace(c, metrics=MappingProxyType(dict(c.metrics)))
        for c in checkpoints
    )


class Policy:
    """Base of all policies. Subclass it and return the steps to keep from ``preserve``."""

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The steps to keep among ``checkpoints`` (oldest first, all tracked)."""
        raise TypeError(f"{type(self).__name__} does not define preserve()")

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((self, other))

    def __and__(self, other: Policy) -> Policy:
        return AllOf((self, other))


@dataclass(frozen=True)
class KeepAll(Policy):
    """Keep everything: the default."""

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return {c.step for c in checkpoints}


@dataclass(frozen=True)
class LatestN(Policy):
    """Keep the ``n`` newest. With ``n=0`` the ledger still keeps the latest tracked checkpoint."""

    n: int

    def __post_init__(self) -> None:
        _whole("LatestN", self.n, at_least=0)

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return {c.step for c in checkpoints[-self.n :]} if self.n else set()


@dataclass(frozen=True)
class EveryNSteps(Policy):
    """Keep every checkpoint whose step is a multiple of ``n``."""

    n: int

    def __post_init__(self) -> None:
        _whole("EveryNSteps", self.n, at_least=1)

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return {c.step for c in checkpoints if c.step % self.n == 0}


@dataclass(frozen=True)
class EveryNSeconds(Policy):
    """Keep checkpoints at least ``seconds`` of run time apart, beginning with the oldest."""

    seconds: float

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not (number and math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError("EveryNSeconds needs a positive number of seconds")

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        kept: set[int] = set()
        due = -math.inf
        for info in checkpoints:
            if info.run_seconds >= due:
                kept.add(info.step)
                due = info.run_seconds + self.seconds
        return kept


@dataclass(frozen=True)
class BestN(Policy):
    """Keep the ``n`` best by ``metric``; ties go to the newer. A missing or NaN metric is worst."""

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _whole("BestN", self.n, at_least=0)
        if not isinstance(self.metric, str):
            raise ConfigError(f"BestN needs the name of a metric, not {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"BestN mode must be 'min' or 'max', not {self.mode!r}")

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        sign = 1.0 if self.mode == "min" else -1.0
        scored = [
            (sign * info.metrics[self.metric], -info.step)
            for info in checkpoints
            if not math.isnan(info.metrics.get(self.metric, math.nan))
        ]
        return {-negated for _, negated in sorted(scored)[: self.n]}


@dataclass(frozen=True)
class Steps(Policy):
    """Keep these steps."""

    steps: frozenset[int]

    def __init__(self, steps: Collection[int]) -> None:
        if isinstance(steps, str) or not all(type(step) is int for step in steps):
            raise ConfigError("Steps needs whole numbers")
        object.__setattr__(self, "steps", frozenset(steps))

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return self.steps & {c.step for c in checkpoints}


@dataclass(frozen=True)
class AnyOf(Policy):
    """Keep a step that at least one policy keeps (``a | b``)."""

    policies: tuple[Policy, ...]

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        given = immutable(checkpoints)
        return {step for policy in self.policies for step in policy.preserve(given)}


@dataclass(frozen=True)
class AllOf(Policy):
    """Keep a step that every policy keeps (``a & b``)."""

    policies: tuple[Policy, ...]

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        given = immutable(checkpoints)
        kept = {c.step for c in given}
        for policy in self.policies:
            kept &= set(policy.preserve(given))
        return kept


def _whole(name: str, value: Any, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} needs a whole number of at least {at_least}, not {value!r}")


def describe_tracked(ledger: Ledger) -> tuple[CheckpointInfo, ...]:
    """The tracked checkpoints as policies see them, oldest first."""
    return tuple(_info_of(c.step, c.run_seconds, c.metrics) for c in ledger.in_state(State.TRACKED))


@lru_cache(maxsize=1 << 14)  # each save asks for thousands that are as they were
def _info_of(
    step: int, run_seconds: float, metrics: tuple[tuple[str, float], ...]
) -> CheckpointInfo:
    return CheckpointInfo(step, run_seconds, MappingProxyType(dict(metrics)))


def parse_policy(value: Any) -> Policy:
    """A policy from plain data, as TOML or a dict has it.

    ``{"latest_n": 2}``; ``{"best_n": {"metric": "loss", "n": 3}}``. Several keys in one table, or
    ``{"any_of": [...]}``, mean ``|``; ``{"all_of": [...]}`` means ``&``.
    """
    if isinstance(value, Policy):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"a retention policy is a Policy or a table, not {value!r}")
    built = [_parse_one(str(name), argument) for name, argument in value.items()]
    return built[0] if len(built) == 1 else AnyOf(tuple(built))


def _parse_one(name: str, argument: Any) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"unknown retention policy {name!r}; known: {', '.join(POLICIES)}")
    kind: Callable[..., Policy] = POLICIES[name][0]
    if kind in (AnyOf, AllOf):
        if not isinstance(argument, Sequence) or isinstance(argument, str) or not argument:
            raise ConfigError(f"{name} needs a list of policies")
        return kind(tuple(map(parse_policy, argument)))
    try:
        if isinstance(argument, Mapping):
            return kind(**argument)
        if kind is not KeepAll:
            return kind(argument)
    except TypeError as error:
        raise ConfigError(f"retention policy {name}: {error}") from error
    if argument is not True:
        raise ConfigError("keep_all is true or left out")
    return KeepAll()


def table_of(policy: Policy) -> dict[str, Any]:
    """The plain data of a policy, which ``parse_policy`` reads; ``{"custom": NAME}`` for a class that is
    not in ``POLICIES``. A subclass may decide in another way, so it is such a class too.
    """
    for name, (kind, argument) in POLICIES.items():
        if type(policy) is kind:
            return {name: argument(policy)}
    return {"custom": type(policy).__name__}


def _tables_of(combined: AnyOf | AllOf) -> list[dict[str, Any]]:
    return [table_of(policy) for policy in combined.policies]


# the name in plain data: the class, and the argument of a policy
POLICIES: Mapping[str, tuple[type[Policy], Callable[[Any], Any]]] = MappingProxyType(
    {
        "latest_n": (LatestN, attrgetter("n")),
        "every_n_steps": (EveryNSteps, attrgetter("n")),
        "every_n_seconds": (EveryNSeconds, lambda policy: float(policy.seconds)),
        "best_n": (BestN, asdict),
        "steps": (Steps, lambda policy: sorted(policy.steps)),
        "keep_all": (KeepAll, lambda policy: True),
        "any_of": (AnyOf, _tables_of),
        "all_of": (AllOf, _tables_of),
    }
)

# --------------------------------------------- the policy as the journal records it, for people

PolicyRecord = Mapping[str, Any]
"""Of the form of a configuration; ``{"custom": NAME}`` for a class whose code is in the trainer."""
_MOST_LETTERS = 4096  # of a record: an opening of the root writes it


def record_of(policy: Policy) -> dict[str, Any]:
    """The record of a policy. A long list of steps is recorded by its class alone."""
    record = table_of(policy)
    if len(json.dumps(record)) <= _MOST_LETTERS:
        return record
    return {"custom": type(policy).__name__[:_MOST_LETTERS]}


def policy_of(record: PolicyRecord) -> Policy | None:
    """The recorded policy; None if the code of a part of it is elsewhere, or nothing was recorded."""
    try:
        return parse_policy(record)
    except (ConfigError, RecursionError):
        return None


def rules_that_keep(record: PolicyRecord, checkpoints: Sequence[CheckpointInfo]) -> dict[int, str]:
    """The rules that keep each step, in words. A policy that keeps everything has none to tell.

    A step that no known rule keeps is said to be kept by the rules whose code is elsewhere.
    """
    kept: dict[int, list[str]] = {}
    elsewhere: list[str] = []
    for rule in _alternatives(record):
        policy = policy_of(rule)
        if isinstance(policy, KeepAll):
            return {}
        if policy is None:
            elsewhere.append(_words(rule))
            continue
        for step in policy.preserve(checkpoints):
            kept.setdefault(step, []).append(_words(rule))
    if elsewhere:
        for info in checkpoints:
            kept.setdefault(info.step, [" or ".join(elsewhere)])
    return {step: ", ".join(words) for step, words in kept.items()}


def _alternatives(record: PolicyRecord) -> Iterator[PolicyRecord]:
    """The rules of which each keeps a step by itself."""
    for name, argument in record.items():
        if name == "any_of" and isinstance(argument, list):
            for each in argument:
                yield from _alternatives(each)
        else:
            yield {name: argument}


def _words(record: PolicyRecord) -> str:
    return " or ".join(_words_of_one(name, argument) for name, argument in record.items())


def _words_of_one(name: str, argument: Any) -> str:
    if name in ("any_of", "all_of") and isinstance(argument, list):
        inner = (" or " if name == "any_of" else " and ").join(map(_words, argument))
        return f"({inner})" if len(argument) > 1 else inner
    match policy_of({name: argument}):
        case LatestN(n):
            return f"the latest {n}"
        case EveryNSteps(n):
            return f"every {n} steps"
        case EveryNSeconds(seconds):
            return f"every {seconds:g} s of run time"
        case BestN(metric, n, mode):
            return f"the best {n} by {metric} ({mode})"
        case Steps():
            return "named steps"
        case KeepAll():
            return "everything"
        case _:
            return str(argument) if name == "custom" else name
