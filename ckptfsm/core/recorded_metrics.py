"""Metrics, of a save or recorded later: text names and numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptfsm.core.errors import ConfigError, one_line, shorten

MOST = 100  # metrics of one call
MOST_LETTERS = 200  # of a name
_ONLY_CONVERTED = (bool, str, bytes, bytearray)


def check_metrics(metrics: Any) -> dict[str, float]:
    """Metrics to record, as finite floats by name. Raises ``ConfigError`` for anything else.

    A value may be of any type that converts to a float, such as a tensor of one element.
    """
    if not isinstance(metrics, Mapping) or not 0 < len(metrics) <= MOST:
        raise ConfigError(f"metrics are a mapping of 1 to {MOST} names to numbers")
    found = {_name(n): _number(n, value, _ONLY_CONVERTED) for n, value in metrics.items()}
    for name, value in found.items():
        if not math.isfinite(value):
            raise ConfigError(f"the metric {name!r} has to be a finite number", metric=name)
    return found


def measured(metrics: Any) -> tuple[tuple[str, float], ...]:
    """The metrics of a save, sorted by name, as a request has them. Raises ``ConfigError``.

    They may be NaN or infinite, and values may be bools: no save is lost for its metrics.
    """
    if not isinstance(metrics or {}, Mapping):
        raise ConfigError(
            f"metrics are a mapping of names to numbers, not {one_line(repr(metrics))}"
        )
    return tuple(sorted((str(n), _number(str(n), value)) for n, value in (metrics or {}).items()))


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_LETTERS or not name.isprintable():
        raise ConfigError(
            f"the name of a metric is printable text of 1 to {MOST_LETTERS} characters, "
            f"not {str(name)[:MOST_LETTERS]!r}"
        )
    return name


def _number(name: str, value: Any, refused: tuple[type, ...] = ()) -> float:
    try:
        if isinstance(value, refused):
            raise TypeError("it only converts to a number")
        return float(value)
    except Exception as error:  # whatever a class raises that is no number
        said = f"the metric {name!r} has to be a number, not {one_line(repr(value))}"
        raise ConfigError(shorten(said), metric=name) from error
