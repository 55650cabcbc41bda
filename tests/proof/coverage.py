"""Coverage of a run: rows of the table, state x event, faults by state, and rules of recovery.

Rules: only counts, so the sum of two coverages is the coverage of both runs. ``watch_moves``
observes the production ledger while it moves checkpoints, ``watch_rules`` while recovery decides.
Both change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.core import ledger as _ledger
from ckptfsm.core import recovery_rules as _rules
from ckptfsm.core.events import Command, Event
from ckptfsm.core.lifecycle import _QUIET, EVENTS, TABLE, Checkpoint, Row, State, find_row
from ckptfsm.core.recovery_rules import RULES, Facts, Rule


def row_key(row: Row) -> str:
    """A row of the table as text: ``source event[guard] -> dest``."""
    guard = f"[{row.guard.__name__}]" if row.guard is not None else ""
    return f"{row.source.value} {row.event.name}{guard} -> {row.dest.value}"


def pair_key(state: State, event: type[Event]) -> str:
    """A state and an event that was offered in it, legal or not."""
    return f"{state.value} x {event.name}"


ALL_ROWS = tuple(row_key(row) for row in TABLE)
ALL_PAIRS = tuple(pair_key(state, event) for state in State for event in EVENTS)
ALL_RULES = tuple(rule.name for rule in RULES)


@dataclass
class Coverage:
    """The number of times that each was exercised.

    ``faults`` counts ``F5 x forked``: fault and state. ``rules`` counts the rules of recovery by name.
    """

    rows: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)

    def move(self, checkpoint: Checkpoint, event: Event) -> None:
        """Count ``event``, offered to ``checkpoint``, with any result."""
        self.pairs[pair_key(checkpoint.state, type(event))] += 1
        row = find_row(checkpoint, event) if event.of == checkpoint.id else None
        if row is not None:
            self.rows[row_key(row)] += 1

    def quiet(self, state: State, event: Event) -> None:
        """Count a report that was absorbed: it moved no checkpoint to another state."""
        self.pairs[pair_key(state, type(event))] += 1
        self.rows[row_key(_QUIET[state, type(event)])] += 1

    def fault(self, number: str, state: State | None) -> None:
        """Count fault ``number`` (``F5``), which struck in ``state`` (None: in any)."""
        self.faults[f"{number} x {state.value if state is not None else 'any'}"] += 1

    def add(self, other: Coverage) -> None:
        self.rows += other.rows
        self.pairs += other.pairs
        self.faults += other.faults
        self.rules += other.rules

    def as_json(self) -> dict[str, dict[str, int]]:
        return {
            name: dict(sorted(counter.items()))
            for name, counter in (
                ("rows", self.rows),
                ("pairs", self.pairs),
                ("faults", self.faults),
                ("rules", self.rules),
            )
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, int]]) -> Coverage:
        return cls(*(Counter(data[name]) for name in ("rows", "pairs", "faults", "rules")))


@contextmanager
def watch_moves(coverage: Coverage) -> Iterator[Coverage]:
    """Count every event that the production ledger offers to a checkpoint inside the block.

    Wraps the ledger's ``apply`` and ``absorb``; for one thread at a time.
    """
    module: Any = _ledger
    apply, absorb = module.apply, module.absorb

    def watched_apply(checkpoint: Checkpoint, event: Event) -> tuple[Checkpoint, Command | None]:
        coverage.move(checkpoint, event)
        moved: tuple[Checkpoint, Command | None] = apply(checkpoint, event)
        return moved

    def watched_absorb(
        checkpoint: Checkpoint, events: Sequence[Event], start: int = 0
    ) -> tuple[Checkpoint, int]:
        after, taken = absorb(checkpoint, events, start)
        for event in events[start : start + taken]:
            coverage.quiet(checkpoint.state, event)
        return after, taken

    module.apply, module.absorb = watched_apply, watched_absorb
    try:
        yield coverage
    finally:
        module.apply, module.absorb = apply, absorb


@contextmanager
def watch_rules(coverage: Coverage) -> Iterator[Coverage]:
    """Count every rule of recovery that decides about a checkpoint inside the block.

    Looks over the shoulder of ``recovery_rules.decide``; for one thread at a time.
    """
    module: Any = _rules
    rule_for = module.rule_for

    def watched(facts: Facts) -> Rule:
        rule: Rule = rule_for(facts)
        coverage.rules[rule.name] += 1
        return rule

    module.rule_for = watched
    try:
        yield coverage
    finally:
        module.rule_for = rule_for
