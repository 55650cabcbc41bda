"""Ranks on several hosts open one root: names that show late, and roots that are not the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from managers import QUICK, TEMPLATE, weights

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import ConfigError, RankFailed
from ckptfsm.core.layout import EPOCHS
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.visibility import Visibility
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.harness import SimClock
from ckptfsm.writers.plain_files import at_path

TIMEOUT_S = 5.0
CONFIG = make_config({**QUICK, "visibility_timeout_s": TIMEOUT_S})


class Elsewhere:
    """``open_storage`` of a host that shows the root, then what is in it, after so many seconds."""

    step_s = 0.0  # until a step's directory is visible

    def __init__(self, root: Path, root_s: float = 0.0, epoch_s: float = 0.0) -> None:
        self.root, self.clock, self.root_s, self.epoch_s = root, SimClock(), root_s, epoch_s
        self.began = self.clock.monotonic()
        self.opened: list[PosixStorage] = []

    def __call__(self, create: bool) -> Storage:
        assert not create
        if self.age() < self.root_s:
            raise ConfigError("the root does not exist", root=str(self.root), reason="missing")
        self.opened.append(_LateNames(self))
        return self.opened[-1]

    def age(self) -> float:
        return self.clock.monotonic() - self.began


class _LateNames(PosixStorage):
    def __init__(self, host: Elsewhere) -> None:
        super().__init__(host.root, create=False)
        self._host = host

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        if path.startswith(EPOCHS) and self._host.age() < self._host.epoch_s:
            raise FileNotFoundError(2, "not visible yet", path)
        return super().read(path, limit, offset)

    def stat(self, path: str) -> FileStat:
        if path.startswith("iter_") and self._host.age() < self._host.step_s:
            raise FileNotFoundError(2, "not visible yet", path)
        return super().stat(path)


def opened_by_two(root: Path, other: Elsewhere) -> list[object]:
    """The results of two ranks that open ``root``; rank 1 is on another host."""

    def work(transport: ThreadTransport) -> str:
        driver = FakeDriver(transport.rank)
        ports = (
            fake_ports(other, driver=driver, transport=transport, clock=other.clock)
            if transport.rank
            else fake_ports(root, driver=driver, transport=transport)
        )
        Manager(ports, CONFIG).close()
        return "closed"

    return run_ranks(2, work)


@pytest.mark.parametrize("late", ["root_s", "epoch_s"])
def test_F9_the_root_that_rank_0_made_is_waited_for(late: str, tmp_path: Path) -> None:
    """Catches: a start that fails because another host shows the new root, or the new epoch, late."""
    other = Elsewhere(tmp_path / "root", **{late: TIMEOUT_S - 1})
    assert opened_by_two(tmp_path / "root", other) == ["closed", "closed"]
    assert TIMEOUT_S - 1 <= other.age() < TIMEOUT_S


class Deleted(PosixStorage):
    """A root that was deleted; some clients say so at every call."""

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    def listdir(self, path: str) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


class KnowsTheDeleted(Elsewhere):
    """A host that has the deleted directory at the root's path for ``root_s`` more."""

    kind: type[PosixStorage] = PosixStorage

    def __call__(self, create: bool) -> Storage:
        if self.age() >= self.root_s:
            return PosixStorage(self.root, create=create)
        self.opened.append(self.kind(self.root.parent / "deleted"))
        return self.opened[-1]


@pytest.mark.parametrize("kind", [PosixStorage, Deleted])
def test_F9_a_root_that_was_made_anew_is_opened_anew(kind, tmp_path: Path) -> None:
    """Catches: a rank that looks for rank 0's epoch in the deleted directory, until its time is up."""
    other = KnowsTheDeleted(tmp_path / "root", root_s=TIMEOUT_S - 1)
    other.kind = kind
    assert opened_by_two(tmp_path / "root", other) == ["closed", "closed"]
    assert other.opened and all(each.fileno_of_root() == -1 for each in other.opened)


def test_F9_a_root_that_stays_deleted_is_named(tmp_path: Path) -> None:
    """Catches: a rank's bare error number, and no word on which directory it is."""
    other = KnowsTheDeleted(tmp_path / "root", root_s=TIMEOUT_S + 1)
    other.kind = Deleted
    first, second = opened_by_two(tmp_path / "root", other)
    assert isinstance(first, RankFailed) and second.reason == "not_shared"
    assert f"finds a directory that was deleted at {tmp_path / 'deleted'}" in str(second)


