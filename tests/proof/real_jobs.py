"""The programs of the struck children: trainers on the production coordinator, or on the production
manager.

Rules: a trainer goes on after an error as a real one does: it saves again later, and stops only if the
coordinator has stopped for good. After an error at any call it must get one more save tracked, unless
the coordinator said that only a restart can decide. Scripts are deterministic: the same calls in the
same order, with made-up time and a fixed identity.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from fakes import FakeDraft, FakeDriver, ShiftedClock, fake_ports

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import CkptFsmError, SaveFailed
from ckptfsm.core.layout import parse_attempt
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec, Planned
from ckptfsm.core.ports import Identity, PartJob, Storage
from ckptfsm.core.retention import LatestN, Policy
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import PARTS, FakeJob, FakePart, HalfPart, fake_content
from proof.coverage import watch_moves
from proof.real_site import Disk, Noting, Site, Strike, Tell

LAST_STEP = 1000  # the save that shows that training goes on
RETRY_S = 6.0  # longer than a coordinator waits before it tries a command again
COMPOSITE = (
    PartSpec("state"),
    PartSpec("critic", "dcp", "critic", ranks=(1,)),
    PartSpec("export", directory="export", optional=True),
)


class Stopped(Exception):
    """The coordinator has stopped for good: only a restart decides."""


class Acknowledged(list[int]):
    """The steps a job reports as tracked, told before anything else happens."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def append(self, step: int) -> None:
        super().append(step)
        self._tell(acknowledged=step)


# --------------------------------------------------------------------------------- the coordinator


class Training:
    """A trainer of two ranks on the coordinator's interface."""

    def __init__(self, storage: Storage, retention: Policy, tell: Tell) -> None:
        self.tell = tell
        self.errors: list[BaseException] = []
        self._storage, self._retention = storage, retention
        self.job = self._make(1)

    def _make(self, life: int) -> FakeJob:
        identity = Identity("real", 1, "boot:1", f"nonce-{life}")
        told = Acknowledged(self.tell)
        return FakeJob(
            self._storage, retention=self._retention, identity=identity, acknowledged=told
        )

    def open(self) -> None:
        """A failed opening may be tried again by the same process."""
        try:
            self.job.open()
        except (CkptFsmError, OSError) as error:
            self.errors.append(error)
            self.job = self._make(2)
            self.job.open()

    def ask(self, work: Callable[[], object]) -> None:
        """Something a person or a trainer asks for. An error is theirs, unless it is the end."""
        try:
            work()
        except (CkptFsmError, OSError) as error:
            self.errors.append(error)
        finally:
            self.job._listen()  # the ranks get the news of a call that raised, too
        if self.job.coordinator.fatal is not None:
            raise Stopped

    def save(self, step: int, parts: tuple[PartSpec, ...] = PARTS, ranks: int = 2) -> None:
        """A save of ``ranks`` of the two ranks; the others' writers die."""
        self.train_on()
        before = len(self.errors)
        self.ask(partial(self.job.request, step, parts))
        flying = self.job.coordinator.ledger.in_flight()
        if len(self.errors) > before or flying is None:
            return
        self.ask(partial(self.job.fork, flying.id))
        for rank in range(ranks):
            if len(self.errors) == before:
                self.ask(partial(self.job.write, flying.id, rank))
        if len(self.errors) > before or ranks < self.job.ranks:
            self.ask(partial(self.job.fail, flying.id, "writer_failed"))
        elif step not in self.job.acknowledged:
            self.errors.append(SaveFailed(f"step {step} was not tracked"))

    def train_on(self) -> None:
        """The work of polls between two saves: commands that failed are tried again."""
        for _ in range(2):
            self.job.clock.sleep(RETRY_S)
            self.ask(self.job.coordinator.tick)

    def close(self) -> None:
        self.job.close()


def save_track_prune(on: Training) -> None:
    """Two saves under ``LatestN(1)``: request, write, finalize, track, prune."""
    on.save(1)
    on.save(2)


