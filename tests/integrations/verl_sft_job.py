"""verl's SFT trainer on a CPU: the real program, its real FSDP engine, or a small engine with Megatron.

A server imports everything once and forks the ranks of a job. Each rank runs the ``main`` of verl's
trainer, or ours, with words as on its command line. The notes of a rank are in ``rank-N.json`` of
the job.

The small engine is a GPT of megatron-core, because verl's engine needs Transformer Engine and a
GPU. Its checkpoint manager, and its ``save_checkpoint`` and ``load_checkpoint``, are verl's.

Run as a script: ``verl_sft_job.py ADDRESS`` serves until its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.distributed as verl_distributed
import verl_cpu  # noqa: F401  (the platform)
from megatron.core import mpu, tensor_parallel
from servers import die_with_parent, serve_for_ever
from transformers import LlamaConfig
from verl.trainer import sft_trainer
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
from verl_worker import SPEC, Optimizer, Scheduler, Wrapped

from ckptfsm.dcp.transport import GlooTransport
from ckptfsm.demo.model import Trainer, initialize_parallel
from ckptfsm.integrations.verl import install
from ckptfsm.integrations.verl import sft as ours
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.ranks import restoring
from ckptfsm.ranks.group_worker import GroupShare

TRACKER = "latest_checkpointed_iteration.txt"


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class SmallEngine(MegatronEngine):
    """The small engine of this module. A batch is only a position in the trainer's text."""

    def _init_device_mesh(self) -> None:
        initialize_parallel(dist.get_world_size())

    def initialize(self) -> None:
        self.trainer = Trainer(SPEC, dist.get_world_size(), "cpu")
        tensor_parallel.get_cuda_rng_tracker().states_ = {"some": torch.get_rng_state()}
        self.module = [Wrapped(self.trainer.model)]
        self.schedule = Scheduler()
        self.checkpoint_mananager = MegatronCheckpointManager(
            config=SimpleNamespace(model=SimpleNamespace(path="none")),
            checkpoint_config=self.checkpoint_config,
            model_config=None,
            transformer_config=self.trainer.model.config,
            role="actor",
            model=self.module,
            arch="LlamaForCausalLM",
            hf_config=LlamaConfig(),
            param_dtype=torch.float32,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=Optimizer(self.trainer),
            optimizer_scheduler=self.schedule,
            use_distributed_optimizer=False,
            use_checkpoint_opt_param_scheduler=True,
            use_dist_checkpointing=True,
        )

    def is_mp_src_rank_with_outputs(self) -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        self.trainer.cursor = int(data["input_ids"].values().sum())
        torch.manual_seed(
            self.trainer.cursor
        )  # verl's loader draws one number more after a restart
        loss = self.trainer.train_step()
        return {"loss": [loss], "metrics": {}, "model_output": {}}

    def optimizer_zero_grad(self) -> None:
        """Does nothing: ``train_step`` does it."""

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        with cpu_devices():  # for stock saves
            super().save_checkpoint(*arguments, **keywords)

    def lr_scheduler_step(self) -> float:
        self.schedule.at += 1
        return 0.1

    def to(self, *arguments: Any, **keywords: Any) -> None:
        """Does nothing: the engine stays where it is."""


def fingerprint(engine: Any) -> list[float]:
    """The parameters, the optimizer and the generator of this rank, in a few numbers."""
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    numbers = [float(_local(p).double().sum()) for m in modules for p in m.parameters()]
    optimizer = engine.trainer.optimizer if hasattr(engine, "trainer") else engine.optimizer
    for state in optimizer.state.values():
        numbers += [float(_local(state["exp_avg"]).double().sum()), float(state["step"])]
    return [*numbers, float(torch.get_rng_state().double().sum())]


