"""All checkpoints of one root together: the pure core that the coordinator drives.

Frozen: every method returns a new ledger, or raises and changes nothing. The ledger decides all
questions about several checkpoints: one in flight per root, steps only grow, retention. Reports from
ranks that belong to no living attempt are rejected (I5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from ckptfsm.core.errors import IllegalTransition, SaveRefused, StepExistsError
from ckptfsm.core.events import (
    Command,
    Event,
    Failed,
    SaveRequested,
    ShardReported,
    Superseded,
    WriterForked,
)
from ckptfsm.core.lifecycle import (
    FORGOTTEN,
    IN_FLIGHT,
    UNPUBLISHED,
    Checkpoint,
    State,
    absent,
    absorb,
    apply,
)
from ckptfsm.core.parts import MAX_STEP, AttemptId, check_parts

_by_id = attrgetter("id.step", "id.epoch", "id.attempt")


class KnownCheckpoints(Mapping[AttemptId, Checkpoint]):
    """Checkpoints by attempt, oldest step first. Nobody changes them; ``changed`` makes others.

    The tracked ones are kept apart, oldest first, for there may be thousands: a move between two other
    states neither copies nor searches them.
    """

    __slots__ = ("_others", "_tracked")

    def __init__(self, found: Mapping[AttemptId, Checkpoint]) -> None:
        there = (item for item in found.items() if item[1].state is State.TRACKED)
        self._tracked = dict(sorted(there, key=_by_id_of_item))
        self._others = {of: c for of, c in found.items() if c.state is not State.TRACKED}

    def __getitem__(self, of: AttemptId) -> Checkpoint:
        found = self._others.get(of)
        return self._tracked[of] if found is None else found

    def __iter__(self) -> Iterator[AttemptId]:
        return iter(sorted(chain(self._tracked, self._others)))

    def __len__(self) -> int:
        return len(self._tracked) + len(self._others)

    def __repr__(self) -> str:
        return repr({**self._tracked, **self._others})

    def changed(self, of: AttemptId, after: Checkpoint | None) -> KnownCheckpoints:
        """The same with ``after`` as that of an attempt, or without the attempt."""
        made = KnownCheckpoints.__new__(KnownCheckpoints)
        made._tracked, made._others = self._tracked, _without(self._others, of)
        if after is None or after.state is not State.TRACKED:
            made._tracked = _without(self._tracked, of)
        if after is None:
            return made
        if after.state is not State.TRACKED:
            made._others = {**made._others, of: after}
            return made
        newest = next(reversed(self._tracked), None)
        made._tracked = {**self._tracked, of: after}
        if newest is not None and of < newest and of not in self._tracked:
            made._tracked = dict(sorted(made._tracked.items(), key=_by_id_of_item))
        return made

    def newest_first(self) -> Iterator[Checkpoint]:
        """The tracked ones."""
        return reversed(self._tracked.values())

    def in_state(self, states: Collection[State]) -> list[Checkpoint]:
        """Those in these states, oldest step first."""
        found = sorted((c for c in self._others.values() if c.state in states), key=_by_id)
        if State.TRACKED not in states:
            return found
        tracked = list(self._tracked.values())
        return sorted((*tracked, *found), key=_by_id) if found else tracked


def _by_id_of_item(item: tuple[AttemptId, Checkpoint]) -> tuple[int, int, int]:
    of = item[1].id
    return of.step, of.epoch, of.attempt


def _without(known: dict[AttemptId, Checkpoint], of: AttemptId) -> dict[AttemptId, Checkpoint]:
    """``known`` without an attempt: itself if it has no such attempt."""
    if of not in known:
        return known
    rest = known.copy()
    del rest[of]
    return rest


def _nothing() -> KnownCheckpoints:
    return KnownCheckpoints({})


@dataclass(frozen=True, slots=True)
class Transition:
    """A move of a checkpoint. ``checkpoint`` is the checkpoint after the move."""

    source: State
    event: Event
    dest: State
    checkpoint: Checkpoint

    @property
    def of(self) -> AttemptId:
        return self.event.of


@dataclass(frozen=True, slots=True)
class Rejected:
    """A report that does not count, and why (I5). ``wrong_world_size`` fails the attempt.

    ``late``: its attempt has gone on. Each report comes twice, by an agent and by a round.
    """

    event: Event
    why: str
    wrong_world_size: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """The checkpoints with files to look after, and the steps protected from pruning.

    ``pins`` are the steps pinned by a person or by adoption, ``readers`` the steps leased by a
    reader, ``held`` those of a job that holds them and is not done.
    """

    checkpoints: KnownCheckpoints = field(default_factory=_nothing)
    pins: frozenset[int] = frozenset()
    readers: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()

    # ------------------------------------------------------------------------------- questions

    def in_state(self, *states: State) -> list[Checkpoint]:
        """The checkpoints in these states, oldest step first."""
        return self.checkpoints.in_state(states)

    def latest(self) -> Checkpoint | None:
        """The newest tracked checkpoint: the one the tracker names."""
        return next(self.checkpoints.newest_first(), None)

    def latest_step(self) -> int | None:
        latest = self.latest()
        return latest.step if latest is not None else None

    def in_flight(self) -> Checkpoint | None:
        """The one checkpoint between ``requested`` and ``tracked``, or None."""
        found = self.in_state(*IN_FLIGHT)
        return found[0] if found else None

    def at(self, step: int) -> Checkpoint | None:
        """The tracked checkpoint of ``step``."""
        return next((c for c in self.in_state(State.TRACKED) if c.step == step), None)

    def superseded(self, checkpoint: Checkpoint, preserved: Collection[int]) -> Superseded:
        """The event that offers ``checkpoint`` for pruning, with everything that keeps it (I7).

        ``preserved`` are the steps that retention keeps.
        """
        latest = self.latest()
        return self._offer(checkpoint, latest.step if latest is not None else -1, preserved)

    def to_prune(self, preserved: Collection[int]) -> list[Superseded]:
        """The pruning events of all tracked checkpoints that nothing keeps, oldest first."""
        offers = self.offers(preserved)
        return [offer for offer in offers if offer.newer_step is not None and not offer.kept_by]

    def offers(self, preserved: Collection[int]) -> list[Superseded]:
        """The event ``superseded`` of each tracked checkpoint not ``preserved``, oldest first."""
        tracked = self.in_state(State.TRACKED)
        offered = [c for c in tracked if c.id.step not in preserved]  # few of thousands
        return [self._offer(c, tracked[-1].step, preserved) for c in offered]

    def _offer(self, checkpoint: Checkpoint, latest: int, preserved: Collection[int]) -> Superseded:
        step = checkpoint.step
        reasons = {
            "latest": latest <= step,
            "pin": step in self.pins,
            "reader": step in self.readers,
            "job": step in self.held,
            "retention": step in preserved,
        }
        kept_by = tuple(name for name, holds in reasons.items() if holds)
        return Superseded(checkpoint.id, latest if latest > step else None, kept_by)

    # ----------------------------------------------------------------------------------- moves

    def post(self, event: Event) -> tuple[Ledger, Transition, Command | None]:
        """Apply an event of the coordinator. Raises ``IllegalTransition`` if the table has no row."""
        before = self.checkpoints.get(event.of)
        if before is None:
            before = absent(event.of)
        after, command = apply(before, event)
        moved = Transition(before.state, event, after.state, after)
        left = None if after.state in FORGOTTEN else after
        return self._with(event.of, left), moved, command

    def _with(self, of: AttemptId, after: Checkpoint | None) -> Ledger:
        return replace(self, checkpoints=self.checkpoints.changed(of, after))

    def refuse(self, event: SaveRequested) -> None:
        """Raise unless the save may begin: the step grows, nothing is in flight, parts fit."""
        step = event.of.step
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise SaveRefused(f"step must be a whole number from 0 to {MAX_STEP}", step=step)
        busy = self.in_flight()
        if busy is not None:
            raise SaveRefused(
                f"step {busy.step} is still in flight ({busy.state.value})",
                step=step,
                in_flight=busy.step,
            )
        latest = self.latest()
        if latest is not None and step <= latest.step:
            raise StepExistsError(
                f"step {step} is not after the latest saved step {latest.step}; to go back, "
                "use rollback()",
                step=step,
                latest=latest.step,
            )
        check_parts(event.parts, event.world_size)

    def report(self, event: Event) -> tuple[Ledger, Transition, Command | None] | Rejected:
        """Apply a report from a rank, or reject it if it fits no living attempt (I5)."""
        living = self.checkpoints.get(event.of)
        if living is None:
            return Rejected(event, f"no living attempt {event.of}")
        if isinstance(event, (WriterForked, ShardReported)) and (
            event.world_size != living.world_size
        ):
            why = (
                f"rank {event.rank} reports a world size of {event.world_size}, the request had "
                f"{living.world_size}"
            )
            return Rejected(event, why, wrong_world_size=_can_fail(living))
        try:
            return self.post(event)
        except IllegalTransition:
            published = ", published" if living.published else ""
            why = f"{event.name} does not fit {living.state.value}{published}"
            return Rejected(event, why, late=_is_late(event, living.state))

    def absorb(self, events: Sequence[Event], start: int = 0) -> tuple[Ledger, int]:
        """Take the reports from ``start`` on that move no checkpoint to another state.

        Stops before the first report of another attempt, or that does more or does not count.
        Returns the number taken, too.
        """
        living = self.checkpoints.get(events[start].of)
        if living is None:
            return self, 0
        after, taken = absorb(living, events, start)
        if not taken:
            return self, 0
        return self._with(living.id, after), taken

    def measured(self, of: AttemptId, metrics: Mapping[str, float]) -> Ledger:
        """The same ledger with metrics that came after the save, see ``with_metrics``."""
        return self._with(of, with_metrics(of, self.checkpoints.get(of), metrics))

    def protected(
        self, pins: Collection[int], readers: Collection[int], held: Collection[int] = ()
    ) -> Ledger:
        """The same ledger with pins, leases and unfinished jobs as they were just read from disk."""
        return replace(self, pins=frozenset(pins), readers=frozenset(readers), held=frozenset(held))


def with_metrics(
    of: AttemptId, known: Checkpoint | None, metrics: Mapping[str, float]
) -> Checkpoint:
    """A checkpoint with metrics that came after its save. Those of the same name are replaced.

    Raises ``IllegalTransition`` unless the checkpoint is tracked.
    """
    if known is None or known.state is not State.TRACKED:
        state = known.state.value if known is not None else State.ABSENT.value
        raise IllegalTransition(
            f"metrics of {of}, which is {state}", step=of.step, attempt=str(of), state=state
        )
    return replace(known, metrics=tuple(sorted({**dict(known.metrics), **metrics}.items())))


def _is_late(event: Event, state: State) -> bool:
    """True for a report that an attempt in ``state`` may have taken before."""
    progress = isinstance(event, (WriterForked, ShardReported))
    return progress or (isinstance(event, Failed) and state is State.FAILED)


def _can_fail(checkpoint: Checkpoint) -> bool:
    return checkpoint.state in UNPUBLISHED and not checkpoint.published
