"""Uploads of tracked checkpoints: the pins that keep a step meanwhile, and the effects of an error."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from groups import SETTINGS
from proof.fuzz import _CONFIG, common_archive, written_metadata

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.coordinator.engine import Engine
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import DeadlineExceeded, SaveFailed, SaveFailedWarning, StorageError
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.integrations.verl import mirror
from ckptfsm.integrations.verl.mirror import Copy, DirectoryMirror, Upload
from ckptfsm.integrations.verl.uploads import Uploads
from ckptfsm.ranks.controller import Controller
from ckptfsm.testing.fakes import FifoGate, fake_ports
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.writers.plain_files import FilesDriver


@dataclass(frozen=True, slots=True)
class Failing(DirectoryMirror):
    """A remote place that takes no copy of some steps; ``away``: nor says what it has."""

    steps: tuple[int, ...] = ()
    away: bool = False

    def has(self, copy: Copy) -> bool:
        if self.away:
            raise StorageError("the remote place is away")
        return DirectoryMirror.has(self, copy)

    def upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        if copy.of.step in self.steps:
            raise OSError(errno.EIO, "away for a moment")
        DirectoryMirror.upload(self, source, copy, files)


@dataclass(frozen=True, slots=True)
class Held(DirectoryMirror):
    """A remote place that is slow until it is let go."""

    gate: FifoGate

    def upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        self.gate.hold()
        DirectoryMirror.upload(self, source, copy, files)


class Job:
    """A controller that saves one file, and the uploads of its steps."""

    def __init__(self, place: Path, remote: DirectoryMirror | None = None, **settings: Any) -> None:
        self.root, self.there = place / "root", place / "there"
        self.there.mkdir(exist_ok=True)
        self.uploads = Uploads(str(self.root), remote or DirectoryMirror(str(self.there)))
        self.storage: list[FaultStorage] = []
        self.controller = Controller(
            self.root,
            {},
            nobody,
            ports=fake_ports(self.open_storage, driver=FilesDriver()),
            hooks=[self.uploads.hook],
            **{**SETTINGS, "layout": "verl", "retention": LatestN(1), **settings},
        )

    def open_storage(self, create: bool) -> FaultStorage:
        self.storage.append(FaultStorage(PosixStorage(str(self.root), create=create)))
        return self.storage[-1]

    def save(self, step: int) -> None:
        self.controller.begin(step, {"data.pt": b"at %d" % step}).handle.wait()

    def poll(self) -> None:
        self.uploads.poll(self.controller)

    def wait(self) -> None:
        self.uploads.wait(self.controller)

    def uploaded(self) -> list[str]:
        return sorted(path.name for path in self.there.iterdir())

    def leases(self) -> list[str]:
        return os.listdir(self.root / ".ckptfsm/readers")


def nobody(doomed: Any) -> list[Any]:
    return []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs, one after the other."""
    jobs: list[Job] = []

    def begun(remote: DirectoryMirror | None = None, **settings: Any) -> Job:
        for job in jobs:
            job.controller.close()
        jobs.append(Job(tmp_path, remote, **settings))
        return jobs[-1]

    yield begun
    for job in jobs:
        job.uploads.abandon()
        job.controller.abandon()


def test_I7_a_persons_pin_outlives_an_upload(start):
    """Catches: an upload with a pin that takes the place of a person's, and with an end that
    removes it."""
    job = start()
    job.save(1)
    job.controller.pin(1, "the best so far")
    job.wait()
    job.save(2)
    job.wait()
    assert job.controller.all_steps() == [1, 2]
    assert job.uploaded() == ["global_step_1", "global_step_2"]


def test_I7_a_step_is_kept_while_it_is_uploaded_and_not_longer(start, tmp_path):
    """Catches: a copy of half a step; a step that is kept for ever because it was uploaded once."""
    gate = FifoGate(tmp_path / "gate")
    job = start(Held(str(tmp_path / "there"), gate))
    job.save(1)
    job.poll()
    job.save(2)
    assert job.controller.all_steps() == [1, 2] and len(job.leases()) == 1
    gate.open()
    ended(job)
    assert job.uploaded() == ["global_step_1"]
    job.save(3)
    assert job.controller.all_steps() == [2, 3], "step 2 waits for its upload"
    assert [name.partition(".")[0] for name in job.leases()] == ["2"]


