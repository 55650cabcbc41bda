"""Signal handlers and forked children of a trainer: managers must leave them alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from fakes import FakeDriver, environment, fake_ports
from managers import QUICK, weights

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    ManagerClosed,
)
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FifoGate

SIGNALS = """
import os, signal, sys
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from fakes import fake_ports

def opened(name):
    ports = fake_ports(f"{sys.argv[1]}/{name}")
    return Manager(ports, make_config({"preemption_signals": ("SIGTERM",)}))

if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda number, frame: print("the trainer's", flush=True))
a, b = opened("a"), opened("b")
a.close()
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(10):
    b.poll()
print(b.preempted, flush=True)
b.close()
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


@pytest.mark.parametrize(
    ("trainers", "ends"),
    [
        ("default", (-signal.SIGTERM, ["True"])),
        ("handler", (0, ["True", "the trainer's", "alive"])),
    ],
)
def test_F25_managers_closed_in_the_order_they_were_opened_leave_signals_alone(
    trainers: str, ends: tuple[int, list[str]], tmp_path: Path
):
    """Catches: the first manager taking the second one's handler away, and the second
    putting back the dead first one's: no scheduler can end the process any more."""
    command = [sys.executable, "-c", SIGNALS, str(tmp_path), trainers]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == ends


@pytest.mark.parametrize("does", ["exit", "raise", "close", "abandon", "poll", "save", "wait"])
def test_F13_a_process_that_the_trainer_forks_leaves_its_saves_alone(does: str, tmp_path: Path):
    """Catches: a child of the trainer that leaves through the ``with`` block, and
    kills its parent's writer, or hangs there."""
    gate = FifoGate(tmp_path / "gate")
    driver = FakeDriver()
    driver.before_write = gate.hold
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(QUICK))
    handle = manager.save(1, weights(1))
    pid = os.fork()
    if pid == 0:
        os._exit(leaves(manager, handle, does))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.open()
    handle.wait()
    assert manager.latest_step() == 1
    manager.close()


def leaves(manager: Manager, handle: SaveHandle, does: str) -> int:
    """In the child: 0 if it was let go at once, and told where it asked for something."""
    calls = {
        "poll": manager.poll,
        "save": partial(manager.save, 2, weights(2)),
        "wait": handle.wait,
    }
    began = time.monotonic()
    try:
        with manager:
            if does in calls:
                calls[does]()
            elif does in ("close", "abandon"):
                getattr(manager, does)()
            else:
                raise {"exit": SystemExit, "raise": ZeroDivisionError}[does]
    except (SystemExit, ZeroDivisionError):
        pass
    except ManagerClosed:
        return 0 if does in calls else 1
    late = time.monotonic() - began >= QUICK["exit_timeout_s"]
    return 2 if late or does in calls else 0
