"""A simulated job of one controller and groups of workers, each a separate process.

Rules: the controller is a trainer like any other (``job.Trainer``); only how it saves and restores
differs. Calls to workers are made up here: they may be answered late, twice, or not at all (see
``answers``), and a worker may be dead. A group that lost a worker is started anew, as an orchestrator
would.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import CkptFsmError, RestoreFailed
from ckptfsm.core.events import Event
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Ports
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.tickets import GroupPart
from ckptfsm.writers.plain_files import FilesDriver
from proof.sim.answers import HandedOn, Mail
from proof.sim.job import Job, Trainer
from proof.sim.ports import WorldDriver, WorldGroup, WorldTransport, world_ports
from proof.sim.site import Site
from proof.sim.world import Process, Task

GROUPS: Mapping[str, int] = {"actor": 2, "critic": 1}
_CALL_S = 30.0


class Call:
    """A call of a worker's method; ``answer`` waits for its result or error."""

    def __init__(self, worker: WorkerProcess, method: str, arguments: bytes) -> None:
        self.method = method
        self.arguments = arguments
        self.result: bytes | None = None
        self._worker = worker
        self._waiting: Task | None = None

    def answer(self) -> Any:
        """None if the worker is dead or does not answer."""
        world = self._worker.site.world
        deadline = world.now + _CALL_S
        while self.result is None:
            if not self._worker.process.alive or world.now >= deadline:
                return None
            self._waiting = world.current
            world.park(deadline - world.now)
        return pickle.loads(self.result)

    def wake(self) -> None:
        if self._waiting is not None:
            self._worker.site.world.wake(self._waiting)


class WorkerProcess:
    """A worker: takes calls one after the other, until it dies."""

    def __init__(self, site: Site, name: str, group: WorldGroup, rank: int, host: str) -> None:
        self.site = site
        self.process = site.world.process(name, host, role="trainer")
        self.process.at_death = self._leave
        self._group, self._rank = group, rank
        self._calls: deque[Call] = deque()
        transport = WorldTransport(group, rank, self.process, [])
        ports = world_ports(site, self.process, transport)
        assert isinstance(ports.driver, WorldDriver)
        self.driver = ports.driver
        self._worker = BaseGroupWorker(ports)
        self._task = site.world.spawn(self.process, name, self._serve)

    def call(self, method: str, *arguments: Any) -> Call:
        made = Call(self, method, pickle.dumps(arguments))
        self._calls.append(made)
        self.site.world.wake(self._task)
        return made

    def _leave(self) -> None:
        self._group.leave(self._rank)
        for call in self._calls:
            call.wake()

    def _serve(self) -> None:
        """An error of a call ends the worker: its group has lost a member."""
        while True:
            while not self._calls:
                self.site.world.park()
            call = self._calls[0]
            try:
                arguments = pickle.loads(call.arguments)
                call.result = pickle.dumps(getattr(self._worker, call.method)(*arguments))
            except CkptFsmError as error:
                self.site.world.note(
                    self.process.name, "ERROR", type(error).__name__, error.message
                )
                self.site.kill(self.process)
                return
            self._calls.popleft()
            call.wake()


class Groups:
    """The groups of one controller. ``generation`` counts how often workers were started."""

    def __init__(self, site: Site, prefix: str, timeout_s: float, hosts: tuple[str, ...]) -> None:
        self.site = site
        self.hosts = hosts
        self.workers: dict[str, list[WorkerProcess]] = {}
        self._prefix, self._timeout_s = prefix, timeout_s
        self._generation = 0
        for name in GROUPS:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the workers of a group, and end what is left of those before."""
        for worker in self.workers.get(name, ()):
            self.site.kill(worker.process)
        self._generation += 1
        group = WorldGroup(self.site, GROUPS[name], self._timeout_s)
        self.workers[name] = [
            WorkerProcess(
                self.site,
                f"{self._prefix}.{name}{self._generation}.{rank}",
                group,
                rank,
                self.hosts[rank % len(self.hosts)],
            )
            for rank in range(GROUPS[name])
        ]

    def incomplete(self) -> list[str]:
        return [n for n, ws in self.workers.items() if not all(w.process.alive for w in ws)]

    def end(self) -> None:
        for workers in self.workers.values():
            for worker in workers:
                self.site.kill(worker.process)


class JudgedTransport(WorldTransport):
    """The controller's transport, where the reports that it hands on are judged."""

    handed_on: HandedOn

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        self.handed_on.begin_round()
        return super().any_flags(flags)

    def gather(self, item: Any) -> list[Any] | None:
        if isinstance(item, list) and all(isinstance(event, Event) for event in item):
            problem = self.handed_on.problem_of(item)
            self._group.site.check(not problem, "I5", problem)
        return super().gather(item)