def ended(job: Job) -> None:
    """The child that runs has ended, and that was noticed."""
    assert job.uploads.running is not None
    assert job.uploads.running[1].wait(20.0) is not None
    job.poll()


def test_an_adopted_step_has_no_receipts_to_upload_by(start):
    """Catches: a run of stock verl that ends at every start; the adoption's pin removed by an upload."""
    job = start()
    adopt_step_5(job)
    for _ in range(2):
        job = start()
        job.uploads.begin(job.controller)
        with pytest.warns(UserWarning, match="step 5 is not uploaded: .* adopted") as said:
            job.poll()
        job.wait()
        assert len(said) == 1 and job.leases() == [], "said once, and let go"
    job.save(6)
    job.wait()
    assert job.controller.all_steps() == [5, 6], "still pinned"
    assert job.uploaded() == ["global_step_6"]


def adopt_step_5(job: Job) -> None:
    """The files of stock verl, in a root that was opened before."""
    tree = job.root / "global_step_5/actor/dist_ckpt"
    tree.mkdir(parents=True)
    files = {
        ".metadata": written_metadata(),
        "metadata.json": _CONFIG,
        "common.pt": common_archive(),
    }
    for name, data in {**files, "__0_0.distcp": bytes(100)}.items():
        (tree / name).write_bytes(data)
    (tree.parent.parent / "data.pt").write_bytes(b"at 5")
    (job.root / "latest_checkpointed_iteration.txt").write_text("5")


def test_a_step_that_is_gone_or_damaged_is_not_uploaded(start):
    """Catches: a damaged step in the remote place; one that stops the uploads of all others."""
    job = start()
    job.save(1)
    job.save(2)  # and step 1 is pruned before anything polled
    (job.root / "global_step_2/.ckptfsm/manifest.json").write_text("{}")
    with pytest.warns(UserWarning) as said:
        job.poll()
    words = [str(warning.message) for warning in said]
    assert [word[:24] for word in words] == [f"step {n} is not uploaded: " for n in (1, 2)]
    job.save(3)
    job.wait()
    assert job.uploaded() == ["global_step_3"] and job.leases() == []


class Once:
    """Fails the first call in which ``word`` occurs; all others are those of ``real``."""

    def __init__(self, word: str, real: Callable[..., Any] | None = None) -> None:
        self.word, self.real, self.failed = word, real, False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not self.failed and self.word in str(arguments):
            self.failed = True
            raise OSError(errno.EAGAIN, "made-up")
        return None if self.real is None else self.real(*arguments, **keywords)


def strike_step_1(job: Job, monkeypatch: pytest.MonkeyPatch, what: str) -> Once:
    """Let the lease for the upload of step 1, or the fork of its child, fail once."""
    if what == "lease":
        job.storage[0].before = fault = Once("/readers/1.")
    else:
        fault = Once("step=1", mirror.fork_child)
        monkeypatch.setattr(mirror, "fork_child", fault)
    return fault


class Hung:
    """A question that runs into its deadline each time."""

    asked = 0

    def __call__(self, *arguments: Any) -> None:
        self.asked += 1
        raise DeadlineExceeded("the disk does not answer")


def refuse_slowly(upload: Upload) -> None:
    """A fork that fails, and takes longer than an end of 10 ms."""
    begun = time.monotonic()
    while time.monotonic() < begun + 0.02:
        os.sched_yield()
    raise OSError(errno.EAGAIN, "no process to be had")


@pytest.mark.parametrize("what", ["lease", "fork"])
def test_an_error_of_a_moment_costs_no_upload(start, monkeypatch, what):
    """Catches: a step that is forgotten until the next start, because one call failed once."""
    job = start()
    job.save(1)
    fault = strike_step_1(job, monkeypatch, what)
    with pytest.raises(OSError, match="EAGAIN|made-up"):
        job.poll()
    job.wait()
    assert fault.failed and job.uploaded() == ["global_step_1"] and job.leases() == []


