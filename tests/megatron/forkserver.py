"""A process that imported torch and megatron-core once and forks clean job ranks on request.

Importing both takes four seconds; forking a process that has them takes milliseconds. Rules: the
server never creates a thread, a process group or a socket, so that a rank is as clean as a fresh
interpreter. Every rank gets a new session, so that everything it ever forked can be found. A rank
dies with the server, and the server with the test run (its stdin ends).

Run as a script: commands are JSON lines on stdin, replies JSON lines on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import everything a rank needs, say so, and serve until stdin ends."""
    import torch

    # Half of the import of megatron-core, and a quarter of the memory that each fork maps, is the
    # compiler, which it asks for some fused functions. No checkpoint depends on it.
    torch.compile = as_it_is
    import jobs  # noqa: F401  imports torch, megatron-core and ckptfsm

    gc.freeze()  # or a collection in a rank looks at all of torch, and copies its pages
    _reply({"ready": os.getpid()})
    ranks: dict[int, int] = {}  # pidfd -> pid
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fd != 0:
                selector.unregister(key.fd)
                _, status = os.waitpid(ranks.pop(key.fd), 0)
                os.close(key.fd)
                _reply({"exited": key.data, "code": os.waitstatus_to_exitcode(status)})
                continue
            data = os.read(0, 1 << 16)
            if not data:
                for pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "kill" in command:
                    alive = command["kill"] in ranks.values()  # not reaped: the pid is still its
                    if alive:
                        os.kill(command["kill"], command["signal"])
                    _reply({"signalled": alive})
                else:
                    pid = _fork(command, [selector.fileno(), *ranks])
                    pidfd = os.pidfd_open(pid)
                    ranks[pidfd] = pid
                    selector.register(pidfd, selectors.EVENT_READ, pid)
                    _reply({"forked": pid})


def as_it_is(function: Any = None, **_: Any) -> Any:
    """Stands for ``torch.compile``, also as a decorator with settings."""
    return as_it_is if function is None else function


def _reply(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _fork(command: Mapping[str, Any], inherited: list[int]) -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "a rank would inherit a broken lock"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for fd in inherited:
            os.close(fd)
        code = _run(command)
    finally:
        os._exit(code)


def _run(command: Mapping[str, Any]) -> int:
    """The whole life of a rank: its function's result goes to a file, its output to a log."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a test that waited too long asks
    os.environ.update(command["env"])
    import jobs

    code = 0
    result: Any = None
    module, _, name = command["function"].rpartition(".")  # of another module: "module.function"
    try:
        function = getattr(import_module(module or "jobs"), name)
        result = function(jobs.Here(**command["here"]), **command["args"])
    except BaseException:
        traceback.print_exc()
        code = 1
    with open(command["result"] + ".part", "w") as sink:
        json.dump(result, sink)
    os.rename(command["result"] + ".part", command["result"])
    jobs.leave()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
