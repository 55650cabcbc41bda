"""A person at a terminal of 80 columns, who types commands into a shell and reads the screen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pyte

REPO = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 80, 24
PATIENCE_S = 300.0  # a busy machine needs tens of seconds for a command
PROMPT = "at-the-root> "
QUESTION = "[y/N]: "
ESCAPE = "\x1b"


@dataclass(frozen=True)
class Screen:
    """The output of a command. ``raw`` is as the terminal got it, ``lines`` as it shows that."""

    status: int
    raw: str
    lines: list[str]
    asked: bool = False

    @property
    def text(self) -> str:
        """The lines as one text, each folded line in one piece again."""
        return re.sub(r"\n {4,}(?!(?:do|see): )", " ", "\n".join(self.lines))


class Person:
    """Types into an interactive bash. ``answer`` is typed where a command asks a question."""

    def __init__(self, shell: Any, answer: str = "y") -> None:
        self.shell, self.answer = shell, answer

    def type(self, line: str) -> Screen:
        """Type a command, wait for its end, and read what it left on the screen."""
        out, asked = self._typed(line), False
        if out.endswith(QUESTION):
            asked = True
            out += self._typed(self.answer, echoed=True)
        status = self._typed("echo $?").strip()
        return Screen(int(status), out, shown(out), asked)

    def begin(self, line: str, seen: str) -> str:
        """Type a command that does not end, and wait for a text. Returns the output up to there."""
        self.shell.sendline(line)
        self.shell.expect_exact(f"{line}\r\n")
        self.shell.expect(seen)
        return str(self.shell.before + self.shell.after)

    def interrupt(self) -> Screen:
        """Type Ctrl-C into the command that runs."""
        self.shell.sendintr()
        self.shell.expect_exact(PROMPT)
        out = str(self.shell.before)
        return Screen(int(self._typed("echo $?").strip()), out, shown(out))

    def _typed(self, line: str, echoed: bool = False) -> str:
        self.shell.sendline(line)
        self.shell.expect_exact(f"{line}\r\n")
        self.shell.expect_exact([PROMPT, QUESTION])
        end = QUESTION if self.shell.after == QUESTION else ""
        return ("\r\n" if echoed else "") + str(self.shell.before) + end


def shown(raw: str, rows: int = 500) -> list[str]:
    """The lines of a terminal of 80 columns after this output, without empty ones at the end."""
    screen = pyte.Screen(COLUMNS, rows)
    pyte.Stream(screen).feed(raw)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def too_wide(raw: str) -> list[str]:
    """The lines that a terminal of 80 columns breaks, but for a path: that stays in one piece."""
    plain = re.sub(rf"{ESCAPE}\[[0-9;?]*[A-Za-z]", "", raw)
    return [line for line in plain.split("\r\n") if len(line) > COLUMNS and " " in line.strip()]


@contextmanager
def at_terminal(
    root: Path, term: str = "dumb", editing: bool = False, **environment: str
) -> Iterator[Person]:
    """A person in the root, with ``ckptfsm`` on the path, a terminal of this kind, and no colour."""
    places = root.parent / "bin"
    places.mkdir(exist_ok=True)
    command = places / "ckptfsm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptfsm.cli "$@"\n')
    command.chmod(0o755)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "FORCE_COLOR", "CKPTFSM_ROOT", "PROMPT_COMMAND")
    }
    path = f"{places}:{os.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": str(REPO), "PS1": PROMPT, "TERM": term, "NO_COLOR": "1"}
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", *([] if editing else ["--noediting"]), "-i"],
        cwd=str(root),
        env={**inherited, **given, **environment},
        dimensions=(ROWS, COLUMNS),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    try:
        shell.expect_exact(PROMPT)
        yield Person(shell)
    finally:
        shell.close(force=True)
