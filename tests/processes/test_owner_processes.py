"""Owners of a root as real processes: one that read its lock file, and one that was never reaped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from managers import QUICK

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    RootBusy,
)
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import fake_ports

COPIES = """
import shutil, sys, time
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import fake_ports
manager = Manager(fake_ports(sys.argv[1]), make_config({}))
manager.save(1, parts={"x": b"data"}).wait()
shutil.copytree(sys.argv[1], sys.argv[1] + ".backup")
print("copied", flush=True)
sys.stdin.read(1)
"""


@contextmanager
def owner_that_copied(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer on the root, which has made a copy of it beside it. The trainer is killed at the
    end."""
    command = [sys.executable, "-c", COPIES, str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "copied\n"
        yield owner
        owner.kill()


def test_F32_a_root_whose_owner_copied_it_is_busy(tmp_path: Path):
    """Found by attack. Catches: a trainer that reads the file of its lock, to copy the root, and has
    lost the lock by that: a stray start fences it."""
    root = tmp_path / "root"
    with owner_that_copied(root) as owner:
        with pytest.raises(RootBusy) as busy:
            Manager(fake_ports(root), make_config(QUICK))
        assert busy.value.pid == owner.pid
        backup = Manager(fake_ports(f"{root}.backup"), make_config(QUICK))
        assert backup.latest_step() == 1, "the copy names the same owner, who does not have it"
        backup.close()
        taker = Manager(fake_ports(root), make_config({**QUICK, "takeover": True}))
        assert taker.latest_step() == 1
        taker.close()


def test_F2_an_owner_that_was_killed_and_not_reaped_is_dead(tmp_path: Path):
    """Catches: a restart that waits for a zombie, whose parent (a launcher, a container) never reaps."""
    root = tmp_path / "root"
    with owner_that_copied(root) as owner:
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        manager = Manager(fake_ports(root), make_config(QUICK))
        assert manager.latest_step() == 1
        manager.close()
