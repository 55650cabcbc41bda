"""Metrics that come after a save: checked here, journaled by the coordinator. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptfsm.core.errors import ConfigError

MOST = 100  # metrics of one call
MOST_LETTERS = 200  # of a name


def check_metrics(metrics: Any) -> dict[str, float]:
    """``metrics`` as finite floats by name. Raises ``ConfigError`` for anything else.

    A value may be of any type that converts to a float, such as a tensor of one element.
    """
    if not isinstance(metrics, Mapping) or not 0 < len(metrics) <= MOST:
        raise ConfigError(f"metrics are a mapping of 1 to {MOST} names to numbers")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_LETTERS or not name.isprintable():
        raise ConfigError(
            f"the name of a metric is printable text of 1 to {MOST_LETTERS} characters, "
            f"not {str(name)[:MOST_LETTERS]!r}"
        )
    return name


def _number(name: str, value: Any) -> float:
    refused = ConfigError(f"the metric {name!r} has to be a finite number", metric=name)
    if isinstance(value, (bool, str, bytes, bytearray)):
        raise refused
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise refused from error
    if not math.isfinite(number):
        raise refused
    return number
