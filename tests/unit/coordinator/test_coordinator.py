"""The coordinator on a simulated disk: its acceptances, refusals and repairs, and the files that it
never touches.

Each test names the bugs that it would catch. Crashes at every call are in
``test_crash_simulation``.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_roots import real_job
from roots import (
    content,
    destinations,
    foreign_attempt,
    left,
    replace,
    saved,
    staged,
    start,
    stop,
    tracked,
)

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.documents import Asked
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    Fenced,
    JournalCorrupt,
    NewerSchema,
    NoRoom,
    OutcomeUnknown,
    RootBusy,
    RootLost,
    SaveRefused,
    StorageError,
)
from ckptfsm.core.events import Failed, FinalizersRan, ShardReported, WriterForked, WriterGone
from ckptfsm.core.layout import (
    EPOCHS,
    JOURNAL,
    MANIFEST,
    PINS,
    QUARANTINE,
    READERS,
    RECEIPTS,
    STAGING,
    TRACKER,
    TRASH,
    answer_name,
    receipt_name,
    staging_dir,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import FileStat, RankJob
from ckptfsm.core.requests import Blocked, FinalizersDue, NothingInFlight, SaveRequest
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inbox import send
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, FakePart, SimClock, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank


def below(disk: SimDisk, prefix: str) -> dict[str, object]:
    return {path: value for path, value in disk.snapshot().items() if path.startswith(prefix)}


def written_by_a_child(job: FakeJob, of: AttemptId, rank: int) -> None:
    """A rank's shard and receipt, which are not reported yet."""
    part = FakePart("state", "", rank, fake_content(of, rank))
    write_rank(job.storage, RankJob(of, rank, job.ranks, staging_dir(of), (part,)))


def test_I3_receipts_counted_when_leaving_are_durable():
    """Catches: shards that are journaled as written although a power loss can still take their
    receipts.

    The writer of rank 1 is killed before it makes the name of its receipt durable.
    """
    disk = SimDisk()
    job = start(disk)
    of, location = staged(job, 1)
    written_by_a_child(job, of, 0)

    def killed(index: int, method: str, path: str) -> None:
        if method == "fsync_dir" and f"/{RECEIPTS}/" in path:
            raise ProcessDead(path)

    def journaled(index: int, method: str, path: str) -> None:
        if method == "fsync" and path.startswith(JOURNAL):
            raise ProcessDead(path)

    part = FakePart("state", "", 1, fake_content(of, 1))
    writer = FaultStorage(job.storage, before=killed)
    with pytest.raises(ProcessDead):
        write_rank(writer, RankJob(of, 1, job.ranks, location, (part,)))
    receipt = f"{location}/{receipt_name('state', 1)}"
    assert None in disk.possible(receipt), "the writer died too late for this test"
    job.storage.after = journaled
    with pytest.raises(ProcessDead):
        job.coordinator.complete_from_receipts(of, 1.0)
    journal = b"".join(data for path, data in below(disk, JOURNAL).items() if data)
    assert b'"shards_written"' in journal
    assert None not in disk.possible(receipt)


def test_a_save_that_was_tracked_before_the_manager_was_left_is_not_lost():
    """Catches: a warning of a lost step, though it was tracked while the trainer computed."""
    disk = SimDisk()
    job = start(disk)
    of = job.save(10)
    assert job.coordinator.complete_from_receipts(of, 1.0) is State.TRACKED
    late = job.request(20)
    job.fork(late)
    job.fail(late)
    assert job.coordinator.complete_from_receipts(late, 1.0) is None


@pytest.mark.parametrize("directory", [STAGING, PINS, READERS, TRASH, QUARANTINE])
def test_an_empty_directory_that_a_purge_took_is_made_anew(tmp_path: Path, directory: str):
    """Catches: a job of months whose saves are refused, as nothing lay in staging for a night."""
    job = real_job(tmp_path, retention=LatestN(2))
    for step in (1, 2):
        job.save(step)
    job.coordinator.tick()
    (tmp_path / directory).rmdir()
    job.save(3)
    job.coordinator.tick()
    job.coordinator.pin(3, "for the paper")
    with ReaderLease(tmp_path, 3):
        job.coordinator.rollback(2)
    assert [path.name for path in (tmp_path / QUARANTINE).iterdir()] == ["3.e1.a3"]
    job.close()
    check_root(PosixStorage(tmp_path), 2)


@pytest.mark.damages_journal("deletes the root")
def test_a_root_that_is_deleted_under_its_job_is_told_as_that(tmp_path: Path):
    """Catches: a job that says that a newer manager runs, and has a person look for that."""
    root = tmp_path / "root"
    job = real_job(root)
    job.save(1)
    shutil.rmtree(root)
    for _ in range(2):  # fatal: nothing comes back
        with pytest.raises(RootLost, match=f"{root} was deleted under its job"):
            job.request(2)
    root.mkdir()
    job.coordinator.abandon()
    assert list(root.iterdir()) == [], "another directory at the same path is not ours"


# --------------------------------------------------------------------------- F10, F11: who reports


@pytest.mark.parametrize("event", ["forked", "reported"])
def test_F10_a_wrong_world_size_condemns_the_attempt(event: str):
    """Catches: shards of two differently sized jobs in one checkpoint. The error names the rank."""
    job = start(SimDisk())
    of = job.request(1)
    if event == "forked":
        job.coordinator.report([WriterForked(of, 1, 3)])
    else:
        job.fork(of)
        job.coordinator.report([ShardReported(of, "state", 1, 3, 10)])
    failed = job.coordinator.ledger.checkpoints[of]
    assert (failed.state, failed.reason) == (State.FAILED, "wrong_world_size")
    assert "rank 1" in failed.detail


def test_one_failed_attempt_is_told_once_and_cleaned_when_all_writers_are_gone():
    """I1. Catches: files moved away under a writer that may still write."""
    disk = SimDisk()
    job = start(disk)
    of, directory = staged(job, 1)
    job.coordinator.report([Failed(of, "writer_died"), WriterGone(of, 0)])
    assert directory in disk.snapshot()
    job.coordinator.report([Failed(of, "writer_died"), WriterGone(of, 0)])
    assert directory in disk.snapshot(), "rank 0 twice is not rank 0 and rank 1"
    job.coordinator.report([WriterGone(of, 1)])
    assert directory not in disk.snapshot()
    job._listen()
    assert destinations(job) == ["requested", "forked", "failed", "discarded"]
    job.close()
    assert not below(disk, f"{TRASH}/"), "a close gives the space back"


def test_settled_is_said_after_everything_else():
    """Catches: ranks that stop listening before retention had its turn."""
    job = start(SimDisk(), retention=LatestN(1))
    job.save(1)
    of, _ = staged(job, 2)
    job.write(of, 0)
    job.take_news()
    written_by_a_child(job, of, 1)
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    news = job.take_news()
    assert [getattr(n, "dest", n) for n in news] == [
        State.SHARDS_WRITTEN,
        State.FINALIZED,
        State.TRACKED,
        State.PRUNABLE,
        State.PRUNED,
        NothingInFlight(),
    ]


# ----------------------------------------------------------------------- F9: files that are visible
# late


