"""Settings, states and a writer for managers in tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import OpenPosix
from ckptfsm.core.config import make_config
from ckptfsm.core.ports import LaunchInterrupted, Outcome, RankJob, Storage, WriterProcess
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.plain_files import FilesDriver, FileTree
from ckptfsm.writers.rank_writer import launch_forked

TEMPLATE = {"weights": None}


QUICK = {"exit_timeout_s": 0.5, "close_timeout_s": 20.0, "busy_timeout_s": 20.0}


def weights(step: int) -> dict[str, object]:
    return {"weights": b"w%d" % step, "step": step}


def files_manager(root: Path) -> Manager:
    """Of parts that are files alone, with the ports of the system."""
    ports = system_ports(LocalTransport(), FilesDriver(), OpenPosix(str(root)))
    return Manager(ports, make_config(QUICK))


def tree(content: str) -> FileTree:
    return FileTree(lambda where: Path(where, "tokenizer.json").write_text(content) and None)


def link_to_one_of_two_runs(place: Path) -> Path:
    """``current`` leads to ``a``; ``a`` and ``b`` have a step 1 each, in the root ``gpt``."""
    for name in ("a", "b"):
        (place / name).mkdir()
        run = files_manager(place / name / "gpt")
        run.save(1, parts={"t": tree(f"of run {name}")}).wait()
        run.close()
    current = place / "current"
    current.symlink_to(place / "a")
    return current


class Unread:
    """A writer that reads the state for long. A Ctrl-C comes at the first look at it."""

    holds_copy = must_wait = False

    def __init__(self, storage: Storage, job: RankJob) -> None:
        self.looks = 0
        self.outcome: Outcome | None = None

    def await_copy(self, timeout_s: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.looks += 1  # unless the look was broken off
        if self.looks > 1:
            self.outcome = Outcome(1)  # so that no test waits for the deadline

    def poll(self) -> Outcome | None:
        return self.outcome

    def wait(self, timeout_s: float) -> Outcome | None:
        return self.outcome

    def written_bytes(self) -> int:
        return 0

    def kill(self, timeout_s: float) -> bool:
        self.outcome = self.outcome or Outcome(-9)
        return True


class UnreadWithoutGate(Unread):
    """``save`` has to wait for it."""

    must_wait = True


class ReadLate:
    """A writer that has read the state once ``save`` waits for that, as it has to."""

    must_wait = True

    def __init__(self, storage: Storage, job: RankJob) -> None:
        self._writer: WriterProcess = launch_forked(storage, job)
        self.holds_copy = False

    def await_copy(self, timeout_s: float) -> None:
        self.holds_copy = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class Lingering:
    """A writer that the kernel keeps until a test lets it go. ``broken``: at its launch, or later."""

    must_wait = False

    def __init__(self, broken: BaseException, *, at_launch: bool) -> None:
        self.gone = False
        self._broken, self._at_launch = broken, at_launch

    def launch(self, storage: Storage, job: RankJob) -> Lingering:
        if self._at_launch:
            raise LaunchInterrupted(self, self._broken)  # type: ignore[arg-type]
        return self

    @property
    def holds_copy(self) -> bool:
        raise self._broken

    def poll(self) -> Outcome | None:
        return Outcome(-9) if self.gone else None

    def written_bytes(self) -> int:
        return 0

    def kill(self, timeout_s: float) -> bool:
        return self.gone


class Elastic(Exception):
    """An exception of a user's handler, which is no Ctrl-C."""


class Struck(ReadLate):
    """``ReadLate``, with a signal of the user's in the wait."""

    def await_copy(self, timeout_s: float) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        super().await_copy(timeout_s)


@contextmanager
def handler_that_raises() -> Iterator[None]:
    """Let SIGUSR1 raise ``Elastic``."""
    before = signal.signal(signal.SIGUSR1, _raise_elastic)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _raise_elastic(number: int, frame: object) -> None:
    raise Elastic
