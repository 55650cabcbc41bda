"""Mutants: the library with one planted bug at a time, and which layer sees it, how fast, and how.

``PYTHONPATH=tests python -m proof.mutants [--only NAME ...] [--list]``

Rules: every mutant must be seen by some layer of the ``pr`` profile within ``LIMIT_S``. A layer
runs in a separate process that imports the mutated code; a layer that crashes or hangs has seen
nothing. The mutant's hints say which layers are asked first; that saves time and decides nothing. A
control, the unbroken library, must be seen by none; in the gate, the layers and tests beside this
one are it. A layer that is not there is reported.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from mutants.catalogue import MUTANTS, by_name
from mutants.child import CONTROL, SEEDS, TESTS
from mutants.loader import Mutant, mutated_sources
from mutants.nursery import Nursery

from proof.layer import Budget, LayerResult, Violation, timed

LAYERS = (
    "exhaustive",
    "inductive",
    "fieldbugs",
    "suites",
    "corruption",
    "traces",
    "processes",
    "simulation",
    "interrupts",
)
LIMIT_S = 60.0
PROFILE = "pr"  # the layers of the gate must kill them all, whatever profile asks
_SHARE_S = 30.0  # of a layer, while others are still to be asked
_HINTED_S = 50.0  # of a layer that the mutant names
_CONTROL_S = 8.0
_REPLAY = "PYTHONPATH=tests python -m proof.mutants --only"
_TESTED_BY = {  # modules that have no test file of their name
    "assembly": "coordinator",
    "publishing": "coordinator",
    "protection": "coordinator",
    "engine": "coordinator",
    "torch_dist": "shared_memory",
    "admitting": "quarantine",
    "planning": "situation",
    "plan_run": "coordinator",
    "receipts": "inspection",
    "shard_file": "rank_writer",
    "tied": "spawn",
    "memory": "refused_calls",
    "visibility": "rank_writer",
    "prefetch": "image",
    "write_process": "write_engine",
    "write_job": "write_engine",
    "ports": "fork",
    "session": "manager",
    "recovery_refusals": "recovery",
    "participant": "manager",
    "reports": "manager",
    "share": "manager",
    "coordinator_client": "manager",
    "handle": "manager",
    "restoring": "manager",
    "wiring": "manager",
    "evidence": "recovery",
    "rollback": "recovery",
    "group_worker": "controller",
    "plain_files": "composite",
    "mirror": "uploads",
    "queue": "dropins",
    "foreign": "dropins",
    "trainer": "verl_driver",
}


Tell = Callable[[str], None]


def _nobody(line: str) -> None:
    """Hears nothing."""


@dataclass
class Verdict:
    """The fate of one mutant. ``killer`` is empty for a survivor; ``others`` saw nothing."""

    name: str
    breaks: str
    source: str
    killer: str = ""
    message: str = ""
    replay: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    others: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)

    def line(self) -> str:
        """A line of the report."""
        by = self.killer or "SURVIVED"
        seen = self.message or "; ".join(self.others)
        text = " ".join(seen.split())[:100]
        if "--seed" in self.replay:
            text += f" (seed {self.replay.split()[-1]})"
        cost = f"{self.seconds:5.1f} s {self.cpu_s:5.1f} cpu"
        return f"{self.name:44} {self.breaks:4} {by:24} {cost}  {text}"


def layers_for(planted: Mutant, layers: Sequence[str]) -> list[str]:
    """Every layer, the likely killers first; tests before layers, as they see most bugs in a second."""
    modules = dict.fromkeys(edit.module.rpartition(".")[2] for edit in planted.edits)
    tests = [f"{TESTS}test_{_TESTED_BY.get(module, module)}.py" for module in modules]
    named = [killer for killer in planted.killers if killer.startswith(TESTS)]
    wanted = [*named, *tests, *planted.killers, *layers]
    known = (*layers, *tests)
    return [n for n in dict.fromkeys(wanted) if n in known or n.startswith(TESTS)]


def judge(
    nursery: Nursery, planted: Mutant, layers: Sequence[str], profile: str, limit_s: float = LIMIT_S
) -> Verdict:
    """Ask layer after layer until one sees the mutant."""
    verdict = Verdict(planted.name, planted.breaks, planted.source)
    began = time.monotonic()
    order = layers_for(planted, layers)
    for layer in order:
        left = limit_s - (time.monotonic() - began)
        if left <= 0:
            verdict.others.append("no time left")
            break
        share = _HINTED_S if layer in planted.killers else _SHARE_S
        limit = left if layer == order[-1] else min(left, share)
        answer = nursery.ask(planted.name, layer, profile, limit)
        verdict.cpu_s += answer.get("cpu_s", 0.0)
        if "saw" in answer:
            verdict.killer, verdict.message = layer, answer["saw"]
            verdict.replay = answer.get("replay", "")
            break
        if "skipped" in answer:
            verdict.absent.add(f"{layer}: {answer['skipped']}")
        else:
            verdict.others.append(
                f"{layer}: {answer.get('broke') or answer.get('late') or 'saw nothing'}"
            )
    verdict.seconds = time.monotonic() - began
    return verdict


def control(
    nursery: Nursery, layers: Sequence[str], profile: str, verdicts: Sequence[Verdict]
) -> Iterator[Violation]:
    """The unbroken library: whoever sees a bug in it would kill every mutant for nothing.

    Every layer is asked for a while, and the simulation runs all the seeds that killed.
    """
    seeds = {v.replay.split()[-1]: v.name for v in verdicts if v.killer == "simulation"}
    if seeds:
        answer = nursery.ask(CONTROL, SEEDS + ",".join(seeds), profile, LIMIT_S)
        for seed in answer.get("red", seeds):
            yield Violation(
                "",
                f"seed {seed} is red without {seeds[str(seed)]} too, or cannot be told",
                f"{_REPLAY} {CONTROL}",
            )
    for layer in layers:
        answer = nursery.ask(CONTROL, layer, profile, _CONTROL_S)
        problem = answer.get("saw") or answer.get("broke")
        if problem:
            yield Violation(
                "", f"{layer} is red without a mutant: {problem}", f"{_REPLAY} {CONTROL}"
            )


def run(
    budget: Budget,
    mutants: Sequence[Mutant] = MUTANTS,
    layers: Sequence[str] = LAYERS,
    tell: Tell = _nobody,
) -> LayerResult:
    """Judge every mutant, ``budget.processes`` at a time; in a sample one of each promise."""
    result = LayerResult("mutants")
    if budget.profile == "sample":
        mutants = sample_of(mutants)
    verdicts = judge_all(budget, mutants, layers, tell)
    killed = [v for v in verdicts if v.killer]
    result.violations += [
        Violation(
            v.breaks,
            f"{v.name} ({v.source}) survived: {'; '.join(v.others)}",
            f"{_REPLAY} {v.name}",
        )
        for v in verdicts
        if not v.killer
    ]
    if budget.profile not in ("sample", PROFILE) and not budget.stop_at_first:
        with Nursery() as nursery:
            result.violations += control(nursery, layers, PROFILE, verdicts)
    result.explored = {"mutants": len(verdicts), "killed": len(killed)}
    result.notes = [v.line() for v in verdicts]
    by_layer = Counter(v.killer.partition("::")[0].partition("/")[0] for v in killed)
    result.kills = dict(Counter(v.killer.partition(":")[0] for v in killed))
    slowest = max((v.seconds for v in killed), default=0.0)
    result.notes.append(
        f"killed by {', '.join(f'{n}: {c}' for n, c in by_layer.most_common())}; slowest {slowest:.1f} s"
    )
    result.notes += sorted({f"absent: {text}" for v in verdicts for text in v.absent})
    return result


def sample_of(mutants: Sequence[Mutant]) -> tuple[Mutant, ...]:
    """A mutant of each promise or rule that is broken, if possible one that a single test sees."""
    found: dict[str, Mutant] = {}
    for planted in sorted(mutants, key=lambda each: not any("::" in k for k in each.killers)):
        found.setdefault(planted.breaks, planted)
    return tuple(found.values())


def judge_all(
    budget: Budget, mutants: Sequence[Mutant], layers: Sequence[str], tell: Tell = _nobody
) -> list[Verdict]:
    """In the order of the catalogue. With ``stop_at_first``, none begins after a survivor.

    ``tell`` hears each verdict's line as soon as it is known.
    """
    todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for planted in mutants:
        todo.put(planted)
    verdicts: dict[str, Verdict] = {}
    stop = threading.Event()

    def work() -> None:
        with Nursery() as nursery:
            while not stop.is_set():
                try:
                    planted = todo.get_nowait()
                except queue.Empty:
                    return
                verdict = judge(nursery, planted, layers, PROFILE)
                verdicts[planted.name] = verdict
                tell(verdict.line())
                if budget.stop_at_first and not verdict.killer:
                    stop.set()

    with ThreadPoolExecutor(budget.processes) as pool:
        for working in [pool.submit(work) for _ in range(budget.processes)]:
            working.result()
    return [verdicts[planted.name] for planted in mutants if planted.name in verdicts]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), help="ask these layers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="say which mutants there are")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for planted in MUTANTS:
            mutated_sources(planted)
            print(f"{planted.name:44} {planted.breaks:4} {planted.source:36} {planted.why}")
        return 0
    mutants = [by_name(n) for n in chosen.only if n != CONTROL] if chosen.only else MUTANTS

    def layer(budget: Budget) -> LayerResult:
        return run(budget, mutants, chosen.layers, partial(print, flush=True))

    result = timed(layer, Budget(processes=chosen.processes))
    print("\n".join(result.notes[len(mutants) :]))
    print(result.explored, f"{result.seconds:.0f} s")
    for violation in result.violations:
        print(f"VIOLATION {violation.promise}: {violation.what}\n  {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
