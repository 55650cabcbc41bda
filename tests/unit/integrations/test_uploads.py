"""Uploads of tracked checkpoints: the leases that keep a step meanwhile, and the effects of an error.

Most tests turn the runner themselves. The others begin its thread.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_ports
from groups import SETTINGS
from proof.fuzz import _CONFIG, common_archive, written_metadata

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import (
    DeadlineExceeded,
    Fenced,
    SaveFailed,
    SaveFailedWarning,
    StorageError,
)
from ckptfsm.core.jobs import Task
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.integrations.verl import mirror, uploads
from ckptfsm.integrations.verl.mirror import DirectoryMirror, RemoteCopy, Upload
from ckptfsm.integrations.verl.uploads import Uploads
from ckptfsm.ranks.controller import Controller
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.writers.plain_files import FilesDriver

WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Failing(DirectoryMirror):
    """A remote place that takes no copy of some steps; ``away``: nor says what it has."""

    steps: tuple[int, ...] = ()
    away: bool = False

    def has(self, copy: RemoteCopy) -> bool:
        if self.away:
            raise StorageError("the remote place is away")
        return DirectoryMirror.has(self, copy)

    def upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        if copy.of.step in self.steps:
            raise OSError(errno.EIO, "away for a moment")
        DirectoryMirror.upload(self, source, copy, files)


@dataclass(frozen=True, slots=True)
class Held(DirectoryMirror):
    """A remote place that is slow until it is let go."""

    gate: FifoGate

    def upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        self.gate.hold()
        DirectoryMirror.upload(self, source, copy, files)


class Job:
    """A controller that saves one file, and the uploads of its steps."""

    def __init__(self, place: Path, remote: DirectoryMirror | None = None, **settings: Any) -> None:
        self.root, self.there = place / "root", place / "there"
        self.there.mkdir(exist_ok=True)
        self.controller = Controller(
            self.root,
            {},
            nobody,
            ports=fake_ports(self.open_storage, driver=FilesDriver()),
            **{**SETTINGS, "layout": "verl", "retention": LatestN(1), **settings},
        )
        remote = remote or DirectoryMirror(str(self.there))
        self.uploads = Uploads(str(self.root), remote, self.controller)
        self.disk = self.uploads.runner._storage = FaultStorage(self.uploads._storage)

    def open_storage(self, create: bool) -> PosixStorage:
        return PosixStorage(str(self.root), create=create)

    def save(self, step: int, data: bytes = b"") -> None:
        self.controller.begin(step, {"data.pt": data or b"at %d" % step}).handle.wait()

    def turn(self) -> None:
        self.uploads.runner.turn()

    def ended(self) -> None:
        """The child that runs has ended, and that was noticed."""
        assert self.uploads.work.child is not None
        assert self.uploads.work.child.wait(WAIT_S) is not None
        self.turn()

    def finish(self) -> None:
        """Turn until nothing runs or waits."""
        self.turn()
        for _ in range(100):
            if self.uploads.runner.idle:
                return
            if self.uploads.work.child is not None:
                self.uploads.work.child.wait(WAIT_S)
            self.turn()
        raise AssertionError(self.uploads.told)

    def wait(self) -> None:
        self.uploads.begin()
        self.uploads.wait()

    def uploaded(self) -> list[str]:
        return sorted(path.name for path in self.there.iterdir())

    def leases(self) -> list[str]:
        return os.listdir(self.root / ".ckptfsm/readers")


def nobody(failed: Any) -> list[Any]:
    return []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_LOOK_S", 0.0)
    task = Task(name="mirror", attempts=2, backoff_s=0.0, timeout_s=1e8, queue=1000)
    monkeypatch.setattr(uploads, "_TASK", task)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs, one after the other. Each has looked at the root once."""
    jobs: list[Job] = []

    def begun(remote: DirectoryMirror | None = None, **settings: Any) -> Job:
        for job in jobs:
            job.uploads.abandon()
            job.controller.close()
        jobs.append(Job(tmp_path, remote, **settings))
        jobs[-1].turn()
        return jobs[-1]

    yield begun
    for job in jobs:
        job.uploads.abandon()
        job.controller.abandon()


def test_I7_a_persons_pin_outlives_an_upload(start):
    """Catches: an upload with an end that removes what a person keeps."""
    job = start()
    job.save(1)
    job.controller.pin(1, "the best so far")
    job.finish()
    job.save(2)
    job.finish()
    assert job.controller.all_steps() == [1, 2]
    assert job.uploaded() == ["global_step_1", "global_step_2"]