def fail_and_retry(on: Training) -> None:
    """The very first save fails and is cleaned up; the same step again, of three parts.

    A part lives on one rank only, and an optional one cannot be written there.
    """
    on.save(1, ranks=1)
    on.job.cannot = frozenset({"export"})
    on.save(1, COMPOSITE)


def roll_back(on: Training) -> None:
    """Two saves, and back to the first."""
    on.save(1)
    on.save(2)
    on.tell(acknowledged=1)  # from here on the target is promised
    on.ask(partial(on.job.coordinator.rollback, 1))


def keep_and_let_go(on: Training) -> None:
    """A pin, a reader's lease and a deletion, each against retention."""
    coordinator = on.job.coordinator
    on.save(1)
    on.ask(partial(coordinator.pin, 1, "a person"))
    on.save(2)
    leases: list[str] = []

    def read() -> None:
        found = coordinator.locate(1)
        leases.append(found.lease if found is not None else "")

    on.ask(read)
    on.ask(partial(coordinator.unpin, 1))
    for lease in leases:
        on.ask(partial(coordinator.release, lease))
    on.ask(partial(coordinator.delete, 1))


@dataclass(frozen=True, slots=True)
class Script:
    """A life on one root, and the checkpoints that retention leaves."""

    work: Callable[[Training], None]
    retention: Policy


MANAGER = "manager"  # the script of ``live_on_manager``
SCRIPTS: Mapping[str, Script] = MappingProxyType(
    {
        "save_track_prune": Script(save_track_prune, LatestN(1)),
        "fail_and_retry": Script(fail_and_retry, LatestN(2)),
        "roll_back": Script(roll_back, LatestN(5)),
        "keep_and_let_go": Script(keep_and_let_go, LatestN(1)),
    }
)


@dataclass
class Life:
    """How a struck job fared. ``fatal``: only a restart decides; ``went_on``: a later save worked."""

    errors: list[BaseException] = field(default_factory=list)
    fatal: bool = False
    went_on: bool = False

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """The errors that a trainer would catch and go on from."""
        try:
            yield
        except CkptFsmError as error:
            self.errors.append(error)


def live(site: Site, root: str, synced: bool, pipe: int, tell: Tell) -> None:
    """A struck job's whole life, told at its end."""
    noting = Noting()
    strike = Strike(site, partial(Disk, root, synced=synced, tells=(pipe,)), tell, noting)
    life = Life()
    storage: FaultStorage | None = None
    with watch_moves(noting):
        try:
            if site.script == MANAGER:
                live_on_manager(strike, life)
            else:
                storage = strike.storage()
                live_on_coordinator(storage, SCRIPTS[site.script], life, tell)
        except Stopped:
            life.fatal = True
        except (CkptFsmError, OSError) as error:
            life.errors.append(error)
    tell(
        counts=strike.counts.both(),
        fatal=life.fatal,
        went_on=life.went_on,
        errors=[f"{type(e).__name__}: {e}"[:300] for e in life.errors],
        lost=strike.lost,
        fsynced_again=storage is not None and fsynced_again(storage.calls, strike.failed_fsync),
        coverage=noting.as_json(),
    )


def live_on_coordinator(storage: Storage, script: Script, life: Life, tell: Tell) -> None:
    on = Training(storage, script.retention, tell)
    life.errors = on.errors
    on.open()
    script.work(on)
    life.went_on = not on.errors
    if on.errors:
        on.save(LAST_STEP)
        life.went_on = LAST_STEP in on.job.acknowledged
    on.close()


def fsynced_again(calls: list[tuple[str, str]], failed: int | None) -> bool:
    """True if the file whose fsync failed at call ``failed`` was fsynced again, not being new (F6)."""
    if failed is None:
        return False
    path = calls[failed][1]
    for method, other in calls[failed + 1 :]:
        if other == path and method == "open_exclusive":
            return False
        if other == path and method == "fsync":
            return True
    return False


