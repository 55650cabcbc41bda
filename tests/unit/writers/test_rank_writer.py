"""The writer of one rank: its files on disk, their order, and the view of its trainer.

Each test names the bugs that it would catch.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeShard

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import Receipt, decode
from ckptfsm.core.errors import StorageError
from ckptfsm.core.events import Failed, ShardReported, WriterForked
from ckptfsm.core.layout import RECEIPTS, STAGING, receipt_name, staging_dir
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import FileStat, PartJob, RankJob, Written
from ckptfsm.disk.durable import make_dirs
from ckptfsm.disk.visibility import Visibility
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage, fail_at
from ckptfsm.testing.harness import FakePart, SimClock
from ckptfsm.testing.simfs import SimDisk, SimStorage
from ckptfsm.writers.plain_files import at_path
from ckptfsm.writers.rank_writer import FilePart, RankWriter, launch_forked, write_rank
from ckptfsm.writers.shard_file import ShardFile

OF = AttemptId(5, 1, 1)
LOCATION = staging_dir(OF)
FAR = 1e12  # a deadline that never comes
WAIT_S = 20.0


def content(rank: int = 0) -> bytes:
    return b"rank %d " % rank * 100


def job(*parts, rank: int = 0, world_size: int = 1) -> RankJob:
    return RankJob(
        OF, rank, world_size, LOCATION, parts or (FakePart("state", "", rank, content(rank)),)
    )


@pytest.fixture
def disk() -> SimDisk:
    made = SimDisk()
    make_dirs(SimStorage(made, "setup"), LOCATION)
    made.kill("setup")
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / LOCATION).mkdir(parents=True)
    return tmp_path


def fork(root: Path, work: RankJob, deadline: float = FAR) -> RankWriter:
    storage = PosixStorage(root)
    return RankWriter(storage, work, launch=launch_forked, deadline=deadline)


def events(writer: RankWriter, now: float = 0.0) -> list[Any]:
    """The reports of a writer that has ended; each call repeats them."""
    assert writer.wait(SystemClock(), WAIT_S)
    return ends(writer, now)


def ends(writer: RankWriter, now: float = 0.0) -> list[Any]:
    """The writer's reports so far, without the one of its fork."""
    forked, *rest = writer.poll(now)
    assert type(forked) is WriterForked
    return rest


def receipt(storage, part: str = "state", rank: int = 0) -> Receipt:
    path = f"{LOCATION}/{receipt_name(part, rank)}"
    return decode(Receipt, storage.read(path, 1 << 20), path)


# ---------------------------------------------------------------------------- what is on disk


def test_I3_a_receipt_lists_every_file_with_size_and_digest(disk: SimDisk):
    """Catches: a file that no receipt answers for, or a receipt of something else than was written."""
    storage = SimStorage(disk, "writer")
    assert write_rank(storage, job()) == [("state", 2 * len(content()), None)]
    found = receipt(storage)
    assert (found.of, found.part, found.rank, found.world_size) == (OF, "state", 0, 1)
    below = [p.removeprefix(f"{LOCATION}/") for p, v in disk.snapshot().items() if type(v) is bytes]
    assert sorted(e.name for e in found.files) == sorted(
        name for name in below if not name.endswith("receipts/state/0.json")
    )
    for entry in found.files:
        assert entry.bytes == storage.stat(f"{LOCATION}/{entry.name}").size
        assert entry.digest == storage.digest(f"{LOCATION}/{entry.name}")


@pytest.mark.parametrize("loss", ["all_lost", "all_kept"])
def test_I3_once_the_writer_returned_a_power_loss_takes_nothing(disk: SimDisk, loss):
    """F4. Catches: a missing fsync of a shard, of its name, or of the receipt."""
    parts = (FakePart("a", "deep/er", 0, content()), FilePart("notes", "notes.txt", b"hello", "b"))
    write_rank(SimStorage(disk, "writer"), job(*parts))
    before = disk.snapshot()
    disk.crash(loss)
    assert disk.snapshot() == before


