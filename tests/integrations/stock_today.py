"""Stock code for ``test_field_bugs_today`` to run in this process, which is the only rank.

Two things are replaced. CUDA (``no_cuda``): there is nothing to wait for, and the CPU is its
device. Moments: a ``Held`` writer stands at a gate until the test opens it.

``Maker``: asynchronous requests and queues of megatron-core or of nvidia-resiliency-ext.
``megatron``, ``fsdp`` and ``trainer``: verl's managers of a tiny model, and its trainer.
``titan``: torchtitan's checkpointer of a tiny model, asynchronous.

Run as a script: ``stock_today.py ROOT`` is a driver of verl that is killed in step 2.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from ckptfsm.testing.fakes import FifoGate

STRATEGIES = "megatron.core.dist_checkpointing.strategies"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
TRACKER = "latest_checkpointed_iteration.txt"
KEEP_ONE = {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1}
WAIT_S = 60.0


@contextmanager
def the_only_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass
class Held:
    """An ``async_fn`` that waits at a gate first, and does not outlive the test."""

    inner: Any
    gate: FifoGate

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        self.gate.hold()
        if self.inner is not None:
            self.inner(*arguments, **keywords)


def kill_at(gate: FifoGate, process: Any) -> None:
    """Send SIGKILL to a writer that stands at its gate."""
    held = gate.reached(WAIT_S)
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    os.close(held)
    assert process.exitcode == -signal.SIGKILL


def outcome_of(call: Any, *arguments: Any, **keywords: Any) -> Any:
    """The result of a call, or its error; torch's CheckpointException is not an Exception."""
    try:
        return call(*arguments, **keywords)
    except (Exception, SystemExit, CheckpointException) as error:
        return error


@dataclass
class Maker:
    """A maker of asynchronous requests, of two: its module of queues, and a state ``w``."""

    name: str
    queues: Any
    opened: list[Any] = field(default_factory=list)

    def queue(self, *, persistent: bool = False) -> Any:
        """A persistent worker needs no GPU if it is forked with our CUDA, or reads shared memory."""
        how: dict[str, Any] = {"persistent": persistent}
        if persistent and self.name == "mcore":
            self.queues.AsyncCallsQueue.warmup_persistent_caller(0, mp_mode="fork")
        elif persistent:
            how["cpu_shm_mode"] = True
        self.opened.append(self.queues.AsyncCallsQueue(**how))
        return self.opened[-1]

    def bare(self, function: Any, *finalizers: Any, arguments: tuple[Any, ...] = ()) -> Any:
        return self.queues.AsyncRequest(function, arguments, list(finalizers), {})

    def request(self, directory: Path, value: float, rows: int = 4, saver: Any = None) -> Any:
        from megatron.core.dist_checkpointing import save
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        directory.mkdir()
        saver = saver or TorchDistSaveShardedStrategy("torch_dist", 1)
        how = {"async_sharded_save": True, "async_strategy": self.name}
        return save(state_of(value, rows), str(directory), saver, **how)

    def close(self) -> None:
        for queue in self.opened:
            queue.async_calls.clear()
            queue.close(abort=True)


