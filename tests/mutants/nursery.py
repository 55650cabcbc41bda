"""Forks one process per question from an interpreter that has imported all but the library.

``python -m mutants.nursery`` reads questions from standard input, a line of JSON each (mutant,
layer, profile, seconds). Each gets a line in answer: the finding of ``mutants.child``, or how it
ended. Importing Hypothesis, pydantic, pytest and megatron-core anew for every question would take
longer than most layers need to see a mutant.

Rules: nothing of the library, nor of the layers, is imported here, so that every child imports the
mutated text. Each child is a session leader, and nothing of its session is left when its answer is
given.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mutants import child

_PRELOADED = (
    "greenlet",
    "hypothesis.stateful",
    "pydantic.main",  # pydantic itself imports nothing before it is asked
    "pydantic.type_adapter",
    "pytest",
    "transitions",
    "xxhash",
)
_ALONE = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no threads of numpy's
_OF_THE_DROPINS = (  # take seconds: imported when a question first needs them
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "torch.distributed.checkpoint",
)
_TESTS = Path(__file__).parents[1]
_LOOK_S = 0.01
_ANSWER_BYTES = 1 << 20


class Nursery:
    """The asking side: one question at a time. A context manager."""

    def __init__(self) -> None:
        planted = str(_TESTS / "mutants" / "planted")  # its sitecustomize reaches every interpreter
        paths = [planted, str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(p for p in paths if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mutants.nursery"],
            env={**os.environ, "PYTHONPATH": path, **_ALONE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, name: str, layer: str, profile: str, limit_s: float) -> dict[str, Any]:
        """The answer of ``layer`` on the library with mutant ``name``: see ``mutants.child``.

        ``late``: no answer within ``limit_s``. ``broke``: the layer stumbled, or its process died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, layer, profile, limit_s]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._process.communicate()  # no more questions: the process ends


def serve() -> None:
    """Answer questions until there are no more."""
    preload(_PRELOADED)
    for line in sys.stdin:
        name, layer, profile, limit_s = json.loads(line)
        if "test_dropins" in layer:
            preload(_OF_THE_DROPINS)
        print(json.dumps(answer_by_child(name, layer, profile, limit_s)), flush=True)


def preload(modules: Sequence[str]) -> None:
    """Import the modules, and keep children's garbage collectors off them: a look would copy them."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()


def answer_by_child(name: str, layer: str, profile: str, limit_s: float) -> dict[str, Any]:
    """Fork, let the child answer, and end whatever it leaves behind."""
    assert len(os.listdir("/proc/self/task")) == 1, "a child would inherit a broken lock"
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read_end)
        _become(name)
        child.answer(name, layer, profile, write_end)
    os.close(write_end)
    status = _wait(pid, limit_s)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(pid, 0)
    os.set_blocking(read_end, False)
    try:
        data = os.read(read_end, _ANSWER_BYTES)
    except BlockingIOError:  # a process in yet another session still holds the other end
        data = b""
    os.close(read_end)
    if data:
        found: dict[str, Any] = json.loads(data)
        return found
    if status is None:
        return {"late": f"nothing in {limit_s:.0f} s"}
    return {"broke": f"ended with {os.waitstatus_to_exitcode(status)} and no answer"}


def _become(name: str) -> None:
    """Leave a child no input, and no output but its answer; its children get the mutant too."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, m) for n, m in ((0, "r"), (1, "w"), (2, "w")))
    os.environ[child.PLANTED] = "" if name == child.CONTROL else name


def _wait(pid: int, limit_s: float) -> int | None:
    """The child's status; None if it goes on beyond ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    serve()
