"""The tools of the tests: jobs of several ranks, gates, processes and roots.

Rules: every wait is bounded, and a wait that runs out shows the stacks and the logs of the ranks. A
job's processes are found by session: each rank leads one, and everything it forks stays in it.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roots import read_segments

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.versions import installed, series_of
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.disk.inspection import read_manifest, read_tracker
from ckptfsm.disk.journal import History, read_history

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0  # of any wait; the machine may be busy with other work


class ForkServer:
    """The other end of ``forkserver.py``, or of another ``script`` that is one."""

    def __init__(self, script: Path = HERE / "forkserver.py") -> None:
        places = [str(HERE.parent), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, self._process.stdout
        self._lines = bytearray()
        self._exits: dict[int, int] = {}
        self._ready = False

    def fork(self, command: dict[str, Any]) -> int:
        """The pid of a new rank."""
        if not self._ready:
            self._ready = "ready" in self._read(PATIENCE_S * 3)
        pid = int(self._ask(command)["forked"])
        self._exits.pop(pid, None)  # an earlier rank's of that number
        return pid

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a rank; False if it has ended already."""
        return bool(self._ask({"kill": pid, "signal": number})["signalled"])

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a rank, or None if it still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._exits:
            reply = self._read(max(0.0, deadline - time.monotonic()))
            if not reply:
                return None
            self._note(reply)
        return self._exits[pid]

    def close(self) -> None:
        self._commands.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._replies.close()
            self._process.wait(PATIENCE_S)

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self._commands.write(json.dumps(command).encode() + b"\n")
        self._commands.flush()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            reply = self._read(deadline - time.monotonic())
            if not reply:
                raise TimeoutError("the fork server does not answer")
            if "exited" not in reply:
                return reply
            self._note(reply)

    def _note(self, reply: dict[str, Any]) -> None:
        if "exited" in reply:
            self._exits[reply["exited"]] = reply["code"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next reply; an empty one after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], left)[0]:
                return {}
            data = os.read(self._replies.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("the fork server is gone")
            self._lines += data
        line, _, rest = bytes(self._lines).partition(b"\n")
        self._lines = bytearray(rest)
        return dict(json.loads(line))


class StillRuns(AssertionError):
    """A rank had not ended in time."""


@dataclass
class Job:
    """The ranks of one job, started together."""

    server: ForkServer
    place: Path
    port: int
    pids: list[int] = field(default_factory=list)
    over: bool = False  # every rank was seen to end: the numbers may be other processes' by now

    def kill(self, rank: int, number: int = signal.SIGKILL) -> bool:
        return self.server.signal(self.pids[rank], number)

    def wait(self, timeout_s: float = PATIENCE_S) -> list[int]:
        """Every rank's exit code."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for pid in self.pids:
            code = self.server.wait(pid, max(0.0, deadline - time.monotonic()))
            if code is None:
                for other in self.pids:
                    self.server.signal(other, signal.SIGUSR1)  # stacks into the logs
                time.sleep(0.5)
                raise StillRuns(f"a rank still runs after {timeout_s} s\n{self.logs()}")
            codes.append(code)
        self.over = True
        return codes

    def ended(self) -> bool:
        return all(self.server.wait(pid, 0.0) is not None for pid in self.pids)

    def results(self, timeout_s: float = PATIENCE_S) -> list[Any]:
        """The results of all ranks, which must have ended well."""
        codes = self.wait(timeout_s)
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.logs()}"
        return [self.result(rank) for rank in range(len(self.pids))]

    def result(self, rank: int) -> Any:
        return json.loads((self.place / f"{rank}.json").read_text())

    def logs(self) -> str:
        texts = []
        for rank in range(len(self.pids)):
            log = self.place / f"{rank}.log"
            text = log.read_text(errors="replace") if log.exists() else ""
            texts.append(f"--- rank {rank} (pid {self.pids[rank]}):\n{text[-6000:]}")
        return "\n".join(texts)

    def living(self) -> list[int]:
        """Every living process of this job: its ranks and all they ever forked."""
        own = [pid for pid in self.pids if not (self.over and is_alive(pid))]
        return [pid for pid in all_pids() if session_of(pid) in own]

    def end(self) -> None:
        for pid in () if self.over else self.pids:
            self.server.signal(pid, signal.SIGKILL)
        for pid in () if self.over else self.pids:
            self.server.wait(pid, PATIENCE_S)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


class Cluster:
    """Starts jobs below a directory, which it makes; none of them outlives the block."""

    def __init__(self, server: ForkServer, place: Path) -> None:
        self._server = server
        self._place = place
        self._jobs: list[Job] = []
        place.mkdir(exist_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.end()

    def start(
        self, function: str, *, ranks: int = 2, port: int | None = None, **arguments: Any
    ) -> Job:
        """Fork the ranks of a job that run ``jobs.<function>``; ``ranks=0``: one without a group."""
        place = self._place / f"job{len(self._jobs)}"
        place.mkdir()
        job = Job(self._server, place, port or free_port())
        self._jobs.append(job)
        for rank in range(max(1, ranks)):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(job.port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(max(1, ranks)),
            }
            command = {
                "function": function,
                "args": arguments,
                "env": environment,
                "here": {"rank": rank, "world_size": max(1, ranks), "grouped": ranks > 0},
                "log": str(place / f"{rank}.log"),
                "result": str(place / f"{rank}.json"),
            }
            job.pids.append(self._server.fork(command))
        return job

    def run(self, function: str, *, ranks: int = 2, **arguments: Any) -> list[Any]:
        """Start a job and wait for its results."""
        return self.start(function, ranks=ranks, **arguments).results()


class Gate:
    """A place where processes of a job report and wait: two FIFOs, see ``jobs.meet``."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(f"{path}.reached")
        os.mkfifo(f"{path}.go")
        # Both ends open here, so that no process ever waits for an open.
        self._reached = os.open(f"{path}.reached", os.O_RDWR | os.O_NONBLOCK)
        self._go = os.open(f"{path}.go", os.O_RDWR | os.O_NONBLOCK)
        self._lines = bytearray()

    def arrival(self, job: Job | None = None, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next process that stands at the gate: ``pid``, ``ppid``, ``rank``, ``what``."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            ended = job is not None and job.ended()
            left = 0.0 if ended else min(0.5, deadline - time.monotonic())
            if select.select([self._reached], [], [], max(0.0, left))[0]:
                self._lines += os.read(self._reached, 1 << 16)
            elif ended or time.monotonic() >= deadline:
                logs = job.logs() if job is not None else ""
                raise AssertionError(f"nobody came to {self.path}; job ended: {ended}\n{logs}")
        line, _, rest = bytes(self._lines).partition(b"\n")
        self._lines = bytearray(rest)
        return dict(json.loads(line))

    def open(self, count: int = 1) -> None:
        """Let ``count`` processes pass, now or later."""
        os.write(self._go, b"." * count)

    def close(self) -> None:
        os.close(self._reached)
        os.close(self._go)


# ------------------------------------------------------------------------------------- processes


def free_port() -> int:
    """A free port below the ephemeral ones, so that no outgoing connection takes it meanwhile."""
    while True:
        port = random.randrange(12_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def session_of(pid: int) -> int | None:
    """The session of a living process; None for a zombie, or if there is none."""
    fields = _stat(pid)
    return int(fields[3]) if fields and fields[0] not in "ZX" else None


def is_alive(pid: int) -> bool:
    return session_of(pid) is not None


def await_file(path: Path, timeout_s: float = PATIENCE_S) -> bool:
    """True once it is there."""
    return _await(path.exists, timeout_s)


def await_death(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """True once the process is dead, also before it is reaped. The process need not be our child."""
    return _await(lambda: not is_alive(pid), timeout_s)


def _await(seen: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it is seen before the time is over."""
    deadline = time.monotonic() + timeout_s
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descriptors_of(pid: int) -> dict[int, str]:
    """The target of every descriptor of a process."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def listeners_of(port: int) -> list[int]:
    """The processes that hold a listening TCP socket on ``port``."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders = []
    for pid in all_pids():
        try:
            if inodes & set(descriptors_of(pid).values()):
                holders.append(pid)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return holders


# ----------------------------------------------------------------------------------------- roots


@contextmanager
def opened(root: Path) -> Iterator[PosixStorage]:
    storage = PosixStorage(root, create=False)
    try:
        yield storage
    finally:
        storage.close_root()


def tracked_step(root: Path) -> int | None:
    with opened(root) as storage:
        return read_tracker(storage).step


def history_of(root: Path) -> History:
    """The ledger that the journal says. Raises unless it is a legal trace (I11)."""
    with opened(root) as storage:
        return read_history(storage)


def transitions_of(root: Path) -> list[TransitionRecord]:
    """Every transition in the journal, over all epochs."""
    with opened(root) as storage:
        segments = read_segments(storage)
    return [r for s in segments for r in s.records if isinstance(r, TransitionRecord)]


def states_of(root: Path) -> dict[int, str]:
    """Step -> state, of the checkpoints the journal still knows."""
    living = history_of(root).ledger.checkpoints.values()
    return {c.step: c.state.value for c in living}


def common_file(rank: int, files: int = 2) -> str:
    """The file in which ``rank`` writes what all ranks have in common, beside ``files`` shards."""
    in_shard = (series_of(installed("megatron-core")) or (0, 0)) >= (0, 19)
    return f"__{rank}_{files}.distcp" if in_shard else "common.pt"


def path_of(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def steps_on_disk(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in root.glob("iter_*"))


def staging_of(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".ckptfsm" / "staging"))


def assert_complete(root: Path, step: int) -> None:
    """The directory holds exactly what its manifest lists, and the manifest is of this step (I4)."""
    directory = path_of(root, step)
    with opened(root) as storage:
        manifest = read_manifest(storage, directory.name)
    assert manifest is not None, f"step {step} has no manifest"
    assert manifest.step == step
    listed = {entry.name: entry.bytes for entry in manifest.files}
    found = {
        str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*") if p.is_file()
    }
    found.pop(".ckptfsm/manifest.json")
    assert found == listed
