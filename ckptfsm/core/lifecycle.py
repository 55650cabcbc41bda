"""The life of a checkpoint, as one table.

A checkpoint is requested, each rank's writer takes its copy, and the shards become durable. The
directory is completed and published, and the tracker names it. Once a newer checkpoint is tracked,
it may be removed. Everything the library does to a checkpoint is a row of ``TABLE`` below; a move
without a row cannot happen.

    requested -> forked -> shards_written -> finalized -> tracked -> prunable -> pruned

``apply(checkpoint, event)`` is pure: it returns the new checkpoint and the command to run, or raises
``IllegalTransition`` and changes nothing. The command runs only after the transition is in the
journal. A move within a state is not journaled: a restart finds out again, or fails the attempt.

The rows are compiled to a ``transitions.Machine``, and that machine makes every journaled move. The
diagrams, the test matrix and the checkers are made from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, TypeVar

from transitions import Machine

from ckptfsm.core.errors import IllegalTransition
from ckptfsm.core.events import (
    Adopted,
    Cleaned,
    CleanUp,
    Command,
    CreateStaging,
    Event,
    Failed,
    Finalize,
    FinalizersRan,
    FoundPublished,
    Prune,
    Published,
    PublishedOnDisk,
    Quarantine,
    Removed,
    Reprieved,
    RunFinalizers,
    SaveRequested,
    ShardReported,
    Superseded,
    TrackerWritten,
    Withdrawn,
    WriterForked,
    WriterGone,
    WritersLost,
    WriteTracker,
)
from ckptfsm.core.parts import AttemptId, PartSpec

T = TypeVar("T")
Counted = WriterForked | ShardReported | FinalizersRan | WriterGone
"""Reports of which the table awaits one from every rank, or one for every shard."""
_COUNTED = (WriterForked, ShardReported, FinalizersRan, WriterGone)


class State(str, Enum):
    """The state of a checkpoint. ``ABSENT`` is the source of the rows that create one."""

    __hash__ = str.__hash__  # not in Python code: journals are full of states

    ABSENT = "absent"
    REQUESTED = "requested"
    FORKED = "forked"
    SHARDS_WRITTEN = "shards_written"
    FINALIZED = "finalized"
    TRACKED = "tracked"
    PRUNABLE = "prunable"
    PRUNED = "pruned"
    FAILED = "failed"
    DISCARDED = "discarded"
    QUARANTINED = "quarantined"


IN_FLIGHT = frozenset({State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN, State.FINALIZED})
UNPUBLISHED = IN_FLIGHT - {State.FINALIZED}  # can still fail, unless ``published``
UNFINISHED = IN_FLIGHT | {State.FAILED}  # work is left to do for these
ENDED = frozenset({State.PRUNED, State.DISCARDED, State.QUARANTINED})
FORGOTTEN = frozenset({State.PRUNED, State.DISCARDED})  # no files of these are left to look after


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An attempt at a checkpoint, frozen. ``shard_bytes`` is the size of its shards, in bytes.

    ``run_seconds``: how long the root was open until its request, over all runs.
    ``finalizers_ran`` are the ranks that have run their foreign finalizers. ``published``: the
    directory has its published name, which the journal may not record yet. A restart learns the name
    from disk. ``manifest_crc`` is the checksum of its published manifest, "" if that is not known.
    """

    id: AttemptId
    state: State
    parts: tuple[PartSpec, ...] = ()
    world_size: int = 1
    in_place: bool = False
    provenance: Literal["saved", "adopted"] = "saved"
    metrics: tuple[tuple[str, float], ...] = ()
    run_seconds: float = 0.0
    forked: frozenset[int] = frozenset()
    reported: frozenset[tuple[str, int]] = frozenset()
    finalizers_ran: frozenset[int] = frozenset()
    published: bool = False
    gone: frozenset[int] = frozenset()
    shard_bytes: int = 0
    manifest_crc: str = ""
    reason: str = ""
    detail: str = ""

    @property
    def why(self) -> str:
        """The reason of a failure or a withdrawal, with its detail, for display."""
        return self.reason + (f" ({self.detail})" if self.detail else "")

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def expected(self) -> frozenset[tuple[str, int]]:
        """Every (part, rank) that must be durable before the checkpoint may be finalized (I3)."""
        return _reports_of(self.parts, self.world_size)

    @property
    def writers(self) -> frozenset[int]:
        """The ranks that have a writer for this checkpoint."""
        return writers_of(self.parts, self.world_size)


@lru_cache(maxsize=64)
def _reports_of(parts: tuple[PartSpec, ...], world_size: int) -> frozenset[tuple[str, int]]:
    return frozenset(
        (part.name, rank)
        for part in parts
        for rank in (range(world_size) if part.ranks is None else part.ranks)
    )


