"""Histories of a root as text: a script is played on a simulated disk, each line followed by its output.

    == name of the history
    # I2. Catches: ...
    > save 1 2
        = tracked 1 2; tracker 2; @1=a @2=b

A line of output is an error, a decision of an opening, or the state of the root, where it changed:
the ledger, the tracker, and the directories. A tracker that the library did not write is quoted.
Each directory has a letter for its content: equal letters, equal bytes. `CKPTFSM_UPDATE_GOLDEN=1`
rewrites the output.

Paths: @1 is the directory of step 1; the words TRACKER, TRASH, QUARANTINE, STAGING, JOURNAL, READERS,
PINS, EPOCHS, MANIFEST and SHARD stand for the names on disk. `when [after] [COUNTx] CALL PATH: COMMAND`
waits for a call of the job whose path matches (a regular expression) and runs a command there, also
`fail EIO`, `die` or another `when`. `sweep die: COMMAND` plays the script once for every call that the
command makes, and dies at that call; `each NAME: a b c` plays it with {NAME} as a, b and c. Either
prints the distinct ends. `if refused: COMMAND` runs only if the line before raised.
The commands are the functions `do_*` of `script_jobs` and `script_others`; `_` stands for a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path

from script_runs import Sweep
from script_story import Story, finish, play
from script_words import letter

KEPT = ("raises ", "dies", "judged ", "here: ", "in ", "never ", "= ")
UNSWEPT = 6  # a sweep that makes fewer calls looks at nothing


@dataclass
class History:
    """A single script of a file."""

    name: str
    comments: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def damages_journal(self) -> str:
        """Why its journals are not judged, if they are not."""
        reasons = [c.partition("journal damaged: ")[2] for c in self.comments]
        return next(filter(None, reasons), "")

    def render(self) -> str:
        """The script with its output as it comes out now."""
        special = ("each ", "sweep ")
        many = [i for i, line in enumerate(self.lines) if line.startswith(special)]
        shown = self._ends(many[-1]) if many else self._each_line()
        return "\n".join([f"== {self.name}", *self.comments, *shown]) + "\n"

    def _each_line(self) -> list[str]:
        shown = []
        for line, output in zip(self.lines, play(self.lines), strict=True):
            shown += [f"> {line}", *(f"    {said}" for said in output)]
        return shown

    def _ends(self, last_special: int) -> list[str]:
        """All lines, then the distinct ends of the runs, by the values of the variables."""
        ends: dict[tuple[str, ...], list[str]] = {}
        for values in product(*([f"{n}={v}" for v in vs] for n, vs in self._variables())):
            found = tuple(
                dict.fromkeys(self._runs(dict(v.split("=", 1) for v in values), last_special))
            )
            ends.setdefault(found, []).append(" ".join(values))
        shown = [f"> {line}" for line in self.lines]
        for found, where in ends.items():
            if len(ends) > 1:
                shown.append(f"    {', '.join(where)}:")
            for number, end in enumerate(found):
                shown += ["    or"] * bool(number) + [f"    {line}" for line in end.splitlines()]
        return shown

    def _variables(self) -> list[tuple[str, list[str]]]:
        found = [
            line.removeprefix("each ").split(": ", 1)
            for line in self.lines
            if line.startswith("each ")
        ]
        return [(name, values.split(" | " if " | " in values else " ")) for name, values in found]

    def _runs(self, values: dict[str, str], last_special: int) -> Iterator[str]:
        """The end of every run with these values: one, or one for each call that is swept."""
        lines = [_with_values(line, values) for line in self.lines]
        if not any(line.startswith("sweep ") for line in lines):
            yield _end(play(lines, ends_only=True))
            return
        before = Story(ends_only=True)
        told = [before.play(line) for line in lines[:last_special]]
        for index in count():
            sweep = Sweep(index)
            if before.runs:  # their memory cannot be copied
                output = play(lines, sweep, ends_only=True)
            else:
                output = [*told, *finish(before.fork(sweep), lines[last_special:])]
            if sweep.struck or "sweep fail" in lines[last_special]:
                for number, line in enumerate(lines):
                    if line.startswith(("sweep ", "again ")):
                        output[
                            number
                        ] = []  # it differs from call to call, as epochs and attempts do
                end = re.sub(r"(\d+)\.e\d+\.a\d+", r"\1", _end(output))
                yield _relettered(re.sub(r"( tracker){2,}", " tracker", end))
            if not sweep.struck:
                assert index >= UNSWEPT, f"{self.name}: {index} calls were swept"
                return


def _with_values(line: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        line = line.replace(f"{{{name}}}", value)
    return line


def _end(output: list[list[str]]) -> str:
    """The errors and verdicts on the way, and the last state."""
    said = [line for lines in output for line in lines]
    kept = [line for line in said if line.startswith(KEPT)]
    return _relettered(re.sub(r" \S+ quarantined;", "", "\n".join(kept)))


def _relettered(text: str) -> str:
    """The letters of contents in the order in which they are seen here."""
    found = dict.fromkeys(re.findall(r"=([a-z]\w*)(?=[ ;]|$)", text, flags=re.M))
    new = {old: letter(number) for number, old in enumerate(found)}
    return re.sub(r"=([a-z]\w*)(?=[ ;]|$)", lambda match: f"={new[match[1]]}", text, flags=re.M)


def read(path: Path) -> list[History]:
    """The histories of a file, without their output."""
    found: list[History] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            found.append(History(line.removeprefix("== ")))
        elif line.startswith("> "):
            found[-1].lines.append(line.removeprefix("> "))
        elif line.startswith("#") and found:
            found[-1].comments.append(line)
    return found


def golden(path: Path) -> dict[str, str]:
    """The text of each history as it stands in the file."""
    _, *texts = re.split(r"^(?=== )", path.read_text(encoding="utf-8"), flags=re.M)
    return {text.partition("\n")[0].removeprefix("== "): text.rstrip("\n") + "\n" for text in texts}
