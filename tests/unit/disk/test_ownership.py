"""Who owns a root: the lock that dies with its process, and the epoch that fences zombies."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import CkptFsmError, Fenced, NewerSchema, RootBusy, RootLost
from ckptfsm.core.layout import (
    DIRECTORIES,
    EPOCHS,
    JOURNAL,
    LOCK,
    PINS,
    epoch_name,
    segment_name,
)
from ckptfsm.core.ports import Identity
from ckptfsm.disk.journal import newest_segment
from ckptfsm.disk.ownership import (
    RootOwnership,
    is_elsewhere,
    is_owned_here,
    newest_epoch,
    open_root,
    read_holder,
)
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage

WAIT_S = 20.0


def who(name: str) -> Identity:
    return Identity("sim", sum(name.encode()), f"boot:{name}", name)


def take(disk: SimDisk, name: str, **settings):
    return open_root(SimStorage(disk, name), who(name), **settings)


def test_this_process_is_told_from_an_earlier_one_with_its_pid():
    """Catches: a restarted job that takes itself for the dead one, or shares its temporary names."""
    first, second = this_process(), this_process()
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
    assert first.started == second.started and first.nonce != second.nonce
    child = fork_child(this_process, keep=()).wait(WAIT_S).payload
    assert child.pid != first.pid and child.nonce != first.nonce


def test_I9_epochs_only_grow(tmp_path: Path):
    """Catches: an epoch used twice, so that a zombie looks like the owner."""
    disk = SimDisk()
    for epoch in (1, 2, 3):
        ownership = take(disk, f"run{epoch}")
        assert ownership.epoch == epoch == newest_epoch(SimStorage(disk, "look"))
        ownership.check()
        ownership.release()
        disk.kill(f"run{epoch}")


def test_I9_an_epoch_is_above_every_journal_segment():
    """Catches: a segment of an older run overwritten because the lease directory was lost."""
    assert take(SimDisk(), "first", above=41).epoch == 42


def test_F5_a_file_of_an_earlier_try_of_this_process_is_in_no_way():
    """Catches: an opening that is tried again, and stops at its temporary file."""
    disk = SimDisk()
    take(disk, "before").release()
    disk.plant_file(f"{EPOCHS}/take-{who('again').pid}-again-2", b"half")
    assert take(disk, "again", takeover=True).epoch == 2


def test_F12_a_living_owner_is_named():
    """F32. Catches: two owners; a refusal that does not say whom to stop."""
    disk = SimDisk()
    first = take(disk, "first")
    with pytest.raises(RootBusy) as caught:
        take(disk, "second")
    assert (caught.value.host, caught.value.pid) == ("sim", who("first").pid)
    first.check()
    assert newest_epoch(SimStorage(disk, "look")) == 1


def test_F12_the_same_process_is_refused_too(tmp_path: Path):
    """Catches: two managers of one process: a record lock does not tell them apart."""
    me = this_process()
    ownership = open_root(PosixStorage(tmp_path), me)
    with pytest.raises(RootBusy) as caught:
        open_root(PosixStorage(tmp_path), this_process())
    assert caught.value.pid == os.getpid()
    ownership.check()
    ownership.release()
    again = open_root(PosixStorage(tmp_path), this_process())
    assert again.epoch == 2
    again.release()


class NoLocks(SimStorage):
    """A file system that grants every lock, as some network mounts do."""

    def try_lock(self, path: str) -> int | None:
        return 1

    def unlock(self, handle: int) -> None:
        """Nothing is held."""


def test_F12_the_same_process_is_refused_where_locks_tell_nothing():
    """Catches: two managers of one process on a mount without working locks."""
    disk = SimDisk()
    ownership = open_root(NoLocks(disk, "one"), who("one"))
    with pytest.raises(RootBusy):
        open_root(NoLocks(disk, "one"), who("one")._replace(nonce="another"))
    ownership.release()
    assert open_root(NoLocks(disk, "one"), who("one")).epoch == 2


def test_release_then_open():
    """Catches: a root that stays busy after it was given back."""
    disk = SimDisk()
    take(disk, "first").release()
    holder = read_holder(SimStorage(disk, "look"), 1)
    assert holder.released and holder.nonce == "first"
    assert take(disk, "second").epoch == 2
    assert read_holder(SimStorage(disk, "look"), 1) is None, "older epochs are forgotten"


def test_release_twice_is_harmless():
    """Catches: a second release that gives away the lock of another owner."""
    disk = SimDisk()
    first = take(disk, "first")
    first.release()
    second = take(disk, "second")
    first.release()
    first.release_lock_only()
    second.check()
    with pytest.raises(RootBusy):
        take(disk, "third")


def test_a_dead_owner_holds_nothing():
    """F29. Catches: a restart that must wait, or be forced, after a crash."""
    disk = SimDisk()
    take(disk, "first")
    disk.kill("first")
    assert take(disk, "second").epoch == 2


def test_a_dropped_lock_is_as_death():
    """Catches: a lease that keeps the root although its lock is gone."""
    disk = SimDisk()
    first = take(disk, "first")
    first.release_lock_only()
    second = take(disk, "second")
    with pytest.raises(Fenced):
        first.check()
    second.check()


def test_I9_a_takeover_fences_the_first():
    """F12. Catches: a zombie that still passes its check."""
    disk = SimDisk()
    first = take(disk, "first")
    second = take(disk, "second", takeover=True)
    with pytest.raises(Fenced) as caught:
        first.check()
    assert (caught.value.epoch, caught.value.newer_epoch) == (1, 2)
    second.check()
    first.release()
    second.check()
    assert not read_holder(SimStorage(disk, "look"), 2).released, "the zombie released our epoch"


def begun(disk: SimDisk, name: str, **settings) -> RootOwnership:
    """An owner whose journal has begun: every owner begins one before its first effect."""
    storage = SimStorage(disk, name)
    ownership = open_root(storage, who(name), above=newest_segment(storage), **settings)
    disk.plant_file(f"{JOURNAL}/{segment_name(ownership.epoch)}", b"x\n")
    return ownership


def purge(disk: SimDisk, *paths: str) -> None:
    for path in paths:
        SimStorage(disk, "purge").unlink(path)


def test_a_purged_epoch_file_is_made_anew():
    """Catches: a job of months that stops, because a purge by age took a file of its first day."""
    disk = SimDisk()
    first = begun(disk, "first")
    purge(disk, f"{EPOCHS}/{epoch_name(1)}")
    SimStorage(disk, "purge").rmdir(EPOCHS)
    first.check()
    assert SimStorage(disk, "look").listdir(EPOCHS) == [epoch_name(1)]
    assert read_holder(SimStorage(disk, "look"), 1).nonce == "first"
    with pytest.raises(RootBusy):
        begun(disk, "second")


def test_I9_an_epoch_that_was_given_out_twice_stays_its_last_owners():
    """Catches: a job whose files were deleted, and that overwrites those of a successor."""
    disk = SimDisk()
    first = begun(disk, "first")
    files = SimStorage(disk, "purge")
    for name in (f"{JOURNAL}/{segment_name(1)}", f"{EPOCHS}/{epoch_name(1)}", LOCK):
        files.unlink(name)
    second = begun(disk, "second")
    assert (first.epoch, second.epoch) == (1, 1)
    for look in (first.check, first.keep_young):
        with pytest.raises(Fenced, match="after its files were deleted"):
            look()
    second.check()
    first.release()
    holder = read_holder(files, 1)
    assert (holder.nonce, holder.released) == ("second", False)


def test_I9_a_torn_epoch_file_stops_nobody_and_one_of_a_later_version_does():
    """Catches: an owner that stops as its disk lost bytes, or goes on beside a later version."""
    disk = SimDisk()
    first = begun(disk, "first")
    purge(disk, f"{EPOCHS}/{epoch_name(1)}")
    disk.plant_file(f"{EPOCHS}/{epoch_name(1)}", b"torn")
    first.check()
    purge(disk, f"{EPOCHS}/{epoch_name(1)}")
    disk.plant_file(f"{EPOCHS}/{epoch_name(1)}", b'{"schema_version": 999}')
    with pytest.raises(Fenced):
        first.check()


class OldListing(SimStorage):
    """A network mount that shows the names of a moment ago; a file that is opened is looked for."""

    listed: list[str] | None = None

    def listdir(self, path: str) -> list[str]:
        if path == EPOCHS and self.listed is not None:
            names, self.listed = self.listed, None
            return names
        return super().listdir(path)


def test_I9_an_old_listing_hides_no_successor():
    """Catches: a zombie that goes on for as long as its host shows an old listing."""
    disk = SimDisk()
    storage = OldListing(disk, "first")
    first = open_root(storage, who("first"))
    disk.plant_file(f"{JOURNAL}/{segment_name(1)}", b"x\n")
    storage.listed = storage.listdir(EPOCHS)
    begun(disk, "second", takeover=True)
    with pytest.raises(Fenced) as caught:
        first.check()
    assert caught.value.newer_epoch == 2


def test_I9_a_purged_epoch_file_does_not_weaken_the_fence():
    """Catches: a zombie that makes its epoch anew, and goes on beside its successor."""
    disk = SimDisk()
    first = begun(disk, "first")
    second = begun(disk, "second", takeover=True)
    purge(disk, f"{EPOCHS}/{epoch_name(2)}")
    with pytest.raises(Fenced) as caught:
        first.check()
    assert caught.value.newer_epoch == 2 and not isinstance(caught.value, RootLost)
    with pytest.raises(RootLost, match="another process has the lock"):
        second.check()  # not certain: the lock is the first one's
    disk.kill("first")
    second.check()
    assert newest_epoch(SimStorage(disk, "look")) == 2


def test_I9_a_successor_at_any_call_of_a_renewal_fences():
    """Catches: a takeover between the look and the new file, which the renewal does not see."""
    calls = 0
    while True:
        disk = SimDisk()
        begun(disk, "first")
        disk.kill("first")
        raced = []

        def before(index: int, method: str, path: str) -> None:
            if index == at and not raced:
                raced.append(begun(disk, "successor", takeover=True))

        at = -1
        storage = FaultStorage(SimStorage(disk, "zombie"), before=before)
        zombie = open_root(storage, who("zombie"), above=1)
        disk.plant_file(f"{JOURNAL}/{segment_name(2)}", b"x\n")
        purge(disk, f"{EPOCHS}/{epoch_name(2)}")
        at = len(storage.calls) + calls
        fenced = False
        try:
            zombie.check()
        except Fenced:
            fenced = True
        assert fenced == bool(raced), "at once, and by nobody else"
        if not raced:
            break
        raced[0].check()
        calls += 1
    assert calls > 5


def test_F5_a_crash_at_any_call_of_a_renewal_leaves_a_root_that_opens():
    """Catches: an epoch that is given out twice, or a root that is busy for ever."""
    calls = 0
    while True:
        disk = SimDisk()
        storage = FaultStorage(SimStorage(disk, "first"))
        first = open_root(storage, who("first"))
        disk.plant_file(f"{JOURNAL}/{segment_name(1)}", b"x\n")
        purge(disk, f"{EPOCHS}/{epoch_name(1)}")
        storage.before = crash_at(len(storage.calls) + calls)
        try:
            first.check()
        except ProcessDead:
            disk.kill("first")
        else:
            break
        assert begun(disk, "second").epoch == 2
        calls += 1
    assert calls > 5


@pytest.mark.parametrize("gone", ["journal", "all"])
def test_I9_files_without_which_nothing_is_certain_stop_their_owner(gone):
    """Catches: an owner that goes on, or speaks of a newer manager, as its files were deleted."""
    disk = SimDisk()
    first = begun(disk, "first")
    storage = SimStorage(disk, "vandal")
    purge(disk, f"{EPOCHS}/{epoch_name(1)}", f"{JOURNAL}/{segment_name(1)}")
    if gone == "all":
        purge(disk, LOCK)
        for directory in reversed(DIRECTORIES):
            storage.rmdir(directory)
    with pytest.raises(RootLost, match="was deleted under its job") as caught:
        first.check()
    assert caught.value.file.endswith("000001.ndjson" if gone == "journal" else ".ckptfsm")
    if gone == "all":
        begun(disk, "anew")
        begun(disk, "next", takeover=True)
        with pytest.raises(Fenced):
            first.check()


def test_a_deleted_lock_file_is_locked_anew():
    """Catches: a second owner, as the lock of the first one is on a file without a name."""
    disk = SimDisk()
    first = begun(disk, "first")
    purge(disk, LOCK)
    first.keep_young()
    with pytest.raises(RootBusy):
        begun(disk, "second")


def test_old_files_are_kept_young(tmp_path: Path):
    """Catches: a purge by age that takes the pin of a checkpoint, or a file of the journal."""
    storage = PosixStorage(tmp_path)
    ownership = open_root(storage, this_process())
    paths = [f"{JOURNAL}/{segment_name(n)}" for n in (1, 2)] + [f"{PINS}/7.json"]
    for path in paths:
        (tmp_path / path).write_text("x")
    paths += [LOCK, f"{EPOCHS}/{epoch_name(1)}"]
    for path in paths:
        os.utime(tmp_path / path, (1, 1), follow_symlinks=False)
    ownership.keep_young()
    assert [path for path in paths if (tmp_path / path).stat().st_mtime < 1e9] == []
    assert asked_elsewhere(tmp_path)[0] == "busy", "the lock was lost"
    (tmp_path / f"{JOURNAL}/{segment_name(2)}").unlink()
    (tmp_path / f"{JOURNAL}/{segment_name(1)}").unlink()
    with pytest.raises(RootLost):
        ownership.keep_young()
    ownership.release()


def test_F12_two_that_race_for_one_epoch():
    """Catches: two owners of one epoch: only ``link`` decides."""
    disk = SimDisk()
    other = SimStorage(disk, "other")
    raced = []

    def before(index: int, method: str, path: str) -> None:
        if method == "link" and not raced:
            raced.append(open_root(other, who("other"), takeover=True))

    storage = FaultStorage(SimStorage(disk, "first"), before=before)
    ownership = open_root(storage, who("first"), takeover=True)
    assert (raced[0].epoch, ownership.epoch) == (1, 2)
    ownership.check()
    with pytest.raises(Fenced):
        raced[0].check()
    assert [n for n in other.listdir(EPOCHS) if n.startswith("take-")] == []


class TakenOverOnceTaken:
    """Another owner takes the root over as soon as the first one has made its epoch."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.successor: RootOwnership | None = None

    def __call__(self, index: int, method: str, path: str) -> None:
        if method == "link":
            self.successor = take(self.disk, "successor", takeover=True)