class ControllerTrainer(Trainer):
    """The controller's process: a trainer whose saves are written by workers."""

    manager: Controller

    def __init__(self, job: Job, process: Process) -> None:
        group = WorldGroup(job.site, 1, job.config.exchange_timeout_s)
        super().__init__(job, 0, process, group)
        self.mail = Mail(self.site, job.answers)
        transport = JudgedTransport(group, 0, process, job.sent)
        transport.handed_on = self.mail.handed_on
        made = world_ports(self.site, process, transport)
        self.ports = Ports(**{**_fields(made), "driver": FilesDriver()})
        self.groups = Groups(self.site, process.name, job.config.exchange_timeout_s, job.hosts)
        process.at_death = self.groups.end

    def _open(self) -> Controller:
        return Controller(
            "/sim",
            GROUPS,
            self._ask,
            self.job.config,
            hooks=(self._hook,),
            ports=self.ports,
        )

    def _hook(self, record: TransitionRecord) -> None:
        self.mail.note(record)
        super()._hook(record)

    def _fail_at(self, call: str) -> None:
        """F31: one worker fails in the middle of a call of all."""
        worker = self.site.world.random.choice(self.groups.workers["actor"])
        worker.driver.strike(call)

    def _ask(self, failed: tuple[AttemptId, ...]) -> list[Event]:
        """Ask every worker that lives; what arrives is another question."""
        site = self.site
        calls = [
            worker.call("poll", failed)
            for workers in self.groups.workers.values()
            for worker in workers
            if worker.process.alive
        ]
        events: list[Event] = []
        for call in calls:
            events += self.mail.deliver(call.answer() or ())
        for name in self.groups.incomplete():
            if site.chance(0.5):
                dead = [r for r, w in enumerate(self.groups.workers[name]) if not w.process.alive]
                self.manager.lost(name, dead, "its process is gone")
        return events

    def _save_parts(
        self, step: int, state: dict[str, Any], metrics: dict[str, float]
    ) -> SaveHandle:
        for name in self.groups.incomplete():
            self.groups.start(name)
        parts = {**{name: GroupPart(name) for name in GROUPS}, "data.pt": b"position"}
        save = self.manager.begin(step, parts, metrics=metrics)
        calls = [
            worker.call("write", ticket, {**state, "token": f"{name}.{rank}"})
            for name, ticket in save.tickets.items()
            for rank, worker in enumerate(self.groups.workers[name])
        ]
        for call in calls:
            self.manager.feed(self.mail.deliver(call.answer() or ()))
        return save.handle

    def _op_restore(self, number: float) -> None:
        floor = self.site.watch.floor()
        for name in self.groups.incomplete():
            self.groups.start(name)
        with self.manager.reading() as found:
            if found is None:
                fine = floor is None or self.site.watch.floor() is None or not self.newest
                self.site.check(fine, "I8", f"nothing to restore, {floor} was acknowledged")
                return
            template = {"step": None, "token": None}
            names = {part.name for part in found.parts} & set(GROUPS)
            calls = [
                (f"{name}.{rank}", worker.call("restore", found, name, template))
                for name in sorted(names)
                for rank, worker in enumerate(self.groups.workers[name])
            ]
            for token, call in calls:
                restored = call.answer()
                if restored is None:
                    raise RestoreFailed("a worker died while it loaded", step=found.step)
                state = restored.state
                fine = state["step"] == found.step and state["token"] == token
                self.site.check(fine, "I5", f"step {found.step} restored as {state}")
        self._check_latest(floor)


def _fields(ports: Ports) -> dict[str, Any]:
    return {name: getattr(ports, name) for name in ports.__slots__}


def start_controller(job: Job) -> Job:
    """Start a job of one controller and its groups."""
    process = job.site.world.process(f"j{job.number}c", job.hosts[0], role="trainer")
    job.processes.append(process)
    trainer = ControllerTrainer(job, process)
    job.processes += [w.process for ws in trainer.groups.workers.values() for w in ws]
    job.tasks.append(job.site.world.spawn(process, process.name, trainer.main))
    return job
