"""The ranks' part: Megatron-Bridge's ``pretrain`` of a small GPT, by its own manager or by ours."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import forkserver
import megatron_bridge_cpu  # first: it stands in for what needs a GPU
import torch
from jobs import Here, Told
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import config as settings
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from transformers import LlamaConfig

from ckptfsm.integrations.hugging_face import HuggingFaceSettings, export_checkpoint

OURS = "ckptfsm.integrations.megatron_bridge.BridgeCheckpoints"
LENGTH = 16
ITERATIONS = 9  # on which the order of the samples depends
_NO_FUSION = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
)


def configured(root: str, last: int, model: Any = None, **checkpoint: Any) -> Any:
    return settings.ConfigContainer(
        model=model
        or GPTModelProvider(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=2,
            seq_length=LENGTH,
            vocab_size=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            bf16=False,
            **dict.fromkeys(_NO_FUSION, False),
        ),
        train=settings.TrainingConfig(
            train_iters=ITERATIONS,
            exit_interval=last,
            global_batch_size=4,
            micro_batch_size=2,
            eval_iters=0,
        ),
        optimizer=settings.OptimizerConfig(
            optimizer="adam", lr=0.01, min_lr=0.01, use_distributed_optimizer=False, bf16=False
        ),
        scheduler=settings.SchedulerConfig(
            lr_decay_iters=100,
            lr_decay_style="constant",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            override_opt_param_scheduler=True,
        ),
        dataset=settings.MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=LENGTH,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=settings.LoggerConfig(log_interval=100),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        ddp=settings.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dist=settings.DistributedInitConfig(distributed_backend="gloo"),
        rng=settings.RNGConfig(seed=1),
        checkpoint=settings.CheckpointConfig(
            save=root, load=root, save_interval=2, ckpt_format="torch_dist", **checkpoint
        ),
    )


class Watched:
    """Bridge's own forward step, and what the parameters were before each iteration."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def __call__(
        self, state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> Any:
        found = hashlib.sha256()
        for name, value in sorted(model.named_parameters()):
            found.update(name.encode() + value.detach().numpy().tobytes())
        self.digests[state.train_state.step] = found.hexdigest()
        return forward_step(state, data_iterator, model, return_schedule_plan)


def train(here: Here, root: str, last: int, ours: bool, **checkpoint: Any) -> Told:
    """Run ``pretrain`` once: load from ``root``, train, and save into it."""
    here.join()
    register_allowed_target_prefix("ckptfsm")
    watched = Watched()
    manager = OURS if ours else None
    given = {"async_save": ours, "custom_manager_class": manager, **checkpoint}
    with megatron_bridge_cpu.without_cuda(), contextlib.suppress(SystemExit):
        pretrain(configured(root, last, **given), watched)
    return {"digests": watched.digests}


def train_llama(here: Here, root: str, described: str, values: str) -> Told:
    """Train and save a tiny Llama, whose configuration for transformers goes to ``described``, and its
    parameters to ``values``."""
    here.join()
    register_allowed_target_prefix("ckptfsm")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    more = {
        "seq_length": LENGTH,
        "transformer_layer_spec": local_layer_spec,
        "bf16": False,
    }
    for name, value in {**dict.fromkeys(_NO_FUSION, False), **more}.items():
        setattr(provider, name, value)
    trained: list[Any] = []

    def forward(
        state: GlobalState, data: Any, model: Any, return_schedule_plan: bool = False
    ) -> Any:
        trained[:] = [model]
        return forward_step(state, data, model, return_schedule_plan)

    given = {"async_save": True, "custom_manager_class": OURS}
    with megatron_bridge_cpu.without_cuda(), contextlib.suppress(SystemExit):
        pretrain(configured(root, 2, provider, **given), forward)
    if here.rank == 0:
        config.save_pretrained(described)
        torch.save({k: v.detach() for k, v in trained[0].named_parameters()}, values)
    return {}


def export(here: Here, path: str, step: int, to: str, described: str) -> Told:
    """What the job does, in a process without a process group."""
    given = HuggingFaceSettings(to=to, model=described)
    with megatron_bridge_cpu.without_cuda():
        return {"said": export_checkpoint(Path(path), step, given)}


if __name__ == "__main__":
    forkserver.main()