class CollectingStorage:
    """Passes all calls on, and notes those that come while the garbage collector is paused."""

    def __init__(self, inner: FaultStorage) -> None:
        self._inner = inner
        self.root = inner.root
        self.calls: list[str] = []
        self.paused: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._note(name)
            result = method(*arguments, **keywords)
            return self._each(name, result) if isinstance(result, Iterator) else result

        return call

    def _each(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._note(name)
            yield item

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if not gc.isenabled() or gc.get_threshold()[0] == 0:
            self.paused.append(name)


def test_no_call_of_the_storage_is_waited_for_while_the_collector_is_paused():
    """Catches: a trainer whose garbage is not collected for as long as a disk hangs."""
    disk = SimDisk()
    first = start(disk, wrap=CollectingStorage)
    first.save(1)
    disk.kill("first")
    second = start(disk, "second", wrap=CollectingStorage)
    second.save(2)
    stop(disk, second, "second")
    for job in (first, second):
        assert {"read", "read_each", "fsync", "rename"} <= set(job.storage.calls)
        assert job.storage.paused == []


class LateStorage(SimStorage):
    """Hides one name until it was asked for ``hidden`` times, as a network file system may.

    ``listed``: the listing of its directory shows it all the same (a cached negative lookup).
    """

    late = "no such name"
    hidden = 0
    asked = 0
    listed = False

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        if not self.hidden or self.listed:
            return names
        return [n for n in names if not f"{path}/{n}".endswith(self.late)]

    def stat(self, path: str) -> FileStat:
        self._hide(path)
        return super().stat(path)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        self._hide(path)
        return super().read(path, limit, offset)

    def _hide(self, path: str) -> None:
        if path.endswith(self.late) and self.hidden > 0:
            self.hidden -= 1
            self.asked += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("late", ["receipts/state/1.json", "__1_0.distcp"])
def test_F9_a_name_that_shows_late_is_waited_for(late: str, listed: bool):
    """Catches: a good checkpoint failed because a directory was cached for a second."""
    job = FakeJob(LateStorage(SimDisk(), "first"))
    job.open()
    of, _ = staged(job, 1)
    before = job.clock.now
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    job.storage.late, job.storage.hidden, job.storage.listed = late, 7, listed
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    assert tracked(job) == [1] and job.storage.asked == 7
    assert 0 < job.clock.now - before < 10


@pytest.mark.parametrize("late", ["receipts/state/1.json", "__1_0.distcp"])
def test_F9_a_name_that_never_shows_fails_the_attempt(late: str):
    """I10. Catches: a wait without end. The error names the rank."""
    job = FakeJob(LateStorage(SimDisk(), "first"))
    job.open()
    of, _ = staged(job, 1)
    before = job.clock.now
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    job.storage.late, job.storage.hidden = late, 10**9
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    failed = job.coordinator.ledger.checkpoints[of]
    assert (failed.state, failed.reason) == (State.FAILED, "shard_missing")
    assert "ShardMissing" in failed.detail and "rank 1" in failed.detail
    assert 10 <= job.clock.now - before < 11


# -------------------------------------------------------------- F30: hostile receipts and leftovers


def rewrite_receipt(job: FakeJob, of: AttemptId, rank: int, change: Callable[[dict], None]) -> None:
    path = f"{staging_dir(of)}/{receipt_name('state', rank)}"
    receipt = json.loads(job.storage.read(path, 1 << 20))
    del receipt["crc"]  # a forged receipt need not be sealed
    change(receipt)
    job.storage.unlink(path)
    handle = job.storage.open_exclusive(path)
    job.storage.write(handle, json.dumps(receipt).encode())
    job.storage.fsync(handle)
    job.storage.close(handle)


def named(name: str) -> Callable[[dict], None]:
    return lambda receipt: receipt["files"].append({"name": name, "bytes": 0, "digest": None})


HOSTILE_RECEIPTS = {
    "outside": (named("../x"), "files"),
    "outside_deeper": (named("a/../../../x"), "files"),
    "dot": (named("./x"), "files"),
    "absolute": (named("/etc/passwd"), "files"),
    "empty": (named(""), "files"),
    "nul": (named("a\0b"), "files"),
    "missing_file": (named("__9_0.distcp"), "__9_0.distcp is missing"),
    "claims_the_others": (named("__0_0.distcp"), "__0_0.distcp"),
    "other_rank": (lambda r: r.update(rank=0), "not of"),
    "other_attempt": (lambda r: r.update(attempt=99), "not of"),
    "other_step": (lambda r: r.update(step=7), "not of"),
    "other_epoch": (lambda r: r.update(epoch=7), "not of"),
    "other_world": (lambda r: r.update(world_size=3), "not of"),
    "huge": (lambda r: r["files"][0].update(bytes=10**40), "bytes"),
    "negative": (lambda r: r["files"][0].update(bytes=-1), "bytes"),
    "unknown_field": (lambda r: r.update(extra=1), "extra"),
    "newer": (lambda r: r.update(schema_version=2), "newer"),
}


@pytest.mark.parametrize("name", HOSTILE_RECEIPTS)
def test_F30_a_hostile_receipt_fails_the_attempt_only(name: str):
    """I5. Catches: a receipt that reaches outside its attempt, or stops the coordinator."""
    change, told = HOSTILE_RECEIPTS[name]
    disk = SimDisk()
    job = saved(disk, 1)
    before = below(disk, "iter_")
    of, directory = staged(job, 2)
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    rewrite_receipt(job, of, 1, change)
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    failed = job.coordinator.ledger.checkpoints[of]
    assert failed.state is State.FAILED
    assert told in failed.detail
    assert below(disk, "iter_") == before and tracked(job) == [1]
    job.fail(of)
    job.save(3)
    assert job.acknowledged == [1, 3]


@pytest.mark.parametrize("name", HOSTILE_RECEIPTS)
def test_F30_a_hostile_receipt_does_not_stop_a_restart(name: str):
    """I8. Catches: a root that can never be opened again because of one receipt."""
    change, _ = HOSTILE_RECEIPTS[name]
    disk = SimDisk()
    job = saved(disk, 1)
    of, directory = staged(job, 2)
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    crash_before(job, "put of the manifest", lambda method, path: MANIFEST in path)
    with pytest.raises(ProcessDead):
        job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    disk.kill("first")
    again = start(disk, "mender", opened=False)
    rewrite_receipt(again, of, 1, change)
    disk.kill("mender")
    if name == "newer":
        with pytest.raises(NewerSchema):
            start(disk, "second")
        assert directory in disk.snapshot()
        return
    second = start(disk, "second")
    assert tracked(second) == [1]
    second.save(3)
    check_root(second.storage, 3)


def crash_before(job: FakeJob, what: str, where: Callable[[str, str], bool]) -> None:
    """From now on the process dies before the first call that ``where`` (method, path) names."""

    def hook(index: int, method: str, path: str) -> None:
        if where(method, path):
            raise ProcessDead(what)

    assert isinstance(job.storage, FaultStorage)
    job.storage.before = hook


def test_F10_two_ranks_that_claim_one_file_fail_the_attempt():
    """I3. Catches: rank 1 counted on the strength of rank 0's shard."""
    job = start(SimDisk())
    of, directory = staged(job, 1)
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    theirs = json.loads(job.storage.read(f"{directory}/{receipt_name('state', 0)}", 1 << 20))
    rewrite_receipt(job, of, 1, lambda receipt: receipt["files"].append(theirs["files"][0]))
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])
    failed = job.coordinator.ledger.checkpoints[of]
    assert failed.state is State.FAILED
    assert "__0_0.distcp is claimed by two receipts" in failed.detail and "rank=1" in failed.detail


