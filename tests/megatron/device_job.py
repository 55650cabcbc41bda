"""A trainer of one rank on a device, which saves while it trains: a program of its own.

    python device_job.py TRAINER DEVICE ROOT LAST_STEP

``TRAINER`` is "gpt" (megatron-core: bf16, distributed optimizer), "fsdp2", or "offloaded" (the optimizer
lives in host memory that the writer shares). ``DEVICE`` is "cuda", or "cpu": there all memory of the
first two is taken for an accelerator's, and megatron-core is shown a stand-in for CUDA. It goes on from
the last checkpoint, saves every four steps, and tells in lines of JSON what it does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from devices import ReadyDevice  # noqa: E402

from ckptfsm import CheckpointManager, LatestN, TrainingState  # noqa: E402
from ckptfsm.dcp import checkpoint_manager  # noqa: E402
from ckptfsm.dcp.device_copies import DeviceCopies  # noqa: E402
from ckptfsm.demo.corpus import VOCABULARY_SIZE, Corpus  # noqa: E402
from ckptfsm.demo.fsdp2 import FsdpTrainer  # noqa: E402
from ckptfsm.demo.spec import ModelSpec, use_deterministic_kernels  # noqa: E402

EVERY = 4
SPEC = ModelSpec()


class Offloaded:
    """A model on a device, whose Adam and its copy of the weights live in host memory."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(SPEC.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Dropout()).to(device)
        self.on_host = torch.nn.Linear(300, 300)
        self.on_host.load_state_dict(self.model[0].state_dict())
        self.optimizer = torch.optim.Adam(self.on_host.parameters())
        self._state = TrainingState(self.on_host, self.optimizer)
        self._step()  # makes the moments
        self.inputs = torch.randn(64, 300).to(device)

    def _step(self) -> None:
        for host, there in zip(self.on_host.parameters(), self.model.parameters(), strict=True):
            host.grad = torch.zeros_like(host) if there.grad is None else there.grad.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for host, there in zip(self.on_host.parameters(), self.model.parameters(), strict=True):
                there.copy_(host)

    def train_step(self) -> float:
        self.model.zero_grad()
        loss = (self.model(self.inputs) - self.inputs).square().mean()
        loss.backward()
        self._step()
        return float(loss.item())

    def sharded_state_dict(self) -> dict[str, Any]:
        return {**self._state.state_dict(), "on_device": dict(self.model.state_dict())}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.model.load_state_dict(loaded["on_device"])
        self._state.load_state_dict(loaded)


class Gpt:
    """A GPT of megatron-core in bf16, with the distributed optimizer."""

    def __init__(self, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ckptfsm.demo.model import _create_adam_state

        parallel_state.initialize_model_parallel()
        torch.manual_seed(SPEC.seed)
        model_parallel_cuda_manual_seed(SPEC.seed, inference_rng_tracker=True)
        in_bf16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
        plain = ("masked_softmax_fusion", "gradient_accumulation_fusion", "apply_rope_fusion")
        config = TransformerConfig(
            num_layers=SPEC.layers,
            hidden_size=SPEC.hidden_size,
            num_attention_heads=SPEC.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            **dict.fromkeys(plain, False),
            **in_bf16,
        )
        layers, length = get_gpt_layer_local_spec(), SPEC.sequence_length
        self._gpt = GPTModel(config, layers, VOCABULARY_SIZE, length).to(device)
        parallel = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, parallel, Float16Module(config, self._gpt))
        how = OptimizerConfig(lr=SPEC.learning_rate, use_distributed_optimizer=True, **in_bf16)
        self.optimizer = get_megatron_optimizer(how, [self.model])
        self._adams = [each.optimizer for each in self.optimizer.chained_optimizers]
        for adam in self._adams:
            _create_adam_state(adam)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._metadata = {"distrib_optim_sharding_type": "dp_reshardable", "dp_cp_group": group}
        self._device, self._corpus = device, Corpus()
        self._cursor = self._steps = 0
        self._positions = torch.arange(length, device=device).expand(SPEC.batch_size, length)
        self._hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def train_step(self) -> float:
        shape = SPEC.batch_size, SPEC.sequence_length
        tokens, labels, self._cursor = self._corpus.batch(self._cursor, shape, (0, 1))
        self.model.zero_grad_buffer()
        losses = self.model(
            tokens.to(self._device),
            self._positions,
            self._hidden[None, None],
            labels=labels.to(self._device),
        )
        loss = losses.float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self._steps += 1
        return float(loss.item())

    def sharded_state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        how = self._metadata
        model = self._gpt.sharded_state_dict(metadata=how)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=how)
        if is_loading:
            self._count_apart()
        there = {"cursor": self._cursor, "steps": self._steps}
        return {"model": model, "optimizer": optimizer, **there}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self._gpt.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self._cursor, self._steps = loaded["cursor"], loaded["steps"]
        self._count_apart()

    def _count_apart(self) -> None:
        """Without Apex, megatron-core lets all parameters share a number of steps, and loads none."""
        for adam in self._adams:
            for state in adam.state.values():
                state["step"] = torch.tensor(float(self._steps))


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


def made(name: str, device: torch.device) -> Any:
    use_deterministic_kernels()
    if name == "fsdp2":
        return FsdpTrainer(SPEC, device)
    return {"gpt": Gpt, "offloaded": Offloaded}[name](device)


def train(name: str, device: torch.device, root: Path, last: int) -> None:
    trainer = made(name, device)
    with CheckpointManager(root, retention=LatestN(2), on_failure="raise") as manager:
        template = {"is_loading": True} if name == "gpt" else {}
        restored = manager.restore(trainer.sharded_state_dict(**template))
        if restored is not None:
            trainer.load_state_dict(restored.state)
        begin = 0 if restored is None else restored.step
        tell(restored=begin)
        for each in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
            manager.attach(getattr(each, "optimizer", each))  # the one of torch inside
        if name == "offloaded":
            tell(shared=manager.share(trainer.optimizer))
        for step in range(begin + 1, last + 1):
            tell(step=step, loss=trainer.train_step().hex())
            if step % EVERY == 0:
                manager.save(step, trainer.sharded_state_dict())
                tell(saving=step)
            manager.poll()
        manager.wait_until_finished()
        tell(tracked=manager.latest_step())


def main(name: str, place: str, root: str, last: str) -> None:
    on_gpu = place == "cuda"
    with contextlib.ExitStack() as stack:
        if on_gpu:
            torch.cuda.set_device(0)
        elif name != "offloaded":
            checkpoint_manager.DeviceCopies = partial(DeviceCopies, ReadyDevice().find)
        if not on_gpu and name == "gpt":
            sys.path.append(str(HERE.parent / "integrations"))
            import megatron_lm_cpu

            stack.enter_context(megatron_lm_cpu.without_cuda())
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        train(name, torch.device(place), Path(root), int(last))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
