"""Workers' answers on their way to a controller, and the judge of those that it hands on.

Rules: ``Mail`` loses answers, delivers them twice, and brings those of long ago: of attempts that have
failed or are tracked meanwhile, or of an earlier run. ``HandedOn`` stands where the controller's
transport is, behind its filter and before the coordinator's ledger, which would reject the same again;
it shares no code with either.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.events import Event, Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.lifecycle import IN_FLIGHT, UNFINISHED, State
from ckptfsm.core.parts import AttemptId
from proof.sim.site import Site

TWICE = "answers twice"
OF_FAILED = "answers of failed attempts"
OF_TRACKED = "answers of tracked attempts"
OF_EARLIER_RUNS = "answers of earlier runs"
REPLAYED = (TWICE, OF_FAILED, OF_TRACKED, OF_EARLIER_RUNS)
"""The answers counted while an attempt is in flight that the answer could be taken for."""

_LOST = 0.1
_TWICE = 0.3


class Mail:
    """Delivers answers of workers; ``kept`` are all that were ever made, also in earlier runs."""

    def __init__(self, site: Site, kept: list[bytes]) -> None:
        self.handed_on = HandedOn()
        self._site = site
        self._kept = kept
        self._states: dict[AttemptId, State] = {}

    def note(self, record: TransitionRecord) -> None:
        """The controller was told of this."""
        self._states[record.of] = record.dest
        self.handed_on.note(record)

    def deliver(self, answer: Sequence[Event]) -> list[Event]:
        """The answers that arrive of a worker: F11."""
        site, earlier = self._site, self._earlier()
        self.handed_on.said(answer)
        self._keep(answer)
        arrived = [] if site.chance(site.stale * _LOST) else list(answer)
        if arrived and site.chance(site.stale * _TWICE):
            self._count(arrived)
            arrived += pickle.loads(pickle.dumps(arrived))
        return [*earlier, *arrived] if site.chance(0.5) else [*arrived, *earlier]

    def _keep(self, answer: Sequence[Event]) -> None:
        packed = pickle.dumps(list(answer))
        if answer and packed not in self._kept:
            self._kept.append(packed)

    def _earlier(self) -> list[Event]:
        """Sometimes an answer that was lost or heard before, of any worker."""
        site = self._site
        if not self._kept or not site.chance(site.stale):
            return []
        packed = self._kept[site.world.random.randrange(len(self._kept))]
        answer: list[Event] = pickle.loads(packed)
        self._count(answer)
        return answer

    def _count(self, answer: Iterable[Event]) -> None:
        """Count what could be mistaken: nothing can where no attempt waits for its reports."""
        if not any(state in IN_FLIGHT for state in self._states.values()):
            return
        self._site.count("F11")
        of_attempts = {event.of for event in answer if not isinstance(event, WriterGone)}
        for kind in {self._kind_of(of) for of in of_attempts}:
            self._site.replayed[kind] += 1

    def _kind_of(self, of: AttemptId) -> str:
        state = self._states.get(of)
        if state is None:
            return OF_EARLIER_RUNS
        if state in IN_FLIGHT:
            return TWICE
        return OF_FAILED if state in (State.FAILED, State.DISCARDED) else OF_TRACKED


class HandedOn:
    """Judges the reports that a controller hands on (I5).

    A completion is one that a worker has made; it and its fork are handed on once. Nothing is
    handed on of an attempt that the controller has not begun, or that was settled when it last
    asked. The ledger has to reject reports that are in its hands while it learns that.
    """

    def __init__(self) -> None:
        self._said: set[Event] = set()
        self._begun: set[AttemptId] = set()
        self._settled: set[AttemptId] = set()
        self._known: frozenset[AttemptId] = frozenset()  # settled at the last round
        self._over: frozenset[AttemptId] = frozenset()  # settled at the round before
        self._seen: dict[int, Event] = {}  # by identity: some are sent again after an error
        self._once: set[Event] = set()

    def said(self, answer: Iterable[Event]) -> None:
        """A worker has said this, whether it arrives or not."""
        self._said.update(answer)

    def note(self, record: TransitionRecord) -> None:
        """The controller was told of this."""
        if record.dest is State.REQUESTED:
            self._begun.add(record.of)
        if record.dest not in UNFINISHED:
            self._settled.add(record.of)

    def begin_round(self) -> None:
        """The controller has asked, and has forgotten what was settled."""
        self._over, self._known = self._known, frozenset(self._settled)

    def problem_of(self, reports: Sequence[Event]) -> str:
        """The fault of the reports of a round; empty if there is none."""
        problems = [self._problem(event) for event in reports if id(event) not in self._seen]
        self._seen.update((id(event), event) for event in reports)
        return next(filter(None, problems), "")

    def _problem(self, event: Event) -> str:
        if not isinstance(event, (WriterForked, ShardReported, Failed)) or not event.rank:
            return ""  # the controller's, or counted where the attempt is known to have failed
        if event.of not in self._begun:
            return f"{event} is handed on, of an attempt that was never begun here"
        if event.of in self._over:
            return f"{event} is handed on, of an attempt that is settled"
        if isinstance(event, Failed):
            return ""  # also the controller's words, each time that a worker is found dead
        if isinstance(event, ShardReported) and event not in self._said:
            return f"{event} is handed on, and no worker has said so"
        if event in self._once:
            return f"{event} is handed on twice"
        self._once.add(event)
        return ""
