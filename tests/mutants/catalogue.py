"""All planted bugs in one tuple."""

from __future__ import annotations

from mutants import (
    admission,
    composites,
    core,
    dropins,
    durability,
    engine,
    evaluators,
    jobs,
    preemption,
    protocol,
    ranks,
    reading,
)
from mutants.loader import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *core.MUTANTS,
    *durability.MUTANTS,
    *protocol.MUTANTS,
    *ranks.MUTANTS,
    *composites.MUTANTS,
    *dropins.MUTANTS,
    *engine.MUTANTS,
    *admission.MUTANTS,
    *preemption.MUTANTS,
    *reading.MUTANTS,
    *evaluators.MUTANTS,
    *jobs.MUTANTS,
)


def by_name(name: str) -> Mutant:
    """The mutant of that name. Raises ``KeyError``."""
    return {planted.name: planted for planted in MUTANTS}[name]
