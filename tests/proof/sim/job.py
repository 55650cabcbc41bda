"""The programs of a simulated world: a training job of several ranks, and readers beside it.

Rules: a trainer only uses the public ``Manager``; all its ranks follow one script, drawn before the
job starts, as SPMD programs do. The expectations of a rank are checked where they arise; an error
that ends a rank ends its process, and its peers must notice (I10).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    DeadlineExceeded,
    Fenced,
    IllegalTransition,
    OutcomeUnknown,
    PollMissingWarning,
    RestoreFailed,
    RootBusy,
    SaveFailed,
    SaveRefused,
    StepNotFoundError,
    StorageError,
)
from ckptfsm.core.events import Event
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import OptionalPart
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.agent import Agent
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.session import Session
from ckptfsm.testing.invariants import RootBroken, check_directory
from proof.sim.ports import (
    WorldClock,
    WorldDriver,
    WorldGroup,
    WorldRequest,
    WorldTransport,
    world_ports,
)
from proof.sim.site import Site
from proof.sim.storage import WorldStorage
from proof.sim.world import Process, Task

_LOOKS, _LOST = 0.3, 0.1  # chances: of an agent's look in a step, and that its reports are lost
_STEP_S = 0.3
_GOES_ON = (SaveRefused, SaveFailed, StepNotFoundError)
_OPS = (
    ("save", 40),
    ("train", 14),
    ("wait", 7),
    ("again", 3),
    ("restore", 6),
    ("pin", 6),
    ("unpin", 4),
    ("delete", 5),
    ("rollback", 4),
    ("ask", 2),
    ("idle", 2),
)
_NAMES = tuple(name for name, _ in _OPS)
_WEIGHTS = tuple(weight for _, weight in _OPS)
LAYOUTS = ("state", "parts", "file", "foreign", "split", "optional", "groups")


@dataclass(frozen=True)
class Op:
    """A line of a script. ``number`` in [0, 1) belongs to the op; ``fails`` is (rank, call)."""

    name: str
    number: float
    fails: tuple[int, str] | None = None


def draw_script(choose: random.Random, length: int, world_size: int, failing: float) -> list[Op]:
    """The actions of a trainer, in order. ``failing``: how likely a rank fails in a line."""
    script = []
    for name in choose.choices(_NAMES, _WEIGHTS, k=length):
        fails = None
        if failing and choose.random() < failing:
            fails = (
                choose.randrange(world_size),
                choose.choice(("draft", "merge", "stage", "finalize")),
            )
        script.append(Op(name, choose.random(), fails))
    return script


@dataclass
class Job:
    """A run of a trainer: ``world_size`` processes that share a script.

    ``ending``: ``close``, ``abandon`` (an exception leaves the trainer) or ``die`` (the process just
    ends). After it, ``errors`` has what opening or leaving raised, by rank; ``opened`` the latest step
    found.
    """

    site: Site
    number: int
    world_size: int
    config: CheckpointConfig
    script: list[Op]
    ending: str = "close"
    layout: str = "state"
    hosts: tuple[str, ...] = ("a",)
    hooks_raise: bool = False
    sent: list[Event] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    errors: dict[int, CkptFsmError] = field(default_factory=dict)
    opened: dict[int, int | None] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)
    mail: list[Event] = field(default_factory=list)

    def start(self) -> Job:
        world = self.site.world
        group = WorldGroup(self.site, self.world_size, self.config.exchange_timeout_s)
        for rank in range(self.world_size):
            host = self.hosts[rank % len(self.hosts)]
            name = f"j{self.number}r{rank}"
            process = world.process(name, host, role="trainer")
            process.at_death = _leaver(group, rank)
            self.processes.append(process)
            trainer = Trainer(self, rank, process, group)
            self.tasks.append(world.spawn(process, name, trainer.main))
        return self

    @property
    def done(self) -> bool:
        return all(task.done for task in self.tasks)

    def wait(self, timeout_s: float) -> bool:
        """Wait (in simulated time) for all ranks to end."""
        deadline = self.site.world.now + timeout_s
        return all(
            self.site.world.join(task, max(0.0, deadline - self.site.world.now))
            for task in self.tasks
        )

    def kill(self) -> None:
        """SIGKILL of every rank."""
        for process in self.processes:
            self.site.kill(process)


def _leaver(group: WorldGroup, rank: int) -> Callable[[], None]:
    return lambda: group.leave(rank)


class Mail:
    """The mailbox of a job's agents. Some reports are lost."""

    def __init__(self, site: Site, letters: list[Event]) -> None:
        self._site, self._letters = site, letters

    def post(self, events: Sequence[Event]) -> None:
        if not self._site.chance(_LOST):
            self._letters += events

    def collect(self) -> list[Event]:
        found = list(self._letters)
        self._letters.clear()
        return found

    def close(self) -> None:
        """Letters may stay: nothing listens here."""


