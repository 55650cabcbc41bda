"""The trainer's side of the jobs: a thread that starts their process, and logs what it reports.

No call of the trainer waits for the jobs, but ``close`` for at most ``jobs_drain_s``. Each failure is a
line in the log, and never an error of training.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from ckptfsm.adapters.job_commands import why_not_found
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.spawn import Spawned, import_path
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import ConfigError, describe, name_ranks
from ckptfsm.core.jobs import Job
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.ports import Storage
from ckptfsm.disk.job_records import JobHolds
from ckptfsm.follow.jobs import JobOrder
from ckptfsm.follow.runner import FollowPlan, Message, Stop, Trouble

log = logging.getLogger("ckptfsm")
_PAUSE_S, _DOUBLINGS = 1.0, 8  # before the process is started again
_LISTEN_S = 5.0
_JOIN_S = 0.1
_ENDS_A_PROGRAM = ("SIGTERM", "SIGINT", "SIGHUP")  # a program may send them to its own processes
_WORDS = {
    JobState.DONE: ("job_done", "is done"),
    JobState.MISSED: ("job_missed", "was missed"),
    JobState.FAILED: ("job_failed", "failed after {} attempts"),
    JobState.WAITING: ("job_tried_again", "failed, and is tried again"),
}
_STAYS = "its step stays, and it is tried again later"
_RENEWALS = 4  # of a lease before it would expire


def require_commands(jobs: Sequence[Job]) -> None:
    """Look for the command of each job. Raises ``ConfigError`` for one that is not found."""
    for job in jobs:
        function = job.command if isinstance(job.command, str) else ""
        program = () if isinstance(job.command, str) else job.command
        path = {**os.environ, **job.environment}.get("PATH", os.defpath)
        if why := why_not_found(function, program, path):
            raise ConfigError(
                f"the job {job.name} cannot run: {why}", key="on_tracked", job=job.name
            )


class JobsBeside:
    """The jobs of a root, run by a process beside this one.

    ``job_ended`` is called on the thread of this object, if jobs hold their steps: one more may go then.
    Raises ``ConfigError`` for a storage that no other process can use.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        storage: Storage,
        epoch: int,
        job_ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._fds = [os.dup(fd) for fd in storage.descriptors()[:1]]
        if not self._fds:
            raise ConfigError("on_tracked needs a root on a disk", key="on_tracked")
        renew_s = min(60.0, config.reader_timeout_s / _RENEWALS)
        self._order = JobOrder(
            storage.root,
            FollowPlan(epoch, config.layout, config.jobs, renew_s),
            config.jobs,
            tuple(import_path()),
            str(Path.cwd()),
            ignored=tuple(
                int(signal.Signals[name])
                for name in config.preemption_signals
                if name not in _ENDS_A_PROGRAM
            ),
        )
        self._end_s, self._drains = config.exit_timeout_s, config.jobs_drain_s > 0
        self._left = JobHolds(storage, config.holds)
        self._holds, self._job_ended = config.holds, job_ended
        self._changed = threading.Condition()
        self._stopped: Stop | None = None
        self._process: Spawned | None = None
        self._thread = threading.Thread(target=self._run, name="ckptfsm-jobs", daemon=True)
        self._thread.start()

    def drain(self, drain_s: float, check_signals: Callable[[], BaseException | None]) -> None:
        """Wait for the jobs that wait or run, at most ``drain_s``, then end the process.

        ``check_signals`` returns the exception of a signal's handler, which is raised at once.
        """
        if drain_s > 0:
            self._ask(Stop(drain_s))
            end = time.monotonic() + drain_s
            while self._thread.is_alive() and time.monotonic() < end:
                interruption = check_signals()
                if interruption is not None:
                    raise interruption
                self._thread.join(_JOIN_S)
        self.stop()

    def left(self, ledger: Ledger) -> str:
        """Which steps jobs still hold after a drain, in words: this machine may go with them."""
        held = self._left.of_steps(ledger) if self._drains else {}
        jobs = sorted({job for each in held.values() for job in each})
        steps, names = name_ranks(sorted(held)), ", ".join(jobs)
        said = (
            f"jobs that hold steps {steps} are not done: {names}. The next start goes on with them"
        )
        return said if held else ""

    def stop(self) -> None:
        """End the process. A job that runs begins again with the next manager."""
        process = self._ask(Stop(0.0))
        self._thread.join(self._end_s)
        if process is not None and self._thread.is_alive():  # it waits for a disk, say
            process.kill(self._end_s)
            self._thread.join(self._end_s)

    def _ask(self, stop: Stop) -> Spawned | None:
        with self._changed:
            self._stopped, process = stop, self._process
            self._changed.notify()
            if process is not None and process.is_open:
                process.resume()  # one that is stopped could not end in order
                with suppress(OSError):  # it has ended by itself
                    process.send(stop)
        return process

    def _run(self) -> None:
        try:
            for deaths in count():
                asked = self._stopped
                try:
                    status = self._run_process()
                    event, said = "jobs_ended", f"ended with {status}"
                except OSError as error:
                    status, event = -1, "jobs_not_started"
                    said = f"cannot be started: {describe(error)}"
                if status == 0:
                    return
                pause = _PAUSE_S * 2 ** min(deaths, _DOUBLINGS)
                # A drain begins it once more, at most.
                is_last = asked is not None or self._is_over()
                then = "the jobs wait for the next manager" if is_last else f"again in {pause:g} s"
                said = f"the process of the jobs {said}; {then}. If it was killed, see dmesg"
                say(log.warning, event, said, status=status)
                if is_last:
                    return
                self._rest(pause)
        finally:
            for fd in self._fds:
                os.close(fd)

    def _rest(self, pause_s: float) -> None:
        with self._changed:
            if self._stopped is None:
                self._changed.wait(pause_s)

    def _is_over(self) -> bool:
        return self._stopped is not None and self._stopped.drain_s <= 0

    def _run_process(self) -> int:
        """Start the process and log its messages until it has ended. Returns its exit status."""
        if self._is_over():
            return 0
        process = Spawned("ckptfsm.follow.jobs", "main", last_act=True)
        try:
            process.send(self._order, self._fds)
            with self._changed:  # not before: the order comes first
                if self._is_over():
                    return 0
                self._process = process
                if self._stopped is not None:
                    process.send(self._stopped)
            while (status := process.exitcode()) is None:
                for message in process.listen(_LISTEN_S):
                    self._hear(message)
                if not process.is_open:
                    time.sleep(0.01)
            for message in process.listen(0.0):
                self._hear(message)
            return status
        finally:
            process.kill()
            process.close()

    def _hear(self, message: Message) -> None:
        tell(message, self._holds)
        ended = isinstance(message, JobRecord) and message.state is not JobState.WAITING
        if ended and self._holds:  # any of the jobs: it may have had a lease
            self._job_ended()


def tell(message: Message, holds: Collection[str] = ()) -> None:
    """Write what a runner told into the log. ``holds``: the jobs that hold their checkpoints."""
    if isinstance(message, Trouble):
        said = f"the jobs wait: {message.words}"
        say(log.warning, "jobs_wait", said, error=message.words)
        return
    job, step, why = message.job, message.step, message.reason
    event, words = _WORDS[message.state]
    said = f"step {step}: the job {job} {words.format(message.begun)}"
    facts = {"job": job, "step": step, "attempts": message.begun}
    if message.state is JobState.DONE:
        say(log.info, event, said, **facts)
    else:
        stays = f" ({_STAYS})" if message.state is JobState.FAILED and job in holds else ""
        say(log.warning, event, f"{said}{stays}: {why}", error=why, **facts)
