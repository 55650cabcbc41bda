"""The jobs whose disk loses power, and the judge of recovery from the rest.

Rules: everything on the disk is done by production code through ``PosixStorage`` on a mounted file
system. The judge shares nothing with the judged code but the reader of documents.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fakes import ThreadTransport, fake_ports, run_ranks

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.core.retention import LatestN, Policy
from ckptfsm.disk.journal import read_history
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, RootBroken, check_root
from proof.coverage import Coverage, watch_moves
from proof.real_jobs import NamingDriver

TORCH = (PartSpec("state", "dcp"),)
_SETTINGS = {"close_timeout_s": 20.0, "busy_timeout_s": 20.0, "exit_timeout_s": 5.0}


class CarelessStorage(FaultStorage):
    """Storage that leaves out the calls that ``without`` names: ``fsync:*.distcp``, ``fsync_dir:*``."""

    def __init__(self, inner: PosixStorage, without: tuple[str, ...] = ()) -> None:
        super().__init__(inner)
        self.without = without

    def fsync(self, handle: int) -> None:
        if not self._left_out("fsync", self._path_of(handle)):
            super().fsync(handle)

    def fsync_dir(self, path: str) -> None:
        if not self._left_out("fsync_dir", path):
            super().fsync_dir(path)

    def _left_out(self, method: str, path: str) -> bool:
        return any(fnmatch.fnmatch(f"{method}:{path}", pattern) for pattern in self.without)


@dataclass
class Site:
    """Where a job runs: a root on a recorded disk, and the notes of when what was promised.

    ``name`` tells the trainers of one recording from those of another.
    """

    name: str
    root: str
    position: Callable[[], int]
    without: tuple[str, ...] = ()
    promises: list[tuple[int, int | None]] = field(default_factory=list)
    calls: list[tuple[int, str]] = field(default_factory=list)
    jobs: int = 0
    _storages: list[CarelessStorage] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the root, so that it can be unmounted."""
        for storage in self._storages:
            storage.close_root()

    def promise(self, step: int) -> None:
        """From here on, whatever is lost, the tracker names ``step`` or a later one."""
        self.promises.append((self.position(), step))

    def storage(self) -> CarelessStorage:
        storage = CarelessStorage(PosixStorage(self.root), self.without)
        storage.before = lambda _, method, path: self.calls.append(
            (self.position(), f"{method} {path}")
        )
        self._storages.append(storage)
        return storage

    def job(self, retention: Policy, *, ranks: int = 2) -> FakeJob:
        """The next trainer on this root."""
        self.jobs += 1
        return FakeJob(
            self.storage(),
            ranks=ranks,
            retention=retention,
            identity=Identity("host", self.jobs, self.name, f"{self.name} {self.jobs}"),
            acknowledged=_Acknowledged(self),
        )

    def hear(self, record: TransitionRecord) -> None:
        """A manager's hook."""
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            self.promise(record.step)