@pytest.mark.parametrize("what", ["lease", "fork"])
def test_an_error_of_a_moment_is_warned_of_where_failures_are(start, monkeypatch, what):
    """Catches: a training that a full disk ends, though it was told to go on after failed saves."""
    job = start(on_failure="warn")
    job.save(1)
    strike_step_1(job, monkeypatch, what)
    with pytest.warns(SaveFailedWarning, match="made-up|EAGAIN"):
        job.poll()
    job.wait()
    assert job.uploaded() == ["global_step_1"] and job.leases() == []


def test_uploads_go_on_behind_those_that_fail_at_the_end(start, tmp_path):
    """Catches: the copy of the last step, lost because an older one's failed; leases that stay."""
    job = start(Failing(str(tmp_path / "there"), (1, 3)), retention=KeepAll())
    for step in (1, 2, 3, 4):
        job.save(step)
    with pytest.raises(SaveFailed, match="step 1 failed: .*for a moment.*no copy of steps 1, 3"):
        job.wait()
    assert job.uploaded() == ["global_step_2", "global_step_4"] and job.leases() == []
    job.wait()  # nothing is left to do


@pytest.mark.parametrize("what", ["lease", "fork"])
def test_an_upload_that_cannot_begin_costs_no_other(start, monkeypatch, what):
    """Catches: the copy of the last step, lost because the lease or the fork of an older one
    failed. Leases that stay; an end that tries for ever."""
    job = start(retention=KeepAll())
    job.save(1)
    job.save(2)
    strike_step_1(job, monkeypatch, what)
    with pytest.raises(SaveFailed, match="the upload of step 1 .*(made-up|EAGAIN)"):
        job.wait()
    assert job.uploaded() == ["global_step_2"] and job.leases() == []


def test_failed_uploads_at_the_end_are_one_warning_where_failures_are(start, tmp_path):
    """Catches: an end that raises in a run that was told to go on."""
    job = start(Failing(str(tmp_path / "there"), (1, 2)), retention=KeepAll(), on_failure="warn")
    job.save(1)
    job.save(2)
    with pytest.warns(SaveFailedWarning, match="no copy of steps 1, 2") as said:
        job.wait()
    ours = [each for each in said if each.category is SaveFailedWarning]  # 3.12 warns of forks
    assert len(ours) == 1 and job.uploaded() == [] and job.leases() == []


def test_an_end_that_came_too_early_names_the_steps_without_a_copy(start, tmp_path):
    """Catches: leases that stay; a child that outlives its run."""
    held = Held(str(tmp_path / "there"), FifoGate(tmp_path / "gate"))
    job = start(held, retention=KeepAll(), close_timeout_s=0.3)
    job.save(1)
    job.save(2)
    with pytest.raises(DeadlineExceeded, match="did not finish in time: no copy of steps 1, 2"):
        job.wait()
    assert job.leases() == [] and job.uploads.running is None


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_remote_place_that_is_away_at_the_start_is_a_failed_upload(start, tmp_path, on_failure):
    """Catches: a resume that a remote place stops; a latest step that never gets its copy."""
    start().save(1)
    there = str(tmp_path / "there")
    job = start(Failing(there, away=True), on_failure=on_failure)
    job.uploads.begin(job.controller)
    job.poll()
    match = "the upload of step 1 failed: .*is away"
    said = pytest.warns(SaveFailedWarning, match=match)
    with said if on_failure == "warn" else pytest.raises(SaveFailed, match=match):
        ended(job)
    assert job.controller.all_steps() == [1] and job.leases() == []
    job = start()
    job.uploads.begin(job.controller)
    job.wait()
    assert job.uploaded() == ["global_step_1"]


