"""Whether a root kept its promises after its owner was struck, and whether a restart mends it.

Rules: the judge is ``check_root``, the specification of journals with a separate reader, and the
acknowledgements before the strike. A restart is the production coordinator: it opens, finds nothing
left to do the second time, saves, and leaves neither a partial nor a temporary file behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import CkptFsmError, JournalCorrupt
from ckptfsm.core.layout import EPOCHS, JOURNAL, PINS, STAGING, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.durable import TEMPORARY, list_names
from ckptfsm.disk.journal import read_history
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms
from ckptfsm.testing.harness import FakeJob, RootBroken, check_root
from proof.coverage import Coverage, watch_moves
from proof.real_site import Disk


class Broken(AssertionError):
    """A promise that did not hold: ``args`` are its number and the finding."""


def broken(promise: str, what: str) -> Broken:
    return Broken(promise, what)


@dataclass
class Verdict:
    """The result of the restart: ``decisions`` are results and actions of recovery, in order."""

    decisions: tuple[str, ...] = ()
    tracked: int | None = None
    coverage: Coverage = field(default_factory=Coverage)


def judge(root: str, acknowledged: int | None) -> int | None:
    """The root as it is: acknowledged steps, complete directories, a legal journal."""
    storage = PosixStorage(root, create=False)
    try:
        tracked = check_root(storage, acknowledged)
        read_history(storage)
        assert_journal_conforms(storage)
    except RootBroken as error:
        promise, _, what = str(error).partition(": ")
        raise broken(promise, what) from error
    except (JournalCorrupt, JournalViolation) as error:
        raise broken("I11", str(error)) from error
    finally:
        storage.close_root()
    return tracked


def judge_with_restart(
    root: str, acknowledged: int | None, *, synced: bool, twice: bool, lost: str | None = None
) -> Verdict:
    """Judge, restart, judge, maybe restart once more, save, judge. ``lost``: its fsync failed."""
    judge(root, acknowledged)
    verdict = Verdict()
    try:
        with watch_moves(verdict.coverage):
            make = partial(Disk, root, synced=synced, lost=lost)
            _restart(root, acknowledged, verdict, make, twice=twice)
    except Broken:
        raise
    except (CkptFsmError, OSError) as error:
        raise broken("I8", f"a restart raised {type(error).__name__}: {error}") from error
    return verdict


def _restart(
    root: str,
    acknowledged: int | None,
    verdict: Verdict,
    make: Callable[[], Disk],
    *,
    twice: bool,
) -> None:
    with _restarted(make, "second") as (job, report):
        verdict.decisions = tuple(
            f"{d.last} {d.result} {[type(a).__name__ for a in d.actions]}"
            for d in report.decisions
            if d.actions
        )
        verdict.tracked = judge(root, acknowledged)
        if report.latest_step != verdict.tracked:
            told = f"recovery says {report.latest_step}, the tracker {verdict.tracked}"
            raise broken("I2", told)
        if not twice:
            _save_and_close(job, (verdict.tracked or 0) + 10)
    if twice:
        with _restarted(make, "third") as (job, report):
            again = [d.result for d in report.decisions if d.actions]
            if again or report.latest_step != verdict.tracked:
                raise broken("I8", f"not idempotent: {again}, then {report.latest_step}")
            _save_and_close(job, (verdict.tracked or 0) + 10)
    judge(root, (verdict.tracked or 0) + 10)
    look_for_leftovers(root)


def _save_and_close(job: FakeJob, step: int) -> None:
    unfinished = job.coordinator.ledger.in_state(State.REQUESTED, State.FORKED, State.FAILED)
    if unfinished:
        raise broken("I8", f"left unfinished: {[str(c.id) for c in unfinished]}")
    job.save(step)
    job.close()
    if step not in job.acknowledged:
        raise broken("I10", f"the save after the restart was not tracked: {job.records}")


@contextmanager
def _restarted(make: Callable[[], Disk], name: str) -> Iterator[tuple[FakeJob, RecoveryReport]]:
    """A new process's coordinator, as death leaves it: nothing but the lock is given up."""
    storage = make()
    identity = Identity("real", 2, name, name)
    job = FakeJob(storage, ranks=1, retention=LatestN(1), identity=identity)
    try:
        yield job, job.open()
        if storage.lost_again:
            raise broken("F6", f"{storage.lost} was fsynced again after its fsync had failed")
    finally:
        job.coordinator.abandon()
        storage.close_root()


def look_for_leftovers(root: str) -> None:
    """After an orderly end the space of everything unpublished is given back (F5)."""
    storage = PosixStorage(root, create=False)
    try:
        left = [f"{d}/{name}" for d in (STAGING, TRASH) for name in storage.listdir(d)]
        for directory in ("", PINS, EPOCHS, JOURNAL):
            names = list_names(storage, directory)
            left += [f"{directory}/{name}" for name in names if TEMPORARY in name]
    finally:
        storage.close_root()
    if left:
        raise broken("F5", f"left behind: {left[:5]}")
