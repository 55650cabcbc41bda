"""A follower that runs its tasks for each tracked checkpoint, with retries and a record.

Each task has a queue of its own, and takes one checkpoint at a time. ``core.jobs`` has all decisions,
among them the order and the queue. Each checkpoint ends as done, failed or missed, and ``tell`` gets it,
at least once: an attempt without a record of its end is made again.

A record is durable before the state that it names begins. So a crash after the lease leaves a lease that
the next runner removes, and a crash after the record leaves an attempt that counts. A lease is held from
the first attempt until the last one's record is durable.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.spawn import Channel
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import CkptFsmError, Fenced, StepNotFoundError, StorageError, describe
from ckptfsm.core.jobs import (
    Key,
    Task,
    after_attempt,
    begin_again,
    begun,
    given_back,
    is_there,
    key_of,
    missed,
    pause_s,
    settle,
    waits_again,
)
from ckptfsm.core.layout import (
    EPOCHS,
    LAYOUTS,
    OWN,
    READERS,
    LayoutName,
    parse_attempt,
    parse_reader,
)
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Storage, Unfit
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.journal import History, saved_since
from ckptfsm.disk.ownership import newest_epoch
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.trash import remove_marker
from ckptfsm.follow.follower import Follower

_AFTER_TROUBLE = 5  # times look_s
_LEASES = f"{OWN}job-"  # begins the nonces of its leases
_WITHDRAWN = "its checkpoint was withdrawn while it ran"


class Attempt(Protocol):
    """An attempt that was begun: a process, as a rule."""

    def ended(self) -> str | None:
        """None while it runs; then "" for success, or the reason. Raises ``Unfit``."""

    def watched(self) -> list[int]:
        """Descriptors that can be read once there is something to do."""

    def kill(self) -> str:
        """Kill it, and wait for its end. Returns its last words."""


class Work(Protocol):
    """What is done with a checkpoint."""

    def begin(self, record: JobRecord, checkpoint: Checkpoint, path: str) -> Attempt:
        """Begin an attempt for the checkpoint at ``path``. An error fails it."""


class Records(Protocol):
    """The records, which survive this process."""

    def begin(self) -> list[JobRecord]:
        """The records of an earlier run, in no order."""

    def put(self, record: JobRecord) -> None: ...
    def remove(self, record: JobRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The settings of a runner.

    ``renew_s``: seconds between two renewals of the leases. ``look_s``: between two looks at the root.
    """

    epoch: int
    layout: LayoutName
    tasks: tuple[Task, ...]
    renew_s: float
    look_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Stop:
    """The owner closes: end after all that waits, at the latest in ``drain_s``."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error that delays the work. The same error is told once."""

    words: str


Message = JobRecord | Trouble  # a record: an attempt failed, or a task ended


@dataclass(slots=True)
class _Busy:
    """A task that runs, or waits for its next attempt.

    ``outcome``: the record to put when the attempt has ended.
    """

    task: Task
    record: JobRecord
    attempt: Attempt | None = None
    not_before: float = 0.0
    ends_at: float = 0.0
    outcome: JobRecord | None = None


