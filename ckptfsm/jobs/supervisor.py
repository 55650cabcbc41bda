"""The process that runs the jobs of a root's owner, one at a time. No torch, nothing of the trainer.

Started by ``adapters.spawn``; ``jobs.beside`` is the trainer's side. The process looks at the root as
an evaluator does, so that no call of the trainer waits for it, and no checkpoint is lost between two
calls. ``core.jobs`` has all decisions.

Rules:

- A reader's lease is durable, and the checkpoint is tracked after that, before a job begins. The lease
  is renewed until the last attempt has ended. A checkpoint that waits has no lease.
- A record is durable before the state that it names begins.
- The process ends when another owner has the root, when its trainer says so, and with its trainer.
- An error of a job, or of its settings, fails an attempt of that job.
- An error of the disk is told to the trainer, and the work is tried again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.job_process import Call, JobProcess, environment_of_job
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.spawn import Channel, TrainersEnd, be_considerate
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    Fenced,
    JournalCorrupt,
    StepNotFoundError,
    StorageError,
    describe,
)
from ckptfsm.core.jobs import (
    Job,
    Key,
    after_attempt,
    begin_again,
    begun,
    given_back,
    key_of,
    missed,
    pause_s,
    settle,
    with_placeholders,
)
from ckptfsm.core.layout import EPOCHS, READERS, parse_reader
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.job_records import (
    begin_records,
    put_record,
    read_records,
    remove_record,
    saved_since,
)
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.ownership import newest_epoch
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.trash import remove_marker

_LEASE = "job-"  # begins the nonce of our leases
_NICE = 10
_LOOKS = (
    10  # at a directory that is not there, and yet tracked: a network file system shows it late
)
_AFTER_TROUBLE = 5  # times look_s
_SLOWEST_LOOK = 30  # times look_s, while tracker and journal disagree
_GONE = "its directory was gone before its turn"
_WITHDRAWN = "its checkpoint was withdrawn while it ran"


@dataclass(frozen=True, slots=True)
class Order:
    """The work of the process, sent first and with the descriptor of ``root``.

    ``renew_s``: seconds from one renewal of a lease to the next. ``look_s``: from one look at the root
    to the next. ``imports`` and ``cwd`` are the trainer's. Attempts ignore the signals ``ignored``.
    """

    root: str
    epoch: int
    layout: Literal["megatron", "verl"]
    jobs: tuple[Job, ...]
    renew_s: float
    imports: tuple[str, ...]
    cwd: str
    look_s: float = 1.0
    ignored: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """The trainer closes: end after the jobs that wait, at the latest in ``drain_s``."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """A record that the trainer is to hear of: an attempt failed, or a job ended."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error that delays the jobs. The same error is told once."""

    words: str


@dataclass(slots=True)
class _Busy:
    """The job that runs, or waits for its next attempt, under its lease.

    ``outcome``: the record to put when the attempt has ended.
    """

    job: Job
    record: JobRecord
    lease: ReaderLease
    renew_at: float
    process: JobProcess | None = None
    not_before: float = 0.0
    ends_at: float = 0.0
    outcome: JobRecord | None = None


