"""A driver of verl's, and its groups: a real trainer object with workers served by ``verl_worker``.

Run as a script: ``verl_job.py SERVER PLACE WRITER STEP`` is a driver that is there to be killed.
The driver has a save in flight: the critic's writer holds at the FIFO ``WRITER``, the critic's
worker at ``STEP``, as in a step of training. By then it has printed one JSON line: the state it
saved before, and the pids of the writers. The driver ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from servers import Running
from verl_groups import Loader, PipeCalls, WorkerGroup, config_of

from ckptfsm.integrations.verl import install

TRACKER = "latest_checkpointed_iteration.txt"


class Job:
    """A run of verl: a real trainer object of verl's, an actor of two ranks and a critic of one."""

    def __init__(self, server: Running, place: Path) -> None:
        self.server, self.place, self.root = server, place, place / "root"
        self.groups: list[WorkerGroup] = []
        self.trainers: list[Any] = []

    def start(self, base: Any = None, *, stock: bool = False, **options: Any) -> Any:
        """A trainer after ``init_workers``. ``options``: of ``install``, workers and configuration."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        workers = {k: options.pop(k) for k in ("checkpoint", "bridge") if k in options}
        settings = {
            k: options.pop(k) for k in ("on_failure", "retention", "engine") if k in options
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
        if hasattr(trainer, "checkpoints"):
            self.trainers.append(trainer)
        elif not stock:
            trainer = install(trainer, calls=PipeCalls(), **settings)
            self.trainers.append(trainer)
        return trainer

    def group(self, role: str, size: int, **workers: Any) -> WorkerGroup:
        group = WorkerGroup(self.server, role, size, self.place, **workers)
        self.groups.append(group)
        return group

    def steps(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.name.startswith("global_step"))

    def tracked(self) -> int:
        return int((self.root / TRACKER).read_text())

    def end(self) -> None:
        for trainer in self.trainers:
            trainer.checkpoints.abandon()
        for group in self.groups:
            group.close()


def train(trainer: Any, steps: int) -> None:
    trainer.actor_rollout_wg.call("verl_worker:train", steps)
    if trainer.use_critic:
        trainer.critic_wg.call("verl_worker:train", steps)
    trainer.train_dataloader.position += steps
    trainer.global_steps += steps


def state_of(trainer: Any) -> list[Any]:
    groups = [trainer.actor_rollout_wg, *([trainer.critic_wg] if trainer.use_critic else [])]
    return [g.call("verl_worker:fingerprint") for g in groups] + [trainer.train_dataloader.position]


def save(trainer: Any, steps: int = 1) -> None:
    train(trainer, steps)
    trainer._save_checkpoint()


def restarted(job: Job, **options: Any) -> Any:
    """The next job of the run, which has loaded. The job before it was killed, or has ended."""
    trainer = job.start(**options)
    trainer._load_checkpoint()
    return trainer


def be_killed(server: str, place: str, writer: str, step: str) -> None:
    """The driver's life. See the module."""
    job = Job(Running(Path(server)), Path(place))
    trainer = restarted(job, async_save=True, engine="fork")
    save(trainer)
    trainer.checkpoints.poll(wait=True)
    saved = state_of(trainer)
    critic = trainer.critic_wg
    critic.call("verl_worker:hold_writers_at", writer)
    save(trainer)
    print(json.dumps({"saved": saved, "writers": critic.call("verl_worker:children")}), flush=True)
    critic.workers[0].submit("verl_worker:hold_at", step)
    sys.stdin.read()


if __name__ == "__main__":
    be_killed(*sys.argv[1:])
