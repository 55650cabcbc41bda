"""All planted bugs, in the order of their files. A bug of a ``.txt`` beside this module is written so:

    == rollback-without-intent: I8, order
    a crash in the middle undoes the rollback, or half of it
    @ coordinator.coordinator:Coordinator.rollback
    - self._applier.append(RollbackStarted(to_step=step, at=self._clock.wall()))
    + pass

That is its name, what it breaks and its source; its consequence, where the name does not tell it; and
one edit or several: the function, the old code, and the new code, if any. ``loader.Mutant`` says more.
"""

from __future__ import annotations

from pathlib import Path

from mutants.loader import Mutant, read

_FILES = (
    *("core", "durability", "protocol", "ranks", "composites", "dropins"),
    *("engine", "admission", "preemption", "reading", "states", "evaluators", "jobs"),
    "places",
)

MUTANTS: tuple[Mutant, ...] = tuple(
    planted for name in _FILES for planted in read(Path(__file__).with_name(f"{name}.txt"))
)


def by_name(name: str) -> Mutant:
    """The mutant of that name. Raises ``KeyError``."""
    return {planted.name: planted for planted in MUTANTS}[name]