def test_I3_the_receipt_comes_last(disk: SimDisk):
    """F4. Catches: a receipt that is durable before the shard it stands for."""
    storage = FaultStorage(SimStorage(disk, "writer"))
    write_rank(storage, job())
    receipts = [i for i, (_, path) in enumerate(storage.calls) if "receipts/state/0.json" in path]
    shards = [i for i, (_, path) in enumerate(storage.calls) if path.endswith(".distcp")]
    assert max(shards) < min(receipts)
    assert ("fsync_dir", LOCATION) in storage.calls[max(shards) : min(receipts)]


def test_several_parts_have_a_receipt_each(disk: SimDisk):
    """F23. Catches: one receipt that stands for parts which are not written yet."""
    storage = SimStorage(disk, "writer")
    parts = (FakePart("actor", "actor", 0, content()), FilePart("notes", "notes.txt", b"hello"))
    assert [name for name, _, _ in write_rank(storage, job(*parts))] == ["actor", "notes"]
    assert {e.name for e in receipt(storage, "actor").files} == {
        "actor/__0_0.distcp",
        ".ckptfsm/planned/actor.bin",
    }
    assert [e.name for e in receipt(storage, "notes").files] == ["notes.txt"]


def test_two_writers_never_share_a_file(disk: SimDisk):
    """F13. Catches: a second writer that truncates or interleaves with the first one's shard."""
    storage = SimStorage(disk, "writer")
    write_rank(storage, job())
    before = disk.snapshot()
    with pytest.raises(FileExistsError):
        write_rank(SimStorage(disk, "other"), job())
    assert disk.snapshot() == before


@pytest.mark.parametrize("directory", ["", "actor"])
def test_F13_a_late_writer_cannot_bring_its_directory_back(disk: SimDisk, directory: str):
    """Catches: files of a dead attempt that reappear after they were moved to the trash."""
    storage = SimStorage(disk, "writer")
    storage.rename(LOCATION, "moved_away")
    with pytest.raises(StorageError, match="moved it away"):
        write_rank(storage, job(FakePart("state", directory, 0, content())))
    assert storage.listdir(STAGING) == [] and storage.listdir("moved_away") == []


class OtherHost(SimStorage):
    """A host that shows the names ``late`` only after so many seconds; ``mkdir`` sees them at once."""

    def __init__(self, disk: SimDisk, late: set[str], seconds: float) -> None:
        super().__init__(disk, "writer")
        self.clock, self.late, self.shown_at = SimClock(), late, 1000.0 + seconds

    def stat(self, path: str) -> FileStat:
        self._require(path)
        return super().stat(path)

    def mkdir(self, path: str) -> None:
        self._require(path.rpartition("/")[0])
        super().mkdir(path)

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        self._require(path.rpartition("/")[0])
        return super().open_exclusive(path, direct=direct)

    def _require(self, path: str) -> None:
        if path in self.late and self.clock.now < self.shown_at:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def write_job(self, work: RankJob) -> None:
        write_rank(self, replace(work, visibility_timeout_s=5.0), clock=self.clock)


NAMES = (LOCATION, f"{LOCATION}/actor", f"{LOCATION}/{RECEIPTS}", f"{LOCATION}/{RECEIPTS}/state")


@pytest.mark.parametrize("name", NAMES)
def test_F9_a_directory_that_another_host_made_is_waited_for(disk: SimDisk, name: str):
    """Catches: a save that fails where a mkdir says that a directory is there, and a look says not."""
    other = SimStorage(disk, "other")
    write_rank(other, job(FakePart("state", "actor", 1, content(1)), rank=1, world_size=2))
    storage = OtherHost(disk, {name}, 4.0)
    storage.write_job(job(FakePart("state", "actor", 0, content()), world_size=2))
    assert receipt(other, rank=0).files
    assert 4 <= storage.clock.now - 1000 < 5


@pytest.mark.parametrize("name", NAMES)
def test_F9_a_directory_that_never_shows_fails_the_writer_in_time(disk: SimDisk, name: str):
    """Catches: a writer that waits without end, or one that writes a receipt all the same."""
    other = SimStorage(disk, "other")
    write_rank(other, job(FakePart("state", "actor", 1, content(1)), rank=1, world_size=2))
    storage = OtherHost(disk, {name}, 1e6)
    with pytest.raises(OSError):
        storage.write_job(job(FakePart("state", "actor", 0, content()), world_size=2))
    assert 5 <= storage.clock.now - 1000 < 6
    with pytest.raises(FileNotFoundError):
        receipt(other, rank=0)


