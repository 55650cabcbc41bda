"""Trainers with their state on a device, killed while they save: see ``device_job.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import tracked_step

pytestmark = pytest.mark.megatron

JOB = Path(__file__).with_name("device_job.py")
KILLED_AT, LAST = 8, 9


def run(log: Path, *arguments: str, until: dict[str, Any]) -> list[dict[str, Any]]:
    """What a job tells, among the lines of others. It is killed when it tells ``until``."""
    found = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with (
        log.open("w") as errors,
        subprocess.Popen([sys.executable, str(JOB), *arguments], stderr=errors, **pipes) as job,
    ):
        try:
            for line in job.stdout:
                if line.startswith("{"):
                    found.append(json.loads(line))
                    if found[-1] == until:
                        return found
        finally:
            job.kill()
    pytest.fail(f"{until} was not told, after {found}: {log.read_text()[-4000:]}")


@pytest.mark.parametrize("trainer", ["gpt", "fsdp2", "offloaded"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_killed_trainer_of_a_device_resumes_bit_for_bit(tmp_path, trainer, place):
    """Catches: state of a device that is torn, or not in the checkpoint; a root that no start takes."""
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if place == "cpu" and trainer == "gpt" and find_spec("megatron.training") is None:
        pytest.skip("megatron-core has a stand-in for CUDA where megatron.training is installed")
    root = tmp_path / "root"
    job = (trainer, place, str(root))
    first = run(tmp_path / "first", *job, "1000", until={"saving": KILLED_AT})
    second = run(tmp_path / "second", *job, str(LAST), until={"tracked": KILLED_AT})
    begin = second[0]["restored"]
    assert begin in (KILLED_AT // 2, KILLED_AT), "the killed save counts only if it was whole"
    losses, again = (
        {t["step"]: t["loss"] for t in told if "step" in t} for told in (first, second)
    )
    assert list(losses) == list(range(1, KILLED_AT + 1))
    assert list(again) == list(range(begin + 1, LAST + 1))
    expected = {step: loss for step, loss in losses.items() if step > begin}
    assert {step: again[step] for step in expected} == expected
    assert tracked_step(root) == KILLED_AT
