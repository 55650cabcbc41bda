"""Uploads of checkpoints that are tracked: one child at a time, and a reader's lease on each that waits.

Rules:
* A hook only notes the step; leases are taken, and children started, at the next poll. What went wrong
  is raised or warned of there, as for a save that failed. A failed upload leaves the checkpoint alone.
* A step is struck off one list only when it is on the next: an error of a moment costs no upload.
* Pins are people's: none is set or removed here. The leases of a run that was killed expire.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptfsm.controller import Controller
from ckptfsm.documents import TransitionRecord
from ckptfsm.errors import (
    DamagedRoot,
    DeadlineExceeded,
    SaveFailed,
    SaveFailedWarning,
    StepNotFoundError,
    describe,
)
from ckptfsm.evidence import read_manifest
from ckptfsm.integrations.verl.mirror import Copy, Mirror, Upload
from ckptfsm.layout import VERL
from ckptfsm.notices import warn_caller
from ckptfsm.ports import Outcome
from ckptfsm.processes import Child
from ckptfsm.storage import PosixStorage

log = logging.getLogger("ckptfsm")


@dataclass(slots=True)
class Uploads:
    """``noted`` steps are not kept yet; each of ``waiting`` is, by its lease, until it was uploaded.

    ``running`` is the first of those, and the child that uploads it.
    """

    root: str
    mirror: Mirror
    noted: list[int] = field(default_factory=list)
    waiting: dict[int, ExitStack] = field(default_factory=dict)
    running: tuple[int, Child] | None = None

    def hook(self, record: TransitionRecord) -> None:
        """A step became tracked."""
        if record.acknowledges:
            self.noted.append(record.step)

    def begin(self, controller: Controller) -> None:
        """At the start: what an earlier run left undone is noted."""
        latest = controller.latest_step()
        if latest is None:
            return
        storage, name = PosixStorage(self.root, create=False), VERL.published_name(latest)
        try:
            manifest = read_manifest(storage, name)
        finally:
            storage.close_root()
        if manifest is None or not self.mirror.has(Copy(name, manifest.of)):
            self.noted.append(latest)

    def poll(self, controller: Controller) -> None:
        """Take a step on; never waits for an upload. One that failed is ``SaveFailed``, or a warning."""
        while self.noted:
            if self.noted[0] not in self.waiting:
                self._keep(controller, self.noted[0])
            self.noted.pop(0)
        if self.running is None and self.waiting:
            step = next(iter(self.waiting))
            self.running = step, Upload(self.root, step, self.mirror).start()
        if self.running is None:
            return
        step, child = self.running
        outcome = child.poll()
        if outcome is None:
            return
        self.running = None
        with self.waiting.pop(step):
            _tell(step, outcome, warn=controller.config.on_failure == "warn")

    def _keep(self, controller: Controller, step: int) -> None:
        """Let a step wait, under a lease; one that cannot be uploaded is warned of, once.

        Its files are not read here: the copy is compared with the manifest.
        """
        lease = ExitStack()
        try:
            found = lease.enter_context(controller.reading(step, verify="none"))
        except (StepNotFoundError, DamagedRoot) as error:
            _say_left_out(step, describe(error))
            return
        if found is not None and found.parts:
            self.waiting[step] = lease
            return
        with lease:
            _say_left_out(step, "it was adopted, and has no manifest to upload by")

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
        """End the child. The controller is to be left too; the next start uploads the latest step."""
        if self.running is not None:
            self.running[1].kill()
            self.running = None


def _tell(step: int, outcome: Outcome, *, warn: bool) -> None:
    """How an upload ended."""
    if outcome.succeeded:
        log.info("uploaded", extra={"step": step, "files": outcome.payload})
        return
    why = f"the upload of step {step} failed: {outcome.explain()}"
    if not warn:
        raise SaveFailed(why, step=step)
    warn_caller(SaveFailedWarning(why))


def _say_left_out(step: int, why: str) -> None:
    log.warning("not_uploaded", extra={"step": step, "why": why})
    warn_caller(UserWarning(f"step {step} is not uploaded: {why}"))
