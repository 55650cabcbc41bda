"""The ports of a ``Manager`` in a simulated world: time, other ranks, the coordinator's thread, writers.

Rules: only what a network, a clock or a kernel would do is made up here; the rest is code of the
library. Ranks exchange pickled copies, a writer works on a copy of its job taken at the launch:
nothing is ever shared that separate processes would not share.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fakes import FakeDraft, FakeDriver, FakeRequest, spec_of
from inline import NoDeferredSignals, run_into
from sim_writers import CopiedWriter

from ckptfsm.core.errors import CkptFsmError, OutcomeUnknown, RankFailed, describe, first_os_error
from ckptfsm.core.events import Event, ShardReported, WriterForked
from ckptfsm.core.parts import PartSpec, Planned, content_of
from ckptfsm.core.ports import (
    ChildError,
    Identity,
    Outcome,
    PartJob,
    Ports,
    RankJob,
    Storage,
    Written,
)
from ckptfsm.disk.durable import write_all
from ckptfsm.ranks.group_worker import GroupShare
from ckptfsm.testing.harness import FakePart
from ckptfsm.testing.invariants import Attempt
from ckptfsm.testing.simfs import ProcessDead
from ckptfsm.writers.plain_files import digests_of_bytes
from ckptfsm.writers.rank_writer import FilePart, write_rank
from ckptfsm.writers.shard_file import ShardFile
from proof.sim.site import Site
from proof.sim.storage import WorldStorage
from proof.sim.world import Process, SimulationFailed, Task, World

T = TypeVar("T")
_NOTICED_S = 0.5
_LATE_PART_S = 5.0


class WorldClock:
    """``Clock`` of one process: simulated time from a separate origin, a wall clock that jumps
    (F14)."""

    def __init__(self, site: Site, owner: Process) -> None:
        self._site = site
        self._owner = owner
        self._origin = float(owner.pid % 7) * 1000.0
        self._last = 0.0

    def monotonic(self) -> float:
        return self._site.world.now + self._origin

    def wall(self) -> str:
        now = self._site.world.now + self._site.world.random.randrange(-5, 6) * 86_400
        if now < self._last:
            self._site.count("F14")
        self._last = now
        return f"sim{now:+.3f}"

    def unix(self) -> float:
        return 1.5e9 + self._site.world.now

    def sleep(self, seconds: float) -> None:
        self._site.world.sleep(seconds)


# ------------------------------------------------------------------------- the coordinator's thread


class WorldFuture(Future[Any]):
    """A future that is waited for in simulated time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._waiting: Task | None = None
        self.add_done_callback(self._wake)

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        deadline = None if timeout is None else self._world.now + timeout
        while not self.done():
            if deadline is not None and self._world.now >= deadline:
                raise FutureTimeout
            self._waiting = self._world.current
            self._world.park(None if deadline is None else deadline - self._world.now)

    def _wake(self, done: Future[Any]) -> None:
        if self._waiting is not None:
            self._world.wake(self._waiting)


class WorldExecutor:
    """``Executor``: a thread in the simulated process."""

    def __init__(self, site: Site, owner: Process) -> None:
        self._site = site
        self._world = site.world
        self._queue: deque[tuple[Callable[[], Any], WorldFuture] | None] = deque()
        self._task = site.world.spawn(owner, f"{owner.name}.exec", self._work)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = WorldFuture(self._world)
        self._put((work, future))
        return future

    def repeat(self, work: Callable[[], object], every_s: float) -> None:
        """Nothing: the coordinator's tick looks into the inbox."""

    def shutdown(self) -> None:
        self._put(None)

    def _put(self, item: tuple[Callable[[], Any], WorldFuture] | None) -> None:
        self._queue.append(item)
        self._world.wake(self._task)

    def _work(self) -> None:
        while True:
            while not self._queue:
                self._world.park()
            item = self._queue.popleft()
            if item is None:
                return
            run_into(*item)
            error = item[1].exception()
            if isinstance(error, OutcomeUnknown) and error.__cause__ is not None:
                error = error.__cause__  # also what the coordinator stopped for, whatever it was
            typed = error is None or isinstance(error, (CkptFsmError, OSError))
            self._site.check(typed, "I10", f"the coordinator's thread raised {error!r}")


# ---------------------------------------------------------------------------------- the other ranks


class _Round:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.items: dict[int, bytes] = {}
        self.waiting: list[Task] = []