@lru_cache(maxsize=64)
def writers_of(parts: tuple[PartSpec, ...], world_size: int) -> frozenset[int]:
    """The ranks that write one of the parts."""
    return frozenset(rank for _, rank in _reports_of(parts, world_size))


def has_finalizers(checkpoint: Checkpoint | _Tally) -> bool:
    """True if a part was written by foreign code; every rank runs its finalizers (I6)."""
    return any(part.format.foreign for part in checkpoint.parts)


# ---------------------------------------------------------------------------------------- guards


def others_are_awaited(checkpoint: Checkpoint, event: Counted) -> bool:
    """The report counts, and others of its kind are awaited (I3, I6)."""
    return _still_awaited(checkpoint, event) > 0


def it_was_the_last(checkpoint: Checkpoint, event: Counted) -> bool:
    """The report counts, and no other of its kind is awaited."""
    return _still_awaited(checkpoint, event) == 0


def every_shard_is_durable(checkpoint: Checkpoint, event: ShardReported) -> bool:
    """The last declared shard is durable, all parts of all ranks (I3), and no finalizers are due."""
    return it_was_the_last(checkpoint, event) and not has_finalizers(checkpoint)


def every_shard_is_durable_and_finalizers_are_due(
    checkpoint: Checkpoint, event: ShardReported
) -> bool:
    """The last declared shard is durable (I3); the ranks run their finalizers next (I6)."""
    return it_was_the_last(checkpoint, event) and has_finalizers(checkpoint)


def it_is_not_published(checkpoint: Checkpoint, event: Event) -> bool:
    """The directory has no published name yet. Once it has one, the attempt cannot fail (I1)."""
    return not checkpoint.published


def it_is_published(checkpoint: Checkpoint, event: Event) -> bool:
    """The directory has its published name, durably (I4)."""
    return checkpoint.published


def a_newer_one_is_tracked_and_nothing_keeps_it(checkpoint: Checkpoint, event: Superseded) -> bool:
    """Retention may take it: I7 leaves no other way to ``prunable``."""
    return event.newer_step is not None and event.newer_step > checkpoint.step and not event.kept_by


def every_writer_is_gone(checkpoint: Checkpoint, event: Cleaned) -> bool:
    """No writer of it can still write (I1)."""
    return checkpoint.gone == checkpoint.writers


def writers_may_live(checkpoint: Checkpoint, event: WritersLost) -> bool:
    """Not all writers were known to be gone yet."""
    return checkpoint.gone != checkpoint.writers


def the_attempt_is_new(checkpoint: Checkpoint, event: Event) -> bool:
    """Nothing is known of this attempt yet."""
    return checkpoint.id == event.of and not checkpoint.parts


def _still_awaited(so_far: Checkpoint | _Tally, event: Counted) -> int:
    """The number of reports of this kind that are awaited after this one; -1 if it does not count."""
    known: Set[object]
    awaited: Set[object]
    fact: object = event.rank
    match event:
        case WriterForked():
            known, awaited, fits = so_far.forked, so_far.writers, True
        case ShardReported():
            fact, fits = (event.part, event.rank), event.rank in so_far.forked
            known, awaited = so_far.reported, so_far.expected
        case FinalizersRan():
            fits = has_finalizers(so_far) and not so_far.published
            known, awaited = so_far.finalizers_ran, so_far.writers
        case WriterGone():
            known, awaited, fits = so_far.gone, so_far.writers, True
    if isinstance(event, (WriterForked, ShardReported)):
        fits = fits and event.world_size == so_far.world_size
    # A report counts once, so numbers tell whether it was the last: no set is rebuilt for one report,
    # which matters with thousands of ranks.
    return len(awaited) - len(known) - 1 if fits and fact in awaited and fact not in known else -1


Guard = Callable[[Checkpoint, Any], bool]


# ----------------------------------------------------------------------------------------- table


@dataclass(frozen=True, slots=True)
class Row:
    """A legal move."""

    source: State
    event: type[Event]
    guard: Guard | None
    dest: State
    command: type[Command] | None = None


