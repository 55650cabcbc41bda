"""Carries out the plan of recovery, in order, on an engine that has just begun.

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
from ckptfsm.coordinator.engine import Engine
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
from ckptfsm.core.layout import TRACKER, trash_dir
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.core.recovery import Plan, Resume
from ckptfsm.core.recovery_refusals import hopeless
from ckptfsm.core.recovery_rules import Result
from ckptfsm.core.rollback import Intent
from ckptfsm.disk.durable import lookup, storage_error
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.journal import History
from ckptfsm.disk.trash import sweep_temporaries

log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class PlanRun:
    """The run of a plan, see the module. ``engine`` has journaled the beginning of its epoch."""

    storage: Storage
    clock: Clock
    engine: Engine
    resume: Resume

    def run(self, history: History, decided: Plan) -> None:
        """Carry out the plan. Raises ``DamagedRoot``, or the error of the disk."""
        sweep_temporaries(self.storage)
        self.engine.reread_protection()
        afresh = self._begin_afresh(history, decided)
        self.engine.keep_all, self.engine.last_hope = afresh, decided.last_hope
        actions = decided.actions
        failing = list(takewhile(lambda a: isinstance(a, (Failed, WritersLost)), actions))
        self._carry_out(failing)  # first: the tracker still shows resumes by others
        self._fall_back(decided.fallback, actions)
        self._carry_out(actions[len(failing) :])
        self.engine.last_hope = None
        self._let_writers_go()
        if self.engine.ledger.in_flight() is None:
            self._finish_rollback(history.intent, afresh)
        if not afresh:
            self._repair_tracker(rewrite=any(d.result is Result.ADOPTED for d in decided.decisions))
        self.engine.sort_trash(history.given_up)
        self.engine.fold(history)
        self._refuse_half_open(decided.reasons)
        self.engine.keep_all = False

    def _carry_out(self, actions: Sequence[Event | Command]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: Event | Command) -> None:
        if isinstance(action, Command):
            self.engine.run(action)
            return
        if isinstance(action, Adopted):  # durable before any later decision relies on it
            self.engine.continue_from(action.run_seconds)
            self.engine.publisher.make_adopted_durable(action.of.step)
            self.engine.pin(action.of.step, "adopted")
        if isinstance(action, FoundPublished):
            self.engine.publisher.make_published_durable(action.of.step)
        self.engine.post(action)

    def _fall_back(self, to: int | None, actions: Sequence[Event | Command]) -> None:
        """Move the tracker to a checkpoint that stays, before anything is withdrawn: see ``Plan``."""
        if to is None:
            return
        if any(isinstance(action, Adopted) and action.of.step == to for action in actions):
            self.engine.publisher.make_adopted_durable(to)
        try:
            self.engine.publisher.write_tracker(to)
        except CkptFsmError:
            raise
        except OSError as error:
            raise storage_error(error, "tracker", TRACKER) from error

    def _let_writers_go(self) -> None:
        """Report the writers of a roll-forward as lost that failed just now: it has none."""
        for failed in self.engine.ledger.in_state(State.FAILED):
            if failed.id.epoch != self.engine.epoch and failed.gone != failed.writers:
                self.engine.post(WritersLost(failed.id))

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
            self.engine.append(RollbackStarted(to_step=None, at=self.clock.wall()))
        self.engine.mover.set_aside_tracker()
        return True

    def _finish_rollback(self, interrupted: Intent, afresh: bool) -> None:
        """Complete a fresh start, or a rollback that a crash interrupted."""
        if afresh:
            roll_back(self.engine, None, self.clock.wall())
        elif interrupted.target is not None:
            self._resume_rollback(interrupted.target)

    def _resume_rollback(self, target: int) -> None:
        """Complete a rollback; with a damaged target, to the next one below, or not at all."""
        steps = [c.step for c in self.engine.ledger.in_state(State.TRACKED)]
        reachable = [step for step in steps if step <= target]
        if reachable:
            roll_back(self.engine, reachable[-1], self.clock.wall())
            return
        latest = max(steps, default=None)
        said = f"the rollback to step {target} is given up: no such step is left; latest: {latest}"
        say(log.warning, "rollback_given_up", said, target=target, latest=latest)
        self.engine.append(RollbackFinished(at=self.clock.wall()))

    def _repair_tracker(self, *, rewrite: bool) -> None:
        """Repair the tracker, unless it may name a newer checkpoint that waits for its journal record.

        ``rewrite``: another program wrote the tracker, which may not be durable.
        """
        waiting = any(isinstance(command, WriteTracker) for command in self.engine.pending)
        latest = self.engine.ledger.latest()
        if waiting or latest is None:
            return
        if rewrite or read_tracker(self.storage).step != latest.step:
            self.engine.run(WriteTracker(latest.id))

    def _refuse_half_open(self, reasons: Sequence[str]) -> None:
        """A published checkpoint that the disk did not let be tracked is not passed over (I8).

        Nor is one that was to be rolled forward and could not be, if it was all there was.
        """
        waiting = self.engine.ledger.in_flight()
        if waiting is not None:
            name = self.engine.layout.published_name(waiting.step)
            raise StorageError(
                f"step {waiting.step} is {waiting.state.value}, and its next effect failed",
                file=TRACKER if waiting.state is State.FINALIZED else name,
                step=waiting.step,
            ) from self.engine.blocked.get(waiting.id)
        newest = self.engine.newest_step()
        leaving = [c.of for c in self.engine.pending if isinstance(c, Prune) and c.of.step > newest]
        if leaving:
            raise StorageError(
                "the newest checkpoint could not be brought back from the trash",
                file=trash_dir(max(leaving)),
                step=max(leaving).step,
            )
        if reasons and newest < 0:
            raise hopeless(reasons)


def roll_back(engine: Engine, target: int | None, at: str) -> None:
    """Make ``target`` the latest. The intent is journaled already; ``at`` is the time, for people.

    The tracker is moved first, so that it never names a checkpoint that is being moved; then the
    later steps.
    """
    if target is None:
        engine.mover.set_aside_tracker()
    else:
        engine.publisher.write_tracker(target)
    reason: Literal["fresh", "rollback"] = "fresh" if target is None else "rollback"
    for checkpoint in engine.ledger.in_state(State.PRUNABLE):
        # Decide an interrupted prune now: it must not come back after a rollback.
        engine.forget(Prune, checkpoint.id)
        effect = partial(engine.mover.resume_prune, checkpoint, engine.newest_step())
        engine.conclude_prune(checkpoint, effect)
    engine.forget(WriteTracker)
    engine.retire_due = False  # for a save that is withdrawn now; nobody may have read the target
    for checkpoint in reversed(engine.ledger.in_state(State.TRACKED)):
        if target is None or checkpoint.step > target:
            engine.post(Withdrawn(checkpoint.id, reason, f"to {target}"))
    engine.append(RollbackFinished(at=at))