@pytest.mark.parametrize(
    "extra", ["__7_0.distcp", "note.txt", ".ckptfsm/receipts/state/7.json", "link"]
)
def test_F30_a_file_that_no_receipt_lists_fails_the_attempt(extra: str):
    """F13, F16. Catches: a late writer's file, or a link, that is published with the checkpoint."""
    disk = SimDisk()
    job = start(disk)
    of, directory = staged(job, 1)
    job.write(of, 0)
    if extra == "link":
        disk.plant_symlink(f"{directory}/link", "/etc/passwd")
    else:
        disk.plant_file(f"{directory}/{extra}", b"late")
    job.write(of, 1)
    failed = job.coordinator.ledger.checkpoints[of]
    assert failed.state is State.FAILED
    assert extra == "link" or f"{extra} is in no receipt" in failed.detail
    assert TRACKER not in disk.snapshot()


HOSTILE_NAMES = [
    "..x",
    "5\n.json",
    "9" * 400,
    "-1.json",
    "5.json.json",
    "٣.json",
    "5",
    " ",
    "\u202e5",
]


@pytest.mark.parametrize(
    "directory", ["staging", "trash", "pins", "readers", "journal", "quarantine"]
)
def test_F30_hostile_names_are_left_alone(directory: str):
    """Catches: a name that is parsed into something it is not, followed, or fatal."""
    disk = SimDisk()
    left(disk, 1, 2)
    base = f".ckptfsm/{directory}"
    for index, name in enumerate(HOSTILE_NAMES):
        path = f"{base}/{name[:200]}"
        if directory == "trash" or index % 2:
            disk.plant_file(path, b"?")
        else:
            disk.plant_mount(path, device=1)
    job = start(disk, "second", retention=LatestN(1))
    assert tracked(job) == [1, 2]
    job.save(3)
    job.clock.now += 10_000
    job.coordinator.tick()
    job.clock.now += 10_000
    job.coordinator.tick()
    assert job.acknowledged == [3]
    names = {path.removeprefix(f"{base}/") for path in below(disk, f"{base}/")}
    assert {name[:200] for name in HOSTILE_NAMES} <= names
    check_root(job.storage, 3)


@pytest.mark.parametrize("kind", ["directory", "symlink", "empty"])
@pytest.mark.parametrize("where", ["pins/1.json", "readers/1.x.json"])
def test_F30_a_marker_that_is_no_document_still_protects(where: str, kind: str):
    """I7. Catches: a pin or lease of another shape that stops the coordinator, or protects nothing."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    path = f".ckptfsm/{where}"
    if kind == "directory":
        disk.plant_mount(path, device=1)
    elif kind == "symlink":
        disk.plant_symlink(path, "/etc/passwd")
    else:
        disk.plant_file(path, b"")
    job.save(2)
    job.coordinator.tick()
    job.clock.now += 1.0
    job.coordinator.tick()
    job.save(3)
    assert tracked(job) == [1, 3]


# ------------------------------------------------------------------------------ F16: links, devices


@pytest.mark.parametrize("latest", [False, True])
def test_F16_a_linked_step_directory_is_never_followed_nor_deleted(latest: bool):
    """Catches: another run's checkpoint that is loaded, pruned or changed through a link."""
    disk = SimDisk()
    left(disk, 1, 2)
    disk.plant_mount("elsewhere", device=1)
    disk.plant_file("elsewhere/precious", b"precious")
    step = 3 if latest else 0
    disk.plant_symlink(f"iter_{step:07d}", "elsewhere")
    job = start(disk, "second", retention=LatestN(1))
    reported = [d for d in job.coordinator.ledger.checkpoints.values() if d.step == step]
    assert reported == [] and tracked(job) == [1, 2]
    for other in (4, 5):
        job.save(other)
        job.coordinator.tick()
    assert disk.snapshot()[f"iter_{step:07d}"] == "-> elsewhere"
    assert disk.snapshot()["elsewhere/precious"] == b"precious"
    assert tracked(job) == [5]


def test_F16_a_tracked_directory_that_became_a_link_is_not_pruned():
    """Catches: a link moved to the trash in place of the checkpoint, and its target with it."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    thief = SimStorage(disk, "thief")
    thief.rename("iter_0000001", "elsewhere")
    disk.plant_symlink("iter_0000001", "elsewhere")
    job.save(2)
    job.coordinator.tick()
    assert disk.snapshot()["iter_0000001"] == "-> elsewhere"
    assert "elsewhere/__0_0.distcp" in disk.snapshot()
    assert tracked(job) == [2] and not job.coordinator.busy
    assert [r.detail for r in job.records if r.event == "withdrawn"][0].startswith(
        "DamagedRoot: iter_0000001 is a symlink"
    )


def test_F16_a_checkpoint_that_became_a_mount_is_not_pruned():
    """Catches: a prune that is tried for ever: a person moved the checkpoint to another disk, and
    mounted it where it was."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    SimStorage(disk, "thief").rename("iter_0000001", "elsewhere")
    disk.plant_mount("iter_0000001")
    for path, data in sorted(below(disk, "elsewhere/").items()):
        mounted = path.replace("elsewhere", "iter_0000001")
        disk.plant_mount(mounted) if data is None else disk.plant_file(mounted, data)
    with pytest.raises(SaveRefused, match="taken into use"):
        job.coordinator.delete(1)
    assert tracked(job) == [1, 2] and not job.coordinator.busy
    assert disk.find("iter_0000001/__0_0.distcp") is not None


def test_F16_a_withdrawn_directory_that_became_a_link_stays_where_it_is():
    """Catches: a withdrawal that is tried again for ever; a link taken for the checkpoint."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    thief = SimStorage(disk, "thief")
    thief.rename("iter_0000002", "elsewhere")
    disk.plant_symlink("iter_0000002", "elsewhere")
    job.coordinator.withdraw_damaged(2, "it is a link")
    assert tracked(job) == [1] and not job.coordinator.busy
    assert disk.snapshot()["iter_0000002"] == "-> elsewhere"
    stop(disk, job)
    assert tracked(start(disk, "second")) == [1]
    assert disk.snapshot()["iter_0000002"] == "-> elsewhere"


def test_F16_a_linked_name_in_the_way_of_a_save():
    """Catches: a save into a link's target."""
    disk = SimDisk()
    job = saved(disk, 1)
    disk.plant_mount("elsewhere", device=1)
    disk.plant_symlink("iter_0000002", "elsewhere")
    job.save(2)
    assert tracked(job) == [1, 2] and below(disk, "elsewhere/") == {}
    assert "-> elsewhere" in disk.snapshot().values(), "the link itself is not deleted"


@pytest.mark.damages_journal("puts a link in its place")
@pytest.mark.parametrize("name", ["staging", "trash", "journal", "epochs"])
def test_F16_a_private_directory_that_is_a_link_is_refused(name: str):
    """Catches: our files written, or deleted, somewhere else."""
    disk = SimDisk()
    vandal = SimStorage(disk, "vandal")
    vandal.mkdir(".ckptfsm")
    vandal.mkdir("elsewhere")
    disk.plant_symlink(f".ckptfsm/{name}", "elsewhere")
    with pytest.raises((CkptFsmError, OSError)):
        start(disk)
    assert below(disk, "elsewhere/") == {}


