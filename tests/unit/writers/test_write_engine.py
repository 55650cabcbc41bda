"""The persistent writer process: the view of its trainer, and when memory may be changed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
from refused_reads import refuse_reads

from ckptfsm.adapters import memory, shared_work, spawn
from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.fork import Child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.segments import SharedSegment, Span
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.core.events import Failed, ShardReported, WriterForked
from ckptfsm.core.images import Literal, Memory, image_of
from ckptfsm.core.layout import receipt_name, staging_dir
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import LaunchInterrupted, Outcome, PartJob, RankJob
from ckptfsm.ranks.group_worker import GroupShare
from ckptfsm.ranks.tickets import Ticket
from ckptfsm.writers import rank_writer, write_engine, write_job
from ckptfsm.writers.image import ImagePart
from ckptfsm.writers.rank_writer import FilePart, RankWriter
from ckptfsm.writers.trainers_memory import Arena, Range
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings
from ckptfsm.writers.write_job import MemoryRoute, WriteJob
from ckptfsm.writers.write_process import (
    Hello,
    MemoryRead,
    OrderAccepted,
    ProbeMemory,
    WriteOrder,
    _await_confirmation,
)

OF = AttemptId(5, 1, 1)
LOCATION = staging_dir(OF)
FAR = 1e12
WAIT_S = 30.0
MIB = 1 << 20


class State:
    """Memory of the trainer, until the test ends: ``count`` tensors of ``size`` bytes."""

    living: ClassVar[list[State]] = []

    def __init__(self, count: int = 2, size: int = 3 * MIB + 5) -> None:
        self.buffers = [
            ctypes.create_string_buffer(bytes([65 + i]) * size, size) for i in range(count)
        ]
        self.living.append(self)

    def part(
        self,
        name: str = "state",
        files: str = "__0",
        *,
        mutable: bool = True,
        early: Collection[int] = (),
    ) -> ImagePart:
        images = [
            image_of(
                f"{files}_{i}.distcp",
                [
                    Literal(b"head"),
                    Memory(ctypes.addressof(b), len(b), mutable, early=i in early),
                    Literal(b"t"),
                ],
            )
            for i, b in enumerate(self.buffers)
        ]
        return ImagePart(name, "", tuple(images), (("row", 1),))

    def wanted(self, index: int) -> bytes:
        return b"head" + self.buffers[index].raw + b"t"


@pytest.fixture(autouse=True)
def free_states():
    yield
    State.living.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / LOCATION).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def storage(root: Path):
    made = PosixStorage(root)
    yield made
    made.close_root()


@pytest.fixture
def engine():
    made: list[WriteEngine] = []

    def make(**settings) -> WriteEngine:
        made.append(WriteEngine(WriteEngineSettings(**settings)))
        if settings.get("mode") == "gated":
            made[-1].expect_gate()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def refused_reads(monkeypatch):
    refuse_reads(monkeypatch)


def job(*parts, of: AttemptId = OF) -> RankJob:
    return RankJob(of, 0, 1, staging_dir(of), parts)


def writer(engine, storage, *parts, of: AttemptId = OF, changed=str) -> RankWriter:
    draft = SimpleNamespace(changed=changed, let_go=lambda: None)
    made = RankWriter(storage, job(*parts, of=of), launch=engine, deadline=FAR, draft=draft)
    made.check_launch()
    return made


def ends(writer: RankWriter) -> list[object]:
    """The reports of a writer once it has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        reports = writer.poll(0.0)
        if any(isinstance(each, (Failed, ShardReported)) for each in reports):
            return reports
        writer.process.wait(0.05)
    raise AssertionError("the writer does not end")


def begin_attempt(root: Path, step: int = 6, number: int = 2) -> AttemptId:
    """Another attempt, whose directory is there."""
    of = AttemptId(step, 1, number)
    (root / staging_dir(of)).mkdir(parents=True)
    return of


def written(root: Path, files: str = "__0", of: AttemptId = OF) -> list[bytes]:
    """The content of the files of a part, in their order."""
    found = (root / staging_dir(of)).glob(f"{files}_*.distcp")
    return [path.read_bytes() for path in sorted(found)]


def pid_of(writer: RankWriter) -> int:
    return writer.process._process.pid


def second_save(used: WriteEngine, storage, root: Path, *parts) -> RankWriter:
    run = writer(used, storage, *parts, of=begin_attempt(root))
    assert isinstance(ends(run)[-1], ShardReported)
    return run


@pytest.mark.parametrize("mode", ["eager", "gated"])
def test_a_state_is_written_and_reported(engine, storage, root, mode):
    """Catches: a file with other bytes than the state; a success without a receipt."""
    state = State()
    run = writer(engine(mode=mode), storage, state.part(), FilePart("data.pt", "data.pt", b"plain"))
    forked, shards, plain = ends(run)
    assert forked == WriterForked(OF, 0, 1)
    assert (shards.part, shards.shard_bytes) == ("state", sum(len(state.wanted(i)) for i in (0, 1)))
    assert (plain.part, plain.shard_bytes) == ("data.pt", 5)
    assert written(root) == [state.wanted(0), state.wanted(1)]
    assert (root / LOCATION / receipt_name("state", 0)).exists()


def test_an_eager_save_may_be_changed_when_its_launch_returns(engine, storage, root):
    """Catches: a torn file, of a state that was changed as soon as it was allowed."""
    state = State(size=20 * MIB)
    wanted = state.wanted(0)
    run = writer(engine(mode="eager"), storage, state.part())
    assert run.has_copy
    for buffer in state.buffers:
        ctypes.memset(buffer, 0, len(buffer))
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == wanted


def test_a_gated_save_holds_no_copy_until_all_is_read(engine, storage, root):
    """Catches: a gate that opens early: few buffers are filled again and again."""
    state = State(count=1, size=40 * MIB)
    wanted = state.wanted(0)
    run = writer(engine(mode="gated", buffer_bytes=8 * MIB), storage, state.part())
    run.process.await_copy(WAIT_S)
    run.look_at_copy()
    assert run.has_copy
    ctypes.memset(state.buffers[0], 0, len(state.buffers[0]))
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == wanted


@pytest.mark.parametrize(
    ("mode", "free", "wanted"),
    [("auto", 1 << 40, 40), ("auto", 40 * MIB, 20), ("auto", 0, 8), ("gated", 1 << 40, 8)],
)
def test_a_gate_waits_for_no_disk_where_there_is_memory(engine, mode, free, wanted):
    """Catches: a trainer that waits for a slow disk beside free memory, or whose host has none left."""
    used = engine(mode=mode, buffer_bytes=8 * MIB, free_bytes=lambda: free)
    used.expect_gate()
    assert used._reading(job(State(count=1, size=36 * MIB).part())).buffer_bytes == wanted * MIB


