"""Old segments of the journal are folded: bounded, and nothing is lost wherever that is interrupted."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterable

import pytest
from roots import read_segments

from ckptfsm.coordinator import applier
from ckptfsm.core import documents
from ckptfsm.core.errors import Fenced
from ckptfsm.core.layout import JOURNAL, parse_segment, segment_name
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.disk import journal
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage, crash_at
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.views.reading import read_lives


def run_again(disk: SimDisk, number: int, crash: int | None = None) -> FakeJob:
    """A run that opens the root, in the order of ``number``. Its process is not ended."""
    name = f"run{number}"
    hook = crash_at(crash) if crash is not None else None
    storage = FaultStorage(SimStorage(disk, name), before=hook)
    return FakeJob(storage, identity=Identity("sim", number, name, name))


def restart(disk: SimDisk, runs: Iterable[int], step: int | None = None) -> None:
    """Runs one after the other, each killed; the first saves ``step``."""
    for number in runs:
        job = run_again(disk, number)
        job.open()
        if step is not None:
            job.save(step)
            step = None
        disk.kill(f"run{number}")


def segments_of(disk: SimDisk) -> list[int]:
    found = map(parse_segment, SimStorage(disk, "reader").listdir(JOURNAL))
    return sorted(epoch for epoch in found if epoch is not None)


FEWER = pytest.mark.damages_journal("keeps fewer segments than are specified: judged in the test")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many segments are kept, in these tests."""
    for module in (documents, applier, journal):
        monkeypatch.setattr(module, "KEPT_SEGMENTS", 3, raising=False)
    return 3


def test_the_journal_of_200_runs_is_bounded():
    """Catches: segments that stay for ever; openings that read more each time, and name more."""
    disk, calls, sizes = SimDisk(), [], []
    for number in range(1, 201):
        job = run_again(disk, number)
        job.open()
        if number in (1, 100):
            job.save(number)
        newest = f"{JOURNAL}/{segment_name(number)}"
        calls.append(len(job.storage.calls))
        sizes.append(len(read_segments(SimStorage(disk, "reader"))[-1].records[0].seals))
        assert SimStorage(disk, "reader").stat(newest).kind == "file"
        disk.kill(f"run{number}")
    assert segments_of(disk) == list(range(200 - documents.KEPT_SEGMENTS - 1, 201))
    assert max(sizes) == documents.KEPT_SEGMENTS
    assert max(calls[150:]) <= calls[20] + 10
    reader = SimStorage(disk, "reader")
    assert assert_journal_conforms(reader).segments == documents.KEPT_SEGMENTS + 1
    assert [life.end for life in read_lives(reader)] == [State.TRACKED] * 2
    job = run_again(disk, 201)
    assert job.open().latest_step == 100
    assert sorted(c.step for c in job.coordinator.ledger.in_state(State.TRACKED)) == [1, 100]


@FEWER
@pytest.mark.parametrize("how", ["killed", "all_lost", "all_kept", "drawn"])
def test_I8_a_crash_at_any_call_of_a_fold_loses_nothing(few: int, how: str):
    """Catches: a segment that is gone while a journal that may be read still names it."""
    before = SimDisk()
    restart(before, range(1, 8), step=5)
    calls = run_again(before.fork(), 8)
    calls.open()
    assert any(name == "unlink" and JOURNAL in path for name, path, *_ in calls.storage.calls)
    for crash in range(len(calls.storage.calls)):
        disk = before.fork()
        with pytest.raises(ProcessDead):
            run_again(disk, 8, crash).open()
        if how == "killed":
            disk.kill("run8")
        else:
            disk.crash(random.Random(crash) if how == "drawn" else how)
        for number in (9, 10):
            assert run_again(disk, number).open().latest_step == 5
            disk.kill(f"run{number}")
        assert_journal_conforms(SimStorage(disk, "reader"))
        assert len(segments_of(disk)) <= few + 3


@FEWER
def test_I8_the_segment_before_the_newest_can_still_be_read(few: int):
    """Catches: a fold of checkpoints that the newest does not name: if that is torn, the one before
    has lost it."""
    disk = SimDisk()
    restart(disk, range(1, 9), step=5)
    newest = f"{JOURNAL}/{segment_name(8)}"
    data = disk.content(disk.find(newest))
    disk.overwrite(newest, data[:20] + b"x" + data[21:])
    assert run_again(disk, 9).open().latest_step == 5


@FEWER
def test_I9_a_fenced_manager_folds_nothing(few: int):
    """Catches: a zombie that goes on removing, after its successor has begun."""
    disk = SimDisk()
    restart(disk, range(1, 8), step=5)
    zombie, told = run_again(disk, 8), []

    def take_over(index: int, method: str, path: str) -> None:
        if not told and (method, path) == ("unlink", f"{JOURNAL}/000003.ndjson"):
            told.append(path)
            successor = run_again(disk, 9)
            successor.takeover = True
            successor.__post_init__()
            assert successor.open().latest_step == 5
            successor.save(6)

    zombie.storage.before = take_over
    with contextlib.suppress(Fenced):
        zombie.open()
    assert told
    disk.kill("run8")
    disk.kill("run9")
    assert run_again(disk, 10).open().latest_step == 6
    assert_journal_conforms(SimStorage(disk, "reader"))


@FEWER
def test_an_unsealed_segment_is_not_folded(few: int):
    """Catches: a journal that came back, of a disk that was away for a run, deleted as old."""
    disk = SimDisk()
    restart(disk, range(1, 4), step=5)
    old = disk.content(disk.find(f"{JOURNAL}/000003.ndjson"))
    for epoch in segments_of(disk):
        SimStorage(disk, "person").unlink(f"{JOURNAL}/{segment_name(epoch)}")
    restart(disk, range(4, 7))
    disk.plant_file(f"{JOURNAL}/000003.ndjson", old)
    restart(disk, range(7, 20))
    assert segments_of(disk)[0] == 3


@FEWER
def test_a_segment_that_stays_is_folded_by_the_next_opening(few: int):
    """Catches: an opening that fails for a needless segment."""
    disk = SimDisk()
    restart(disk, range(1, 8), step=5)
    job = run_again(disk, 8)

    def sick(index: int, method: str, path: str) -> None:
        if method == "unlink" and path.startswith(JOURNAL):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = sick
    assert job.open().latest_step == 5
    disk.kill("run8")
    left = segments_of(disk)
    restart(disk, [9])
    assert len(segments_of(disk)) < len(left)
