"""A world of simulated processes: seeded scheduling, simulated time, and a trace of everything done.

Every thread of every process is a greenlet. A single scheduler picks the next greenlet with one
random number generator; time passes only when all wait. So one seed is one run: the same seed gives
the same trace, call by call.

Rules: no real time, no real thread. Code that blocks, blocks through ``pause``, ``sleep`` or
``park``. A killed process runs no further: ``ProcessDead`` is thrown into its greenlets, and
whatever their ``finally`` blocks try, every port of a dead process raises ``ProcessDead`` again. If
no greenlet can run and none sleeps, that is a deadlock, and a violation, as is a run that does not
end (I10).
"""

from __future__ import annotations

import hashlib
import heapq
import marshal
import random
import traceback
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from ckptfsm.testing.simfs import ProcessDead, SimDisk

MAX_SWITCHES = 300_000
_TAIL = 60


class SimulationFailed(AssertionError):
    """A promise did not hold in a simulated run. ``promise`` is its number, ``I4``."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what


class Process:
    """A simulated process: its threads, its children, and the epoch it took, if it did."""

    def __init__(self, name: str, host: str, pid: int, parent: Process | None, role: str) -> None:
        self.name = name
        self.host = host
        self.pid = pid
        self.parent = parent
        self.alive = True
        self.tasks: list[Task] = []
        self.children: list[Process] = []
        self.paused_until = 0.0
        self.at_death: Callable[[], None] = _nothing
        self.role = role


class Task:
    """A thread of a process. ``done`` once it ended, in whatever way; ``result`` if it returned."""

    def __init__(self, world: World, process: Process, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.process = process
        self.done = False
        self.result: Any = None
        self.parked = False
        self.woken = False
        self.token = 0
        self.waiters: list[Task] = []
        self._world = world
        self._work = work
        self.greenlet = greenlet(self._run, world.hub)

    def _run(self) -> None:
        try:
            self.result = self._work()
        except ProcessDead:
            pass  # killed on purpose
        except SimulationFailed as failure:
            self._world.fail(failure)
        except BaseException:  # nothing else may come out of a program: it is a finding
            text = traceback.format_exc(limit=-12)
            self._world.fail(SimulationFailed("I10", f"{self.name} ended with {text}"))
        finally:
            self.done = True
            self._work = _nothing
            for waiter in self.waiters:
                self._world.wake(waiter)


def _nothing() -> None:
    """The last acts of an ended task, and of most processes at their death."""


class World:
    """Processes on one disk, under one scheduler. See the module."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.disk = SimDisk()
        self.processes: list[Process] = []
        self.history: list[tuple[str, str, str, str]] = []
        self.failure: SimulationFailed | None = None
        self.current: Task
        self.hub = getcurrent()
        self.switches = 0
        self._runnable: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._timer_count = 0
        self._doomed: list[Task] = []
        self._pids = 100

    # ----------------------------------------------------------------------------- processes

    def process(
        self, name: str, host: str = "a", parent: Process | None = None, role: str = "controller"
    ) -> Process:
        """A new process."""
        self._pids += 1
        made = Process(name, host, self._pids, parent, role)
        self.processes.append(made)
        if parent is not None:
            parent.children.append(made)
        return made

    def spawn(self, process: Process, name: str, work: Callable[[], Any]) -> Task:
        """A new thread of ``process`` that runs ``work``."""
        task = Task(self, process, name, work)
        process.tasks.append(task)
        self._runnable.append(task)
        return task

    def kill(self, process: Process) -> None:
        """SIGKILL: its handles and locks are gone, its threads run no further."""
        if not process.alive:
            return
        process.alive = False
        self.note(process.name, "KILLED")
        self.disk.kill(process.name)
        process.at_death()
        self._doomed += [task for task in process.tasks if not task.done]

    def note(self, who: str, what: str, path: str = "", outcome: str = "") -> None:
        """Add a line to the trace."""
        self.history.append((who, what, path, outcome))

    def fail(self, failure: SimulationFailed) -> None:
        """Remember the first violation; the run ends with it."""
        if self.failure is None:
            self.failure = failure
            self.note("WORLD", "VIOLATION", str(failure))

    # ------------------------------------------------------------------- what a thread may do

    def pause(self) -> None:
        """Let others run."""
        self._runnable.append(self.current)
        self.hub.switch()

    def sleep(self, seconds: float) -> None:
        """Wait in simulated time."""
        self.park(seconds)

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False if ``timeout_s`` passed first."""
        task = self.current
        if not task.process.alive:
            raise ProcessDead(task.process.name)
        task.token += 1
        task.parked, task.woken = True, False
        if timeout_s is not None:
            self._timer_count += 1
            timer = (self.now + max(timeout_s, 0.0), self._timer_count, task, task.token)
            heapq.heappush(self._timers, timer)
        self.hub.switch()
        return task.woken

    def wake(self, task: Task) -> None:
        """Let a parked task go on; nothing if it is not parked."""
        if task.parked:
            task.parked, task.woken = False, True
            self._runnable.append(task)

    def join(self, task: Task, timeout_s: float | None = None) -> bool:
        """Wait for a task's end; False if ``timeout_s`` passed first."""
        deadline = None if timeout_s is None else self.now + timeout_s
        while not task.done:
            if deadline is not None and self.now >= deadline:
                return False
            task.waiters.append(self.current)
            self.park(None if deadline is None else deadline - self.now)
        return True

    # ---------------------------------------------------------------------------- scheduling

    def run(self, main: Task) -> None:
        """Run until ``main`` ended. Raises ``SimulationFailed`` for the first violation."""
        while not main.done and self.failure is None:
            while self._doomed:
                self._throw(self._doomed.pop())
            task = self._next()
            if task is None:
                if self.failure is None and not main.done:
                    names = [t.name for p in self.processes for t in p.tasks if not t.done]
                    self.fail(SimulationFailed("I10", f"nobody can run: {', '.join(names)}"))
                break
            self.switches += 1
            if self.switches > MAX_SWITCHES:
                self.fail(SimulationFailed("I10", f"the run does not end (at {task.name})"))
                break
            self.current = task
            task.greenlet.switch()
        self._end()
        if self.failure is not None:
            raise self.failure

    def _next(self) -> Task | None:
        runnable, timers = self._runnable, self._timers
        while True:
            while timers and timers[0][0] <= self.now:
                _, _, task, token = heapq.heappop(timers)
                if task.parked and task.token == token:
                    task.parked = False
                    runnable.append(task)
            if runnable:
                index = int(self.random.random() * len(runnable))
                task = runnable[index]
                runnable[index] = runnable[-1]
                runnable.pop()
                if task.done or not task.process.alive:
                    continue
                if task.process.paused_until > self.now:
                    self._put_off(task)
                    continue
                return task
            if not timers:
                return None
            self.now = timers[0][0]

    def _put_off(self, task: Task) -> None:
        """Its process is stopped: the task goes on once that is let go."""
        task.parked = True
        self._timer_count += 1
        timer = (task.process.paused_until, self._timer_count, task, task.token)
        heapq.heappush(self._timers, timer)

    def _throw(self, task: Task) -> None:
        if task.done:
            return
        if not task.greenlet:  # never started: there is nothing to unwind
            task.done = True
            for waiter in task.waiters:
                self.wake(waiter)
            return
        self.current = task
        task.parked = False
        task.greenlet.throw(ProcessDead(task.process.name))
        if not task.done:  # it caught its death and waits: no task will ever wake it
            self._doomed.append(task)

    def _end(self) -> None:
        """End every thread, so that nothing of the run is left."""
        for process in self.processes:
            process.alive = False
            self._doomed += [task for task in process.tasks if not task.done]
        for _ in range(1000):
            if not self._doomed:
                return
            self._throw(self._doomed.pop())

    # --------------------------------------------------------------------------------- trace

    def trace_hash(self) -> str:
        """A digest of everything that was done, in order, and of the disk now."""
        data = marshal.dumps((self.history, sorted(self.disk.snapshot().items())), 2)
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def tail(self, count: int = _TAIL) -> list[str]:
        """The last lines of the trace, for people."""
        return [
            f"{who:<14} {what:<14} {path}{f'  => {outcome}' if outcome else ''}"
            for who, what, path, outcome in self.history[-count:]
        ]