def test_I9_a_paused_taker_leaves_its_successors_epoch():
    """F13. Catches: a root with no owner, or with two, as the epoch of a living owner is removed."""
    disk = SimDisk()
    rival = TakenOverOnceTaken(disk)
    first = open_root(FaultStorage(SimStorage(disk, "first"), after=rival), who("first"))
    assert (first.epoch, rival.successor.epoch) == (1, 2)
    rival.successor.check()
    with pytest.raises(Fenced):
        first.check()
    assert newest_epoch(SimStorage(disk, "look")) == 2


def test_an_error_while_taking_gives_the_lock_back():
    """Catches: a root that is busy because opening it failed."""
    disk = SimDisk()

    def before(index: int, method: str, path: str) -> None:
        if method == "link":
            raise OSError(28, "ENOSPC", path)

    with pytest.raises(OSError):
        open_root(FaultStorage(SimStorage(disk, "first"), before=before), who("first"))
    assert take(disk, "second").epoch == 1


@pytest.mark.parametrize("loss", ["all_lost", "all_kept"])
def test_F4_an_epoch_is_durable_once_taken(loss):
    """Catches: an epoch that a power loss takes back, so that it is given out twice."""
    disk = SimDisk()
    take(disk, "first")
    disk.crash(loss)
    assert take(disk, "second").epoch == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\0" * 100])
