"""The life of a checkpoint, as one table.

A checkpoint is requested, its ranks' writers take an immutable copy, and the shards become durable.
The directory is completed and published, and the tracker names it. Later, a newer checkpoint makes
it removable. Everything the library does to a checkpoint is a row of ``TABLE`` below; a move
without a row cannot happen. Read the rows from top to bottom and you have read the product.

    requested -> forked -> shards_written -> finalized -> tracked -> prunable -> pruned

Rules of this module:

- ``apply(checkpoint, event)`` is pure: it returns the new checkpoint and the command to run, or
  raises ``IllegalTransition`` and changes nothing.
- A row is (source, event, guard, dest, command). For one (source, event) at most one guard is true;
  no guard true means the event is illegal there. Guards are named functions of (checkpoint, event).
- The rows are compiled to a ``transitions.Machine``, and that machine makes every move. The
  diagrams, the test matrix and the checkers are made from the same rows.
- ``absorb`` is ``apply`` for many reports that stay within a state: thousands of ranks report.
- A command runs only after the transition that asks for it is in the journal. A move within a state
  is not journaled: its command is asked for again after a restart.

Why a throwaway cursor: ``transitions`` sets attributes on its model, and an exception in a callback
leaves the model moved. The cursor lives for one move, carries no callbacks, and is then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from types import MappingProxyType
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


class State(str, Enum):
    """The state of a checkpoint. ``ABSENT`` is the source of the rows that create one."""

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
UNPUBLISHED = IN_FLIGHT - {State.FINALIZED}  # can still fail
UNFINISHED = IN_FLIGHT | {State.FAILED}  # work is left to do for these
ENDED = frozenset({State.PRUNED, State.DISCARDED, State.QUARANTINED})
FORGOTTEN = frozenset({State.PRUNED, State.DISCARDED})  # no files of these are left to look after


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An attempt at a checkpoint, frozen. ``shard_bytes`` is the size of its shards, in bytes.

    ``run_seconds`` is the training time accumulated at its request, over all restarts.
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
        """The reason of a failure or a withdrawal, with its detail, for people."""
        return self.reason + (f" ({self.detail})" if self.detail else "")

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def expected(self) -> frozenset[tuple[str, int]]:
        """See ``expected_reports``."""
        return _reports_of(self.parts, self.world_size)

    @property
    def writers(self) -> frozenset[int]:
        """See ``writing_ranks``."""
        return _writers_of(self.parts, self.world_size)


@lru_cache(maxsize=64)
def _reports_of(parts: tuple[PartSpec, ...], world_size: int) -> frozenset[tuple[str, int]]:
    return frozenset(
        (part.name, rank)
        for part in parts
        for rank in (range(world_size) if part.ranks is None else part.ranks)
    )


@lru_cache(maxsize=64)
def _writers_of(parts: tuple[PartSpec, ...], world_size: int) -> frozenset[int]:
    return frozenset(rank for _, rank in _reports_of(parts, world_size))


def expected_reports(checkpoint: Checkpoint) -> frozenset[tuple[str, int]]:
    """Every (part, rank) that must be durable before the checkpoint may be finalized (I3)."""
    return checkpoint.expected


def writing_ranks(checkpoint: Checkpoint) -> frozenset[int]:
    """The ranks that have a writer for this checkpoint."""
    return checkpoint.writers


def has_finalizers(checkpoint: Checkpoint) -> bool:
    """True if a part was written by foreign code; every rank runs its finalizers (I6)."""
    return any(part.format.foreign for part in checkpoint.parts)


# ---------------------------------------------------------------------------------------- guards


def another_writer_is_awaited(checkpoint: Checkpoint, event: WriterForked) -> bool:
    """A declared rank that had not forked has; others have not."""
    return _is_news_of_a_fork(checkpoint, event) and not _forks_complete(checkpoint)


def every_writer_has_forked(checkpoint: Checkpoint, event: WriterForked) -> bool:
    """The last declared rank has forked."""
    return _is_news_of_a_fork(checkpoint, event) and _forks_complete(checkpoint)


def another_shard_is_awaited(checkpoint: Checkpoint, event: ShardReported) -> bool:
    """A declared shard that had not been reported is durable; others are not (I3)."""
    return _is_news_of_a_shard(checkpoint, event) and not _shards_complete(checkpoint)


def every_shard_is_durable(checkpoint: Checkpoint, event: ShardReported) -> bool:
    """The last declared shard is durable, all parts of all ranks (I3), and no finalizers are due."""
    return _is_last_shard(checkpoint, event) and not has_finalizers(checkpoint)


def every_shard_is_durable_and_finalizers_are_due(
    checkpoint: Checkpoint, event: ShardReported
) -> bool:
    """The last declared shard is durable (I3); the ranks run their finalizers next (I6)."""
    return _is_last_shard(checkpoint, event) and has_finalizers(checkpoint)


def another_ranks_finalizers_are_awaited(checkpoint: Checkpoint, event: FinalizersRan) -> bool:
    """A rank's finalizers have run, for the first time; those of other ranks have not (I6)."""
    return _is_news_of_finalizers(checkpoint, event) and not _finalizers_complete(checkpoint)


