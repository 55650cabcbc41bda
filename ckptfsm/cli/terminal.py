"""Output of the command line: the width of the terminal, colour where there is one, safe text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from ckptfsm.core.errors import CkptFsmError, describe
from ckptfsm.views.timeline import clean

STYLES: Mapping[str, str] = MappingProxyType(
    {
        "tracked": "green",
        "latest": "bold green",
        "failed": "red",
        "quarantined": "red",
        "unknown": "yellow",
        "prunable": "dim",
        "requested": "cyan",
        "forked": "cyan",
        "shards_written": "cyan",
        "finalized": "cyan",
    }
)


def console() -> Console:
    """Standard output. Without a terminal, or with NO_COLOR, there is no colour."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def put(lines: Iterable[str]) -> None:
    """Print lines; known words of states are coloured on a terminal."""
    out = console()
    if not out.is_terminal or out.no_color:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()  # a pipe's reader may wait for it while the command goes on
        return
    for line in lines:
        out.print(styled(line), overflow="ignore", crop=False)


def styled(line: str) -> Text:
    text = Text(line)
    for word, style in STYLES.items():
        text.highlight_regex(rf"\b{word}\b", style)
    return text


def put_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def say_error(error: Exception) -> None:
    """Print an error as one line on standard error."""
    words = str(error) if isinstance(error, CkptFsmError) else describe(error)
    sys.stderr.write(f"error: {clean(words)}\n")