# --------------------------------------------------------------------- F17: interrupted deletion


class SwitchedPolicy(Policy):
    """A policy that a test changes while a job runs."""

    now: Policy = KeepAll()

    def preserve(self, checkpoints):
        return self.now.preserve(checkpoints)


def interrupted_prune(disk: SimDisk) -> None:
    """``prunable`` of step 1 is in the journal; the process died before the directory moved."""
    policy = SwitchedPolicy()
    job = saved(disk, 1, 2, retention=policy)
    policy.now = LatestN(1)
    crash_before(job, "rename", lambda m, path: m == "rename" and "-> .ckptfsm/trash" in path)
    with pytest.raises(ProcessDead):
        job.coordinator.unpin(99)
    disk.kill("first")
    assert "iter_0000001" in disk.snapshot()


@pytest.mark.parametrize("guard", ["pin", "lease", "policy", "none"])
def test_F17_an_interrupted_deletion_looks_at_every_guard_again(guard: str):
    """I7. Catches: a deletion that is completed although it was forbidden meanwhile."""
    disk = SimDisk()
    interrupted_prune(disk)
    if guard == "pin":
        disk.plant_file(".ckptfsm/pins/1.json", b"{}")
    elif guard == "lease":
        disk.plant_file(".ckptfsm/readers/1.reader.json", b"{}")
    job = start(disk, "second", retention=KeepAll() if guard == "policy" else LatestN(1))
    assert tracked(job) == [1, 2], "nobody has read step 2 yet: nothing is given up for it"
    job.save(3)
    kept = {"none": [3], "policy": [1, 2, 3]}.get(guard, [1, 3])
    assert tracked(job) == kept
    assert ("iter_0000001" in disk.snapshot()) == (guard != "none")
    check_root(job.storage, 3)


def test_F17_a_tracker_edited_by_hand_stops_a_deletion():
    """I2. Catches: the deletion of the step that the tracker names, whichever program wrote it
    there."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    replace(disk, TRACKER, b"1\n")
    with pytest.raises(SaveRefused):
        job.coordinator.delete(1)
        raise AssertionError("it was deleted") from None
    assert "iter_0000001" in disk.snapshot() and tracked(job) == [1, 2]


def test_F17_a_tracker_edited_by_hand_is_said_and_mended():
    """Catches: going back by editing the tracker, which would fork history without a trace."""
    disk = SimDisk()
    left(disk, 1, 2)
    replace(disk, TRACKER, b"1\n")
    job = start(disk, "second", opened=False)
    report = job.open()
    assert report.latest_step == 2 and content(disk, TRACKER) == b"2\n"
    assert any("rollback()" in warning for warning in report.warnings)


# ------------------------------------------------------------------------------ F18, F19: the tracker


def test_F18_a_tracker_that_is_a_link_is_not_followed():
    """F16. Catches: the file a link points to being overwritten."""
    disk = SimDisk()
    left(disk, 1)
    SimStorage(disk, "vandal").rename(TRACKER, "elsewhere")
    disk.plant_symlink(TRACKER, "elsewhere")
    job = start(disk, "second")
    assert disk.snapshot()["elsewhere"] == b"1\n" and content(disk, TRACKER) == b"1\n"
    job.save(2)
    assert disk.snapshot()["elsewhere"] == b"1\n"


@pytest.mark.parametrize(
    "damage", ["missing", "gutted", "no_manifest", "torn_manifest", "hostile_manifest", "short"]
)
def test_F19_the_tracker_names_a_step_that_is_not_whole(damage: str):
    """I2, F30. Catches: a resume from a directory that only looks like a checkpoint."""
    disk = SimDisk()
    left(disk, 1, 2)
    vandal = SimStorage(disk, "vandal")
    if damage == "missing":
        vandal.rename("iter_0000002", "taken_away")
    elif damage == "gutted":
        vandal.unlink("iter_0000002/__1_0.distcp")
    elif damage == "no_manifest":
        vandal.unlink(f"iter_0000002/{MANIFEST}")
    elif damage == "torn_manifest":
        replace(disk, f"iter_0000002/{MANIFEST}", b'{"step":')
    elif damage == "hostile_manifest":
        manifest = json.loads(content(disk, f"iter_0000002/{MANIFEST}"))
        del manifest["crc"]
        manifest["files"].append({"name": "a/../x", "bytes": 0, "digest": None})
        replace(disk, f"iter_0000002/{MANIFEST}", json.dumps(manifest).encode())
    else:
        replace(disk, "iter_0000002/__1_0.distcp", b"short")
    job = start(disk, "second", opened=False)
    report = job.open()
    assert report.latest_step == 1 and content(disk, TRACKER) == b"1\n"
    assert any("2" in warning and "falling back to 1" in warning for warning in report.warnings)
    job.save(2)
    assert tracked(job) == [1, 2]
    check_root(job.storage, 2)


def test_F19_nothing_is_whole():
    """I8. Catches: an empty start, or a root that was changed before a person could look."""
    disk = SimDisk()
    left(disk, 1)
    SimStorage(disk, "vandal").unlink("iter_0000001/__1_0.distcp")
    before = below(disk, "iter_"), content(disk, TRACKER)
    with pytest.raises(DamagedRoot, match="none to resume from"):
        start(disk, "second")
    assert (below(disk, "iter_"), content(disk, TRACKER)) == before


# ------------------------------------------------------------------------------ F20, F34: the journal


def segment(disk: SimDisk) -> tuple[str, bytes]:
    path = max(below(disk, f"{JOURNAL}/"))
    return path, content(disk, path)


@pytest.mark.damages_journal("damages a record in the middle")
def test_F20_damage_in_the_middle_changes_nothing_and_raises():
    """Catches: a guess about history, or a damaged journal that is written on."""
    disk = SimDisk()
    left(disk, 1, 2)
    path, data = segment(disk)
    at = data.index(b'"dest":"tracked"')
    damaged = data[:at] + b"X" + data[at + 1 :]
    replace(disk, path, damaged)
    before = {p: v for p, v in disk.snapshot().items() if "/epochs" not in p and "lock" not in p}
    with pytest.raises(JournalCorrupt) as caught:
        start(disk, "second")
    assert caught.value.file == path and 0 < caught.value.offset <= at
    after = {p: v for p, v in disk.snapshot().items() if "/epochs" not in p and "lock" not in p}
    assert after == before


def test_I9_a_fenced_one_says_so_first():
    """Catches: a save that failed for a staging directory that was not found, or a root
    that is said to be damaged, where another job has taken it over."""
    disk, second = SimDisk(), []
    first = saved(disk, 1, 2)
    of = first.request(3)
    first.fork(of)
    first.write(of, 0)

    def takes_over(index: int, method: str, path: str) -> None:
        if method == "open_exclusive" and ".metadata" in path and not second:
            second.append(start(disk, "second", takeover=True))

    first.storage.before = takes_over
    with pytest.raises(Fenced):
        first.write(of, 1)
    assert second[0].coordinator.ledger.latest().step == 3, "it went on with it"


def test_F5_a_root_on_a_disk_that_is_full_of_our_trash_is_opened():
    """Catches: a job that no start brings back, as what it gave up takes the disk."""
    disk = SimDisk()
    job = saved(disk, 1)
    stop(disk, job)
    junk = ".ckptfsm/trash/gone-1.e1.a1"
    disk.plant_file(junk, bytes(1 << 19))

    def before(index: int, method: str, path: str) -> None:
        if method == "open_exclusive" and junk in disk.snapshot():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    second = start(disk, "second", wrap=lambda s: FaultStorage(s, before=before))
    assert tracked(second) == [1]
    assert not [name for name in below(disk, f"{EPOCHS}/") if "take-" in name]


@pytest.mark.parametrize("restarted", [True, False])
def test_F5_our_trash_does_not_keep_the_tracker_from_its_bytes(restarted: bool):
    """Catches: a published checkpoint that no tick and no start tracks, as what was given up takes the
    disk."""
    disk = SimDisk()
    job = saved(disk, 1)
    junk = ".ckptfsm/trash/gone-1.e1.a1"
    disk.plant_file(junk, bytes(1 << 19))

    def before(index: int, method: str, path: str) -> None:
        if method == "open_exclusive" and path.startswith(TRACKER) and junk in disk.snapshot():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    job.storage.before = before
    job.save(2)
    assert tracked(job) == [1]
    if restarted:
        disk.kill("first")
        job = start(disk, "second", wrap=lambda s: FaultStorage(s, before=before))
    else:
        for _ in range(2):
            job.coordinator.tick()
    assert tracked(job) == [1, 2]
    check_root(job.storage, 2)


def test_F5_the_trash_of_one_that_saves_all_the_time_is_emptied():
    """Catches: a disk that fills to the brim with pruned files, since no tick ever
    finds the root idle."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    junk = ".ckptfsm/trash/gone-1.e1.a1"
    job.coordinator.tick()
    disk.plant_file(junk, bytes(10))
    job.fork(job.request(3))
    for there in (True, False):
        job.clock.sleep(6.0)
        job.coordinator.tick()
        assert (junk in disk.snapshot()) is there, "the first one leaves the disk to the writers"


