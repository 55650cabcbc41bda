"""An interrupt at every line of a public call, and real Ctrl-C at random; then the job goes on.

``lines``: a job of one rank runs once to learn which lines of the library its thread runs in ``save``,
``poll``, ``wait``, ``restore`` and ``close``. Then it runs again for each of them, on a real disk with
forked writers, and a KeyboardInterrupt is raised before that line. A controller with a worker runs the
same way. ``signals``: jobs of one and of two ranks, whose ranks get SIGINT at random moments.

Rules: the trainer catches what is raised, and goes on with the same manager. Every later save must be
accepted and tracked at once, a new manager must find the newest one, and no rank may hang. Lines in
which no handler can run are left out: in ``interrupts`` itself, and between a fork and its owner.

    PYTHONPATH=tests python -m proof.interrupts
    PYTHONPATH=tests python -m proof.interrupts --site "save ckptfsm/ranks/participant.py:123 1"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from fakes import fake_ports
from groups import Group

import ckptfsm
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.events import Failed
from ckptfsm.ranks import controller
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.tickets import GroupPart
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.writers.plain_files import FilesDriver
from proof.layer import SMALL, Budget, LayerResult, Violation, timed
from proof.sigint import run_signals

LIBRARY = Path(ckptfsm.__file__).parent
NO_HANDLER_RUNS = frozenset({"signals.py", "fork.py"})
SETTINGS: dict[str, Any] = {
    "on_failure": "warn",
    "busy_timeout_s": 5.0,
    "close_timeout_s": 5.0,
    "effect_timeout_s": 5.0,
    "exchange_timeout_s": 10.0,
    "writer_timeout_s": 20.0,
    "exit_timeout_s": 5.0,
}
STATE = {"weights": "w"}


@dataclass(frozen=True, order=True)
class Site:
    """The ``nth`` time that a line of the library is reached in a call of the job."""

    call: str
    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.call} {self.file}:{self.line} {self.nth}"


class Tracer:
    """Notes the lines that a call of the job runs, or raises before one of them, once."""

    def __init__(self, strike: Site | None = None) -> None:
        self.strike = strike
        self.struck = False
        self.counts: dict[tuple[str, str, int], int] = {}
        self._awaited = (strike.call, strike.file, strike.line, strike.nth) if strike else None
        self._call = ""
        self._process = os.getpid()

    @contextlib.contextmanager
    def watching(self, call: str) -> Iterator[None]:
        self._call = call
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if os.getpid() != self._process:  # a writer
            sys.settrace(None)
            return None
        done = self.struck and self.strike is not None
        return self._line if not done and place_of(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or self.struck:
            return self._line
        key = (self._call, place_of(frame.f_code.co_filename), frame.f_lineno)
        self.counts[key] = nth = self.counts.get(key, 0) + 1
        if self._awaited == (*key, nth):
            self.struck = True
            raise KeyboardInterrupt(str(self.strike))
        return self._line


@cache
def place_of(filename: str) -> str:
    """A file of the library by its name for people; "" for one in which nothing is struck."""
    path = Path(filename)
    inside = LIBRARY in path.parents and "testing" not in path.parts
    struck = inside and path.name not in NO_HANDLER_RUNS
    return str(path.relative_to(LIBRARY.parent)) if struck else ""


class ManagerJob:
    """A job of one rank, with the calls that are struck."""

    def __init__(self, root: Path, tracer: Tracer) -> None:
        self.root, self.tracer = root, tracer
        self.manager = self._open()
        self.manager.save(1, self._state(1)).wait()

    def _open(self) -> Manager:
        return Manager(fake_ports(self.root), make_config(SETTINGS))

    def _state(self, step: int) -> dict[str, Any]:
        return {"weights": f"of {step}"}

    def run(self) -> None:
        self._struck("save", lambda: self.manager.save(2, self._state(2)))
        self._struck("poll", self._poll)
        self._struck("wait", lambda: self.manager.save(3, self._state(3)).wait())
        self._struck("restore", lambda: self.manager.restore(STATE))
        self._goes_on(self.manager, 4)
        self._struck("close", self.manager.close)
        self.manager.close()
        with self._open() as again:
            self._finds(again, 4)
            self._goes_on(again, 5)
        assert_journal_conforms(self.root)

    def _struck(self, name: str, call: Callable[[], Any]) -> None:
        with contextlib.suppress(KeyboardInterrupt), self.tracer.watching(name):
            call()

    def _poll(self) -> None:
        deadline = time.monotonic() + SETTINGS["busy_timeout_s"]
        while self.manager.step_in_flight() is not None and time.monotonic() < deadline:
            self.manager.poll()
            time.sleep(0.001)  # stands for a step: a loop without one starves the other thread

    def _goes_on(self, manager: Manager, step: int) -> None:
        """The promise: later saves are accepted and tracked, as if nothing had happened."""
        manager.save(step, self._state(step)).wait()
        assert manager.latest_step() == step
        manager.wait_until_finished()

    def _finds(self, manager: Manager, step: int) -> None:
        restored = manager.restore(STATE)
        assert restored is not None and restored.step == step, f"{restored} instead of {step}"
        assert restored.state == self._state(step)


class GroupsJob:
    """A controller and one worker, in one process, with the calls that are struck."""

    def __init__(self, root: Path, tracer: Tracer) -> None:
        controller._ASK_EVERY_S = 0.01  # a trial waits for workers a few times
        self.root, self.tracer = root, tracer
        self.group = Group("actor", 1, root)
        self.controller = self._open()
        self._save(1)

    def _open(self) -> Controller:
        ports = fake_ports(self.root, driver=FilesDriver())
        return Controller(self.root, {"actor": 1}, self.group.poll, ports=ports, **SETTINGS)

    def _begin(self, step: int) -> Any:
        return self.controller.begin(step, {"actor": GroupPart("actor"), "data": b"%d" % step})

    def _save(self, step: int) -> None:
        save = self._begin(step)
        worker = self.group.workers[0]
        self.controller.feed(worker.write(save.tickets["actor"], {"w": step}))
        save.handle.wait()
        assert self.controller.latest_step() == step

    def run(self) -> None:
        saved: list[Any] = []
        self._struck("begin", lambda: saved.append(self._begin(2)))
        for save in saved:
            self._struck("write", lambda save=save: self._write(save))
            if self.tracer.struck:  # an orchestrator says what a worker raised
                self.controller.feed([Failed(save.tickets["actor"].of, "fork_failed", "struck", 1)])
        self._struck("group poll", self.controller.wait_until_finished)
        self._struck("reading", self._read)
        self._save(3)
        self._struck("group close", self.controller.close)
        self.controller.close()
        self.controller = self._open()
        assert self.controller.latest_step() == 3
        self._save(4)
        self.controller.close()
        assert_journal_conforms(self.root)

    def _write(self, save: Any) -> None:
        self.group.workers[0].write(save.tickets["actor"], {"w": 2})

    def _read(self) -> None:
        with self.controller.reading() as found:
            assert found is not None

    _struck = ManagerJob._struck


JOBS: tuple[type[ManagerJob] | type[GroupsJob], ...] = (ManagerJob, GroupsJob)
CALLS_OF_GROUPS = frozenset({"begin", "write", "group poll", "reading", "group close"})


def trial(job: Callable[[Path, Tracer], Any], tracer: Tracer) -> str:
    """Run a job once; what went wrong, or ""."""
    root = Path(tempfile.mkdtemp(prefix="interrupts-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job(root / "root", tracer).run()
    except (CkptFsmError, OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    finally:
        shutil.rmtree(root)
    return ""


def sites_of(job: type[ManagerJob] | type[GroupsJob], times: int) -> list[Site]:
    """Where to strike: each line that each call of the job reaches, up to ``times`` times."""
    tracer = Tracer()
    problem = trial(job, tracer)
    if problem:
        raise AssertionError(f"the job fails without an interrupt: {problem}")
    return [
        Site(*key, nth)
        for key, count in tracer.counts.items()
        for nth in range(1, min(count, times) + 1)
    ]


def once_each(sites: Iterable[Site]) -> list[Site]:
    """The first site of each line, in whichever call it comes first."""
    return list({(site.file, site.line): site for site in reversed(list(sites))}.values())[::-1]


def strike(site: Site) -> tuple[Site, bool, str]:
    """Run the job that a site is of: whether the line was reached, and the fault."""
    tracer = Tracer(site)
    problem = trial(GroupsJob if site.call in CALLS_OF_GROUPS else ManagerJob, tracer)
    return site, tracer.struck, problem


def run(budget: Budget) -> LayerResult:
    result = LayerResult("interrupts")
    times = budget.pick(pr=1, nightly=2, release=3)
    sites = [site for job in JOBS for site in sites_of(job, times)]
    if budget.profile in SMALL:
        sites = list(budget.some(once_each(sites)))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of everything
    with get_context("fork").Pool(budget.processes + 2) as pool:  # they wait for the disk
        for site, struck, problem in pool.imap(strike, sites, chunksize=4):
            result.explored["lines"] = result.explored.get("lines", 0) + struck
            if problem:
                again = f'PYTHONPATH=tests python -m proof.interrupts --site "{site}"'
                result.violations.append(Violation("I10", f"struck at {site}: {problem}", again))
                if budget.stop_at_first:
                    return result
    seconds = budget.pick(pr=8, nightly=60, release=180)
    run_signals(result, seconds, with_gloo=budget.profile in ("nightly", "release"))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.interrupts", description=__doc__)
    parser.add_argument("--site", help='one line: "save ckptfsm/ranks/participant.py:123 1"')
    asked = parser.parse_args()
    if asked.site:
        *call, place, nth = asked.site.split()
        file, _, line = place.rpartition(":")
        _, struck, problem = strike(Site(" ".join(call), file, int(line), int(nth)))
        print(problem or "held", "" if struck else "(the line was not reached)")
        return bool(problem)
    result = timed(run, Budget())
    for violation in result.violations:
        print(violation.what)
    print(result.explored, f"{result.seconds:.1f} s, {len(result.violations)} violations")
    return bool(result.violations)


if __name__ == "__main__":
    sys.exit(main())