def alone(root: Path) -> None:
    Manager(fake_ports(root), CONFIG).close()


def missing(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("there", "found"),
    [(missing, "no such directory"), (Path.mkdir, "epoch 0"), (alone, "epoch 1")],
)
def test_ranks_that_do_not_see_the_same_directory_are_refused_at_opening(
    there, found: str, tmp_path: Path
) -> None:
    """Catches: checkpoints on node-local disks, which the first save notices by a missing file."""
    there(tmp_path / "node1")
    other = Elsewhere(tmp_path / "node1")
    first, second = opened_by_two(tmp_path / "node0", other)
    assert isinstance(second, ConfigError)
    assert second.reason == "not_shared"
    assert isinstance(first, RankFailed)
    for error in (first, second):
        told = str(error)
        assert "do not see the same directory" in told
        assert str(tmp_path / "node0") in told
        assert f"{found} at {tmp_path / 'node1'}" in told
    assert all(storage.fileno_of_root() == -1 for storage in other.opened)


def test_F9_a_restore_that_verifies_nothing_waits_for_the_directory(tmp_path: Path) -> None:
    """Catches: a rank that loads before its host shows the step, as it has no file to verify."""
    with Manager(fake_ports(tmp_path), CONFIG) as manager:
        manager.save(1, weights(1)).wait()
    other = Elsewhere(tmp_path)
    other.step_s = TIMEOUT_S - 1

    def work(transport: ThreadTransport) -> int:
        driver = FakeDriver(0)  # both read the shard of the one rank that saved
        place, clock = (other, other.clock) if transport.rank else (tmp_path, None)
        ports = fake_ports(place, driver=driver, transport=transport, clock=clock)
        with Manager(ports, make_config({**QUICK, "verify": "none"})) as manager:
            return manager.restore(TEMPLATE).step

    assert run_ranks(2, work) == [1, 1]
    assert other.age() >= other.step_s


class LateDirectories(PosixStorage):
    """``mkdir`` says that another host made it, and a look says for ``LATE_S`` that it is not there."""

    clock: SimClock
    since: float | None = None

    def mkdir(self, path: str) -> None:
        if path.endswith("/loader"):
            self.since = self.clock.monotonic() if self.since is None else self.since
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        super().mkdir(path)

    def stat(self, path: str) -> FileStat:
        if path.endswith("/loader"):
            if self.since is None or self.clock.monotonic() < self.since + TIMEOUT_S - 1:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            Path(self.root, path).mkdir(exist_ok=True)
        return super().stat(path)


def test_F9_a_trees_directory_that_another_rank_made_is_waited_for(tmp_path: Path) -> None:
    """Catches: a trainer whose ``make`` runs in a directory that its host does not show yet."""
    late = LateDirectories(tmp_path)
    late.clock = SimClock()
    visibility, spec = Visibility(late.clock, TIMEOUT_S), PartSpec("t", "tree", "loader")
    late.mkdir("at")
    with at_path(late, "at", [spec], visibility) as path:
        assert Path(path, "loader").is_dir()
    assert late.since is not None and late.clock.now >= late.since + TIMEOUT_S - 1
    late.close_root()


def test_another_error_of_the_root_is_not_waited_for(tmp_path: Path) -> None:
    """Catches: a wait for what does not mend itself, and its reason replaced by another one."""
    (tmp_path / "file").write_bytes(b"")
    other = Elsewhere(tmp_path / "file")
    first, second = opened_by_two(tmp_path / "root", other)
    assert isinstance(second, ConfigError)
    assert second.reason == "not_a_directory"
    assert "not a directory" in str(first)
    assert other.age() == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "none"),
        ("on_busy", "skip"),
        ("on_failure", 3),
        ("sync", True),
        ("save_interval_steps", 7),
        ("save_interval_s", 60.0),
    ],
)
def test_ranks_with_other_settings_are_refused_at_opening(name, value, tmp_path: Path) -> None:
    """Catches: ranks that wait for each other in different exchanges: a restore that hangs, or a
    training that ends at the second save."""

    def work(transport: ThreadTransport) -> None:
        config = CONFIG.model_copy(update={name: value} if transport.rank else {})
        ports = fake_ports(tmp_path, driver=FakeDriver(transport.rank), transport=transport)
        Manager(ports, config).close()

    first, second = run_ranks(2, work)
    assert isinstance(first, RankFailed) and isinstance(second, ConfigError)
    assert name in str(first) and name in second.key and second.rank == 1
