"""Warnings that point at the line of whoever called the library."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_INSIDE = ("ckptfsm", "contextlib")  # whose lines nobody can change


def warn_caller(warning: Warning) -> None:
    """Warn at the innermost line that is not the library's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