def test_the_buffers_of_a_writer_count_as_free_memory(engine, storage, root):
    """Catches: half of the buffers in each save, as the writer itself has taken the free memory."""
    free = 80 * MIB
    used = engine(buffer_bytes=8 * MIB, free_bytes=lambda: free)
    used.expect_gate()
    state = State(count=1, size=36 * MIB)
    ends(writer(used, storage, state.part()))
    kept = used._kept_bytes
    assert 8 * MIB <= kept <= 40 * MIB
    free = 0
    # Half of the memory that is free without this writer, as before.
    assert used._reading(job(state.part())).buffer_bytes == max(8 * MIB, kept // 2)
    used._process.kill()
    ends(writer(used, storage, state.part(), of=begin_attempt(root)))
    assert used._kept_bytes == 8 * MIB


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_memory_that_waits_for_no_gate_may_be_changed_when_the_launch_returns(
    engine, storage, root, free
):
    """Catches: a torn file of an average that is updated before the gate."""
    state = State(size=20 * MIB)
    wanted = state.wanted(1)
    used = engine(mode="gated", buffer_bytes=8 * MIB, free_bytes=lambda: free)
    run = writer(used, storage, state.part(early=[1]))
    assert run.process.must_wait == (not free)  # no memory for a copy: the trainer waits
    if run.process.must_wait:
        run.process.await_copy(WAIT_S)
    ctypes.memset(state.buffers[1], 0, len(state.buffers[1]))
    assert run.process._mutable  # the other tensor
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == state.wanted(0)
    assert (root / LOCATION / "__0_1.distcp").read_bytes() == wanted


@pytest.mark.parametrize("promised", [False, True])
def test_small_memory_is_copied_and_keeps_nobody_waiting(engine, storage, root, promised):
    """Catches: a save that waits for a writer, or is torn, for the sake of a few numbers."""
    used, state = engine(mode="gated"), State(size=1000)
    used._gate = promised
    wanted = state.wanted(0)
    run = writer(used, storage, state.part(early=[0, 1]))
    assert (run.process.must_wait, run.process._mutable) == (False, False)
    ctypes.memset(state.buffers[0], 0, len(state.buffers[0]))
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == wanted


def test_a_copy_is_read_in_place_of_its_shared_segment():
    """Catches: an average in shared memory beside an optimizer's state, read while it is changed."""
    copies = [Span(1000, 100, 0, 0), Span(1150, 50, 0, 128)]
    segment, arena = SimpleNamespace(address=1000, size=300), SimpleNamespace(segment=None)
    reading = write_job.MemoryRoute(1, True, segments=(segment,), arena=arena, copies=copies)
    assert sorted(reading.spans) == [
        Span(1000, 100, 0, 0),
        Span(1100, 50, 1, 100),
        Span(1150, 50, 0, 128),
        Span(1200, 100, 1, 200),
    ]


@pytest.mark.parametrize("writers", [1, 2])
def test_a_state_that_changed_too_early_leaves_no_receipt(engine, storage, root, dies, writers):
    """Catches: a torn checkpoint that counts, also of a writer that began again."""
    dies[0] = writers - 1
    run = writer(engine(mode="gated"), storage, State().part(), changed=lambda: "w1 was changed")
    [failed] = ends(run)
    assert (failed.reason, failed.detail) == ("state_changed", "rank 0: w1 was changed")
    assert run.process.kill(WAIT_S)
    assert not (root / LOCATION / receipt_name("state", 0)).exists()
    assert run.poll(0.0) == [failed]


def test_the_process_stays_for_the_next_save(engine, storage, root):
    """Catches: a new process for each save, with memory that is taken anew each time."""
    used = engine()
    pids = set()
    for attempt in (1, 2, 3):
        of = begin_attempt(root, attempt, attempt)
        run = writer(used, storage, State().part(), of=of)
        ends(run)
        pids.add(pid_of(run))
    assert len(pids) == 1


def test_F1_a_killed_process_fails_its_save_and_the_next_one_has_another(engine, storage, root):
    """Catches: a dead writer that counts as a success, or is used again; one that begins again when
    the trainer may have changed its state."""
    used = engine(mode="gated")
    # asked as soon as all is read, maybe before the next line
    changed = lambda: kill(next(iter(used._running))) or ""  # noqa: E731
    run = writer(used, storage, State().part(), changed=changed)
    end = ends(run)[-1]
    assert isinstance(end, Failed)
    assert "SIGKILL" in end.detail
    assert run.kill(WAIT_S)
    again = writer(used, storage, State().part(), of=begin_attempt(root))
    assert isinstance(ends(again)[-1], ShardReported)
    assert pid_of(again) != pid_of(run)


def kill(process: WriteJob) -> None:
    """SIGKILL from outside, as of the kernel out of memory; the process has ended then."""
    pid = process._process.pid
    try:
        watched = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # by itself, a moment ago
        return
    select.select([watched], [], [], WAIT_S)
    os.close(watched)


@pytest.fixture
def dies(monkeypatch):
    """Makes the next processes die when they have begun a job, before they read."""
    left, failed = [0], []
    send, next_message = Spawned.send, Spawned.next_message

    def last_message(process: Spawned, message: object, *more, **named) -> None:
        deadly = isinstance(message, WriteOrder) and left[0] > 0
        if deadly:
            left[0] -= 1
            os.kill(process.pid, signal.SIGSTOP)
        send(process, message, *more, **named)
        if deadly:
            os.kill(process.pid, signal.SIGKILL)
            failed.append(process)

    def of_the_dead(process: Spawned, timeout_s: float) -> object:
        return OrderAccepted() if process in failed else next_message(process, timeout_s)

    monkeypatch.setattr(Spawned, "send", last_message)
    monkeypatch.setattr(Spawned, "next_message", of_the_dead)
    return left


@pytest.mark.parametrize("mode", ["eager", "gated"])
def test_F1_a_process_that_dies_before_it_has_read_begins_again(
    engine, storage, root, dies, caplog, mode
):
    """Catches: an attempt that is lost with its writer though its state is as it was; files of the
    dead one that are in the way, or are taken for those of the new one."""
    dies[0] = 1
    (root / LOCATION / "__0_1.distcp").write_bytes(b"half")
    (root / LOCATION / "data.pt").write_bytes(b"half")
    used, state = engine(mode=mode), State()
    run = writer(used, storage, state.part(), FilePart("data.pt", "data.pt", b"plain"))
    assert [type(each) for each in ends(run)] == [WriterForked, ShardReported, ShardReported]
    assert written(root) == [state.wanted(0), state.wanted(1)]
    assert (root / LOCATION / "data.pt").read_bytes() == b"plain"
    assert [r.event for r in caplog.records] == ["writer_restarted"]
    assert used._process is run.process._process, "it stays for the next save"
    second_save(used, storage, root, State().part())


def test_F1_a_job_begins_again_only_once(engine, storage, root, dies):
    """Catches: a host that is out of memory, and starts a process after the other."""
    dies[0] = 2
    run = writer(engine(mode="gated"), storage, State().part())
    [failed] = ends(run)
    assert failed.reason == "writer_died"
    assert dies[0] == 0


def test_a_writer_that_was_given_up_does_not_begin_again(engine, storage, root, dies):
    """Catches: a second writer in an attempt whose first one was killed by its trainer."""
    dies[0] = 1
    process = engine(mode="gated")(storage, job(State().part()))
    pid = process._process.pid
    assert process.kill(WAIT_S)
    assert process._process.pid == pid
    dies[0] = 1
    late = engine(mode="gated")(storage, job(State().part()))
    late._process.kill = lambda timeout_s: False  # it is not gone in time
    late._again = Mock(return_value=None)
    started = late._again
    assert not late.kill(0.0)
    kill(late)
    assert late.poll() == Outcome(-signal.SIGKILL)
    started.assert_not_called()


def test_F1_files_in_place_are_not_removed_for_a_new_writer(engine, storage, root, dies):
    """Catches: a file of a later attempt that is removed: in place, attempts use the same names."""
    dies[0] = 1
    (root / "iter_5").mkdir()
    (root / "iter_5/__0_1.distcp").write_bytes(b"another's")
    process = engine(mode="gated")(storage, replace(job(State().part()), location="iter_5"))
    assert process.wait(WAIT_S).exitcode == -signal.SIGKILL
    assert (root / "iter_5/__0_1.distcp").read_bytes() == b"another's"


def test_F1_a_whole_copy_is_written_again_before_the_receipt(engine, storage, root):
    """Catches: an arena that is lost with the process that read it; a new writer that waits for a
    word which its predecessor has had."""
    state = State()
    wanted = state.wanted(0)
    process = engine(mode="eager")(storage, job(state.part()))
    ctypes.memset(state.buffers[0], 0, len(state.buffers[0]))
    while not process._taken:
        process._listen(WAIT_S)
    kill(process)
    process.confirm()  # the dead one does not hear it
    assert process.wait(WAIT_S).succeeded
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == wanted


def test_F1_copies_that_were_let_go_are_not_read_again(engine, storage, root):
    """Catches: other memory in a checkpoint, or zeros: the trainer let go of host copies once they were
    read, and a new writer reads them."""
    parts = State().part(), State().part("copies", "__1", mutable=False)
    process = engine(mode="eager")(storage, job(*parts))
    while not process._taken:
        process._listen(WAIT_S)
    kill(process)
    assert process.poll() == Outcome(-signal.SIGKILL)


def test_F1_a_writer_with_a_receipt_does_not_begin_again(engine, storage, root):
    """Catches: files that are removed though a receipt vouches for them."""
    process = engine(mode="eager")(storage, job(State().part()))
    while not process._taken:
        process._listen(WAIT_S)
    kill(process)
    receipt = root / LOCATION / receipt_name("state", 0)
    receipt.parent.mkdir(parents=True)
    receipt.write_bytes(b"receipt")
    assert process.poll() == Outcome(-signal.SIGKILL)


def test_F1_a_process_that_dies_between_saves_is_started_anew(engine, storage, root):
    """Catches: a save that fails because its writer died long before."""
    used = engine()
    ends(writer(used, storage, State().part()))
    pid = used._process.pid
    os.kill(pid, signal.SIGKILL)
    select.select([watched := os.pidfd_open(pid)], [], [], WAIT_S)
    os.close(watched)
    second_save(used, storage, root, State().part())


def end_before(message: type, how: signal.Signals, times: int, monkeypatch) -> list[Spawned]:
    """Strike processes with a signal when they are to get such a message. Returns those struck."""
    struck: list[Spawned] = []
    send = Spawned.send

    def strike_first(process: Spawned, content: object, *more, **named) -> None:
        if isinstance(content, message) and len(struck) < times:
            struck.append(process)
            os.kill(process.pid, how)
        send(process, content, *more, **named)

    monkeypatch.setattr(Spawned, "send", strike_first)
    return struck


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("message", "size"), [(ProbeMemory, 1), (WriteOrder, 1), (WriteOrder, 4 * MIB)]
)
def test_F1_a_process_that_does_not_serve_has_a_successor(
    engine, storage, root, monkeypatch, caplog, how, message, size
):
    """Catches: a save that fails, or waits until its writer's deadline, because the process died or was
    stopped while it waited; one that blocks as its order is larger than the socket; two writers."""
    used = engine(mode="gated")
    ends(writer(used, storage, State().part()))
    first, struck = used._process, end_before(message, how, 1, monkeypatch)
    monkeypatch.setattr(write_engine, "SERVE_S", 12.0)
    image = image_of("x", [Literal(bytes(size)), *State().part().images[0].pieces])
    run = second_save(used, storage, root, ImagePart("state", "", (image,)))
    assert struck == [first] and first.exitcode() == -signal.SIGKILL
    assert isinstance(run.process, WriteJob) and run.process._process is not first
    assert [r.event for r in caplog.records] == ["writer_restarted"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_F1_without_a_process_that_serves_the_save_is_forked(
    engine, storage, root, monkeypatch, caplog, how
):
    """Catches: a save that fails with the second process; files of those that are in the fork's way, or
    two writers at a time."""
    used, state = engine(mode="eager"), State()
    ends(writer(used, storage, State().part()))
    struck = end_before(WriteOrder, how, 2, monkeypatch)
    monkeypatch.setattr(write_engine, "SERVE_S", 6.0)
    half = root / staging_dir(AttemptId(6, 1, 2)) / "__0_1.distcp"
    begun = WriteEngine._begun

    def with_a_file(*arguments) -> str:
        half.write_bytes(b"half")  # of a process that had begun
        return begun(*arguments)

    monkeypatch.setattr(WriteEngine, "_begun", with_a_file)
    run = second_save(used, storage, root, state.part())
    assert isinstance(run.process, Child)
    assert half.read_bytes() == state.wanted(1)
    assert [each.exitcode() for each in struck] == [-signal.SIGKILL] * 2
    assert [r.event for r in caplog.records] == ["writer_restarted", "writer_not_started"]


def test_F13_no_writer_begins_beside_one_that_does_not_end(engine, storage, root, monkeypatch):
    """Catches: two writers of an attempt, where the first is stopped in the kernel."""
    used = engine(mode="gated")
    ends(writer(used, storage, State().part()))
    first = used._process
    end_before(WriteOrder, signal.SIGSTOP, 1, monkeypatch)
    monkeypatch.setattr(write_engine, "SERVE_S", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Spawned, "kill", lambda *_: False)
        of = begin_attempt(root)
        stuck = used(storage, replace(job(State().part()), of=of, location=staging_dir(of)))
        assert isinstance(stuck, WriteJob) and stuck._process is first
    assert first.kill()
    stuck.await_copy(WAIT_S)
    stuck.confirm()
    outcome = stuck.wait(WAIT_S)
    assert outcome is not None and outcome.succeeded, "another process begins once it is gone"


def test_F13_an_interrupt_tells_of_a_process_that_does_not_end(engine, storage, monkeypatch):
    """Catches: a process with a job that nobody knows of, after a Ctrl-C in its launch; one that begins
    again after that."""
    used = engine(mode="eager")
    ends(writer(used, storage, State().part()))
    first = used._process
    struck = end_before(WriteOrder, signal.SIGSTOP, 1, monkeypatch)
    used.check_signals = lambda: SystemExit() if struck else None
    with monkeypatch.context() as patch:
        patch.setattr(Spawned, "kill", lambda *_: False)
        with pytest.raises(LaunchInterrupted) as raised:
            used(storage, job(State().part()))
        assert isinstance(raised.value.reason, SystemExit)
        left = raised.value.process
        assert not left.kill(0.0)
    first.kill()
    assert left.wait(WAIT_S) == Outcome(-signal.SIGKILL)
    assert left.kill(0.0)


def test_F13_a_job_that_begins_again_beside_the_end_of_its_engine_has_not_ended(
    engine, storage, monkeypatch, dies
):
    """Catches: a process that is reported gone while it has the order."""
    dies[0] = 1
    late = engine(mode="gated")(storage, job(State().part()))
    kill(late)
    again = late._again

    def meanwhile() -> Spawned:
        process = again()
        late.killed = True
        process.kill = lambda timeout_s: False  # not gone in time
        return process

    late._again = meanwhile
    assert late.poll() is None
    assert not late.kill(0.0)
    del late._process.kill
    assert late.kill(WAIT_S)


@pytest.mark.parametrize("executable", ["", None, "/nonexistent/python"])
def test_F1_where_no_process_can_be_started_the_save_is_forked(
    engine, storage, root, monkeypatch, caplog, executable
):
    """Catches: a run in which each save fails once its interpreter is gone, or that is embedded."""
    monkeypatch.setattr(sys, "executable", executable)
    used = engine()
    used.warm_up()
    run = writer(used, storage, State().part())
    assert isinstance(run.process, Child)
    assert isinstance(ends(run)[-1], ShardReported)
    assert [r.event for r in caplog.records] == ["writer_not_started"] * 2


@pytest.fixture
def unheard(monkeypatch):
    """Writer processes that are stopped before their hello."""
    made: list[Spawned] = []

    def spawned(engine: WriteEngine) -> Spawned:
        made.append(Spawned("ckptfsm.writers.write_process", "main"))  # without a probe to answer
        os.kill(made[-1].pid, signal.SIGSTOP)
        return made[-1]

    monkeypatch.setattr(WriteEngine, "_spawned", spawned)
    return made


def test_a_trainer_that_gave_up_its_rights_forks_where_no_process_can_be_started(
    engine, storage, root, monkeypatch, caplog
):
    """Catches: a trainer that drops root, and whose every save fails from then on."""
    made = engine()
    made.start()
    before = made._process
    monkeypatch.setattr(spawn, "_user", lambda: (54321, 54321))
    monkeypatch.setattr(WriteEngine, "_spawned", refused)
    run = writer(made, storage, State().part())
    assert isinstance(run.process, Child)
    assert isinstance(ends(run)[-1], ShardReported)
    assert "the writer is forked" in caplog.text
    assert not before.is_open and before.kill(), "it ends with its socket"


def refused(engine: WriteEngine) -> Spawned:
    raise PermissionError(errno.EACCES, "Permission denied", "python")


def test_F1_a_process_that_does_not_greet_makes_way_for_a_fork(
    engine, storage, root, unheard, monkeypatch, caplog
):
    """Catches: a stopped process that holds the save up for long; one that is left behind."""
    monkeypatch.setattr(write_engine, "SERVE_S", 0.0)
    run = writer(engine(), storage, State().part())
    assert isinstance(run.process, Child)
    assert isinstance(ends(run)[-1], ShardReported)
    [said] = [each for each in caplog.records if each.event == "writer_not_started"]
    assert (
        "the writer is forked: its process did not start: it does not answer" in said.getMessage()
    )
    first, second = unheard
    first.kill()
    assert (first.exitcode(), second.exitcode()) == (-signal.SIGKILL, None), "the next save's"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_wait_for_the_hello(engine, storage, root, unheard, raised):
    """Catches: a Ctrl-C that waits until a stopped process has missed its deadline."""
    used = engine()
    heard: list[BaseException | None] = [None, raised()]
    used.check_signals = lambda: heard.pop(0)
    with pytest.raises(raised):
        used(storage, job(State().part()))
    assert [process.exitcode() for process in unheard] == [-signal.SIGKILL]


def test_F5_an_error_of_the_disk_names_the_file(engine, storage, root):
    """Catches: a save that counts without its file; an error without a name; a process used again."""
    (root / LOCATION / "__0_1.distcp").write_bytes(b"there already")
    used = engine()
    run = writer(used, storage, State().part())
    end = ends(run)[-1]
    assert isinstance(end, Failed)
    assert "__0_1.distcp" in end.detail
    assert (root / LOCATION / "__0_1.distcp").read_bytes() == b"there already"
    assert run.kill(WAIT_S)


def test_memory_that_was_freed_fails_the_save(engine, storage, root):
    """Catches: a file of zeros, or a hang, when the trainer gave memory back too early."""
    gone = ImagePart("state", "", (image_of("__0_0.distcp", [Memory(4096, 100)]),))
    end = ends(writer(engine(mode="gated"), storage, gone))[-1]
    assert isinstance(end, Failed)
    assert "EFAULT" in end.detail or "Bad address" in end.detail


def test_a_kill_is_certain_and_hurts_no_later_save(engine, storage, root):
    """Catches: a writer that is reported gone, and writes on."""
    used = engine(mode="gated")
    run = writer(used, storage, State(size=30 * MIB).part())
    pid = pid_of(run)
    assert run.kill(WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    second_save(used, storage, root, State().part())


def test_a_job_that_is_done_is_not_killed(engine, storage, root):
    """Catches: a kill of an old save that hits the process of the next."""
    used = engine()
    first = writer(used, storage, State().part())
    ends(first)
    second = writer(used, storage, State().part(), of=begin_attempt(root))
    assert first.kill(0.0)
    assert isinstance(ends(second)[-1], ShardReported)


@pytest.mark.usefixtures("refused_reads")
@pytest.mark.parametrize("mode", ["auto", "eager", "gated"])
def test_where_memory_cannot_be_read_the_trainer_copies_it(engine, storage, root, caplog, mode):
    """Catches: a job in a container without ``process_vm_readv`` that is forked, or can save nothing;
    a change behind the launch in a file; an arena or a line in the log for each save."""
    used, arenas, pids = engine(mode=mode, buffer_bytes=8 * MIB), set(), set()
    for attempt in (1, 2):
        of = begin_attempt(root, attempt, attempt)
        state = State(size=20 * MIB + attempt)
        wanted = [state.wanted(i) for i in (0, 1)]
        run = writer(used, storage, state.part(), of=of)
        assert run.has_copy
        for buffer in state.buffers:
            ctypes.memset(buffer, 0, len(buffer))
        pids.add(pid_of(run))
        assert isinstance(ends(run)[-1], ShardReported)
        assert written(root, of=of) == wanted
        arenas.add(used._arena.segment.address)
    assert (len(pids), len(arenas)) == (1, 1)
    assert [r.event for r in caplog.records] == ["engine_refused"]
    assert "saves copy it: PermissionError: [Errno 1] process_vm_readv" in caplog.text
    smaller = writer(used, storage, State().part())
    assert smaller.process._arena.segment.address in arenas, "the arena is kept"
    ends(smaller)
    segment = used._arena.segment
    used.close()
    assert used._arena is None
    with pytest.raises(OSError, match="was closed"):
        segment.fileno()


@pytest.mark.usefixtures("refused_reads")
@pytest.mark.parametrize("gate", [False, True])
def test_a_refused_copy_that_does_not_fit_is_forked(engine, storage, root, caplog, gate):
    """Catches: a host that ends a job at its save, because an arena does not fit; an arena that is
    counted again at each save."""
    free = [14 * MIB]
    used = engine(free_bytes=lambda: free[0])
    if gate:
        used.expect_gate()
    run = writer(used, storage, State().part())
    assert isinstance(run.process, WriteJob)
    assert isinstance(ends(run)[-1], ShardReported)
    for step, size, free[0] in ((6, 3 * MIB, 0), (7, 4 * MIB, 6 * MIB), (8, 5 * MIB, 3 * MIB)):
        of = begin_attempt(root, step, step)
        run = writer(used, storage, State(size=size).part(), of=of)
        assert isinstance(run.process, Child if step == 8 else WriteJob)
        assert isinstance(ends(run)[-1], ShardReported)
    assert [r.event for r in caplog.records] == ["engine_refused", "copy_not_affordable"]


@pytest.mark.parametrize("reads", [True, False])
def test_without_shared_memory_the_trainer_waits_or_its_writer_is_forked(
    engine, storage, root, caplog, monkeypatch, reads
):
    """Catches: a container that refuses memfd, or that and reads, and can save nothing."""

    def no_arena(size: int) -> None:
        raise OSError(errno.ENOSYS, "no memfd")

    monkeypatch.setattr(write_engine, "Arena", no_arena)
    if not reads:
        refuse_reads(monkeypatch)
    run = writer(engine(mode="eager"), storage, State().part())
    assert waits(run) if reads else isinstance(run.process, Child)
    assert isinstance(ends(run)[-1], ShardReported)
    assert [r.event for r in caplog.records][-1] == "no_shared_memory"


def test_memory_that_the_kernel_promised_and_does_not_give_is_no_end(
    engine, storage, root, caplog, monkeypatch
):
    """Catches: a trainer that dies of SIGBUS in a save: a host that commits no more memory than it has
    refuses the pages of a memfd, and not its size."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EFAULT)  # "a SIGBUS would have been generated"
        return -1

    used = engine(mode="eager")
    used._greet(FAR)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_MADVISE", refuse)
        run = writer(used, storage, State().part())
    assert waits(run)
    assert isinstance(ends(run)[-1], ShardReported)
    assert [r.event for r in caplog.records] == ["no_shared_memory"]
    assert "Cannot allocate memory" in caplog.text


def test_a_larger_state_takes_the_pages_that_it_needs_more(engine, storage, root, monkeypatch):
    """Catches: pages that are taken anew for each save; those of a larger state that are not taken
    before the copy."""
    advise, taken = memory._MADVISE, []

    def note(address: int, size: int, advice: int) -> int:
        taken.append(size)
        return advise(address, size, advice)

    arena = Arena(8 * MIB)
    monkeypatch.setattr(memory, "_MADVISE", note)
    state = State(count=1, size=8 * MIB)
    at = ctypes.addressof(state.buffers[0])
    sizes = []
    for size in (3, 3, 5, 8, 8):
        arena.take([Range(at, size * MIB)])
        sizes.append(sum(taken) // MIB)
        taken.clear()
    arena.close()
    assert sizes == [3, 0, 5, 8, 0]


@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_without_a_thread_the_copy_is_made_all_the_same(engine, storage, root, monkeypatch, fate):
    """Catches: a container with no more processes, or an interpreter that ends, in which each save
    fails. Found by attack: a save that waits for ever for a thread without the memory to begin."""
    asked = []

    def start(*_: object) -> int:
        asked.append(fate)
        if fate == "refused":
            raise RuntimeError("can't start new thread")
        return 1  # and nothing of it is ever seen

    monkeypatch.setattr(shared_work, "start_new_thread", start)
    state = State(count=5)
    run = writer(engine(mode="eager"), storage, state.part())
    assert isinstance(ends(run)[-1], ShardReported)
    assert asked
    assert written(root) == [state.wanted(index) for index in range(5)]


def test_an_arena_that_is_read_is_not_filled_again(engine, storage, root):
    """Catches: the state of the next save in the files of this one; an arena that is lost, or is
    used again while a process may still read it."""
    used = engine(mode="eager")
    of = begin_attempt(root, 4, 3)
    ends(writer(used, storage, State().part(), of=of))
    kept = used._arena
    first = used(storage, job(State().part()))  # it waits for its confirmation
    assert first._arena is kept
    of = begin_attempt(root)
    second = used(storage, job(State().part(), of=of))
    arenas = [first._arena, second._arena]
    assert arenas[0] is not arenas[1]
    assert used._arena is None
    assert second.kill(WAIT_S)
    assert used._arena is arenas[1]
    first.confirm()
    assert first.wait(WAIT_S).succeeded
    assert used._arena is arenas[1]


@pytest.mark.usefixtures("refused_reads")
def test_segments_are_gated_where_memory_cannot_be_read(engine, storage, root):
    """Catches: a copy of state that the process can read through its segment; a gate that is open
    while that state is read; other memory that is not copied."""
    used = engine(mode="gated")
    state, other = InSegment(used), State(count=1)
    alone = used(storage, job(state.part()))
    assert alone._arena is None
    assert alone._mutable
    assert alone.kill(WAIT_S)
    of = begin_attempt(root)
    both = writer(used, storage, state.part(), other.part("other", "__1"), of=of)
    assert both.process._arena.size < 4 * MIB
    assert both.process._mutable
    assert isinstance(ends(both)[-1], ShardReported)
    assert (root / staging_dir(of) / "__0_0.distcp").read_bytes() == b"B" * (9 * MIB - 5)
    assert (root / staging_dir(of) / "__1_0.distcp").read_bytes() == other.wanted(0)


def test_a_forked_trainer_does_not_fill_the_arena_of_its_parent(engine, storage, root):
    """Catches: the state of a forked process in a checkpoint of its parent: a fork shares an arena."""
    used = engine(mode="eager")
    ends(writer(used, storage, State().part()))
    before = bytes(used._arena.segment.view(0, used._arena.size))
    of = begin_attempt(root)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            for buffer in State.living[0].buffers:
                ctypes.memset(buffer, 0, len(buffer))
            run = writer(used, storage, State.living[0].part(), of=of)
            ends(run)
            run.kill(WAIT_S)
            used.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert bytes(used._arena.segment.view(0, used._arena.size)) == before
    wanted = b"head" + bytes(3 * MIB + 5) + b"t"
    assert (root / staging_dir(of) / "__0_0.distcp").read_bytes() == wanted


def memory_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_an_arena_is_given_back_though_a_data_loader_has_it(engine, storage, root):
    """Catches: a copy of the state for each process that was forked between saves, for as long as it
    lives."""
    used = engine(mode="eager")
    ends(writer(used, storage, State().part()))
    inherited = os.dup(used._arena.segment.fileno())  # as a forked process has it
    assert memory_of(inherited) > 6 * MIB
    of = begin_attempt(root)
    ends(writer(used, storage, State(count=3).part(), of=of))
    assert memory_of(inherited) == 0
    os.dup2(used._arena.segment.fileno(), inherited)
    used.close()
    assert memory_of(inherited) == 0
    os.close(inherited)


@pytest.mark.parametrize("place", [(WriteEngine, "_answer"), (Arena, "_copy")])
def test_an_arena_of_a_launch_that_fails_is_given_back(engine, storage, root, monkeypatch, place):
    """Catches: a copy of the state for each process that was forked between saves,
    after a writer that was stopped and took no order."""
    used = engine(mode="eager")
    ends(writer(used, storage, State().part()))
    inherited = os.dup(used._arena.segment.fileno())
    assert memory_of(inherited) > 6 * MIB
    call = getattr(*place)

    def fail(*arguments: object) -> object:
        if used._arena is None:  # it is the launch's
            raise MemoryError
        return call(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(MemoryError):
            used(storage, job(State().part()))
    assert memory_of(inherited) == 0
    os.close(inherited)
    second_save(used, storage, root, State().part())


def test_an_arena_of_a_writer_that_dies_slowly_is_given_back(engine, storage, root):
    """Catches: a closed manager that keeps a copy of the state, because its writer was not yet gone
    when it was given up."""
    used = engine(mode="eager")
    process = used(storage, job(State().part()))
    inherited = os.dup(process._arena.segment.fileno())
    kill_at_once, process._process.kill = process._process.kill, lambda timeout_s: False
    assert not process.kill(0.0)
    process._process.kill = kill_at_once
    used.close()
    assert memory_of(inherited) == 0
    assert process.poll() == Outcome(-signal.SIGKILL)
    os.close(inherited)


@pytest.mark.parametrize("gone", [False, True])
def test_the_copy_of_a_killed_writer_makes_room_for_the_next(
    engine, storage, root, monkeypatch, gone
):
    """Catches: one copy of the state more for each writer that hangs in the kernel,
    where no signal ends it; a second copy beside that of a writer which is dead."""
    used = engine(mode="eager")
    first = used(storage, job(State().part()))
    arena = first._arena
    inherited = os.dup(arena.segment.fileno())
    with monkeypatch.context() as patch:
        patch.setattr(first._process, "kill", lambda timeout_s: False)
        assert not first.kill(0.0)
    if gone:
        kill(first)
    second = writer(used, storage, State().part(), of=begin_attempt(root))
    assert (second.process._arena is arena) == gone
    assert (memory_of(inherited) > 0) == gone
    os.close(inherited)
    assert isinstance(ends(second)[-1], ShardReported)


@pytest.mark.parametrize("refused", [False, True])
def test_an_eager_save_copies_segments_too(engine, storage, root, monkeypatch, refused):
    """Catches: a change behind an eager launch that is read from a segment."""
    if refused:
        refuse_reads(monkeypatch)
    used = engine(mode="eager")
    state = InSegment(used)
    run = writer(used, storage, state.part())
    assert run.has_copy
    arena = run.process._arena
    assert arena is not None
    assert arena.size >= 9 * MIB - 5
    state.segment.view(0, 9 * MIB)[:] = bytes(9 * MIB)
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == b"B" * (9 * MIB - 5)


def waits(run):
    """True if the trainer has to wait until the writer process has read its state."""
    return isinstance(run.process, WriteJob) and run.must_wait and run.process._arena is None


@pytest.mark.parametrize(("ranks", "free", "share"), [(1, 12, 6), (4, 40, 5)])
def test_without_memory_for_a_copy_the_trainer_waits(
    engine, storage, root, monkeypatch, caplog, ranks, free, share
):
    """Catches: a host that ends a job at its save, because a copy of the state does not fit, or
    because the trainer changes all pages of a forked writer; ranks of a host that each take half of
    what is free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    run = writer(engine(free_bytes=lambda: free * MIB), storage, State().part())
    assert waits(run)
    assert isinstance(ends(run)[-1], ShardReported)
    said = f"a copy takes {2 * (3 * MIB + 64)} bytes, and at most {share * MIB} may be taken"
    assert said in caplog.text


def test_memory_that_is_held_counts_once(engine, storage, root):
    """Catches: a job that is forked from its second save on, as its first copy left less memory."""
    free = [40 * MIB]
    used = engine(free_bytes=lambda: free[0])
    for step in (6, 7):
        of = begin_attempt(root, step, step)
        run = writer(used, storage, State().part(), of=of)
        assert run.has_copy
        assert not run.must_wait
        assert isinstance(ends(run)[-1], ShardReported)
        free[0] = 0


def test_a_trainer_that_waits_needs_no_memory_for_a_copy(engine, storage, root):
    """Catches: a gate that is promised in vain: the state is copied as a whole."""
    used = engine(free_bytes=lambda: 0)
    used.expect_gate()
    run = writer(used, storage, State().part())
    assert isinstance(run.process, WriteJob)
    assert not run.must_wait
    assert isinstance(ends(run)[-1], ShardReported)


def test_receipts_wait_for_the_reads_and_the_trainer():
    """Catches: a receipt for a copy that the trainer did not confirm; a job that is done while its
    threads still fill the buffers of the next one."""
    calls = []
    source = SimpleNamespace(join=lambda: calls.append("read"))
    word = SimpleNamespace(wait=lambda: calls.append("word"))
    _await_confirmation(source, word)
    assert calls == ["read", "word"]


def test_parts_that_do_not_fit_into_the_buffers_are_written(engine, storage, root):
    """Catches: a second part whose memory is read after the first has its receipt, which waits for
    the confirmation that everything was read."""
    states = State(size=20 * MIB), State(size=20 * MIB)
    parts = [state.part(name, f"__{name}") for state, name in zip(states, "ab", strict=True)]
    run = writer(engine(mode="gated", buffer_bytes=8 * MIB), storage, *parts)
    assert [type(end) for end in ends(run)[1:]] == [ShardReported, ShardReported]
    for name in "ab":
        assert (root / LOCATION / receipt_name(name, 0)).exists()


def test_the_jobs_of_a_group_that_do_not_fit_into_the_buffers_are_written(engine, storage, root):
    """Catches: a later job's memory that takes all buffers, for which the first job waits in vain."""
    states = State(size=20 * MIB), State(size=20 * MIB)
    jobs = tuple(state.part(name, f"__{name}") for state, name in zip(states, "ab", strict=True))
    part = PartSpec("actor", "report")
    ticket = Ticket(OF, str(root), LOCATION, "", part, 0, 1, 1, WAIT_S)
    share = GroupShare("actor", "", ticket, 0, jobs, (), SystemClock())
    run = writer(engine(mode="gated", buffer_bytes=8 * MIB), storage, share)
    assert isinstance(ends(run)[-1], ShardReported)
    for state, name in zip(states, "ab", strict=True):
        assert written(root, f"__{name}") == [state.wanted(0), state.wanted(1)]


@pytest.mark.parametrize("mode", ["eager", "gated"])
def test_parts_that_are_left_out_do_not_disturb_the_next_save(engine, storage, root, mode):
    """Catches: memory of a part that was left out in the files of the next save; a gate that stays
    shut because nothing was written."""
    used = engine(mode=mode, buffer_bytes=8 * MIB)
    part = State(size=30 * MIB).part()
    for image in part.images:
        (root / LOCATION / image.name).write_bytes(b"in the way")
    first = RankWriter(
        storage, replace(job(part), optional=frozenset({"state"})), launch=used, deadline=FAR
    )
    assert isinstance(ends(first)[-1], ShardReported)
    assert first.has_copy
    of, other = begin_attempt(root), State(size=30 * MIB)
    assert isinstance(ends(writer(used, storage, other.part(), of=of))[-1], ShardReported)
    assert written(root, of=of) == [other.wanted(0), other.wanted(1)]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_part_that_fails_before_its_files_does_not_starve_the_next(
    engine, storage, root, grouped
):
    """Catches: buffers of an optional part that was left out, which the next part waits for in vain."""
    states = State(size=20 * MIB), State(size=20 * MIB)
    (root / LOCATION / "made").write_bytes(b"in the way")
    left_out = replace(states[0].part("a", "made/__a"), made=("made",))
    if grouped:
        part = PartSpec("a", "report")
        ticket = Ticket(OF, str(root), LOCATION, "", part, 0, 1, 1, WAIT_S)
        left_out = GroupShare(
            "a",
            "",
            ticket,
            0,
            (left_out, State(size=20 * MIB).part(files="__c")),
            (),
            SystemClock(),
        )
    order = replace(job(left_out, states[1].part("b")), optional=frozenset({"a"}))
    used = engine(mode="gated", buffer_bytes=8 * MIB)
    run = RankWriter(storage, order, launch=used, deadline=FAR)
    assert [end.part for end in ends(run) if isinstance(end, ShardReported)] == ["a", "b"]
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == states[1].wanted(0)


def test_descriptors_above_1023_are_waited_for(engine, storage, root):
    """Catches: a trainer with many open files that cannot save at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this user may not open enough files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        run = writer(engine(mode="gated"), storage, State().part())
        assert isinstance(ends(run)[-1], ShardReported)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Told:
    """A process that says these messages, one at each look."""

    def __init__(self, *messages: object) -> None:
        self.messages = list(messages)

    def exitcode(self) -> None:
        return None

    def listen(self, timeout_s: float) -> list[object]:
        return [self.messages.pop(0)] if self.messages else []


def test_the_gate_opens_when_the_last_byte_was_taken(engine):
    """Catches: a trainer that changes its state while the writer reads it."""
    process = Told(Hello(""), MemoryRead())
    used, work = engine(), job(State().part())
    done = {"reuse_process": used.reuse_process, "reuse_arena": used.reuse_arena}
    written = WriteJob(process, work, MemoryRoute(0, mutable=True), **done)
    assert [written.holds_copy for _ in range(3)] == [False, True, True]


class Copies:
    """Copies of an accelerator that are made, or fail, when a test says so."""

    def __init__(self) -> None:
        self.made = self.host_copied = False
        self.error = ""
        self.said: list[str] = []

    def done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.made

    def order_updates(self) -> None:
        self.said.append("order_updates")

    def give_to_child(self) -> None:
        self.said.append("give_to_child")


def copied_part(copies: Copies) -> ImagePart:
    return replace(State().part(mutable=False), copying=copies)


def test_an_order_waits_for_the_accelerators_copies(engine, storage, root):
    """Catches: a writer that reads memory which the accelerator has not filled."""
    copies = Copies()
    run = writer(engine(), storage, copied_part(copies))
    assert copies.said == ["order_updates"], "no gate was promised"
    assert (run.process.holds_copy, run.poll(0.0)) == (False, [])
    assert "accelerator" in run.process.whereabouts()
    copies.made = True
    assert run.poll(0.0) == [WriterForked(OF, 0, 1)]
    assert isinstance(ends(run)[-1], ShardReported)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == State().wanted(0)


def test_a_gate_orders_the_updates_of_an_accelerator(engine, storage):
    """Catches: a host that waits at the gate; an update beside the copies."""
    copies = Copies()
    run = writer(engine(mode="gated"), storage, copied_part(copies))
    assert copies.said == []
    run.before_update(SystemClock())
    assert copies.said == ["order_updates"]
    assert not run.has_copy
    copies.made = True
    assert isinstance(ends(run)[-1], ShardReported)
    run.before_update(SystemClock())
    assert copies.said == ["order_updates"], "it is over"


def test_a_gate_of_host_memory_stays_closed_beside_an_accelerator(engine, storage, root):
    """Catches: memory of the host that is read without a gate."""
    copies, state = Copies(), State()
    wanted = state.wanted(0)
    copies.made = True
    part = replace(state.part(), copying=copies)
    run = writer(engine(mode="gated"), storage, part)
    assert not copies.host_copied
    run.before_update(SystemClock())
    assert run.has_copy
    ctypes.memset(state.buffers[0], 0, len(state.buffers[0]))
    ends(run)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == wanted


def test_an_eager_copy_of_host_memory_does_not_wait_for_an_accelerator(engine, storage, root):
    """Catches: a launch that waits for the accelerator; host memory that is read behind it."""
    copies, state = Copies(), State()
    wanted = state.wanted(0)
    run = writer(engine(mode="eager"), storage, copied_part(copies), state.part("host", "__1"))
    assert copies.said == ["order_updates"]
    assert copies.host_copied
    run.before_update(SystemClock())
    assert not run.has_copy
    ctypes.memset(state.buffers[0], 0, len(state.buffers[0]))
    copies.made = True
    assert isinstance(ends(run)[-1], ShardReported)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == State().wanted(0)
    assert (root / LOCATION / "__1_0.distcp").read_bytes() == wanted


def test_host_state_that_changed_during_its_copy_fails_beside_an_accelerator(engine, storage):
    """Catches: a torn copy that counts, of a thread that changes the state while it is copied: no
    later look finds it."""
    parts = copied_part(Copies()), State().part("host", "__1")
    run = writer(engine(mode="eager"), storage, *parts, changed=lambda: "w1 was changed")
    [failed] = run.poll(0.0)
    assert failed.reason == "state_changed"
    assert run.kill(WAIT_S)


def test_copies_that_fail_fail_the_save(engine, storage, root):
    """Catches: a save that hangs, and an agent that ends, with the accelerator's error."""
    copies = Copies()
    run = writer(engine(), storage, copied_part(copies))
    copies.error = "an illegal memory access"
    [failed] = ends(run)
    assert (failed.reason, "an illegal memory access" in failed.detail) == ("writer_failed", True)
    assert run.kill(WAIT_S)
    assert not (root / LOCATION / receipt_name("state", 0)).exists()


def test_an_accelerator_that_hangs_meets_the_deadline(engine, storage):
    """Catches: a save that waits for ever for its copies."""
    run = writer(engine(), storage, copied_part(Copies()))
    [failed] = run.poll(FAR)
    assert failed.reason == "writer_hung"
    assert "its writer missed its deadline at the copy of the accelerator's state" in failed.detail


def test_F1_a_process_that_dies_before_the_copies_are_made_has_a_successor(
    engine, storage, root, caplog
):
    """Catches: an order before the accelerator's copies; one to a dead process that ends the agent; a
    save that fails though its state is there."""
    copies = Copies()
    run = writer(engine(), storage, copied_part(copies))
    kill(run.process)
    run.process.await_copy(0.1)
    assert (run.poll(0.0), caplog.records) == ([], []), (
        "no other one reads memory without the state"
    )
    copies.made = True
    assert isinstance(ends(run)[-1], ShardReported)
    assert (root / LOCATION / "__0_0.distcp").read_bytes() == State().wanted(0)
    assert [r.event for r in caplog.records] == ["writer_restarted"]


@pytest.mark.parametrize("serves", [True, False])
def test_F1_a_process_that_is_stopped_before_its_late_order_has_one_successor(
    engine, storage, root, monkeypatch, serves
):
    """Catches: a save that waits until the writer's deadline for a process which was stopped beside the
    copies of an accelerator; one that takes a process after the other."""
    copies = Copies()
    run = writer(engine(), storage, copied_part(copies))
    struck = end_before(WriteOrder, signal.SIGSTOP, 1 if serves else 2, monkeypatch)
    monkeypatch.setattr(write_job, "SERVE_S", 5.0 if serves else 0.5)
    copies.made = True
    end = ends(run)[-1]
    assert [each.exitcode() for each in struck] == [-signal.SIGKILL] * len(struck)
    if serves:
        assert isinstance(end, ShardReported)
        assert (root / LOCATION / "__0_0.distcp").read_bytes() == State().wanted(0)
    else:
        assert end.reason == "writer_died" and "it did not begin in 0.5 s, at" in end.detail


def test_a_late_order_to_a_process_that_does_not_read_waits_for_nothing(engine, storage, root):
    """Catches: an agent that holds the lock of the trainer's gate until the process has read a large
    order, so that a Ctrl-C is unheard and the step stands still; a save that is given up by that."""
    copies = Copies()
    large = FilePart("data.pt", "data.pt", os.urandom(4 * MIB))
    run = writer(engine(mode="gated"), storage, copied_part(copies), large)
    os.kill(pid_of(run), signal.SIGSTOP)
    copies.made = True
    assert run.poll(0.0) == [WriterForked(OF, 0, 1)]
    run.process._process.resume()
    assert isinstance(ends(run)[-1], ShardReported)
    assert (root / LOCATION / "data.pt").read_bytes() == large.data


def test_an_interrupt_ends_the_wait_for_a_process_that_does_not_read(
    engine, storage, root, monkeypatch, caplog
):
    """Catches: a Ctrl-C that is unheard while a stopped process leaves a large order unread."""
    used = engine(mode="gated")
    ends(writer(used, storage, State().part()))
    struck = end_before(WriteOrder, signal.SIGSTOP, 1, monkeypatch)
    used.check_signals = lambda: KeyboardInterrupt() if struck else None
    image = image_of("x", [Literal(bytes(4 * MIB)), *State().part().images[0].pieces])
    with pytest.raises(KeyboardInterrupt):
        used(storage, job(ImagePart("state", "", (image,))))
    assert [each.exitcode() for each in struck] == [-signal.SIGKILL]
    assert caplog.records == [], "it was not given up first"


def test_a_forked_writer_gets_the_memory_of_the_copies(engine, root):
    """Catches: a child that is forked before the accelerator has filled its memory."""
    storage, copies = _CountingDisk(root), Copies()
    run = writer(engine(), storage, copied_part(copies))
    assert copies.said == ["give_to_child"]
    assert isinstance(ends(run)[-1], ShardReported)
    storage.close_root()


class Owner:
    """The trainer's object that keeps the memory of a part."""


def test_copies_of_the_trainer_are_kept_until_they_are_read(engine, storage, root):
    """Catches: host copies of an accelerator's state that are copied once more; a copy that is freed
    while the writer reads it, or kept after that."""
    owner = Owner()
    alive = weakref.ref(owner)
    part = replace(State(size=40 * MIB).part(mutable=False), owner=owner)
    run = writer(engine(free_bytes=lambda: 0, buffer_bytes=8 * MIB), storage, part)
    assert run.has_copy
    assert isinstance(run.process, WriteJob)
    del part, owner
    assert alive() is not None
    assert isinstance(ends(run)[-1], ShardReported)
    assert alive() is None


def test_parts_that_need_the_trainers_code_are_forked(engine, storage, root):
    """Catches: a foreign request that is sent to a process without torch."""
    run = writer(engine(), storage, _Foreign())
    assert isinstance(ends(run)[-1], ShardReported)


def test_the_calls_of_another_storage_are_made(engine, root):
    """Catches: a user's storage that is replaced by the library's in the writer process."""
    storage = _CountingDisk(root)
    run = writer(engine(), storage, State().part())
    assert isinstance(ends(run)[-1], ShardReported)
    assert (root / "synced").read_bytes()
    storage.close_root()


class InSegment:
    """State of the trainer in a segment of the engine."""

    def __init__(self, engine: WriteEngine, size: int = 9 * MIB) -> None:
        self.segment = SharedSegment(size)
        self.segment.view(0, size)[:] = bytes([66]) * size
        engine.add_segment(self.segment)

    def part(self) -> ImagePart:
        memory = Memory(self.segment.address + 5, self.segment.size - 5)
        return ImagePart("state", "", (image_of("__0_0.distcp", [memory]),))


def test_a_segment_is_read_through_its_descriptor(engine, storage, root):
    """Catches: a segment that is read by its address; one that is not sent with each order; one whose
    descriptor is taken for the root's."""
    used = engine(mode="gated")
    state = InSegment(used)
    state.segment.address = 4096  # nothing is mapped there
    for attempt in (1, 2):
        of = begin_attempt(root, attempt, attempt)
        run = writer(used, storage, state.part(), State().part("more", "__1"), of=of)
        assert isinstance(ends(run)[-1], ShardReported)
        content = (root / staging_dir(of) / "__0_0.distcp").read_bytes()
        assert content == b"B" * (9 * MIB - 5)
    descriptors = f"/proc/{pid_of(run)}/fd"
    links = [os.readlink(f"{descriptors}/{fd}") for fd in os.listdir(descriptors)]
    assert not any("memfd" in link for link in links), "the process keeps no segment"


def test_a_segment_that_was_closed_fails_the_save(engine, storage, root):
    """Catches: other memory in a checkpoint, because a descriptor was used again; memory of offloaded
    state that stays after its engine."""
    used = engine(mode="gated")
    state, other = InSegment(used), InSegment(used)
    state.segment.close()
    with pytest.raises(OSError, match="was closed"):
        used(storage, job(state.part()))
    used.close()
    with pytest.raises(OSError, match="was closed"):
        other.segment.fileno()


def test_a_fork_gets_copies_of_segments(engine, storage, root, monkeypatch):
    """Catches: a later change in the files of a forked writer: no fork freezes shared memory."""
    used = engine()
    state, readers = InSegment(used), []
    monkeypatch.setattr(
        rank_writer, "fork_child", lambda write, **more: readers.append(write.args[2])
    )
    used(storage, job(_Foreign(), state.part()))
    [reader], found = readers, bytearray(3)
    address = state.segment.address
    ctypes.memset(address, 0, 100)
    reader.read(address + 5, memoryview(found))
    assert found == b"BBB"


class _CountingDisk(PosixStorage):
    """A user's storage: it notes each fsync in a file."""

    def fsync(self, handle: int) -> None:
        with open(f"{self.root}/synced", "ab") as noted:
            noted.write(b".")
        super().fsync(handle)


class _Foreign(PartJob):
    """A part that only a copy of this process can write: it cannot be pickled."""

    name, directory = "foreign", ""

    def __init__(self) -> None:
        self.unpicklable = lambda: b"x"

    def write(self, storage, location):
        return FilePart("foreign", "f", self.unpicklable()).write(storage, location)


TRAINER = """
import os, sys
sys.path[:0] = sys.argv[2:]
from unit.writers.test_write_engine import *
root = sys.argv[1]
storage = PosixStorage(root)
engine = WriteEngine(WriteEngineSettings(mode="gated"))
engine.expect_gate()
process = engine(storage, job(State().part()))
process.await_copy(WAIT_S)
print(process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_F3_a_trainer_that_dies_before_it_confirmed_leaves_no_receipt(root):
    """Catches: a writer that outlives its trainer, and vouches for its copy."""
    command = [sys.executable, "-c", TRAINER, str(root), *sys.path]
    ran = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
    assert ran.returncode == -signal.SIGKILL
    pid = int(ran.stdout)
    try:
        select.select([watched := os.pidfd_open(pid)], [], [], WAIT_S)
        os.close(watched)
    except OSError as error:
        assert error.errno == errno.ESRCH
    assert not (root / LOCATION / receipt_name("state", 0)).exists()
