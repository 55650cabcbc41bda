"""Two trainers that do what a history says, on the production code.

``SimTrainer``: the coordinator and the writers' code of several ranks on a simulated disk, where a
kill, a power failure and a full disk can be had. ``RealTrainer``: a whole manager on a real disk with
really forked writers, where processes matter.

Rules: a method per verb of ``model.PHRASES``; nothing of the protocol is written here. ``told`` is
the answer to the last action, ``show`` the view of a reader of the disk. ``judge`` raises if a
promise does not hold on disk at this moment.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes import FakeDriver, FakeRequest, ShiftedClock, fake_ports
from proof.coverage import Coverage

from ckptfsm.adapters.fork import Child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import SaveFailed, SaveRefused, StepNotFoundError
from ckptfsm.core.events import Event, ShardReported
from ckptfsm.core.layout import MANIFEST, MEGATRON, STAGING, TRACKER, TRASH, parse_attempt
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Identity, PartJob, RankJob, Storage, Written
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.core.retention import LatestN, Policy
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import PARTS, FakeJob, FakePart, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import launch_forked, write_rank
from fieldbugs.model import Action

RANKS = 2
TICK_S = 10.0
LIMIT_S = 20.0


def published_steps(storage: Storage) -> list[int]:
    """The steps under a published name, whatever is in them."""
    steps = (MEGATRON.parse_published(name) for name in storage.listdir(""))
    return sorted(step for step in steps if step is not None)


def has_manifest(storage: Storage, step: int) -> bool:
    return lookup(storage, f"{MEGATRON.published_name(step)}/{MANIFEST}") is not None


def show_root(storage: Storage) -> str:
    """``tracker 100; 100 complete, 200 staged``: a directory with our manifest is complete."""
    seen = read_tracker(storage)
    tracker = seen.step if seen.step is not None else {"missing": "-"}.get(seen.found, seen.found)
    found = [
        f"{step} {'complete' if has_manifest(storage, step) else 'partial'}"
        for step in published_steps(storage)
    ]
    try:
        attempts = [parse_attempt(name) for name in storage.listdir(STAGING)]
    except FileNotFoundError:
        attempts = []
    found += [f"{of.step} staged" for of in sorted(a for a in attempts if a is not None)]
    return f"tracker {tracker}; {', '.join(found) or 'nothing'}"


class Player(ABC):
    """The base of both trainers: a history's actions become method calls."""

    def __init__(self) -> None:
        self.told = ""
        self.coverage = Coverage()
        self.acknowledged: list[int] = []

    def do(self, action: Action) -> None:
        self.told = ""
        arguments = [x for x in (action.step, action.rank, action.who) if x not in (None, "")]
        getattr(self, action.verb)(*arguments)

    def show(self) -> str:
        said = f" [{self.told}]" if self.told else ""
        return show_root(self.reader()) + said

    def judge(self) -> None:
        check_root(self.reader(), max(self.acknowledged, default=None))
        assert_journal_conforms(self.reader())

    @abstractmethod
    def reader(self) -> Storage:
        """The root, as an onlooker sees it."""

    def close(self) -> None:
        """Give back what is outside of memory."""


# ------------------------------------------------------------------------------- on a simulated disk


class Job(FakeJob):
    """A fake job whose reports can wait, as they do between two polls."""

    def deliver(self, events: Sequence[Event]) -> None:
        self.coordinator.report(events)
        self.clock.sleep(TICK_S)
        self.coordinator.tick()
        self._listen()