def test_a_copy_that_is_there_at_the_start_is_not_made_again(start, tmp_path):
    """Catches: an upload of the latest step at every start."""
    job = start()
    job.save(1)
    job.wait()
    job = start(Failing(str(tmp_path / "there"), (1,)))
    job.uploads.begin(job.controller)
    job.wait()
    assert job.uploaded() == ["global_step_1"] and job.leases() == []


def test_a_failed_upload_is_raised_and_the_step_let_go(start, tmp_path):
    """Catches: an upload's error that is never told; a step that is kept for ever."""
    job = start(DirectoryMirror(str(tmp_path / "nowhere")))
    (tmp_path / "nowhere").write_text("a file")
    job.save(1)
    with pytest.raises(SaveFailed, match="the upload of step 1 failed"):
        job.wait()
    job.save(2)
    assert job.controller.all_steps() == [2] and job.leases() == []


def test_no_upload_waits_for_the_content_of_a_checkpoint(start, monkeypatch):
    """Catches: a training step as long as a checkpoint takes to read."""
    job = start()
    job.save(1)
    elsewhere = partialmethod(digest_elsewhere, os.getpid(), PosixStorage.digest)
    monkeypatch.setattr(PosixStorage, "digest", elsewhere)
    job.wait()
    assert job.uploaded() == ["global_step_1"]


def digest_elsewhere(
    storage: PosixStorage, trainer: int, real: Callable[[PosixStorage, str], str], path: str
) -> str:
    """The work that the trainer leaves to the process that uploads."""
    assert os.getpid() != trainer, "it reads every file"
    return real(storage, path)


def test_a_run_that_is_left_lets_its_leases_expire(start):
    """Catches: a lease that is given back to a controller that is closed, where its error is not
    caught."""
    job = start()
    job.save(1)
    job.poll()
    job.uploads.abandon()
    job.controller.abandon()
    job.uploads.waiting.clear()  # an error here would be one of pytest's unraisable ones
    assert len(job.leases()) == 1


class SyncedFirst:
    """Stands for ``os.fsync`` and for the rename to a copy's name: by then all of it is fsynced."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.synced: set[int] = set()
        self.moved: list[str] = []

    def fsync(self, fd: int) -> None:
        self.synced.add(os.fstat(fd).st_ino)

    def move(self, storage: PosixStorage, src: str, dst: str) -> None:
        partial = self.place / src
        named = [partial, *(p for p in partial.rglob("*") if not p.name.startswith(".attempt-"))]
        assert [str(p) for p in named if p.stat().st_ino not in self.synced] == []
        self.moved.append(dst)


def test_a_copy_is_fsynced_before_it_has_its_name(tmp_path, monkeypatch):
    """Catches: power is lost at the remote place, and the copy that counts is empty or has no names."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    (here / "inner").mkdir(parents=True)
    names = ("data.pt", "inner/more")
    for name in names:
        (here / name).write_bytes(b"x")
    storage = PosixStorage(str(here), create=False)
    files = [FileEntry(name=n, bytes=1, digest=storage.digest(n)) for n in names]
    watch = SyncedFirst(there)
    monkeypatch.setattr(os, "fsync", watch.fsync)
    monkeypatch.setattr(mirror, "move", watch.move)
    DirectoryMirror(str(there)).upload(str(here), Copy("global_step_1", AttemptId(1, 1, 1)), files)
    assert watch.moved == ["global_step_1"]


def test_the_copy_of_an_abandoned_branch_does_not_count(start):
    """Catches: after a rollback, a remote step with the content of the abandoned branch."""
    job = start()
    for step in (1, 2):
        job.controller.begin(step, {"data.pt": b"old %d" % step}).handle.wait()
        job.controller.pin(step, "kept")
        job.wait()
    job.controller.rollback(1)
    job.controller.begin(2, {"data.pt": b"new"}).handle.wait()
    job.controller.abandon()  # killed before its upload
    later = start()
    later.uploads.begin(later.controller)
    later.wait()
    assert (later.there / "global_step_2/data.pt").read_bytes() == b"new"