def newer_journal(disk: SimDisk) -> str:
    path, data = segment(disk)
    first = data.split(b"\n", 1)[0]
    body = json.loads(first[first.index(b'"record":') + 9 : -1])
    body = json.dumps(body | {"schema_version": 2, "from_the_future": True}).encode()
    line = b'{"crc":"%08x","record":%s}\n' % (zlib.crc32(body), body)
    replace(disk, path, line)
    return path


def newer_manifest(disk: SimDisk) -> str:
    path = f"iter_0000001/{MANIFEST}"
    manifest = json.loads(content(disk, path)) | {"schema_version": 2, "from_the_future": True}
    replace(disk, path, json.dumps(manifest).encode())
    return path


def newer_holder(disk: SimDisk) -> str:
    path = max(below(disk, ".ckptfsm/epochs/"))
    holder = json.loads(content(disk, path)) | {"schema_version": 2, "from_the_future": True}
    replace(disk, path, json.dumps(holder).encode())
    return path


@pytest.mark.damages_journal("writes one of a newer version")
@pytest.mark.parametrize("make", [newer_journal, newer_manifest, newer_holder])
@pytest.mark.parametrize("resume", ["fallback", "fresh"])
def test_F34_a_newer_document_is_refused_and_not_rewritten(make, resume: str):
    """Catches: an older library that "repairs", quarantines or forgets what a newer one wrote."""
    disk = SimDisk()
    left(disk, 1, 2)
    path = make(disk)
    before = content(disk, path), below(disk, "iter_"), content(disk, TRACKER)
    with pytest.raises(NewerSchema) as caught:
        start(disk, "second", resume=resume)
    assert (caught.value.file, caught.value.schema_version) == (path, 2)
    assert (content(disk, path), below(disk, "iter_"), content(disk, TRACKER)) == before


# ------------------------------------------------------------------------------ F12, F13: fencing


def outside_own_journal(disk: SimDisk, epoch: int) -> dict[str, object]:
    """Everything but the zombie's segment, which is sealed: its bytes do not count."""
    own = f"{JOURNAL}/{epoch:06d}.ndjson"
    return {path: value for path, value in disk.snapshot().items() if path != own}


FENCED_CALLS: dict[str, Callable[[FakeJob, AttemptId], object]] = {
    "request": lambda job, of: job.coordinator.request(SaveRequest(9, (PartSpec("state"),), 2)),
    "finalize": lambda job, of: job.coordinator.report([ShardReported(of, "state", 1, 2, 10)]),
    "clean_up": lambda job, of: job.fail(of),
    "pin": lambda job, of: job.coordinator.pin(1, ""),
    "unpin": lambda job, of: job.coordinator.unpin(1),
    "record_metrics": lambda job, of: job.coordinator.record_metrics(1, {"loss": 1.0}),
    "delete": lambda job, of: job.coordinator.delete(1),
    "rollback": lambda job, of: (job.fail(of), job.coordinator.rollback(1)),
    "locate": lambda job, of: job.coordinator.locate(None),
    "withdraw": lambda job, of: job.coordinator.withdraw_damaged(2, "damaged"),
    "tick": lambda job, of: job.coordinator.tick(),
}


@pytest.mark.parametrize("call", FENCED_CALLS)
def test_I9_a_fenced_coordinator_changes_nothing(call: str):
    """F12. Catches: a zombie's effect between, or over, those of the new owner."""
    disk = SimDisk()
    first = saved(disk, 1, 2)
    of, _ = staged(first, 3)
    for rank in (0, 1):
        written_by_a_child(first, of, rank)
    first.coordinator.report([ShardReported(of, "state", 0, 2, 10)])
    if call == "tick":
        first.fail(of)  # something in the trash, which a tick would delete
    if call == "unpin":
        first.coordinator.pin(1, "")
    second = start(disk, "second", takeover=True)
    disk.plant_file(".ckptfsm/readers/2.somebody.json", b"x")
    first.clock.now += 10_000
    before = outside_own_journal(disk, 1)
    with pytest.raises(Fenced) as caught:
        FENCED_CALLS[call](first, of)
    assert outside_own_journal(disk, 1) == before
    assert (caught.value.epoch, caught.value.newer_epoch) == (1, 2)
    for again in FENCED_CALLS.values():  # it is fatal: every later call says the same
        with pytest.raises(Fenced):
            again(first, of)
    first.close()
    assert outside_own_journal(disk, 1) == before
    second.save(4)
    assert second.acknowledged == [4]
    check_root(second.storage, 4)


def copied(source: SimDisk, name: str, target: SimDisk) -> None:
    """Another program copies a directory, as it is."""
    storage = SimStorage(target, "somebody")
    storage.mkdir(name)
    for path, data in sorted(below(source, f"{name}/").items()):
        storage.mkdir(path) if data is None else target.plant_file(path, data)


def test_I5_another_attempt_at_our_name_is_not_ours_published():
    """Catches: a directory of another attempt at the step (a fenced job's, that landed late) taken for
    ours, and a coordinator that stops for it; it fails this attempt only."""
    other, disk = SimDisk(), SimDisk()
    job = saved(other, 1)
    job.fail(staged(job, 2)[0])
    theirs = job.save(2)
    job = saved(disk, 1)
    ours, _ = staged(job, 2)
    assert ours != theirs
    job.write(ours, 0)
    copied(other, "iter_0000002", disk)
    before = below(disk, "iter_0000002/")
    job.write(ours, 1)
    assert job.coordinator.fatal is None and tracked(job) == [1]
    (failed,) = [r for r in job.records if r.dest is State.FAILED]
    assert failed.of == ours and "taken by something else" in failed.detail
    assert below(disk, "iter_0000002/") == before
    job.save(3)
    assert tracked(job) == [1, 3]