S = State
TABLE: tuple[Row, ...] = (
    # The way of every good checkpoint.
    Row(S.ABSENT, SaveRequested, the_attempt_is_new, S.REQUESTED, CreateStaging),
    Row(S.REQUESTED, WriterForked, others_are_awaited, S.REQUESTED),
    Row(S.REQUESTED, WriterForked, it_was_the_last, S.FORKED),
    Row(S.REQUESTED, ShardReported, others_are_awaited, S.REQUESTED),
    Row(S.FORKED, ShardReported, others_are_awaited, S.FORKED),
    Row(S.FORKED, ShardReported, every_shard_is_durable, S.SHARDS_WRITTEN, Finalize),
    Row(S.SHARDS_WRITTEN, PublishedOnDisk, it_is_not_published, S.SHARDS_WRITTEN),
    Row(S.SHARDS_WRITTEN, Published, it_is_published, S.FINALIZED, WriteTracker),
    Row(S.FINALIZED, TrackerWritten, None, S.TRACKED),
    # A part that foreign code wrote: its finalizers run on every rank before it is published (I6).
    Row(
        S.FORKED,
        ShardReported,
        every_shard_is_durable_and_finalizers_are_due,
        S.SHARDS_WRITTEN,
        RunFinalizers,
    ),
    Row(S.SHARDS_WRITTEN, FinalizersRan, others_are_awaited, S.SHARDS_WRITTEN),
    Row(S.SHARDS_WRITTEN, FinalizersRan, it_was_the_last, S.SHARDS_WRITTEN, Finalize),
    # The end of a good checkpoint: only from tracked, only when a newer one is tracked (I1, I7).
    Row(S.TRACKED, Superseded, a_newer_one_is_tracked_and_nothing_keeps_it, S.PRUNABLE, Prune),
    Row(S.PRUNABLE, Reprieved, None, S.TRACKED),
    Row(S.PRUNABLE, Removed, None, S.PRUNED),
    # Failures before publishing.
    Row(S.REQUESTED, Failed, None, S.FAILED),
    Row(S.FORKED, Failed, None, S.FAILED),
    Row(S.SHARDS_WRITTEN, Failed, it_is_not_published, S.FAILED),
    Row(S.FAILED, WriterGone, others_are_awaited, S.FAILED),
    Row(S.FAILED, WriterGone, it_was_the_last, S.FAILED, CleanUp),
    Row(S.FAILED, WritersLost, writers_may_live, S.FAILED, CleanUp),
    Row(S.FAILED, Cleaned, every_writer_is_gone, S.DISCARDED),
    # Findings of a restart (I8).
    Row(S.REQUESTED, FoundPublished, None, S.FINALIZED, WriteTracker),
    Row(S.FORKED, FoundPublished, None, S.FINALIZED, WriteTracker),
    Row(S.SHARDS_WRITTEN, FoundPublished, None, S.FINALIZED, WriteTracker),
    Row(S.ABSENT, Adopted, the_attempt_is_new, S.TRACKED),
    # Withdrawals by a person or because of damage: moved aside, never deleted.
    Row(S.TRACKED, Withdrawn, None, S.QUARANTINED, Quarantine),
    Row(S.FINALIZED, Withdrawn, None, S.QUARANTINED, Quarantine),
    Row(S.PRUNABLE, Withdrawn, None, S.QUARANTINED, Quarantine),
)

EVENTS: tuple[type[Event], ...] = tuple(dict.fromkeys(row.event for row in TABLE))


# ----------------------------------------------------------------------------------------- moves


def _take(row: Row, data: Any) -> None:
    data.model.row = row


def _holds(guard: Guard, data: Any) -> bool:
    return guard(data.model.checkpoint, data.args[0])


@cache
def compile_machine() -> Machine:
    """The table as a ``transitions.Machine`` that has no model.

    ``auto_transitions=False``: the generated ``to_<state>()`` would bypass the table.
    """
    machine = Machine(
        model=None,
        states=list(State),
        initial=State.ABSENT,
        auto_transitions=False,
        send_event=True,
    )
    for row in TABLE:
        machine.add_transition(
            row.event.name,
            row.source,
            row.dest,
            conditions=partial(_holds, row.guard) if row.guard else None,
            after=partial(_take, row),
        )
    return machine


def find_row(checkpoint: Checkpoint, event: Event) -> Row | None:
    """The row that ``event`` takes from here, or None. The table read directly, for searches."""
    for row in TABLE:
        here = row.source is checkpoint.state and row.event is type(event)
        if here and (row.guard is None or row.guard(checkpoint, event)):
            return row
    return None


def absent(of: AttemptId) -> Checkpoint:
    """The checkpoint that is not there yet: the source of the creating rows."""
    return Checkpoint(of, State.ABSENT)


def apply(checkpoint: Checkpoint, event: Event) -> tuple[Checkpoint, Command | None]:
    """Move ``checkpoint`` by ``event``: the compiled machine makes the move.

    Returns the moved checkpoint and the command to run once the move is journaled (or None).
    Raises ``IllegalTransition`` if the table has no row for it; nothing changes then.
    """
    # The model of one move, dropped after it: an exception in a callback leaves a model moved.
    machine, cursor = compile_machine(), SimpleNamespace(state=checkpoint.state, row=None)
    cursor.checkpoint = checkpoint
    if event.of == checkpoint.id and event.name in machine.get_triggers(checkpoint.state):
        machine.events[event.name].trigger(cursor, event)
    return _moved(checkpoint, event, cursor.row)


