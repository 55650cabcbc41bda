"""Faults that review, mutation and simulation found in the library, each kept as a test."""

from __future__ import annotations

import errno
import os

import pytest
from ledgers import (
    MISSING,
    at,
    checkpoint,
    damaged,
    evidence,
    ledger_of,
    names,
    stock,
    unexplained,
    whole,
)
from pydantic import ValidationError

from ckptfsm.core import layout
from ckptfsm.core.documents import (
    FileEntry,
    Manifest,
    RollbackFinished,
    SegmentOpened,
    checkpoint_record,
    encode,
)
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    JournalCorrupt,
    OutcomeUnknown,
    SaveRefused,
)
from ckptfsm.core.events import WriterForked
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec, check_parts
from ckptfsm.core.ports import Identity
from ckptfsm.core.recovery import Plan, plan
from ckptfsm.core.requests import SaveRequest
from ckptfsm.core.retention import EveryNSeconds, Policy, parse_policy
from ckptfsm.disk import durable
from ckptfsm.disk import inspection as evidence_module
from ckptfsm.disk.inspection import inspect_published
from ckptfsm.disk.journal import JournalWriter, encode_line, read_history
from ckptfsm.disk.stock import StockVerdict
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import PARTS, FakeJob
from ckptfsm.testing.simfs import SimDisk, SimStorage

S = State
NOBODY = (PartSpec("state", ranks=()),)
LATER = 60.0  # seconds after which whatever failed is tried again


def start(disk: SimDisk, name: str = "first", *, before=None, **settings) -> FakeJob:
    """A job of its own simulated process; ``before`` is a hook that may fail its calls."""
    storage = FaultStorage(SimStorage(disk, name), before=before)
    job = FakeJob(storage, identity=Identity("sim", sum(name.encode()), name, name), **settings)
    job.open()
    return job


def latest_step(job: FakeJob) -> int | None:
    latest = job.coordinator.ledger.latest()
    return latest.step if latest else None


def failing(code: int, *methods: str):
    """A hook that fails these calls, every time."""

    def hook(index: int, method: str, path: str) -> None:
        if method in methods:
            raise OSError(code, os.strerror(code), path)

    return hook


def decide(ledger: Ledger, found) -> Plan:
    return plan(ledger, found, 9, "fallback")


def falls_back_to(found: Plan, step: int) -> bool:
    return any(f"falling back to {step}" in warning for warning in found.warnings)


def opened(*records) -> SegmentOpened:
    return SegmentOpened(
        epoch=1, host="h", pid=1, at="", seals=(), run_seconds=0.0, checkpoints=records
    )


def with_journal(disk: SimDisk) -> SimStorage:
    storage = SimStorage(disk)
    durable.make_dirs(storage, layout.JOURNAL)
    return storage


# ------------------------------------------------------------------------------ saving and tracking


def test_a_plain_save_is_tracked():
    """Catches: a helper of this file that makes every other test here pass, or fail, for nothing."""
    job = start(SimDisk())
    job.save(10)
    assert latest_step(job) == 10


def test_F26_a_metric_that_is_not_a_number_does_not_lock_the_root():
    """Catches: NaN journaled as null, which no number reads back: every later open fails."""
    disk = SimDisk()
    job = start(disk)
    of = job.coordinator.request(
        SaveRequest(10, PARTS, job.ranks, metrics=(("loss", float("nan")),))
    )
    job.fork(of)
    for rank in range(job.ranks):
        job.write(of, rank)
    job.close()
    assert latest_step(start(disk, "second")) == 10


def test_F5_F6_a_put_can_be_repeated_after_its_fsync_failed():
    """Catches: the temporary name of the failed one, which no later put of that process passes."""
    storage = SimStorage(SimDisk())
    storage.disk.fail_fsync(errno.EIO)
    with pytest.raises(OSError):
        durable.put(storage, "f", b"1", tag="t")
    durable.put(storage, "f", b"1", tag="t")
    assert storage.read("f", 10) == b"1"


def test_F5_a_tracker_that_failed_once_is_written_at_a_later_tick():
    """Catches: a full disk for a moment, after which no checkpoint is ever tracked again."""
    failed = []

    def full_once(index: int, method: str, path: str) -> None:
        if method == "fsync" and path.startswith(layout.TRACKER) and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "full", path)

    job = start(SimDisk(), before=full_once)
    job.save(10)
    assert failed and job.coordinator.busy and latest_step(job) is None
    job.clock.sleep(LATER)
    job.coordinator.tick()
    assert latest_step(job) == 10, job.coordinator.ledger.in_flight()