def test_I7_a_step_is_kept_while_it_is_uploaded_and_not_longer(start, tmp_path):
    """Catches: a copy of half a step; a step that waits and is pruned, or is kept for ever."""
    gate = FifoGate(tmp_path / "gate")
    job = start(Held(str(tmp_path / "there"), gate))
    job.save(1)
    job.turn()
    job.save(2)
    job.turn()
    job.save(3)
    assert job.controller.all_steps() == [1, 2, 3] and len(job.leases()) == 2
    gate.open()
    job.ended()
    assert job.uploaded() == ["global_step_1"]
    job.save(4)
    assert job.controller.all_steps() == [2, 3, 4], "those that wait for their upload"
    assert sorted(name.partition(".")[0] for name in job.leases()) == ["2", "3"]


def test_an_adopted_step_has_no_receipts_to_upload_by(start):
    """Catches: a run of stock verl that ends at every start; the adoption's pin removed by an upload."""
    job = start()
    adopt_step_5(job)
    for _ in range(2):
        job = start()
        job.finish()
        with pytest.warns(UserWarning, match="step 5 is not uploaded: .* adopted") as said:
            job.uploads.poll()
        assert len(said) == 1 and job.leases() == [], "said once, and let go"
    job.save(6)
    job.finish()
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
    job.save(2)  # and step 1 is pruned before anything looked
    (job.root / "global_step_2/.ckptfsm/manifest.json").write_text("{}")
    job.finish()
    with pytest.warns(UserWarning) as said:
        job.uploads.poll()
    words = [str(warning.message) for warning in said]
    assert [word[:24] for word in words] == [f"step {n} is not uploaded: " for n in (1, 2)]
    job.save(3)
    job.finish()
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


@pytest.mark.parametrize("what", ["lease", "fork", "copy"])
def test_an_error_of_a_moment_costs_no_upload(start, monkeypatch, what):
    """Catches: a step that is forgotten until the next start, because one call failed once. Also: one
    that all others wait for."""
    job = start(retention=KeepAll())
    job.save(1)
    job.save(2)
    fault = Once("/readers/1.") if what == "lease" else Once("step=1", mirror.fork_child)
    if what == "lease":
        job.disk.before = fault
    elif what == "fork":
        monkeypatch.setattr(mirror, "fork_child", fault)
    else:
        job.uploads.work.mirror = Failing(str(job.there), (1,))
        job.turn()
        job.uploads.work.mirror = DirectoryMirror(str(job.there))
    job.finish()
    assert fault.failed == (what != "copy")
    assert job.uploaded() == ["global_step_1", "global_step_2"] and job.leases() == []
    if what == "lease":
        with pytest.warns(SaveFailedWarning, match="uploads wait: .*made-up"):
            job.uploads.poll()
    job.uploads.poll()


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_uploads_go_on_behind_those_that_fail_at_the_end(start, tmp_path, on_failure):
    """Catches: the copy of the last step, lost because an older one's failed; leases that stay. An end
    that raises in a run that was told to go on."""
    remote = Failing(str(tmp_path / "there"), (1, 3))
    job = start(remote, retention=KeepAll(), on_failure=on_failure)
    for step in (1, 2, 3, 4):
        job.save(step)
    match = "step 1 failed: .*for a moment.*no copy of steps 1, 3"
    if on_failure == "raise":
        with pytest.raises(SaveFailed, match=match):
            job.wait()
    else:
        with pytest.warns(SaveFailedWarning, match=match) as said:
            job.wait()
        ours = [each for each in said if each.category is SaveFailedWarning]  # 3.12 warns of forks
        assert len(ours) == 1
    assert job.uploaded() == ["global_step_2", "global_step_4"] and job.leases() == []


def test_an_end_that_came_too_early_names_the_steps_without_a_copy(start, tmp_path):
    """Catches: leases that stay; a child that outlives its run."""
    held = Held(str(tmp_path / "there"), FifoGate(tmp_path / "gate"))
    job = start(held, retention=KeepAll(), close_timeout_s=0.3)
    job.save(1)
    job.save(2)
    job.turn()
    with pytest.raises(DeadlineExceeded, match="did not finish in time: no copy of steps 1, 2"):
        job.wait()
    assert job.leases() == [] and job.uploads.work.child.poll() is not None