class WorldGroup:
    """The ranks of one job: numbered exchanges. A rank that is gone fails them for all others."""

    def __init__(self, site: Site, world_size: int, timeout_s: float) -> None:
        self.site = site
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._rounds: dict[int, _Round] = {}
        self._reached = [0] * world_size
        self._gone: set[int] = set()
        self._silent = site.chance(0.3)

    def leave(self, rank: int) -> None:
        """``rank`` takes part in no further exchange."""
        self._gone.add(rank)
        if not self._silent:
            for waited in self._rounds.values():
                for task in waited.waiting:
                    self.site.world.wake(task)

    def exchange(self, rank: int, kind: str, item: Any) -> list[Any]:
        """Every rank's item, in rank order. Raises ``RankFailed``."""
        world = self.site.world
        number = self._reached[rank]
        self._reached[rank] += 1
        here = self._rounds.setdefault(number, _Round(kind))
        if here.kind != kind:
            what = f"rank {rank} is at {kind!r} where another is at {here.kind!r}"
            self.site.stop(SimulationFailed("I10", what))
        here.items[rank] = pickle.dumps(item)
        if len(here.items) == self.world_size:
            for task in here.waiting:
                world.wake(task)
        self._wait(here)
        if rank == self.world_size - 1:
            self._rounds.pop(number - 8, None)
        return [pickle.loads(here.items[r]) for r in range(self.world_size)]

    def _wait(self, here: _Round) -> None:
        world = self.site.world
        deadline = world.now + self.timeout_s
        while len(here.items) < self.world_size:
            missing = set(range(self.world_size)) - set(here.items)
            noticed = bool(missing & self._gone) and not self._silent
            if noticed or world.now >= deadline:
                raise RankFailed("a rank did not come", ranks=tuple(sorted(missing)))
            here.waiting.append(world.current)
            world.park(deadline - world.now)


class WorldTransport:
    """The ``Transport`` of one rank. Sometimes the network delivers a report twice, or one of long
    ago."""

    def __init__(self, group: WorldGroup, rank: int, owner: Process, sent: list[Event]) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group
        self._owner = owner
        self._sent = sent

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        self._alive()
        if self.world_size == 1:
            return list(flags)
        columns = zip(*self._group.exchange(self.rank, "any_flags", list(flags)), strict=True)
        return [any(column) for column in columns]

    def gather(self, item: Any) -> list[Any] | None:
        self._alive()
        if isinstance(item, list) and item and isinstance(item[0], Event):
            item = self._distort(item)
        if self.world_size == 1:
            return [item]
        everyone = self._group.exchange(self.rank, "gather", item)
        return everyone if self.rank == 0 else None

    def broadcast(self, item: Any) -> Any:
        self._alive()
        if self.world_size == 1:
            return item
        mine = item if self.rank == 0 else None
        return self._group.exchange(self.rank, "broadcast", mine)[0]

    def close(self) -> None:
        """The process leaves its group when it ends."""

    def _alive(self) -> None:
        """A dead rank sends nothing, whatever its ``finally`` blocks try."""
        if not self._owner.alive:
            raise ProcessDead(self._owner.name)

    def _distort(self, events: list[Event]) -> list[Event]:
        """F11: a completion of another attempt, or the same twice. F10: a wrong world size."""
        site = self._group.site
        out = list(events)
        if site.chance(site.stale) and self._sent:
            late = self._sent[site.world.random.randrange(len(self._sent))]
            if late.of not in {event.of for event in events}:  # no duplicate of this one
                site.count("F11")
            out.insert(site.world.random.randrange(len(out) + 1), late)
        if site.chance(site.stale * 0.2):
            event = out[-1]
            if isinstance(event, (WriterForked, ShardReported)):
                site.count("F10")
                out[-1] = replace(event, world_size=event.world_size + 1)
        self._sent += events
        return out


# ------------------------------------------------------------------------------------------ writers


