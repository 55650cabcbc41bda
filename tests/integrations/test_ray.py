"""A real local Ray cluster: two groups with separate process groups, one driver."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray", reason="pip install ckptfsm[ray]; make test-integrations")

import ray

from ckptfsm.core.errors import ConfigError, SaveFailed, WriterDied
from ckptfsm.core.events import Failed
from ckptfsm.integrations.ray import RayController
from ckptfsm.integrations.workers import OutOfReach, RayCalls
from ckptfsm.testing.fakes import FifoGate

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("ray_job.py")
TRACKER = "latest_checkpointed_iteration.txt"


def drive(root: Path, mode: str, ends_with: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root), mode],
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert done.returncode == ends_with, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def found(step: int) -> dict[str, Any]:
    loaded = {"actor": [float(step)] * 2, "critic": [float(step)]}
    return {"step": step, "loaded": loaded, "data": f"at {step}"}


def test_F1_a_worker_killed_while_it_writes_fails_the_save_and_no_more(tmp_path: Path) -> None:
    """Catches: a tracker that moves with the actor alone, a driver that hangs on a dead critic."""
    root = tmp_path / "root"
    said = drive(root, "kill")
    assert said["resumed"] is None and said["first"] == found(10)
    assert said["tracker_meanwhile"] == "10"
    assert "worker 0 of group 'critic' is dead" in said["failure"]
    assert said["staging"] == []
    assert said["after"] == found(30) and said["steps"] == [10, 30]
    assert not said["torch_in_driver"]


def test_F3_a_driver_killed_while_workers_write_is_followed_by_one_that_goes_on(
    tmp_path: Path,
) -> None:
    """Catches: a restart from zero, or from a checkpoint that lacks its critic."""
    root = tmp_path / "root"
    drive(root, "die", ends_with=-signal.SIGKILL)
    assert int((root / TRACKER).read_text()) == 10
    (tmp_path / "root.gate").unlink()
    said = drive(root, "again")
    assert said["resumed"] == 10 and said["found"] == found(10)
    assert said["first"] == found(20)
    assert int((root / TRACKER).read_text()) == 20


def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    """Catches: lines for a new user that do not work, a second run that begins from zero."""
    page = (SCRIPT.parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", page, re.M | re.S))
    here = {
        "/shared/run-7": str(tmp_path / "root"),
        "ray.init()": "ray.init(num_cpus=2, include_dashboard=False)",
        "29501": str(free_port()),
        "29502": str(free_port()),
    }
    assert set(files) == {"actors.py", "driver.py"}
    for name, text in files.items():
        for ours, mine in here.items():
            text = text.replace(ours, mine)
        (tmp_path / name).write_text(text)
    for last in (30, 60):
        done = subprocess.run(
            [sys.executable, "driver.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            start_new_session=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        trained = f"step {last}: trained {[float(last)] * 3}, position {last}"
        assert trained in done.stdout
        assert int((tmp_path / "root" / TRACKER).read_text()) == last
    names = sorted(path.name for path in (tmp_path / "root").glob("iter_*"))
    assert names == ["iter_0000050", "iter_0000060"]


@pytest.mark.parametrize("notice", ["end", "signal"])
def test_the_page_on_preemption_runs_as_it_is_written(tmp_path: Path, notice: str) -> None:
    """Catches: a driver that is cut off although it was told of its end."""
    pages = [SCRIPT.parents[2] / "docs" / name for name in ("ray.md", "preemption.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    files = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", text, re.M | re.S))
    here = {
        "/shared/run-7": str(tmp_path / "root"),
        "ray.init()": "ray.init(num_cpus=2, include_dashboard=False)",
        "29501": str(free_port()),
    }
    for name in ("actors.py", "preempted.py"):
        for ours, mine in here.items():
            files[name] = files[name].replace(ours, mine)
        (tmp_path / name).write_text(files[name])
    end = time.time() + (30 if notice == "end" else 3600)
    driver = subprocess.Popen(
        [sys.executable, "preempted.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "END_OF_ALLOCATION": str(end)},
        start_new_session=True,
    )
    tracker = tmp_path / "root" / TRACKER
    while notice == "signal" and driver.poll() is None and not tracker.exists():
        time.sleep(0.1)
    if notice == "signal":
        driver.send_signal(signal.SIGTERM)
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, said[-4000:]
    found = re.search(r"ended at step (\d+), tracked (\d+)", said)
    assert found is not None and found[1] == found[2] == tracker.read_text().strip()


def free_port() -> int:
    """A free port below those that the kernel gives out: Ray takes many of these."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# ------------------------------------------------------------------- in this process, without torch


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    paths = [str(SCRIPT.parent), str(SCRIPT.parents[2])]  # of this module, and of the library
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    yield
    ray.shutdown()


