"""Restores: errors of one rank, of the disk and of a lease, and the conclusions."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from managers import QUICK, TEMPLATE, weights

from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import (
    DamagedRoot,
    RankInterrupted,
    RecoveryWarning,
    RestoreFailed,
)
from ckptfsm.core.ports import Storage
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage


def test_F31_a_rank_that_cannot_verify_fails_the_restore_on_every_rank(tmp_path: Path):
    """Catches: an error raised between two exchanges of a restore, by a rank that
    has no thread left. The others wait for that rank, or take its next exchange for the one they
    are in."""

    def work(transport: ThreadTransport) -> str:
        exhausted: list[bool] = []

        def executor() -> ThreadExecutor:
            if exhausted:
                raise RuntimeError("can't start new thread")
            return ThreadExecutor()

        driver = FakeDriver(transport.rank)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport, executor=executor)
        manager = Manager(ports, make_config(QUICK))
        try:
            manager.save(1, weights(1)).wait()
            if transport.rank == 1:
                exhausted.append(True)
            with pytest.raises(RestoreFailed, match="rank 1: RuntimeError: can't start") as caught:
                manager.restore(TEMPLATE)
            exhausted.clear()
            restored = manager.restore(TEMPLATE)
            manager.close()
        finally:
            manager.abandon()
        return f"{caught.value.step}, then {restored.step}"

    assert run_ranks(2, work) == ["1, then 1", "1, then 1"]


def test_F21_a_link_in_place_of_a_directory_is_damage(tmp_path: Path):
    """Catches: a part's directory that became a link (a person saved space) taken
    for a sick disk: no restart resumes, though an older checkpoint is whole."""
    parts = {"state": {"weights": b"w"}, "actor": {"weights": b"a"}}
    manager = Manager(fake_ports(tmp_path / "root"), make_config(QUICK))
    for step in (1, 2):
        manager.save(step, parts=parts).wait()
    actor = tmp_path / "root/iter_0000002/actor"
    actor.rename(tmp_path / "elsewhere")
    actor.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RecoveryWarning, match="step 2 is damaged"):
        assert manager.restore(parts={"state": TEMPLATE, "actor": TEMPLATE}).step == 1
    assert manager.all_steps() == [1]
    manager.close()


def test_F27_a_lease_that_cannot_be_given_back_does_not_undo_a_restore(tmp_path: Path, caplog):
    """Catches: a restore that has loaded everything, and raises because its lease
    cannot be removed; it also hid why a load failed."""
    sick: list[bool] = []

    def before(index: int, method: str, path: str) -> None:
        if sick and method == "unlink" and "/readers/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    driver = FakeDriver()
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=before)
    manager = Manager(fake_ports(lambda create: storage, driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    sick.append(True)
    assert manager.restore(TEMPLATE).step == 1
    assert "lease_not_removed" in [record.event for record in caplog.records]
    driver.failures["load"] = ValueError("another shape")
    with pytest.raises(RestoreFailed, match="another shape"):
        manager.restore(TEMPLATE)
    sick.clear()
    manager.close()


def test_a_key_is_unused_only_if_no_rank_asks_for_it(tmp_path: Path):
    """Catches: a warning about the layers that other ranks load, or ranks that name different
    keys."""

    def work(transport: ThreadTransport) -> tuple[str, ...]:
        driver = FakeDriver(transport.rank)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport)
        with Manager(ports, make_config(QUICK)) as manager:
            manager.save(1, {"first": b"1", "last": b"2", "moments": b"3"}).wait()
            mine = {"last" if transport.rank else "first": None}
            restored = manager.restore(mine, partial=True)
            assert restored is not None and restored.state.keys() == mine.keys()
        return restored.unused

    assert run_ranks(2, work) == [("moments",)] * 2


# -- files that are read whole ---------------------------------------------------------------------


class Reads:
    """``ports.Reading`` of the files with ``names``. ``run`` asks ``driver.find``."""

    def __init__(self, driver: ReadingDriver, names: Collection[str], location: str) -> None:
        self.driver, self.location = driver, location
        self.files = frozenset(names)
        self.stopped = threading.Event()

    def run(self, alone: Collection[str]) -> str:
        self.driver.runs.append((self.location, sorted(alone)))
        return self.driver.find(self)

    def stop(self) -> None:
        self.stopped.set()

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        self.driver.rests += 1
        return self.driver.load(parts, directories, drop)


class ReadingDriver(FakeDriver):
    """Plans to read the files whose names end with one of ``wanted``. ``find`` has their fault."""

    def __init__(
        self, rank: int, wanted: Sequence[str], find: Callable[[Reads], str] = lambda reads: ""
    ) -> None:
        super().__init__(rank)
        self.wanted, self.find = tuple(wanted), find
        self.runs: list[tuple[str, list[str]]] = []
        self.rests = 0

    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> Any:
        names = [entry.name for entry in files if entry.name.endswith(self.wanted)]
        return Reads(self, names, location) if names else None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_rank_is_told_which_of_its_files_no_other_rank_reads(tmp_path: Path):
    """Catches: replicas that each read the disk, and a rank without a file that leaves the others
    alone in an exchange."""
    wanted = [("0_0.distcp", "1_0.distcp"), ("1_0.distcp",), ()]

    def work(transport: ThreadTransport) -> object:
        driver = ReadingDriver(transport.rank, wanted[transport.rank])
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport)
        manager = Manager(ports, make_config(QUICK))
        manager.save(1, weights(1)).wait()
        assert manager.restore(TEMPLATE).step == 1
        manager.close()
        return driver.runs, driver.rests

    step = "iter_0000001"
    assert run_ranks(3, work) == [
        ([(step, ["__0_0.distcp"])], 1),
        ([(step, [])], 1),
        ([], 0),
    ]


@pytest.mark.parametrize("verify", ["none", "sizes"])
def test_no_file_is_read_whole_where_digests_are_not_compared(tmp_path: Path, verify: str):
    driver = ReadingDriver(0, [".distcp"])
    manager = Manager(
        fake_ports(tmp_path / "root", driver=driver), make_config({**QUICK, "verify": verify})
    )
    manager.save(1, weights(1)).wait()
    assert manager.restore(TEMPLATE).step == 1
    assert (driver.runs, driver.rests) == ([], 0)
    manager.close()


def test_F21_only_a_file_that_is_read_whole_is_verified_later(tmp_path: Path):
    """Catches: a damaged file that no rank looks at, and a file that is digested twice."""

    class Watched(FaultStorage):
        def digest(self, path: str) -> str:
            digested.append(path)
            return super().digest(path)

    digested: list[str] = []
    driver = ReadingDriver(0, ["0_0.distcp"])
    storage = Watched(PosixStorage(tmp_path / "root"))
    manager = Manager(fake_ports(lambda create: storage, driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    digested.clear()
    assert manager.restore(TEMPLATE, step=1).step == 1
    assert driver.runs == [("iter_0000001", ["__0_0.distcp"])]
    assert "iter_0000001/__0_0.distcp" not in digested
    assert {"iter_0000001/metadata.json", "iter_0000001/.metadata"} <= set(digested)
    flip(tmp_path / "root/iter_0000001/metadata.json")
    with pytest.raises(DamagedRoot, match="metadata.json has another content"):
        manager.restore(TEMPLATE, step=1)
    assert len(driver.runs) == 1
    manager.close()


def test_F21_a_fault_that_one_rank_reads_is_a_fault_of_the_checkpoint(tmp_path: Path):
    """Catches: a rank that goes on to load while another raises; a damaged step that stays in use;
    a lease that is kept."""

    def work(transport: ThreadTransport) -> object:
        def find(reads: Reads) -> str:
            return "bad" if (transport.rank, reads.location) == (1, "iter_0000002") else ""

        driver = ReadingDriver(transport.rank, [f"{transport.rank}_0.distcp"], find)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport)
        manager = Manager(ports, make_config(QUICK))
        for step in (1, 2):
            manager.save(step, weights(step)).wait()
        with pytest.raises(DamagedRoot, match="step 2 is damaged: bad"):
            manager.restore(TEMPLATE, step=2)
        assert manager.all_steps() == [1, 2]
        assert manager.restore(TEMPLATE).step == 1
        left = list((tmp_path / "root/.ckptfsm/readers").iterdir())
        steps = manager.all_steps()
        manager.close()
        return steps, driver.rests, left

    assert run_ranks(2, work) == [([1], 1, [])] * 2


def test_F21_a_fault_in_the_only_checkpoint_raises(tmp_path: Path):
    """Catches: a start from zero with tensors of a damaged checkpoint (I8)."""
    driver = ReadingDriver(0, [".distcp"], lambda reads: "bad")
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    with pytest.raises(DamagedRoot, match="bad"):
        manager.restore(TEMPLATE)
    assert (manager.all_steps(), driver.rests) == ([1], 0)
    manager.close()


@pytest.mark.parametrize("fails", ["", "survey", "load"])
def test_a_step_is_proven_once_its_files_were_read(tmp_path: Path, fails: str, monkeypatch):
    """Catches: a checkpoint with files that no rank has read, which lets the older ones go."""
    proven: list[int | None] = []
    release = Coordinator.release

    def note(self: Coordinator, lease: str, verified: int | None = None) -> None:
        proven.append(verified)
        release(self, lease, verified)

    driver = ReadingDriver(0, [".distcp"])
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    monkeypatch.setattr(Coordinator, "release", note)
    if fails:
        driver.failures[fails] = ValueError("another shape")
        with pytest.raises(RestoreFailed, match="another shape"):
            manager.restore(TEMPLATE)
    else:
        manager.restore(TEMPLATE)
    assert proven == [None if fails else 1]
    manager.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_F21_a_sick_disk_is_no_damage(tmp_path: Path, code: int):
    """Catches: a checkpoint that is withdrawn as the disk did not answer."""

    def find(reads: Reads) -> str:
        raise OSError(code, os.strerror(code))

    driver = ReadingDriver(0, [".distcp"], find)
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    with pytest.raises(RestoreFailed if code == errno.EIO else DamagedRoot):
        manager.restore(TEMPLATE, step=1)
    manager.close()


def test_I10_an_interrupt_stops_the_reading_of_every_rank(tmp_path: Path, monkeypatch):
    """Catches: a state that a thread changes on, after the call has raised."""

    def work(transport: ThreadTransport) -> object:
        ended: list[bool] = []

        def find(reads: Reads) -> str:
            began.append(transport.rank)
            ended.append(reads.stopped.wait(5.0))
            return ""

        began: list[int] = []
        driver = ReadingDriver(transport.rank, [f"{transport.rank}_0.distcp"], find)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport)
        manager = Manager(ports, make_config(QUICK))
        manager.save(1, weights(1)).wait()
        interruption = KeyboardInterrupt() if transport.rank == 1 else None
        manager._one_call.hear = lambda: interruption if began else None  # type: ignore[method-assign]
        with pytest.raises((KeyboardInterrupt, RankInterrupted)) as caught:
            manager.restore(TEMPLATE)
        manager.abandon()
        return caught.type.__name__, ended, driver.rests

    assert run_ranks(2, work) == [
        ("RankInterrupted", [True], 0),
        ("KeyboardInterrupt", [True], 0),
    ]


def test_F31_a_rank_that_cannot_begin_stops_the_reading_of_the_others(tmp_path: Path):
    """Catches: a state that a thread changes on, after the restore has failed on every rank."""

    def work(transport: ThreadTransport) -> object:
        ended: list[bool] = []
        threads: list[bool] = []

        def executor() -> ThreadExecutor:
            if transport.rank == 1 and len(threads) == 1:  # the first one verifies
                raise RuntimeError("can't start new thread")
            threads.append(True)
            return ThreadExecutor()

        def find(reads: Reads) -> str:
            ended.append(reads.stopped.wait(5.0))
            return ""

        driver = ReadingDriver(transport.rank, [f"{transport.rank}_0.distcp"], find)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport, executor=executor)
        manager = Manager(ports, make_config(QUICK))
        manager.save(1, weights(1)).wait()
        threads.clear()
        with pytest.raises(RestoreFailed, match="rank 1: RuntimeError: can't start"):
            manager.restore(TEMPLATE)
        found = list(ended)
        manager.abandon()
        return found

    assert run_ranks(2, work) == [[True], []]