def test_F30_a_damaged_holder_does_not_lock_the_root(content: bytes):
    """Catches: a torn file of a dead process that no restart, not even a takeover, gets past."""
    disk = SimDisk()
    take(disk, "first").release()
    disk.kill("first")
    path = f"{EPOCHS}/{epoch_name(1)}"
    SimStorage(disk, "vandal").unlink(path)
    disk.plant_file(path, content)
    assert take(disk, "second").epoch == 2


@pytest.mark.parametrize("content", [b'{"schema_version":2}'])
def test_F34_a_newer_holder_is_a_clear_error(content: bytes):
    """Catches: a holder of a newer version overwritten."""
    disk = SimDisk()
    take(disk, "first").release()
    disk.kill("first")
    path = f"{EPOCHS}/{epoch_name(1)}"
    SimStorage(disk, "vandal").unlink(path)
    disk.plant_file(path, content)
    with pytest.raises(NewerSchema) as caught:
        take(disk, "second")
    assert caught.value.file == path
    assert disk.snapshot()[path] == content
    disk.kill("second")
    with pytest.raises(CkptFsmError):
        take(disk, "third")


def test_a_process_of_another_container_is_not_this_one():
    """Catches: containers of one pod with one host name, where each one has a process 1."""
    disk = SimDisk()
    one = Identity("pod", 1, "boot:1", "one", "4026532001")
    take_as = [one, one._replace(nonce="two", namespace="4026532002"), one._replace(namespace="")]
    open_root(NoLocks(disk, "one"), one)
    holder = read_holder(SimStorage(disk, "look"), 1)
    assert [is_elsewhere(holder, each) for each in take_as] == [False, True, False]
    storage = SimStorage(disk, "look")
    assert [is_owned_here(storage, each) for each in take_as] == [True, False, True]