class SimTrainer(Player):
    """See the module. Two ranks; ``life`` counts the processes. ``retention`` keeps one if not given.

    ``waiting`` are the reports of writers that no poll has delivered yet, ``refused`` the refusals
    that the trainer met, ``calls`` those of each rank's writers to the disk. ``held``,
    ``no_tracker``, ``no_shards`` and ``crash_before`` are the faults injected at the moment.
    """

    def __init__(
        self,
        *,
        parts: tuple[PartSpec, ...] = PARTS,
        only_shards_do_not_fit: bool = False,
        retention: Policy | None = None,
    ) -> None:
        super().__init__()
        self.retention = retention or LatestN(1)
        self.only_shards_do_not_fit = only_shards_do_not_fit
        self.disk = SimDisk()
        self.parts = parts
        self.hosts: tuple[str, ...] = ("node-0", "node-1")
        self.life = 0
        self.alive = False
        self.attempts: dict[int, AttemptId] = {}
        self.waiting: list[Event] = []
        self.calls: dict[int, list[FaultStorage]] = {}
        self.refused: list[SaveRefused] = []
        self.held: int | None = None
        self.no_tracker = False
        self.no_shards = False
        self.crash_before: Callable[[str, str], bool] | None = None
        self.report: RecoveryReport
        self.open()

    # ------------------------------------------------------------------------------ lives of a job

    def open(self, process: str = "") -> None:
        self.life += 1
        name = process or f"life{self.life}"
        storage = FaultStorage(SimStorage(self.disk, name), before=self._inject)
        self.job = Job(
            storage,
            ranks=RANKS,
            retention=self.retention,
            identity=Identity(self.hosts[0], self.life, f"boot:{self.life}", f"nonce-{self.life}"),
            acknowledged=self.acknowledged,
        )
        self.report = self.job.open()
        self.alive = True
        self.attempts = {}

    @property
    def resumed(self) -> int | None:
        """The step that the last start resumed from."""
        return self.report.latest_step

    def restart(self) -> None:
        if self.alive:
            self.job.close()
        self._end_processes()
        self.waiting = []
        self.no_tracker = False
        self.disk.capacity = None  # a person made room
        self.open()
        self.told = f"resumes from {self.resumed}" if self.resumed is not None else "starts at zero"

    def restart_at(self, step: int) -> None:
        """The operator asks for a step; the operator may be told of a refusal."""
        self.restart()
        try:
            self.job.coordinator.locate(step)
        except StepNotFoundError as error:
            self.told = f"refused: {type(error).__name__}"

    def kill(self) -> None:
        self._fault("F2")
        self._end_processes()

    def _end_processes(self) -> None:
        self.alive = False
        for process in list(self.disk.processes):
            self.disk.kill(process)

    def power(self) -> None:
        self._fault("F4")
        self.alive = False
        self.disk.crash("all_lost")

    def retry(self) -> None:
        """The loop raised; its process opens the root again. The reports of its writers come later."""
        self._fault("F11")
        self.job.coordinator.abandon()
        self.open(process=f"life{self.life}")
        self.told = f"resumes from {self.resumed}" if self.resumed is not None else "starts at zero"

    def place(self, hosts: tuple[str, ...]) -> None:
        """The scheduler says on which nodes the ranks run, whatever their names are."""
        self.hosts = hosts
        self.restart()
        self.told = ""

    # ---------------------------------------------------------------------------------- one save

    def save(self, step: int) -> None:
        try:
            of = self.job.request(step, self.parts)
        except SaveRefused as error:
            self.attempts.pop(step, None)
            self.refused.append(error)
            self.told = f"refused: {type(error).__name__}"
            return
        self.job.fork(of)
        self.attempts[step] = of

    def written(self, step: int) -> None:
        """Every rank writes; the last rank is the first to finish. No rank is told before a poll."""
        for rank in reversed(range(RANKS)):
            self._write(step, rank)

    def finalizes(self, step: int, rank: int) -> None:
        """A rank comes to its finalizers before the others: here it says that it has written."""
        mine = [e for e in self.waiting if isinstance(e, ShardReported) and e.rank == rank]
        self.waiting = [e for e in self.waiting if e not in mine]
        self.job.deliver(mine)

    def _write(self, step: int, rank: int) -> None:
        of = self.attempts.get(step)
        if of is None:
            self.told = "there is no such save"
            return
        self.waiting += self.write_rank(of, rank)

    def write_rank(self, of: AttemptId, rank: int) -> list[Event]:
        """The production writer of one rank; returns what it reports."""
        inner = SimStorage(self.disk, f"life{self.life}-writer{rank}")
        storage = FaultStorage(inner, before=self._before_write)
        self.calls.setdefault(rank, []).append(storage)
        parts = tuple(self.part(spec, of, rank) for spec in self.parts)
        job = RankJob(of, rank, RANKS, MEGATRON.working_dir(of, False), parts)
        done = write_rank(storage, job)
        return [ShardReported(of, name, rank, RANKS, size) for name, size, _ in done]

    def part(self, spec: PartSpec, of: AttemptId, rank: int) -> FakePart:
        return FakePart(spec.name, spec.directory, rank, fake_content(of, rank))

    def no_space(self, step: int) -> None:
        """Too little room: for anything, or for shards alone, where what is small still fits."""
        self._fault("F5")
        of = self.attempts[step]
        if self.only_shards_do_not_fit:
            self.no_shards = True
        else:
            self.disk.capacity = self.disk.used + 300
        for rank in range(RANKS):
            try:
                self.waiting += self.write_rank(of, rank)
            except OSError as error:
                self.told = f"failed: {errno.errorcode[error.errno or 0]}"
                self.job.fail(of, "writer_failed")
                break
        self.no_shards = False
        self.job.deliver([])

    def _before_write(self, index: int, method: str, path: str) -> None:
        if self.no_shards and method == "write" and path.endswith(".distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def no_quota(self) -> None:
        self._fault("F5")
        self.no_tracker = True

    def held_open(self, step: int) -> None:
        self._fault("F17")
        self.held = step

    def poll(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.job.deliver(waiting)

    def kill_in_poll(self) -> None:
        """SIGKILL at the first change of the tracker's bytes."""
        self.crash_before = lambda method, path: method == "write" and TRACKER in path
        try:
            self.poll()
        except ProcessDead:
            self.told = "killed"
            self._fault("F3")
        self.crash_before = None
        self.kill()

    # --------------------------------------------------------------------------------- the world

    def reader(self) -> Storage:
        return SimStorage(self.disk, "reader")

    def steps(self) -> list[int]:
        return published_steps(self.reader())

    def tracker(self) -> int | None:
        return read_tracker(self.reader()).step

    def _inject(self, index: int, method: str, path: str) -> None:
        if self.crash_before is not None and self.crash_before(method, path):
            raise ProcessDead(f"{method} {path}")
        if self.no_tracker and path.startswith(TRACKER) and method in ("open_exclusive", "write"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)
        if (
            self.held is not None
            and method == "rmdir"
            and path.startswith(f"{TRASH}/gone-{self.held}.")
        ):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    def _fault(self, number: str) -> None:
        busy = self.job.coordinator.ledger.in_flight() if self.alive else None
        self.coverage.fault(number, busy.state if busy is not None else None)


# -------------------------------------------------------------------- on a real disk, really forked


class LiveStep:
    """A trainer's step counter: code that keeps it instead of its value reads a later step."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class HeldPart(PartJob):
    """A part whose writer waits at a gate before its first byte."""

    def __init__(self, part: PartJob, gate: FifoGate) -> None:
        self.name, self.directory = part.name, part.directory
        self._part, self._gate = part, gate

    def write(self, storage: Storage, location: str) -> Written:
        self._gate.hold()
        return self._part.write(storage, location)


class RealTrainer(Player):
    """See the module. Writers wait at a gate until ``written`` if ``hold`` says so."""

    def __init__(
        self,
        root: Path,
        *,
        hold: bool = False,
        driver: FakeDriver | None = None,
        request: FakeRequest | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.root = root / "root"
        self.gate: FifoGate | None = None
        self.hold = hold
        self.driver = driver or FakeDriver()
        self.clock = ShiftedClock()
        self.children: list[Child] = []
        self.failures: list[SaveFailed] = []
        self.state: dict[str, Any] = {"weights": b"at the save"}
        self.live = LiveStep(0)
        self.manager: Manager
        self.handle: Any = None
        self.open()
        self._reader = PosixStorage(str(self.root), create=False)

    def open(self, **settings: Any) -> None:
        ports = fake_ports(self.root, driver=self.driver, clock=self.clock, launch=self._launch)
        config = make_config(
            {
                "retention": LatestN(1),
                "exit_timeout_s": 1.0,
                "close_timeout_s": LIMIT_S,
                "busy_timeout_s": LIMIT_S,
                **settings,
            }
        )
        self.manager = Manager(ports, config, (self._hear,))

    def _launch(self, storage: Storage, job: RankJob) -> Child:
        if self.gate is not None:
            job = replace(job, parts=tuple(HeldPart(part, self.gate) for part in job.parts))
        child = launch_forked(storage, job)
        self.children.append(child)
        return child

    def _hear(self, record: Any) -> None:
        if record.source is State.FINALIZED and record.dest is State.TRACKED:
            self.acknowledged.append(record.step)

    # --------------------------------------------------------------------------------- the verbs

    def save(self, step: int) -> None:
        self.live.value = step
        self.gate = FifoGate(self.root.parent / f"gate-{step}") if self.hold else None
        parts = {"state": self.request or self.state}
        self.handle = self.manager.save(self.live, parts=parts)  # type: ignore[arg-type]

    def train(self) -> None:
        self.live.value += 1
        self.state["weights"] = b"one step later"

    def written(self, step: int) -> None:
        assert self.gate is not None
        self.gate.open(LIMIT_S)
        self.children[-1].wait(LIMIT_S)

    def writer_dies(self, step: int) -> None:
        self.coverage.fault("F1", State.FORKED)
        os.kill(self.children[-1].pid, signal.SIGKILL)
        self.children[-1].wait(LIMIT_S)

    def poll(self) -> None:
        """Poll as a training loop does, until the save is settled; then let the clean-up end."""
        deadline = time.monotonic() + LIMIT_S
        while not self.handle.done:
            if time.monotonic() > deadline:
                raise AssertionError("I10: polling never settles the save")
            time.sleep(0.001)  # bounded by the deadline
            try:
                self.manager.poll()
            except SaveFailed as error:
                self._failed(error)
        self.manager.wait_until_finished(LIMIT_S)

    def leave(self) -> None:
        try:
            self.manager.close()
        except SaveFailed as error:
            self._failed(error)

    def restart(self) -> None:
        self.manager.abandon()
        self.open()
        latest = self.manager.latest_step()
        self.told = f"resumes from {latest}" if latest is not None else "starts at zero"

    def _failed(self, error: SaveFailed) -> None:
        self.failures.append(error)
        self.told = f"failed: {type(error).__name__}"

    # --------------------------------------------------------------------------------- the world

    def reader(self) -> Storage:
        return self._reader

    def judge(self) -> None:
        """Really written content is not ``check_root``'s: ``expect`` restores instead."""
        tracker = read_tracker(self.reader()).step
        if tracker is not None and not has_manifest(self.reader(), tracker):
            raise AssertionError(f"I2: the tracker names {tracker}, which is not complete")
        newest = max(self.acknowledged, default=None)
        if newest is not None and (tracker is None or tracker < newest):
            raise AssertionError(f"I2: {newest} was acknowledged, the tracker says {tracker}")

    def close(self) -> None:
        for child in self.children:
            child.kill()
        self.manager.abandon()
        self._reader.close_root()