class Slow:
    """A rank. Its ``write`` waits at the FIFO ``go``, and then fails in the way ``how``."""

    def __init__(self, go: str, how: str) -> None:
        self.go, self.how = go, how

    def write(self, ticket: Any) -> list[Any]:
        with open(self.go, "rb", buffering=0) as gate:
            gate.read(1)
        if self.how == "raises":
            raise ValueError("out of memory")
        return [Failed(ticket.of, "fork_failed", "out of memory", ticket.first_rank)]

    def poll(self, doomed: Any) -> list[Any]:
        return []


@pytest.fixture
def begin(local_ray: None, tmp_path: Path) -> Iterator[Callable[..., RayController]]:
    """Makes controllers of one root, one after the other."""
    made: list[RayController] = []

    def begun(*actors: Any, **settings: Any) -> RayController:
        made.append(RayController(str(tmp_path / "root"), {"actor": actors}, **TIMES, **settings))
        return made[-1]

    yield begun
    for controller in made:
        controller.abandon()


TIMES = {"answer_timeout_s": 0.2, "writer_timeout_s": 20.0, "exit_timeout_s": 0.2}


def slow(gate: FifoGate, how: str = "reports") -> Any:
    return ray.remote(Slow).options(num_cpus=0).remote(gate.path, how)


@pytest.mark.parametrize("how", ["reports", "raises"])
def test_a_late_report_of_a_write_still_counts(begin: Any, tmp_path: Path, how: str) -> None:
    """Catches: the answer of a slow write thrown away: its save fails only at the deadline."""
    gate = FifoGate(tmp_path / "go")
    controller = begin(slow(gate, how))
    handle = controller.save(10)
    gate.open()
    with pytest.raises(SaveFailed, match="out of memory"):
        handle.wait()


def test_actors_that_are_replaced_are_lost(begin: Any, tmp_path: Path) -> None:
    """Catches: a save that waits for the writers of dead actors until its deadline."""
    controller = begin(slow(FifoGate(tmp_path / "never")))
    handle = controller.save(10)
    ray.kill(controller._workers.groups["actor"][0])
    controller.replace("actor", [slow(FifoGate(tmp_path / "go"))])
    with pytest.raises(SaveFailed, match="worker 0 of group 'actor' is dead: replaced"):
        handle.wait()
    with pytest.raises(ConfigError, match="there is no group 'critic'"):
        controller.replace("critic", [])


def interrupt(*ignored: Any) -> Any:
    raise KeyboardInterrupt


def test_a_worker_that_cannot_be_called_fails_its_save_at_once(begin: Any, tmp_path: Path) -> None:
    """Catches: Ctrl-C between two calls: an attempt without a writer, which stops the next one."""
    gate = FifoGate(tmp_path / "go")
    no_call = SimpleNamespace(remote=interrupt)
    silent = SimpleNamespace(remote=lambda doomed: ray.put([]))
    controller = begin(slow(gate), SimpleNamespace(write=no_call, poll=silent))
    with pytest.raises(KeyboardInterrupt):
        controller.save(10)
    with pytest.raises(SaveFailed, match="not every actor was called: KeyboardInterrupt"):
        controller.wait_until_finished()
    gate.open()


def test_actors_without_the_methods_are_refused(begin: Any, tmp_path: Path) -> None:
    """Catches: a wrong name that is found at the first save."""
    actor = slow(FifoGate(tmp_path / "go"))
    with pytest.raises(ConfigError, match="actor 0 of 'actor' has no method 'writes'"):
        begin(actor, write="writes")
    controller = begin(actor)
    with pytest.raises(ConfigError, match="has no method 'write'"):
        controller.replace("actor", [SimpleNamespace(poll=None)])


def test_an_actor_that_is_out_of_reach_for_a_moment_is_not_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a fault of the network that ends every later save of a run."""
    calls = RayCalls()
    error = ray.exceptions.ActorUnavailableError("a fault", None)
    monkeypatch.setattr(ray, "get", Mock(side_effect=[error, ray.exceptions.ActorDiedError()]))
    with pytest.raises(OutOfReach):
        calls.result("call")
    with pytest.raises(WriterDied):
        calls.result("call")
