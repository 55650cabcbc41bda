"""Restores: errors of one rank, of the disk and of a lease, and the conclusions."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from managers import QUICK, TEMPLATE, weights

from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    RecoveryWarning,
    RestoreFailed,
)
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from ckptfsm.testing.faults import FaultStorage


def test_F31_a_rank_that_cannot_verify_fails_the_restore_on_every_rank(tmp_path: Path):
    """Found by attack. Catches: an error raised between two exchanges of a restore, by a rank that
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
    """Found by attack. Catches: a part's directory that became a link (a person saved space) taken
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
    """Found by attack. Catches: a restore that has loaded everything, and raises because its lease
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
