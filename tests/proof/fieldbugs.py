"""Public reports of lost checkpoints, red on the old semantics and green on the library.

``python -m proof.fieldbugs NAME`` shows one side by side, without a name it lists them, and ``--write``
writes the documentation page. See the package ``fieldbugs`` for how one is checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fieldbugs.catalogue import BY_NAME, PAGE, REPORTS, page, side_by_side
from fieldbugs.report import Checked, check

from proof.coverage import Coverage, watch_moves
from proof.layer import Budget, LayerResult, Violation, timed

ROOT = Path(__file__).resolve().parents[2]


def run(budget: Budget) -> LayerResult:
    """Check every report. The same at every profile: the searches are exhaustive."""
    result = LayerResult("field bugs")
    explored = dict.fromkeys(("reports", "old_red", "ckptfsm_green", "states"), 0)
    for report in REPORTS:
        with watch_moves(result.coverage):
            checked = check(report, result.coverage)
        explored["reports"] += 1
        explored["old_red"] += bool(checked.old.broken)
        explored["ckptfsm_green"] += not checked.problem
        explored["states"] += checked.old.states + checked.mended.states
        result.violations += violations(checked)
        if budget.stop_at_first and result.violations:
            break
    result.explored = explored
    return result


def look(name: str) -> LayerResult:
    """One report, which shows a planted bug sooner than all of them."""
    return LayerResult("field bugs", violations=violations(check(BY_NAME[name], Coverage())))


def violations(checked: Checked) -> list[Violation]:
    """The findings that differ from the expectation, with the promise that the report is about."""
    promise = checked.old.broken.partition(":")[0] or "field bug"
    name = checked.report.name
    return [Violation(promise, f"{name}: {p}", f"make repro-{name}") for p in checked.problems]


def main(arguments: list[str]) -> int:
    if not arguments or arguments == ["list"]:
        width = max(len(report.name) for report in REPORTS)
        for report in REPORTS:
            print(f"{report.name.ljust(width)}  {report.happened}")
        return 0
    if arguments == ["--write"]:
        checked = [check(report, Coverage()) for report in REPORTS]
        (ROOT / PAGE).write_text(page(checked), encoding="utf-8")
        return 0
    if arguments == ["--all"]:
        result = timed(run, Budget())
        print(result.explored, f"{result.seconds:.1f} s")
        for violation in result.violations:
            print(violation)
        return bool(result.violations)
    unknown = [name for name in arguments if name not in BY_NAME]
    if unknown:
        print(f"no such report: {', '.join(unknown)}; known: {', '.join(BY_NAME)}")
        return 2
    failed = False
    for name in arguments:
        one = check(BY_NAME[name], Coverage())
        print(side_by_side(one))
        failed = failed or bool(one.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