def test_F9_a_trainer_that_writes_by_path_waits_for_the_directory(disk: SimDisk):
    """Catches: a ``FileTree`` of another host, whose function is called before there is a directory."""
    storage, tree = OtherHost(disk, {LOCATION}, 4.0), PartSpec("files", "tree", "files")
    with at_path(storage, LOCATION, [tree], Visibility(storage.clock, 5.0)):
        assert 4 <= storage.clock.now - 1000 < 5
    storage = OtherHost(disk, {LOCATION}, 4.0)
    with at_path(storage, LOCATION, [PartSpec("state")], Visibility(storage.clock, 5.0)):
        assert storage.clock.now == 1000, "its writer waits"


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
def test_F5_F6_an_error_at_any_call_leaves_no_receipt(code: str):
    """Catches: a receipt for a shard after a failed write, fsync or close."""

    def fresh(index: int) -> FaultStorage:
        disk = SimDisk()
        make_dirs(SimStorage(disk, "setup"), LOCATION)
        return FaultStorage(SimStorage(disk, "w"), before=fail_at(index, getattr(errno, code)))

    counted = fresh(-1)
    write_rank(counted, job())
    total = len(counted.calls)
    put = next(i for i, c in enumerate(counted.calls) if c[0] == "rename")
    for index in range(total):
        storage = fresh(index)
        with pytest.raises(OSError) as caught:
            write_rank(storage, job())
        assert caught.value.errno == getattr(errno, code)
        if index <= put:  # later ones leave a receipt that is whole
            with pytest.raises(FileNotFoundError):
                receipt(storage.inner)
        failed = storage.calls[index]
        if failed[0] == "fsync":
            assert storage.calls.count(failed) == 1, "F6: fsynced again after it had failed"


def test_F7_short_writes(disk: SimDisk):
    """Catches: a shard cut off where the disk took fewer bytes than it was given."""
    disk.short_writes = 3
    storage = SimStorage(disk, "writer")
    write_rank(storage, job())
    assert storage.read(f"{LOCATION}/__0_0.distcp", 1 << 20) == content()


def test_a_shard_file_has_the_methods_torch_save_wants(disk: SimDisk):
    """Catches: a position that is wrong for memoryviews of other item sizes."""
    storage = SimStorage(disk, "writer")
    shard = ShardFile(storage, f"{LOCATION}/x")
    assert shard.write(b"abc") == 3
    assert shard.write(memoryview(b"12345678").cast("I")) == 8
    shard.flush()
    assert shard.tell() == 11
    entry = shard.close_durably("x")
    assert (entry.name, entry.bytes) == ("x", 11)
    assert storage.read(f"{LOCATION}/x", 100) == b"abc12345678"


def test_a_large_shard_has_the_digest_of_its_content(root: Path):
    """Catches: a digest, taken beside the fsync, of only a part of the file."""
    storage = PosixStorage(root)
    shard = ShardFile(storage, f"{LOCATION}/large")
    shard.write(os.urandom(3 << 20))
    entry = shard.close_durably("large")
    assert entry.bytes == 3 << 20 and entry.digest == storage.digest(f"{LOCATION}/large")


# --------------------------------------------------------------------------- what is believed


def test_a_good_writer_reports_its_shards_at_each_call(root: Path):
    """I5. Catches: a report with another rank's numbers, or one that an interrupt loses: the caller
    remembers the reports that it took."""
    writer = fork(root, job(rank=1, world_size=2))
    expected = [ShardReported(OF, "state", 1, 2, len(content(1)))]
    assert events(writer) == expected
    assert ends(writer) == expected and writer.kill(WAIT_S) is True
    assert receipt(PosixStorage(root), rank=1).world_size == 2


