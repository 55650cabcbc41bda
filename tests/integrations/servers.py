"""A process that has imported verl and forks workers: both ends of it.

Importing torch, megatron-core and verl takes long. A server does it once and forks a process for
each connection. The server dies with the tests, and its workers die with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 180.0


class Running:
    """A server in ``directory`` that another process has begun, and will end."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.address = directory, str(directory / "server")

    def connect(self) -> Connection:
        """Connect to a new worker."""
        return Client(self.address)  # type: ignore[return-value]


class Server(Running):
    """A server of this process. ``script`` is run with its address, and calls ``serve_for_ever``."""

    def __init__(
        self, directory: Path, script: str = "verl_worker.py", more: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
        with open(directory / "server.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), self.address],
                env={**environment, "OMP_NUM_THREADS": "1", **(more or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def connect(self) -> Connection:
        """Connect to a new worker. Raises if the server ended, or is not there after ``LIMIT_S``."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return super().connect()
            except (FileNotFoundError, ConnectionRefusedError):
                text = (self.directory / "server.log").read_text()
                assert self.process.poll() is None, text[-3000:]
                assert time.monotonic() < deadline, f"the server does not come up: {text}"
                time.sleep(0.05)

    def close(self) -> None:
        """End the server and all that its workers left: a stock manager outlives a killed trainer."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


def serve_for_ever(address: str, serve: Callable[[Connection], None]) -> None:
    """The server's side: call ``serve`` in a child for each connection."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Listener(address) as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent()
                try:
                    serve(connection)  # type: ignore[arg-type]
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            connection.close()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
