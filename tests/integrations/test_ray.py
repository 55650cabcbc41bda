"""A real local Ray cluster: two groups with process groups of their own, one driver."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray", reason="pip install ckptfsm[ray]; make test-integrations")

import ray

from ckptfsm.errors import WriterDied
from ckptfsm.integrations.verl.workers import RayCalls

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
    assert (root / TRACKER).read_text() == "10"
    (tmp_path / "root.gate").unlink()
    said = drive(root, "again")
    assert said["resumed"] == 10 and said["found"] == found(10)
    assert said["first"] == found(20)
    assert (root / TRACKER).read_text() == "20"


def test_an_actor_that_is_out_of_reach_for_a_moment_is_not_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a fault of the network that ends every later save of a run."""
    calls = RayCalls()
    error = ray.exceptions.ActorUnavailableError("a fault", None)
    monkeypatch.setattr(ray, "get", Mock(side_effect=[error, ray.exceptions.ActorDiedError()]))
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        calls.result("call")
    with pytest.raises(WriterDied):
        calls.result("call")