def test_I7_a_lease_that_cannot_be_renewed_costs_no_other(start, tmp_path):
    """Catches: steps that wait, and are pruned, as the disk refused the lease of another one."""
    job = start(Held(str(tmp_path / "there"), FifoGate(tmp_path / "gate")), retention=KeepAll())
    for step in (1, 2, 3):
        job.save(step)
    job.turn()
    readers = job.root / ".ckptfsm/readers"
    before = {path: path.read_bytes() for path in readers.iterdir()}
    job.disk.before = Once("/readers/1.")
    job.uploads.runner._renew_at = 0.0
    job.turn()
    renewed = [path for path, data in before.items() if path.read_bytes() != data]
    assert sorted(path.name.partition(".")[0] for path in renewed) == ["2", "3"]


def test_an_owner_that_was_fenced_is_not_told_that_all_is_uploaded(start, monkeypatch):
    """Catches: an end without a word, where the thread of the uploads had ended long before."""
    job = start()

    def fenced() -> None:
        raise Fenced("another owner has the root")

    monkeypatch.setattr(job.uploads.runner, "_check_epoch", fenced)
    said = pytest.warns(SaveFailedWarning, match="uploads wait: .*another owner")
    with said, pytest.raises(DeadlineExceeded, match="did not finish in time"):
        job.wait()


def test_an_end_waits_for_a_hung_disk_no_longer_than_its_time(start, monkeypatch):
    """Catches: a trainer that never ends, as its root does not answer."""
    monkeypatch.setattr(uploads, "_END_S", 0.01)
    job = start(close_timeout_s=0.01)
    answers = threading.Event()
    job.save(1)
    job.disk.before = lambda *call: answers.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="did not finish in time"):
        job.wait()
    job.uploads.abandon()
    answers.set()
    job.uploads._thread.join(WAIT_S)
    assert not job.uploads._thread.is_alive()


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_remote_place_that_is_away_at_the_start_is_a_failed_upload(start, tmp_path, on_failure):
    """Catches: a resume that a remote place stops; a latest step that never gets its copy."""
    start().save(1)
    there = str(tmp_path / "there")
    job = start(Failing(there, away=True), on_failure=on_failure)
    job.uploads.poll()
    job.finish()
    match = "the upload of step 1 failed: .*is away"
    said = pytest.warns(SaveFailedWarning, match=match)
    with said if on_failure == "warn" else pytest.raises(SaveFailed, match=match):
        job.uploads.poll()
    assert job.controller.all_steps() == [1] and job.leases() == []
    job = start()
    job.finish()
    assert job.uploaded() == ["global_step_1"]


def test_a_copy_that_is_there_at_the_start_is_not_made_again(start, tmp_path):
    """Catches: an upload of the latest step at every start."""
    job = start()
    job.save(1)
    job.finish()
    job = start(Failing(str(tmp_path / "there"), (1,)))
    job.finish()
    job.uploads.poll()
    assert job.uploaded() == ["global_step_1"] and job.leases() == []


def test_a_failed_upload_is_raised_and_the_step_let_go(start, tmp_path):
    """Catches: an upload's error that is never told, as another one's was; a step kept for ever."""
    job = start(DirectoryMirror(str(tmp_path / "nowhere")))
    (tmp_path / "nowhere").write_text("a file")
    for step in (1, 2):
        job.save(step)
        job.finish()
    for step in (1, 2):
        with pytest.raises(SaveFailed, match=f"the upload of step {step} failed"):
            job.uploads.poll()
    job.uploads.poll()
    assert job.controller.all_steps() == [2] and job.leases() == []


def test_no_upload_reads_a_checkpoint_in_the_trainer(start, monkeypatch):
    """Catches: a training step as long as a checkpoint takes to read."""
    job = start()
    job.save(1)
    elsewhere = partialmethod(digest_elsewhere, os.getpid(), PosixStorage.digest)
    monkeypatch.setattr(PosixStorage, "digest", elsewhere)
    job.finish()
    assert job.uploaded() == ["global_step_1"]


def digest_elsewhere(
    storage: PosixStorage, trainer: int, real: Callable[[PosixStorage, str], str], path: str
) -> str:
    """The work that the trainer leaves to the process that uploads."""
    assert os.getpid() != trainer, "it reads every file"
    return real(storage, path)


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
    DirectoryMirror(str(there)).upload(
        str(here), RemoteCopy("global_step_1", AttemptId(1, 1, 1)), files
    )
    assert watch.moved == ["global_step_1"]


