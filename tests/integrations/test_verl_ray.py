"""How workers are called through Ray: real actors of a real, local Ray, colocated as verl does it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")

import ray

from ckptfsm.integrations.verl import install
from ckptfsm.integrations.verl.trainer import attach, poll
from ckptfsm.integrations.workers import RayCalls, WorkerCalls

pytestmark = pytest.mark.megatron
LIMIT_S = 60.0


class Colocated:
    """Like verl's colocated worker: several roles in one process, by name."""

    def __init__(self) -> None:
        manager = SimpleNamespace(previous_saved_paths=[])
        self.worker_dict = {
            "actor_rollout": SimpleNamespace(
                checkpoint_mananager=None,
                actor=SimpleNamespace(engine=SimpleNamespace(checkpoint_mananager=manager)),
            ),
            "critic": SimpleNamespace(engine=SimpleNamespace(checkpoint_manager=manager)),
        }


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, *map(str, _paths())])}},
    )
    yield
    ray.shutdown()


def _paths() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def ended(calls: RayCalls, begun: Any) -> Any:
    assert len(calls.done([begun], LIMIT_S)) == 1
    return calls.result(begun)


def manager_names(worker: Any) -> list[str]:
    roles = worker.worker_dict
    holders = (roles["actor_rollout"].actor.engine, roles["critic"].engine)
    kept = ("checkpoint_mananager", "checkpoint_manager")
    return [type(getattr(h, n)).__name__ for h, n in zip(holders, kept, strict=True)]


def process_of(worker: Any) -> int:
    return os.getpid()


def nap(worker: Any) -> None:
    time.sleep(LIMIT_S)  # until it is killed


def fail(worker: Any) -> None:
    raise ValueError("made up")


def test_roles_in_one_process_are_attached_polled_and_lost(local_ray: None, tmp_path: Any) -> None:
    """Catches: a role that is not found in verl's colocated worker; a poll that waits for a busy
    worker; a dead worker that stays unnoticed."""
    actors = [ray.remote(Colocated).options(num_cpus=0).remote()]
    roles, calls, lost = ("actor", "critic"), RayCalls(), Mock()
    groups = WorkerCalls(dict.fromkeys(roles, actors), calls)
    assert groups.sizes == {"actor": 1, "critic": 1}
    # Its process imports torch and megatron-core.
    groups.call_all({role: (attach, role, str(tmp_path), {}) for role in roles}, 300.0)
    questions = {role: (poll, role, ()) for role in roles}
    names = ended(calls, calls.submit(actors[0], manager_names))
    assert names == ["VerlCheckpointManager"] * 2
    with pytest.raises(Exception, match="made up"):
        ended(calls, calls.submit(actors[0], fail))
    pid = ended(calls, calls.submit(actors[0], process_of))
    napping = calls.submit(actors[0], nap)
    for _ in range(3):
        assert list(groups.poll(questions, 0.0, lost)) == []
    assert not calls.done([napping], 0), "it waited for a worker that is busy"
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while lost.call_count < 2:
        assert time.monotonic() < deadline
        assert list(groups.poll(questions, 0.0, lost)) == []
    assert sorted(call.args[:2] for call in lost.call_args_list) == [
        ("actor", [0]),
        ("critic", [0]),
    ]
    lost.reset_mock()
    assert list(groups.poll(questions, 0.0, lost)) == [] and not lost.called, "said once"


CONTENTS = ["model", "optimizer", "extra"]


def a_trainer(root: Path) -> Any:
    """A trainer object of verl. Its actor, of one rank, is in a worker group made as verl does it."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl_groups import Loader, config_of
    from verl_ray_worker import RoleWorker

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config = config_of(root, async_save=True)
    trainer.use_critic, trainer.global_steps, trainer.train_dataloader = False, 0, Loader()
    checkpoint = {"save_contents": CONTENTS, "load_contents": CONTENTS, "async_save": True}
    kind = RayClassWithInitArgs(ray.remote(RoleWorker), role="actor", checkpoint=checkpoint)
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    colocated = RayWorkerGroup(pool, create_colocated_worker_cls({"actor_rollout": kind}))
    trainer.actor_rollout_wg = colocated.spawn({"actor_rollout"})["actor_rollout"]
    return install(trainer)


def test_verls_worker_group_saves_and_loads(local_ray: None, tmp_path: Path) -> None:
    """Catches: a ticket that verl's dispatch does not carry; calls that verl's workers do not answer."""
    trainer = a_trainer(tmp_path / "root")
    group = trainer.actor_rollout_wg
    group.train(2)
    trainer.global_steps = 2
    saved = group.fingerprint()
    trainer._save_checkpoint()
    group.train(1)
    assert group.fingerprint() != saved
    trainer.checkpoints.poll(wait=True)
    trainer._load_checkpoint()
    trainer.checkpoints.close()
    assert (trainer.global_steps, group.fingerprint()) == (2, saved)
    assert int((tmp_path / "root/latest_checkpointed_iteration.txt").read_text()) == 2
