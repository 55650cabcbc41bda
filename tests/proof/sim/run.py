"""A simulated run: jobs that follow one another on a root, and the damage in between.

``simulate(seed)`` runs it and judges it. At the end everything is healed: a last job must open the
root, resume from the acknowledged step, save, and leave nothing for the next recovery to do (I8).

Rules: everything is drawn from the seed. Most runs are small, some are large.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptfsm.core.config import CheckpointConfig, make_config
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.events import Event
from ckptfsm.core.layout import MEGATRON
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import BestN, EveryNSteps, KeepAll, LatestN, Policy
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms
from ckptfsm.testing.invariants import RootBroken
from ckptfsm.testing.simfs import SimStorage
from proof.coverage import Coverage
from proof.sim.damage import (
    damage_step,
    draw_meddling,
    meddle,
    plant_stray,
    spoil_journal,
)
from proof.sim.faults import Faults, draw_faults, draw_rate
from proof.sim.groups import start_controller
from proof.sim.job import LAYOUTS, Job, Op, Reader, draw_script
from proof.sim.people import Person
from proof.sim.site import Site
from proof.sim.watch import Watch
from proof.sim.world import SimulationFailed, Task, World

_SECOND_RECOVERY = 4  # of so many runs one: it costs another job
_LIMIT_S = 3000.0
_READER_S = 40.0
_SHORT_READER_S = 4.0  # a part of the time of a job
_LATE_S = 2.0
_AIMING_S = 0.05
_MEDDLED = 0.8  # how likely each thing is done to a root whose coordinator was struck
_JOBS = (1, 1, 1, 2, 2, 3)
POLICIES: tuple[Policy, ...] = (
    KeepAll(),
    LatestN(0),
    LatestN(1),
    LatestN(1),
    LatestN(2),
    EveryNSteps(2) | LatestN(1),
    BestN("loss", 1) | LatestN(1),
)
_TIMES = MappingProxyType(
    {
        "writer_timeout_s": 20.0,
        "busy_timeout_s": 60.0,
        "close_timeout_s": 60.0,
        "exit_timeout_s": 5.0,
        "effect_timeout_s": 30.0,
        "exchange_timeout_s": 90.0,
        "visibility_timeout_s": 3.0,
        "reader_timeout_s": _READER_S,
        "exchange_every": 3,
    }
)


@dataclass
class Run:
    """The result of a run. ``failure`` is None if every promise held.

    ``journals``: how many times the journal was replayed against the specification. ``replayed``: how
    many answers of a controller's workers came late or twice, by kind.
    """

    seed: int
    trace: str = ""
    calls: int = 0
    sim_seconds: float = 0.0
    saves: int = 0
    journals: int = 0
    failure: SimulationFailed | None = None
    tail: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    replayed: Counter[str] = field(default_factory=Counter)


def simulate(
    seed: int,
    *,
    aim: State | None = None,
    retention: Policy | None = None,
    coverage: Coverage | None = None,
    tail: int = 60,
    keep_tail: bool = False,
) -> Run:
    """Run one seed. ``retention`` is the policy under test; by default one is drawn per job.

    ``aim``: strike the coordinator while a checkpoint is in this state, and let rivals come or
    people meddle then, which many seeds together rarely do.

    Never raises for a broken promise: that is ``failure``, and ``tail`` has the last lines of the
    trace then (always, with ``keep_tail``).
    """
    coverage = coverage if coverage is not None else Coverage()
    scenario = Scenario(seed, retention, coverage)
    if aim is not None:
        scenario.take_aim(aim)
    world = scenario.site.world
    failure = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            world.run(scenario.main)
        except SimulationFailed as found:
            failure = found
    return Run(
        seed,
        world.trace_hash(),
        len(world.history),
        world.now,
        len(scenario.site.watch.ever_acknowledged),
        scenario.journals,
        failure,
        world.tail(tail) if failure is not None or keep_tail else [],
        coverage,
        scenario.site.replayed,
    )


class Scenario:
    """The jobs of one run, and the controller that starts and judges them."""

    def __init__(self, seed: int, retention: Policy | None, coverage: Coverage) -> None:
        world = World(seed)
        choose = world.random
        faults = draw_faults(choose)
        self.layout = choose.choice(("state", "state", *LAYOUTS))
        watch = Watch(world.disk, in_place=self.layout == "foreign")
        self.site = Site(world, watch, faults, coverage)
        self.site.switch = choose.choice((0.02, 0.1, 0.3, 0.6))
        self.site.latency_s = choose.choice((0.0, 0.02, 0.1))
        self.site.orphans = draw_rate(choose, 0.5)
        self.site.stale = choose.choice((0.0, 0.0, 0.3))
        self.site.uneven = choose.choice((0.0, 0.2))
        self.retention = retention
        self.large = choose.random() < 0.01
        self.rivals, self.jostling, self.takeovers = choose.random() < 0.15, 0.6, 0.7
        self.readers = choose.random() < 0.2
        self.reader_s = choose.choice((_SHORT_READER_S, _READER_S))
        self.failing = draw_rate(choose, 0.2, 0.4)
        self.hooks_raise = draw_rate(choose, 0.3)
        self.interrupts = draw_rate(choose, 0.5)
        self.outages = draw_rate(choose, 0.45)
        self.spoils = draw_rate(choose, 0.08)
        self.meddling = draw_meddling(choose)
        self.sent: list[Event] = []
        self.answers: list[bytes] = []
        self.numbers = 0
        self.journals = 0
        if choose.random() < 0.1:
            world.disk.capacity = choose.choice((40_000, 60_000, 90_000))
        world.disk.keeps_lost_data = choose.random() < 0.5
        if not self.rivals and choose.random() < 0.1:
            self.site.lag_s = _LATE_S
        waits = faults.slow + faults.hang + faults.pause
        self.site.patient = not waits and world.disk.capacity is None and not self.site.lag_s
        self.people = random.Random(f"people {seed}").random() < 0.2  # moves no other draw
        process = world.process("control", "control", role="controller")
        self.main: Task = world.spawn(process, "control", self._control)

    def take_aim(self, aim: State) -> None:
        """Let the coordinator be stopped until a rival came, or killed and the root meddled with."""
        choose, site = self.site.world.random, self.site
        site.aim, site.aim_after = aim.value, choose.choice((0, 1, 2, 2))
        site.aim_stops = self.rivals = choose.random() < 0.4
        self.jostling, self.takeovers = 1.0, 0.4
        # The job after a kill runs on another host, which may not see yet what was moved.
        late = aim in (State.PRUNABLE, State.FINALIZED) and not self.rivals
        site.lag_s, site.patient = _LATE_S if late else 0.0, False
        if aim is not State.PRUNABLE and choose.random() < 0.5:
            self.retention = KeepAll()  # the damaged step is never the only one
        one = choose.choice(tuple(self.meddling))
        self.meddling = dict.fromkeys((damage_step, plant_stray, one), _MEDDLED)
        self.spoils = _MEDDLED

    # --------------------------------------------------------------------------------- the jobs

    def _control(self) -> None:
        choose = self.site.world.random
        for _ in range(choose.choice(_JOBS) + 5 * self.large):
            job = self._start(self._job())
            rival = self._rival(job) if self.rivals and choose.random() < self.jostling else None
            for _ in range(3 * self.readers):
                self._start_reader()
            if self.people:
                self._start_person()
            self._interrupt(job)
            for running in (job, rival):
                if running is not None and not running.wait(_LIMIT_S):
                    self._report_hang(running)
            self._between()
        self._finish()

    def _start(self, job: Job) -> Job:
        return start_controller(job) if self.layout == "groups" else job.start()

    def _report_hang(self, job: Job) -> None:
        waiting = [task.name for task in job.tasks if not task.done]
        self.site.stop(SimulationFailed("I10", f"{', '.join(waiting)} did not end in {_LIMIT_S} s"))

    def _job(self, *, takeover: bool = False) -> Job:
        choose = self.site.world.random
        self.numbers += 1
        world_size = choose.choice((1, 1, 2, 2, 3)) if not self.large else 3
        length = 1 + choose.randrange(4) + 6 * self.large + 3 * bool(self.site.aim)
        return Job(
            self.site,
            self.numbers,
            world_size,
            self._config(choose, takeover),
            draw_script(choose, length, world_size, self.failing),
            choose.choice(("close", "close", "close", "abandon", "die")),
            self.layout,
            self._hosts(),
            self.site.chance(self.hooks_raise),
            self.sent,
            self.answers,
        )

    def _hosts(self) -> tuple[str, ...]:
        return ("a", "b") if self.site.lag_s else ("a",)

    def _config(self, choose: random.Random, takeover: bool) -> CheckpointConfig:
        return make_config(
            {
                **_TIMES,
                "reader_timeout_s": self.reader_s,
                "retention": self.retention or choose.choice(POLICIES),
                "on_busy": choose.choice(("wait", "wait", "skip", "raise")),
                "on_failure": choose.choice(("raise", "warn", 1)),
                "sync": choose.random() < 0.15,
                "agree_when_idle": True,
                "takeover": takeover,
            }
        )

    def _rival(self, first: Job) -> Job:
        """F12: a second job on the same root, sometimes with the right to take it over."""
        choose = self.site.world.random
        self.site.world.sleep(choose.random() * 4)
        while self.site.aim and not first.done:
            self.site.world.sleep(_AIMING_S)
        return self._start(self._job(takeover=choose.random() < self.takeovers))

    def _start_reader(self) -> None:
        choose = self.site.world.random
        self.numbers += 1
        name, delay_s = f"reader{self.numbers}", choose.random() * 2
        long = choose.random() < 0.3
        rounds, renewals = (2, 3) if long else (4, 0)
        within_s, host = 0.97 * self.reader_s, self._hosts()[-1]
        Reader(self.site, name, delay_s, within_s, host, rounds, renewals).start()

    def _start_person(self) -> None:
        self.numbers += 1
        name, delay_s = f"person{self.numbers}", self.site.world.random.random() * 3
        Person(self.site, name, delay_s, self._hosts()[-1]).start()

    def _interrupt(self, job: Job) -> None:
        """Sometimes the whole job, or one rank of it, is killed at some time."""
        choose = self.site.world.random
        if self.site.chance(self.interrupts):
            self.site.world.sleep(choose.random() * 6)
            living = [process for process in job.processes if process.alive]
            if living and not job.done:
                self.site.count("F2")
                whole = choose.random() < 0.5
                for process in living if whole else (choose.choice(living),):
                    self.site.kill(process)

    def _between(self) -> None:
        """The root as it was left must be right; then somebody may do something to it."""
        site = self.site
        try:
            site.judge_root()
        except RootBroken as broken:
            site.stop(broken)
        self._judge_journal()
        if site.chance(self.outages):
            site.count("F4")
            site.lose_power()
        meddle(site, self.meddling)
        if site.chance(self.spoils):
            self._refused()

    def _refused(self) -> None:
        """Some damage must be refused, and nothing changed by the attempt (F20, F34)."""
        site = self.site
        for process in site.world.processes:  # writes of orphans and people are not the attempt's
            if process.role in ("writer", "person"):
                site.world.kill(process)
        undo = spoil_journal(site)
        if undo is None:
            return
        before = _without_leases(site.world.disk.snapshot())
        site.spoiled = True
        rates, site.faults = site.faults, Faults()
        self.numbers += 1
        job = Job(site, self.numbers, 1, make_config(dict(_TIMES)), [], layout=self.layout)
        self._start(job).wait(_LIMIT_S)
        error = job.errors.get(0)
        site.check(isinstance(error, DamagedRoot), "I8", f"a spoiled journal is taken: {error}")
        same = _without_leases(site.world.disk.snapshot()) == before
        site.check(same, "I8", "a spoiled journal was refused, and something was changed")
        undo()
        site.spoiled, site.faults = False, rates

    # --------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Heal everything: the root must open, resume, save and prune, and be at rest then."""
        site, world = self.site, self.site.world
        site.faults.heal()
        site.aim = ""
        world.disk.capacity = None
        site.lag_s = site.stale = site.uneven = site.switch = 0.0
        world.sleep(_READER_S * 4)
        site.patient = True
        floor = site.watch.floor()
        saves = [Op("save", 0.0), Op("wait", 0.0)] * (1 + self._in_the_way())
        first = self._last_job([Op("restore", 0.0), *saves])
        if first is None:
            return
        fine = floor is None or first.opened[0] is not None
        site.check(fine, "I2", f"the last job found nothing, {floor} was acknowledged")
        newest = next(reversed(site.watch.ever_acknowledged), None)  # saved by this last job
        site.check(newest is not None, "I10", "nothing can be saved on a healed root")
        if world.random.randrange(_SECOND_RECOVERY) == 0:
            second = self._last_job([])
            assert second is not None
            open_decisions = [d for d in second.reports[0].decisions if d.actions]
            site.check(not open_decisions, "I8", f"a second recovery does {open_decisions}")
        self._judge_end(newest)

    def _in_the_way(self) -> int:
        """How many steps a save in place may be refused at, for half-written or damaged files there."""
        if self.layout != "foreign":
            return 0
        there = self.site.world.disk.snapshot()
        return sum(MEGATRON.parse_published(path) is not None for path in there)

    def _last_job(self, script: list[Op]) -> Job | None:
        """A job on a sound machine. None if no step that was in use is left whole."""
        self.numbers += 1
        config = make_config({**_TIMES, "retention": LatestN(1), "on_failure": "raise"})
        job = Job(self.site, self.numbers, 1, config, script, layout=self.layout)
        if not self._start(job).wait(_LIMIT_S):
            self._report_hang(job)
        error = job.errors.get(0)
        if isinstance(error, DamagedRoot) and self.site.watch.hopeless():
            return None
        self.site.check(error is None, "I8", f"the last job ended with {error}")
        return job

    def _judge_end(self, newest: int | None) -> None:
        site = self.site
        site.watch.meddled = False  # whatever somebody wrote, by now it was put right
        try:
            tracked = site.judge_root()
        except RootBroken as broken:
            site.stop(broken)
        site.check(tracked == newest, "I2", f"the tracker says {tracked}, not {newest}")
        self._judge_journal()

    def _judge_journal(self) -> None:
        """I11, also after damage: that looks like a torn tail, or was undone."""
        try:
            assert_journal_conforms(SimStorage(self.site.world.disk, "judge"))
        except JournalViolation as broken:
            self.site.stop(SimulationFailed("I11", str(broken)))
        self.journals += 1


def _without_leases(files: Mapping[str, object]) -> dict[str, object]:
    """The files that no reader outside the job changes."""
    return {path: what for path, what in files.items() if not path.startswith(".ckptfsm/readers")}