def test_the_copy_of_an_abandoned_branch_does_not_count(start):
    """Catches: after a rollback, a remote step with the content of the abandoned branch."""
    job = start(retention=KeepAll())
    for step in (1, 2):
        job.save(step, b"old")
        job.finish()
    job.controller.rollback(1)
    job.save(2, b"new")
    job.uploads.abandon()
    job.controller.abandon()  # killed before its upload
    later = start()
    later.finish()
    assert (later.there / "global_step_2/data.pt").read_bytes() == b"new"


@pytest.mark.parametrize("when", ["before it copies", "before it renames", "after it"])
def test_a_step_that_is_saved_anew_during_its_upload_has_a_copy_of_its_own(
    start, tmp_path, monkeypatch, when
):
    """Catches: an upload that is struck off because one of the same number runs: the remote step is
    missing, or that of the abandoned branch, without a word. Also: an error for what was left itself."""
    remote, gate = DirectoryMirror(str(tmp_path / "there")), FifoGate(tmp_path / "gate")
    job = start(remote, retention=KeepAll())
    job.save(1)
    job.finish()
    with monkeypatch.context() as patch:  # inherited by the child
        if when == "before it copies":
            job.uploads.work.mirror = Held(remote.directory, gate)
        elif when == "before it renames":
            patch.setattr(mirror, "move", gate.hold)
        job.save(2)
        job.turn()
    job.uploads.work.mirror = remote
    if when == "after it":
        assert job.uploads.work.child.wait(WAIT_S).succeeded
    job.controller.rollback(1)
    job.save(2, b"new")
    job.uploads.runner._renew_at = 0.0  # the tracker names the same step as before
    job.turn()
    job.finish()
    if when == "after it":
        job.uploads.poll()
    else:
        with pytest.warns(UserWarning, match="step 2 is not uploaded: .* withdrawn"):
            job.uploads.poll()
    assert (job.there / "global_step_2/data.pt").read_bytes() == b"new"
    assert len(list(job.there.glob(".replaced-*"))) == (when == "after it")
    assert job.leases() == []


def test_a_step_that_was_saved_anew_is_not_uploaded_for_the_old(start):
    """Catches: new content under the old attempt's mark, where the child came too late."""
    job = start(retention=KeepAll())
    job.save(1)
    job.save(2)
    old = mirror.manifest_of(str(job.root), 2).of
    job.controller.rollback(1)
    job.save(2)
    outcome = Upload(str(job.root), old, job.uploads.work.mirror).start().wait(WAIT_S)
    assert "is not attempt 2.e1.a2" in outcome.explain() and job.uploaded() == []


def test_another_run_into_the_same_place_has_copies_of_its_own(tmp_path: Path) -> None:
    """Catches: attempts are numbered anew in each root: a step taken for copied, as an earlier run's of
    that number was, also at a start."""
    for run in (b"first", b"second"):
        for steps in ((1, 2), ()):
            job = Job(tmp_path)
            for step in steps:
                job.save(step, run)
                if step == 1:
                    job.finish()
            if not steps:
                job.finish()
            job.uploads.abandon()
            job.controller.close()
        shutil.rmtree(job.root)
    copies = [(job.there / f"global_step_{step}/data.pt").read_bytes() for step in (1, 2)]
    assert copies == [b"second", b"second"]


def test_a_step_that_cannot_be_read_stops_no_other_and_leaves_no_lease(start, monkeypatch) -> None:
    """Catches: uploads that wait behind a step with a bad manifest, and a lease more each time."""
    job = start(on_failure="warn", retention=KeepAll())
    for step in (1, 2, 3):
        job.save(step)
    read = FaultStorage.read

    def sick(storage: FaultStorage, path: str, limit: int) -> bytes:
        if path.startswith("global_step_2/"):
            raise OSError(errno.EIO, "a bad sector", path)
        return read(storage, path, limit)

    monkeypatch.setattr(FaultStorage, "read", sick)
    for _ in range(4):
        job.turn()
        job.ended()
    with pytest.warns(SaveFailedWarning, match="uploads wait: .*a bad sector") as said:
        job.uploads.poll()
    assert len([each for each in said if each.category is SaveFailedWarning]) == 1
    assert job.leases() == [] and job.uploaded() == ["global_step_1", "global_step_3"]
    monkeypatch.setattr(FaultStorage, "read", read)
    job.finish()
    assert job.uploaded() == ["global_step_1", "global_step_2", "global_step_3"]