@pytest.mark.parametrize("saved_before", [(), (15,)], ids=["first-request", "second-request"])
def test_I5_a_save_at_an_adopted_step_gets_an_attempt_of_its_own(monkeypatch, saved_before):
    """Catches: adopted checkpoints and requests numbered apart, so that two share an id and the
    table forbids the save."""
    accepted = StockVerdict(True, "")
    monkeypatch.setattr(evidence_module, "inspect_stock", lambda *arguments: accepted)
    disk = SimDisk()
    for step in (10, 20):
        SimStorage(disk, "stock run").mkdir(layout.MEGATRON.published_name(step))
    disk.plant_file(layout.TRACKER, b"20")
    job = start(disk)
    assert [c.step for c in job.coordinator.ledger.in_state(S.TRACKED)] == [10, 20]
    job.coordinator.rollback(10)
    for step in (*saved_before, 20):
        job.save(step)
    assert latest_step(job) == 20


def test_parts_that_nobody_writes_are_refused():
    """Catches: an attempt that no writer ever forks for or leaves, so that it never ends."""
    with pytest.raises(ConfigError):
        check_parts(NOBODY, 2)


def test_a_refused_save_does_not_lock_the_root():
    """Catches: parts that nobody writes, journaled before they are refused: no restart ends that."""
    disk = SimDisk()
    job = start(disk)
    with pytest.raises((ConfigError, SaveRefused)):
        job.request(10, NOBODY)
    job.coordinator.abandon()
    again = start(disk, "second")
    again.save(10)
    assert latest_step(again) == 10


def test_a_late_report_of_another_world_size_fails_nothing():
    """Catches: a failure of an attempt that is published, which the table forbids."""
    ledger = ledger_of(checkpoint(100, S.FINALIZED))
    outcome = ledger.report(WriterForked(at(100), 0, 7))
    assert not outcome.wrong_world_size


class KeepEndsOfThree(Policy):
    """Everything, until there are three: then not the middle one."""

    def preserve(self, checkpoints):
        steps = sorted(c.step for c in checkpoints)
        return {steps[0], steps[-1]} if len(steps) == 3 else set(steps)


def test_I2_a_pending_prune_does_not_undo_a_rollback():
    """Catches: a checkpoint above the target, reprieved when its prune is tried again, that becomes
    the latest."""

    def no_trash(index: int, method: str, path: str) -> None:
        if method == "rename" and layout.TRASH in path:
            raise OSError(errno.EIO, "x", path)

    disk = SimDisk()
    job = start(disk, before=no_trash, retention=KeepEndsOfThree())
    for step in (10, 20, 30):
        job.save(step)
    assert [c.step for c in job.coordinator.ledger.in_state(S.PRUNABLE)] == [20]
    job.coordinator.rollback(10)
    job.storage.before = None
    job.clock.sleep(LATER)
    job.coordinator.tick()
    assert latest_step(job) == 10
    job.close()
    assert latest_step(start(disk, "second")) == 10


# --------------------------------------------------------------------------------------- the journal


def test_F6_a_failing_close_does_not_hide_an_unknown_outcome():
    """Catches: the error of the close (NFS) in place of the fsync's: not fatal to a coordinator."""
    storage = FaultStorage(with_journal(SimDisk()))
    writer = JournalWriter(storage, 1)
    writer.open(opened())
    storage.before = failing(errno.EIO, "fsync", "close")
    with pytest.raises(OutcomeUnknown):
        writer.append(RollbackFinished())


def test_F5_a_journal_that_cannot_be_opened_closes_its_file():
    """Catches: a descriptor lost at every attempt to open a root on a full disk."""
    disk = SimDisk()
    storage = FaultStorage(with_journal(disk))
    disk.capacity = 100
    with pytest.raises(OSError):
        JournalWriter(storage, 1).open(opened())
    methods = [method for method, _ in storage.calls]
    assert methods.count("close") == methods.count("open_exclusive") == 1


@pytest.mark.damages_journal("forges a snapshot")
def test_F30_a_snapshot_that_names_an_attempt_twice_is_corrupt():
    """Catches: one of two contradicting states believed, or an error that is none of ours."""
    disk = SimDisk()
    storage = with_journal(disk)
    twice = [checkpoint_record(checkpoint(1, state)) for state in (S.TRACKED, S.FAILED)]
    disk.plant_file(f"{layout.JOURNAL}/{layout.segment_name(1)}", encode_line(opened(*twice)))
    with pytest.raises(JournalCorrupt):
        read_history(storage)