class Supervisor:
    """Runs jobs, a small step at each ``work``. ``tell`` takes the messages for the trainer."""

    def __init__(
        self,
        storage: Storage,
        order: Order,
        tell: Callable[[Told | Trouble], object],
        clock: Clock | None = None,
    ) -> None:
        self._storage = storage
        self._order = order
        self._tell = tell
        self._clock = clock or SystemClock()
        self._jobs = {job.name: job for job in order.jobs}
        self._tag = f"{_LEASE}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._leases = 0
        self._begun = False
        self._records: dict[Key, JobRecord] = {}
        self._checkpoints: Mapping[AttemptId, Checkpoint] = {}
        self._saved: set[AttemptId] = set()
        self._waiting: tuple[JobRecord, ...] = ()
        self._busy: _Busy | None = None
        self._settled_at: int | None = None  # the tracker's step, if the journal agrees with it
        self._reads_in_vain = 0
        self._read_at = self._look_at = 0.0
        self._absent: dict[Key, int] = {}
        self._trouble = ""
        self._changed = True  # the ledger or a record, since the last decision

    # ------------------------------------------------------------------------------------ the loop

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits, as far as the last look showed."""
        return self._begun and self._busy is None and not self._waiting

    @property
    def group(self) -> int | None:
        """The process group of the attempt that runs."""
        busy = self._busy
        process = busy.process if busy is not None else None
        return process.pid if process is not None and process.running else None

    def serve(self, channel: Channel, messages: list[object]) -> None:
        """Work until the trainer closes. ``messages`` came with the order.

        Raises ``Fenced`` if another owner has the root.
        """
        until: float | None = None
        listening = True
        while True:
            for message in messages:
                if isinstance(message, Stop):
                    until = self._clock.monotonic() + message.drain_s
                    self._look_at = self._read_at = 0.0
            if not listening and until is None:  # the trainer was killed: the attempt counts
                self.leave()
                return
            if until is not None and (not listening or self._clock.monotonic() >= until):
                break
            self.work()
            if until is not None and self.idle:
                break
            self._wait(channel, until)
            listening, messages = channel.receive(0)
        self.end()

    def work(self) -> None:
        """Look at the root if that is due, and attend to the job that runs."""
        now = self._clock.monotonic()
        try:
            if now >= self._look_at:
                self._look_at = now + self._order.look_s
                self._look(now)
            self._attend(now)
        except Fenced:
            raise
        except (OSError, CkptFsmError) as error:
            self._look_at = max(self._look_at, now + _AFTER_TROUBLE * self._order.look_s)
            self._say(Trouble(describe(error)))
        else:
            self._trouble = ""

    def end(self) -> None:
        """Kill the attempt that runs; its job waits for the next owner."""
        busy = self._busy
        if busy is not None:
            if busy.process is not None:
                busy.process.kill()
            put_record(self._storage, busy.outcome or given_back(busy.record), self._tag)
        self.leave()

    def leave(self) -> None:
        """Kill the attempt that runs, and let go of its step. The records are another owner's."""
        busy = self._busy
        if busy is None:
            return
        if busy.process is not None:
            busy.process.kill()
        self._busy = None  # last: the thread that sees the trainer's end kills the ``group``
        busy.lease.__exit__(None, None, None)

    def _wait(self, channel: Channel, until: float | None) -> None:
        times, busy = [self._look_at], self._busy
        watched = [channel.fileno()]
        if until is not None:
            times.append(until)
        if busy is not None:
            times.append(busy.renew_at)
            if busy.process is not None:
                times.append(busy.ends_at)
                watched += busy.process.watched()
            elif busy.outcome is None:
                times.append(busy.not_before)
        waiting = select.poll()
        for fd in watched:
            waiting.register(fd, select.POLLIN)
        waiting.poll(1000 * max(0.0, min(times) - self._clock.monotonic()) + 1)

    def _say(self, message: Told | Trouble) -> None:
        if isinstance(message, Trouble):
            if message.words == self._trouble:
                return
            self._trouble = message.words
        self._tell(message)

    # ------------------------------------------------------------------------------------- a look

    def _look(self, now: float) -> None:
        self._check_epoch()
        if not self._begun:
            self._begin()
        named = read_tracker(self._storage).step
        if named != self._settled_at and now >= self._read_at:
            self._read_ledger(named, now)
        if self._changed:
            self._settle()

    def _check_epoch(self) -> None:
        newest = newest_epoch(self._storage)
        if newest == 0:  # the owner makes its file anew, or tells why it cannot
            raise StorageError(f"the file of epoch {self._order.epoch} was deleted", file=EPOCHS)
        if newest != self._order.epoch:
            raise Fenced("another owner has the root", epoch=self._order.epoch, newest=newest)

    def _begin(self) -> None:
        """Take over the records of an earlier process, and remove the leases that it left."""
        begin_records(self._storage)
        for name in list_names(self._storage, READERS):
            if parse_reader(name) is not None and name.partition(".")[2].startswith(_LEASE):
                remove_marker(self._storage, f"{READERS}/{name}")
        records = {key_of(each): each for each in read_records(self._storage)}
        for changed in begin_again(self._order.jobs, records.values()):
            self._put(changed)
            records[key_of(changed)] = changed
        self._records = records
        self._read_ledger(read_tracker(self._storage).step, self._clock.monotonic())
        self._begun = True

    def _read_ledger(self, named: int | None, now: float) -> None:
        history = read_history(self._storage)
        self._saved = saved_since(self._storage, self._last_epoch())
        self._checkpoints, self._changed = history.ledger.checkpoints, True
        tracked = history.ledger.in_state(State.TRACKED)
        agreed = named is None or any(c.step == named for c in tracked)
        self._settled_at = named if agreed else None
        self._reads_in_vain = 0 if agreed else self._reads_in_vain + 1
        self._read_at = now + self._order.look_s * min(self._reads_in_vain, _SLOWEST_LOOK)

    def _last_epoch(self) -> int:
        """The epoch of the oldest of the jobs' last records: later ones may have been pruned since."""
        last: dict[str, int] = {}
        for of, name in self._records:
            last[name] = max(of.epoch, last.get(name, 0))
        return min(last.values(), default=self._order.epoch)

    def _settle(self) -> None:
        busy = self._busy.record if self._busy is not None else None
        found = settle(
            self._order.jobs, self._records.values(), self._checkpoints, busy, self._saved
        )
        self._changed = bool(found.put)
        for record in found.put:
            self._put(record)
        for record in found.removed:
            remove_record(self._storage, record)
            del self._records[key_of(record)]
        self._waiting = found.waiting
        self._absent = {key: n for key, n in self._absent.items() if key in self._records}

    def _put(self, record: JobRecord) -> None:
        """Make a record durable, and tell the trainer of an end or a failure."""
        self._changed = True
        stamped = record.model_copy(update={"at": self._clock.wall()})
        put_record(self._storage, stamped, self._tag)
        self._records[key_of(record)] = stamped
        failed = record.state is JobState.WAITING and bool(record.reason)
        if failed or record.state in (JobState.DONE, JobState.FAILED, JobState.MISSED):
            self._say(Told(stamped))

    # -------------------------------------------------------------------------------------- a job

    def _attend(self, now: float) -> None:
        if self._busy is None and self._begun:
            self._take_next(now)
        busy = self._busy
        if busy is None:
            return
        if busy.outcome is None and now >= busy.renew_at:
            self._renew(busy, now)
        if busy.outcome is None and busy.process is None and now >= busy.not_before:
            self._start(busy, now)
        if busy.outcome is None and busy.process is not None:
            self._watch(busy, now)
        if busy.outcome is not None:
            self._finish(busy, busy.outcome, now)

    def _take_next(self, now: float) -> None:
        """Lease the first that waits, then see in the journal that it is still tracked."""
        if not self._waiting:
            return
        record = self._waiting[0]
        self._leases += 1
        lease = ReaderLease(
            self._storage.root,
            record.step,
            layout=self._order.layout,
            storage=self._storage,
            nonce=f"{self._tag}-{self._leases}",
            visibility_timeout_s=0.0,  # the next turn looks again
        )
        try:
            lease.__enter__()
        except StepNotFoundError:
            self._waiting = ()
            self._note_absence(record, now)
            return
        except JournalCorrupt:
            raise
        except DamagedRoot as error:
            self._waiting = ()
            self._put(missed(record, error.message))
            return
        try:
            self._read_ledger(read_tracker(self._storage).step, now)
            found = self._checkpoints.get(record.of)
            there = found is not None and found.state is State.TRACKED
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        if not there:
            lease.__exit__(None, None, None)
            self._settle()
            return
        job = self._jobs[record.job]
        self._waiting = self._waiting[1:]
        self._busy = _Busy(job, record, lease, now + self._order.renew_s)

    def _note_absence(self, record: JobRecord, now: float) -> None:
        """A step without its directory is missed: at once if the journal agrees, else in the end."""
        key = key_of(record)
        self._absent[key] = self._absent.get(key, 0) + 1
        self._read_ledger(read_tracker(self._storage).step, now)
        found = self._checkpoints.get(record.of)
        if found is not None and self._absent[key] >= _LOOKS:
            self._put(missed(record, _GONE))

    def _start(self, busy: _Busy, now: float) -> None:
        record = begun(busy.record)
        self._put(record)
        busy.record = record
        busy.ends_at = now + busy.job.timeout_s
        try:
            busy.process = self._process_of(busy.job, record, busy.lease.path)
        except Exception as error:  # of the machine, or of the job's settings
            busy.outcome = after_attempt(record, busy.job, describe(error))

    def _process_of(self, job: Job, record: JobRecord, path: str) -> JobProcess:
        command, step = job.command, record.step
        function, program = (command, ()) if isinstance(command, str) else ("", command)
        arguments = tuple(with_placeholders(program, path, step))
        metrics = dict(self._checkpoints[record.of].metrics)
        call = Call(path, step, metrics, arguments, function)
        order = self._order
        variables = environment_of_job(os.environ, self._storage.root, job.environment)
        return JobProcess(call, variables, order.imports, order.cwd, order.ignored)

    def _renew(self, busy: _Busy, now: float) -> None:
        busy.renew_at = now + self._order.renew_s
        try:
            busy.lease.renew()
        except StepNotFoundError:  # rolled back, or found damaged
            if busy.process is not None:
                busy.process.kill()
            busy.process, busy.outcome = None, missed(busy.record, _WITHDRAWN)

    def _watch(self, busy: _Busy, now: float) -> None:
        assert busy.process is not None
        problem = busy.process.ended()
        if problem is None and now >= busy.ends_at:
            busy.process.kill()
            words = busy.process.last_words()
            problem = f"killed after {busy.job.timeout_s:g} s" + (f": {words}" if words else "")
        if problem is not None:
            busy.process, busy.outcome = None, after_attempt(busy.record, busy.job, problem)

    def _finish(self, busy: _Busy, outcome: JobRecord, now: float) -> None:
        self._put(outcome)
        busy.record, busy.outcome = outcome, None
        if outcome.state is JobState.WAITING:
            busy.not_before = now + pause_s(busy.job, outcome.begun)
            return
        self._busy = None
        self._look_at = 0.0
        busy.lease.__exit__(None, None, None)


def main() -> None:
    """Serve the trainer: the command line names the socket."""
    logging.disable()  # its output goes to /dev/null; the trainer is told of everything
    running: list[Supervisor] = []

    def kill_the_attempt() -> None:
        for group in (each.group for each in running):
            if group is not None:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    trainer = TrainersEnd(kill_the_attempt)
    be_considerate(_NICE)
    channel, listening = trainer.channel, True
    messages: list[Any] = []
    while listening and not messages:
        listening, messages = channel.receive(None)
    if not messages:
        return
    order: Order = messages[0]
    storage = PosixStorage.of_descriptor(order.root, channel.take_fds()[0])
    supervisor = Supervisor(storage, order, channel.send)
    running.append(supervisor)
    try:
        supervisor.serve(channel, messages[1:])
    except Fenced as error:
        supervisor.leave()
        channel.send(Trouble(describe(error)))
    except BaseException as error:
        supervisor.leave()
        channel.send(Trouble(describe(error)))
        raise
