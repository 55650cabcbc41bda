"""Jobs whose ranks get SIGINT at random moments, and go on. Used by ``proof.interrupts``.

The ranks are real processes that talk over a socket, with forked writers on a real disk. Each rank
makes the same calls, catches KeyboardInterrupt and ``RankInterrupted``, and goes on. A signal that
comes between two calls is the business of the trainer: its handler raises inside the library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fakes import FakeDriver, fake_ports

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import CkptFsmError, RankFailed, RankInterrupted
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.conformance import assert_journal_conforms
from proof.layer import LayerResult, Violation

HANGS_S = 90.0  # a rank that does not end this long after its time is taken for hung
_ALONE, _GLOO = -1, -2  # in place of a socket's descriptor
_RUN_BY = frozenset({"hear", "_hand_on", "_arrives", "_put_back", "__exit__"})
_HEAD = struct.Struct("!Q")
_SETTINGS: dict[str, Any] = {
    "on_failure": "warn",
    "busy_timeout_s": 8.0,
    "close_timeout_s": 8.0,
    "effect_timeout_s": 8.0,
    "exchange_timeout_s": 10.0,
    "writer_timeout_s": 20.0,
    "exit_timeout_s": 5.0,
}


class SocketTransport:
    """``Transport`` of one of two ranks: each exchange sends an item and takes the other's."""

    world_size = 2

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        connection.settimeout(_SETTINGS["exchange_timeout_s"])

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        other = self._swap("flags", list(flags))
        return [mine or theirs for mine, theirs in zip(flags, other, strict=True)]

    def gather(self, item: Any) -> list[Any] | None:
        other = self._swap("gather", item)
        return [item, other] if self.rank == 0 else None

    def broadcast(self, item: Any) -> Any:
        other = self._swap("broadcast", item if self.rank == 0 else None)
        return item if self.rank == 0 else other

    def close(self) -> None:
        self._connection.close()

    def _swap(self, kind: str, item: Any) -> Any:
        data = pickle.dumps((kind, item))
        try:
            self._connection.sendall(_HEAD.pack(len(data)) + data)
            (size,) = _HEAD.unpack(self._take(_HEAD.size))
            theirs, other = pickle.loads(self._take(size))
        except OSError as error:
            raise RankFailed(f"the other rank did not come: {error}") from error
        assert theirs == kind, f"rank {self.rank} is at {kind}, the other one at {theirs}"
        return other

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise RankFailed("the other rank is gone")
            data += piece
        return data


class Trainer:
    """A rank: it saves every third step until its time is over, then once more without signals."""

    def __init__(self, root: Path, transport: Any) -> None:
        self.interrupted = 0
        ports = fake_ports(root, driver=FakeDriver(transport.rank), transport=transport)
        self.manager = Manager(ports, make_config(_SETTINGS))
        self.saved: list[int] = []

    def run(self, steps: int) -> None:
        for step in range(1, steps + 1):
            if step % 3 == 0:
                self._call(lambda step=step: self._save(step))
            self._call(self.manager.poll)
            if step % 10 == 0:
                self._call(self.manager.wait_until_finished)
            if step % 25 == 0:
                self._call(lambda: self.manager.restore({"weights": ""}))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.manager.wait_until_finished()
        self.manager.save(steps + 1, {"weights": steps + 1}).wait()
        assert self.manager.latest_step() == steps + 1
        self.manager.close()

    def _save(self, step: int) -> None:
        self.manager.save(step, {"weights": step})
        self.saved.append(step)

    def _call(self, call: Any) -> None:
        try:
            call()
        except (KeyboardInterrupt, RankInterrupted):
            self.interrupted += 1


def strike(number: int, struck: FrameType | None) -> None:
    """As Python's handler, but only where the library runs it: not before a call has begun."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inside = frame.f_globals.get("__name__") == "ckptfsm.adapters.signals"
        if inside and frame.f_code.co_name in _RUN_BY:
            raise KeyboardInterrupt
        frame = frame.f_back


def gloo(store: str, rank: int) -> Any:
    """The real transport of one of two ranks: torch.distributed."""
    import torch.distributed as dist

    from ckptfsm.dcp.transport import GlooTransport

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    return GlooTransport(_SETTINGS["exchange_timeout_s"])


def rank_main(root: str, rank: int, descriptor: int, steps: int) -> None:
    """The life of one rank, in a fresh interpreter; prints how it went as JSON."""
    warnings.simplefilter("ignore")
    transport: Any = LocalTransport()
    if descriptor == _GLOO:
        transport = gloo(f"{root}.store", rank)
    elif descriptor >= 0:
        transport = SocketTransport(rank, socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, strike)
    trainer = Trainer(Path(root), transport)
    print("begun", flush=True)
    trainer.run(steps)
    print(json.dumps({"interrupted": trainer.interrupted, "saved": len(trainer.saved)}), flush=True)


def run_signals(result: LayerResult, seconds: float, *, with_gloo: bool) -> None:
    """Strike jobs of one and of two ranks for about ``seconds`` each, seed after seed.

    ``with_gloo``: also two ranks of torch.distributed, which take seconds to begin.
    """
    for ranks, how in ((1, ""), (2, "socket"), (2, "gloo"))[: 3 if with_gloo else 2]:
        deadline, seed = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            problem = _strike_job(result, ranks, how, seed)
            if problem:
                again = "PYTHONPATH=tests python -m proof.interrupts"
                what = f"{ranks} ranks {how}, seed {seed}: {problem}"
                result.violations.append(Violation("I10", what, again))
                return
            seed += 1


def _strike_job(result: LayerResult, ranks: int, how: str, seed: int, steps: int = 90) -> str:
    """A job with ranks that are struck until they end. Returns the fault, or ""."""
    chance = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="sigint-"))
    sockets = socket.socketpair() if how == "socket" else ()
    ends = [s.fileno() for s in sockets] or [_GLOO if how else _ALONE] * ranks
    try:
        processes = [_start(root / "root", rank, end, steps) for rank, end in enumerate(ends)]
        for end in sockets:
            end.close()
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
        deadline = time.monotonic() + HANGS_S
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                return "a rank hangs"
            time.sleep(chance.expovariate(100.0))  # the moment of the next strike, not a wait
            with contextlib.suppress(ProcessLookupError):
                chance.choice(processes).send_signal(signal.SIGINT)
                result.explored["signals"] = result.explored.get("signals", 0) + 1
        for rank, process in enumerate(processes):
            said, problem = process.communicate(timeout=HANGS_S)
            if process.returncode != 0:
                return f"rank {rank} ended with {process.returncode}: {problem[-2000:]}"
            told = json.loads(said)
            for name, count in told.items():
                result.explored[name] = result.explored.get(name, 0) + count
        assert_journal_conforms(root / "root")
        manager = Manager(fake_ports(root / "root"), make_config(_SETTINGS))
        newest = manager.latest_step()
        manager.close()
    except CkptFsmError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(root)
    return "" if newest == steps + 1 else f"step {newest} is the newest, not {steps + 1}"


def _start(root: Path, rank: int, descriptor: int, steps: int) -> subprocess.Popen[str]:
    numbers = [str(number) for number in (rank, descriptor, steps)]
    command = [sys.executable, "-m", "proof.sigint", str(root), *numbers]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[descriptor] if descriptor >= 0 else [],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
