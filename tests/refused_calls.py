"""Saves under a seccomp profile: ``python -m refused_calls ROOT ERRNO``. All refused calls only help."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import sys
import time
from pathlib import Path

from ckptfsm.adapters.host import processors
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.events import Event, Failed, ShardReported
from ckptfsm.core.images import Memory, image_of
from ckptfsm.core.layout import staging_dir
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import RankJob
from ckptfsm.writers.image import ImagePart
from ckptfsm.writers.rank_writer import RankWriter
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings

SIZE = 3 << 20
WAIT_S = 60.0
NUMBERS = {  # setpriority, madvise, fallocate, ioprio_set, sched_getaffinity
    "x86_64": (141, 28, 285, 251, 204),
    "aarch64": (140, 233, 47, 30, 123),
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Step(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def refuse(numbers: tuple[int, ...], code: int) -> None:
    """Let these system calls fail with ``code``: of this process, and of all that it starts."""
    steps = [_Step(_LOAD, 0, 0, 0)]
    for number in numbers:
        steps += [_Step(_JUMP_IF_EQUAL, 0, 1, number), _Step(_RETURN, 0, 0, _ERRNO | code)]
    steps.append(_Step(_RETURN, 0, 0, _ALLOW))
    program = _Program(len(steps), (_Step * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel takes no filter")


def save(engine: WriteEngine, storage: PosixStorage, number: int) -> Event:
    """The last report of a save that changes nothing."""
    of = AttemptId(number, 1, number)
    os.makedirs(f"{storage.root}/{staging_dir(of)}")
    state = ctypes.create_string_buffer(b"x" * SIZE, SIZE)
    image = image_of("__0_0.distcp", [Memory(ctypes.addressof(state), SIZE, True)])
    job = RankJob(of, 0, 1, staging_dir(of), (ImagePart("state", "", (image,), (("row", 1),)),))
    writer = RankWriter(storage, job, launch=engine, deadline=1e12)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for report in writer.poll(0.0):
            if isinstance(report, (Failed, ShardReported)):
                return report
        writer.process.wait(0.05)
    raise TimeoutError("the writer does not end")


def main(root: Path, code: int) -> None:
    """Print the last reports of two saves of each engine, and the events of the log."""
    events: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: events.append(record.event)  # type: ignore[attr-defined,method-assign]
    logging.getLogger("ckptfsm").addHandler(handler)
    refuse(NUMBERS[os.uname().machine], code)
    try:
        os.nice(1)
    except OSError as error:
        assert error.errno == code, error
    else:
        raise AssertionError("nothing is refused")
    assert processors() >= 1
    storage, found = PosixStorage(root), []
    for at, mode in enumerate(("eager", "gated")):
        engine = WriteEngine(WriteEngineSettings(mode=mode))
        engine.expect_gate()
        found += [str(save(engine, storage, 2 * at + again)) for again in (1, 2)]
        engine.close()
    print(json.dumps({"reports": found, "events": events}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(errno, sys.argv[2]))
