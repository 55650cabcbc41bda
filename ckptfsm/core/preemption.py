"""Decides when the last save of a job must begin: in doubt too early rather than too late. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ckptfsm.core.errors import ConfigError

UNMEASURED_S = 600.0
"""The longest duration that is assumed before a save was measured."""
_FIRST_UNIX_TIME = 1e9  # in 2001: a smaller number is a duration that was given by mistake


def percentile_95(values: Sequence[float]) -> float:
    """The smallest of ``values`` that 95 in 100 of them do not exceed."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]


def lead_s(run_s: float, saves_s: Sequence[float], looks_s: Sequence[float]) -> float:
    """The time before the end of the allocation at which the last save must begin, in seconds.

    ``run_s``: from the opening of the root until that end. ``saves_s``: of earlier saves of this run,
    from the call of ``save`` until each was tracked. ``looks_s``: from one look at this to the next.
    """
    save = percentile_95(saves_s) if saves_s else min(UNMEASURED_S, run_s / 4)
    look = percentile_95(looks_s) if looks_s else 0.0
    # It may have to wait for one that has just begun. The next look, and the step before the save
    # that it asks for, take as long as a look each.
    return 2 * save + 2 * look


def unix_time(value: Any) -> float:
    """``value`` as Unix seconds. Raises ``ConfigError`` for anything else, such as a duration."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < _FIRST_UNIX_TIME:
        raise ConfigError(
            f"the end of an allocation is a Unix time in seconds, not {value!r}",
            key="end_of_allocation",
        )
    return float(value)
