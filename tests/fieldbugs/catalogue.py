"""All reports, and how they are shown: side by side for one, as a page of the documentation for all."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from types import MappingProxyType

from fieldbugs import huggingface, megatron, newest, others, torchtitan, verl
from fieldbugs.report import Checked, Report
from fieldbugs.today import TESTS, VERSIONS, today

REPORTS: tuple[Report, ...] = (
    *verl.REPORTS,
    *megatron.REPORTS,
    *others.REPORTS,
    *newest.REPORTS,
    *torchtitan.REPORTS,
    *huggingface.REPORTS,
)
BY_NAME = MappingProxyType(
    {name: report for report in REPORTS for name in (report.name, *report.aliases)}
)
PAGE = "docs/field-bugs.md"

_HEAD = f"""# Field bugs

Each row is a public report of a checkpoint that was lost, torn, never tracked or deleted too early.
`make repro-NAME` searches a small model of it for the shortest history that breaks one of the
[promises](protocol.md). It replays that history on this library, with its real coordinator and
writers, and prints both side by side. `make repro-list` lists the names. The models are written
from the reports and contain no code of those projects.

The reports about verl, Megatron, torchtitan, Accelerate and Trainer also run against the drop-in for
[verl](verl.md), [Megatron-LM](megatron-lm.md), [torchtitan](torchtitan.md), or [Accelerate and
Trainer](accelerate.md), or against the [queue](foreign.md#replace-the-queue), by the tests that
`tests/fieldbugs/dropins.py` names.

The last column says whether it is still so in {VERSIONS}.
"(run)" means that stock code was run, by `{TESTS}`
(`make test-integrations`). `tests/fieldbugs/today.py` says what has changed or is left.

| report | what happened | what ckptfsm does | today |
|---|---|---|---|
"""


def side_by_side(checked: Checked) -> str:
    """A report for people: both histories, action by action, and the verdicts."""
    report = checked.report
    rows = [("", "what happens", "old semantics", "ckptfsm")]
    for number, action in enumerate(checked.old.history):
        ours = checked.shown[number] if number < len(checked.shown) else "(stopped)"
        rows.append((str(number + 1), str(action), checked.old.shown[number], ours))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{report.name}: {report.happened}", *(f"  {link}" for link in report.links), ""]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "   ".join(cells).rstrip())
    lines += ["", *_verdicts(checked)]
    return "\n".join(lines)


def _verdicts(checked: Checked) -> list[str]:
    old = f"RED    old semantics: {checked.old.broken}"
    if not checked.old.broken:
        old = f"GREEN  old semantics, which should be red ({checked.old.states} states)"
    mended = f"GREEN  mended model: no broken state among {checked.mended.states}"
    if checked.mended.broken:
        mended = f"RED    mended model: {checked.mended.broken}"
    ours = f"RED    ckptfsm: {checked.problem}"
    if not checked.problem:
        ours = f"GREEN  ckptfsm: {checked.report.verdict}"
    return [old, mended, ours]


def page(all_checked: Sequence[Checked]) -> str:
    """The documentation page. The first row with a link has its address."""
    linked: set[str] = set()
    rows = []
    for checked in all_checked:
        rows.append(_row(checked, linked))
        linked.update(checked.report.links)
    return _HEAD + "".join(rows)


def _row(checked: Checked, linked: Container[str]) -> str:
    report = checked.report
    shown = (
        _label(link) if link in linked else f"[{_label(link)}]({link})" for link in report.links
    )
    cells = (
        ", ".join(shown),
        report.happened,
        report.verdict,
        today(report.name).partition(":")[0],
    )
    return f"| {' | '.join(cells)} |\n"


def _label(link: str) -> str:
    """``verl #4638`` or, of a source file, ``Megatron-LM: checkpointing.py``."""
    found = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:pull|issues)/(\d+)", link)
    if found:
        return f"{found[1]} #{found[2]}"
    parts = link.split("/")
    return f"{parts[4]}: {parts[-1]}"