def apply_row(checkpoint: Checkpoint, event: Event) -> tuple[Checkpoint, Command | None]:
    """The same as ``apply``, by the table alone: for searches over many states."""
    return _moved(checkpoint, event, find_row(checkpoint, event))


def absorb(
    checkpoint: Checkpoint, events: Sequence[Event], start: int = 0
) -> tuple[Checkpoint, int]:
    """Take reports from ``start`` on, as long as none changes the state or asks for a command.

    The same as ``apply`` for each of them, by the same rows, but the facts are copied once: the
    time grows with the number of reports, not with its square. Returns the number taken, too.
    """
    tally = _Tally(checkpoint)
    for at in range(start, len(events)):
        event = events[at]
        quiet = event.of == checkpoint.id and (checkpoint.state, type(event)) in _QUIET
        if not (quiet and isinstance(event, _COUNTED) and _still_awaited(tally, event) > 0):
            return tally.checkpoint(), at - start
        tally.add(event)
    return tally.checkpoint(), len(events) - start


class _Tally:
    """A checkpoint while ranks report.

    A set of facts is copied at the first report that adds to it. The sets of all ranks are looked up
    once: to find them by the parts costs as much as the rest of a report.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.parts, self.world_size = checkpoint.parts, checkpoint.world_size
        self.expected, self.writers = checkpoint.expected, checkpoint.writers
        self.published = checkpoint.published
        self.forked: Set[int] = checkpoint.forked
        self.reported: Set[tuple[str, int]] = checkpoint.reported
        self.finalizers_ran: Set[int] = checkpoint.finalizers_ran
        self.gone: Set[int] = checkpoint.gone
        self.shard_bytes = checkpoint.shard_bytes
        self._before = checkpoint

    def add(self, event: Counted) -> None:
        match event:
            case WriterForked():
                self.forked = _added(self.forked, event.rank)
            case ShardReported():
                self.reported = _added(self.reported, (event.part, event.rank))
                self.shard_bytes += event.shard_bytes
            case FinalizersRan():
                self.finalizers_ran = _added(self.finalizers_ran, event.rank)
            case WriterGone():
                self.gone = _added(self.gone, event.rank)

    def checkpoint(self) -> Checkpoint:
        return replace(
            self._before,
            forked=frozenset(self.forked),
            reported=frozenset(self.reported),
            finalizers_ran=frozenset(self.finalizers_ran),
            gone=frozenset(self.gone),
            shard_bytes=self.shard_bytes,
        )


def _added(known: Set[T], fact: T) -> set[T]:
    """``known`` with a fact added: in place, unless it is the set of a ``Checkpoint``."""
    facts = known if isinstance(known, set) else set(known)
    facts.add(fact)
    return facts


# The moves within a state that ask for nothing.
_QUIET: Mapping[tuple[State, type[Event]], Row] = MappingProxyType(
    {(row.source, row.event): row for row in TABLE if row.guard is others_are_awaited}
)


def _moved(
    checkpoint: Checkpoint, event: Event, row: Row | None
) -> tuple[Checkpoint, Command | None]:
    if event.of != checkpoint.id:
        raise IllegalTransition(
            f"{event.name} of {event.of} was posted to {checkpoint.id}", step=checkpoint.step
        )
    if row is None:
        raise IllegalTransition(
            f"no row for event {event.name} in state {checkpoint.state.value}",
            step=checkpoint.step,
            attempt=str(checkpoint.id),
            state=checkpoint.state.value,
            event=event.name,
        )
    command = row.command(checkpoint.id) if row.command else None
    return replace(_absorb(checkpoint, event), state=row.dest), command


def _absorb(checkpoint: Checkpoint, event: Event) -> Checkpoint:
    """The checkpoint with the facts of an event added; its state is unchanged."""
    match event:
        case SaveRequested():
            return replace(
                checkpoint,
                parts=event.parts,
                world_size=event.world_size,
                in_place=event.in_place,
                metrics=event.metrics,
                run_seconds=event.run_seconds,
            )
        case WriterForked() | ShardReported() | FinalizersRan() | WriterGone():
            tally = _Tally(checkpoint)
            tally.add(event)
            return tally.checkpoint()
        case PublishedOnDisk():
            return replace(checkpoint, published=True, manifest_crc=event.manifest_crc)
        case FoundPublished():
            return replace(checkpoint, manifest_crc=event.manifest_crc)
        case WritersLost():
            return replace(checkpoint, gone=checkpoint.writers)
        case Failed() | Withdrawn():
            return replace(checkpoint, reason=event.reason, detail=event.detail)
        case Adopted():
            return replace(
                checkpoint,
                provenance="adopted",
                run_seconds=event.run_seconds,
                metrics=event.metrics,
                manifest_crc=event.manifest_crc,
            )
        case _:
            return checkpoint
