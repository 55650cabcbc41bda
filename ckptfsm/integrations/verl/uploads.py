"""Copies of tracked checkpoints in a remote place, made beside the training.

A runner on a thread of the trainer follows the root (``follow.runner``), and a child makes each copy.
The trainer waits for no upload but at its end. A failed upload is raised, or warned of, as a failed
save is; it leaves the checkpoint alone. The next run begins with the latest step, and looks for its
copy.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue

from ckptfsm.adapters.fork import Child
from ckptfsm.adapters.notices import warn_caller
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.spawn import Channel
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import DeadlineExceeded, SaveFailed, SaveFailedWarning, name_ranks
from ckptfsm.core.jobs import Task
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.ports import Unfit
from ckptfsm.follow.beside import renewal_s, tell
from ckptfsm.follow.runner import FollowPlan, Message, Runner, Stop, Trouble
from ckptfsm.integrations.verl.mirror import Mirror, Upload, manifest_of
from ckptfsm.ranks.controller import Controller

_LOOK_S = 1.0
_END_S = 10.0  # for the thread, once its child is killed
# A mirror limits its own commands.
_TASK = Task(name="mirror", attempts=3, backoff_s=5.0, timeout_s=1e8, queue=1000)


class UploadWork:
    """Copies a checkpoint in a child. See ``runner.Work``, and ``runner.Attempt`` for the child.

    ``epoch`` is this run's.
    """

    def __init__(self, root: str, mirror: Mirror, epoch: int) -> None:
        self.root = root
        self.mirror = mirror
        self.epoch = epoch
        self.child: Child | None = None

    def begin(self, record: JobRecord, checkpoint: Checkpoint, path: str) -> UploadWork:
        if manifest_of(self.root, record.step) is None:
            raise Unfit("it was adopted, and has no manifest to upload by")
        look = record.epoch < self.epoch or record.begun > 1
        self.child = Upload(self.root, record.of, self.mirror, look).start()
        return self

    def ended(self) -> str | None:
        outcome = self.child.poll() if self.child is not None else None
        if outcome is None:
            return None
        return "" if outcome.succeeded else outcome.explain()

    def watched(self) -> list[int]:
        return []  # its end is seen at the next look

    def kill(self) -> str:
        if self.child is not None:
            self.child.kill()
        return ""


class Uploads:
    """The uploads of a controller's root, from ``begin`` until ``wait`` or ``abandon``."""

    def __init__(self, root: str, mirror: Mirror, controller: Controller) -> None:
        recovery, config = controller.recovery, controller.config
        assert recovery is not None
        self._controller = controller
        self.told: SimpleQueue[Message] = SimpleQueue()
        self._storage = PosixStorage(root, create=False)
        self.work = UploadWork(root, mirror, recovery.epoch)
        plan = FollowPlan(
            recovery.epoch,
            "verl",
            (_TASK,),
            "upload-",
            renewal_s(config),
            _LOOK_S,
            keeps_waiting=True,
        )
        self.runner = Runner(self._storage, plan, self.work, self.told.put)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._thread = threading.Thread(
            target=self._run, args=(Channel(theirs),), name="ckptfsm-uploads", daemon=True
        )

    def begin(self) -> None:
        """Follow the root from now on. The latest step comes first: it may have no copy yet."""
        self._thread.start()

    def _run(self, channel: Channel) -> None:
        try:
            self.runner.serve(channel)
        finally:
            channel.close()
            self._storage.close_root()

    def poll(self) -> None:
        """Tell what happened. A failed upload is ``SaveFailed``, or a warning."""
        while not self.told.empty():
            failure = _heard(self.told.get())
            if failure is not None:
                self._raise(failure)

    def wait(self) -> None:
        """Wait until no upload is left.

        A failure is ``SaveFailed``, or a warning, after the last one. Raises ``DeadlineExceeded`` after
        ``close_timeout_s``.
        """
        limit = self._controller.config.close_timeout_s
        self._end(limit, limit + _END_S)
        failed: dict[int, SaveFailed] = {}
        while not self.told.empty():
            failure = _heard(self.told.get())
            if failure is not None:
                failed[failure.step] = failure
        unfinished = (JobState.WAITING, JobState.RUNNING)
        late = [of.step for (of, _), r in self.runner.records.items() if r.state in unfinished]
        if late or self._thread.is_alive() or not self.runner.idle:
            rest = f": {_no_copy({*late, *failed})}" if late or failed else ""
            said = f"the uploads did not finish in time{rest}"
            raise DeadlineExceeded(said, timeout_s=limit)
        if failed:
            first = next(iter(failed.values()))
            rest = f"; {_no_copy(failed)}" if len(failed) > 1 else ""
            self._raise(SaveFailed(f"{first.message}{rest}", step=first.step))

    def abandon(self) -> None:
        """End the child. The controller is to be left too; the next start uploads the latest step."""
        self._end(0.0, _END_S)
        self.work.kill()  # the thread waits for a disk, say

    def _end(self, drain_s: float, join_s: float) -> None:
        with suppress(OSError):  # it has ended
            self._channel.post(Stop(drain_s))
        if self._thread.ident is not None:
            self._thread.join(join_s)

    def _raise(self, error: SaveFailed) -> None:
        if self._controller.config.on_failure != "warn":
            raise error
        warn_caller(SaveFailedWarning(error.message))


def _heard(message: Message) -> SaveFailed | None:
    """Log what happened, and warn of it. Returns a failure, which is to be raised."""
    tell(message)
    if isinstance(message, Trouble):
        warn_caller(SaveFailedWarning(f"uploads wait: {message.words}"))
    elif message.state is JobState.MISSED:
        warn_caller(UserWarning(f"step {message.step} is not uploaded: {message.reason}"))
    elif message.state is JobState.FAILED:
        why = f"the upload of step {message.step} failed: {message.reason}"
        return SaveFailed(why, step=message.step)
    return None


def _no_copy(steps: Iterable[int]) -> str:
    return f"no copy of steps {name_ranks(sorted(steps))}"