@pytest.mark.parametrize("when", ["before it copies", "before it renames", "after it"])
def test_a_step_that_is_saved_anew_during_its_upload_has_a_copy_of_its_own(
    start, tmp_path, monkeypatch, when
):
    """Catches: an upload that is struck off because one of the same number runs: the remote step is
    missing, or that of the abandoned branch, without a word."""
    remote, gate = DirectoryMirror(str(tmp_path / "there")), FifoGate(tmp_path / "gate")
    job = start(remote, retention=KeepAll())
    job.save(1)
    job.wait()
    with monkeypatch.context() as patch:  # inherited by the child
        if when == "before it copies":
            job.uploads.mirror = Held(remote.directory, gate)
        elif when == "before it renames":
            patch.setattr(mirror, "move", gate.hold)
        job.save(2)
        job.poll()
    job.uploads.mirror = remote
    if when == "after it":
        assert job.uploads.running[1].wait(20.0).succeeded
    job.controller.rollback(1)
    job.controller.begin(2, {"data.pt": b"new"}).handle.wait()
    with pytest.warns(UserWarning, match="step 2 is not uploaded: .* not tracked any more"):
        job.poll()
    job.wait()
    assert (job.there / "global_step_2/data.pt").read_bytes() == b"new"
    assert len(list(job.there.glob(".replaced-*"))) == (when == "after it")
    assert job.leases() == []


def test_the_upload_of_a_step_left_by_a_rollback_does_not_fail(start, tmp_path):
    """Catches: a training that ends because what it left itself could not be copied."""
    job = start(Held(str(tmp_path / "there"), FifoGate(tmp_path / "gate")), retention=KeepAll())
    job.save(1)
    job.save(2)
    job.uploads.noted.remove(1)
    job.poll()
    job.controller.rollback(1)
    with pytest.warns(UserWarning, match="step 2 is not uploaded"):
        job.poll()
    job.wait()
    assert job.leases() == [] and job.uploads.running is None


def test_a_step_that_was_saved_anew_is_not_uploaded_for_the_old(start):
    """Catches: new content under the old attempt's mark, where the child came too late."""
    job = start(retention=KeepAll())
    job.save(1)
    job.save(2)
    old = mirror.manifest_of(str(job.root), 2).of
    job.controller.rollback(1)
    job.save(2)
    outcome = Upload(str(job.root), old, job.uploads.mirror).start().wait(20.0)
    assert "is not attempt 2.e1.a2" in outcome.explain() and job.uploaded() == []


def test_another_run_into_the_same_place_has_copies_of_its_own(tmp_path: Path) -> None:
    """Catches: attempts are numbered anew in each root: a step taken for copied, as an earlier run's of
    that number was, also at a start."""
    for run in (b"first", b"second"):
        job = Job(tmp_path)
        for step in (1, 2):
            job.controller.begin(step, {"data.pt": run}).handle.wait()
            if step == 1:
                job.wait()
        job.controller.close()
        job = Job(tmp_path)
        job.uploads.begin(job.controller)
        job.wait()
        job.controller.close()
        shutil.rmtree(job.root)
    copies = [(job.there / f"global_step_{step}/data.pt").read_bytes() for step in (1, 2)]
    assert copies == [b"second", b"second"]


def test_a_step_that_cannot_be_kept_stops_no_other_and_leaves_no_lease(start, monkeypatch) -> None:
    """Catches: uploads that wait behind a step with an unreadable manifest; a child that is never
    looked after, and a lease more with each poll."""
    job = start(on_failure="warn", retention=KeepAll())
    for step in (1, 2, 3):
        job.save(step)
    read = FaultStorage.read

    def sick(storage: FaultStorage, path: str, limit: int) -> bytes:
        if path.startswith("global_step_2/"):
            raise OSError(errno.EIO, "a bad sector", path)
        return read(storage, path, limit)

    monkeypatch.setattr(FaultStorage, "read", sick)
    with pytest.warns(SaveFailedWarning, match="global_step_2.*EIO"):
        for _ in range(6):
            job.poll()
            if job.uploads.running is not None:
                job.uploads.running[1].wait(10)
    assert job.leases() == [] and job.uploaded() == ["global_step_1", "global_step_3"]
    monkeypatch.undo()
    job.wait()
    assert job.uploaded() == ["global_step_1", "global_step_2", "global_step_3"]


