"""A place to strike: a storage call of a real process on a real disk, and its fault.

A job runs in a forked child. At the call it is told to, it kills itself, fails the call, or lets
only a part of a write through; its acknowledgements until then come through a pipe.

Rules: nothing here knows what the calls mean. Changing calls are those that a ``FaultStorage``
counts. Reads are ``stat``, ``listdir``, ``read``, ``digest``, ``free_bytes`` and ``try_lock``;
giving back, ``unlock`` and ``close_root``, never fails. Calls are counted for each role by itself,
in shared memory: a writer is forked by its trainer and goes on counting where the last writer
stopped. A child that takes too long is killed by an alarm, and that is a finding.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import mmap
import os
import signal
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.events import Event
from ckptfsm.core.layout import JOURNAL
from ckptfsm.core.lifecycle import Checkpoint, State, find_row
from ckptfsm.core.ports import FileStat
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.one_by_one import OneByOne
from proof.coverage import Coverage

Role = Literal["trainer", "writer"]
ROLES: tuple[Role, ...] = ("trainer", "writer")
Tell = Callable[..., None]

ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE")
CUTS = ("torn", "short", "nothing")  # half a write and death; half a write; a write that takes 0
KILLS = ("kill", "torn")
READ_ERRNOS = ("EIO", "ESTALE")
LOCK_ERRNOS = (*READ_ERRNOS, "ENOSPC", "EDQUOT")  # to take a lock may make its file
LIMIT_S = 60
_STATES = (None, *State)  # a byte of shared memory is an index of these
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """``index``: of the role's changing calls, or of its ``reads``.

    ``recovery``: the life is killed at ``index``, and the rest is the fault of this call of its
    recovery.
    """

    script: str
    index: int = -1
    kind: str = ""
    after: bool = False
    role: Role = "trainer"
    recovery: int = -1
    reads: bool = False

    @property
    def at(self) -> int:
        """The index of the call that is to be hit."""
        return self.recovery if self.recovery >= 0 else self.index

    def life(self) -> Site:
        """The fault of the life: before a recovery it is killed."""
        return Site(self.script, self.index, "kill") if self.recovery >= 0 else self

    def replay(self) -> str:
        words = [f"--script {self.script} --kind {self.kind} --site {self.index}"]
        words += ["--after"] if self.after else []
        words += ["--role writer"] if self.role == "writer" else []
        words += [f"--recovery {self.recovery}"] if self.recovery >= 0 else []
        words += ["--reads"] if self.reads else []
        return f"PYTHONPATH=tests python -m proof.processes {' '.join(words)}"


class Disk(OneByOne, PosixStorage):
    """The real disk. A write can be cut; ``synced=False`` leaves out the calls that only power loss
    shows.

    ``reading`` is called with method and path before each read, and may raise.
    ``tells`` are descriptors that forked writers keep; ``lost`` is a file whose fsync failed in an
    earlier life, and ``lost_again`` whether it was opened to be fsynced once more.
    """

    def __init__(
        self, root: str, *, synced: bool, tells: tuple[int, ...] = (), lost: str | None = None
    ) -> None:
        super().__init__(root, create=False)
        self.lost = lost
        self.lost_again = False
        self.cut: Callable[[Callable[[memoryview], int], memoryview], int] | None = None
        self.reading: Callable[[str, str], None] | None = None
        self._tells, self._synced = tells, synced

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return self._maybe_cut(lambda view: super(Disk, self).write(handle, view), data)

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        return self._maybe_cut(lambda view: super(Disk, self).pwrite(handle, view, offset), data)

    def open_existing(self, path: str) -> int:
        self.lost_again = self.lost_again or path == self.lost
        return super().open_existing(path)

    def fsync(self, handle: int) -> None:
        if self._synced:
            super().fsync(handle)

    def fsync_dir(self, path: str) -> None:
        if self._synced:
            super().fsync_dir(path)
        else:
            super().stat(path)

    def stat(self, path: str) -> FileStat:
        self._maybe_fail("stat", path)
        return super().stat(path)

    def listdir(self, path: str) -> list[str]:
        self._maybe_fail("listdir", path)
        return super().listdir(path)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        self._maybe_fail("read", path)
        return super().read(path, limit, offset)

    def digest(self, path: str) -> str:
        self._maybe_fail("digest", path)
        return super().digest(path)

    def free_bytes(self) -> int:
        self._maybe_fail("free_bytes", "")
        return super().free_bytes()

    def try_lock(self, path: str) -> int | None:
        self._maybe_fail("try_lock", path)
        return super().try_lock(path)

    def descriptors(self) -> tuple[int, ...]:
        return (*super().descriptors(), *self._tells)

    def _maybe_fail(self, method: str, path: str) -> None:
        if self.reading is not None:
            self.reading(method, path)

    def _maybe_cut(self, call: Callable[[memoryview], int], data: bytes | memoryview) -> int:
        cut, self.cut = self.cut, None
        view = memoryview(data).cast("B")
        return call(view) if cut is None else cut(call, view)


class Noting(Coverage):
    """Coverage that also knows in which state the last checkpoint was, before and after its move.

    The states are in shared memory, because a forked writer must see where its trainer is by now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared = mmap.mmap(-1, 2)

    def move(self, checkpoint: Checkpoint, event: Event) -> None:
        super().move(checkpoint, event)
        row = find_row(checkpoint, event) if event.of == checkpoint.id else None
        if row is not None:
            self._shared[:] = bytes((_STATES.index(row.source), _STATES.index(row.dest)))

    def state_at(self, path: str) -> State | None:
        """A move is only made once the journal has it."""
        before, now = self._shared[:]
        return _STATES[before if path.startswith(JOURNAL) else now]


