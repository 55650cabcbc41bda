"""Log lines and warnings."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ckptfsm.core.errors import PollMissingWarning, one_line

State = TypeVar("State")
_INSIDE = ("ckptfsm", "contextlib")  # a warning must not name a line in them


def say(
    write: Callable[..., None], event: str, text: str, *, exc_info: Any = None, **facts: Any
) -> None:
    """Log ``text`` through a logger's method: one line, safe for a terminal.

    ``event`` is a stable word for log processors. The record has ``event`` and the facts as
    attributes.
    """
    options = {} if exc_info is None else {"exc_info": exc_info}
    write(one_line(text), extra={"event": event, **facts}, stacklevel=2, **options)


def warn_caller(warning: Warning) -> None:
    """Warn at the innermost line outside the library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)


@contextmanager
def no_warning_is_an_error() -> Iterator[None]:
    """Show the warnings that foreign code raises in the block, also under ``-W error``.

    For the thread that trains, and for a writer's. Filters belong to the process: changing them on
    two threads at once may leave the wrong ones behind.
    """
    with warnings.catch_warnings():
        warnings.filters = [
            ("default", *each[1:]) if each[0] == "error" else each for each in warnings.filters
        ]
        yield


def warn_at_end(subject: object, left: Callable[[State], str], state: State) -> None:
    """Warn with the text of ``left(state)``, if any, once ``subject`` or this program ends.

    ``state`` may refer to ``subject`` only weakly.
    """
    weakref.finalize(subject, _at_end, left, state, os.getpid())


def _at_end(left: Callable[[State], str], state: State, program: int) -> None:
    said = left(state) if os.getpid() == program else ""
    if said:
        warn_caller(PollMissingWarning(said))


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