def test_F12_a_second_one_is_refused_and_disturbs_nothing():
    """F32. Catches: a refused job that already swept, sealed or repaired something."""
    disk = SimDisk()
    first = saved(disk, 1)
    staged(first, 2)
    before = disk.snapshot()
    with pytest.raises(RootBusy) as caught:
        start(disk, "second")
    assert (caught.value.host, caught.value.pid) == ("sim", first.identity.pid)
    assert disk.snapshot() == before


class Waking(SimClock):
    """Time in which ``then`` happens at the third look of a job that waits."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.looks, self._then = 0, then

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.looks += 1
        if self.looks == 3:
            self._then()


def test_a_start_waits_for_a_command_that_holds_the_root(caplog):
    """Catches: a job that dies at its start because a person pins a step at that moment; a start that
    goes on from the root as it was before the command."""
    disk = SimDisk()
    command = saved(disk, 1, 2)

    def end() -> None:
        command.coordinator.rollback(1)
        stop(disk, command)

    job = start(disk, "second", clock=Waking(end))
    assert tracked(job) == [1] and job.coordinator.epoch == 2
    said = [r for r in caplog.records if r.event == "waits_for_root"]
    assert [(r.pid, r.host) for r in said] == [(command.identity.pid, "sim")]
    job.save(2)


def test_F12_a_second_one_that_waits_is_refused_in_time(caplog):
    """F32. Catches: a second trainer that waits until the first one has ended, hours later."""
    disk = SimDisk()
    saved(disk, 1)
    before, clock = disk.snapshot(), Waking(lambda: None)
    with pytest.raises(RootBusy):
        start(disk, "second", clock=clock)
    assert 7 <= clock.now - 1000 <= 9 and clock.looks > 3
    assert [r.event for r in caplog.records].count("waits_for_root") == 1
    assert disk.snapshot() == before


def test_F12_a_second_one_of_the_same_process_does_not_wait():
    """Catches: a process that waits for itself."""
    disk, clock = SimDisk(), SimClock()
    saved(disk, 1)
    with pytest.raises(RootBusy):
        start(disk, clock=clock)
    assert clock.now == 1000


# ----------------------------------------------------------------------- fatal errors, refusals, space


def faulty(disk: SimDisk, predicate: Callable[[str, str], bool], code: int, **settings) -> FakeJob:
    def hook(index: int, method: str, path: str) -> None:
        if predicate(method, path):
            raise OSError(code, os.strerror(code), path)

    return start(disk, wrap=lambda s: FaultStorage(s, before=hook), opened=False, **settings)


def test_F6_a_lost_journal_is_fatal_and_stays_so():
    """I11. Catches: a segment written on after a failed fsync, when its content is unknown."""
    broken = []
    disk = SimDisk()
    job = faulty(disk, lambda m, p: bool(broken) and m == "fsync" and JOURNAL in p, errno.EIO)
    job.open()
    job.save(1)
    broken.append(True)
    with pytest.raises(OutcomeUnknown):
        job.request(2)
    broken.clear()
    before = disk.snapshot()
    for call in (lambda: job.request(2), lambda: job.coordinator.pin(1, ""), job.coordinator.tick):
        with pytest.raises(OutcomeUnknown):
            call()
    assert disk.snapshot() == before and tracked(job) == [1]
    disk.kill("first")
    second = start(disk, "second")
    assert tracked(second) == [1]
    second.save(2)


def test_F8_a_publish_of_unknown_outcome_is_fatal():
    """Catches: a checkpoint that is failed, and cleaned away, although it was published."""
    disk = SimDisk()
    renamed = []

    def before(index: int, method: str, path: str) -> None:
        if renamed and method == "fsync_dir" and path == "":
            raise OSError(errno.EIO, "EIO", path)
        if method == "rename" and path.endswith("-> iter_0000001"):
            renamed.append(path)

    job = start(disk, wrap=lambda s: FaultStorage(s, before=before))
    with pytest.raises(OutcomeUnknown):
        job.save(1)
    assert isinstance(job.coordinator.fatal, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        job.coordinator.tick()
    disk.kill("first")
    second = start(disk, "second")
    assert tracked(second) == [1], "a restart decides from what is there"


def test_F5_a_staging_directory_that_cannot_be_made_refuses_the_save():
    """Catches: an accepted save without a directory to write it in."""
    full = [True]
    job = faulty(
        SimDisk(),
        lambda m, p: bool(full) and m == "mkdir" and ".ckptfsm/staging/" in p,
        errno.ENOSPC,
    )
    job.open()
    with pytest.raises(SaveRefused, match="staging directory"):
        job.request(1)
    full.clear()
    job._listen()
    assert "failed" in destinations(job)
    job.coordinator.report([WriterGone(AttemptId(1, 1, 1), rank) for rank in (0, 1)])
    job.save(1)
    assert job.acknowledged == [1]


def test_F5_why_a_published_one_waits_is_told_once_per_reason():
    """Catches: a reason that is told at every retry, that names a temporary file, or that is forgotten
    when it changes."""
    disk, code = SimDisk(), [errno.ENOSPC]
    job = saved(disk, 1)

    def before(index: int, method: str, path: str) -> None:
        if code and method == "open_exclusive" and path.startswith(TRACKER):
            raise OSError(code[0], os.strerror(code[0]), path)

    job.storage.before = before
    of, _ = staged(job, 2)
    job.write(of, 0)
    written_by_a_child(job, of, 1)
    job.coordinator.report([ShardReported(of, "state", 1, 2, 10)])

    def told() -> list[tuple[Any, ...]]:
        news = [n for n in job.take_news() if isinstance(n, Blocked)]
        return [(n.of, n.error.file, n.error.call, n.error.errno_name) for n in news]

    assert told() == [(of, TRACKER, "tracker", "ENOSPC")]
    job.coordinator.tick()
    assert told() == []
    code[0] = errno.EIO
    job.coordinator.tick()
    job.coordinator.tick()
    assert told() == [(of, TRACKER, "tracker", "EIO")]
    code.clear()
    job.coordinator.tick()
    assert (told(), job.coordinator.blocked, tracked(job)) == ([], {}, [1, 2])


def test_a_clean_up_that_waits_is_told_too():
    """Catches: a ``close`` that waits for a clean-up without a word on the disk."""
    disk = SimDisk()
    job = saved(disk, 1)
    of, directory = staged(job, 2)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(directory):
            raise OSError(errno.EIO, os.strerror(errno.EIO), directory)

    job.storage.before = before
    job.fail(of)
    assert job.coordinator.blocked[of].facts["call"] == "clean_up"
    assert job.coordinator.blocked[of].file == directory


def test_a_disk_that_answers_nothing_does_not_end_a_retry(monkeypatch):
    """Catches: a save under ``on_failure="warn"`` that raises because the epoch cannot be looked at."""
    job = saved(SimDisk(), 1)
    job.storage.before = no_tracker
    job.save(2)
    with monkeypatch.context() as sick:
        sick.setattr(job.storage, "listdir", unreadable)
        job.coordinator.retry()
    assert job.coordinator.fatal is None and tracked(job) == [1]
    job.storage.before = None
    job.coordinator.retry()
    assert tracked(job) == [1, 2]


def no_tracker(index: int, method: str, path: str) -> None:
    if method == "open_exclusive" and path.startswith(TRACKER):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def unreadable(path: str) -> list[str]:
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def crowded(keep: int, *, ours: bool) -> tuple[SimDisk, FakeJob]:
    """A root with steps 1 and 2, of which only ``keep`` are kept, and no room for another one.

    ``ours``: this run saved them; a reader of step 1 is gone. Else the run before did, with a larger
    keep.
    """
    disk = SimDisk()
    if ours:
        job = saved(disk, 1, retention=LatestN(keep))
        lease = job.coordinator.locate(1)
        assert lease is not None
        job.save(2)
        job.coordinator.release(lease.lease)
    else:
        left(disk, 1, 2)
        job = start(disk, "second", retention=LatestN(keep))
    assert tracked(job) == [1, 2]
    disk.capacity = disk.used + 1000
    return disk, job


def ask_for_more(job: FakeJob, size: int = 2000) -> None:
    job.coordinator.request(SaveRequest(3, (PartSpec("state"),), 2, expected_bytes=size))


def test_F5_a_save_without_room_first_prunes_the_given_up():
    """Catches: a save that is refused beside a checkpoint that retention has long ceased to keep."""
    disk, job = crowded(1, ours=True)
    ask_for_more(job)
    assert tracked(job) == [2] and not below(disk, "iter_0000001")
    assert not below(disk, ".ckptfsm/trash/gone")
    busy = job.coordinator.ledger.in_flight()
    assert busy is not None and busy.step == 3
    check_root(job.storage, 2)


@pytest.mark.parametrize(("keep", "size"), [(2, 2000), (1, 1 << 30)], ids=["kept", "in vain"])
def test_F5_I7_a_save_without_room_prunes_nothing_that_is_kept_or_in_vain(keep: int, size: int):
    """Catches: a checkpoint that retention keeps and that goes for space, and one that goes although
    the save is refused all the same."""
    disk, job = crowded(keep, ours=True)
    before = disk.snapshot()
    with pytest.raises(NoRoom) as caught:
        ask_for_more(job, size)
    error = caught.value
    needed = max(size, 2091)  # a twentieth more than step 2 has
    assert (error.step, error.bytes_needed, error.bytes_free) == (3, needed, 1000)
    assert (tracked(job), disk.snapshot()) == ([1, 2], before)


def test_F5_I7_a_save_without_room_is_told_what_jobs_hold():
    """Catches: a full disk that nobody explains, and a step that goes before its job is done."""
    disk = SimDisk()
    job = saved(disk, 1, 2, retention=LatestN(1), holds={"copy": 1})
    disk.capacity = disk.used + 1000
    size = sum(c.shard_bytes for c in job.coordinator.ledger.in_state(State.TRACKED)[:1])
    with pytest.raises(NoRoom, match="jobs that are not done hold steps") as caught:
        ask_for_more(job)
    assert (caught.value.bytes_held, tracked(job)) == (size, [1, 2])


def test_F5_I7_the_last_tracked_one_is_never_pruned_for_room():
    """Catches: an empty root, because a policy keeps nothing."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(0))
    disk.capacity = disk.used + 1000
    with pytest.raises(NoRoom):
        ask_for_more(job)
    assert tracked(job) == [1]


