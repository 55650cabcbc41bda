"""Where a simulated run takes place: the world, what goes wrong in it, and who judges.

Rules: whatever strikes is counted with the state of the checkpoint in flight. A violation stops the
run where it is found: nothing of the code under test can swallow it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ckptfsm.core.lifecycle import State
from ckptfsm.testing.invariants import RootBroken, check_root
from ckptfsm.testing.simfs import ProcessDead, SimStorage
from proof.coverage import Coverage
from proof.sim.faults import Faults, can_strike, number_of
from proof.sim.late import LateNames
from proof.sim.watch import Watch
from proof.sim.world import Process, SimulationFailed, World

_SLOW_S = 2.0
_HANG_S = 40.0
_PAUSE_S = 60.0
_ORPHAN_S = 5.0


@dataclass
class Site:
    """The world, the judges and the faults of one run. ``switch``: how likely others run before a
    call,

    for ``latency_s`` at most if that is not 0; ``lag_s``: how late names are seen on other hosts, never
    with rivals, for a fence is a listing of ``epochs/`` that is current (I9 in specs/lifecycle.md);
    ``orphans``: how likely a writer outlives its trainer; ``stale``: how likely a report is late;
    ``uneven``: how likely one of a writer's parts is late, fails or is missing; ``spoiled``: the journal
    is damaged in a way that a start must refuse; ``aim``: the state in which the coordinator is struck,
    once, with so many checkpoints acknowledged before: stopped for a while, or killed.
    """

    world: World
    watch: Watch
    faults: Faults
    coverage: Coverage
    switch: float = 0.2
    latency_s: float = 0.0
    lag_s: float = 0.0
    orphans: float = 0.0
    stale: float = 0.0
    uneven: float = 0.0
    patient: bool = False
    spoiled: bool = False
    aim: str = ""
    aim_after: int = 0
    aim_stops: bool = False
    power_losses: int = 0

    def __post_init__(self) -> None:
        self.hidden, self.gone = LateNames(self.world), LateNames(self.world)
        self.replayed: Counter[str] = Counter()  # answers of workers: see ``answers``
        self.replaced: set[int] = set()  # steps with the directory of another run

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.world.random.random() < probability

    def struck(self, kind: str, method: str) -> None:
        """Count a fault."""
        number = number_of(kind, method)
        if number:
            self.count(number)

    def count(self, number: str, state: str = "") -> None:
        """Count fault ``number`` with the state of the save in flight, or was when it struck."""
        self.coverage.fault(number, State(state or self.watch.state_in_flight()))

    # ------------------------------------------------------------------------------ every call

    def before_call(self, owner: Process, method: str, path: str) -> str:
        """Let others run, or let a fault strike. Returns the fault that the call is to show."""
        world = self.world
        if not owner.alive:
            raise ProcessDead(owner.name)
        if self.aim:
            self._maybe_hit(owner)
        mark = world.random.random()
        if mark < self.switch:
            if self.latency_s:
                world.sleep(world.random.random() * self.latency_s)
            else:
                world.pause()
            return ""
        left = 1.0 - mark
        if left > self.faults.total:
            return ""
        kind = self.faults.kind_at(left)
        if not kind or kind == "short" or not can_strike(kind, method):
            return ""
        return self._strike(kind, owner, method)

    def _strike(self, kind: str, owner: Process, method: str) -> str:
        role = owner.role
        if kind.startswith("kill_") and kind != f"kill_{role}":
            return ""
        if kind.startswith("kill_") or kind == "power":
            after = "power_after" if kind == "power" else "kill_after"
            if self.world.random.random() < 0.5:
                return after
            self.strike_dead(owner, after)
        if kind == "unknown":
            return kind  # counted once it happened
        self.struck(kind, method)
        match kind:
            case "slow":
                self.world.sleep(self.world.random.random() * _SLOW_S)
            case "hang":
                self.world.note(owner.name, "HANGS", method)
                self.world.sleep(_HANG_S * (0.5 + self.world.random.random()))
            case "pause":
                self._pause(owner)
            case _:
                return kind
        return ""

    def _pause(self, owner: Process) -> None:
        self.world.note(owner.name, "STOPPED")
        owner.paused_until = self.world.now + _PAUSE_S * self.world.random.random()
        self.world.pause()

    def _maybe_hit(self, owner: Process) -> None:
        """Strike the coordinator, if the checkpoint in flight is where the run aims at."""
        watch = self.watch
        mine = watch.newest_epoch and watch.epoch_of(owner.name) == watch.newest_epoch
        early = len(watch.ever_acknowledged) < self.aim_after
        if not mine or early or watch.state_in_flight() != self.aim:
            return
        self.aim = ""
        if not self.aim_stops:
            self.strike_dead(owner, "kill_after")
        self.struck("pause", "")
        self._pause(owner)

    def count_death(self) -> None:
        """The moment that a sudden death struck: F3 between publishing and tracker, F17 in a
        deletion, F33."""
        model = self.watch.models.get(self.watch.newest_epoch)
        if self.watch.state_in_flight() == "finalized":
            self.count("F3")
        if model is not None and model.steps("prunable"):
            self.count("F17")
        if model is not None and model.states and not self.watch.ever_acknowledged:
            self.count("F33")

    def strike_dead(self, owner: Process, fault: str) -> None:
        """The process (or the power) is gone at this very call. Counted here, where it happens."""
        self.struck("power" if fault == "power_after" else f"kill_{owner.role}", "")
        if owner.role == "trainer":
            self.count_death()
        if fault == "power_after":
            self.lose_power()
        else:
            self.kill(owner)
        raise ProcessDead(owner.name)

    def judge(self, owner: Process, method: str, path: str, other: str) -> None:
        """A call took effect: let the watch look."""
        try:
            self.watch.changed(owner.name, self.world.now, method, path, other)
        except RootBroken as broken:
            self.stop(broken)

    def judge_token(self, token: object, path: str) -> None:
        try:
            self.watch.written_token(token, path)
        except RootBroken as broken:
            self.stop(broken)

    def judge_deletion(self, token: object, path: str) -> None:
        try:
            self.watch.deleting(token, path, self.world.now)
        except RootBroken as broken:
            self.stop(broken)

    def stop(self, broken: RootBroken | SimulationFailed) -> None:
        """End the run here and now: the code under test must not go on, nor catch it."""
        if isinstance(broken, RootBroken):
            promise, _, what = str(broken).partition(": ")
            broken = SimulationFailed(promise, what)
        self.world.fail(broken)
        self.world.hub.switch()

    def check(self, holds: object, promise: str, what: str) -> None:
        """A promise as a program sees it."""
        if not holds:
            self.stop(SimulationFailed(promise, what))

    # --------------------------------------------------------------------------- sudden death

    def kill(self, process: Process) -> None:
        """SIGKILL. Its writers die with it, or (a kernel without the means) a moment later."""
        self.world.kill(process)
        for child in process.children:
            if not child.alive:
                continue
            if self.chance(self.orphans):
                self.count("F13")
                self._kill_later(child)
            else:
                self.kill(child)

    def _kill_later(self, orphan: Process) -> None:
        reaper = self.world.process(f"{orphan.name}.reaper")

        def reap() -> None:
            self.world.sleep(self.world.random.random() * _ORPHAN_S)
            self.kill(orphan)

        self.world.spawn(reaper, reaper.name, reap)

    def lose_power(self) -> None:
        """Everything dies; what was not durable may be gone. Judged as a stock reader sees it."""
        self.world.note("WORLD", "POWER LOSS")
        self.power_losses += 1
        for process in self.world.processes:
            if process.role != "controller":
                self.world.kill(process)
        self.hidden.clear()
        self.gone.clear()
        self.watch.readers.clear()
        self.world.disk.crash(self.world.random)
        try:
            self.watch.powered_up()
            self.judge_root()
        except RootBroken as broken:
            self.stop(broken)

    def judge_root(self) -> int | None:
        """The whole root, as it is now. Raises ``RootBroken``."""
        if self.watch.meddled:
            return None  # somebody else has written the tracker, and nobody has repaired it yet
        judge = SimStorage(self.world.disk, "judge")
        ignore = self.watch.outside()
        return check_root(judge, self.watch.floor(), ignore, in_place=self.watch.in_place)

    def lag(self, owner: Process, gone: str, made: str) -> None:
        """The names that one host removed and made are seen late on the others (F9)."""
        if gone:
            self.hidden.forget(gone)
            if self.chance(0.5):
                self.gone.put(gone, owner.host, self.world.random.random() * self.lag_s)
        if made:
            self.gone.forget(made)
            self.hidden.forget(made)
            at_once = made.startswith(".ckptfsm/readers/")  # I7 rests on a listing that is current
            if not at_once and self.chance(0.5):
                self.hidden.put(made, owner.host, self.world.random.random() * self.lag_s)
