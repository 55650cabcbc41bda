"""A rank's training of a tiny Llama in bfloat16 under FSDP2, whose checkpoints a job exports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate_job import TIMES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfsm import CheckpointManager, Job, TrainingState

COMMAND = "ckptfsm.integrations.hugging_face:export"


def train(rank: int, *, root: str, values: str, environment: dict[str, str]) -> dict[str, Any]:
    """Save step 2, and what the model then has into ``values``; wait for the export."""
    dist.init_process_group("gloo")
    # 25 rows do not divide evenly among the ranks.
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=25,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if rank == 0:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(environment["CKPTFSM_HF_MODEL"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainingState(model, optimizer)
    job = Job(name="hf", command=COMMAND, environment=environment, backoff_s=0.1)
    with CheckpointManager(root, on_tracked=[job], jobs_drain_s=90.0, **TIMES) as ckpts:
        for step in (1, 2):
            tokens = torch.randint(0, 32, (2, 8))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            if step == 2:
                ckpts.save(step, state.state_dict()).wait()
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(full, values)
    dist.destroy_process_group()
    return {}
