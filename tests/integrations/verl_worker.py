"""Workers of verl as plain processes: the checkpoint manager of the installed verl, a real GPT, gloo.

A server imports torch, megatron-core and verl once (that takes long) and forks workers. A worker is
to a driver as a Ray actor is: it has ``save_checkpoint`` and ``load_checkpoint`` as verl's workers
have, and is called from outside, one call after the other.

Run as a script: ``verl_worker.py ADDRESS`` serves until its parent is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.checkpoint.megatron_checkpoint_manager as stock
from megatron.core import mpu, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from servers import serve_for_ever
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint import checkpoint_manager as base
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import ckptfsm.integrations.verl.rank_manager as ours
from ckptfsm.core.ports import PartJob
from ckptfsm.dcp.driver import StateDraft
from ckptfsm.demo.model import ModelSpec, Trainer, initialize_parallel
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.writers.plain_files import TreePart

SPEC = ModelSpec(hidden_size=32, layers=2, heads=2, sequence_length=16, batch_size=2)


class Optimizer:
    """Adam with the methods that verl asks of a Megatron optimizer."""

    def __init__(self, trainer: Trainer) -> None:
        self.adam, self.model = trainer.optimizer, trainer.model

    def sharded_state_dict(self, model: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        state = self.adam.state_dict()
        steps = [int(s["step"]) for _, s in sorted(state["state"].items())]
        groups = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        sharded = self.model.sharded_state_dict(
            metadata=groups
        )  # ``model`` was loaded into already
        parameters = get_param_id_to_sharded_param_map(sharded, self.model.parameters())
        optim_state_to_sharding_state(state, parameters, exclude_keys=("step",))
        return {**state, "steps": steps}

    def load_state_dict(self, state: Any) -> None:
        steps = dict(enumerate(state.pop("steps")))
        moments = {
            index: {**moment, "step": torch.tensor(float(steps[index]))}
            for index, moment in state["state"].items()
        }
        self.adam.load_state_dict({**state, "state": moments})


class Scheduler:
    """A learning rate schedule: just a number."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Bridge:
    """Writes HF weights as bridges do: collectively, a file of every rank."""

    def save_weights(self, models: Any, weights_path: str) -> None:
        dist.barrier()
        name = f"model-{dist.get_rank()}.bin"
        torch.save(dict(models[0].module.named_parameters()), os.path.join(weights_path, name))
        dist.barrier()

    def load_weights(self, models: Any, weights_path: str) -> None:
        name = f"model-{dist.get_rank()}.bin"
        state = torch.load(os.path.join(weights_path, name), weights_only=False)
        models[0].module.load_state_dict(state, strict=False)


class Wrapped(torch.nn.Module):
    """verl's models are wrapped, as by DDP."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        return self.module.load_state_dict(state, strict=strict)


class VerlWorker:
    """A rank of a role."""

    def __init__(self, role: str, size: int, checkpoint: dict[str, Any], bridge: bool) -> None:
        initialize_parallel(size)
        self.trainer: Any = Trainer(SPEC, size, "cpu")
        tensor_parallel.get_cuda_rng_tracker().states_ = {"some": torch.get_rng_state()}
        stock.get_device_name = _cpu  # verl 0.9 takes a machine without any accelerator for CUDA
        self.scheduler = Scheduler()
        self.checkpoint_mananager = stock.MegatronCheckpointManager(
            config=SimpleNamespace(model=SimpleNamespace(path="none")),
            checkpoint_config=CheckpointConfig(**checkpoint),
            model_config=None,
            transformer_config=self.trainer.model.config,
            role=role,
            model=[Wrapped(self.trainer.model)],
            arch="LlamaForCausalLM",
            hf_config=LlamaConfig(),
            param_dtype=torch.float32,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=Optimizer(self.trainer),
            optimizer_scheduler=self.scheduler,
            use_distributed_optimizer=False,
            use_checkpoint_opt_param_scheduler=True,
            use_dist_checkpointing=not bridge,
            bridge=Bridge() if bridge else None,
        )

    def save_checkpoint(self, path: Any, hdfs: Any = None, step: int = 0, **more: Any) -> None:
        """Save as verl's workers do: the manager's result is lost."""
        with cpu_devices():  # for stock saves
            self.checkpoint_mananager.save_checkpoint(path, hdfs, step, **more)
        dist.barrier()

    def load_checkpoint(self, local_path: str, **more: Any) -> None:
        self.checkpoint_mananager.load_checkpoint(local_path, **more)


# ------------------------------------------------------------------- called by tests, in a worker


def train(worker: VerlWorker, steps: int) -> float:
    loss = 0.0
    for _ in range(steps):
        loss = worker.trainer.train_step()
        worker.scheduler.at += 1
    return loss


def fingerprint(worker: VerlWorker) -> list[float]:
    """Parameters, moments, step counts, schedule and generator of this rank, in a few numbers."""
    numbers = [float(_local(p).double().sum()) for p in worker.trainer.model.parameters()]
    for state in worker.trainer.optimizer.state.values():
        numbers += [float(_local(state["exp_avg"]).double().sum()), float(state["step"])]
    return [*numbers, float(worker.scheduler.at), float(torch.get_rng_state().double().sum())]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def attach_stock(worker: VerlWorker) -> None:
    """Give verl's manager back: from then on saves are those of stock verl."""
    holder = worker.checkpoint_mananager
    if isinstance(holder, ours.VerlCheckpointManager):
        worker.checkpoint_mananager = holder.close()


def die_in_save(worker: VerlWorker) -> None:
    """The worker is killed when verl asks it for the next save."""
    worker.checkpoint_mananager._manager.save_checkpoint = _die


