"""The process that runs the jobs of a root's owner, one at a time. No torch, nothing of the trainer.

Started by ``adapters.spawn``; ``beside`` is the trainer's side. The process ends when its trainer says
so, and with its trainer.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from ckptfsm.adapters.fork import kill_session
from ckptfsm.adapters.job_process import JobCall, JobProcess, environment_of_job
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.spawn import TrainersEnd, be_considerate
from ckptfsm.core.documents import JobRecord, encode
from ckptfsm.core.jobs import Job, with_placeholders
from ckptfsm.core.layout import JOBS, job_name
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import make_dirs, put
from ckptfsm.disk.job_records import read_records
from ckptfsm.disk.trash import remove_marker, sweep_temporaries
from ckptfsm.follow.runner import FollowPlan, Runner

_NICE = 19  # where sessions share the processor, it is that of the attempts, too


@dataclass(frozen=True, slots=True)
class JobOrder:
    """The work of the process, sent first and with the descriptor of ``root``.

    ``imports`` and ``cwd`` are the trainer's. Attempts ignore the signals ``ignored``.
    """

    root: str
    plan: FollowPlan
    jobs: tuple[Job, ...]
    imports: tuple[str, ...]
    cwd: str
    ignored: tuple[int, ...] = ()


class JobWork:
    """Runs a job's command in a process of its own, see ``runner.Work``."""

    order: JobOrder | None = None

    def begin(self, record: JobRecord, checkpoint: Checkpoint, path: str) -> JobProcess:
        order = self.order
        assert order is not None
        job = next(each for each in order.jobs if each.name == record.job)
        command, step = job.command, record.step
        function, program = (command, ()) if isinstance(command, str) else ("", command)
        arguments = tuple(with_placeholders(program, path, step))
        call = JobCall(path, step, dict(checkpoint.metrics), arguments, function)
        variables = environment_of_job(os.environ, order.root, job.environment)
        return JobProcess(call, variables, order.imports, order.cwd, order.ignored)


class JobRecords:
    """The records of jobs in a root. See ``runner.Records``."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._tag = f"jobs-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._refused = False

    def begin(self) -> list[JobRecord]:
        """Make the directory, remove temporary files of dead writers, and read what is there."""
        make_dirs(self._storage, JOBS)
        sweep_temporaries(self._storage, (JOBS,))
        return read_records(self._storage)

    def put(self, record: JobRecord) -> None:
        if self._refused:  # else each try leaves a file, until none may be made
            sweep_temporaries(self._storage, (JOBS,))
        self._refused = True
        put(self._storage, job_name(record.of, record.job), encode(record), tag=self._tag)
        self._refused = False

    def remove(self, record: JobRecord) -> None:
        remove_marker(self._storage, job_name(record.of, record.job))


def main() -> None:
    """Serve the trainer: the command line names the socket."""
    logging.disable()  # its output goes to /dev/null; the trainer is told of everything
    work = JobWork()
    channel, listening = TrainersEnd(_kill_attempt).channel, True
    be_considerate(_NICE)
    messages: list[Any] = []
    while listening and not messages:
        listening, messages = channel.receive(None)
    if not messages:
        return
    order: JobOrder = messages[0]
    work.order = order
    storage = PosixStorage.of_descriptor(order.root, channel.take_fds()[0])
    runner = Runner(storage, order.plan, work, channel.send, JobRecords(storage))
    runner.serve(channel, messages[1:])


def _kill_attempt() -> None:
    """Kill the attempt and what others left. This process ends at once, before it sees that."""
    own = os.getpid()
    kill_session(own, spared=(own,))