class Runner(Follower):
    """Runs ``work``, a small step at each ``turn``. ``tell`` takes the messages for the owner."""

    def __init__(
        self,
        storage: Storage,
        plan: FollowPlan,
        work: Work,
        tell: Callable[[Message], object],
        records: Records,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock or SystemClock())
        self._storage = storage
        self._plan = plan
        self._work = work
        self._tell = tell
        self._store = records
        self._tasks = {task.name: task for task in plan.tasks}
        self._begun = False
        self.records: dict[Key, JobRecord] = {}
        self._checkpoints: Mapping[AttemptId, Checkpoint] = {}
        self._saved: set[AttemptId] = set()
        self._waiting: tuple[JobRecord, ...] = ()
        self._held: dict[AttemptId, ReaderLease] = {}
        self._renew_at = 0.0
        self._busy: dict[str, _Busy] = {}  # by the name of the task
        self._again_at: dict[Key, float] = {}  # of those that hold their step and have failed
        self._look_at = 0.0
        self._trouble = self._told = ""
        self._changed = True  # the ledger or a record, since the last decision

    # ------------------------------------------------------------------------------------ the loop

    @property
    def idle(self) -> bool:
        """True if nothing runs or waits, as the last look showed."""
        return self._begun and not self._busy and not self._waiting and not self._trouble

    def serve(self, channel: Channel, messages: Sequence[object] = ()) -> None:
        """Work until the owner says ``Stop``, or another one has the root. ``messages`` came earlier."""
        try:
            self._serve(channel, messages)
        except BaseException as error:
            self.leave()
            self.refuse(error)
            if not isinstance(error, Fenced):
                raise

    def _serve(self, channel: Channel, messages: Sequence[object]) -> None:
        until: float | None = None
        listening = True
        while True:
            for message in messages:
                if isinstance(message, Stop):
                    until = self._clock.monotonic() + message.drain_s
                    self._look_at, self._settled = 0.0, None
            if not listening and until is None:  # the owner was killed: the attempt counts
                self.leave()
                return
            if until is not None and (not listening or self._clock.monotonic() >= until):
                break
            self.turn()
            if until is not None and self.idle:
                break
            self._wait(channel, until)
            listening, messages = channel.receive(0)
        self.end()

    def turn(self) -> None:
        """Look at the root if that is due, and attend to what runs."""
        now = self._clock.monotonic()
        try:
            if now >= self._look_at:
                self._look_at, self._trouble = now + self._plan.look_s, ""
                self._look()
            if self._begun:
                self._attend(now)
        except Fenced:
            raise
        except (OSError, CkptFsmError) as error:
            self.refuse(error)
        if not self._trouble:
            self._told = ""

    def end(self) -> None:
        """Kill the attempts that run; their checkpoints wait for the next owner."""
        for busy in self._busy.values():
            _kill(busy)
        for busy in self._busy.values():
            record = busy.outcome or given_back(busy.record)
            self.records[key_of(record)] = record
            self._store.put(record)
        self.leave()

    def leave(self) -> None:
        """Kill the attempts that run, and let go of all steps. The records are another owner's."""
        while self._busy:
            _kill(self._busy.popitem()[1])
        with ExitStack() as leases:  # each, also if others raise
            while self._held:
                leases.push(self._held.popitem()[1])

    def _wait(self, channel: Channel, until: float | None) -> None:
        times = [self._look_at, *([self._renew_at] if self._held else [])]
        watched = [channel.fileno()]
        if until is not None:
            times.append(until)
        for busy in self._busy.values():
            if busy.attempt is not None:
                times.append(busy.ends_at)
                watched += busy.attempt.watched()
            elif busy.outcome is None:
                times.append(busy.not_before)
        waiting = select.poll()
        for fd in watched:
            waiting.register(fd, select.POLLIN)
        waiting.poll(1000 * max(0.0, min(times) - self._clock.monotonic()) + 1)

    def refuse(self, error: BaseException) -> None:
        self._look_at = max(self._look_at, self._after_trouble())
        self._trouble = describe(error)
        if self._trouble != self._told:
            self._told = self._trouble
            self._tell(Trouble(self._trouble))

    def _after_trouble(self) -> float:
        return self._clock.monotonic() + _AFTER_TROUBLE * self._plan.look_s

    # ------------------------------------------------------------------------------------- a look

    def _look(self) -> None:
        self._check_epoch()
        if not self._begun:
            self._take_over_records()
        self.look(self._storage)
        if self._changed:
            self._settle()

    def _check_epoch(self) -> None:
        newest, epoch = newest_epoch(self._storage), self._plan.epoch
        if newest == 0:  # the owner makes its file anew, or tells why it cannot
            raise StorageError(f"the file of epoch {epoch} was deleted", file=EPOCHS)
        if newest != epoch:
            raise Fenced("another owner has the root", epoch=epoch, newest=newest)

    def _take_over_records(self) -> None:
        """Take over the records of an earlier run, and remove the leases that it left."""
        records = {key_of(each): each for each in self._store.begin()}
        for name in list_names(self._storage, READERS):
            nonce = name.partition(".")[2]  # a caller's may be any that does not begin with OWN
            if parse_reader(name) is not None and nonce.startswith(_LEASES):
                remove_marker(self._storage, f"{READERS}/{name}")
        self.records = records
        self._read(self._storage, read_tracker(self._storage).step)
        for changed in begin_again(self._plan.tasks, records.values(), self._checkpoints):
            self._put(changed)
        self._begun = True

    def _read(self, storage: Storage, named: int | None) -> None:
        # Before the ledger, where all of these are then tracked, or gone.
        self._saved = saved_since(storage, self._last_epoch())
        super()._read(storage, named)

    def apply_history(self, history: History, named: int | None) -> bool:
        if history.ledger.checkpoints is not self._checkpoints:
            self._checkpoints, self._changed = history.ledger.checkpoints, True
        tracked = history.ledger.in_state(State.TRACKED)
        return named is None or any(c.step == named for c in tracked)

    def _last_epoch(self) -> int:
        """The epoch of the oldest of the tasks' last records: later ones may have been pruned since."""
        last: dict[str, int] = {}
        for of, name in self.records:
            last[name] = max(of.epoch, last.get(name, 0))
        return min(last.values(), default=self._plan.epoch)

    def _settle(self) -> None:
        found = settle(
            self._plan.tasks,
            self.records.values(),
            self._checkpoints,
            [busy.record for busy in self._busy.values()],
            self._saved,
            epoch=self._plan.epoch,
        )
        self._changed = bool(found.put)
        for record in found.put:
            self._put(record)
        for record in found.removed:
            self._store.remove(record)
            del self.records[key_of(record)]
        self._waiting = found.waiting
        for busy in self._busy.values():
            if not is_there(self._checkpoints.get(busy.record.of)):
                self._withdraw(busy)
        waiting = {each.of for each in self._waiting}
        for of in self._held.keys() - waiting - self._in_use():
            self._let_go(of)

    def _in_use(self) -> set[AttemptId]:
        return {busy.record.of for busy in self._busy.values()}

    def _put(self, record: JobRecord) -> None:
        """Make a record durable, and tell the owner of an end or a failure."""
        self._announce(self._record(record))

    def _record(self, record: JobRecord) -> JobRecord:
        self._changed = True
        stamped = record.model_copy(update={"at": self._clock.wall()})
        self._store.put(stamped)
        self.records[key_of(record)] = stamped
        return stamped

    def _announce(self, record: JobRecord) -> None:
        failed = record.state is JobState.WAITING and bool(record.reason)
        if failed or record.state in (JobState.DONE, JobState.FAILED, JobState.MISSED):
            self._tell(record)

    # ------------------------------------------------------------------------------------- leases

    def due(self) -> Sequence[Checkpoint]:
        wanted = [each for each in self._waiting if each.job not in self._busy]
        of_all = dict.fromkeys(each.of for each in wanted if each.of not in self._held)
        found = [self._checkpoints.get(of) for of in of_all]
        return [each for each in found if each is not None and each.state is State.TRACKED]

    def lease_on(self, storage: Storage, checkpoint: Checkpoint, late_s: float) -> ReaderLease:
        return ReaderLease(
            storage.root,
            checkpoint.step,
            layout=self._plan.layout,
            storage=storage,
            attempt=str(checkpoint.id),
            kept_by=_LEASES,
            visibility_timeout_s=late_s,
            clock=self._clock,
        )

    def pass_over(self, checkpoint: Checkpoint, why: str) -> None:
        for record in self._waiting:
            if record.of == checkpoint.id:
                self._put(missed(record, why))
        self._waiting = tuple(each for each in self._waiting if each.of != checkpoint.id)

    def _let_go(self, of: AttemptId) -> None:
        self._held.pop(of).__exit__(None, None, None)

    def _renew(self) -> None:
        self._settled = None  # the tracker may have come to the same step again
        for of, lease in list(self._held.items()):
            try:
                lease.renew()
            except StepNotFoundError:  # rolled back, or found damaged: the journal will tell
                if of not in self._in_use():
                    self._let_go(of)
                for busy in self._busy.values():
                    if busy.record.of == of:
                        self._withdraw(busy)
            except OSError as error:  # the others are to be renewed, too
                self.refuse(error)

    def _withdraw(self, busy: _Busy) -> None:
        if busy.outcome is None:
            _kill(busy)
            busy.attempt, busy.outcome = None, missed(busy.record, _WITHDRAWN)

    # ------------------------------------------------------------------------------------ attempts

    def _attend(self, now: float) -> None:
        if now >= self._renew_at:
            self._renew_at = now + self._plan.renew_s
            self._renew()
        self._try_again(now)
        self._take_up()
        for busy in list(self._busy.values()):
            self._attend_to(busy, now)

    def _try_again(self, now: float) -> None:
        """Let those wait again that have failed, hold their step, and have paused."""
        paused = [key for key, at in self._again_at.items() if now >= at]
        for key in paused:
            record = self.records.get(key)
            if record is not None and is_there(self._checkpoints.get(record.of)):
                self._put(waits_again(record))
            del self._again_at[key]
        if paused:
            self._settle()

    def _attend_to(self, busy: _Busy, now: float) -> None:
        rests = busy.outcome is None and busy.attempt is None
        if rests and now >= busy.not_before:
            busy.not_before = self._after_trouble()  # should the disk refuse it
            self._start(busy, now)
        if busy.outcome is None and busy.attempt is not None:
            self._watch(busy, busy.attempt, now)
        if busy.outcome is not None:
            self._finish(busy, busy.outcome, now)

    def _take_up(self) -> None:
        """Let each task that rests begin with the first that can be leased, or is by another task."""
        while (lease := self.take(self._storage)) is not None:
            of = parse_attempt(lease.attempt)
            assert of is not None
            self._held[of] = lease
            self._begin_with([of])
        self._begin_with(self._held)

    def _begin_with(self, leased: Collection[AttemptId]) -> None:
        for record in self._waiting:
            if record.job not in self._busy and record.of in leased:
                self._busy[record.job] = _Busy(self._tasks[record.job], record)
        taken = [busy.record for busy in self._busy.values()]
        self._waiting = tuple(each for each in self._waiting if each not in taken)

    def _start(self, busy: _Busy, now: float) -> None:
        path = self._path_of(busy.record)
        record = begun(busy.record)
        self._put(record)
        busy.record = record
        busy.ends_at = now + busy.task.timeout_s
        try:
            busy.attempt = self._work.begin(record, self._checkpoints[record.of], path)
        except Exception as error:  # of the machine, or of the task's settings
            busy.outcome = after_attempt(record, busy.task, describe(error))

    def _path_of(self, record: JobRecord) -> str:
        """Where its checkpoint is. Raises ``StorageError`` if another root is there by now."""
        name = LAYOUTS[self._plan.layout].published_name(record.step)
        return self._storage.absolute(name)

    def _watch(self, busy: _Busy, attempt: Attempt, now: float) -> None:
        try:
            problem = attempt.ended()
        except Unfit as error:
            busy.attempt, busy.outcome = None, missed(busy.record, str(error))
            return
        if problem is None and now >= busy.ends_at:
            words = attempt.kill()
            problem = f"killed after {busy.task.timeout_s:g} s" + (f": {words}" if words else "")
        if problem == "":
            try:
                self._path_of(busy.record)
            except StorageError as error:
                problem = f"it may have read another directory: {describe(error)}"
        if problem is not None:
            busy.attempt, busy.outcome = None, after_attempt(busy.record, busy.task, problem)

    def _finish(self, busy: _Busy, outcome: JobRecord, now: float) -> None:
        recorded = self._record(outcome)
        busy.record, busy.outcome = outcome, None
        self._look_at, self._settled = 0.0, None  # it may have reported metrics, for the next one
        if outcome.state is JobState.WAITING:
            busy.not_before = now + pause_s(busy.task, outcome.begun)
            self._announce(recorded)
            return
        if outcome.state is JobState.FAILED and busy.task.hold:
            self._again_at[key_of(outcome)] = now + pause_s(busy.task, outcome.begun)
        del self._busy[busy.task.name]
        try:
            if outcome.of not in self._in_use():
                self._let_go(outcome.of)
        finally:  # not before: the owner looks at once whether the step may go
            self._announce(recorded)


def _kill(busy: _Busy) -> None:
    if busy.attempt is not None:
        busy.attempt.kill()
