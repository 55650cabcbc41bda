"""Commands beside a job that saves, in another process: no save is disturbed, and each is answered."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from itertools import cycle
from pathlib import Path

from cli_runs import ran

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli import examining
from ckptfsm.testing.harness import check_root
from ckptfsm.views.reading import read_lives

TESTS = Path(__file__).resolve().parents[1]
SAVES = 200
TRAINER = """
import select, sys
from pathlib import Path
from ckptfsm.core.retention import LatestN, Steps
from real_roots import real_job

job = real_job(Path(sys.argv[1]), retention=LatestN(3) | Steps({1}))
job.save(1)
print("first", flush=True)
for step in range(2, int(sys.argv[2]) + 1):
    of = job.request(step)
    job.fork(of)
    job.coordinator.tick()
    for rank in range(job.ranks):
        job.write(of, rank)
    job.coordinator.tick()
print(job.acknowledged == list(range(1, int(sys.argv[2]) + 1)), flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    job.coordinator.tick()  # a command that meets the end is answered in another way
job.close()
"""
COMMANDS = (
    ("ls",),
    ("pin", "1"),
    ("doctor",),
    ("explain", "--resume"),
    ("prune", "--apply"),
    ("log", "--step", "1"),
    ("unpin", "1"),
    ("tree",),
)


def test_a_job_that_saves_is_not_disturbed_by_commands(tmp_path, capsys, monkeypatch):
    """Catches: a command that takes the lock, a request that stops a save, a move taken for damage."""
    monkeypatch.setattr(examining, "_SECOND_LOOK_S", 0.05)
    command = [sys.executable, "-c", TRAINER, str(tmp_path), str(SAVES)]
    statuses: dict[str, set[int]] = {}
    path = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **path}, text=True, **pipes) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "first\n"
        for arguments in cycle(COMMANDS):
            if select.select([trainer.stdout], [], [], 0)[0]:
                break
            status, out, err = ran(capsys, *arguments, "-r", tmp_path)
            refused = status == 3 and arguments[0] == "explain"  # a start would be: the job lives
            late = "no answer" in err or "not_found" in err
            assert status == 0 or refused or late, (arguments, out, err)
            statuses.setdefault(arguments[0], set()).add(0 if refused else status)
        assert trainer.communicate("close\n")[0] == "True\n"
    assert trainer.returncode == 0
    assert [name for name, found in statuses.items() if 0 not in found] == []
    assert len(statuses) == 8
    storage = PosixStorage(tmp_path, create=False)
    assert check_root(storage, SAVES) == SAVES
    failed = [life.attempt for life in read_lives(storage) if life.reason]
    storage.close_root()
    assert failed == []
