"""Output of the command line: the size of the terminal, colour where there is one, safe text."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ckptfsm.core.errors import CkptFsmError, OutcomeUnknown, describe, first_os_error, printable
from ckptfsm.views.timeline import clean

_GREEN, _RED, _YELLOW, _CYAN, _DIM = "32", "31", "33", "36", "2"
STYLES: Mapping[str, str] = MappingProxyType(
    {
        "tracked": _GREEN,
        "latest": f"1;{_GREEN}",
        "failed": _RED,
        "quarantined": _RED,
        "unknown": _YELLOW,
        "prunable": _DIM,
        "requested": _CYAN,
        "forked": _CYAN,
        "shards_written": _CYAN,
        "finalized": _CYAN,
    }
)
# In place of the advice to a programmer.
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "root_busy": "wait until that process ends, or end it",
        "step_not_found": "see the steps: ckptfsm ls",
        "config": "see the command's --help",
    }
)
_FULL = (
    "the disk is full, and this command writes a few bytes before it deletes anything. Free some "
    "outside of the root first; in the root, only .ckptfsm/trash/gone-* may be removed by hand. "
    "See: ckptfsm runbook disk-full"
)
_FOLD = 4  # spaces before the rest of a line that was folded
_KNOWN = re.compile(rf"\b(?:{'|'.join(STYLES)})\b")


class Console:
    """Standard output as it is now. Without a terminal, or with NO_COLOR, there is no colour.

    FORCE_COLOR stands for a terminal. For a pipe nothing is cut: the width and height have no end.
    """

    def __init__(self) -> None:
        forced = bool(os.environ.get("FORCE_COLOR"))
        dumb = os.environ.get("TERM") in ("dumb", "unknown") and not forced
        self.is_terminal = forced or sys.stdout.isatty()
        self.no_color = bool(os.environ.get("NO_COLOR")) or dumb
        size = shutil.get_terminal_size()
        self.width, self.height = size if self.is_terminal else (sys.maxsize, sys.maxsize)

    def clear(self) -> None:
        """Begin a new screen, if there is a terminal."""
        if self.is_terminal:
            sys.stdout.write("\x1b[H\x1b[2J")


def put(lines: Iterable[str]) -> None:
    """Print lines. On a terminal, long ones are folded and known words of states are coloured."""
    out = Console()
    if out.is_terminal:
        lines = [each for long in lines for each in folded(long, out.width)]
    shown = map(coloured, lines) if out.is_terminal and not out.no_color else lines
    sys.stdout.write("".join(f"{line}\n" for line in shown))
    sys.stdout.flush()  # a pipe's reader may wait for it while the command goes on


def folded(line: str, width: int) -> list[str]:
    """A line as lines of at most ``width`` characters, folded between words.

    A word that is longer stays whole, so that a path can be copied.
    """
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + _FOLD)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def coloured(line: str) -> str:
    return _KNOWN.sub(lambda word: f"\x1b[{STYLES[word[0]]}m{word[0]}\x1b[0m", line)


def put_json(value: Any) -> None:
    """Print JSON; bytes of a name that UTF-8 cannot hold come as escapes of JSON."""
    sys.stdout.write(printable(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def say_error(error: Exception) -> None:
    """Print an error on standard error: as one line, which a terminal shows folded."""
    words = describe(error)
    if isinstance(error, CkptFsmError):
        words = f"{error.summary()} ({_ADVICE.get(error.kind, error.advice)})"
    refused = first_os_error(error)
    full = refused is not None and refused.errno in (errno.ENOSPC, errno.EDQUOT)
    if (
        refused is not None and full and not isinstance(error, OutcomeUnknown)
    ):  # that says what is left
        words = f"{describe(refused)}: {_FULL}"
    line = f"error: {clean(words)}"
    width = shutil.get_terminal_size().columns  # standard output may be a pipe
    lines = folded(line, width) if sys.stderr.isatty() else [line]
    sys.stderr.write("".join(f"{each}\n" for each in lines))