def test_payloads_come_back(root: Path):
    """Catches: a foreign finalizer without the results of its writer."""

    @dataclass
    class Foreign(PartJob):
        name: str = "state"
        directory: str = ""

        def write(self, storage, location):
            return Written((), payload={"bucket": 7})

    writer = fork(root, job(Foreign()))
    assert [type(e) for e in events(writer)] == [ShardReported]
    assert writer.payloads == {"state": {"bucket": 7}}


def killed(part: str, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(part: str, rank: int) -> None:
    os._exit(0)


def out_of_space(part: str, rank: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard")


@pytest.mark.parametrize(
    ("before", "reason", "told"),
    [
        (killed, "writer_died", "killed by SIGKILL"),
        (leaves, "writer_died", "exit code 0 without a complete result"),
        (out_of_space, "writer_failed", "No space left on device"),
    ],
)
def test_F1_F5_a_writer_that_failed(root: Path, before, reason: str, told: str):
    """I10. Catches: anything but exit 0 with a payload and receipts taken for success."""
    writer = fork(root, job(FakeShard("state", "", 3, {"w": 1}, before), rank=3, world_size=4))
    (event,) = events(writer)
    assert isinstance(event, Failed)
    assert (event.of, event.reason) == (OF, reason)
    assert event.detail.startswith("rank 3: ") and told in event.detail
    assert ends(writer) == [event]


@pytest.mark.parametrize("what", ["receipt", "directory"])
def test_exit_code_and_payload_without_a_receipt_is_a_failure(root: Path, what: str):
    """Catches: a writer that is believed on its word, though its files are not there."""
    writer = fork(root, job())
    assert writer.wait(SystemClock(), WAIT_S)
    if what == "receipt":
        (root / LOCATION / receipt_name("state", 0)).unlink()
    else:
        (root / LOCATION).rename(root / "moved_away")
    (event,) = ends(writer)
    assert isinstance(event, Failed) and event.reason == "receipt_missing"
    assert receipt_name("state", 0) in event.detail


def test_a_receipt_without_an_exit_is_not_enough(root: Path, tmp_path: Path):
    """Catches: a shard counted while its writer still writes the next part."""
    gate = FifoGate(tmp_path / "gate")
    parts = (FakePart("a", "", 0, content()), FakeShard("b", "b", 0, {"w": 1}, gate.hold))
    writer = fork(root, job(*parts))
    assert ends(writer) == []
    gate.open()
    assert [e.part for e in events(writer)] == ["a", "b"]


def test_I10_a_writer_that_misses_its_deadline(root: Path, tmp_path: Path):
    """Catches: a hang without end; a writer that goes on after it was given up."""
    gate = FifoGate(tmp_path / "gate")
    writer = fork(root, job(FakeShard("state", "", 0, {"w": 1}, gate.hold)), deadline=100.0)
    assert ends(writer, 99.9) == []
    (event,) = ends(writer, 100.0)
    assert isinstance(event, Failed)
    assert event.reason == "writer_hung"
    place = f"rank 0: its writer missed its deadline at {writer.process.pid} "
    assert event.detail.startswith(place)
    assert writer.kill(WAIT_S) is True
    assert writer.process.poll().exitcode == -signal.SIGKILL
    assert ends(writer, 101.0) == [event], "one verdict"


def test_a_killed_writer_reports_nothing_any_more(root: Path, tmp_path: Path):
    """Catches: a second verdict on an attempt that has failed already."""
    gate = FifoGate(tmp_path / "gate")
    writer = fork(root, job(FakeShard("state", "", 0, {"w": 1}, gate.hold)))
    assert writer.wait(SystemClock(), 0.01) is False
    assert writer.kill(WAIT_S) is True
    assert ends(writer, FAR * 2) == []


def test_no_receipt_comes_before_the_word(root: Path):
    """Catches: a receipt of the first part, while the memory of the second is still read."""
    storage, seen = PosixStorage(root), []

    def look() -> None:
        seen.append([(root / LOCATION / receipt_name(name, 0)).exists() for name in "ab"])

    write_rank(
        storage,
        job(*(FakePart(name, name, 0, content()) for name in "ab")),
        await_confirmation=look,
    )
    look()
    assert seen == [[False, False], [True, True]]
    storage.close_root()
