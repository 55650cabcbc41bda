"""Judges mutants in children of one warm interpreter, which has imported library and tests once.

``ask`` starts the interpreter (``python -m mutants.warm``), which collects the tests and, first,
times them without a mutant. Each question then gets a child of its own: it exchanges the code of the
mutated functions, and runs one test or one layer. The limit of a child is ``PATIENCE`` times what
the same test took without a mutant, plus what this interpreter took to start.

Rules:

- A killer is a test (``tests/unit/core/test_ledger.py::test_x[p]``), a layer of the profile ``pr``
  (``corruption``), or a part that the layer looks at alone (``simulation:20``, a seed).
- Only a failed test, a violation, or an error that the library itself names is a finding. Whoever
  hangs, crashes or stumbles in another way has seen nothing.
- A child has a session of its own, and no process of it is left when its answer is given.
- ``CKPTFSM_MUTANT`` plants the mutant in each interpreter that a test starts
  (``planted/sitecustomize.py``). ``ask`` sets it for a mutant that cannot be exchanged, and this
  interpreter imports the mutated text.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pytest

from mutants.catalogue import by_name
from mutants.children import cpu_s, die_with_parent, in_child, in_lanes
from mutants.exchange import CannotExchangeError, Living, changed, exchange, living_functions
from mutants.loader import PACKAGE, ROOT
from mutants.reached import Reached, mutants_by_code

PATIENCE = 10.0
PLANTED = "CKPTFSM_MUTANT"
_SEEN_CHARACTERS = 400  # so that a line goes through a pipe in one piece
_ALONE = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a fork takes no threads
Found = dict[str, Any]


@dataclass
class Question:
    """What a warm interpreter is asked.

    - ``killers``: the tests and layers of each mutant, the first to ask first. If it is empty, all of
      ``search`` are tried that reach the mutated code, the quickest first.
    - ``limits_s``, ``start_limit_s``: those of an earlier interpreter. The killers are not timed again.
    """

    killers: dict[str, list[str]]
    processes: int = 1
    search: list[str] = field(default_factory=list)
    limits_s: dict[str, float] = field(default_factory=dict)
    start_limit_s: float = 0.0


# ------------------------------------------------------------------------------- the asking side


def ask(question: Question, planted: str = "") -> Iterator[Found]:
    """The answers, as they come, each a dict. ``planted`` is imported with the library.

    - ``start_limit_s``: of a start, until all is imported and collected; one such answer, the first.
    - ``killer``, ``limit_s``, ``red``: a killer without a mutant; ``red`` is its failure, or "".
    - ``mutant``, ``killer``, ``saw``: it is killed. Without ``saw``, ``why`` says what became of it.
    - ``candidates``: of a search, the tests that reach the code of those that were not seen.

    Raises ``RuntimeError`` if the interpreter ends early.
    """
    paths = [str(ROOT / "tests" / "mutants" / "planted"), str(ROOT / "tests"), str(ROOT)]
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="m-") as scratch, tempfile.TemporaryFile("w+") as said:
        os.chmod(scratch, 0o755)  # a test may let another user in
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "mutants.warm", str(write_end)],
            env={**os.environ, **_ALONE, "PYTHONPATH": path, "TMPDIR": scratch, PLANTED: planted},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=[write_end],
        )
        os.close(write_end)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(question)).encode())
            process.stdin.close()
            with open(read_end) as lines:
                yield from map(json.loads, lines)
            if process.wait() != 0:
                said.seek(0)
                raise RuntimeError(f"ended with {process.returncode}: {said.read()[-2000:]}")
        finally:
            process.kill()
            process.wait()


# --------------------------------------------------------------------------- the warm interpreter


class Warm:
    """A pytest plugin that answers the question in place of running all that was collected."""

    def __init__(self, question: Question, answers: int) -> None:
        self.question = question
        self.answers = answers
        self.began = time.monotonic()
        self.failure = ""
        self.items: dict[str, pytest.Item] = {}
        self.living: Living = {}
        self.reached = Reached({})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failure = crash.message.splitlines()[0] if crash is not None else "failed"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a test file cannot be imported")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.items = {item.nodeid: item for item in session.items}
        for mutant in self.question.killers:  # some are imported by a test as it runs
            for edit in by_name(mutant).edits:
                importlib.import_module(f"{PACKAGE}.{edit.module}")
        for killers in self.question.killers.values():
            killers[:] = [killer for killer in killers if "::" not in killer or self.tests(killer)]
        self.living = living_functions()
        if self.question.search:
            self.reached = Reached(mutants_by_code(map(by_name, self.question.killers)))
        gc.collect()
        gc.freeze()  # a look of a child's collector would copy every page
        assert len(os.listdir("/proc/self/task")) == 1, "a child would inherit a broken lock"
        if not self.question.start_limit_s:
            self.question.start_limit_s = PATIENCE * (time.monotonic() - self.began)
            self.tell({"start_limit_s": self.question.start_limit_s})
            self.time_killers()
        unseen = in_lanes(self.judge, [*self.question.killers], self.question.processes)
        if self.question.search:
            names = [answer["mutant"] for answer in unseen if "saw" not in answer]
            self.tell({"candidates": {name: self.question.killers[name] for name in names}})
        return True

    def tell(self, answer: Found) -> None:
        os.write(self.answers, json.dumps(answer).encode() + b"\n")

    def time_killers(self) -> None:
        """Every killer without a mutant: how long it takes, and that it sees nothing."""
        killers = {k for each in self.question.killers.values() for k in each}
        files: dict[str, list[str]] = {}
        for killer in self.items if self.question.search else sorted(killers):
            files.setdefault(killer.partition(":")[0], []).append(killer)
        reached: dict[str, list[tuple[float, str]]] = {}
        look = partial(self.asked, "", limit_s=math.inf)
        for found in in_lanes(look, [*files.values()], self.question.processes):
            for each in found.get("killers", ()):
                killer, took_s = each["killer"], each["took_s"]
                limit_s = self.question.start_limit_s + PATIENCE * took_s
                self.question.limits_s[killer] = limit_s
                self.tell({"killer": killer, "limit_s": limit_s, "red": each["red"]})
                for mutant in () if each["red"] else each["reached"]:
                    reached.setdefault(mutant, []).append((took_s, killer))
            if "why" in found:
                self.tell({"killer": found["asked"][0], "limit_s": 0.0, "red": found["why"]})
        for mutant, tests in reached.items():
            self.question.killers[mutant] = [test for _, test in sorted(tests)]

    def judge(self, mutant: str) -> Found:
        """Ask killer after killer until one sees the mutant."""
        answer: Found = {"mutant": mutant, "why": "no killer of it is there", "cpu_s": 0.0}
        for killer in self.question.killers[mutant]:
            limit_s = self.question.limits_s.get(killer, self.question.start_limit_s)
            found = self.asked(mutant, [killer], limit_s)
            answer["cpu_s"] += found["cpu_s"]
            answer["why"] = f"{killer}: {found.get('why', 'saw nothing')}"
            if found.get("cannot"):
                break
            if any(each["red"] for each in found.get("killers", ())):
                answer |= {"killer": killer, "saw": found["killers"][-1]["red"]}
                break
        self.tell(answer)
        return answer

    def asked(self, mutant: str, killers: Sequence[str], limit_s: float) -> Found:
        """Fork, let the child answer, and end whatever it leaves behind.

        ``killers``: what each of them found; ``why``: the reason if there is no such answer.
        """
        used_s = cpu_s()
        written, ended = in_child(partial(self.look, mutant, killers), limit_s)
        found: Found = {
            "why": "ended without an answer" if ended else f"nothing in {limit_s:.0f} s"
        }
        found = json.loads(written) if written else found
        return {**found, "asked": killers, "cpu_s": cpu_s() - used_s}

    def look(self, mutant: str, killers: Sequence[str]) -> str:
        """In a child: plant the mutant, unless this interpreter has imported it, and run the killers."""
        answer: Found = {"killers": []}
        try:
            if mutant and os.environ[PLANTED] != mutant:
                exchange(changed(by_name(mutant)), self.living)
                os.environ[PLANTED] = mutant
            for killer in killers:
                began = time.monotonic()
                red, reached = self.reached.watch(partial(self.red, killer))
                took_s = time.monotonic() - began
                each = {"killer": killer, "took_s": took_s, "red": red, "reached": reached}
                answer["killers"].append(each)
        except CannotExchangeError as error:
            answer = {"why": str(error), "cannot": True}
        except BaseException as error:  # no other error is a finding
            answer = {"why": f"{type(error).__name__}: {error}"[:_SEEN_CHARACTERS]}
        return json.dumps(answer)

    def red(self, killer: str) -> str:
        """What a test or a layer finds; "" if nothing."""
        self.failure = "" if "::" in killer else red_layer(killer)
        for item in self.tests(killer):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failure:
                break
        return self.failure[:_SEEN_CHARACTERS]

    def tests(self, killer: str) -> list[pytest.Item]:
        """The test of that name; all of that function if it is not parametrized so any more."""
        if killer in self.items:
            return [self.items[killer]]
        function = killer.partition("[")[0]
        return [item for name, item in self.items.items() if name.startswith(f"{function}[")]


def red_layer(killer: str) -> str:
    """The first violation that a layer, or a part of it, finds; "" if none."""
    name, _, part = killer.partition(":")
    module = importlib.import_module(name if "." in name else f"proof.{name}")
    budget = importlib.import_module("proof.layer").Budget
    errors = importlib.import_module("ckptfsm.core.errors")
    try:
        result = module.look(part) if part else module.run(budget(processes=1, stop_at_first=True))
    except (AssertionError, errors.CkptFsmError) as error:
        return f"{type(error).__name__}: {error}"
    if result.skipped:
        raise LookupError(f"skipped: {result.skipped}")
    return next((f"{each.promise}: {each.what}" for each in result.violations), "")


def serve(answers: int, question: Question) -> int:
    die_with_parent()
    signal.setitimer(signal.ITIMER_REAL, question.start_limit_s)  # a mutated import may hang
    killers = {
        k.partition("::")[0] for each in question.killers.values() for k in each if "::" in k
    }
    files = sorted(name for name in killers if (ROOT / name).exists())
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no"]
    arguments = [*quiet, f"--rootdir={ROOT}", *(question.search or files or ["tests/mutants"])]
    ended = pytest.main(arguments, plugins=[Warm(question, answers)])
    return 0 if ended == pytest.ExitCode.NO_TESTS_COLLECTED else int(ended)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), Question(**json.load(sys.stdin))))
