"""Crash at every storage call of a job, lose power in several ways, recover, and judge the root.

The job is the production coordinator and writer code on a simulated disk; in the script ``control``
it is a production controller that is fed by the workers of two groups. In ``control_late`` a part
fails, and answers of that attempt come late or twice while the next is in flight. Each test names
the bugs that it would catch. The disk is adversarial: bytes that were not fsynced may be lost, torn
or reordered. SIGKILL and errors at every call of the other scripts are ``proof.processes``, on a
real disk; here they are those of the two.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import fake_ports
from inline import InlineExecutor
from proof.real_jobs import NamingDriver
from proof.sim.answers import HandedOn
from sim_writers import CopiedWriter

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import CkptFsmError, SaveFailed
from ckptfsm.core.events import Event, Failed, ShardReported
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import ChildError, Driver, Identity, Outcome, Ports, RankJob, Storage
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.journal import read_history
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.tickets import GroupPart, GroupSave
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.harness import FakeJob, check_root
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.plain_files import FilesDriver
from ckptfsm.writers.rank_writer import write_rank

Script = Callable[[FakeJob], None]


def save_track_prune(job: FakeJob) -> None:
    """Three saves under LatestN(1): request, write, finalize, track, prune, all of it."""
    job.open()
    for step in (1, 2, 3):
        job.save(step)
    job.close()


def fail_and_retry(job: FakeJob) -> None:
    """A save, a failed attempt that is cleaned up, the same step again."""
    job.open()
    job.save(1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    job.fail(of)
    job.save(2)
    job.coordinator.tick()
    job.close()


def roll_back(job: FakeJob) -> None:
    """Three saves, back to the first, and on from there."""
    job.open()
    for step in (1, 2, 3):
        job.save(step)
    job.acknowledged.clear()  # from here on the target is promised
    job.coordinator.rollback(1)
    job.save(2)
    job.close()


def compose(job: FakeJob) -> None:
    """A composite whose optional part is written, and one whose optional part cannot be."""
    job.open()
    job.save(1, COMPOSITE)
    job.cannot = frozenset({"export"})
    job.save(2, COMPOSITE)
    job.close()


class InlineWriter(CopiedWriter):
    """A writer that has ended when it is launched; it dies with the job. See ``ports.Launch``."""

    def __init__(self, storage: Storage, job: RankJob) -> None:
        super().__init__()
        try:
            self._outcome = Outcome(0, write_rank(storage, job, count=self._count), complete=True)
        except OSError as error:
            self._outcome = Outcome(1, error=ChildError(str(error), str(error), "storage"))

    def poll(self) -> Outcome:
        return self._outcome

    def wait(self, timeout_s: float) -> Outcome:
        return self._outcome

    def kill(self, timeout_s: float) -> bool:
        return True


class JudgedTransport(LocalTransport):
    """The controller's transport, where what it hands on of its workers' answers is judged."""

    def __init__(self) -> None:
        self.handed_on = HandedOn()

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        self.handed_on.begin_round()
        return super().any_flags(flags)

    def gather(self, item: Any) -> list[Any] | None:
        assert not self.handed_on.problem_of(item)
        return super().gather(item)


class Controlled:
    """A controller and two groups of one worker each, on the disk and the clock of a job.

    ``answers`` are those of the workers, by step.
    """

    def __init__(self, job: FakeJob) -> None:
        self.job = job
        self.transport = JudgedTransport()
        self.answers: dict[int, list[Event]] = {}
        self.drivers = {name: NamingDriver() for name in ("actor", "critic")}
        self.workers = {
            name: BaseGroupWorker(self._ports(made)) for name, made in self.drivers.items()
        }
        self.controller = Controller(
            job.storage.root,
            dict.fromkeys(self.workers, 1),
            self._ask,
            ports=self._ports(FilesDriver()),
            hooks=[self._note],
            retention=job.retention,
            busy_timeout_s=20.0,
            close_timeout_s=20.0,
        )

    def _ports(self, driver: Driver) -> Ports:
        return fake_ports(
            self._storage,
            driver=driver,
            transport=self.transport if isinstance(driver, FilesDriver) else None,
            clock=self.job.clock,
            executor=InlineExecutor,
            identity=self._identity,
            launch=InlineWriter,
        )

    def _storage(self, create: bool) -> Storage:
        return self.job.storage

    def _identity(self) -> Identity:
        return self.job.identity

    def _ask(self, failed: tuple[AttemptId, ...]) -> list[Event]:
        return self._said([e for worker in self.workers.values() for e in worker.poll(failed)])

    def _said(self, answer: list[Event]) -> list[Event]:
        answer = pickle.loads(pickle.dumps(answer))  # as between processes
        self.transport.handed_on.said(answer)
        for event in answer:
            self.answers.setdefault(event.of.step, []).append(event)
        return answer

    def _note(self, record: TransitionRecord) -> None:
        self.transport.handed_on.note(record)
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            self.job.acknowledged.append(record.step)

    def begin(self, step: int) -> GroupSave:
        parts = {name: GroupPart(name) for name in self.workers}
        return self.controller.begin(step, {**parts, "data.pt": b"position %d" % step})

    def write(self, save: GroupSave) -> None:
        for name, ticket in save.tickets.items():
            self.controller.feed(
                self._said(self.workers[name].write(ticket, {"step": ticket.of.step}))
            )

    def save(self, step: int) -> None:
        save = self.begin(step)
        self.write(save)
        save.handle.wait()

    def fail(self, step: int) -> None:
        """A save of which the actor is written, and the disk takes one half of the critic."""
        self.drivers["critic"].failures["write"] = OSError(errno.EIO, "made-up")
        with contextlib.suppress(SaveFailed):
            self.save(step)
        del self.drivers["critic"].failures["write"]
        self.controller.wait_until_finished()

    def hear(self, step: int) -> None:
        """Repeat all answers for a step so far, and give them time to take effect."""
        self.controller.feed(pickle.loads(pickle.dumps(self.answers[step])))
        self.job.clock.sleep(1.0)
        self.controller.poll()


def control(job: FakeJob) -> None:
    """A controller with a file, and two groups that report to it: save, prune."""
    controlled = Controlled(job)
    for step in (1, 2):
        controlled.save(step)
    controlled.controller.close()


def control_late(job: FakeJob) -> None:
    """A part fails; at the next save its attempt is heard again, before it and among its answers."""
    hear_late(Controlled(job))


def hear_late(controlled: Controlled) -> None:
    controlled.save(1)
    controlled.fail(2)
    save = controlled.begin(3)
    for _ in range(2):  # also when the controller has forgotten the failed attempt
        controlled.hear(2)
    assert save.handle.state not in WRITTEN, "by nobody"
    controlled.write(save)
    for step in (3, 2, 3):
        controlled.hear(step)
    save.handle.wait()
    controlled.hear(3)
    controlled.controller.close()


COMPOSITE = (
    PartSpec("actor", directory="actor"),
    PartSpec("critic", directory="critic", ranks=(1,)),
    PartSpec("export", directory="export", optional=True),
)
SCRIPTS = {
    "save_track_prune": (save_track_prune, LatestN(1)),
    "fail_and_retry": (fail_and_retry, LatestN(2)),
    "roll_back": (roll_back, LatestN(5)),
    "compose": (compose, LatestN(1)),
    "control": (control, LatestN(1)),
    "control_late": (control_late, LatestN(1)),
}
CONTROLLED = ("control", "control_late")
WRITTEN = (State.SHARDS_WRITTEN, State.FINALIZED, State.TRACKED)
CODES = (errno.EIO, errno.ENOSPC, errno.ESTALE)
LOSSES = ("all_lost", "drawn")


def start(disk: SimDisk, name: str, retention: object, crash: int | None = None) -> FakeJob:
    storage = SimStorage(disk, name)
    hook = crash_at(crash) if crash is not None else None
    faulty = FaultStorage(storage, before=hook)
    return FakeJob(faulty, retention=retention, identity=Identity("sim", len(name), name, name))


def count_calls(script: Script, retention: object) -> int:
    job = start(SimDisk(), "count", retention)
    script(job)
    return len(job.storage.calls)


def lose_power(disk: SimDisk, loss: object) -> None:
    """``all_lost``, or a fate that a number draws."""
    disk.crash(random.Random(loss) if isinstance(loss, int) else loss)


def run_until(script: Script, job: FakeJob) -> None:
    try:
        script(job)
    except ProcessDead:
        pass


def recover_and_judge(disk: SimDisk, acknowledged: int | None, what: str) -> None:
    """Recover twice; nothing acknowledged is lost, and the second time nothing is left to do."""
    check_root(SimStorage(disk, "judge0"), acknowledged)
    job = start(disk, "second", LatestN(1))
    report = job.open()
    tracked = check_root(SimStorage(disk, "judge1"), acknowledged)
    assert report.latest_step == tracked, what
    assert not job.coordinator.ledger.in_state(*(State.REQUESTED, State.FORKED, State.FAILED)), what
    lose_power(disk, "all_lost")
    again = start(disk, "third", LatestN(1))
    report = again.open()
    assert [d for d in report.decisions if d.actions] == [], what
    assert report.latest_step == tracked, what
    next_step = (tracked or 0) + 10
    again.save(next_step)
    assert again.acknowledged == [next_step], what
    again.close()
    check_root(SimStorage(disk, "judge2"), next_step)
    read_history(SimStorage(disk, "judge3"))


def test_F11_F23_words_of_a_failed_attempt_are_heard_at_the_next_save() -> None:
    """Catches: a script without a part that is written, one that fails, or answers that come late."""
    controlled = Controlled(start(SimDisk(), "first", LatestN(1)))
    hear_late(controlled)
    said = [type(event) for event in dict.fromkeys(controlled.answers[2])]
    assert said.count(ShardReported) == said.count(Failed) == 1
    assert controlled.job.acknowledged == [1, 3]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_I2_I4_I8_power_loss_at_every_storage_call(name: str, loss: str) -> None:
    """F2, F3, F4, F33: catches a missing fsync, a tracker before its directory, a lost intent."""
    script, retention = SCRIPTS[name]
    total = count_calls(script, retention)
    assert total > 60
    for index in range(0, total, 5 if loss == "drawn" else 1):
        disk = SimDisk()
        job = start(disk, "first", retention, crash=index)
        run_until(script, job)
        lose_power(disk, index if loss == "drawn" else loss)
        recover_and_judge(disk, max(job.acknowledged, default=None), f"{name} call {index}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_I8_crash_in_the_middle_of_recovery(name: str) -> None:
    """F2, F17: recovery itself may be killed at any call and be done again."""
    script, retention = SCRIPTS[name]
    total = count_calls(script, retention)
    for index in range(0, total, 17):
        base = SimDisk()
        job = start(base, "first", retention, crash=index)
        run_until(script, job)
        lose_power(base, index)
        acknowledged = max(job.acknowledged, default=None)
        for inner in range(index % 4, 200, 4):
            disk = base.fork()
            again = start(disk, "recover", LatestN(1), crash=inner)
            run_until(lambda j: j.open(), again)
            finished = len(again.storage.calls) < inner
            lose_power(disk, inner)
            recover_and_judge(disk, acknowledged, f"{name} call {index}, recovery call {inner}")
            if finished:
                break


@pytest.mark.parametrize("name", CONTROLLED)
def test_I2_sigkill_at_every_storage_call(name: str) -> None:
    """F2: SIGKILL keeps what was written; the next start decides from it, also right after."""
    script, retention = SCRIPTS[name]
    for index in range(count_calls(script, retention)):
        disk = SimDisk()
        job = start(disk, "first", retention, crash=index)
        run_until(script, job)
        disk.kill("first")
        recover_and_judge(disk, max(job.acknowledged, default=None), f"call {index}")


@pytest.mark.parametrize("name", CONTROLLED)
def test_F5_F6_F8_an_error_at_every_storage_call(name: str) -> None:
    """An error at any call, of each kind in turn, ends typed or in a failed attempt; nothing is lost."""
    script, retention = SCRIPTS[name]
    for index in range(count_calls(script, retention)):
        code = CODES[index % len(CODES)]
        disk = SimDisk(keeps_lost_data=bool(index % 2))
        storage = FaultStorage(SimStorage(disk, "first"), before=fail_at(index, code))
        job = FakeJob(storage, retention=retention, identity=Identity("sim", 5, "first", "first"))
        try:
            script(job)
        except (CkptFsmError, OSError):
            pass
        disk.kill("first")
        recover_and_judge(disk, max(job.acknowledged, default=None), f"{code} at {index}")


# ------------------------------------------------------------------------------- folded segments