def new_maker(name: str, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A maker, with the caches of its modules as in a new process."""
    place = f"{STRATEGIES}.async_utils" if name == "mcore" else f"{NVRX}.core"
    writing = import_module(f"{STRATEGIES if name == 'mcore' else NVRX}.filesystem_async")
    monkeypatch.setattr(writing, "_results_queue", None)
    writing.get_write_results_queue(mp_mode="fork")
    maker = Maker(name, import_module(place))
    if name == "nvrx":
        for kind, attribute, new in (
            (writing.FileSystemWriterAsync, "_shm_tensor_cache", {}),
            (writing.FileSystemWriterAsync, "_cached_identifiers", set()),
            (writing.FileSystemWriterAsync, "_shm_drain_callback", None),
            (maker.queues.PersistentAsyncCaller, "_worker_data_cache", {}),
        ):
            monkeypatch.setattr(kind, attribute, new)
    return maker


def state_of(value: float, rows: int = 4) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((rows, 4), float(value)))}


def loaded(directory: Path, rows: int = 4) -> list[float]:
    """The values of ``w``, as megatron-core loads them."""
    from megatron.core.dist_checkpointing import load

    return load(state_of(0, rows), str(directory))["w"].unique().tolist()


def process_of(queue: Any, index: int = 0) -> Any:
    return queue.async_calls[index].async_caller.process


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("synchronize", None), ("set_device", None), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, partial(answer, value))
    monkeypatch.setattr(torch.cuda, "current_device", partial(answer, torch.device("cpu")))


def answer(value: Any, *ignored: Any, **keywords: Any) -> Any:
    return value


@pytest.fixture
def rank(no_cuda: None) -> Iterator[None]:
    with the_only_rank():
        yield


@pytest.fixture
def made_by(rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Maker]]:
    """A maker by its name; its queues are closed at the end."""
    makers: list[Maker] = []

    def maker(name: str) -> Maker:
        makers.append(new_maker(name, monkeypatch))
        return makers[-1]

    yield maker
    for each in makers:
        each.close()


# ---------------------------------------------------------------------------------- verl


class Model(torch.nn.Module):
    """A weight, with the methods that verl's two managers ask of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 2))

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {"w": ShardedTensor.from_rank_offsets("w", self.w.detach())}

    def can_generate(self) -> bool:
        return False


def contents(async_save: bool) -> Any:
    from verl.trainer.config import CheckpointConfig

    return CheckpointConfig(async_save=async_save, save_contents=["model"], load_contents=["model"])


def megatron(*, async_save: bool = False, rank: int = 0) -> Any:
    """verl's manager of a Megatron model. ``rank``: which rank it takes itself for."""
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    unused = ("model_config", "transformer_config", "hf_config", "processing_class", "optimizer")
    manager = MegatronCheckpointManager(
        config=SimpleNamespace(model=SimpleNamespace(path="")),
        checkpoint_config=contents(async_save),
        role="actor",
        model=[Model()],
        arch="",
        param_dtype=torch.float32,
        share_embeddings_and_output_weights=False,
        optimizer_scheduler=None,
        use_distributed_optimizer=False,
        use_dist_checkpointing=True,
        **dict.fromkeys(unused),
    )
    manager.rank = rank
    return manager


def fsdp(*, async_save: bool = False) -> Any:
    from transformers import LlamaConfig
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    model = Model()
    model.config = LlamaConfig()
    return FSDPCheckpointManager(model, checkpoint_config=contents(async_save))


def trainer(root: Path, actor: Any, critic: Any = None, **settings: Any) -> Any:
    """verl's trainer of PPO, before step 1; its worker groups are managers."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl_groups import Loader, config_of

    made = RayPPOTrainer.__new__(RayPPOTrainer)
    made.config = config_of(root, **settings)
    made.use_critic, made.global_steps, made.train_dataloader = critic is not None, 0, Loader()
    made.actor_rollout_wg, made.critic_wg = actor, critic
    return made


def save_steps(of: Any, *steps: int) -> None:
    for of.global_steps in steps:
        of._save_checkpoint()


def left(root: Path) -> dict[str, Any]:
    """The content of each step's directory, and of the tracker."""
    steps = {p.name[12:]: sorted(q.name for q in p.iterdir()) for p in root.glob("global_step_*")}
    tracker = root / TRACKER
    return {**steps, "tracker": tracker.read_text() if tracker.exists() else None}


def no_space(*ignored: Any, **keywords: Any) -> None:
    raise OSError(28, "No space left on device")


def finalize(manager: Any, root: Path, *steps: int) -> None:
    """Finalize, as verl's queue does once the writers of an asynchronous save are done; one is kept."""
    for step in steps:
        path = root / f"global_step_{step}/{manager.role}"
        path.mkdir(parents=True, exist_ok=True)
        manager._finalize_save(
            local_path=str(path),
            hdfs_path=None,
            global_step=step,
            max_ckpt_to_keep=1,
            saved_any_dist_ckpt=True,
        )


# ---------------------------------------------------------------------------------- torchtitan


@pytest.fixture
def titan(tmp_path: Path) -> Iterator[Any]:
    """torchtitan's checkpointer, which keeps two."""
    from torchtitan.components.checkpointer import CheckpointManager

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = CheckpointManager.Config(
        enable=True, interval=1, keep_latest_k=2, async_mode="async", folder=str(tmp_path)
    )
    made = CheckpointManager(
        config,
        dataloader=None,
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers={},
        lr_schedulers={},
        states={},
        sd_adapter=None,
    )
    yield made
    outcome_of(made.maybe_wait_for_saving)  # it fails if the purge took its directory
    dist.destroy_process_group()


@contextmanager
def held_writers() -> Iterator[None]:
    """A block in which DCP's writers, threads of this process, do not begin."""
    go, stock = threading.Event(), FileSystemWriter.write_data

    def write_data(*arguments: Any, **keywords: Any) -> Any:
        assert go.wait(WAIT_S)
        return stock(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write_data)
        try:
            yield
        finally:
            go.set()


def be_killed_before_the_tracker(root: Path) -> None:
    """The life of a driver that is killed in step 2, when the actor is saved and nothing is tracked."""
    with the_only_rank():
        driver = trainer(root, fsdp(), **KEEP_ONE)
        save_steps(driver, 1)
        driver.train_dataloader = SimpleNamespace(state_dict=_die)
        save_steps(driver, 2)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_killed_before_the_tracker(Path(sys.argv[1]))
