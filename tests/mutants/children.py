"""Forks lanes, which work side by side, and a child for each piece of their work.

A child has a session, and a directory for temporary files, of its own. No process of it is left when
its answer is given: a lane is the parent of every orphan below it. If a lane's parent dies, so does
the lane, and so does a child with its lane.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_T = TypeVar("_T")


def in_lanes(work: Callable[[_T], Any], tasks: Sequence[_T], lanes: int) -> list[Any]:
    """The results of ``work``, as JSON returns them; each lane takes task after task."""
    pids: list[int] = []
    results: list[Any] = []
    next_task, write_end = os.pipe()
    os.write(write_end, b"".join(b"%06d" % number for number in range(len(tasks))))
    os.close(write_end)
    with ExitStack() as files:
        outs = [files.enter_context(tempfile.TemporaryFile()) for _ in tasks[:lanes]]
        for out in outs:
            pids.append(os.fork())
            if pids[-1] == 0:
                die_with_parent()
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
                numbers = iter(partial(os.read, next_task, 6), b"")
                out.write(json.dumps([work(tasks[int(number)]) for number in numbers]).encode())
                out.flush()
                os._exit(0)
        for pid, out in zip(pids, outs, strict=True):
            if os.waitpid(pid, 0)[1] != 0:
                raise RuntimeError("a lane has died")
            out.seek(0)
            results += json.loads(out.read())
    os.close(next_task)
    return results


def in_child(work: Callable[[], str], limit_s: float) -> tuple[str, bool]:
    """What ``work`` returns, "" if it ended in another way; and whether it ended within the limit."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as out:
        os.chmod(place, 0o755)  # a test may let another user in
        pid = os.fork()
        if pid == 0:
            _leave(place)
            out.write(work().encode())
            out.flush()
            os._exit(0)  # a mutant may have left threads behind that never end
        ended = _wait(pid, limit_s)
        _end_descendants()
        out.seek(0)
        written = out.read().decode()
    return written, ended


def cpu_s() -> float:
    """The processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def die_with_parent() -> None:
    """This process is killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(place: str) -> None:
    """A child's session, its directory for temporary files, no input and no output."""
    os.setsid()
    die_with_parent()
    os.environ["TMPDIR"] = tempfile.tempdir = place
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def _wait(pid: int, limit_s: float) -> bool:
    """Whether the child ends within the limit."""
    descriptor = os.pidfd_open(pid)
    ready = select.select([descriptor], [], [], None if math.isinf(limit_s) else limit_s)[0]
    os.close(descriptor)
    return bool(ready)


def _end_descendants() -> None:
    """Kill every child; its own children become ours then, whatever session they are in."""
    while True:
        for pid in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
