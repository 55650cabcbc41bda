"""Power loss below a real file system: the meaning of a crash state, and that the layer can fail.

The tests that mount something run where root, FUSE and loop devices are, and are skipped elsewhere.
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proof import powerloss
from proof.layer import Budget, LayerResult
from proof.powerloss import Plan, explore, replay, run, unavailable
from proof.powerloss_disk import BLOCK, Image, RecordingDisk, enter_private_mounts, make_image
from proof.powerloss_states import Builder, CrashState, Recording, drawn_states, prefix_states

from ckptfsm.adapters.posix_storage import PosixStorage

SECTOR = 512
A, B, C = (bytes([letter]) * 1024 for letter in b"abc")
FLUSH = None


def recording(*records: object) -> Recording:
    return Recording("test", "ext4", SECTOR, Image(4 * BLOCK), list(records))


def content(recorded: Recording, state: CrashState, length: int = 2048) -> bytes:
    fd = os.memfd_create("test")
    try:
        Builder(recorded).build(state).dump(fd)
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------- images


def test_an_image_takes_writes_across_its_blocks_and_reads_back():
    """Catches: a write cut at a block's end, or a hole that is not zero."""
    fd = os.memfd_create("test")
    image = Image(4 * BLOCK)
    image.write(BLOCK - 2, b"xyz" * BLOCK)
    image.dump(fd)
    data = os.pread(fd, 4 * BLOCK, 0)
    assert (
        data == bytes(BLOCK - 2) + b"xyz" * BLOCK + bytes(2)[: 4 * BLOCK - (BLOCK - 2) - 3 * BLOCK]
    )
    again = Image.load(fd)
    os.pwrite(fd, b"junk", 0)
    again.dump(fd)
    assert os.pread(fd, 4 * BLOCK, 0) == data
    os.close(fd)


def test_a_copy_of_an_image_does_not_change_with_it():
    """Catches: states that leak into each other."""
    image = Image(4 * BLOCK)
    copy = image.copy()
    image.write(0, A)
    assert copy._blocks == {}


# ----------------------------------------------------------------------------------------- the states


def test_flushed_writes_are_never_lost():
    """F4. Catches: a disk more hostile than disks are, which would blame the library."""
    recorded = recording((0, A), FLUSH, (1024, B), FLUSH, (0, C), (1024, C), FLUSH)
    states = drawn_states(recorded, random.Random(1), 1000)
    assert states
    for state in states:
        assert all(FLUSH not in recorded.records[index : state.end] for index, _ in state.lost)
    after = CrashState(4)
    assert content(recorded, after) == A + B


def test_every_subset_of_the_last_window_is_drawn():
    """Catches: a reordering that is never tried."""
    recorded = recording((0, A), FLUSH, (0, B), (1024, C), FLUSH)
    found = {content(recorded, s) for s in drawn_states(recorded, random.Random(1), 1000)}
    assert {A + bytes(1024), A + C, B + bytes(1024)} <= found
    torn = B[:SECTOR] + A[SECTOR:]
    assert torn + C in found
    assert content(recorded, CrashState(5)) == B + C


def test_the_later_of_two_writes_to_one_place_wins_where_it_was_kept():
    """Catches: a state that no disk can be in, or one that every disk can."""
    recorded = recording((0, A), (0, B))
    contents = {content(recorded, s, 1024) for s in drawn_states(recorded, random.Random(2), 100)}
    assert {A, B, bytes(1024), A[:SECTOR] + B[SECTOR:]} <= contents
    assert content(recorded, CrashState(2), 1024) == B


def test_prefixes_stop_after_every_write():
    """Catches: a crash point that is left out."""
    recorded = recording((0, A), FLUSH, (0, B), (1024, C), FLUSH)
    states = prefix_states(recorded)
    assert states == [CrashState(0), CrashState(1), CrashState(3), CrashState(4)]
    assert [content(recorded, s) for s in states] == [
        bytes(2048),
        A + bytes(1024),
        B + bytes(1024),
        B + C,
    ]


def test_states_may_be_built_in_any_order():
    """Catches: a builder that goes on from a later state."""
    recorded = recording((0, A), FLUSH, (0, B), FLUSH, (0, C), FLUSH)
    builder = Builder(recorded)
    for end, expected in ((6, C), (2, A), (4, B), (0, bytes(1024))):
        assert builder.build(CrashState(end))._blocks.get(0, bytes(BLOCK))[:1024] == expected


def test_the_promise_at_a_state_is_the_last_acknowledgement_before_it():
    """Catches: a promise judged too early (false alarm) or too late (a loss not seen)."""
    recorded = recording(*[(0, A)] * 9)
    recorded.promises = [(0, None), (3, 1), (6, 3), (8, 1)]  # the last one: a rollback
    promised = [recorded.promised(CrashState(end)) for end in (0, 2, 3, 5, 6, 7, 8)]
    assert promised == [None, None, 1, 1, 3, 3, 1]


# -------------------------------------------------------------------------------------- where it runs


def test_the_gate_is_told_that_it_was_not_run():
    """Catches: a layer that looks green because it did nothing."""
    result = run(Budget("pr"))
    assert "make proof" in result.skipped
    assert result.explored == {}


