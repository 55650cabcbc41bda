"""torchtitan's real trainer on two CPU ranks with FSDP2, with our checkpoints and with stock ones.

Every run must have the very losses of a run of stock code that never stopped: model, optimizer,
schedule and data come back bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("torchtitan"):
    pytest.skip("torchtitan is not installed", allow_module_level=True)

from cluster import await_file, free_port, states_of  # noqa: E402  of tests/megatron
from verl_servers import LIMIT_S, Server  # noqa: E402

from ckptfsm.core.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.integration
LAST = 12  # of the run that never stops


class Run:
    """A job of torchtitan. ``ours``: our settings; None for stock checkpoints."""

    def __init__(
        self, server: Server, place: Path, steps: int, ours: Any = None, **more: Any
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self.size = place, more.setdefault("size", 2)
        what = {"place": str(place), "steps": steps, "ours": ours, "port": free_port(), **more}
        self.connection = server.connect()
        self.connection.send(what)
        self.pids: list[int] = self._answer()

    def _answer(self) -> Any:
        assert self.connection.poll(LIMIT_S), f"it does not end: {self.logs()}"
        return self.connection.recv()

    def ended(self) -> list[int]:
        """Wait for all ranks: their exit statuses."""
        statuses: list[int] = self._answer()
        self.connection.close()
        return statuses

    def done(self) -> list[dict[str, Any]]:
        """Wait for all ranks: their notes, if all went well."""
        assert self.ended() == [0] * self.size, self.logs()
        return [self.notes(rank) for rank in range(self.size)]

    def notes(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.place / f"rank-{rank}.json").read_text())
        return found

    def logs(self) -> str:
        texts = [path.read_text()[-6000:] for path in sorted(self.place.glob("rank-*.log"))]
        return "\n".join(texts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), "torchtitan_job.py")
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The loss of every step of stock code."""
    place = tmp_path_factory.mktemp("undisturbed")
    [notes, _] = Run(server, place, LAST, checkpoint={"enable": False}).done()
    assert len(notes["losses"]) == LAST
    losses: dict[str, float] = notes["losses"]
    return losses


class Trainer:
    """Runs jobs below one place, and compares each with the undisturbed one."""

    def __init__(self, server: Server, place: Path, undisturbed: dict[str, float]) -> None:
        self._server, self.place, self._undisturbed = server, place, undisturbed
        self.root = place / "checkpoint"

    def start(self, steps: int, ours: Any = None, **more: Any) -> Run:
        return Run(self._server, self.place, steps, ours, **more)

    def __call__(self, steps: int, ours: Any = None, *, begins: int, **more: Any) -> None:
        """A run that goes on from a step and ends well."""
        for notes in self.start(steps, ours, **more).done():
            self.check(notes, begins, steps)

    def check(self, notes: dict[str, Any], begins: int, ends: int) -> None:
        steps = map(str, range(begins + 1, ends + 1))
        assert notes["losses"] == {step: self._undisturbed[step] for step in steps}
        assert notes["from"] == begins

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.root.glob("step-*"))


@pytest.fixture
def train(server: Server, tmp_path: Path, undisturbed: dict[str, float]) -> Trainer:
    return Trainer(server, tmp_path / "job", undisturbed)


def test_stock_and_ours_resume_each_other(train: Trainer) -> None:
    """Catches: a checkpoint that the other side cannot load, or loads incompletely; a step of stock's
    that is not adopted; one that is deleted by ours; more steps kept than ``keep_latest_k`` says."""
    keep = {"checkpoint": {"keep_latest_k": 2, "async_mode": "async"}}
    train(4, begins=0)
    train(8, {}, begins=4, **keep)
    assert states_of(train.root) == dict.fromkeys((2, 4, 6, 8), "tracked")  # two of them pinned
    train(10, begins=8)
    train(12, {}, begins=10, **keep)
    assert train.steps() == [2, 4, 10, 12]
