"""An evaluator as a real process, beside trainers that come, die and come again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes import environment

TRAINER = """
import sys
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from fakes import fake_ports
with Manager(fake_ports(sys.argv[1]), make_config({"retention": {"latest_n": 1}})) as manager:
    print("open", manager.latest_step(), flush=True)
    for line in sys.stdin:
        manager.save(int(line), parts={"x": line.encode()}).wait()
        print("saved", int(line), flush=True)
"""
EVALUATOR = """
import os, sys
import ckptfsm
after = sys.argv[2] if len(sys.argv) > 2 else None
for lease in ckptfsm.checkpoints(sys.argv[1], after, poll_interval_s=0.02):
    print(lease.attempt, flush=True)
    assert sys.stdin.readline() == "go on\\n"
    with open(os.path.join(lease.path, "x")) as file:
        print("read", file.read(), end="", flush=True)
    assert "torch" not in sys.modules
"""
_LIMIT_S = 120.0


class Process:
    """A process that is told a line and says a line."""

    def __init__(self, program: str, *arguments: object) -> None:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        self._process = subprocess.Popen(
            command,
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def asked(self, line: object) -> str:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=_LIMIT_S)

    def end(self) -> int:
        """Close its input and wait for its end."""
        self._process.communicate(timeout=_LIMIT_S)
        return self._process.returncode


@contextmanager
def running(program: str, *arguments: object) -> Iterator[Process]:
    process = Process(program, *arguments)
    try:
        yield process
    finally:
        process.kill()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_F2_an_evaluator_outlives_a_trainer_that_is_killed(tmp_path: Path):
    """I7. Catches: an evaluator that ends with its trainer, a step that goes while it is read, and
    one that is evaluated twice or never.

    The evaluator begins before there is a root. While it holds step 1, the first trainer saves more
    and is killed; the next one, which keeps one step, does not take step 1 away.
    """
    root = tmp_path / "runs" / "gpt"
    with running(EVALUATOR, root) as evaluator:
        with running(TRAINER, root) as first:
            assert first.hear() == "open None"
            assert first.asked(1) == "saved 1"
            assert evaluator.hear() == "1.e1.a1"
            assert [first.asked(2), first.asked(3)] == ["saved 2", "saved 3"]
        with running(TRAINER, root) as second:
            assert second.hear() == "open 3"
            assert second.asked(4) == "saved 4"
            assert names(root) == ["iter_0000001", "iter_0000004"]
            assert evaluator.asked("go on") == "read 1"
            assert evaluator.hear() == "4.e2.a1"
            assert second.asked(5) == "saved 5"
            assert evaluator.asked("go on") == "read 4"
            assert evaluator.hear() == "5.e2.a2"
            assert second.end() == 0
    assert names(root) == ["iter_0000004", "iter_0000005"]
    with running(EVALUATOR, root, "4.e2.a1") as again:
        assert again.hear() == "5.e2.a2"
        assert again.asked("go on") == "read 5"
    assert os.listdir(root / ".ckptfsm/readers") != [], (
        "killed evaluators leave leases, which expire"
    )
