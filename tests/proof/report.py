"""The table of a proof run, for the terminal and for build/proof.md, and the pairs that were not
exercised.

Rules: a soak repeats a few layers, and is asked for no coverage; a pair that cannot happen is red
in any run.
"""

from __future__ import annotations

from collections.abc import Sequence

from proof.catalogue import LAYERS, command_of
from proof.coverage import ALL_PAIRS, ALL_ROWS, Coverage
from proof.faults import applicable, cannot_happen
from proof.layer import LayerResult

HEAD = ("layer", "explored", "seconds", "processor seconds", "violations", "mutants killed")


def rows(results: Sequence[LayerResult]) -> list[tuple[str, ...]]:
    """The cells of each layer's line, as ``HEAD`` names them."""
    kills = {layer: count for result in results for layer, count in result.kills.items()}
    lines = []
    for result in results:
        explored = ", ".join(f"{count:,} {what}" for what, count in result.explored.items())
        if result.skipped:
            explored = f"skipped: {result.skipped}"
        found = "-" if result.skipped and not result.violations else str(len(result.violations))
        killed = str(kills.get(result.layer, ""))
        if "tests" in result.kills:
            killed = f"{result.kills['tests']} by unit tests"
        took = (f"{result.seconds:.0f}", f"{result.processor_s:.0f}")
        lines.append((result.layer, explored, *took, found, killed))
    return lines


def table(results: Sequence[LayerResult]) -> str:
    """A line per layer, and its notes below."""
    lines = [HEAD, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(["", text[0], "-" * min(sum(widths) + 6, 100), *text[1:], ""])


def merged(results: Sequence[LayerResult], *, driving: bool = False) -> Coverage:
    """The coverage of all layers; ``driving``: only of those that really run jobs on a disk."""
    whole = Coverage()
    for result in results:
        if LAYERS[result.layer].drives or not driving:
            whole.add(result.coverage)
    return whole


def unexercised(results: Sequence[LayerResult], profile: str) -> list[str]:
    """Table rows, state x event and fault x state that no layer of the run came across.

    A row and a fault count only where a job came to it by itself; a pair also where a search offered it.
    """
    whole, real = merged(results), merged(results, driving=True)
    return [
        *(f"row {key}" for key in ALL_ROWS if not real.rows[key]),
        *(f"state x event {key}" for key in ALL_PAIRS if not whole.pairs[key]),
        *(f"fault {key}" for key in applicable(profile) if not real.faults[key]),
    ]


def impossible(results: Sequence[LayerResult]) -> list[str]:
    """The pairs that were struck though the table of faults says that it cannot happen: the table
    is wrong."""
    return [
        f"{key}, {count:,} times in {result.layer}"
        for result in results
        for key, count in sorted(result.coverage.faults.items())
        if count and cannot_happen(key)
    ]


def exercised(results: Sequence[LayerResult], profile: str) -> str:
    """How much of the table, of state x event and of fault x state the run came across."""
    whole, real = merged(results), merged(results, driving=True)
    expected = applicable(profile)
    moves = sum(1 for key in ALL_ROWS if real.rows[key])
    pairs = sum(1 for key in ALL_PAIRS if whole.pairs[key])
    faults = sum(1 for key in expected if real.faults[key])
    return (
        f"Exercised: {moves} of {len(ALL_ROWS)} rows of the table, {pairs} of {len(ALL_PAIRS)} "
        f"state x event, {faults} of {len(expected)} applicable fault x state. "
        "What nobody exercises fails the run."
    )


def document(results: Sequence[LayerResult], profile: str) -> str:
    """build/proof.md: the table with the command of each row, and the exercised pairs."""
    lines = [
        "# Proof",
        "",
        f"Written by `make proof` (profile `{profile}`). Every layer drives the production code; what",
        "each one does stands at the head of its module in `tests/proof/`.",
        "",
        f"| layer | what it is | {' | '.join(HEAD[1:])} | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, *cells in rows(results):
        about, command = LAYERS[name].about, command_of(name, profile)
        lines.append(f"| {name} | {about} | {' | '.join(cells)} | `{command}` |")
    lines += ["", exercised(results, profile)]
    for result in results:
        if result.notes:
            lines += ["", f"## {result.layer}", "", "```", *result.notes, "```"]
    return "\n".join(lines) + "\n"
