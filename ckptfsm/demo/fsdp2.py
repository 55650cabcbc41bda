"""A transformer of plain torch under FSDP2, with AdamW: bit-for-bit resumable, without megatron-core.

The trainer knows nothing about checkpoints on disk: it offers a state of DTensors and takes one back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptfsm import TrainingState
from ckptfsm.demo.corpus import VOCABULARY_SIZE, Corpus
from ckptfsm.demo.spec import DROPOUT, ModelSpec


class LanguageModel(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, spec.hidden_size)
        self.positions = nn.Embedding(spec.sequence_length, spec.hidden_size)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                spec.hidden_size,
                spec.heads,
                4 * spec.hidden_size,
                dropout=DROPOUT,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, VOCABULARY_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``[batch, seq, vocabulary]`` of the byte after each of ``tokens``, ``[batch, seq]``."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, is_causal=True)
        return self.head(self.norm(hidden))


class FsdpTrainer:
    """See ``AnyTrainer``. ``cursor`` is the global batch's position in the text, in bytes."""

    def __init__(self, spec: ModelSpec, device: torch.device | str) -> None:
        """Build model and optimizer on ``device``, sharded over all ranks; a collective."""
        self.spec = spec
        self.iteration = 0
        self.cursor = 0
        self._device = torch.device(device)
        self._place = dist.get_rank(), dist.get_world_size()
        self._corpus = Corpus()
        torch.manual_seed(spec.seed)  # alike on all ranks, each of which keeps its shard
        self.model = LanguageModel(spec).to(self._device)
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=spec.learning_rate)
        self._state = TrainingState(self.model, self.optimizer)
        torch.manual_seed(spec.seed + dist.get_rank())  # each rank drops units of its own

    def train_step(self) -> float:
        """Do an optimizer step on the next global batch; a collective over all ranks.

        Returns the mean loss in nats per byte, equal bit for bit on all ranks.
        """
        shape = self.spec.batch_size, self.spec.sequence_length
        tokens, labels, next_cursor = self._corpus.batch(self.cursor, shape, self._place)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.model(tokens.to(self._device))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.to(self._device).flatten())
        loss.backward()
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        self.optimizer.step()
        self.cursor = next_cursor
        self.iteration += 1
        return float(reported.item()) / dist.get_world_size()

    def sharded_state_dict(self) -> dict[str, Any]:
        """The complete training state: that of `TrainingState`, ``iteration`` and ``cursor``."""
        return {**self._state.state_dict(), "iteration": self.iteration, "cursor": self.cursor}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """See ``AnyTrainer``."""
        iteration, cursor = int(loaded["iteration"]), int(loaded["cursor"])
        self._state.load_state_dict(loaded)
        self.iteration, self.cursor = iteration, cursor
