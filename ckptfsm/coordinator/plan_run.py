"""Carries out the plan of recovery, in order, on an applier that has just begun.

Every decision goes through the table and the commands of a living save. If the disk refuses a
decision, the root is not opened (I8).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Literal

from ckptfsm.adapters.notices import say
from ckptfsm.coordinator.applier import Applier
from ckptfsm.core.documents import RollbackFinished, RollbackStarted
from ckptfsm.core.errors import CkptFsmError, StorageError
from ckptfsm.core.events import (
    Adopted,
    Command,
    Event,
    Failed,
    FoundPublished,
    Prune,
    Withdrawn,
    WritersLost,
    WriteTracker,
)
from ckptfsm.core.layout import FETCHING, TRACKER, fetched_mark, parse_fetched, trash_dir
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.core.recovery import Plan, Resume
from ckptfsm.core.recovery_refusals import hopeless
from ckptfsm.core.recovery_rules import Result
from ckptfsm.core.rollback import Intent
from ckptfsm.disk.durable import list_names, lookup, storage_error
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.journal import History
from ckptfsm.disk.trash import remove_empty, remove_marker, sweep_temporaries

log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class PlanRun:
    """The run of a plan, see the module. ``applier`` has journaled the beginning of its epoch."""

    storage: Storage
    clock: Clock
    applier: Applier
    resume: Resume

    def run(self, history: History, decided: Plan) -> None:
        """Carry out the plan. Raises ``DamagedRoot``, or the error of the disk."""
        sweep_temporaries(self.storage)
        self.applier.reread_protection()
        afresh = self._begin_afresh(history, decided)
        # A restore may still have to fall back: this run has neither written nor verified the latest.
        self.applier.keep_all, self.applier.only_resumable = True, decided.only_resumable
        actions = decided.actions
        failing = list(takewhile(lambda a: isinstance(a, (Failed, WritersLost)), actions))
        self._carry_out(failing)  # first: the tracker still shows resumes by others
        self._fall_back(decided.fallback, actions)
        self._carry_out(actions[len(failing) :])
        self.applier.only_resumable = None
        self._let_writers_go()
        if self.applier.ledger.in_flight() is None:
            self._finish_rollback(history.intent, afresh)
        if not afresh:
            self._repair_tracker(rewrite=any(d.result is Result.ADOPTED for d in decided.decisions))
        self.applier.sort_trash(history.discarded)
        self.applier.fold(history)
        self._end_fetches()
        self._refuse_half_open(decided.reasons)
        self.applier.keep_all = False

    def _carry_out(self, actions: Sequence[Event | Command]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: Event | Command) -> None:
        if isinstance(action, Command):
            self.applier.run(action)
            return
        if isinstance(action, Adopted):  # durable before any later decision relies on it
            self.applier.continue_from(action.run_seconds)
            self.applier.publisher.make_adopted_durable(action.of.step)
            if lookup(self.storage, fetched_mark(action.of)) is None:
                self.applier.pin(action.of.step, "adopted")
        if isinstance(action, FoundPublished):
            self.applier.publisher.make_published_durable(action.of.step)
        self.applier.post(action)

    def _fall_back(self, to: int | None, actions: Sequence[Event | Command]) -> None:
        """Move the tracker to a checkpoint that stays, before anything is withdrawn: see ``Plan``."""
        if to is None:
            return
        if any(isinstance(action, Adopted) and action.of.step == to for action in actions):
            self.applier.publisher.make_adopted_durable(to)
        try:
            self.applier.publisher.write_tracker(to)
        except CkptFsmError:
            raise
        except OSError as error:
            raise storage_error(error, "tracker", TRACKER) from error

    def _end_fetches(self) -> None:
        """Remove the marks of fetched checkpoints that are in the journal by now."""
        names = list_names(self.storage, FETCHING)
        ended = [n for n in names if parse_fetched(n) in self.applier.ledger.checkpoints]
        for name in ended:
            remove_marker(self.storage, f"{FETCHING}/{name}")
        if ended == names:
            remove_empty(self.storage, FETCHING)

    def _let_writers_go(self) -> None:
        """Report the writers of a roll-forward as lost that failed just now: it has none."""
        for failed in self.applier.ledger.in_state(State.FAILED):
            if failed.id.epoch != self.applier.epoch and failed.gone != failed.writers:
                self.applier.post(WritersLost(failed.id))

    def _begin_afresh(self, history: History, decided: Plan) -> bool:
        """True for a fresh start: an interrupted one, or one that is asked for and journaled now.

        The tracker goes first: from then on, no trainer can resume from an older checkpoint.
        """
        if history.intent.unfinished != "fresh":
            known = history.ledger.checkpoints or any(
                d.result is Result.ADOPTED for d in decided.decisions
            )
            if self.resume != "fresh" or not (known or lookup(self.storage, TRACKER)):
                return False
            self.applier.append(RollbackStarted(to_step=None, at=self.clock.wall()))
        self.applier.mover.set_aside_tracker()
        return True

    def _finish_rollback(self, interrupted: Intent, afresh: bool) -> None:
        """Complete a fresh start, or a rollback that a crash interrupted."""
        if afresh:
            roll_back(self.applier, None, self.clock.wall())
        elif interrupted.target is not None:
            self._resume_rollback(interrupted.target)

    def _resume_rollback(self, target: int) -> None:
        """Complete a rollback; with a damaged target, to the next one below, or not at all."""
        steps = [c.step for c in self.applier.ledger.in_state(State.TRACKED)]
        reachable = [step for step in steps if step <= target]
        if reachable:
            roll_back(self.applier, reachable[-1], self.clock.wall())
            return
        latest = max(steps, default=None)
        said = f"the rollback to step {target} is given up: no such step is left; latest: {latest}"
        say(log.warning, "rollback_given_up", said, target=target, latest=latest)
        self.applier.append(RollbackFinished(at=self.clock.wall()))

    def _repair_tracker(self, *, rewrite: bool) -> None:
        """Repair the tracker, unless it may name a newer checkpoint that waits for its journal record.

        ``rewrite``: another program wrote the tracker, which may not be durable.
        """
        waiting = any(isinstance(command, WriteTracker) for command in self.applier.pending)
        latest = self.applier.ledger.latest()
        if waiting or latest is None:
            return
        if rewrite or read_tracker(self.storage).step != latest.step:
            self.applier.run(WriteTracker(latest.id))

    def _refuse_half_open(self, reasons: Sequence[str]) -> None:
        """A published checkpoint that the disk did not let be tracked is not passed over (I8).

        Nor is one that was to be rolled forward and could not be, if it was all there was.
        """
        waiting = self.applier.ledger.in_flight()
        if waiting is not None:
            name = self.applier.layout.published_name(waiting.step)
            raise StorageError(
                f"step {waiting.step} is {waiting.state.value}, and its next effect failed",
                file=TRACKER if waiting.state is State.FINALIZED else name,
                step=waiting.step,
            ) from self.applier.blocked.get(waiting.id)
        newest = self.applier.newest_step()
        leaving = [
            c.of for c in self.applier.pending if isinstance(c, Prune) and c.of.step > newest
        ]
        if leaving:
            raise StorageError(
                "the newest checkpoint could not be brought back from the trash",
                file=trash_dir(max(leaving)),
                step=max(leaving).step,
            )
        if reasons and newest < 0:
            raise hopeless(reasons)


def roll_back(applier: Applier, target: int | None, at: str) -> None:
    """Make ``target`` the latest. The intent is journaled already; ``at`` is the time, for display.

    The tracker is moved first, so that it never names a checkpoint that is being moved; then the
    later steps.
    """
    if target is None:
        applier.mover.set_aside_tracker()
    else:
        applier.publisher.write_tracker(target)
    reason: Literal["fresh", "rollback"] = "fresh" if target is None else "rollback"
    for checkpoint in applier.ledger.in_state(State.PRUNABLE):
        # Decide an interrupted prune now: it must not come back after a rollback.
        applier.forget(Prune, checkpoint.id)
        effect = partial(applier.mover.resume_prune, checkpoint, applier.newest_step())
        applier.conclude_prune(checkpoint, effect)
    applier.forget(WriteTracker)
    # It was due for a save that is withdrawn now, and nobody may have read the target.
    applier.retention_due = False
    for checkpoint in reversed(applier.ledger.in_state(State.TRACKED)):
        if target is None or checkpoint.step > target:
            applier.post(Withdrawn(checkpoint.id, reason, f"to {target}"))
    applier.append(RollbackFinished(at=at))
