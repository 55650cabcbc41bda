"""What the driver of torch states asks of a format: how states are saved in it, and loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.formats import Format
from ckptfsm.core.images import Literal, image_of
from ckptfsm.core.layout import PLANNED, join, planned_name
from ckptfsm.core.parts import PartSpec, Planned
from ckptfsm.core.ports import Finalizer, PartJob, Storage
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.dcp.fast_load import Filled, Target
from ckptfsm.dcp.gate import GatedMemory
from ckptfsm.dcp.images import Bucket, Held, Row, shards_of
from ckptfsm.writers.image import ImagePart


class DriverOptions(NamedTuple):
    """What a manager gives to the driver that it is to have.

    - ``rank``, ``ranks``: of the ranks that save together. ``files``: of a rank, for each part.
    - ``copies`` are those of an accelerator's state, for a writer that is not forked.
    - ``promise`` tells the memory that such a writer may read after ``save``.
    - ``common_state``: the setting of that name.
    """

    rank: int
    files: int = 1
    ranks: int = 1
    copies: DeviceCopies | None = None
    promise: GatedMemory | None = None
    common_state: str = "file"


class Staging(NamedTuple):
    """A part whose data are to be brought to the writer's memory.

    ``location`` is the step's absolute directory. ``buckets`` are those of the plan. ``before`` are the
    jobs of the parts before this one.
    """

    spec: PartSpec
    rank: int
    location: str
    planned: Planned
    buckets: Sequence[Bucket]
    templates: Templates
    held: Held
    before: Sequence[PartJob]


class PartPlan(Protocol):
    """A part as one rank planned it. It refers to the trainer's data.

    ``summary`` goes to rank 0; None if rank 0 needs nothing. ``in_place``: the trainer chose the path.
    """

    @property
    def summary(self) -> Any: ...

    @property
    def expected_bytes(self) -> int: ...

    @property
    def in_place(self) -> bool: ...

    def digests(self) -> Mapping[str, int]:
        """The values of which a checkpoint keeps one for all ranks, by key."""

    def buckets(self, rank: int, planned: Planned) -> Sequence[Bucket]:
        """The items that this rank writes, each with its data, in the files that they go to."""

    def stage(self, staging: Staging) -> PartJob:
        """Bring the data to memory that the writer gets."""

    def let_go(self) -> None:
        """Drop all references to the trainer's data."""

    def finalizers(self) -> list[Finalizer]:
        """See ``ports.Draft``."""


class Surveyed(NamedTuple):
    """What one rank found of a part that it wants to load, see ``ports.Survey``.

    ``wanted`` is what ``StateFormat.check`` takes.
    """

    missing: set[str]
    wanted: Any
    stored: frozenset[str]


class SavedFormat(Protocol):
    """How values of one format are saved."""

    @property
    def format(self) -> Format: ...

    def takes(self, value: Any) -> bool:
        """True for a value that is saved in this format."""

    def directory(self, value: Any, usual: str) -> str:
        """The part's directory, relative to the step's."""

    def plan(self, part: str, value: Any) -> PartPlan:
        """Plan the save of a value (local). Raises ``SaveRefused``."""


class StateFormat(SavedFormat, Protocol):
    """How states of one format are saved and loaded.

    ``summary`` is the type of the summaries of its plans.
    """

    @property
    def summary(self) -> type: ...

    def merge(self, part: str, summaries: Mapping[int, Any]) -> Planned:
        """At rank 0: what follows from the summaries of these ranks. Raises ``SaveRefused``."""

    def survey(self, part: str, state: Any, directory: str, droppable: Collection[str]) -> Surveyed:
        """Compare a state with what is stored (local). Raises ``RestoreFailed``."""

    def check(self, part: str, wanted: Sequence[Any], drop: Collection[str]) -> set[str]:
        """At rank 0: the keys that the ranks ask for. Raises ``RestoreFailed`` if these do not fit."""

    def targets(
        self,
        storage: Storage,
        location: str,
        directory: str,
        state: Any,
        entries: Mapping[str, FileEntry],
    ) -> Mapping[FileEntry, Sequence[Target]]:
        """The tensors that lie in the files exactly as this rank wants them, by file."""

    def load(
        self, part: str, state: Any, directory: str, drop: set[str], full: Collection[Filled]
    ) -> Any:
        """Load a part, but for the tensors in ``full``, and return it (collective)."""


class Beside(NamedTuple):
    """A file that the first rank of a part writes beside its shards, with the rows of its items."""

    name: str
    content: bytes
    rows: Sequence[Row] = ()


def stage_images(staging: Staging, beside: Sequence[Beside] = ()) -> ImagePart:
    """The share of a rank in a ``planned`` part: its shards. The first rank's has what is ``beside``."""
    spec, rank, held = staging.spec, staging.rank, staging.held
    staging.templates.look()
    images, rows = shards_of(rank, spec.directory, staging.buckets, staging.templates, held)
    made: tuple[str, ...] = ()
    if rank == spec.first_rank:
        for each in beside:
            images.append(image_of(join(spec.directory, each.name), [Literal(each.content)]))
            rows += each.rows
        images.append(image_of(planned_name(spec.name), [Literal(staging.planned.metadata)]))
        made = (PLANNED,)
    return ImagePart(
        spec.name,
        spec.directory,
        tuple(images),
        tuple(rows),
        made,
        owner=tuple(held.copies),
        copying=held.device,
    )