def every_ranks_finalizers_have_run(checkpoint: Checkpoint, event: FinalizersRan) -> bool:
    """The finalizers of the last rank have run (I6)."""
    return _is_news_of_finalizers(checkpoint, event) and _finalizers_complete(checkpoint)


def it_is_not_published(checkpoint: Checkpoint, event: Event) -> bool:
    """The directory has no published name yet. Once it has one, the attempt cannot fail (I1)."""
    return not checkpoint.published


def it_is_published(checkpoint: Checkpoint, event: Event) -> bool:
    """The directory has its published name, durably (I4)."""
    return checkpoint.published


def a_newer_one_is_tracked_and_nothing_keeps_it(checkpoint: Checkpoint, event: Superseded) -> bool:
    """Retention may take it: I7 leaves no other way to ``prunable``."""
    return event.newer_step is not None and event.newer_step > checkpoint.step and not event.kept_by


def never_published_and_writers_gone(checkpoint: Checkpoint, event: Cleaned) -> bool:
    """Nothing of it has its published name, and no writer of it can still write (I1)."""
    return not event.published and checkpoint.gone == writing_ranks(checkpoint)


def another_writer_may_live(checkpoint: Checkpoint, event: WriterGone) -> bool:
    """A writer that was not known to be gone is; others may still write."""
    return _is_news_of_an_end(checkpoint, event) and not _all_gone(checkpoint)


def every_writer_is_gone(checkpoint: Checkpoint, event: WriterGone) -> bool:
    """The last writer is gone: the files can be moved without a late write into them."""
    return _is_news_of_an_end(checkpoint, event) and _all_gone(checkpoint)


def writers_may_live(checkpoint: Checkpoint, event: WritersLost) -> bool:
    """Not all writers were known to be gone yet."""
    return checkpoint.gone != writing_ranks(checkpoint)


def the_attempt_is_new(checkpoint: Checkpoint, event: Event) -> bool:
    """The cursor stands for no checkpoint yet, of exactly this attempt."""
    return checkpoint.id == event.of and not checkpoint.parts


# A report counts once, so counting tells whether the last one came: no sets are rebuilt per report,
# which matters with thousands of ranks.


def _is_news_of_a_fork(checkpoint: Checkpoint, event: WriterForked) -> bool:
    awaited = event.rank in writing_ranks(checkpoint) and event.rank not in checkpoint.forked
    return awaited and event.world_size == checkpoint.world_size


def _forks_complete(checkpoint: Checkpoint) -> bool:
    return len(checkpoint.forked) + 1 == len(writing_ranks(checkpoint))


def _is_news_of_a_shard(checkpoint: Checkpoint, event: ShardReported) -> bool:
    key = (event.part, event.rank)
    awaited = key in expected_reports(checkpoint) and key not in checkpoint.reported
    return awaited and event.rank in checkpoint.forked and event.world_size == checkpoint.world_size


def _shards_complete(checkpoint: Checkpoint) -> bool:
    return len(checkpoint.reported) + 1 == len(expected_reports(checkpoint))


def _is_last_shard(checkpoint: Checkpoint, event: ShardReported) -> bool:
    return _is_news_of_a_shard(checkpoint, event) and _shards_complete(checkpoint)