def test_F5_F21_nothing_is_pruned_for_room_before_the_newest_was_verified():
    """Catches: the last good checkpoint pruned at a restart with a smaller keep, for a newest one that
    is damaged."""
    _, job = crowded(1, ours=False)
    with pytest.raises(NoRoom):
        ask_for_more(job)
    older, newest = job.coordinator.locate(1), job.coordinator.locate(None)
    assert older is not None and newest is not None
    job.coordinator.release(older.lease, verified=1)
    with pytest.raises(NoRoom):
        ask_for_more(job)
    job.coordinator.release(newest.lease, verified=2)
    ask_for_more(job)
    assert tracked(job) == [2]


def test_F5_a_prune_for_room_that_the_disk_refuses_refuses_the_save():
    """Catches: an untyped error, or a coordinator that stops for good."""
    _, job = crowded(1, ours=True)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith("iter_0000001"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    with pytest.raises(NoRoom):
        ask_for_more(job)
    job.storage.before = None
    job.coordinator.tick()  # the prune is retried
    assert tracked(job) == [2] and job.coordinator.fatal is None
    ask_for_more(job)


def test_the_size_of_a_save_is_predicted_from_those_with_the_same_parts():
    """Catches: a foreign request that is admitted to a full disk because nobody announced its size, and
    a small save that is refused because a larger one with other parts came before."""
    disk = SimDisk()
    job = saved(disk, 1)
    disk.capacity = disk.used + 1000
    with pytest.raises(NoRoom) as caught:
        job.coordinator.request(SaveRequest(2, (PartSpec("state"),), 2))
    assert caught.value.bytes_needed == 2091
    job.coordinator.request(SaveRequest(2, (PartSpec("other"),), 2))


def test_F27_a_readers_lease_expires_by_our_time():
    """F14. Catches: a crashed reader that keeps a checkpoint for ever, or wall time deciding so."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    disk.plant_file(".ckptfsm/readers/1.dead.json", b"once")
    job.save(2)
    job.coordinator.tick()
    job.clock.now += 599
    job.coordinator.tick()
    assert tracked(job) == [1, 2]
    replace(disk, ".ckptfsm/readers/1.dead.json", b"renewed")
    job.clock.now += 2
    job.coordinator.tick()
    assert ".ckptfsm/readers/1.dead.json" in disk.snapshot(), "it was renewed meanwhile"
    job.clock.now += 601
    job.coordinator.tick()
    assert ".ckptfsm/readers/1.dead.json" not in disk.snapshot()
    job.save(3)
    assert tracked(job) == [3]


def test_F27_a_reader_that_renews_keeps_its_step_beyond_the_timeout():
    """Catches: a renewal that the coordinator cannot tell from silence, and a step deleted under its
    reader."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    with ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"), nonce="r") as lease:
        job.save(2)
        for _ in range(4):
            job.clock.now += 400
            lease.renew()
            job.coordinator.tick()
            assert ".ckptfsm/readers/1.r.json" in disk.snapshot() and tracked(job) == [1, 2]
        job.clock.now += 601
        job.coordinator.tick()
        assert ".ckptfsm/readers/1.r.json" not in disk.snapshot(), "it did not renew"
    job.save(3)
    assert tracked(job) == [3]


def test_the_rest_of_a_lease_that_could_not_be_written_expires():
    """Catches: files that a full disk or a killed reader leaves among the leases for good."""
    disk = SimDisk()
    job = saved(disk, 1)
    left, foreign = ".ckptfsm/readers/1.dead.json.tmp-dead.0", ".ckptfsm/readers/notes.txt"
    disk.plant_file(left, b"ha")
    disk.plant_file(foreign, b"of somebody")
    job.coordinator.tick()
    job.clock.now += 599
    job.coordinator.tick()
    assert left in disk.snapshot(), "a reader may be writing it"
    job.clock.now += 2
    job.coordinator.tick()
    assert left not in disk.snapshot() and foreign in disk.snapshot()