class _Acknowledged(list[int]):
    """A job's list of acknowledged steps, which notes where the disk was at each."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def append(self, step: int) -> None:
        self._site.promise(step)
        super().append(step)


Script = Callable[[Site], None]


def save_track_prune(site: Site) -> None:
    """Three saves, each of which prunes the one before."""
    job = site.job(LatestN(1))
    job.open()
    for step in (1, 2, 3):
        job.save(step)
    job.close()


def fail_and_retry(site: Site) -> None:
    """A save, a failed attempt that is cleaned up, the same step again."""
    job = site.job(LatestN(2))
    job.open()
    job.save(1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    job.fail(of)
    job.save(2)
    job.coordinator.tick()
    job.close()


def roll_back(site: Site) -> None:
    """Three saves, back to the first, and on from there."""
    job = site.job(LatestN(5))
    job.open()
    for step in (1, 2, 3):
        job.save(step)
    site.promise(1)
    job.coordinator.rollback(1)
    job.save(2)
    job.close()


def restart(site: Site) -> None:
    """A trainer of a ``dcp`` that leaves in the middle of a save, its successor; pins come and go."""
    first = site.job(LatestN(2), ranks=1)
    first.open()
    first.save(1, TORCH)
    first.coordinator.pin(1, "keep")
    of = first.request(2, TORCH)
    first.fork(of)
    first.write(of, 0)
    first.coordinator.abandon()
    second = site.job(LatestN(1), ranks=1)
    second.open()
    second.save(3, TORCH)
    second.coordinator.unpin(1)
    second.save(4, TORCH)
    second.close()


def managed(site: Site) -> None:
    """The real managers of two ranks, with forked writers that write at the same time."""

    def train(transport: ThreadTransport) -> None:
        ports = fake_ports(
            lambda create: site.storage(), transport=transport, driver=NamingDriver(transport.rank)
        )
        config = make_config({"retention": LatestN(1), **_SETTINGS})
        hooks = (site.hear,) if transport.rank == 0 else ()
        with Manager(ports, config, hooks) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"state": {}, "extra": {}}).wait()
            manager.wait_until_finished()

    for result in run_ranks(2, train):
        if isinstance(result, BaseException):
            raise result


SCRIPTS: Mapping[str, Script] = {
    script.__name__: script
    for script in (save_track_prune, fail_and_retry, roll_back, restart, managed)
}


def recover_and_save(site: Site) -> None:
    """The run of a restart on the remains of a power loss."""
    job = site.job(LatestN(1))
    latest = job.open().latest_step or 0
    job.save(latest + 5)
    job.close()


# ------------------------------------------------------------------------------------------ the judge


@dataclass
class Judge:
    """Judges roots; ``coverage`` says what their recovery exercised and in which states F4 struck."""

    coverage: Coverage = field(default_factory=Coverage)

    def judge(self, root: str, promised: int | None) -> str:
        """The fault of the root that a power loss left, or of its recovery; "" if there is none."""
        try:
            with watch_moves(self.coverage):
                self._judge(root, promised)
        except RootBroken as broken:
            return str(broken)
        except Exception as error:  # whatever recovery raises, it has not recovered
            return f"I8: recovery failed: {type(error).__name__}: {error}"
        return ""

    def _judge(self, root: str, promised: int | None) -> None:
        with _fresh(root) as storage:
            ledger = read_history(storage).ledger
        for state in {c.state for c in ledger.checkpoints.values()}:
            self.coverage.fault("F4", state)
        if not ledger.checkpoints:
            self.coverage.fault("F4", None)
        _look(root, promised)
        with _opened(root, 101) as (job, report):
            tracked = _look(root, promised)
            if report.latest_step != tracked:
                raise RootBroken(f"I2: recovery says {report.latest_step}, the tracker {tracked}")
            if job.coordinator.ledger.in_state(State.REQUESTED, State.FORKED, State.FAILED):
                raise RootBroken("I8: recovery left something unfinished")
        with _opened(root, 102) as (job, report):
            if report.latest_step != tracked or any(d.actions for d in report.decisions):
                raise RootBroken(f"I8: the second recovery decided {report.decisions}")
            step = (tracked or 0) + 10
            job.save(step)
            if job.acknowledged != [step]:
                raise RootBroken("I8: the next save was not acknowledged")
            job.close()
        _look(root, step)
        try:
            assert_journal_conforms(root)
        except JournalViolation as violation:
            raise RootBroken(f"I11: {violation}") from violation


@contextlib.contextmanager
def _fresh(root: str) -> Iterator[Storage]:
    """The root as a stranger opens it.

    The power fails no more: fsyncs, half of a recovery's time, need not reach a disk here.
    """
    posix = PosixStorage(root)
    try:
        yield CarelessStorage(posix, ("fsync:*", "fsync_dir:*"))
    finally:
        posix.close_root()


def _look(root: str, promised: int | None) -> int | None:
    with _fresh(root) as storage:
        return check_root(storage, promised)


@contextlib.contextmanager
def _opened(root: str, pid: int) -> Iterator[tuple[FakeJob, RecoveryReport]]:
    """A trainer that opens the root: its job and the report of its recovery."""
    identity = Identity("host", pid, f"boot:{pid}", f"nonce-{pid}")
    with _fresh(root) as storage:
        job = FakeJob(storage, retention=LatestN(1), identity=identity)
        try:
            yield job, job.open()
        finally:
            job.coordinator.abandon()