# ------------------------------------------------------------------------------ hostile names


@pytest.mark.parametrize("name", ["../x", "a/../b", "./x", "a/./b", ".", ".."])
def test_F30_a_file_name_with_dots_for_a_component_is_refused(name):
    """Catches: a document that names a file outside its directory, or one file by two names."""
    with pytest.raises(ValidationError):
        FileEntry(name=name, bytes=1)


def test_F30_a_hostile_name_in_a_manifest_is_damage():
    """Catches: a configuration error out of looking at a directory: the root cannot be opened."""
    manifest = Manifest(step=10, epoch=1, attempt=1, world_size=1, parts=(), files=())
    hostile = encode(manifest).replace(b'"files":[]', b'"files":[{"name":"./x","bytes":1}]')
    storage = SimStorage(SimDisk())
    path = f"{layout.MEGATRON.published_name(10)}/{layout.MANIFEST}"
    durable.make_dirs(storage, durable.parent_of(path))
    durable.put(storage, path, hostile, tag="t")
    assert inspect_published(storage, layout.MEGATRON, 10).found == "damaged"


@pytest.mark.parametrize("name", ["0005.json", "9999999999999999.json"])
def test_a_pin_has_one_name_only(name):
    """Catches: a pin that protects step 5 and that ``unpin(5)`` never finds."""
    assert layout.parse_pin(name) is None


# ------------------------------------------------------------------------------ what recovery decides


def test_I2_F17_a_damaged_prunable_is_not_fallen_back_to():
    """Catches: a checkpoint reprieved by the restart although its manifest does not hold."""
    ledger = ledger_of(
        checkpoint(100, S.PRUNABLE), checkpoint(50, S.TRACKED), checkpoint(200, S.TRACKED)
    )
    found = decide(ledger, evidence(names(200), damaged(100), whole(50)))
    assert falls_back_to(found, 50), found.warnings


@pytest.mark.parametrize("state", [S.FORKED, S.FAILED, S.QUARANTINED])
def test_I8_an_unpublished_attempt_does_not_hide_a_stock_checkpoint_of_its_step(state):
    """Catches: a directory explained by an attempt that never was there; a stock run saved it."""
    ledger = ledger_of(checkpoint(50, S.TRACKED), checkpoint(100, state))
    found = decide(ledger, evidence(names(100), whole(50), stock(100)))
    assert not falls_back_to(found, 50), found.warnings


def test_I8_an_unpublished_attempt_does_not_hide_the_only_checkpoint():
    """Catches: beginning from scratch, because an attempt at the same step had failed."""
    ledger = ledger_of(checkpoint(100, S.FORKED))
    with pytest.raises(DamagedRoot):
        decide(ledger, evidence(MISSING, unexplained(100)))
    found = decide(ledger, evidence(MISSING, stock(100)))
    assert any(d.result == "adopted" for d in found.decisions)


def test_I8_a_stray_in_staging_is_no_evidence_of_a_checkpoint():
    """Catches: somebody's note in the staging directory that stops a job from beginning."""
    stray = f"{layout.STAGING}/notes"
    found = decide(Ledger(), evidence(MISSING, strays=(stray,)))
    assert [(d.subject, d.result) for d in found.decisions] == [(stray, "reported")]


def test_a_finalized_checkpoint_that_is_missing_is_called_missing():
    """Catches: "not newer than the tracked one" as the reason of a directory that is gone."""
    ledger = ledger_of(checkpoint(50, S.TRACKED), checkpoint(100, S.FINALIZED))
    found = decide(ledger, evidence(names(50), whole(50)))
    assert found.decisions[0].why == "its directory is missing"


def test_a_tracker_that_says_zero_is_quoted():
    """Catches: step 0 taken for nothing, and called unreadable."""
    with pytest.raises(DamagedRoot, match="tracker says 0"):
        decide(Ledger(), evidence(names(0)))


# ------------------------------------------------------------------------------ retention tables


@pytest.mark.parametrize("table", [{"steps": "123"}, {"keep_all": False}])
def test_F28_a_table_that_would_keep_something_else_is_refused(table):
    """Catches: text read as a list of steps, which keeps none; ``keep_all = false`` read as true."""
    with pytest.raises(ConfigError):
        parse_policy(table)


def test_F28_seconds_given_as_text_are_a_config_error():
    """Catches: a ``TypeError`` out of a comparison."""
    with pytest.raises(ConfigError):
        EveryNSeconds("often")
