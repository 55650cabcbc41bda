"""A real Megatron-core GPT and its training loop: tensor parallel over gloo, bit-for-bit resumable.

The trainer knows nothing about checkpoints on disk: it offers a sharded state dict and takes one back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import (
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ckptfsm.core.errors import ConfigError
from ckptfsm.demo.corpus import VOCABULARY_SIZE, Corpus
from ckptfsm.demo.spec import DROPOUT, ModelSpec, use_deterministic_kernels


def initialize_parallel(tensor_parallel: int) -> None:
    """Set up this process for `Trainer`: one thread, deterministic kernels, Megatron's groups.

    A collective of the default process group, which has a multiple of ``tensor_parallel`` ranks.
    """
    use_deterministic_kernels()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    # The inference tracker forks no CUDA generators: no other one works without a GPU.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


class Trainer:
    """Trains a byte-level GPT, one `train_step` at a time.

    ``iteration`` is the number of steps so far, ``cursor`` the global batch's position in the text, in
    bytes. Both are equal on all ranks.
    """

    def __init__(self, spec: ModelSpec, tensor_parallel: int, device: torch.device | str) -> None:
        """Build model and optimizer on ``device``, after `initialize_parallel`; a collective."""
        self.spec = spec
        self.iteration = 0
        self.cursor = 0
        self._device = torch.device(device)
        self._corpus = Corpus()
        # Alike on all ranks: tensor-parallel ones must draw equal masks for replicated activations.
        torch.manual_seed(spec.seed)
        model_parallel_cuda_manual_seed(spec.seed, inference_rng_tracker=True)
        self.model = _build_model(spec, tensor_parallel, self._device)
        _place_score_buffer(spec, tensor_parallel, self._device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=spec.learning_rate)
        _create_adam_state(self.optimizer)

    def train_step(self) -> float:
        """Do an optimizer step on the next global batch; a collective over all ranks.

        Returns the mean loss in nats per byte, equal bit for bit on all ranks.
        """
        shape = self.spec.batch_size, self.spec.sequence_length
        place = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        tokens, labels, next_cursor = self._corpus.batch(self.cursor, shape, place)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = _language_model_loss(self.model, tokens.to(self._device), labels.to(self._device))
        loss.backward()
        reported = loss.detach().clone()
        _average_over_data_parallel(reported)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                _average_over_data_parallel(parameter.grad)
        self.optimizer.step()
        self.cursor = next_cursor
        self.iteration += 1
        return float(reported.item())

    def sharded_state_dict(self) -> dict[str, Any]:
        """The complete training state as a Megatron ShardedStateDict, to save or to load into.

        Keys: ``model`` and ``optimizer`` (ShardedTensors over the live tensors, nothing is copied),
        ``optimizer_steps`` (Adam's step count per parameter id), ``rng_state``, ``iteration``,
        ``cursor``. ``rng_state`` is a ShardedObject of shape (pipeline, tensor) parallel size. Drop
        it to load a checkpoint of another tensor-parallel size: it does not reshard.
        """
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.state_dict()
        # Megatron needs sharded tensors of at least one dimension; Adam's step counts are scalars.
        steps = [int(state["step"]) for _, state in sorted(optimizer["state"].items())]
        parameters = get_param_id_to_sharded_param_map(model, self.model.parameters())
        optim_state_to_sharding_state(optimizer, parameters, exclude_keys=("step",))
        return {
            "model": model,
            "optimizer": optimizer,
            "optimizer_steps": steps,
            "rng_state": _shard_rng_state(self._device),
            "iteration": self.iteration,
            "cursor": self.cursor,
        }

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over the result of `dist_checkpointing.load(trainer.sharded_state_dict(), ...)`.

        Without ``rng_state`` the generators keep their present state: training continues, but not
        bit for bit as before. Raises KeyError for any other missing key, before any change.
        """
        model, optimizer = loaded["model"], dict(loaded["optimizer"])
        iteration, cursor = int(loaded["iteration"]), int(loaded["cursor"])
        optimizer["state"] = _with_steps(optimizer["state"], loaded["optimizer_steps"])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if "rng_state" in loaded:
            _restore_rng_state(loaded["rng_state"], self._device)
        self.iteration, self.cursor = iteration, cursor


def _build_model(spec: ModelSpec, tensor_parallel: int, device: torch.device) -> Any:
    """A GPTModel without any fused or GPU-only kernel; its weights are drawn on the CPU.

    With ``use_cpu_initialization`` each rank draws the full weights and keeps its slice, so the
    model does not depend on the tensor-parallel size.
    """
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.heads,
        tensor_model_parallel_size=tensor_parallel,
        hidden_dropout=DROPOUT,
        attention_dropout=DROPOUT,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=spec.sequence_length,
    )
    return model.to(device)


def _place_score_buffer(spec: ModelSpec, tensor_parallel: int, device: torch.device) -> None:
    """Give Megatron's attention its scratch buffer on ``device``, for at most a batch of ``spec``.

    Megatron 0.16 would allocate it on ``torch.cuda.current_device()``. Its content does not matter.
    """
    scores = spec.batch_size * spec.heads // tensor_parallel * spec.sequence_length**2
    buffer = parallel_state.get_global_memory_buffer().buffer
    buffer["mpu", torch.float32] = torch.zeros(scores, device=device)


def _create_adam_state(optimizer: torch.optim.Adam) -> None:
    """Create Adam's zero moments now, so that a fresh trainer has something to load into.

    A step with zero gradients at learning rate 0 does not change the bits of any parameter.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()  # the first real step is Adam's first


def _language_model_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of ``labels`` given ``tokens``, both int64 ``[batch, seq]``; a scalar."""
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    # Explicit causal mask [1, 1, seq, seq], True = hidden: Megatron's default lives on "cuda".
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    losses: Tensor = model(tokens, positions, hidden[None, None], labels=labels)
    return losses.mean()


def _average_over_data_parallel(value: Tensor) -> None:
    """Replace ``value`` by its mean over the data-parallel group, in place."""
    ranks = parallel_state.get_data_parallel_world_size()
    if ranks > 1:
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        value.div_(ranks)


def _shard_rng_state(device: torch.device) -> ShardedObject:
    """The generators' states of this rank: ``torch`` (CPU) and ``cuda`` (None on the CPU)."""
    on_gpu = device.type == "cuda"
    return ShardedObject(
        "rng_state",
        {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(device) if on_gpu else None,
        },
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _restore_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators from `_shard_rng_state`'s data; a state of an absent GPU is ignored."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _with_steps(
    moments: Mapping[int, Mapping[str, Tensor]], steps: list[int]
) -> dict[int, dict[str, Tensor]]:
    """Adam's per-parameter state: the loaded moments with their step counts put back."""
    if len(moments) != len(steps):
        raise ConfigError(
            "the checkpoint's step counts do not match its moments",
            parameters=len(moments),
            steps=len(steps),
        )
    return {
        index: {**moments[index], "step": torch.tensor(float(step))}
        for index, step in zip(sorted(moments), steps, strict=True)
    }
