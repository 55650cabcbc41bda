"""verl as released, driven by ckptfsm: real managers of verl in real processes, gloo, forked writers.

Runs only where verl is installed. What is loaded is loaded by verl's own code, from what its own
``find_latest_ckpt_path`` finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from verl_groups import Loader, PipeCalls, Server, WorkerGroup, config_of

from ckptfsm.integrations.verl import install

pytestmark = pytest.mark.megatron
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("verl"))
    yield server
    server.close()


class Job:
    """A run of verl: a real trainer object of verl's, an actor of two ranks and a critic of one."""

    def __init__(self, server: Server, place: Path) -> None:
        self.server, self.place, self.root = server, place, place / "root"
        self.groups: list[WorkerGroup] = []
        self.trainers: list[Any] = []

    def start(self, base: Any = None, *, stock: bool = False, **options: Any) -> Any:
        """A trainer after ``init_workers``. ``options``: of ``install``, of workers, configuration."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        workers = {k: options.pop(k) for k in ("checkpoint", "bridge") if k in options}
        settings = {
            k: options.pop(k) for k in ("on_failure", "retention", "mirror") if k in options
        }
        critic, sizes = options.pop("critic", True), options.pop("sizes", (2, 1))
        kind = RayPPOTrainer if base is None else base
        trainer = kind.__new__(kind)
        trainer.config = config_of(self.root, **options)
        trainer.use_critic, trainer.global_steps = critic, 0
        trainer.train_dataloader = Loader()
        workers["async_save"] = options.get("async_save", False)
        trainer.actor_rollout_wg = self.group("actor", sizes[0], **workers)
        if critic:
            trainer.critic_wg = self.group("critic", sizes[1], **workers)
        if not stock:
            trainer = install(trainer, calls=PipeCalls(), **settings)
            self.trainers.append(trainer)
        return trainer

    def group(self, role: str, size: int, **workers: Any) -> WorkerGroup:
        group = WorkerGroup(self.server, role, size, self.place, **workers)
        self.groups.append(group)
        return group

    def steps(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.name.startswith("global_step"))

    def end(self) -> None:
        for trainer in self.trainers:
            trainer.checkpoints.abandon()
        for group in self.groups:
            group.close()


@pytest.fixture
def job(server: Server, tmp_path: Path) -> Iterator[Job]:
    job = Job(server, tmp_path)
    yield job
    job.end()


def train(trainer: Any, steps: int) -> None:
    trainer.actor_rollout_wg.call("verl_worker:train", steps)
    if trainer.use_critic:
        trainer.critic_wg.call("verl_worker:train", steps)
    trainer.train_dataloader.position += steps
    trainer.global_steps += steps


def state_of(trainer: Any) -> list[Any]:
    groups = [trainer.actor_rollout_wg, *([trainer.critic_wg] if trainer.use_critic else [])]
    return [g.call("verl_worker:fingerprint") for g in groups] + [trainer.train_dataloader.position]


@pytest.mark.parametrize("async_save", [False, True])
def test_stock_verl_loads_what_was_saved(job: Job, async_save: bool) -> None:
    """Catches: a checkpoint that only we can read; a missing part; a lost moment or generator."""
    trainer = job.start(async_save=async_save)
    trainer._load_checkpoint()
    train(trainer, 2)
    saved = state_of(trainer)
    trainer._save_checkpoint()
    if async_save:
        train(trainer, 1)
    trainer.checkpoints.close()
    assert (job.root / TRACKER).read_text() == "2"
    again = job.start(stock=True)
    train(again, 5)
    again._load_checkpoint()
    assert again.global_steps == 2
    assert state_of(again) == saved
