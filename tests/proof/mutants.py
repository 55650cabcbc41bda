"""Mutants: the library with one planted bug at a time, and which test or layer sees it.

``PYTHONPATH=tests python -m proof.mutants [--only NAME ...] [--list | --map [--among TEST ...]]``

Rules: the map ``tests/mutants/kills.json`` names, for each mutant, a test or a layer of the ``pr``
profile that sees it. All killers run without a mutant first: one that is red then is a violation, and
its time sets the limit of the same killer with a mutant. A mutant that cannot be exchanged in place,
or that is not seen so, is asked about again in an interpreter that imports the mutated text. Whoever
lives through that is a violation. ``--map`` looks for other killers of those, and writes the map.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fieldbugs.catalogue import REPORTS
from mutants import warm
from mutants.catalogue import MUTANTS, by_name
from mutants.children import cpu_s
from mutants.loader import Mutant, mutated_sources
from mutants.warm import Found, Question

from proof.exhaustive import SCOPES
from proof.layer import Budget, LayerResult, Violation, in_memory, timed

MAP = Path(warm.__file__).with_name("kills.json")
PARTS = (  # of layers, that are tried for a mutant that no test sees
    *(f"fieldbugs:{report.name}" for report in REPORTS),
    *(f"simulation:{seed}" for seed in range(50)),
    *(f"exhaustive:{scope.name}" for scope in SCOPES),
    *("corruption", "inductive"),
)
SEARCHED = (
    *("tests/unit", "tests/histories", "tests/processes", "tests/proof/tests"),
    *("-m", "not gate and not megatron", "--ignore=tests/proof/tests/test_mutants.py"),
)
_AGAIN = "PYTHONPATH=tests python -m proof.mutants --only"
_RENEW = "PYTHONPATH=tests python -m proof.mutants --map --only"
Killers = Mapping[str, Sequence[str]]
Tell = Callable[[str], None]


def _nobody(line: str) -> None:
    """Hears nothing."""


@dataclass
class Verdicts:
    """What a run has found: ``fates`` by the mutant's name, ``red`` by the killer's."""

    fates: dict[str, Found] = field(default_factory=dict)
    red: dict[str, str] = field(default_factory=dict)
    limits_s: dict[str, float] = field(default_factory=dict)
    start_limit_s: float = 0.0
    candidates: dict[str, list[str]] = field(default_factory=dict)

    def hear(self, answer: Found) -> None:
        """Take in an answer of ``warm.ask``."""
        if "mutant" in answer:
            self.fates[answer["mutant"]] = answer
        elif "limit_s" in answer:
            self.limits_s[answer["killer"]] = answer["limit_s"]
            if answer["red"]:
                self.red[answer["killer"]] = answer["red"]
        elif "candidates" in answer:
            self.candidates |= answer["candidates"]
        else:
            self.start_limit_s = answer["start_limit_s"]

    def survivors(self) -> list[str]:
        return [name for name, fate in self.fates.items() if "saw" not in fate]


def judge(
    killers: Killers, processes: int, tell: Tell = _nobody, search: Sequence[str] = ()
) -> Verdicts:
    """The fate of each mutant: in place, then for those that were not seen as they are imported."""
    verdicts = Verdicts()
    killers = {name: list(each) for name, each in killers.items()}
    for answer in warm.ask(Question(killers, processes, list(search))):
        verdicts.hear(answer)
        if "saw" in answer:
            tell(line(answer))

    def imported(name: str) -> Found:
        asked = {name: verdicts.candidates.get(name, killers[name])}
        limits = {"limits_s": verdicts.limits_s, "start_limit_s": verdicts.start_limit_s}
        again = Question(asked, **limits)
        try:
            [answer] = warm.ask(again, planted=name)
        except RuntimeError as error:  # the mutated text cannot be imported, or hangs
            answer = {**verdicts.fates[name], "why": str(error)}
        answer["cpu_s"] += verdicts.fates[name]["cpu_s"]
        tell(line(answer))
        return answer

    again = [name for name in verdicts.survivors() if killers[name] or name in verdicts.candidates]
    with ThreadPoolExecutor(processes) as pool:
        for answer in pool.map(imported, again):
            verdicts.hear(answer)
    return verdicts


def line(fate: Found) -> str:
    """A line of the report."""
    planted = by_name(fate["mutant"])
    killer = fate.get("killer", "SURVIVED").rpartition("/")[2]
    said = " ".join(fate.get("saw", fate["why"]).split())[:100]
    return f"{planted.name:44} {planted.breaks:4} {fate['cpu_s']:5.1f} cpu  {killer}: {said}"


def run(
    budget: Budget,
    mutants: Sequence[Mutant] = MUTANTS,
    killers: Killers | None = None,
    tell: Tell = _nobody,
) -> LayerResult:
    """Judge every mutant, ``budget.processes`` at a time; in a sample one of each promise."""
    result = LayerResult("mutants")
    if budget.profile == "sample":
        mutants = sample_of(mutants)
    killers = read_map() if killers is None else killers
    used_s = cpu_s()
    verdicts = judge({m.name: killers.get(m.name, ()) for m in mutants}, budget.processes, tell)
    used_s = cpu_s() - used_s
    result.violations += [
        Violation("", f"{killer} is red without a mutant: {red}", f"python -m pytest '{killer}'")
        for killer, red in verdicts.red.items()
    ]
    for planted in mutants:
        fate = verdicts.fates[planted.name]
        if "saw" not in fate:
            what = (
                f"{planted.name} ({planted.source}) survived: {fate['why']}; if another test sees"
            )
            what += f" it, this renews the map: {_RENEW} {planted.name}"
            result.violations.append(Violation(planted.breaks, what, f"{_AGAIN} {planted.name}"))
    fates = [verdicts.fates[planted.name] for planted in mutants]
    killed = [fate["killer"] for fate in fates if "saw" in fate]
    result.kills = dict(
        Counter("tests" if "::" in each else each.partition(":")[0] for each in killed)
    )
    result.explored = {"mutants": len(mutants), "killed": len(killed)}
    result.notes = [*map(line, fates), f"killed by {result.kills}; {used_s:.0f} processor seconds"]
    return result


def sample_of(mutants: Sequence[Mutant]) -> tuple[Mutant, ...]:
    """A mutant of each promise or rule that is broken."""
    found: dict[str, Mutant] = {}
    for planted in mutants:
        found.setdefault(planted.breaks, planted)
    return tuple(found.values())


# --------------------------------------------------------------------------------------- the map


def read_map() -> dict[str, list[str]]:
    """The killers of each mutant."""
    killers: dict[str, list[str]] = json.loads(MAP.read_text(encoding="utf-8"))
    return killers


def renew_map(
    mutants: Sequence[Mutant], among: Sequence[str], processes: int, tell: Tell
) -> list[str]:
    """Keep the killers that still see their mutant, look for others, and write the map.

    ``among`` are arguments of pytest: the tests that are tried, before parts of the layers.
    Returns the mutants that nobody sees.
    """
    killers = read_map()
    seen: dict[str, list[str]] = {}
    left = [planted.name for planted in mutants]
    for known, search in ((killers, ()), ({}, among), (dict.fromkeys(left, PARTS), ())):
        asked = {name: known.get(name, ()) for name in left if search or known.get(name)}
        verdicts = judge(asked, processes, tell, search) if asked else Verdicts()
        for name, fate in verdicts.fates.items():
            if "saw" in fate and fate["killer"] not in verdicts.red:
                seen[name] = [fate["killer"]]
        left = [name for name in left if name not in seen]
    killers |= seen | dict.fromkeys(left, [])
    entries = [
        f'  "{planted.name}": {json.dumps(killers[planted.name])}'
        for planted in MUTANTS
        if planted.name in killers
    ]
    MAP.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    return left


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="say which mutants there are")
    parser.add_argument("--map", action="store_true", help="look for killers, and write the map")
    parser.add_argument("--among", nargs="+", default=SEARCHED, help="files of tests to look in")
    chosen = parser.parse_args(arguments)
    mutants = [by_name(n) for n in chosen.only] if chosen.only else MUTANTS
    if chosen.list:
        for planted in MUTANTS:
            mutated_sources(planted)
            print(f"{planted.name:44} {planted.breaks:4} {planted.source:36} {planted.why}")
        return 0
    tell = partial(print, flush=True)
    tempfile.tempdir = in_memory()  # as in the gate
    if chosen.map:
        left = renew_map(mutants, chosen.among, chosen.processes, tell)
        print(*(f"nobody sees {name}" for name in left), sep="\n")
        return bool(left)
    result = timed(partial(run, mutants=mutants, tell=tell), Budget(processes=chosen.processes))
    print(result.notes[-1], result.explored, f"{result.seconds:.0f} s")
    for violation in result.violations:
        print(f"VIOLATION {violation.promise}: {violation.what}\n  {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
