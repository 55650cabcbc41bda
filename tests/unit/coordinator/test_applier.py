"""The applier of the coordinator on a simulated disk: it publishes, keeps, refuses, and brings along."""

from __future__ import annotations

import random
from typing import Any

import pytest
from roots import (
    TWO,
    Strike,
    content,
    in_place,
    judge,
    saved,
    start,
    start_with,
    tracked,
)

from ckptfsm.coordinator.applier import NewsQueue
from ckptfsm.core import events as m
from ckptfsm.core.errors import (
    ConfigError,
    OutcomeUnknown,
    SaveRefused,
)
from ckptfsm.core.events import ShardReported
from ckptfsm.core.layout import (
    MANIFEST,
    MEGATRON,
    TRACKER,
    receipt_name,
)
from ckptfsm.core.lifecycle import absent, apply
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Identity, PartJob, RankJob, Written
from ckptfsm.core.requests import NothingInFlight, SaveRequest
from ckptfsm.disk.durable import write_new
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import PARTS, FakeJob, FakePart, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank
from ckptfsm.writers.shard_file import ShardFile


def test_I2_a_directory_that_the_trainer_made_is_durable_before_the_tracker_names_it():
    """Catches: a tracker that names a directory before the name of that directory is durable."""
    for seed in range(60):
        disk = SimDisk()
        storage = FaultStorage(SimStorage(disk, "first"))
        job = start_with(storage, "first", ranks=1)
        job.save(1)
        SimStorage(disk, "trainer").mkdir("iter_0000002")
        of = in_place(job, 2)
        part = FakePart("state", "", 0, fake_content(of, 0))
        written = write_rank(storage, RankJob(of, 0, 1, MEGATRON.working_dir(of, True), (part,)))
        storage.before = DiesAfterTracker()
        with pytest.raises(ProcessDead):
            job.coordinator.report([ShardReported(of, n, 0, 1, s) for n, s, _ in written])
        disk.crash(random.Random(seed))
        snapshot = disk.snapshot()
        assert int(snapshot[TRACKER]) == 1 or "iter_0000002/.ckptfsm/manifest.json" in snapshot, (
            seed
        )


class DiesAfterTracker:
    """Dies at the fsync that makes the tracker's name durable."""

    def __init__(self) -> None:
        self.renamed = False

    def __call__(self, index: int, method: str, path: str) -> None:
        self.renamed = self.renamed or (method == "rename" and path.endswith(f"-> {TRACKER}"))
        if self.renamed and method == "fsync_dir" and path == "":
            raise ProcessDead("first")