class WorldWriter(CopiedWriter):
    """``WriterProcess``: a simulated process that runs the library's writer."""

    def __init__(self, site: Site, parent: Process, job: RankJob) -> None:
        super().__init__()
        name = f"{parent.name}.w{len(parent.children)}"
        if not parent.alive:
            raise ProcessDead(parent.name)
        self._site = site
        self._clock = WorldClock(site, parent)
        self._job = _forked(job, self._clock)
        self._process = site.world.process(name, parent.host, parent, "writer")
        self._storage = WorldStorage(site, self._process)
        self._ended: Outcome | None = None
        self._stubborn = site.chance(0.05)
        self._task = site.world.spawn(self._process, name, self._work)

    def poll(self) -> Outcome | None:
        if self._ended is not None:
            return self._ended
        return None if self._process.alive else Outcome(-9)

    def wait(self, timeout_s: float) -> Outcome | None:
        self._site.world.join(self._task, timeout_s)
        return self.poll()

    def kill(self, timeout_s: float) -> bool:
        if self._stubborn and self._process.alive:
            self._stubborn = False  # sits in the kernel for a moment
            return False
        self._site.kill(self._process)
        return True

    def _work(self) -> None:
        site = self._site
        lies = site.chance(site.stale * 0.1)
        try:
            if lies:  # says that it wrote, and did not
                site.watch.unwritten.add(_attempt_of(self._job))
                payload = [(part.name, 1, None) for part in self._job.parts]
            else:
                payload = self._write()
        except Exception as error:  # as the real child: the parent hears of it
            cause = first_os_error(error)
            words = describe(cause) if cause else ""
            said = ChildError(describe(error), words, getattr(error, "kind", ""))
            self._end(Outcome(1, error=said))
        else:
            odd = site.chance(site.faults.kill_writer * 5)
            if odd:
                site.count("F1")
            killed = Outcome(-9, payload=payload, complete=True)
            silent = Outcome(0)
            whole = Outcome(0, payload=payload, complete=True)
            self._end(site.world.random.choice((killed, silent)) if odd else whole)

    def _write(self) -> list[tuple[str, int, Any]]:
        """F23: of several parts, one may be late, fail, or be said to be there and not be.

        A group's share is one of several, too: other workers write the others.
        """
        job, site = self._job, self._site
        several = len(job.parts) > 1 or any(isinstance(p, GroupShare) for p in job.parts)
        write = partial(write_rank, self._storage, count=self._count, clock=self._clock)
        if not several or not site.chance(site.uneven):
            return write(job)
        index = site.world.random.randrange(len(job.parts))
        how = site.world.random.choice(("late", "fails", "missing"))
        one = StruckPart(site, job, job.parts[index], how)
        if how != "missing":
            parts = (*job.parts[:index], one, *job.parts[index + 1 :])
            return write(replace(job, parts=parts))
        parts = (*job.parts[:index], *job.parts[index + 1 :])
        written = write(replace(job, parts=parts))
        one.strike()
        written.insert(index, (one.name, 1, None))
        return written

    def _end(self, outcome: Outcome) -> None:
        self._ended = outcome
        self._site.kill(self._process)