def _local(tensor: Any) -> Any:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Rank:
    """A rank: its run and its notes."""

    def __init__(self, what: dict[str, Any], rank: int) -> None:
        self.what, self.rank, self.place = what, rank, Path(what["place"])
        self.notes: dict[str, Any] = {"seen": [], "at": [], "warned": [], "resumed": None}

    def run(self) -> None:
        what = self.what
        os.environ.update({"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)})
        os.environ["WORLD_SIZE"] = str(what["size"])
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})  # verl asks; unused
        os.environ["VERL_ENGINE_DEVICE"] = "cpu" if what["engine"] == "megatron" else "cuda"
        verl_distributed.initialize_global_process_group = self._initialize
        self._note_batches()
        os.chdir(self.place)
        sys.argv = ["sft", *what["words"]]
        if what.get("hold"):
            hold_writers(Path(what["hold"]), self.rank)
        if what.get("verify_slowly"):
            verify_slowly(self.notes)
        if what["stock"]:
            sft_trainer.main()
        elif what.get("options") is not None:
            sft_trainer.SFTTrainer = install(sft_trainer.SFTTrainer, **what["options"])
            sft_trainer.main()
        else:
            ours.main()

    def _initialize(self) -> None:
        what = self.what
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(what["store"], what["size"]),
            rank=self.rank,
            world_size=what["size"],
            timeout=timedelta(seconds=60),
        )

    def _note_batches(self) -> None:
        """Note every batch, and the state of the disk then, beneath anything that is installed."""
        kind, rank = sft_trainer.SFTTrainer, self
        stock_fit, stock_train = kind.fit, sft_trainer.TrainingWorker.train_batch

        def train_batch(worker: Any, data: Any) -> Any:
            rank.before_batch(data)
            output = stock_train(worker, data)  # loads the optimizer
            rank.notes["state"] = fingerprint(worker.engine)
            return output

        def fit(trainer: Any) -> Any:
            rank.notes["resumed"] = trainer.resume_global_step
            rank.notes["began"] = rank.notes["state"] = fingerprint(trainer.engine)
            if rank.what.get("failing") == rank.rank:
                fail_in_save(trainer.engine)
            return stock_fit(trainer)

        kind.fit, sft_trainer.TrainingWorker.train_batch = fit, train_batch

    def before_batch(self, data: Any) -> None:
        root = self.place / "root"
        tracker = root / TRACKER
        steps = sorted(p.name for p in root.glob("global_step_*"))
        number = len(self.notes["seen"]) + 1
        self.notes["seen"].append(int(data["input_ids"].values().sum()))
        self.notes["at"].append([tracker.read_text().strip() if tracker.exists() else "", steps])
        self.save()
        if number == self.what.get("open_at"):
            Path(self.what["hold"]).touch()
        if number == self.what.get("wait_at"):
            (self.place / f"waits-{self.rank}").touch()
            signal.pause()  # to be killed

    def save(self) -> None:
        (self.place / f"rank-{self.rank}.json").write_text(json.dumps(self.notes))


def fail_in_save(engine: Any) -> None:
    """This rank cannot write the last of verl's files, at the first save."""
    name = (
        "checkpoint_mananager" if hasattr(engine, "checkpoint_mananager") else "checkpoint_manager"
    )
    manager = getattr(engine, name)._manager
    stock, failed = manager.save_checkpoint, []

    def save_checkpoint(**arguments: Any) -> None:
        stock(**arguments)
        if not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")

    manager.save_checkpoint = save_checkpoint


def verify_slowly(notes: dict[str, Any]) -> None:
    """Make verifying last until the ranks have heard of each other meanwhile; at most 60 s.

    Notes the files that this rank has read.
    """
    stock, exchange, exchanges = restoring.check_digests, GlooTransport.any_flags, [0]
    notes["verified"] = []

    def any_flags(transport: GlooTransport, flags: Any) -> list[bool]:
        exchanges[0] += 1
        return exchange(transport, flags)

    def check_digests(storage: Any, directory: str, files: Any) -> str:
        notes["verified"] += [f"{directory}/{file.name}" for file in files]
        enough, deadline = exchanges[0] + 3, time.monotonic() + 60
        while exchanges[0] < enough:
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks do not hear of each other")
            time.sleep(0.01)
        return stock(storage, directory, files)

    GlooTransport.any_flags = any_flags  # type: ignore[method-assign]
    restoring.check_digests = check_digests


def hold_writers(gate: Path, rank: int) -> None:
    """Writers of this rank wait until the file ``gate`` exists; at most 60 s.

    A file beside it, ``held-N``, has the pid of a writer of rank N that waits.
    """
    stock = GroupShare.write

    def write(share: GroupShare, storage: Any, location: str) -> Any:
        writing = gate.parent / f".held-{rank}"
        writing.write_text(str(os.getpid()))
        writing.rename(gate.parent / f"held-{rank}")
        deadline = time.monotonic() + 60
        while not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return stock(share, storage, location)

    GroupShare.write = write  # type: ignore[method-assign]
    GroupShare.portable = False  # type: ignore[assignment, method-assign]  # so it is forked


# --------------------------------------------------------------------------------------- serving


def life(what: dict[str, Any], number: int) -> int:
    """A rank's process; its exit status."""
    log = os.open(Path(what["place"], f"rank-{number}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    die_with_parent()
    rank, status = Rank(what, number), 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            rank.run()
        except BaseException as error:
            traceback.print_exc()
            rank.notes["raised"], status = f"{type(error).__name__}: {error}", 1
        rank.notes["warned"] = [
            str(w.message) for w in said if w.category.__module__.startswith("ck")
        ]
    rank.save()
    return status


def serve(connection: Connection) -> None:
    """Fork the ranks of one job, send their pids, and at the end their exit statuses."""
    what = connection.recv()
    pids = []
    for number in range(what["size"]):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os._exit(life(what, number))
        pids.append(pid)
    connection.send(pids)
    connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


if __name__ == "__main__":
    serve_for_ever(sys.argv[1], serve)
