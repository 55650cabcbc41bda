"""The retention policy as the journal records it, and the rules of it that keep a step. Pure.

A record has the form of a configuration: ``retention.POLICIES`` is the table of both directions. The
code of another class is in the trainer, and its record is ``{"custom": NAME}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptfsm.core.errors import ConfigError
from ckptfsm.core.retention import (
    BestN,
    CheckpointInfo,
    EveryNSeconds,
    EveryNSteps,
    KeepAll,
    LatestN,
    Policy,
    Steps,
    parse_policy,
    table_of,
)

PolicyRecord = Mapping[str, Any]
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