def test_I10_an_unexpected_error_stops_the_coordinator():
    """Catches: an attempt that is never ended, because its report was lost with a bug or the
    memory."""
    disk = SimDisk()
    job = start(disk, "first")
    of = job.request(1)
    job.fork(of)
    job.write(of, 0)
    job.storage.before = Strike("rename", "iter_0000001", MemoryError("no memory"))
    with pytest.raises(OutcomeUnknown, match="MemoryError"):
        job.write(of, 1)
    assert isinstance(job.coordinator.fatal, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        job.request(2)


def test_I4_leftovers_are_swept_and_a_listed_file_never():
    """Catches: a part's file deleted for its name, after its receipt was believed; a whole attempt that
    fails because a killed writer left a temporary file."""
    disk = SimDisk()
    job = start(disk, "first", ranks=1)
    of = job.request(1, (PartSpec("vocab", "file", ranks=(0,)),))
    job.fork(of)
    written = write_rank(
        job.storage, RankJob(of, 0, 1, MEGATRON.working_dir(of, False), (Vocabulary(),))
    )
    left = receipt_name("vocab", 0) + ".tmp-1.e1.a1.0"
    write_new(job.storage, f"{MEGATRON.working_dir(of, False)}/{left}", b"{")
    job.coordinator.report([ShardReported(of, n, 0, 1, s) for n, s, _ in written])
    assert tracked(job) == [1]
    assert "iter_0000001/bpe.tmp-final.json" in disk.snapshot()
    assert f"iter_0000001/{left}" not in disk.snapshot()


class Vocabulary(PartJob):
    name, directory = "vocab", ""

    def write(self, storage: Any, location: str) -> Written:
        shard = ShardFile(storage, f"{location}/bpe.tmp-final.json")
        shard.write(b"{}")
        return Written((shard.close_durably("bpe.tmp-final.json"),))


def test_F20_an_adopted_step_brings_its_time_and_metrics():
    """Catches: policies that prune the wrong ones after the journal was moved away: run time begins at
    zero again, and the best checkpoint has no metric."""
    disk = SimDisk()
    job = start(disk, "first")
    job.clock.now += 7200
    job.save(1)
    of = job.coordinator.ledger.latest().id
    job.close()
    for name in SimStorage(disk, "person").listdir(".ckptfsm/journal"):
        SimStorage(disk, "person").unlink(f".ckptfsm/journal/{name}")
    again = start(disk, "second")
    adopted = again.coordinator.ledger.checkpoints[of]
    assert adopted.provenance == "adopted" and adopted.run_seconds >= 7200
    again.save(2)
    assert again.coordinator.ledger.latest().run_seconds >= adopted.run_seconds
    metrics = (("loss", 1.5),)
    assert apply(absent(of), m.Adopted(of, 1.0, metrics))[0].metrics == metrics


def test_I5_the_manifest_of_another_attempt_is_not_our_commit():
    """Catches: a manifest of another attempt at the step (a fenced job's, that landed late) taken
    for ours: another state is tracked than was written."""
    other = SimDisk()
    job = start(other)
    job.fail(in_place(job, 2))
    theirs = in_place(job, 2)
    for rank in (0, 1):
        job.write(theirs, rank)
    disk = SimDisk()
    job = start(disk)
    ours = in_place(job, 2)
    assert ours != theirs
    job.write(ours, 0)
    disk.plant_file(f"{TWO}/{MANIFEST}", content(other, f"{TWO}/{MANIFEST}"))
    job.write(ours, 1)
    assert tracked(job) == [2]
    assert read_manifest(SimStorage(disk, "look"), TWO).of == ours


def test_F28_a_part_directory_named_like_a_temporary_file_is_refused():
    """I4. Catches: a part's directory that is swept as a leftover out of an acknowledged step."""
    disk = SimDisk()
    job = saved(disk, 1)
    with pytest.raises(ConfigError):
        job.save(2, (PartSpec("model", directory="m.tmp-1"),))
    job.save(2, (PartSpec("model", directory="m"),))
    assert judge(disk, 2) == 2


NOBODY = (PartSpec("state", ranks=()),)


def started(disk: SimDisk, name: str = "first", *, before=None, **settings) -> FakeJob:
    """A job with a simulated process; ``before`` is a hook that may fail its calls."""
    storage = FaultStorage(SimStorage(disk, name), before=before)
    job = FakeJob(storage, identity=Identity("sim", sum(name.encode()), name, name), **settings)
    job.open()
    return job


def latest_step(job: FakeJob) -> int | None:
    latest = job.coordinator.ledger.latest()
    return latest.step if latest else None


def test_F26_a_metric_that_is_not_a_number_does_not_lock_the_root():
    """Catches: NaN journaled as null, which no number reads back: every later open fails."""
    disk = SimDisk()
    job = started(disk)
    of = job.coordinator.request(
        SaveRequest(10, PARTS, job.ranks, metrics=(("loss", float("nan")),))
    )
    job.fork(of)
    for rank in range(job.ranks):
        job.write(of, rank)
    job.close()
    assert latest_step(started(disk, "second")) == 10


def test_a_refused_save_does_not_lock_the_root():
    """Catches: parts without a writer, journaled before they are refused: no restart ends that."""
    disk = SimDisk()
    job = started(disk)
    with pytest.raises((ConfigError, SaveRefused)):
        job.request(10, NOBODY)
    job.coordinator.abandon()
    again = started(disk, "second")
    again.save(10)
    assert latest_step(again) == 10


def test_there_are_news_exactly_if_some_can_be_read():
    """Catches: news that no poll fetches, and a poll that fetches none for ever."""
    queue = NewsQueue()
    for forgotten, count in ((0, 0), (0, 3), (2, 0), (3, 0), (3, 1), (4, 0)):
        for _ in range(count):
            queue.append(NothingInFlight())
        queue.forget(forgotten)
        for number in range(6):
            assert queue.has(number) == bool(queue.since(number)), (forgotten, number)