def _is_news_of_finalizers(checkpoint: Checkpoint, event: FinalizersRan) -> bool:
    awaited = has_finalizers(checkpoint) and not checkpoint.published
    known = event.rank in checkpoint.finalizers_ran
    return awaited and event.rank in writing_ranks(checkpoint) and not known


def _finalizers_complete(checkpoint: Checkpoint) -> bool:
    return len(checkpoint.finalizers_ran) + 1 == len(writing_ranks(checkpoint))


def _is_news_of_an_end(checkpoint: Checkpoint, event: WriterGone) -> bool:
    return event.rank in writing_ranks(checkpoint) and event.rank not in checkpoint.gone


def _all_gone(checkpoint: Checkpoint) -> bool:
    return len(checkpoint.gone) + 1 == len(writing_ranks(checkpoint))


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
    Row(S.REQUESTED, WriterForked, another_writer_is_awaited, S.REQUESTED),
    Row(S.REQUESTED, WriterForked, every_writer_has_forked, S.FORKED),
    Row(S.REQUESTED, ShardReported, another_shard_is_awaited, S.REQUESTED),
    Row(S.FORKED, ShardReported, another_shard_is_awaited, S.FORKED),
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
    Row(S.SHARDS_WRITTEN, FinalizersRan, another_ranks_finalizers_are_awaited, S.SHARDS_WRITTEN),
    Row(
        S.SHARDS_WRITTEN,
        FinalizersRan,
        every_ranks_finalizers_have_run,
        S.SHARDS_WRITTEN,
        Finalize,
    ),
    # The end of a good checkpoint: only from tracked, only when a newer one is tracked (I1, I7).
    Row(S.TRACKED, Superseded, a_newer_one_is_tracked_and_nothing_keeps_it, S.PRUNABLE, Prune),
    Row(S.PRUNABLE, Reprieved, None, S.TRACKED),
    Row(S.PRUNABLE, Removed, None, S.PRUNED),
    # Failures before publishing.
    Row(S.REQUESTED, Failed, None, S.FAILED),
    Row(S.FORKED, Failed, None, S.FAILED),
    Row(S.SHARDS_WRITTEN, Failed, it_is_not_published, S.FAILED),
    Row(S.FAILED, WriterGone, another_writer_may_live, S.FAILED),
    Row(S.FAILED, WriterGone, every_writer_is_gone, S.FAILED, CleanUp),
    Row(S.FAILED, WritersLost, writers_may_live, S.FAILED, CleanUp),
    Row(S.FAILED, Cleaned, never_published_and_writers_gone, S.DISCARDED),
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


class _Cursor:
    """The model of one move: never registered with the machine, dropped after it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.state: State | str = checkpoint.state
        self.row: Row | None = None


class _TakeRow:
    """A callback of ``transitions``: note which row the machine took."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __call__(self, data: Any) -> None:
        data.model.row = self.row


class _RowCondition:
    """A row's guard in the shape ``transitions`` calls: (event data) -> bool."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.__name__ = guard.__name__

    def __call__(self, data: Any) -> bool:
        return self.guard(data.model.checkpoint, data.args[0])


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
            conditions=[_RowCondition(row.guard)] if row.guard else None,
            after=_TakeRow(row),
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
    machine, cursor = compile_machine(), _Cursor(checkpoint)
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
    tally: Any = _Tally(checkpoint)  # the guards take it for a checkpoint
    for at in range(start, len(events)):
        event = events[at]
        row = _QUIET.get((checkpoint.state, type(event)))
        if row is None or event.of != checkpoint.id:
            return tally.checkpoint(), at - start
        if row.guard is not None and not row.guard(tally, event):
            return tally.checkpoint(), at - start
        tally.add(event)
    return tally.checkpoint(), len(events) - start


class _Tally:
    """A checkpoint while ranks report: the guards read it as they read a ``Checkpoint``.

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

    def add(self, event: Event) -> None:
        """Add the facts of a report."""
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


_REPORTS = (WriterForked, ShardReported, FinalizersRan, WriterGone)
_QUIET: Mapping[tuple[State, type[Event]], Row] = MappingProxyType(
    {
        (row.source, row.event): row
        for row in TABLE
        if row.event in _REPORTS and row.source is row.dest and row.command is None
    }
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
            return replace(checkpoint, gone=writing_ranks(checkpoint))
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
