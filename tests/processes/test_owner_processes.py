"""Owners of a root as real processes: one that read its lock file, and one that was never reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import environment, fake_ports
from managers import QUICK

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import RootBusy
from ckptfsm.core.layout import TRASH
from ckptfsm.ranks.manager import Manager

COPIES = """
import shutil, sys, time
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from fakes import fake_ports
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
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "copied\n"
        yield owner
        owner.kill()


def test_F32_a_root_whose_owner_copied_it_is_busy(tmp_path: Path):
    """Catches: a trainer that reads the file of its lock, to copy the root, and has
    lost the lock by that: a stray start fences it."""
    root = tmp_path / "root"
    with owner_that_copied(root) as owner:
        hasty = {**QUICK, "effect_timeout_s": 1.0}  # half of it is waited for a short command
        with pytest.raises(RootBusy) as busy:
            Manager(fake_ports(root), make_config(hasty))
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


LATE = """
import os, signal, sys, time
from pathlib import Path
from ckptfsm.adapters import spawn, tied
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from fakes import fake_ports
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings
from ckptfsm.writers.write_job import WriteJob
root, stopped_at = sys.argv[1:]
first, _, rest = spawn._START.partition("; from")
slow = "from ckptfsm.adapters import spawn; spawn._end_with = lambda fd: None"
spawn._START = first + "; " + slow + "; from" + rest  # it does not see that its trainer is dead
tied._PR_SET_PDEATHSIG = 0  # so the kernel does not kill the process with us
engine = WriteEngine(WriteEngineSettings())
engine.start()
confirm = WriteJob.confirm
def die(job):
    while stopped_at == "written" and not list(Path(root).glob(".ckptfsm/staging/*/x")):
        time.sleep(0.01)
    os.kill(job._process.pid, signal.SIGSTOP)
    confirm(job)
    if os.fork() == 0:  # a data loader, which keeps the socket
        time.sleep(60)
    print(job._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
WriteJob.confirm = die
quickly = {"visibility_timeout_s": 0.5}  # its directory is gone when it looks
manager = Manager(fake_ports(root, launch=engine), make_config(quickly))
manager.save(1, parts={"x": b"of the dead"})
"""


def content_of(root: Path) -> dict[str, bytes]:
    """The files of a root, without the trash."""
    files = (path for path in root.rglob("*") if path.is_file())
    names = {str(path.relative_to(root)): path for path in files}
    return {name: p.read_bytes() for name, p in names.items() if not name.startswith(TRASH)}


@pytest.mark.parametrize("stopped_at", ["order", "written"])
def test_F13_a_stopped_writer_that_wakes_up_later_writes_nothing(tmp_path: Path, stopped_at: str):
    """Catches: a writer of a dead trainer that goes on in the root of the next owner. The writer does
    not see that its trainer is dead, and has the word for its receipt."""
    root = tmp_path / "root"
    command = [sys.executable, "-c", LATE, str(root), stopped_at]
    pipe, variables = subprocess.PIPE, environment()
    with subprocess.Popen(command, env=variables, stdout=pipe, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        watched = os.pidfd_open(int(trainer.stdout.readline()))
        try:
            assert trainer.wait(20.0) == -signal.SIGKILL
            manager = Manager(fake_ports(root), make_config(QUICK))
            manager.save(1, parts={"x": b"of the next owner"}).wait()
            before = content_of(root)
            signal.pidfd_send_signal(watched, signal.SIGCONT)
            ended, _, _ = select.select([watched], [], [], 20.0)
            assert ended, "its job did not fail"
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)  # the loader
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)
    assert content_of(root) == before
    assert before["iter_0000001/x"] == b"of the next owner"
    manager.close()
