"""Mutants of preemption: the last save begins too late, never, or again and again."""

from __future__ import annotations

from mutants.loader import mutant

ALLOCATION = "tests:test_allocation.py"

MUTANTS = (
    mutant(
        "the-last-save-does-not-wait-for-another-one",
        "core.preemption:lead_s",
        "return 2 * save + 2 * look",
        "return save + 2 * look",
        breaks="F25",
        source="order",
        why="a save that has just begun delays the last one beyond the end",
    ),
    mutant(
        "the-last-save-begins-at-the-next-look",
        "core.preemption:lead_s",
        "return 2 * save + 2 * look",
        "return 2 * save",
        breaks="F25",
        source="order",
    ),
    mutant(
        "half-of-the-saves-are-quick-enough",
        "core.preemption:percentile_95",
        "return ordered[-(-95 * len(ordered) // 100) - 1]",
        "return ordered[len(ordered) // 2]",
        breaks="F25",
        source="order",
    ),
    mutant(
        "a-save-that-was-not-measured-takes-no-time",
        "core.preemption:lead_s",
        "if saves_s else min(UNMEASURED_S, run_s / 4)",
        "if saves_s else 0.0",
        breaks="F25",
        source="order",
    ),
    mutant(
        "the-end-moves-with-the-wall-clock",
        "ranks.allocation:Allocation._current",
        "if self._end is None or self._end[0] != end:",
        "if True:",
        breaks="F14",
        source="F14",
    ),
    mutant(
        "the-end-is-told-at-every-look",
        "ranks.allocation:Allocation.agreed",
        "self._over = True",
        "pass",
        breaks="F25",
        source="order",
        why="a job saves again and again until it is killed in the middle of a save",
    ),
    mutant(
        "a-function-that-fails-ends-one-rank",
        "ranks.allocation:Allocation._current",
        "except Exception as error:",
        "except OSError as error:",
        breaks="F24",
        source="F24",
    ),
    mutant(
        "a-rank-keeps-the-end-to-itself",
        "ranks.participant:Participant.exchange",
        "agreed[_PREEMPTED] or agreed[_ENDING]:",
        "agreed[_PREEMPTED] or flags[_ENDING]:",
        breaks="I10",
        source="order",
        why="a rank saves alone, and waits for the others",
    ),
    mutant(
        "saves-are-not-measured",
        "ranks.participant:Participant._on_tracked",
        "self.allocation.save_tracked()",
        "pass",
        breaks="F25",
        source="order",
    ),
)
