"""The facts that the kernel tells of a process, by the pid that a record on disk names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ckptfsm.adapters.identity import is_stopped


def test_a_stopped_process_is_told_from_one_that_waits_and_one_that_is_gone():
    """Catches: an owner that is called busy, while it does nothing until somebody continues it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # returns once it is stopped
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid)
