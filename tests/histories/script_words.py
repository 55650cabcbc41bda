"""How scripts write paths, contents and parts, and how messages are shortened."""

from __future__ import annotations

import re

from strangers import SHARD

from ckptfsm.core import layout
from ckptfsm.core.errors import printable
from ckptfsm.core.parts import PartSpec

WORDS = (
    "TRACKER",
    "TRASH",
    "QUARANTINE",
    "STAGING",
    "JOURNAL",
    "READERS",
    "PINS",
    "EPOCHS",
    "MANIFEST",
)
MOST = 150  # characters of a message


def short(text: str) -> str:
    """A line, with steps as they are written in scripts."""
    line = re.sub(r"iter_0*(\d)", r"@\1", text.splitlines()[0]).replace(layout.TRACKER, "TRACKER")
    line = printable(line)
    return line if len(line) <= MOST else f"{line[:MOST]}..."


def letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"z{number - 25}"


def expanded(path: str) -> str:
    path = re.sub(r"@(\d+)", lambda found: f"iter_{int(found[1]):07d}", path)
    path = re.sub(r"\bSHARD\b", SHARD, path)
    for word in WORDS:
        path = re.sub(rf"\b{word}\b", getattr(layout, word), path)
    return "^$" if path == "ROOT" else path


def part_of(text: str) -> PartSpec:
    """``state``, ``data:file``, ``hf:tree``, ``state:foreign``; a question mark: it is optional."""
    name, _, kind = text.removesuffix("?").partition(":")
    optional = text.endswith("?")
    directory = name if kind == "tree" or optional else ""
    return PartSpec(name, kind or "torch_dist", directory, None, optional)
