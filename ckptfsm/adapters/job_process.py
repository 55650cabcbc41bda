"""An attempt of a job: a process of a user's code, seen from the process that started it.

Rules:

- The process has its own session, and all that is left of it is killed when the attempt ends.
- The process is the first to go when memory runs out, and yields processor and disk to others.
- The process does not see the trainer's accelerators, nor join its process group: the variables that
  lead there are not handed on.
- The end of its output is kept, for people.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import operator
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ckptfsm.adapters.spawn import be_considerate

_START = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[2]);"
    " from ckptfsm.adapters.job_process import main; main()"
)
_PR_SET_PDEATHSIG = 1
_ORPHANED = 77
_NOT_FOUND = 127
_LOWEST = 19
_OUTPUT_BYTES = 2000
# By these variables torch.distributed finds the trainer's ranks.
_OF_THE_TRAINER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_.*)\Z"
)


@dataclass(frozen=True, slots=True)
class Call:
    """The work of an attempt: a program, or else a function, for the checkpoint at ``path``."""

    path: str
    step: int
    metrics: Mapping[str, float]
    program: tuple[str, ...] = ()
    function: str = ""


def environment_of_job(
    environment: Mapping[str, str], root: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a job: ``environment`` without the trainer's ranks and accelerators, then
    ``more``.
    """
    kept = {name: value for name, value in environment.items() if not _OF_THE_TRAINER.match(name)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "CKPTFSM_ROOT": root, **more}


class JobProcess:
    """A process that runs ``call`` in the directory ``cwd``. Raises ``OSError`` if none can be made."""

    def __init__(
        self, call: Call, environment: Mapping[str, str], imports: Sequence[str], cwd: str
    ) -> None:
        told = {name: getattr(call, name) for name in call.__slots__}
        command = [sys.executable, "-c", _START, str(os.getpid()), json.dumps(list(imports))]
        self._process = subprocess.Popen(
            [*command, json.dumps({**told, "metrics": dict(call.metrics)})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._listening = True
        self._said = b""
        os.set_blocking(self._output.fileno(), False)
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def running(self) -> bool:
        """False once its end was noticed: its number may be another process's by then."""
        return self._process.returncode is None

    def watched(self) -> list[int]:
        """Descriptors that can be read once there is something to do."""
        return [self._pidfd, *([self._output.fileno()] if self._listening else [])]

    def ended(self) -> str | None:
        """None while the process runs; then "" for success, or the reason with its last words."""
        self._listen()
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        if not waiting.poll(0):
            return None
        self.kill()
        return self._verdict()

    def kill(self) -> None:
        """Kill the process and all it started, and wait for its end."""
        if self.running:  # its number is not given away before it is reaped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._listen()
            os.close(self._pidfd)
            self._output.close()
            self._listening = False

    def last_words(self) -> str:
        """The end of the output, in one line."""
        lines = self._said.decode("utf-8", "replace").split("\n")
        return " | ".join(line.strip() for line in lines if line.strip())

    def _verdict(self) -> str:
        status = self._process.returncode
        if status == 0:
            return ""
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        words = self.last_words()
        return f"{how}: {words}" if words else how

    def _listen(self) -> None:
        while self._listening:
            try:
                data = os.read(self._output.fileno(), 1 << 16)
            except BlockingIOError:
                return
            self._listening = bool(data)
            self._said = (self._said + data)[-_OUTPUT_BYTES:]


def main() -> None:
    """Run the call that the command line names, as a process of lowest rank."""
    starter, call = int(sys.argv[1]), json.loads(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        os._exit(_ORPHANED)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    be_considerate(_LOWEST)
    with contextlib.suppress(OSError):  # no /proc, or one that is not to be written
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if call["program"]:
        try:
            os.execvp(call["program"][0], call["program"])
        except OSError as error:
            sys.stderr.write(f"{call['program'][0]}: {error.strerror}\n")
            sys.exit(_NOT_FOUND)
    module, _, name = call["function"].partition(":")
    sys.argv[:] = [module]
    operator.attrgetter(name)(import_module(module))(call["path"], call["step"], call["metrics"])
