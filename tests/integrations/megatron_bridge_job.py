"""The ranks' part: Megatron-Bridge's ``pretrain`` of a small GPT, by its own manager or by ours."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import forkserver
import megatron_bridge_cpu  # first: it stands in for what needs a GPU
from jobs import Here, Told
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as settings
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

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


def configured(root: str, last: int, **checkpoint: Any) -> Any:
    return settings.ConfigContainer(
        model=GPTModelProvider(
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


if __name__ == "__main__":
    forkserver.main()
