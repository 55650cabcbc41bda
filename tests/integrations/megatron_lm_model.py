"""A small GPT and the call of ``pretrain``: the part of a training script that is the user's.

Works with ``megatron.training`` of a clone and of the megatron-core package, which has no script. Newer
trainers take their configuration as an object, older ones read the command line themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def build(
    pre_process: bool = True, post_process: bool = True, vp_stage: Any = None, **groups: Any
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=groups.pop("config", None) or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        **groups,
    )


def forward(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """A forward step of ``pretrain``: the losses of a batch, and the function that sums them up."""
    batch = next(batches)
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, summed


def summed(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def run(data: Callable[..., Any], model: Callable[..., Any], step: Callable[..., Any]) -> None:
    """Run ``pretrain`` with the arguments of ``sys.argv``."""
    given: dict[str, Any] = {
        "train_valid_test_dataset_provider": data,
        "model_provider": model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:  # since 0.18
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        given["cfg_container"] = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(**given)
