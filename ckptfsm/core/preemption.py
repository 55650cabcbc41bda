"""Decides when the last save of a job must begin, from the measured durations of earlier ones. Pure.

In doubt the last save begins too early rather than too late. A duration is in seconds, and covers
everything from the call of ``save`` until the checkpoint is tracked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptfsm.core.errors import ConfigError

UNMEASURED_S = 600.0
"""The longest duration that is assumed before a save was measured."""
_FIRST_UNIX_TIME = 1e9  # in 2001: a smaller number is a duration that was given by mistake


@dataclass(frozen=True, slots=True)
class Remaining:
    """The facts that decide, in seconds.

    - ``left_s``: until the end of the allocation.
    - ``run_s``: from the opening of the root until then.
    - ``saves_s``: durations of earlier saves of this run.
    - ``looks_s``: times from one look at these facts to the next.
    """

    left_s: float
    run_s: float
    saves_s: Sequence[float]
    looks_s: Sequence[float]


def percentile_95(values: Sequence[float]) -> float:
    """The smallest of ``values`` that 95 in 100 of them do not exceed."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]


def lead_s(facts: Remaining) -> float:
    """The time before the end at which the last save must begin.

    The last save may have to wait for one that has just begun. The next look, and the step before
    the save that it asks for, take as long as a look each.
    """
    unmeasured = min(UNMEASURED_S, facts.run_s / 4)
    save = percentile_95(facts.saves_s) if facts.saves_s else unmeasured
    look = percentile_95(facts.looks_s) if facts.looks_s else 0.0
    return 2 * save + 2 * look


def must_begin(facts: Remaining) -> bool:
    """Decide whether the last save must begin now."""
    return facts.left_s <= lead_s(facts)


def unix_time(value: Any) -> float:
    """``value`` as Unix seconds. Raises ``ConfigError`` for anything else, such as a duration."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < _FIRST_UNIX_TIME:
        raise ConfigError(
            f"the end of an allocation is a Unix time in seconds, not {value!r}",
            key="end_of_allocation",
        )
    return float(value)