def test_without_root_or_fuse_the_reason_is_shown(monkeypatch):
    """Catches: a skip without a word, or an error where a skip is right."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in explore(Plan(1)).skipped
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/dev/fuse")
    assert "/dev/fuse" in explore(Plan(1)).skipped


def test_a_release_that_judged_too_few_states_is_red(monkeypatch):
    """Catches: a release that passes though the kernel refused most states, or few were drawn."""
    result = LayerResult("powerloss", {"states": 1300, "states on ext4": 800, "states on xfs": 300})
    result.explored["states on ext4-writeback"] = 199
    monkeypatch.setattr(powerloss, "explore", lambda plan: replace(result, violations=[]))
    (found,) = run(Budget("release")).violations
    assert found.what.startswith("999 states were judged below ext4")
    assert not run(Budget("nightly")).violations
    result.explored["states on ext4-writeback"] += 1
    assert not run(Budget("release")).violations
    monkeypatch.setattr(powerloss, "explore", lambda plan: LayerResult("powerloss", skipped="no"))
    assert not run(Budget("release")).violations


def explored(plan: Plan):
    result = explore(plan)
    if result.skipped:
        pytest.skip(result.skipped)
    return result


SMALL = Plan(24, filesystems=("ext4",), scripts=("save_track_prune",))


def test_F4_power_loss_on_ext4_loses_nothing_acknowledged(tmp_path, monkeypatch):
    """F4: catches a missing fsync or ordering that a simulated disk is too kind, or too strict, for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = explored(SMALL)
    assert result.violations == []
    assert result.explored["recordings"] == 2
    assert result.explored["states on ext4"] == result.explored["states"]
    assert result.explored["states"] + result.explored["refused by the kernel"] >= 24
    assert result.coverage.faults
    assert loop_devices(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_fsync_is_found_and_can_be_shown_again(tmp_path, monkeypatch):
    """Catches: a layer that cannot fail."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    careless = replace(SMALL, states=60, without=("fsync:*.distcp",), keep=1)
    found = explored(careless).violations
    assert found
    file = found[0].replay.rpartition(" ")[2]
    again = replay(file, str(tmp_path / "disk.img"))
    assert again.violations
    assert (tmp_path / "disk.img").stat().st_size > 0


DATA = bytes(range(256)) * 19 + b"end"


def direct_file_after_power_losses(work: str) -> dict[str, list[bytes]]:
    """A file that is reserved, written past the cache, cut and fsynced, as crash states show it.

    Runs in a separate process. ``durable``: the states after the fsync, ``earlier``: those before.
    """
    enter_private_mounts(work)
    ext4 = powerloss.FILESYSTEMS["ext4"]
    disk = RecordingDisk(make_image(ext4.make, ext4.size, work), work)
    memory = mmap.mmap(-1, 8192)
    memory.write(DATA)
    with disk.mounted(ext4.kind, ext4.options) as where:
        storage = PosixStorage(where, create=False)
        handle = storage.open_exclusive("f", direct=True)
        assert storage.allocate(handle, 8192)
        storage.fsync_dir("")
        reserved = disk.position()
        assert storage.pwrite(handle, memory, 0) == 8192
        assert fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
        storage.truncate(handle, len(DATA))
        storage.fsync(handle)
        fsynced = disk.position()
        storage.close(handle)
        storage.mkdir("later")
        storage.fsync_dir("")
        storage.close_root()
    recorded = Recording("direct", "ext4", ext4.sector, disk._image, disk.records())
    seen: dict[str, list[bytes]] = {"earlier": [], "durable": []}
    states = {*prefix_states(recorded), *drawn_states(recorded, random.Random(1), 60)}
    for state in sorted(each for each in states if each.end >= reserved):
        with powerloss._state_mounted(recorded, state, work) as where:
            if where is not None:
                content = Path(where, "f").read_bytes()
                seen["durable" if state.end >= fsynced else "earlier"].append(content)
    return seen


def in_child(work: Callable[[], object]) -> Any:
    """The result of ``work`` in a forked child, or the error that it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer: object = work()
        except BaseException as error:
            answer = error
        try:
            os.write(writer, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pickle.load(pipe)
    os.waitpid(pid, 0)
    if isinstance(found, BaseException):
        raise found
    return found


def test_F4_a_direct_file_is_durable_after_its_fsync_and_its_size_proves_nothing(tmp_path):
    """Catches: a recorded disk that direct writes do not reach, and a writer that trusts a size."""
    if unavailable():
        pytest.skip(unavailable())
    seen = in_child(lambda: direct_file_after_power_losses(str(tmp_path)))
    assert len(seen["durable"]) >= 2 and set(seen["durable"]) == {DATA}
    assert bytes(8192) in seen["earlier"]
    assert loop_devices(tmp_path) == []


def loop_devices(work: Path) -> list[str]:
    """The files of this machine's loop devices for a run below ``work``."""
    files = [Path(file) for file in glob.glob("/sys/block/loop*/loop/backing_file")]
    found = []
    for file in files:
        try:
            found.append(file.read_text())
        except OSError:
            pass  # it is gone by now
    return [file for file in found if str(work) in file]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_killed(number, tmp_path):
    """Catches: loop devices, mounts or workers that outlive a Ctrl-C or a kill."""
    if unavailable():
        pytest.skip(unavailable())
    reader, writer = os.pipe()  # it ends with the last of its processes
    process = subprocess.Popen(
        [sys.executable, "-m", "proof.powerloss", "--states", "9000", "--filesystems", "ext4"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stdout=writer,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(writer)
    deadline = time.monotonic() + 60.0
    while process.poll() is None and not loop_devices(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.005)  # bounded by the deadline: a disk is about to be mounted
    process.send_signal(number)
    process.wait(30.0)
    with os.fdopen(reader) as ours:
        said = ours.read()
    if "skipped" in said:
        pytest.skip(said)
    while loop_devices(tmp_path):  # the kernel takes the last mount away after the process
        assert time.monotonic() < deadline
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
