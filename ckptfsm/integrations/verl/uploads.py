"""Uploads of checkpoints that are tracked: one child at a time, and a pin on each step that waits.

Rules: a hook only notes the step; pins are set, and children started, at the next poll. What went wrong
is raised or warned of there, as for a save that failed. A failed upload leaves the checkpoint alone.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, field

from ckptfsm.controller import Controller
from ckptfsm.documents import TransitionRecord
from ckptfsm.errors import DeadlineExceeded, SaveFailed, SaveFailedWarning
from ckptfsm.integrations.verl.mirror import NAME, Mirror, Upload, pinned_by_us
from ckptfsm.layout import VERL
from ckptfsm.lifecycle import State
from ckptfsm.processes import Child

log = logging.getLogger("ckptfsm")


@dataclass(slots=True)
class Uploads:
    """``noted`` steps are not pinned yet, ``waiting`` ones are. ``running`` is what a child uploads."""

    root: str
    mirror: Mirror
    noted: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: tuple[int, Child] | None = None

    def hook(self, record: TransitionRecord) -> None:
        """A step became tracked."""
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            self.noted.append(record.step)

    def begin(self, controller: Controller) -> None:
        """At the start: what an earlier run pinned is let go, and what it left undone is noted."""
        for step in controller.all_steps():
            if pinned_by_us(self.root, step):
                controller.unpin(step)
        latest = controller.latest_step()
        if latest is not None and not self.mirror.has(VERL.published_name(latest)):
            self.noted.append(latest)

    def poll(self, controller: Controller) -> None:
        """Take a step on; never waits. Raises ``SaveFailed`` for an upload that failed, or warns."""
        noted, self.noted = self.noted, []
        for step in dict.fromkeys(noted):
            if step in controller.all_steps():
                controller.pin(step, NAME)
                self.waiting.append(step)
        if self.running is None and self.waiting:
            step = self.waiting.pop(0)
            self.running = step, Upload(self.root, step, self.mirror).start()
        if self.running is None:
            return
        step, child = self.running
        outcome = child.poll()
        if outcome is None:
            return
        self.running = None
        controller.unpin(step)
        if outcome.succeeded:
            log.info("uploaded", extra={"step": step, "files": outcome.payload})
            return
        why = f"the upload of step {step} failed: {outcome.explain()}"
        if controller.config.on_failure == "warn":
            warnings.warn(why, SaveFailedWarning, stacklevel=2)
        else:
            raise SaveFailed(why, step=step)

    def wait(self, controller: Controller) -> None:
        """Until nothing waits any more. Raises ``DeadlineExceeded`` after ``close_timeout_s``."""
        limit = controller.config.close_timeout_s
        deadline = time.monotonic() + limit
        self.poll(controller)
        while self.running is not None:
            if self.running[1].wait(max(0.0, deadline - time.monotonic())) is None:
                raise DeadlineExceeded("the uploads did not finish in time", timeout_s=limit)
            self.poll(controller)
            self.poll(controller)  # the next one

    def abandon(self) -> None:
        """End the child; the next start uploads the latest step."""
        if self.running is not None:
            self.running[1].kill()
            self.running = None
