"""What a run exercised: rows of the table, state x event, and faults by the state they struck in.

Rules: only counts; adding two of them is what running both would have counted. ``watch_moves`` looks
on while the production ledger moves checkpoints; it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.core import ledger as _ledger
from ckptfsm.core.events import Command, Event
from ckptfsm.core.lifecycle import EVENTS, TABLE, Checkpoint, Row, State, find_row


def row_key(row: Row) -> str:
    """A row of the table as text: ``source event[guard] -> dest``."""
    guard = f"[{row.guard.__name__}]" if row.guard is not None else ""
    return f"{row.source.value} {row.event.name}{guard} -> {row.dest.value}"


def pair_key(state: State, event: type[Event]) -> str:
    """A state and an event that was offered in it, legal or not."""
    return f"{state.value} x {event.name}"


ALL_ROWS = tuple(row_key(row) for row in TABLE)
ALL_PAIRS = tuple(pair_key(state, event) for state in State for event in EVENTS)


@dataclass
class Coverage:
    """How often each was exercised. ``faults`` counts ``F5 x forked``: fault and state it struck."""

    rows: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def move(self, checkpoint: Checkpoint, event: Event) -> None:
        """``event`` was offered to ``checkpoint``, whatever became of it."""
        self.pairs[pair_key(checkpoint.state, type(event))] += 1
        row = find_row(checkpoint, event) if event.of == checkpoint.id else None
        if row is not None:
            self.rows[row_key(row)] += 1

    def fault(self, number: str, state: State | None) -> None:
        """Fault ``number`` (``F5``) struck while a checkpoint was in ``state`` (None: no matter)."""
        self.faults[f"{number} x {state.value if state is not None else 'any'}"] += 1

    def add(self, other: Coverage) -> None:
        self.rows += other.rows
        self.pairs += other.pairs
        self.faults += other.faults

    def as_json(self) -> dict[str, dict[str, int]]:
        return {
            name: dict(sorted(counter.items()))
            for name, counter in (
                ("rows", self.rows),
                ("pairs", self.pairs),
                ("faults", self.faults),
            )
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, int]]) -> Coverage:
        return cls(*(Counter(data[name]) for name in ("rows", "pairs", "faults")))


@contextmanager
def watch_moves(coverage: Coverage) -> Iterator[Coverage]:
    """Count every event that the production ledger offers to a checkpoint inside the block.

    Looks over the ledger's shoulder at ``apply`` and ``find_row``; for one thread at a time.
    """
    module: Any = _ledger
    apply, find = module.apply, module.find_row

    def watched_apply(checkpoint: Checkpoint, event: Event) -> tuple[Checkpoint, Command | None]:
        coverage.move(checkpoint, event)
        moved: tuple[Checkpoint, Command | None] = apply(checkpoint, event)
        return moved

    def watched_find(checkpoint: Checkpoint, event: Event) -> Row | None:
        row: Row | None = find(checkpoint, event)
        if row is None:
            coverage.move(checkpoint, event)
        return row

    module.apply, module.find_row = watched_apply, watched_find
    try:
        yield coverage
    finally:
        module.apply, module.find_row = apply, find
