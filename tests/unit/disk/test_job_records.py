"""Which steps jobs hold, by the records of these jobs."""

from __future__ import annotations

import pytest
from ledgers import ledger_of

from ckptfsm.core.documents import JobRecord, JobState, encode
from ckptfsm.core.jobs import first_record
from ckptfsm.core.layout import JOBS, job_name
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.disk.durable import make_dirs
from ckptfsm.disk.job_records import JobHolds
from ckptfsm.testing.simfs import SimDisk, SimStorage

HOLDS = {"copy": 1, "export": 20}


def at(step: int) -> AttemptId:
    return AttemptId(step, 1, step)


def ledger(*steps: int) -> Ledger:
    checkpoints = [Checkpoint(at(step), State.TRACKED, (PartSpec("state"),)) for step in steps]
    return ledger_of(*checkpoints)


def record(step: int, job: str, state: JobState = JobState.DONE) -> JobRecord:
    return first_record(at(step), job).model_copy(update={"state": state})


@pytest.fixture
def disk() -> SimDisk:
    made = SimDisk()
    make_dirs(SimStorage(made, "jobs"), JOBS)
    return made


def held(disk: SimDisk, *steps: int) -> dict[int, tuple[str, ...]]:
    return JobHolds(SimStorage(disk, "look"), HOLDS).of_steps(ledger(*steps))


def put(disk: SimDisk, step: int, job: str, data: bytes) -> None:
    disk.plant_file(job_name(at(step), job), data)


def test_I7_a_job_holds_the_multiples_of_its_every_until_it_is_done(disk):
    """Catches: a step that another job's record lets go, and one that no job ever takes and is held."""
    assert held(disk, 10, 20) == {10: ("copy",), 20: ("copy", "export")}
    put(disk, 20, "copy", encode(record(20, "copy")))
    assert held(disk, 10, 20) == {10: ("copy",), 20: ("export",)}
    put(disk, 20, "export", encode(record(20, "export")))
    assert held(disk, 10, 20) == {10: ("copy",)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode(record(10, "copy"))[:-1],
        encode(record(10, "export")),
        encode(record(20, "copy")),
        encode(record(10, "copy")).replace(b'"schema_version":1', b'"schema_version":2'),
        *(encode(record(10, "copy", each)) for each in JobState if each is not JobState.DONE),
    ],
)
def test_I7_F21_a_record_that_does_not_say_that_it_is_done_holds_its_step(disk, data):
    """Catches: a step without a copy that is pruned, as its record is torn, another's or a newer one."""
    put(disk, 10, "copy", data)
    assert held(disk, 10) == {10: ("copy",)}


def test_I7_F6_a_record_that_the_disk_does_not_give_holds_its_step(disk, monkeypatch):
    """Catches: a bad sector that lets a step go, or that stops all pruning."""
    put(disk, 10, "copy", encode(record(10, "copy")))

    def refused(*_: object) -> bytes:
        raise OSError(5, "bad disk")

    storage = SimStorage(disk, "look")
    holds = JobHolds(storage, HOLDS)
    with monkeypatch.context() as broken:
        broken.setattr(storage, "read", refused)
        assert holds.of_steps(ledger(10)) == {10: ("copy",)}
    assert holds.of_steps(ledger(10)) == {}
    monkeypatch.setattr(storage, "read", refused)
    assert holds.of_steps(ledger(10)) == {}, "what is done is not read at every save"
