"""The bytes that a writer gave to the disk, as its trainer reads them: of fakes and of processes."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from refused_reads import refuse_reads
from sim_writers import PlainCount, SimWriters

from ckptfsm.adapters import segments
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.shared_count import counted
from ckptfsm.core.images import Literal, Memory, image_of
from ckptfsm.core.layout import staging_dir
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Launch, RankJob, Storage, WriterProcess
from ckptfsm.disk.durable import make_dirs
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakePart
from ckptfsm.testing.simfs import SimDisk, SimStorage
from ckptfsm.writers.image import ImagePart
from ckptfsm.writers.rank_writer import FilePart, launch_forked, write_rank
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings

OF = AttemptId(5, 1, 1)
LOCATION = staging_dir(OF)
WAIT_S = 30.0
NOTES = FilePart("notes", "notes.txt", b"n" * 5000)
STATE_BYTES = (9 << 20) + 7  # three chunks, the last of an odd length
TOTAL = STATE_BYTES + 4 + len(NOTES.data)


def state() -> tuple[ctypes.Array, ImagePart]:
    """A trainer's memory, and the part that names it."""
    memory = ctypes.create_string_buffer(STATE_BYTES)
    pieces = [Literal(b"head"), Memory(ctypes.addressof(memory), STATE_BYTES)]
    return memory, ImagePart("state", "", (image_of("__0_0.distcp", pieces),))


def job(*parts) -> RankJob:
    return RankJob(OF, 0, 1, LOCATION, parts)


@pytest.fixture
def storage(tmp_path: Path):
    (tmp_path / LOCATION).mkdir(parents=True)
    made = PosixStorage(tmp_path)
    yield made
    made.close_root()


@pytest.fixture
def engine():
    made: list[WriteEngine] = []

    def make(mode) -> WriteEngine:
        made.append(WriteEngine(WriteEngineSettings(mode=mode)))
        made[-1].expect_gate()
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def ended(process: WriterProcess) -> int:
    """The bytes of a writer's report, once it has ended."""
    until(lambda: process.holds_copy)
    process.confirm()
    outcome = process.wait(WAIT_S)
    assert outcome is not None and outcome.succeeded, outcome
    return sum(count for _, count, _ in outcome.payload)


class Finished(SimWriters):
    """A fake whose writers end when they are launched."""

    def __call__(self, storage: Storage, job: RankJob):
        writer = super().__call__(storage, job)
        assert writer.written_bytes() == 0
        writer.finish()
        return writer


@pytest.mark.parametrize("kind", ["fake", "fork", "eager", "gated"])
def test_a_writer_that_ended_has_counted_what_it_reports(kind, storage, engine):
    """Catches: bytes that are not counted or counted twice; padding and receipts that are counted."""
    memory, part = state()
    launch: Launch
    if kind == "fake":
        disk = SimDisk()
        storage = SimStorage(disk, "trainer")
        make_dirs(storage, LOCATION)
        launch, parts = Finished(disk), (FakePart("state", "", 0, b"x" * 70000), NOTES)
    else:
        launch, parts = launch_forked if kind == "fork" else engine(kind), (part, NOTES)
    process = launch(storage, job(*parts))
    reported = ended(process)
    assert process.written_bytes() == reported
    assert kind == "fake" or reported == TOTAL
    del memory


@pytest.mark.parametrize("mode", ["eager", "gated"])
def test_the_count_of_a_process_is_there_before_its_word(mode, storage, engine):
    """Catches: a count that comes with the end of the job, when nobody needs it any more."""
    memory, part = state()
    process = engine(mode)(storage, job(part, NOTES))
    until(lambda: process.written_bytes() == TOTAL)
    assert process.poll() is None, "it waits for the trainer's word"
    assert ended(process) == TOTAL
    del memory


def test_each_job_of_a_process_counts_from_zero(storage, engine):
    """Catches: the bytes of the save before, shown as those of this one."""
    launch = engine("eager")
    first = launch(storage, job(NOTES))
    assert ended(first) == first.written_bytes() == len(NOTES.data)
    second = launch(storage, job(FilePart("more", "more.txt", b"m" * 11)))
    assert ended(second) == second.written_bytes() == 11
    assert first.written_bytes() == len(NOTES.data), "its count stays as it was"


def test_a_process_that_begins_again_counts_anew(storage, engine, monkeypatch):
    """Catches: the bytes of a process that was killed, counted once more with those of the next."""
    refuse_reads(monkeypatch)  # the copy in shared memory outlives the process
    memory, part = state()
    process = engine("eager")(storage, job(part, NOTES))
    until(lambda: process.written_bytes() == TOTAL)
    killed = process._process.pid
    os.kill(killed, signal.SIGKILL)
    assert ended(process) == process.written_bytes() == TOTAL
    assert process._process.pid != killed
    del memory


def test_a_forked_writer_counts_while_it_writes(storage, tmp_path):
    """Catches: a count in memory that the fork has copied."""
    memory, part = state()
    gate = FifoGate(tmp_path / "gate")

    def hold(at: int, method: str, path: str) -> None:
        if method == "open_exclusive" and path.endswith("notes.txt"):
            gate.hold()

    process = launch_forked(FaultStorage(storage, before=hold), job(part, NOTES))
    held = gate.reached()
    assert process.written_bytes() == STATE_BYTES + 4
    os.close(held)
    assert ended(process) == process.written_bytes() == TOTAL
    del memory


def test_a_writer_that_died_keeps_its_count():
    """Catches: a failed save whose progress is lost with its writer."""
    disk = SimDisk()
    storage = SimStorage(disk, "trainer")
    make_dirs(storage, LOCATION)
    writer = SimWriters(disk)(storage, job(FilePart("a", "a", b"a" * 10), NOTES))
    probe = FaultStorage(SimStorage(SimDisk(), "probe"))
    make_dirs(probe.inner, LOCATION)
    write_rank(probe, job(FilePart("a", "a", b"a" * 10), NOTES))
    writer.die(after_calls=probe.calls.index(("write", f"{LOCATION}/notes.txt")))
    assert writer.written_bytes() == 10


def test_a_gated_save_needs_no_shared_memory(storage, engine, monkeypatch, caplog):
    """Catches: a container without memfd in which no save begins; a warning for each save."""
    memory, part = state()
    launch = engine("gated")
    launch.start()

    def refuse(*_) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(segments.os, "memfd_create", refuse)
    for one in (part, NOTES):
        process = launch(storage, job(one))
        assert ended(process) > 0
        assert process.written_bytes() == 0
    assert [r.event for r in caplog.records if r.event == "no_progress"] == ["no_progress"]
    del memory


def test_a_short_write_counts_what_was_taken():
    """Catches: bytes that the disk did not take, and the padding behind a file."""
    disk = SimDisk()
    inner, count = SimStorage(disk, "writer"), PlainCount()
    inner.pwrite = lambda handle, data, offset: min(len(data), 4096)
    storage = counted(inner, count)
    handle = storage.open_exclusive("file", direct=True)
    storage.allocate(handle, 5000)
    for offset in (0, 4096):
        storage.pwrite(handle, bytes(8192)[offset:], offset)
    storage.close(handle)
    assert count.value == 5000
