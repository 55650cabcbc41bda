"""Plays one script against the library: see ``script``."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import script_jobs
import script_others
from roots import below
from script_runs import Calls, Hook, Run, Sweep
from script_words import expanded, letter, short

from ckptfsm.core import layout
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.lifecycle import State
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage

RAISED = (CkptFsmError, OSError)


@dataclass
class Story:
    """The played story: the disk, the jobs, and the output of the line that runs."""

    sweep: Sweep | None = None
    ends_only: bool = False  # the state is told by ``show`` and at the end
    disk: SimDisk = field(default_factory=SimDisk)
    runs: list[Run] = field(default_factory=list)
    waiting: list[Hook] = field(default_factory=list)  # for the next job
    hooks: list[tuple[Hook, str]] = field(default_factory=list)  # all that were ever set
    letters: dict[Any, str] = field(default_factory=dict)
    leases: list[ReaderLease] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    refused: bool = False
    state: str = ""
    died_at: str = ""  # the path of that call
    names: list[str] = field(default_factory=list)  # of all jobs so far
    sweeping: list[int] = field(default_factory=list)  # the fault, and how many calls were before

    def fork(self, sweep: Sweep) -> Story:
        """The same so far, on a copy of the disk. No job lives."""
        assert not self.runs
        waiting = [replace(hook) for hook in self.waiting]
        disk, letters, names = self.disk.fork(), dict(self.letters), list(self.names)
        return Story(
            sweep, True, disk, waiting=waiting, letters=letters, names=names, died_at=self.died_at
        )

    @property
    def run(self) -> Run:
        assert self.runs, "no job lives"
        return self.runs[-1]

    @property
    def job(self) -> FakeJob:
        return self.run.job

    def play(self, line: str) -> list[str]:
        """Run one line; what came of it."""
        self.said = []
        condition, _, rest = line.partition(": ")
        if condition in ("if refused", "if opened"):
            if self.refused != (condition == "if refused"):
                return []
            line = rest
        self.attempt(line)
        if not self.ends_only:
            state = self.describe()
            if state != self.state:
                self.said.append(f"= {state}")
                self.state = state
        return self.said

    def attempt(self, line: str) -> None:
        self.refused = False
        acting = self.runs[-1:]
        try:
            self.command(line)
        except ProcessDead:
            self.said.append("dies")
            self.end((self.runs if line.startswith("open") else acting)[-1])
        except RAISED as error:
            self.refused = True
            text = error.summary() if isinstance(error, CkptFsmError) else str(error)
            self.said.append(f"raises {type(error).__name__}: {short(text)}")

    def end(self, run: Run) -> None:
        """The process of a job is gone."""
        if run in self.runs:
            self.runs.remove(run)
            self.disk.kill(run.name)

    def command(self, line: str) -> None:
        if line.startswith("each "):
            return
        who, colon, rest = line.partition(": ")
        named = [run for run in self.runs if colon and run.name == who]
        if named:  # as another job than the newest
            self.runs.remove(named[0])
            self.runs.append(named[0])
            line = rest
        words = line.split()
        for length in range(min(len(words), 4), 0, -1):
            name = "do_" + "_".join(words[:length])
            for commands in (type(self), script_jobs, script_others):
                if hasattr(commands, name):
                    getattr(commands, name)(self, *words[length:])
                    return
        raise AssertionError(f"no such command: {line}")

    # ------------------------------------------------------------------------- calls that are struck

    def called(self, storage: Calls, method: str, path: str, *, after: bool) -> None:
        looks = method in ("listdir", "stat", "read")
        if self.sweeping and not after and not looks and self.sweep is not None:
            code, already = self.sweeping[0], self.sweeping[1]
            if len(storage.calls) - 1 - already == self.sweep.index:
                self.sweep.struck = True
                self._strike(code, path)
        if not storage.hooks:
            return
        before = list(self.runs)
        try:
            for hook in list(storage.hooks):
                if hook.strikes(method, path, after):
                    self._act(hook.command, storage.hooks, path)
        finally:  # who makes this call is the newest job again
            newer = [run for run in self.runs if run not in before]
            self.runs = [*newer, *(run for run in before if run in self.runs)]

    def _act(self, command: str, hooks: list[Hook], path: str) -> None:
        word, _, rest = command.partition(" ")
        if word in ("die", "fail"):
            self._strike(getattr(errno, rest) if rest else 0, path)
        elif word == "when":
            self._hook(rest, hooks)
        else:
            self.attempt(command)

    def _strike(self, code: int, path: str) -> None:
        if code:
            raise OSError(code, os.strerror(code), path)
        self.died_at = path
        raise ProcessDead("dies")

    def do_sweep(self, kind: str, *words: str) -> None:
        """``sweep die: COMMAND``, ``sweep fail EIO: COMMAND``."""
        kind, line = " ".join((kind, *words)).split(": ", 1)
        code = getattr(errno, kind.split()[1]) if " " in kind else 0
        self._struck(code, line)

    def do_again(self, *words: str) -> None:
        """The same command dies at the same call once more."""
        self._struck(0, " ".join(words))

    def _struck(self, code: int, line: str) -> None:
        living = bool(self.runs) and not line.startswith("open")
        already = len(self.job.storage.calls) if living else 0
        self.sweeping = [code, already]
        try:
            self.attempt(line)
        finally:
            self.sweeping = []
        if code == 0 and self.runs:
            self.end(self.run)

    def do_when(self, *words: str) -> None:
        self._hook(" ".join(words), self.run.hooks if self.runs else self.waiting)

    def _hook(self, text: str, hooks: list[Hook]) -> None:
        parsed = re.fullmatch(r"(after )?(always |\d+x |nth=\d+ )?([a-z_|]+) (.+?): (.+)", text)
        assert parsed is not None, text
        after, often, method, path, command = parsed.groups(default="")
        number = int(re.sub(r"\D", "", often) or 1)
        times = {"a": 1 << 30, "n": 1, "": 1}.get(often[:1], number)
        skip = number - 1 if often.startswith("nth") else 0
        hooks.append(Hook(method, expanded(path), command, bool(after), skip, times))
        self.hooks.append((hooks[-1], f"{method} {path}"))

    def do_calm(self) -> None:
        """Nothing waits for a call any more."""
        for hooks in (self.waiting, *(run.hooks for run in self.runs)):
            hooks.clear()

    # ------------------------------------------------------------------------------------ the state

    def describe(self) -> str:
        """The ledger and the disk on one line."""
        parts = list(self._ledger()) if self.runs else []
        tracker = self.disk.snapshot().get(layout.TRACKER)
        if isinstance(tracker, bytes):
            ours = re.fullmatch(rb"(\d+)\n", tracker)
            parts.append(f"tracker {int(ours[1]) if ours else repr(tracker)[1:]}")
        else:
            parts.append("no tracker")
        parts.append(" ".join(self._directories("")) or "no steps")
        for word in ("STAGING", "TRASH", "QUARANTINE"):
            found = " ".join(self._directories(getattr(layout, word)))
            parts += [f"{word.lower()} {found}"] * bool(found)
        pins = " ".join(n.removesuffix(".json") for n in self.listed(layout.PINS))
        parts += [f"pinned {pins}"] * bool(pins)
        return "; ".join(parts)

    def _ledger(self) -> Iterator[str]:
        coordinator = self.job.coordinator
        steps = [str(c.step) for c in coordinator.ledger.in_state(State.TRACKED)]
        yield "tracked " + (" ".join(steps) or "nothing")
        for c in coordinator.ledger.in_state(*(s for s in State if s is not State.TRACKED)):
            why = f" ({c.reason})" * (c.state is State.FAILED)
            yield f"{c.id} {c.state.value}{why}"
        if coordinator.fatal is not None:
            yield f"stopped by {type(coordinator.fatal).__name__}"
        if coordinator.busy:
            yield "busy"

    def listed(self, directory: str) -> list[str]:
        if directory and self.disk.find(directory) is None:
            return []
        return sorted(SimStorage(self.disk, "judge").listdir(directory))

    def _directories(self, where: str) -> Iterator[str]:
        for name in self.listed(where):
            if where == "" and name in (layout.PRIVATE, layout.TRACKER):
                continue
            if name.startswith(f"{layout.GONE}trial.tmp-"):
                continue  # an empty directory of an opening that died
            if name.startswith("tracker."):
                yield "tracker"
                continue
            path = f"{where}/{name}" if where else name
            kept = self.disk.snapshot()[path]
            content = frozenset(below(self.disk, path).items()) if kept is None else kept
            self.letters.setdefault(content, letter(len(self.letters)))
            yield f"{short(name)}={self.letters[content]}"


def play(
    lines: Sequence[str], sweep: Sweep | None = None, *, ends_only: bool = False
) -> list[list[str]]:
    """Play a script; what each line came to."""
    return finish(Story(sweep, ends_only), lines)


def finish(story: Story, lines: Sequence[str]) -> list[list[str]]:
    """Play the rest of a script."""
    output = [story.play(line) for line in lines]
    if story.sweep is None:
        output[-1] += [f"never called: {call}" for hook, call in story.hooks if not hook.struck]
    if story.ends_only:
        output[-1].append(f"= {story.describe()}")
    return output