def _forked(job: RankJob, clock: WorldClock) -> RankJob:
    """The work of the fork: a copy of everything but the time."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = _is_time  # type: ignore[method-assign]
    pickler.dump(job)
    unpickler = pickle.Unpickler(io.BytesIO(buffer.getvalue()))
    unpickler.persistent_load = lambda token: clock  # type: ignore[method-assign]
    copy: RankJob = unpickler.load()
    return copy


def _is_time(value: object) -> str | None:
    return "clock" if isinstance(value, WorldClock) else None


def _attempt_of(job: RankJob) -> Attempt:
    return (job.of.step, job.of.epoch, job.of.attempt)


class StruckPart(PartJob):
    """A part of several that is ``late``, ``fails`` or is ``missing``. Counted once it is."""

    def __init__(self, site: Site, job: RankJob, part: PartJob, how: str) -> None:
        self.name = part.name
        self.directory = part.directory
        self._site, self._job, self._part, self._how = site, job, part, how

    def write(self, storage: Storage, location: str) -> Written:
        if self._how == "late":
            self._site.world.sleep(self._site.world.random.random() * _LATE_PART_S)
        self.strike()
        if self._how == "fails":
            raise OSError(errno.EIO, "made-up failure of a part", f"{location}/{self.name}")
        return self._part.write(storage, location)

    def strike(self) -> None:
        watch, of = self._site.watch, _attempt_of(self._job)
        spared = self._how == "fails" and self.name in self._job.optional
        if self._how != "late" and not spared:
            watch.unwritten.add(of)
        model = watch.models.get(watch.newest_epoch)
        state = model.states.get(of) if model is not None else None
        if state is not None:  # not an orphan's, whose attempt is forgotten
            self._site.count("F23", state)


# ------------------------------------------------------------------------------------------- driver


@dataclass(frozen=True, slots=True)
class WorldShard(PartJob):
    """The live state of one rank; only the copy taken at the launch freezes it."""

    name: str
    directory: str
    rank: int
    state: Mapping[str, Any]
    first_rank: int = 0

    def write(self, storage: Storage, location: str) -> Written:
        content = _content(location, self.rank, self.name, self.state)
        part = FakePart(self.name, self.directory, self.rank, content, self.first_rank)
        return part.write(storage, location)


@dataclass(frozen=True)
class WorldRequest(FakeRequest):
    """A foreign request: written in place, and complete once its finalizer ran, which fsyncs nothing."""

    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorldForeignShard(PartJob):
    """The share of one rank of a foreign request."""

    name: str
    directory: str
    rank: int
    state: Mapping[str, Any]

    def write(self, storage: Storage, location: str) -> Written:
        file = f"__{self.rank}_0.distcp"
        shard = ShardFile(storage, f"{location}/{file}")
        shard.write(_content(location, self.rank, self.name, self.state))
        return Written((shard.close_durably(file),), payload={"bucket": 1})


def _content(location: str, rank: int, part: str, state: Mapping[str, Any]) -> bytes:
    """A shard that names its attempt and rank, and carries its checksum."""
    attempt = location.rpartition("/")[2]
    body = f"{attempt} rank {rank} part {part}\n{json.dumps(state)}\n".encode()
    return body + hashlib.sha256(body).hexdigest().encode()


class WorldDraft(FakeDraft):
    """A draft of simulated shards. Its finalizers go through the simulated storage."""

    driver: WorldDriver

    def _finalize(self, name: str, value: FakeRequest, payload: Any) -> None:
        self.driver.maybe_fail("finalize")
        if payload is None:
            raise ValueError("the finalizer has no payload")
        if self.driver.rank == 0:
            for file in (".metadata", "metadata.json"):
                storage = self.driver.storage
                handle = storage.open_exclusive(f"{self.location}/{file}")
                write_all(storage, handle, b"{}")
                storage.close(handle)

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        self.driver.maybe_fail("stage")
        rank = self.driver.rank
        self.location = location.removeprefix(self.driver.storage.root + "/")
        jobs: list[PartJob] = []
        for spec in specs:
            value = self.values[spec.name]
            if isinstance(value, WorldRequest):
                jobs.append(WorldForeignShard(spec.name, "", rank, value.state))
            elif spec.kind == "file":
                jobs.append(FilePart(spec.name, spec.name, bytes(value)))
            else:
                jobs.append(WorldShard(spec.name, spec.directory, rank, value, spec.first_rank))
        return tuple(jobs)


class WorldDriver(FakeDriver):
    """``Driver`` whose state is a small dict per rank, read back through the simulated storage.

    ``strike`` makes the next call of ``draft``, ``merge``, ``stage`` or ``load`` raise, once (F31).
    """

    def __init__(self, site: Site, owner: Process, rank: int) -> None:
        super().__init__(rank=rank)
        self._site = site
        self.storage = WorldStorage(site, owner)

    def strike(self, call: str) -> None:
        self.failures[call] = OSError(28, "made-up failure")

    def maybe_fail(self, call: str) -> None:
        error = self.failures.pop(call, None)
        if error is not None:
            self._site.count("F31")
            raise error

    def draft(self, parts: Mapping[str, Any]) -> FakeDraft:
        self.maybe_fail("draft")
        specs = tuple(
            spec_of(name, value, len(parts)) for name, value in parts.items() if value is not None
        )
        parts = {name: content_of(value) for name, value in parts.items()}
        keys = {name: sorted(v) for name, v in parts.items() if isinstance(v, Mapping)}
        in_place = any(isinstance(v, FakeRequest) for v in parts.values())
        return WorldDraft(
            specs, in_place, keys, 100 * len(parts), self, dict(parts), digests_of_bytes(parts)
        )

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        self.maybe_fail("load")
        loaded: dict[str, Any] = {}
        for name, value in parts.items():
            where = directories[name].removeprefix(self.storage.root + "/")
            if isinstance(value, Mapping):
                loaded[name] = self._shard(directories[name])
            else:
                loaded[name] = self.storage.read(f"{where}/{name}", 1 << 20)
        return loaded

    def _shard(self, directory: str) -> dict[str, Any]:
        where = directory.removeprefix(self.storage.root + "/")
        data = self.storage.read(f"{where}/__{self.rank}_0.distcp", 1 << 20)
        if hashlib.sha256(data[:-64]).hexdigest().encode() != data[-64:]:
            raise ValueError("the shard is torn")
        state: dict[str, Any] = json.loads(data[:-64].split(b"\n", 2)[1])
        return state


# ----------------------------------------------------------------------------------------- assembly


def world_ports(site: Site, owner: Process, transport: WorldTransport) -> Ports:
    """The ports of the ``Manager`` of one rank."""
    return Ports(
        transport=transport,
        driver=WorldDriver(site, owner, transport.rank),
        clock=WorldClock(site, owner),
        executor=partial(WorldExecutor, site, owner),
        open_storage=lambda create: WorldStorage(site, owner),
        identity=lambda: Identity(
            owner.host, owner.pid, f"boot:{owner.pid}", f"nonce{owner.pid:08d}"
        ),
        launch=lambda storage, job: WorldWriter(site, owner, job),
        defer_signals=NoDeferredSignals,
    )