class Counts:
    """How many of the calls each role has made, over forks."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)
        self._trainer = os.getpid()

    def role(self) -> Role:
        return "trainer" if os.getpid() == self._trainer else "writer"

    def next(self) -> int:
        """The index of this role's call."""
        offset = 0 if self.role() == "trainer" else 4
        count = struct.unpack_from("=I", self._shared, offset)[0]
        struct.pack_into("=I", self._shared, offset, count + 1)
        return int(count)

    def both(self) -> dict[str, int]:
        trainer, writer = struct.unpack_from("=II", self._shared)
        return {"trainer": trainer, "writer": writer}


@dataclass
class Strike:
    """The hooks of a ``FaultStorage`` that strike at one site; without one they tell every call."""

    site: Site
    make_disk: Callable[[], Disk]
    tell: Tell
    noting: Noting
    counts: Counts = field(default_factory=Counts)
    disk: Disk = field(init=False)
    failed_fsync: int | None = None  # which of the storage's calls
    lost: str | None = None  # and of which file
    _index: int = -1

    def storage(self) -> FaultStorage:
        """A new one each time: a manager closes what it was given."""
        self.disk = self.make_disk()
        if self.site.reads:
            self.disk.reading = partial(self.before, -1)
            return FaultStorage(self.disk)
        return FaultStorage(self.disk, before=self.before, after=self.after)

    def before(self, at: int, method: str, path: str) -> None:
        self._index = self.counts.next()
        if self.site.index < 0:
            self.tell(role=self.counts.role(), call=[method, path])
        elif not self.site.after:
            self._maybe_strike(at, method, path)

    def after(self, at: int, method: str, path: str) -> None:
        if self.site.index < 0:
            self.tell(role=self.counts.role(), succeeded=self._index)
        elif self.site.after:
            self._maybe_strike(at, method, path)

    def _maybe_strike(self, at: int, method: str, path: str) -> None:
        site = self.site
        if self._index != site.index or self.counts.role() != site.role:
            return
        if site.kind in CUTS and method not in ("write", "pwrite"):
            return
        state = self.noting.state_at(path)
        self.tell(struck=[method, path], state=state.value if state is not None else None)
        if site.kind == "kill":
            die()
        elif site.kind in CUTS:
            self.disk.cut = {"torn": _torn, "short": _short, "nothing": _nothing}[site.kind]
        else:
            if method == "fsync":
                self.failed_fsync, self.lost = at, path
            code = getattr(errno, site.kind)
            raise OSError(code, os.strerror(code), path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _torn(call: Callable[[memoryview], int], view: memoryview) -> int:
    call(view[: len(view) // 2])
    die()
    return 0


def _short(call: Callable[[memoryview], int], view: memoryview) -> int:
    return call(view[: (len(view) + 1) // 2])


def _nothing(call: Callable[[memoryview], int], view: memoryview) -> int:
    return 0


# --------------------------------------------------------------------------------------- children


def _nobody() -> dict[str, list[Any]]:
    return {role: [] for role in ROLES}


@dataclass
class Ended:
    """The words of a child, and its exit code (negative: a signal).

    ``calls`` of each role and which of them ``succeeded`` by themselves are told by an unstruck life.
    """

    code: int
    acknowledged: int | None = None
    struck: tuple[str, str] | None = None
    state: State | None = None
    calls: dict[str, list[tuple[str, str]]] = field(default_factory=_nobody)
    succeeded: dict[str, list[int]] = field(default_factory=_nobody)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def run_child(work: Callable[[int, Tell], None]) -> Ended:
    """Run ``work(descriptor, tell)`` in a forked child; wait for it and for all it leaves behind."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _live(work, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    _reap_orphans()
    ended = Ended(os.waitstatus_to_exitcode(status))
    for line in lines:
        told = json.loads(line)
        if "call" in told:
            ended.calls[told["role"]].append((told["call"][0], told["call"][1]))
        elif "succeeded" in told:
            ended.succeeded[told["role"]].append(told["succeeded"])
        elif "acknowledged" in told:
            ended.acknowledged = told["acknowledged"]
        elif "struck" in told:
            ended.struck = (told["struck"][0], told["struck"][1])
            ended.state = State(told["state"]) if told["state"] is not None else None
        else:
            ended.told.update(told)
    return ended


def _live(work: Callable[[int, Tell], None], pipe: int) -> None:
    """The child's whole life. Does not return."""
    signal.alarm(LIMIT_S)

    def tell(**facts: Any) -> None:
        os.write(pipe, json.dumps(facts).encode() + b"\n")

    try:
        work(pipe, tell)
    except BaseException:  # whatever it is, the parent must learn of it
        tell(crashed=traceback.format_exc()[-3000:])
    finally:
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of the orphans of a killed child, to wait for their end. Fork cheaply."""
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of everything
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_orphans() -> None:
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