def test_tags_are_unique():
    """Catches: two processes that share a temporary name."""
    disk = SimDisk()
    first, second = take(disk, "first"), take(disk, "second", takeover=True)
    assert first.tag != second.tag and "/" not in first.tag


# ---------------------------------------------------------------------------- real processes


def try_open(root: Path) -> tuple[str, int]:
    try:
        ownership = open_root(PosixStorage(root), this_process())
    except RootBusy as error:
        return "busy", error.pid
    return "open", ownership.epoch


def asked_elsewhere(root: Path) -> tuple[str, int]:
    """The findings of another process."""
    return fork_child(lambda: try_open(root), keep=()).wait(WAIT_S).payload


def owner(root: Path, gate: FifoGate) -> Child:
    """A process that owns the root until the gate opens."""
    read_end, write_end = os.pipe()

    def job() -> None:
        ownership = open_root(PosixStorage(root), this_process())
        os.write(write_end, b".")
        gate.hold()
        ownership.release()

    child = fork_child(job, keep=(write_end,))
    os.close(write_end)
    assert os.read(read_end, 1) == b".", "the owner did not get the root"
    os.close(read_end)
    return child


def test_F12_another_process_is_refused(tmp_path: Path):
    """Catches: a lock that only works within one process."""
    gate = FifoGate(tmp_path / "gate")
    child = owner(tmp_path / "root", gate)
    assert asked_elsewhere(tmp_path / "root") == ("busy", child.pid)
    gate.open()
    assert child.wait(WAIT_S).succeeded
    assert asked_elsewhere(tmp_path / "root") == ("open", 2)


