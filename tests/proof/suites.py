"""Hypothesis suites over the ledger, recovery, retention and plain values.

    PYTHONPATH=tests python -m proof.suites [--suite NAME] [--profile pr|nightly|release]

``pr`` is derandomized: the same command shows the same failure again. Every failure that is found is
shrunk by Hypothesis, and kept by a person as an explicit test.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

from hypothesis.stateful import run_state_machine_as_test
from hypothesis.statistics import collector
from profiles import profile

from proof.coverage import watch_moves
from proof.layer import Budget, LayerResult, Violation, timed
from proof.ledger_machine import LedgerMachine
from proof.plain_values import check_plain_values
from proof.recovery_properties import PROPERTIES


def check_ledger(settings) -> None:
    run_state_machine_as_test(LedgerMachine, settings=settings)


def check_property(test, settings) -> None:
    settings(test)()


# Each suite with how many examples of the profile's number it runs.
SUITES: MappingProxyType[str, tuple[Callable[..., None], float]] = MappingProxyType(
    {
        **{f.__name__: (partial(check_property, f), 8.0) for f in PROPERTIES},
        "ledger": (check_ledger, 2.5),
        "plain values": (check_plain_values, 0.1),
    }
)


def run(budget: Budget) -> LayerResult:
    """Every suite of the profile; with ``stop_at_first`` nothing is shrunk."""
    result = LayerResult("suites", {"suites": 0, "examples": 0})
    name = {"soak": "release", "sample": "pr"}.get(budget.profile, budget.profile)
    part = 0.1 if budget.profile == "sample" else 1.0
    for suite, (check, scale) in SUITES.items():
        settings = profile(name, scale=scale * part, shrink=not budget.stop_at_first)
        with watch_moves(result.coverage), count_examples() as ran:
            violation = violation_of(suite, name, partial(check, settings=settings))
        result.explored["suites"] += 1
        result.explored["examples"] += ran["valid"] + ran["interesting"]
        if violation is not None:
            result.violations.append(violation)
            if budget.stop_at_first:
                break
    return result


@contextmanager
def count_examples() -> Iterator[Counter[str]]:
    """How many examples Hypothesis really ran within, by their outcome."""
    ran: Counter[str] = Counter()

    def note(statistics) -> None:
        for name, phase in statistics.items():
            if name.endswith("-phase"):
                ran.update(case["status"] for case in phase["test-cases"])

    with collector.with_value(note):
        yield ran


def violation_of(suite: str, name: str, check: Callable[[], None]) -> Violation | None:
    """The finding of a suite, with its shortest history; None if it holds."""
    try:
        check()
    except Exception as error:  # whatever a broken library raises is a finding
        found = getattr(error, "exceptions", (error,))[0]
        said = f"{type(found).__name__}: {found}"
        promise = re.search(r"\b([IF]\d+)\b", said)
        history = "\n".join(getattr(found, "__notes__", ()))
        replay = f"PYTHONPATH=tests python -m proof.suites --suite {suite} --profile {name}"
        return Violation(promise[1] if promise else "", f"{said}\n{history}", replay)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=tuple(SUITES))
    parser.add_argument("--profile", choices=("pr", "nightly", "release"), default="pr")
    asked = parser.parse_args()
    if asked.suite is None:
        result = timed(run, Budget(asked.profile))
        violations = result.violations
        print(f"{result.explored} in {result.seconds:.1f} s")
    else:
        check, scale = SUITES[asked.suite]
        settings = profile(asked.profile, scale=scale)
        found = violation_of(asked.suite, asked.profile, partial(check, settings=settings))
        violations = [found] if found else []
    for violation in violations:
        print(f"{violation.promise}  {violation.what}\n    {violation.replay}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