class Trainer:
    """A rank of a job."""

    def __init__(self, job: Job, rank: int, process: Process, group: WorldGroup) -> None:
        self.job = job
        self.site = job.site
        self.rank = rank
        self.process = process
        self.handles: list[SaveHandle] = []
        self.step = 0
        transport = WorldTransport(group, rank, process, job.sent)
        self.ports = world_ports(self.site, process, transport)
        self.manager: Session
        self._agent: Agent | None = None

    @property
    def newest(self) -> bool:
        """True if no other job has taken the root over."""
        watch = self.site.watch
        return watch.epoch_of(self.job.processes[0].name) == watch.newest_epoch

    @property
    def _fenced(self) -> bool:
        """True if this job took the root, and another one has taken it over since."""
        watch = self.site.watch
        return watch.epoch_of(self.job.processes[0].name) not in (0, watch.newest_epoch)

    def main(self) -> None:
        """The whole life of the process; it ends with it, whatever happened."""
        try:
            self._live()
        except CkptFsmError as error:
            self._note_error(error)
        self.site.kill(self.process)

    def _note_error(self, error: CkptFsmError) -> None:
        self.site.world.note(self.process.name, "ERROR", type(error).__name__, error.message)
        bug = isinstance(error, IllegalTransition)
        self.site.check(not bug, "I11", f"{self.process.name}: {error}")
        self.job.errors[self.rank] = error

    def _live(self) -> None:
        site, floor = self.site, self.site.watch.floor()
        left = self._what_is_left() if self.rank == 0 else ()
        others, epoch = self._others(), site.watch.newest_epoch
        met = site.watch.state_in_flight()
        try:
            self.manager = self._open()
        except DamagedRoot as error:
            excused = site.spoiled or self._fenced or site.watch.hopeless()
            site.check(excused, "I8", f"{self.process.name} cannot open: {error}")
            raise
        except RootBusy as error:
            if self.rank == 0:
                excused = others or self._others() or site.watch.newest_epoch != epoch
                site.check(excused, "I8", f"nobody has the root, and {self.process.name}: {error}")
                site.count("F12")
                if self._is_named(error):
                    site.count("F32")
            raise
        for fault, state in left:
            site.count(fault, state)
        if self.rank == 0 and self.job.config.takeover:
            site.count("F12", met)
        manager = self.manager
        self.job.opened[self.rank] = manager.latest_step()
        self.job.reports.append(manager.recovery)
        self._check_latest(floor)
        self.step = manager.latest_step() or 0
        try:
            for op in self.job.script:
                self._do(op)
            self._leave()
        except CkptFsmError as error:
            self._note_error(error)
            self._check_patience(error)
            manager.abandon()

    def _others(self) -> bool:
        """True if a process of another job lives that may have the root: no writer may."""
        living = (p for p in self.site.world.processes if p.role == "trainer" and p.alive)
        return any(process not in self.job.processes for process in living)

    def _is_named(self, busy: RootBusy) -> bool:
        """True if the refusal says which living process to stop; an opening has no name yet."""
        living = (p for p in self.site.world.processes if p.role == "trainer" and p.alive)
        named = (busy.host, busy.pid)
        return any((p.host, p.pid) == named for p in living if p not in self.job.processes)

    def _what_is_left(self) -> list[tuple[str, str]]:
        """The things that this start meets: checkpoints (F26), a deletion (F17), writers without
        trainer (F29)."""
        site = self.site
        model = site.watch.models.get(site.watch.newest_epoch)
        writers = [p for p in site.world.processes if p.role == "writer" and p.alive]
        left = []
        if model is not None and model.steps("tracked"):
            left.append("F26")
        if model is not None and model.steps("prunable"):
            left.append("F17")
        if any(p.parent is not None and not p.parent.alive for p in writers):
            left.append("F29")
        return [(fault, site.watch.state_in_flight()) for fault in left]

    def _open(self) -> Session:
        return Manager(self.ports, self.job.config, (self._hook,))

    def _check_latest(self, floor: int | None) -> None:
        """I2: steps acknowledged before the start are there, unless a person changed them since."""
        now = self.site.watch.floor()
        expected = floor if now is not None and floor is not None and now >= floor else now
        latest = self.manager.latest_step()
        fine = expected is None or (latest is not None and latest >= expected) or not self.newest
        self.site.check(fine, "I2", f"{self.process.name} resumes from {latest}, not {expected}")

    def _check_patience(self, error: CkptFsmError) -> None:
        """I10: on a disk that answers, nothing takes so long."""
        late = isinstance(error, DeadlineExceeded) and self.site.patient
        self.site.check(not late, "I10", f"{self.process.name}: {error}")

    def _leave(self) -> None:
        ending = self.job.ending
        if ending == "close":
            self.manager.close()
            undone = [h for h in self.handles if not h.done]
            self.site.check(not undone, "I10", f"closed, but {undone} is not done")
        elif ending == "abandon":
            if any(not h.done for h in self.handles):
                self.site.count("F25")
            self.manager.abandon()

    def _hook(self, record: TransitionRecord) -> None:
        """The user's hook: it is told of moves; sometimes it raises (F24)."""
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            try:
                self.site.watch.acknowledge(self.job.processes[0].name, record.step)
            except RootBroken as broken:
                self.site.stop(broken)
        if self.job.hooks_raise:
            self.site.count("F24")
            raise RuntimeError("a user's hook")

    # ------------------------------------------------------------------------------------- ops

    def _do(self, op: Op) -> None:
        if op.fails is not None and op.fails[0] == self.rank:
            self._fail_at(op.fails[1])
        work = getattr(self, f"_op_{op.name}")
        try:
            work(op.number)
        except _GOES_ON as error:
            self._goes_on(error)
        except StorageError as error:
            if isinstance(error, OutcomeUnknown) or op.name == "restore":
                raise
            self._goes_on(error)

    def _fail_at(self, call: str) -> None:
        """F31: this rank fails in the middle of a call of all."""
        driver = self.ports.driver
        assert isinstance(driver, WorldDriver)
        driver.strike(call)

    def _goes_on(self, error: CkptFsmError) -> None:
        self.site.world.note(self.process.name, "REFUSED", type(error).__name__, error.message)

    def _state(self, step: int) -> dict[str, Any]:
        return {"step": step, "token": f"{self.job.number}.{self.rank}"}

    def _op_save(self, number: float) -> None:
        self._save(max(self.step, self.manager.latest_step() or 0) + 1 + int(number * 3), number)

    def _op_again(self, number: float) -> None:
        """F15: the same step, or one before. A tracked step is refused, a failed one tried again."""
        watch, step = self.site.watch, max(self.step - int(number * 2), 0)
        stood, state = self._standing(step), watch.state_in_flight()
        try:
            handle = self._begin(step, number)
        except SaveRefused:
            if stood == "tracked" and self.rank == 0 and self.newest:
                self.site.count("F15", state)
            raise
        if self.newest and not handle.skipped:
            again = stood == "tracked"
            self.site.check(not again, "I1", f"step {step} is tracked, and is saved once more")
            if stood == "failed" and self.rank == 0:
                self.site.count("F15", state)
        self._train(1 + int(number * 4))

    def _standing(self, step: int) -> str:
        """The words of the journal about earlier saves of ``step``: tracked, failed, or nothing to
        tell."""
        watch = self.site.watch
        model = watch.models.get(watch.newest_epoch)
        if model is None or not self.newest or step in watch.outside():
            return ""
        if model.of_step(step, "tracked"):
            return "tracked"
        flying = model.steps("requested", "forked", "shards_written", "finalized")
        return "failed" if not flying and model.of_step(step, "failed", "discarded") else ""

    def _save(self, step: int, number: float) -> None:
        self._begin(step, number)
        self._train(1 + int(number * 4))

    def _begin(self, step: int, number: float) -> SaveHandle:
        state = self._state(step)
        self.step = step
        if self.handles and not self.handles[-1].done and self.rank == 0:
            self.site.count("F22")
        handle = self._save_parts(step, state, {"loss": 1.0 + number})
        state["step"] = -1  # training goes on and changes it
        self.handles.append(handle)
        return handle

    def _save_parts(
        self, step: int, state: dict[str, Any], metrics: dict[str, float]
    ) -> SaveHandle:
        manager, layout = self.manager, self.job.layout
        assert isinstance(manager, Manager)
        if layout == "state":
            return manager.save(step, state, metrics=metrics)
        if layout == "foreign":
            request = WorldRequest(b"", state=state)
            return manager.save(step, parts={"state": request}, metrics=metrics)
        own = f"tokens of rank {self.rank}".encode()  # the first rank's are kept
        second: Any = own if layout == "file" else dict(state)
        if layout == "optional":
            second = OptionalPart(second)
        elif layout == "split" and self.rank == 0 and self.job.world_size > 1:
            second = None  # the other ranks have it
        return manager.save(step, parts={"state": state, "extra": second}, metrics=metrics)

    def _op_train(self, number: float) -> None:
        self._train(1 + int(number * 8))

    def _train(self, count: int) -> None:
        for _ in range(count):
            self.site.world.sleep(_STEP_S * (0.5 + self.site.world.random.random()))
            if self.site.chance(_LOOKS):
                self._look()
            self._poll()

    def _look(self) -> None:
        """The agent's look, outside of the rounds: its thread has no turns of its own here."""
        share = self.manager._share
        if self._agent is None:
            mailbox = Mail(self.site, self.job.mail)
            report = self.manager._client.report if self.manager.rank == 0 else None
            self._agent = Agent(
                self.ports.clock, mailbox, report, self.manager._participant.display.look
            )
        if self._agent._writer is not share.writer:
            self._agent.watch(share.writer)
        self._agent._look()

    def _poll(self) -> None:
        try:
            self.manager.poll()
        except _GOES_ON as error:
            self._goes_on(error)

    def _op_idle(self, number: float) -> None:
        """F28: a trainer that saves and does not poll; it is told so once, with the step."""
        step = max(self.step, self.manager.latest_step() or 0) + 1
        handle = self._begin(step, number)
        self.site.world.sleep(_STEP_S * (1 + number * 8))
        if not handle.done:
            limit = self.job.config.poll_warning_steps
            self.site.check(not self._warned(step + limit - 1), "I10", "warned of polls too early")
            told = [text for text in self._warned(step + limit) if f"step {step} " in text]
            self.site.check(len(told) == 1, "I10", f"nobody polls after step {step}: told {told}")
            if self.rank == 0 and self.newest:
                self.site.count("F28")
        self._train(1 + int(number * 4))

    def _warned(self, step: int) -> list[str]:
        """The warning about missing polls when ``step`` is asked for. No other task runs meanwhile."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.manager.should_save(step)
        return [str(w.message) for w in said if w.category is PollMissingWarning]

    def _op_wait(self, number: float) -> None:
        self.manager.wait_until_finished()

    def _op_ask(self, number: float) -> None:
        """A save that is asked for by one rank and agreed on by all."""
        if self.rank == 0:
            self.manager.request_save()
        for _ in range(4):
            self._train(1)
            if self.manager.should_save(self.step + 1):
                self._save(max(self.step, self.manager.latest_step() or 0) + 1, number)
                return

    def _pick(self, number: float) -> int | None:
        steps = self.manager.all_steps()
        return steps[int(number * len(steps))] if steps else None

    def _op_pin(self, number: float) -> None:
        step = self._pick(number)
        if step is not None:
            self.manager.pin(step, "simulated")

    def _op_unpin(self, number: float) -> None:
        step = self._pick(number)
        if step is not None:
            self.manager.unpin(step)

    def _op_delete(self, number: float) -> None:
        step = self._pick(number)
        if step is not None:
            self.manager.delete(step)

    def _op_rollback(self, number: float) -> None:
        step = self._pick(number)
        if step is not None:
            self.manager.rollback(step)
            self.step = step
            self.site.check(
                self.manager.latest_step() == step, "I2", f"rolled back to {step}, not there"
            )

    def _op_restore(self, number: float) -> None:
        floor = self.site.watch.floor()
        template: Mapping[str, Any] = {"step": None, "token": None}
        assert isinstance(self.manager, Manager)
        try:
            restored = self.manager.restore(parts={"state": template})
        except (Fenced, OutcomeUnknown, RestoreFailed):
            raise
        except DamagedRoot as error:
            excused = self._fenced or self.site.watch.hopeless()
            self.site.check(excused, "I2", f"{self.process.name}: {error}")
            raise
        if restored is None:
            fine = floor is None or self.site.watch.floor() is None or not self.newest
            self.site.check(fine, "I8", f"nothing to restore, {floor} was acknowledged")
            return
        state = restored.parts["state"]
        fine = state["step"] == restored.step and state["token"].endswith(f".{self.rank}")
        self.site.check(fine, "I5", f"step {restored.step} restored as {state}")
        self._check_latest(floor)


@dataclass
class Reader:
    """F27: an evaluator in a separate process: leases a step and reads every file of it.

    ``renew_within_s``: how long it may be silent. ``renewals``: how often it renews a lease, and reads
    once more at the end.
    """

    site: Site
    name: str
    delay_s: float
    renew_within_s: float
    host: str = "a"
    rounds: int = 4
    renewals: int = 0
    leases: int = 0

    def start(self) -> Reader:
        process = self.site.world.process(self.name, self.host, role="reader")
        self.site.world.spawn(process, self.name, lambda: self._main(process))
        return self

    def _main(self, process: Process) -> None:
        world = self.site.world
        storage = WorldStorage(self.site, process)
        for _ in range(self.rounds):
            world.sleep(world.random.random() * self.delay_s)
            try:
                listed = storage.listdir("")
                names = [n for n in listed if n.startswith("iter_") and n[5:].isdigit()]
                if names:  # mostly the oldest: it is the next to be pruned
                    index = world.random.randrange(len(names)) if world.random.random() < 0.3 else 0
                    self._read(storage, int(names[index][5:]))
            except (OSError, CkptFsmError) as error:  # told, whatever it is: a reader may give up
                world.note(self.name, "GAVE UP", type(error).__name__)
            finally:
                self.site.watch.returned(self.name)
        self.site.kill(process)

    def _read(self, storage: WorldStorage, step: int) -> None:
        world, watch = self.site.world, self.site.watch
        asked = world.now
        self.leases += 1
        nonce = f"{self.name}-{self.leases}"
        clock = WorldClock(self.site, storage.owner)
        lease = ReaderLease("/sim", step, storage=storage, nonce=nonce, clock=clock)
        with lease:
            self.site.count("F27")
            self._hold(step, asked)
            self._look(storage, step)
            for _ in range(self.renewals):
                world.sleep(self.renew_within_s * (0.5 + 0.4 * world.random.random()))
                asked = world.now
                lease.renew()
                self._hold(step, asked)
            if self.renewals:
                self._look(storage, step)
            world.sleep(world.random.random() * self.delay_s)
            watch.returned(self.name)

    def _hold(self, step: int, asked: float) -> None:
        """The reader was told that the step is there. A step that it asked for may count from that
        moment on."""
        try:
            self.site.watch.granted(self.name, step, asked + self.renew_within_s)
        except RootBroken as broken:
            self.site.stop(broken)

    def _look(self, storage: WorldStorage, step: int) -> None:
        """Loud is allowed (it was moved, or the disk is sick); silently wrong is not."""
        watch = self.site.watch
        if step in watch.outside():
            return
        try:
            check_directory(storage, f"iter_{step:07d}")
        except RootBroken as broken:
            if step in watch.outside() or isinstance(broken.__cause__, OSError):
                self.site.world.note(self.name, "UNREADABLE", str(broken))
            else:
                self.site.stop(broken)
