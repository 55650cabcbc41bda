"""torchtitan's real trainer on two CPU ranks with FSDP2, with our checkpoints and with stock ones.

Every run must have the very losses of a run of stock code that never stopped: model, optimizer,
schedule and data come back bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("torchtitan"):
    pytest.skip("torchtitan is not installed", allow_module_level=True)

import torch  # noqa: E402
from cluster import await_file, free_port, states_of  # noqa: E402  of tests/megatron
from safetensors.torch import load_file  # noqa: E402
from servers import LIMIT_S, Server  # noqa: E402
from snapshots import files_of  # noqa: E402
from torchtitan.components.checkpointer import (  # noqa: E402
    BaseCheckpointManager,
    CheckpointManager,
)

from ckptfsm.core.errors import ConfigError  # noqa: E402
from ckptfsm.integrations.torchtitan import checkpoints  # noqa: E402

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


def test_a_rank_that_is_killed_in_the_middle_of_a_save_costs_that_save_alone(
    train: Trainer, tmp_path: Path
) -> None:
    """Catches: half a checkpoint that is resumed from; a rank that hangs at the end, or hides the error
    that ended it; a step that cannot be saved again."""
    gate, asynchronous = tmp_path / "gate", {"async_mode": "async", "keep_latest_k": 2}
    job = train.start(
        8,
        {"engine": "fork", "exit_timeout_s": 1.0},
        checkpoint=asynchronous,
        hold=str(gate),
        hold_at=4,
    )
    for rank in (0, 1):
        assert await_file(tmp_path / f"held-{rank}", LIMIT_S), job.logs()
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.ended() == [1, -signal.SIGKILL]
    assert "gloo" in job.notes(0)["raised"], "the error of the trainer, not of its end"
    assert train.steps() == [2]
    train(8, {}, begins=2, checkpoint=asynchronous)
    assert train.steps() == [6, 8]
    assert states_of(train.root) == {6: "tracked", 8: "tracked"}
    before = files_of(train.root)
    train(9, {}, begins=6, checkpoint={"load_only": True, "load_step": 6})
    older = train.start(9, {}, checkpoint={"load_step": 6})
    assert older.ended() == [1, 1]
    for rank in (0, 1):
        assert "rollback 6" in older.notes(rank)["raised"], "not trained over 8, as stock would"
    assert files_of(train.root).items() >= before.items()


def test_a_rank_that_fails_alone_ends_with_its_error(train: Trainer) -> None:
    """Catches: an end that waits for ranks which are elsewhere, or one that says another error."""
    job = train.start(8, {}, fails_at=3)
    assert job.ended() == [1, 1]
    assert job.notes(0)["raised"] == "ArithmeticError: the trainer fails"
    train(4, {}, begins=2)


def test_the_last_save_in_hf_is_stocks(server: Server, tmp_path: Path) -> None:
    """Catches: a last checkpoint with another content, dtype or place than stock's."""
    checkpoint = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    found = []
    for ours in (None, {}):
        place = tmp_path / ("stock" if ours is None else "ours")
        Run(server, place, 1, ours, checkpoint=checkpoint).done()
        step = place / "checkpoint/step-1"
        found.append(load_file(step / "model-00001-of-00001.safetensors"))
        assert len(list(step.glob("sharded/*"))) == 2
    stock, ours = found
    assert stock and stock.keys() == ours.keys()
    for key, value in stock.items():
        assert value.dtype is torch.bfloat16 and torch.equal(value, ours[key])


def test_a_seed_checkpoint_starts_both(train: Trainer, tmp_path: Path) -> None:
    """Catches: a step 0 that is not saved, or of which more is asked than the model; a start from
    zero although the journal has a checkpoint."""
    seed = {"create_seed_checkpoint": True, "last_save_model_only": True}
    train.start(1, {}, size=1, checkpoint=seed).done()
    losses = []
    for ours in (None, {}):
        found = train.start(1, ours, checkpoint={"load_only": ours is None}).done()
        losses.append([notes["losses"] for notes in found])
    assert losses[0] == losses[1] != []
    assert states_of(train.root) == {0: "tracked", 1: "tracked"}
    for step in train.steps():
        shutil.rmtree(train.root / f"step-{step}")
    lost = train.start(2, {})
    assert lost.ended() == [1, 1]
    assert lost.notes(1)["raised"].startswith("DamagedRoot")


def test_the_end_of_the_data_waits_for_the_save_in_flight(train: Trainer) -> None:
    """Catches: a run that ends without its last step, and leaves the save to nobody."""
    for notes in train.start(8, {}, checkpoint={"async_mode": "async"}, end=8).done():
        train.check(notes, 0, 4)
    assert states_of(train.root) == {2: "tracked", 4: "tracked"}


REFUSED = [
    ({}, {"save_interval_steps": 5}, "checkpoint.interval"),
    ({}, {"sync": True}, "checkpoint.async_mode"),
    ({}, {"layout": "hf"}, "step-N"),
    ({}, {"on_failure": "save_again(2)"}, "torchtitan decides"),
    ({}, {"retention": {"latest_n": 1}}, "keep_latest_k"),
    ({}, {"unheard_of": 1}, "unheard_of"),
]


@pytest.mark.parametrize(("stock", "ours", "said"), REFUSED)
def test_a_setting_without_effect_is_refused(
    stock: dict[str, Any], ours: dict[str, Any], said: str
) -> None:
    """Catches: a setting that counts for nothing, in silence."""
    with pytest.raises(ConfigError, match=said):
        checkpoints(CheckpointManager.Config(enable=True, **stock), **ours)


def test_the_checkpointer_of_another_kind_is_refused() -> None:
    """Catches: a run that goes on with other checkpoints than those it asked for."""
    with pytest.raises(ConfigError, match="BaseCheckpointManager"):
        checkpoints(BaseCheckpointManager.Config(enable=True))
    ours = checkpoints(CheckpointManager.Config(enable=True), on_failure="warn")
    assert checkpoints(ours, writer_files=1).settings == {"on_failure": "warn", "writer_files": 1}
    assert checkpoints(CheckpointManager.Config(), sync=True).enable is False