@pytest.mark.parametrize("sick", ["1.dead.json", "1.dead.json.tmp-dead.0"])
@pytest.mark.parametrize("method", ["read", "unlink"])
def test_a_lease_that_cannot_be_looked_at_keeps_no_other(sick: str, method: str):
    """Catches: a bad sector under one lease that keeps all others, and the trash full."""
    disk = SimDisk()
    job = saved(disk, 1)
    bad, dead = f".ckptfsm/readers/{sick}", ".ckptfsm/readers/2.dead.json"
    trash = ".ckptfsm/trash/gone-0.e1.a1"
    for path in (bad, dead, trash):
        disk.plant_file(path, b"{}")
    healthy = getattr(job.storage, method)

    def fails(path: str, *arguments: object) -> object:
        if path == bad:
            raise OSError(errno.EIO, "a bad sector", path)
        return healthy(path, *arguments)

    setattr(job.storage, method, fails)
    for _ in range(3):
        job.coordinator.tick()
        job.clock.now += 601
    job.coordinator.tick()
    assert bad in disk.snapshot()
    assert dead not in disk.snapshot() and trash not in disk.snapshot()


@pytest.mark.parametrize(
    ("marker", "kept_by"), [("readers/1.late.json", "reader"), ("pins/1.json", "pin")]
)
def test_F27_a_marker_made_between_the_decision_and_the_rename(marker: str, kept_by: str):
    """Catches: a prune that does not look again right before it moves the directory."""
    disk = SimDisk()

    def before(index: int, method: str, path: str) -> None:
        text = b'"dest":"prunable"'
        if method == "fsync" and JOURNAL in path and text in content(disk, path):
            path = f".ckptfsm/{marker}"
            if path not in disk.snapshot():
                disk.plant_file(path, b"")

    job = start(disk, wrap=lambda s: FaultStorage(s, before=before), retention=LatestN(1))
    job.save(1)
    job.save(2)
    assert tracked(job) == [1, 2]
    assert [r.reason for r in job.records if r.event == "reprieved"] == [kept_by]


# -------------------------------------------------------------------------- I6: foreign finalizers


def test_I9_a_fenced_coordinator_asks_for_no_finalizers():
    """Catches: metadata written into the directory that a successor has tracked, by the finalizers
    of a job that was paused behind its writers."""
    disk = SimDisk()
    job = start(disk)
    with pytest.raises(Fenced):
        foreign_attempt(job, between=partial(start, disk, "second", takeover=True))
    assert not [n for n in job.take_news() if isinstance(n, FinalizersDue)]


def test_I6_finalizers_are_asked_for_once_and_of_every_rank():
    """Catches: finalizers run twice, or a checkpoint finalized before all of them ran."""
    disk = SimDisk()
    job = start(disk)
    of = foreign_attempt(job)
    asked = [n for n in job.take_news() if isinstance(n, FinalizersDue)]
    assert asked == [FinalizersDue(of)]
    disk.plant_file("iter_0000001/.metadata", b"m")
    disk.plant_file("iter_0000001/metadata.json", b"{}")
    job.coordinator.report([FinalizersRan(of, 0), FinalizersRan(of, 0)])
    assert tracked(job) == []
    job.coordinator.report([FinalizersRan(of, 1)])
    assert tracked(job) == [1]
    assert not [n for n in job.take_news() if isinstance(n, FinalizersDue)]


def test_I6_finalizers_are_not_run_again_where_only_the_journal_failed():
    """Catches: a retry of our journaling that runs foreign finalizers a second time."""
    disk = SimDisk()
    broken: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if broken and method == "pwrite" and JOURNAL in path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), broken.pop())

    job = start(disk, wrap=lambda s: FaultStorage(s, before=before))
    of = foreign_attempt(job)
    job.take_news()
    disk.plant_file("iter_0000001/.metadata", b"m")
    disk.plant_file("iter_0000001/metadata.json", b"{}")
    broken.append("published")
    job.coordinator.report([FinalizersRan(of, 0), FinalizersRan(of, 1)])
    assert not broken and tracked(job) == []
    job.coordinator.tick()
    assert FinalizersDue(of) not in job.take_news()
    assert tracked(job) == [1]


def test_I6_a_restart_never_runs_foreign_finalizers():
    """Catches: a foreign request finalized by a process that does not have its queue."""
    disk = SimDisk()
    job = start(disk)
    foreign_attempt(job)
    disk.kill("first")
    second = start(disk, "second")
    assert not [n for n in second.take_news() if isinstance(n, FinalizersDue)]
    assert tracked(second) == [] and TRACKER not in disk.snapshot()
    assert "iter_0000001" not in disk.snapshot(), "the unfinished one is out of the way"


# ------------------------------------------------------------------------------------ I11: traces


def test_a_coordinator_that_is_not_open_says_so():
    """Catches: an assertion, or an effect, of a coordinator that was closed."""
    disk = SimDisk()
    job = saved(disk, 1)
    job.close()
    before = disk.snapshot()
    for call in (lambda: job.request(2), job.coordinator.tick, lambda: job.coordinator.pin(1, "")):
        with pytest.raises(StorageError, match="not open"):
            call()
    assert disk.snapshot() == before
    assert isinstance(job.coordinator, Coordinator)


def asked_to_pin(job: FakeJob, epoch: int = 1) -> str:
    """The answer's name of a request to pin step 1."""
    send(job.storage, Asked(nonce="a" * 32, epoch=epoch, errand="pin", step=1))
    return answer_name("a" * 32)


def test_no_request_is_served_while_this_job_reads():
    """Catches: a rollback that moves a checkpoint while it is loaded."""
    job = saved(SimDisk(), 1)
    located = job.coordinator.locate(None)
    answer = asked_to_pin(job)
    job.coordinator.serve_requests()
    assert lookup(job.storage, answer) is None
    job.coordinator.release(located.lease)
    job.coordinator.serve_requests()
    assert lookup(job.storage, answer) is not None
    assert job.coordinator.ledger.pins == {1}, "no tick was needed"


def test_F13_a_fenced_owner_answers_no_request():
    """Catches: a request to the new owner that the old one refuses, or carries out."""
    disk = SimDisk()
    job = saved(disk, 1)
    second = start(disk, "second", takeover=True)
    answer = asked_to_pin(second, second.coordinator.epoch)
    job.coordinator.serve_requests()
    assert isinstance(job.coordinator.fatal, Fenced)
    assert lookup(second.storage, answer) is None
    second.coordinator.serve_requests()
    assert second.coordinator.ledger.pins == {1}
    job.coordinator.serve_requests()  # it does nothing more


def test_F5_an_inbox_that_cannot_be_read_is_looked_at_less_often(caplog, monkeypatch):
    """Catches: a line in the log for each second of a disk that fails; an owner that looks no more."""
    job = saved(SimDisk(), 1)
    answer = asked_to_pin(job)

    def fails(path: str) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(job.storage, "listdir", fails)
        for _ in range(3):
            job.coordinator.serve_requests()
    assert [record.event for record in caplog.records] == ["housekeeping_put_off"]
    job.coordinator.serve_requests()
    assert lookup(job.storage, answer) is None
    job.clock.sleep(5.0)
    job.coordinator.serve_requests()
    assert lookup(job.storage, answer) is not None
