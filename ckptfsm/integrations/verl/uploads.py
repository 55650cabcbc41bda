"""Uploads of tracked checkpoints: one child at a time, and a reader's lease on each waiting step.

Rules:

- A hook only notes the step; the next poll takes leases and starts children. Errors are raised or
  warned of there, as for a failed save. A failed upload leaves the checkpoint alone.
- Only the child looks at the remote place, also for copies of an earlier run: the trainer never
  waits for it.
- A step leaves one list only when it is on the next: a temporary error costs no upload.
- The waiting entries are attempts: after a rollback, another attempt may have the same step.
- Pins belong to people: none is set or removed here. The leases of a killed run expire.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptfsm.adapters.fork import Child
from ckptfsm.adapters.notices import say, warn_caller
from ckptfsm.adapters.signals import PosixDeferredSignals
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    DeadlineExceeded,
    OutcomeUnknown,
    RestoreFailed,
    SaveFailed,
    SaveFailedWarning,
    StepNotFoundError,
    describe,
    name_ranks,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Outcome
from ckptfsm.integrations.verl.mirror import Mirror, Upload
from ckptfsm.ranks.controller import Controller

log = logging.getLogger("ckptfsm")
_OF_A_MOMENT = (OSError, RestoreFailed)  # temporary errors: the next poll retries


@dataclass(slots=True)
class Uploads:
    """The steps to upload.

    ``noted`` steps are not kept yet; each of ``waiting`` is kept by its lease.

    ``running`` is the first waiting step, and the child that uploads it. ``left`` are attempts that
    are no checkpoints any more, and must not wait. ``resumed``: a copy of this step may exist.
    """

    root: str
    mirror: Mirror
    noted: list[int] = field(default_factory=list)
    left: list[AttemptId] = field(default_factory=list)
    waiting: dict[AttemptId, ExitStack] = field(default_factory=dict)
    running: tuple[AttemptId, Child] | None = None
    resumed: int | None = None

    def hook(self, record: TransitionRecord) -> None:
        """Note a step that became tracked, or went to quarantine."""
        if record.acknowledges:
            self.noted.append(record.step)
        elif record.dest is State.QUARANTINED:
            self.left.append(record.of)

    def begin(self, controller: Controller) -> None:
        """Note the latest step at the start: an earlier run may have left it without a copy."""
        self.resumed = controller.latest_step()
        if self.resumed is not None:
            self.noted.append(self.resumed)

    def poll(self, controller: Controller) -> None:
        """Advance the uploads without waiting. A failed one is ``SaveFailed``, or a warning."""
        try:
            self._advance(controller)
        except (DeadlineExceeded, OutcomeUnknown):
            raise
        except SaveFailed as error:
            _tell(controller, error)
        except _OF_A_MOMENT as error:
            if controller.config.on_failure != "warn":
                raise
            warn_caller(SaveFailedWarning(f"uploads wait: {describe(error)}"))

    def _advance(self, controller: Controller) -> None:
        """Advance the uploads. Raises ``SaveFailed`` of an upload, and errors of a lease or a fork."""
        while self.left:
            self._leave(self.left.pop())
        problem = self._keep_noted(controller)  # first: a step without a lease may be pruned
        self._look_after_the_child()
        if self.running is None and self.waiting:
            of = next(iter(self.waiting))
            upload = Upload(self.root, of, self.mirror, look=of.step == self.resumed)
            with PosixDeferredSignals():
                self.running = of, upload.start()
        if problem is not None:
            raise problem

    def _look_after_the_child(self) -> None:
        if self.running is None:
            return
        of, child = self.running
        outcome = child.poll()
        if outcome is None:
            return
        self.running = None
        if of in self.waiting:  # else it was left
            self._let_go(of)
            _conclude(of.step, outcome)

    def _keep_noted(self, controller: Controller) -> Exception | None:
        """Keep each noted step; the first error of those that stay noted."""
        problem: Exception | None = None
        for step in tuple(self.noted):
            try:
                self._keep(controller, step)
            except (DeadlineExceeded, OutcomeUnknown):
                raise
            except _OF_A_MOMENT as error:
                problem = problem or error
                continue
            self.noted.remove(step)
        return problem

    def _leave(self, of: AttemptId) -> None:
        """End the upload of an attempt that is no checkpoint any more; its result is ignored."""
        if of not in self.waiting:
            return
        if self.running is not None and self.running[0] == of:
            self.running[1].kill(0.0)
        with self.waiting.pop(of):
            _say_left_out(of.step, f"attempt {of} is not tracked any more")

    def _let_go(self, of: AttemptId) -> None:
        """Drop a waiting attempt. On a slow disk its lease is removed later; no error is hidden."""
        try:
            self.waiting.pop(of).close()
        except DeadlineExceeded as error:
            why = describe(error)
            said = f"step {of.step}: its lease is given back later: {why}"
            say(log.warning, "lease_given_back_later", said, of=str(of), error=why)

    def _keep(self, controller: Controller, step: int) -> None:
        """Let a step wait, under a lease; warn once if it cannot be uploaded.

        Its files are not read here: the copy is compared with the manifest.
        """
        with ExitStack() as lease:
            try:
                found = lease.enter_context(controller.reading(step, verify="none"))
            except (StepNotFoundError, DamagedRoot) as error:
                _say_left_out(step, describe(error))
                return
            of = found.of if found is not None else None
            if of is None:
                _say_left_out(step, "it was adopted, and has no manifest to upload by")
            elif of not in self.waiting:
                self.waiting[of] = lease.pop_all()

    def wait(self, controller: Controller) -> None:
        """Wait until no upload is left.

        A failure is ``SaveFailed``, or a warning, after the last one.

        Raises ``DeadlineExceeded`` after ``close_timeout_s``, or if the disk does not answer:
        leases may stay then, and expire.
        """
        limit = controller.config.close_timeout_s
        deadline = time.monotonic() + limit
        failed: dict[int, SaveFailed] = {}
        while self.noted or self.waiting or self.running is not None:
            try:
                self._advance(controller)
            except DeadlineExceeded as error:
                raise self._late(failed, limit) from error
            except OutcomeUnknown:
                raise
            except SaveFailed as error:
                failed[error.step] = error
            except _OF_A_MOMENT as error:
                step = self._give_up()
                why = f"the upload of step {step} could not begin: {describe(error)}"
                failed[step] = SaveFailed(why, step=step)
                if (self.noted or self.waiting) and time.monotonic() >= deadline:
                    raise self._late(failed, limit) from error
            if self.running is not None:
                left_s = max(0.0, deadline - time.monotonic())
                if self.running[1].wait(left_s) is None:
                    raise self._late(failed, limit)
        if failed:
            first = next(iter(failed.values()))
            rest = f"; {_no_copy(failed)}" if len(failed) > 1 else ""
            _tell(controller, SaveFailed(f"{first.message}{rest}", step=first.step))

    def _late(self, failed: Iterable[int], limit: float) -> DeadlineExceeded:
        """The error for uploads that are too late; gives everything back."""
        late = {*failed, *self.noted, *(of.step for of in self.waiting)}
        self._give_back()
        rest = f": {_no_copy(late)}" if late else ""
        return DeadlineExceeded(f"the uploads did not finish in time{rest}", timeout_s=limit)

    def _give_up(self) -> int:
        """Drop the step without a lease, or the step with a child that could not begin."""
        if self.noted:
            return self.noted.pop(0)
        of = next(iter(self.waiting))
        self._let_go(of)
        return of.step

    def _give_back(self) -> None:
        """End the child, and give all leases back."""
        self.abandon()
        try:
            while self.waiting:
                self.waiting.popitem()[1].close()
        except (CkptFsmError, OSError) as error:  # the others expire
            why = describe(error)
            said = f"leases could not be given back, and expire: {why}"
            say(log.warning, "leases_not_given_back", said, error=why)

    def abandon(self) -> None:
        """End the child. The controller is to be left too; the next start uploads the latest step."""
        if self.running is not None:
            self.running[1].kill()
            self.running = None


def _conclude(step: int, outcome: Outcome) -> None:
    """Log the end of an upload. Raises ``SaveFailed``."""
    if not outcome.succeeded:
        raise SaveFailed(f"the upload of step {step} failed: {outcome.explain()}", step=step)
    said = f"step {step}: uploaded ({outcome.payload} files)"
    say(log.info, "uploaded", said, step=step, files=outcome.payload)


def _tell(controller: Controller, error: SaveFailed) -> None:
    if controller.config.on_failure != "warn":
        raise error
    warn_caller(SaveFailedWarning(error.message))


def _no_copy(steps: Iterable[int]) -> str:
    return f"no copy of steps {name_ranks(sorted(steps))}"


def _say_left_out(step: int, why: str) -> None:
    said = f"step {step} is not uploaded: {why}"
    say(log.warning, "not_uploaded", said, step=step, why=why)
    warn_caller(UserWarning(said))