def test_F29_a_forked_child_holds_nothing(tmp_path: Path):
    """Catches: a writer that keeps its dead trainer's root busy."""
    root, gate = tmp_path / "root", FifoGate(tmp_path / "gate")
    storage = PosixStorage(root)
    ownership = open_root(storage, this_process())
    writer = fork_child(gate.hold, keep=storage.descriptors())
    assert asked_elsewhere(root) == ("busy", os.getpid())
    ownership.release_lock_only()  # as our death would; the writer lives on
    assert writer.poll() is None
    found, _ = asked_elsewhere(root)
    assert found == "open"
    gate.open()
    assert writer.wait(WAIT_S).succeeded


def test_F29_a_child_that_closes_everything_does_not_drop_its_parents_lock(tmp_path: Path):
    """Catches: a record lock lost because a forked child closed its copy of the file."""
    root = tmp_path / "root"
    ownership = open_root(PosixStorage(root), this_process())
    assert fork_child(lambda: None, keep=()).wait(WAIT_S).succeeded
    assert asked_elsewhere(root) == ("busy", os.getpid())
    ownership.release()


def test_F5_an_opening_that_failed_can_be_tried_again_by_the_same_process():
    """Catches: a lock or an epoch left behind by an error after the epoch was taken."""
    me = Identity("sim", 7, "boot:7", "nonce")
    counted = FaultStorage(SimStorage(SimDisk(), "count"))
    open_root(counted, me)
    assert len(counted.calls) > 10
    for index in range(len(counted.calls)):
        disk = SimDisk()
        faulty = FaultStorage(SimStorage(disk, "me"), before=fail_at(index, errno.ENOSPC))
        with pytest.raises(OSError):
            open_root(faulty, me)
        again = open_root(SimStorage(disk, "me"), me._replace(nonce="again"))
        again.check()


def test_F2_a_process_tells_its_start_by_itself(monkeypatch):
    """Catches: a ``/proc`` of another pid namespace, where our number is a stranger's: after each
    restart the same name, and so a root that is busy for ever."""
    own = this_process().started
    monkeypatch.setattr(os, "getpid", os.getppid)
    assert this_process().started == own