def recover(site: Site, root: str, synced: bool, pipe: int, tell: Tell) -> None:
    """A restart that is struck in the middle: opening is all it does.

    Tells the ``latest`` step, and whether it came to roll an attempt forward; or the error that it
    ``refused`` the root with. That is an error of the library, or one of the disk, which the owner
    of a coordinator wraps.
    """
    noting = Noting()
    strike = Strike(site, partial(Disk, root, synced=synced, tells=(pipe,)), tell, noting)
    storage = strike.storage()
    job = FakeJob(storage, retention=LatestN(1), identity=Identity("real", 2, "b:2", "r"))
    with watch_moves(noting):
        try:
            report = job.open()
            rolled = any(d.last == State.SHARDS_WRITTEN and d.actions for d in report.decisions)
            tell(latest=report.latest_step, rolled_forward=rolled)
        except CkptFsmError as error:
            tell(refused=f"{type(error).__name__}: {error}"[:300])
        except OSError as error:
            if error.errno != getattr(
                errno, site.kind, errno.EIO
            ):  # a write that took nothing: EIO
                raise
            tell(refused=f"OSError: {error}")
    tell(
        counts=strike.counts.both(),
        lost=strike.lost,
        fsynced_again=fsynced_again(storage.calls, strike.failed_fsync),
        coverage=noting.as_json(),
    )


# ------------------------------------------------------------------------------------- the manager


class QuickClock(ShiftedClock):
    """The real clock, on which two hundred times more passes during a sleep."""

    def sleep(self, seconds: float) -> None:
        SystemClock.sleep(self, seconds)
        self.advance(200 * seconds)


@dataclass(slots=True)
class NamedDraft(FakeDraft):
    """A draft whose shards name their attempt, as ``check_root`` expects.

    With ``write`` among the driver's ``failures``, the disk takes one half of each.
    """

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        of = parse_attempt(Path(location).name)
        assert of is not None
        rank, kind = self.driver.rank, FakePart
        if "write" in self.driver.failures:
            kind = HalfPart
        return tuple(kind(s.name, s.directory, rank, fake_content(of, rank)) for s in specs)


class NamingDriver(FakeDriver):
    """See ``NamedDraft``."""

    def draft(self, parts: Mapping[str, object]) -> NamedDraft:
        made = super().draft(parts)
        return NamedDraft(
            made.specs, False, made.summary, made.expected_bytes, self, dict(made.values)
        )


MANAGED = CheckpointConfig(
    writer_timeout_s=100_000.0,
    busy_timeout_s=100_000.0,
    close_timeout_s=100_000.0,
    exit_timeout_s=5.0,
    effect_timeout_s=20.0,
    visibility_timeout_s=20.0,
    reader_timeout_s=1e6,
    retention=LatestN(1),
)


def live_on_manager(strike: Strike, life: Life) -> None:
    """Two saves with forked writers, and one more if anything went wrong."""

    def hook(record: TransitionRecord) -> None:
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            strike.tell(acknowledged=record.step)

    warnings.simplefilter("ignore")  # a failed save under test is not news
    ports = fake_ports(lambda create: strike.storage(), driver=NamingDriver(), clock=QuickClock())
    manager: Manager | None = None
    with life.noting_errors():
        manager = Manager(ports, MANAGED, [hook])
    if manager is None:
        manager = Manager(ports, MANAGED, [hook])
    coordinator = manager._client._coordinator
    assert coordinator is not None
    for step in (1, 2, LAST_STEP):
        if step == LAST_STEP and not life.errors:
            break
        with life.noting_errors():
            manager.save(step, {"weights": step}).wait()
        life.fatal = coordinator.fatal is not None
        if life.fatal:
            break
    life.went_on = manager.latest_step() == (LAST_STEP if life.errors else 2)
    with life.noting_errors():
        manager.close()