def fail_in_save(worker: VerlWorker) -> None:
    """Let rank 0 fail to write the last of verl's files."""
    manager = worker.checkpoint_mananager._manager
    if dist.get_rank() == 0:
        manager.save_checkpoint = partial(_fail, manager.save_checkpoint)


class PlainFiles(base.BaseCheckpointManager):
    """A backend of verl that writes a file per rank; no code of verl tracks its saves."""

    def __init__(self, worker: VerlWorker) -> None:
        stock_manager = worker.checkpoint_mananager
        super().__init__(None, None, checkpoint_config=stock_manager.checkpoint_config)
        self.worker = worker

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        trainer = self.worker.trainer
        os.makedirs(local_path, exist_ok=True)
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "schedule": self.worker.scheduler.at,
        }
        torch.save(state, os.path.join(local_path, f"rank_{self.rank}.pt"))

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        trainer = self.worker.trainer
        path = os.path.join(local_path, f"rank_{self.rank}.pt")
        state = torch.load(path, weights_only=False)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.worker.scheduler.at = state["schedule"]


def use_plain_files(worker: VerlWorker) -> None:
    """Before ours is put in: another backend."""
    worker.checkpoint_mananager = PlainFiles(worker)


class FsdpTrainer:
    """A tiny model of transformers under FSDP 1 or 2, and Adam."""

    def __init__(self, size: int, version: int) -> None:
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=2,
            attn_implementation="eager",  # another asks a torch without CUDA for its streams
        )
        self.model = LlamaForCausalLM(config)
        if version == 1:
            self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"))
        else:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train_step(self) -> float:
        words = torch.randint(0, 16, (2, 8))
        self.optimizer.zero_grad()
        loss = self.model(input_ids=words, labels=words).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def use_fsdp(worker: VerlWorker, version: int) -> None:
    """Before ours is put in: verl's own backend for FSDP."""
    base.get_device_name = _cpu  # as above
    worker.trainer = FsdpTrainer(dist.get_world_size(), version)
    worker.checkpoint_mananager = FSDPCheckpointManager(
        model=worker.trainer.model,
        optimizer=worker.trainer.optimizer,
        lr_scheduler=worker.scheduler,
        processing_class=None,
        checkpoint_config=worker.checkpoint_mananager.checkpoint_config,
    )


def sharded_tensors(worker: VerlWorker) -> int:
    """How many tensors of a sharded state dict this process still holds."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, ShardedTensor)]
    return sum(thing.data is not None for thing in found)


def children(worker: VerlWorker) -> list[int]:
    """The processes that this one has forked."""
    tasks = Path("/proc/self/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def hold_writers(worker: VerlWorker, gate: str) -> None:
    """Writers forked from now on wait until the file ``gate`` exists; at most 60 s."""
    _hold_writers(partial(_until_there, gate))


def hold_writers_at(worker: VerlWorker, fifo: str) -> None:
    """Writers forked from now on wait for a byte of ``fifo`` before each part that they write."""
    _hold_writers(partial(_at, fifo))


def hold_at(worker: VerlWorker, fifo: str) -> None:
    """Busy, until a byte of ``fifo`` comes or its last writer is gone."""
    _at(fifo)


def _at(fifo: str) -> None:
    with open(fifo, "rb", buffering=0) as gate:
        gate.read(1)


def _until_there(gate: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(gate) and time.monotonic() < deadline:
        time.sleep(0.01)


def _hold_writers(hold: Any) -> None:
    stage: Any = vars(StateDraft)["stage"]
    stage = stage.stage if isinstance(stage, _Held) else stage
    StateDraft.stage = _Held(stage, hold)  # type: ignore[method-assign]


class _Held:
    def __init__(self, stage: Any, hold: Any) -> None:
        self.stage, self.hold = stage, hold

    def __get__(self, draft: Any, kind: Any) -> Any:
        return partial(self._staged, draft)

    def _staged(self, draft: Any, *arguments: Any) -> tuple[Any, ...]:
        return tuple(
            job
            if isinstance(job, TreePart)
            else _HeldJob(job, self.hold)  # a tree is known by its type
            for job in self.stage(draft, *arguments)
        )


class _HeldJob(PartJob):
    """A share that is not portable: its writer is forked, and waits in this process's functions."""

    def __init__(self, job: Any, hold: Any) -> None:
        self.job, self.hold = job, hold
        self.name, self.directory, self.images = job.name, job.directory, job.images

    def read_from(self, source: Any) -> None:
        self.job.read_from(source)

    def write(self, storage: Any, location: str) -> Any:
        self.hold()
        return self.job.write(storage, location)


def _cpu() -> str:
    return "cpu"


def _die(**arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(save: Any, **arguments: Any) -> None:
    save(**arguments)
    raise OSError(28, "No space left on device")


# --------------------------------------------------------------------------------------- serving


def serve(connection: Connection) -> None:
    """The life of a worker: its description, then calls until the other side is gone."""
    what = connection.recv()
    log = os.open(what["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = dist.FileStore(what["store"], what["size"])
    dist.init_process_group("gloo", store=store, rank=what["rank"], world_size=what["size"])
    worker = VerlWorker(what["role"], what["size"], what["checkpoint"], what["bridge"])
    connection.send(("ok", os.getpid()))
    with contextlib.suppress(EOFError):
        while True:
            name, arguments, keywords = connection.recv()
            try:
                connection.send(("ok", _function(name)(worker, *arguments, **keywords)))
            except Exception as error:
                traceback.print_exc()
                connection.send(("error", f"{type(error).__name__}: {error}"))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    if module == "method":
        return getattr(VerlWorker, function)
    if module == "verl_worker":
        return globals()[function]
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    serve_for_ever(sys.argv[1], serve)