def test_the_poll_that_tells_of_a_failure_keeps_the_notes(start, tmp_path) -> None:
    """Catches: a step that retention prunes before its upload, as another upload had just failed."""
    job = start(Failing(str(tmp_path / "there"), (1,)), on_failure="warn")
    with pytest.warns(SaveFailedWarning, match="the upload of step 1 failed"):
        job.save(1)
        job.poll()
        job.uploads.running[1].wait(20)
        job.save(2)
        job.poll()
    job.save(3)
    job.wait()
    assert job.uploaded() == ["global_step_2", "global_step_3"]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_lease_that_is_given_back_late_hides_no_failure(
    start, tmp_path, monkeypatch, at_the_end
) -> None:
    """Catches: a failed upload that is never told, as the disk was slow just then."""
    job = start(Failing(str(tmp_path / "there"), (1,)))
    job.save(1)
    job.poll()
    job.uploads.running[1].wait(20)

    monkeypatch.setattr(Coordinator, "release", Hung())
    with pytest.raises(SaveFailed, match="the upload of step 1 failed"):
        job.wait() if at_the_end else job.poll()


def test_an_end_waits_for_a_hung_disk_no_longer_than_its_time(start, monkeypatch) -> None:
    """Catches: one deadline of the disk for each step that waits, where none can be uploaded."""
    job = start(retention=KeepAll(), close_timeout_s=0.01)
    hung = Hung()
    monkeypatch.setattr(Upload, "start", refuse_slowly)
    for step in (1, 2, 3, 4):
        job.save(step)
        with pytest.raises(OSError, match="no process"):
            job.poll()
    monkeypatch.setattr(Coordinator, "release", hung)
    with pytest.raises(DeadlineExceeded, match="no copy of steps 1, 2, 3, 4"):
        job.wait()
    assert hung.asked == 2, "that of the step that could not begin, and one more"


def test_a_rollback_of_many_waits_for_a_hung_disk_once(start, monkeypatch) -> None:
    """Catches: a poll that keeps the trainer for one deadline of the disk per step that was left."""
    job = start(retention=KeepAll())
    monkeypatch.setattr(Upload, "start", refuse_slowly)
    for step in (1, 2, 3):
        job.save(step)
        with pytest.raises(OSError, match="no process"):
            job.poll()
    job.controller.rollback(1)
    hung = Hung()
    monkeypatch.setattr(Coordinator, "release", hung)
    told = pytest.warns(UserWarning, match="is not tracked any more")
    with told, pytest.raises(DeadlineExceeded):
        job.poll()
    assert hung.asked == 1


def test_a_thread_that_cannot_start_costs_no_upload(start) -> None:
    """Catches: a job that ends, or a step without a copy, for want of a thread for a moment."""
    job = start(on_failure="warn")
    job.save(1)
    ports = job.controller._ports

    def none_left() -> Any:
        raise RuntimeError("can't start new thread")

    job.controller._ports = replace(ports, executor=none_left)
    with pytest.warns(SaveFailedWarning, match="can't start new thread"):
        job.poll()
    job.controller._ports = ports
    job.wait()
    assert job.uploaded() == ["global_step_1"] and job.leases() == []


def test_leases_that_cannot_be_given_back_hide_no_deadline(start, monkeypatch) -> None:
    """Catches: an end that waits for a hung disk once for each lease, and then names no step."""
    job = start(retention=KeepAll())
    for step in (1, 2, 3):
        job.save(step)
        job.poll()
    hung = Hung()
    job.save(4)
    monkeypatch.setattr(Engine, "tracked", hung)
    monkeypatch.setattr(Coordinator, "release", hung)
    with pytest.raises(DeadlineExceeded, match="no copy of steps .*4"):
        job.wait()
    assert hung.asked == 2, "one look, and one lease"
    monkeypatch.undo()
