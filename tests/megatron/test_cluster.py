"""The harness itself: numbers of processes come again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import PATIENCE_S, ForkServer, Job

# Two ranks of the same number: the first is killed, the second ends well.
TWICE = """
import sys
print('{"ready": 1}', flush=True)
for code in (-9, 0):
    sys.stdin.readline()
    print('{"forked": 7}', flush=True)
    print('{"exited": 7, "code": %d}' % code, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def twice(tmp_path: Path):
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    server = ForkServer(script)
    yield server
    server.close()


def test_the_exit_code_of_a_rank_is_not_an_earlier_ones(twice: ForkServer) -> None:
    """Catches: a rank that is taken for killed, as one with its number was, thousands of ranks ago."""
    codes = []
    for _ in range(2):
        codes.append(twice.wait(twice.fork({}), PATIENCE_S))
    assert codes == [-signal.SIGKILL, 0]


def test_a_job_that_is_over_ends_no_process_with_its_number(
    twice: ForkServer, tmp_path: Path
) -> None:
    """Catches: the process of another job killed with the remains of a job that ended long ago."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    job = Job(twice, tmp_path, 0, [twice.fork({})])
    job.wait()
    job.pids = [stranger.pid]
    assert os.getsid(stranger.pid) == stranger.pid and job.living() == []
    job.end()
    assert stranger.stdin is not None
    stranger.stdin.close()
    assert stranger.wait(PATIENCE_S) == 0
