"""Decides whether the disk can hold a save, before a writer starts. Pure.

Retention alone says which checkpoints may go, never the want of space. They go only if that lets the
save begin, and if this run knows the newest one to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice

_RECENT = 3


class Admission(Enum):
    """The decision about a save that is to begin."""

    ADMIT = "the disk can hold it"
    PRUNE_FIRST = (
        "the disk can hold it once the checkpoints that retention no longer keeps are gone"
    )
    REFUSE = "the disk cannot hold it"


@dataclass(frozen=True, slots=True)
class Space:
    """The facts that decide, in bytes. ``to_prune``: of the tracked checkpoints that nothing keeps.

    ``held``: of those that nothing keeps but jobs which are not done; it decides nothing.
    ``proven``: this run wrote the newest tracked one, or verified its digests.
    """

    needed: int
    free: int
    to_prune: int
    proven: bool
    held: int = 0


def predict_bytes(expected: int, earlier: Iterable[int]) -> int:
    """The size of a save that its ranks expect to have ``expected`` bytes, as far as they know.

    ``earlier`` are the sizes of the tracked checkpoints with the same parts, newest first.
    """
    largest = max(islice(earlier, _RECENT), default=0)
    return max(expected, largest + largest // 20)  # a twentieth for metadata and growth


def decide_admission(space: Space) -> Admission:
    """Decide whether a save may begin."""
    if space.free >= space.needed:
        return Admission.ADMIT
    enough = space.to_prune > 0 and space.free + space.to_prune >= space.needed
    return Admission.PRUNE_FIRST if enough and space.proven else Admission.REFUSE


def why_refused(space: Space) -> str:
    """The reason of a refusal, in words, with what jobs hold."""
    said = f"the checkpoint needs about {space.needed} bytes, {space.free} are free"
    if not space.held:
        return said
    return f"{said}; jobs that are not done hold steps of {space.held} bytes: see ckptfsm doctor"
