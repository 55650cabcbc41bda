"""The table of a proof run, for the terminal and for docs/proof.md, and what nobody exercised."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfsm.testing.coverage import ALL_PAIRS, ALL_ROWS, Coverage
from proof.catalogue import LAYERS, command_of
from proof.faults import APPLICABLE
from proof.layer import LayerResult

HEAD = ("layer", "explored", "seconds", "violations")


def rows(results: Sequence[LayerResult]) -> list[tuple[str, str, str, str]]:
    lines = []
    for result in results:
        explored = ", ".join(f"{count:,} {what}" for what, count in result.explored.items())
        found = str(len(result.violations))
        if result.skipped:
            explored, found = f"skipped: {result.skipped}", "-"
        lines.append((result.layer, explored, f"{result.seconds:.0f}", found))
    return lines


def table(results: Sequence[LayerResult]) -> str:
    """One line per layer, and its notes below."""
    lines = [HEAD, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(["", text[0], "-" * min(sum(widths) + 6, 100), *text[1:], ""])


def merged(results: Sequence[LayerResult]) -> Coverage:
    whole = Coverage()
    for result in results:
        whole.add(result.coverage)
    return whole


def unexercised(results: Sequence[LayerResult]) -> list[str]:
    """Table rows, state x event and fault x state that no layer of the run came across."""
    whole = merged(results)
    expected = [f"{fault} x {state}" for fault, states in APPLICABLE.items() for state in states]
    return [
        *(f"row {key}" for key in ALL_ROWS if not whole.rows[key]),
        *(f"state x event {key}" for key in ALL_PAIRS if not whole.pairs[key]),
        *(f"fault {key}" for key in expected if not whole.faults[key]),
    ]


def document(results: Sequence[LayerResult], profile: str) -> str:
    """docs/proof.md: the table with the command of each row, and what was exercised."""
    whole = merged(results)
    lines = [
        "# Proof",
        "",
        f"Written by `make proof` (profile `{profile}`). Every layer drives the production code; what",
        "each one does stands at the head of its module in `tests/proof/`.",
        "",
        "| layer | what it is | explored | seconds | violations | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, explored, seconds, found in rows(results):
        command = command_of(name, profile)
        about = LAYERS[name].about
        lines.append(f"| {name} | {about} | {explored} | {seconds} | {found} | `{command}` |")
    faults = sum(1 for count in whole.faults.values() if count)
    moves = sum(1 for key in ALL_ROWS if whole.rows[key])
    pairs = sum(1 for key in ALL_PAIRS if whole.pairs[key])
    exercised = (
        f"Exercised: {moves} of {len(ALL_ROWS)} rows of the table, {pairs} of {len(ALL_PAIRS)} "
        f"state x event, {faults} fault x state. What nobody exercises fails the run."
    )
    lines += ["", exercised]
    for result in results:
        if result.notes:
            lines += ["", f"## {result.layer}", "", "```", *result.notes, "```"]
    return "\n".join(lines) + "\n"
