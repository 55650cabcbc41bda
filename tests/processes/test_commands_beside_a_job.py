"""Commands beside a job that saves, in another process: no save is disturbed, and each is answered."""

from __future__ import annotations

import os
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
import sys
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
    with subprocess.Popen(
        command, env={**os.environ, **path}, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "first\n"
        for arguments in cycle(COMMANDS):
            if trainer.poll() is not None:
                break
            status, _, err = ran(capsys, *arguments, "-r", tmp_path)
            if "no owner lives" in err:  # the job ended during the command
                break
            refused = status == 3 and arguments[0] == "explain"  # a start would be: the job lives
            assert status == 0 or refused or "no answer" in err or "not_found" in err, (
                arguments,
                err,
            )
            statuses.setdefault(arguments[0], set()).add(0 if refused else status)
        assert trainer.stdout.read() == "True\n"
    assert trainer.returncode == 0
    assert [name for name, found in statuses.items() if 0 not in found] == []
    assert len(statuses) == 8
    storage = PosixStorage(tmp_path, create=False)
    assert check_root(storage, SAVES) == SAVES
    failed = [life.attempt for life in read_lives(storage) if life.reason]
    storage.close_root()
    assert failed == []
