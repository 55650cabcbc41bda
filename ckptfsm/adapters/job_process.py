"""An attempt of a job: a process of a user's code, seen from the process that started it.

It is the first to go when memory runs out, and yields processor and disk to others.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ckptfsm.adapters.spawn import be_considerate
from ckptfsm.adapters.tied import TiedProcess, interpreter
from ckptfsm.core.ports import Unfit, signal_name

_START = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[2]);"
    " from ckptfsm.adapters.job_process import main; main()"
)
_ORPHANED = 77
_NOT_FOUND = 127
_UNFIT = 213  # of a function; a program may end with any
_LOWEST = 19
_OUTPUT_BYTES = 2000
# By these variables torch.distributed finds the trainer's ranks.
_OF_THE_TRAINER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_.*)\Z"
)


@dataclass(frozen=True, slots=True)
class JobCall:
    """The work of an attempt: a program, or else a function, for the checkpoint at ``path``."""

    path: str
    step: int
    metrics: Mapping[str, float]
    program: tuple[str, ...] = ()
    function: str = ""


def environment_of_job(
    environment: Mapping[str, str], root: str, more: Mapping[str, str]
) -> dict[str, str]:
    """``environment`` without those of the trainer's ranks and accelerators, and with ``more``."""
    kept = {name: value for name, value in environment.items() if not _OF_THE_TRAINER.match(name)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "CKPTFSM_ROOT": root, **more}


class JobProcess:
    """A process that runs ``call`` in the directory ``cwd``. The call ignores the signals ``ignored``.

    Raises ``OSError`` if none can be made, and ``ValueError`` for words that no process can have.
    """

    def __init__(
        self,
        call: JobCall,
        environment: Mapping[str, str],
        imports: Sequence[str],
        cwd: str,
        ignored: Sequence[int] = (),
    ) -> None:
        told = {name: getattr(call, name) for name in call.__slots__}
        words = [list(imports), {**told, "metrics": dict(call.metrics)}, list(ignored)]
        command = [interpreter(), "-c", _START, str(os.getpid()), *map(json.dumps, words)]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        output, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = TiedProcess(
                command, [null, theirs, theirs], environment=environment, cwd=cwd, own_session=False
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(theirs)
            os.close(null)
        self.pid = self._process.pid
        self._is_function = bool(call.function)
        self._output = output
        self._listening = True
        self._said = b""
        os.set_blocking(output, False)

    @property
    def running(self) -> bool:
        """False once its end was noticed: its number may be another process's by then."""
        return self._process.running

    def watched(self) -> list[int]:
        """Descriptors that can be read once there is something to do."""
        return [self._process.pidfd, *([self._output] if self._listening else [])]

    def ended(self) -> str | None:
        """None while it runs; then "" for success, or the reason. Raises the function's ``Unfit``."""
        self._listen()
        code = self._process.exitcode()
        if code is None:
            return None
        self._close()
        return self._verdict(code)

    def kill(self) -> str:
        """Kill the process and all it started, and wait for its end. Returns its last words."""
        if self.running:
            self._process.kill(None)
        self._close()
        return self.last_output()

    def _close(self) -> None:
        if self._output >= 0:
            self._listen()
            os.close(self._output)
            self._output, self._listening = -1, False

    def last_output(self) -> str:
        """The end of the output, in one line."""
        lines = self._said.decode("utf-8", "replace").split("\n")
        return " | ".join(line.strip() for line in lines if line.strip())

    def _verdict(self, status: int) -> str:
        if status == 0:
            return ""
        if status == _UNFIT and self._is_function:
            raise Unfit(self.last_output())
        how = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
        words = self.last_output()
        return f"{how}: {words}" if words else how

    def _listen(self) -> None:
        while self._listening:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            self._listening = bool(data)
            self._said = (self._said + data)[-_OUTPUT_BYTES:]


def main() -> None:
    """Run the call that the command line names, as a process of lowest rank."""
    starter, call = int(sys.argv[1]), json.loads(sys.argv[3])
    if os.getppid() != starter:
        os._exit(_ORPHANED)
    _take_signals(json.loads(sys.argv[4]), program=bool(call["program"]))
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
    work = operator.attrgetter(name)(import_module(module))
    try:
        work(call["path"], call["step"], call["metrics"])
    except Unfit as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(_UNFIT)


def _take_signals(ignored: Sequence[int], *, program: bool) -> None:
    """Give the call the signals that a shell would give it, but for those that are ``ignored``."""
    of_python = () if program else (signal.SIGPIPE, signal.SIGXFSZ)  # which ignores them
    for number in signal.valid_signals():
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number not in (*of_python, signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
