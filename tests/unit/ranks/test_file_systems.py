"""Roots on file systems that lack an ability: refused at opening, and closed without a wait."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes import fake_ports
from managers import QUICK, weights

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import ConfigError, SaveFailedWarning
from ckptfsm.core.layout import EPOCHS, STAGING, TRASH
from ckptfsm.core.ports import Storage
from ckptfsm.disk.trash import require_rename
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.simfs import ProcessDead

CONFIG = make_config(QUICK)
LACKS = {
    "hard links": ("link", errno.EPERM),
    "fsync of directories": ("fsync_dir", errno.EINVAL),
    "rename of directories": ("rename", errno.ENOSYS),
}


class WithoutLocks(PosixStorage):
    def try_lock(self, path: str) -> int | None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), path)


class Lacking:
    """A file system that refuses ``method``; ``rename`` only for directories."""

    def __init__(self, root: Path, method: str, code: int) -> None:
        self.root, self.method, self.code = root, method, code

    def __call__(self, create: bool) -> Storage:
        return FaultStorage(PosixStorage(self.root, create=create), before=self.before)

    def before(self, index: int, method: str, path: str) -> None:
        source = self.root / path.partition(" -> ")[0]
        if method == self.method and (method != "rename" or source.is_dir()):
            raise OSError(self.code, os.strerror(self.code), path)


@pytest.mark.parametrize("ability", [*LACKS, "record locks"])
def test_a_missing_ability_is_named_at_opening(ability: str, tmp_path: Path) -> None:
    """Catches: a lack that is called a sick disk, or that only the first save finds."""
    root = tmp_path / "root"
    lacking = Lacking(root, *LACKS[ability]) if ability in LACKS else lambda _: WithoutLocks(root)
    with pytest.raises(ConfigError, match=f"has no {ability}") as caught:
        Manager(fake_ports(lacking), CONFIG)
    assert caught.value.reason == "file_system"
    assert caught.value.file_system in Path("/proc/self/mountinfo").read_text()
    assert not list((root / TRASH).iterdir())
    assert not list((root / EPOCHS).glob("take-*"))
    Manager(fake_ports(root), CONFIG).close()  # nothing is left that could stop another start


@pytest.mark.parametrize("number", [0, 1, 2])
def test_F2_a_kill_in_the_trial_leaves_nothing(number: int, tmp_path: Path) -> None:
    """Catches: a stray directory of a killed start, which every later start reports."""
    Manager(fake_ports(tmp_path), CONFIG).close()
    with pytest.raises(ProcessDead):
        require_rename(FaultStorage(PosixStorage(tmp_path), before=crash_at(number)), "1-2-dead")
    manager = Manager(fake_ports(tmp_path), CONFIG)
    assert not manager.recovery.decisions and not manager.recovery.warnings
    manager.close()
    assert not list((tmp_path / TRASH).iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(0, errno.EEXIST), (1, errno.ENOENT), (2, errno.ENOENT)]
)
def test_F8_a_request_of_the_trial_that_nfs_repeats_is_no_error(number, code, tmp_path: Path):
    """Catches: a start that is refused because an answer was lost, and the repeat found it done."""
    Manager(fake_ports(tmp_path), CONFIG).close()
    storage = FaultStorage(PosixStorage(tmp_path), after=fail_at(number, code))
    require_rename(storage, "1-2-repeated")
    assert not list((tmp_path / TRASH).iterdir())


class NeverPublishes(Lacking):
    """The attempts of saves can be neither published nor moved to the trash."""

    def before(self, index: int, method: str, path: str) -> None:
        if path.startswith(f"{STAGING}/"):
            super().before(index, method, path)


def test_close_does_not_wait_for_a_clean_up_that_is_refused(tmp_path: Path) -> None:
    """Catches: a job that hangs in ``close`` for half an hour, though the next start cleans up."""
    root = tmp_path / "root"
    settings = {**QUICK, "on_failure": "warn", "close_timeout_s": 5.0}
    ports = fake_ports(NeverPublishes(root, "rename", errno.EPERM))
    manager = Manager(ports, make_config(settings))
    with pytest.warns(SaveFailedWarning):
        manager.save(1, weights(1))
        manager.close()
    assert len(list((root / STAGING).iterdir())) == 1
    Manager(fake_ports(root), CONFIG).close()
    assert not list((root / STAGING).iterdir())
