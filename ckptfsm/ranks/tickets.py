"""The data that a controller and its workers exchange, besides events. No torch; can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.ranks.handle import SaveHandle


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A part that a group of workers writes. ``directory`` is the part's; by default its name."""

    group: str
    directory: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """The facts of an accepted save for a group's workers. Can be pickled.

    ``first_rank`` is the number of the group's rank 0 in the checkpoint, ``size`` the number of its
    ranks. ``published`` is the absolute directory that the checkpoint will have. ``alone`` is True
    if no other part has files in the checkpoint, so that a ``FileTree`` may lie at its top.
    """

    of: AttemptId
    root: str
    location: str
    published: str
    part: PartSpec
    first_rank: int
    size: int
    world_size: int
    timeout_s: float
    alone: bool = False

    @property
    def directory(self) -> str:
        """Absolute directory of the part, while it is being written."""
        base = f"{self.root}/{self.location}"
        return f"{base}/{self.part.directory}" if self.part.directory else base


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint that is being read: ``directory`` is absolute; no ``parts`` if it was adopted.

    ``of`` is the attempt in its manifest; None if there is no manifest.
    """

    step: int
    directory: str
    parts: tuple[PartSpec, ...]
    of: AttemptId | None = None


@dataclass(frozen=True, slots=True)
class GroupSave:
    """A begun save: its handle, and a ticket for each group's workers.

    There are no tickets if the save was skipped.
    """

    handle: SaveHandle
    tickets: Mapping[str, Ticket]
