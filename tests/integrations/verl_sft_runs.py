"""Starts the jobs of ``verl_sft_job``: a tiny model with a tokenizer, data, and the words of a run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pandas
import torch
from servers import LIMIT_S, Server
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", *NUMBERS]
STEPS_PER_EPOCH = 4
ENGINES = {
    "fsdp2": ["engine.strategy=fsdp2"],
    "megatron": [
        "engine=megatron",
        "optim=megatron",
        "engine.use_remove_padding=False",
        "engine.use_dist_checkpointing=True",
    ],
}


def make_model(place: Path, hidden: int = 16) -> None:
    """A Llama, by default of a few thousand parameters, and a tokenizer of a few words."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    turn = "{{ m['role'] }} {{ m['content'] }} "
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(place)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(place)


def make_data(path: Path) -> None:
    """Sixteen conversations, each of other words: four steps for batches of four."""
    rows = [[i % 10, (i + 1) % 10, i // 10, 3, 4] for i in range(16)]
    turns = [[NUMBERS[n] for n in row] for row in rows]
    messages = [
        [{"role": "user", "content": t[0]}, {"role": "assistant", "content": " ".join(t[1:])}]
        for t in turns
    ]
    pandas.DataFrame({"messages": messages}).to_parquet(path)


class SftServer(Server):
    """Forks jobs; with the model and the data that all of them have."""

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        make_model(self.model)
        make_data(directory / "data.parquet")
        super().__init__(
            directory,
            "verl_sft_job.py",
            {
                "VERL_PLATFORM": "cpu",
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
                "HYDRA_FULL_ERROR": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",  # freed memory is given back
            },
        )


class Run:
    """A job of two ranks. ``words`` are those of the command line."""

    def __init__(self, server: SftServer, place: Path, engine: str, **more: Any) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place = place
        settings = {
            "total_epochs": 2,
            "save_freq": 2,
            "max_ckpt_to_keep": "null",
            "resume_mode": "auto",
            **more.pop("trainer", {}),
        }
        words = [
            f"data.train_files={server.directory}/data.parquet",
            "data.train_batch_size=4",
            "data.micro_batch_size_per_gpu=2",
            "data.use_dynamic_bsz=False",
            "data.max_length=64",
            "data.num_workers=0",
            f"model.path={more.pop('model', server.model)}",
            "model.use_remove_padding=False",
            "model.enable_gradient_checkpointing=False",
            "+model.override_config.attn_implementation=eager",
            "trainer.logger=[console]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={place}/root",
            "optim.lr=1e-2",
            f"+checkpoint.async_save={more.pop('async_save', True)}",
            *(f"trainer.{name}={value}" for name, value in settings.items()),
            *ENGINES[engine],
        ]
        if engine != "megatron":
            words += ["engine.use_torch_compile=False", "+engine.mixed_precision.param_dtype=fp32"]
        what = {
            "place": str(place),
            "size": 2,
            "engine": engine,
            "stock": False,
            "store": str(place / f"store-{time.monotonic_ns()}"),
            "words": [*words, *more.pop("words", [])],
            **more,
        }
        self.connection = server.connect()
        self.connection.send(what)
        self.pids: list[int] = self._answer()

    def _answer(self) -> Any:
        assert self.connection.poll(LIMIT_S), f"it does not end: {self.logs()}"
        return self.connection.recv()

    def ended(self) -> list[int]:
        """Wait for all ranks: their exit statuses."""
        statuses: list[int] = self._answer()
        self.connection.close()
        return statuses

    def done(self) -> list[dict[str, Any]]:
        """Wait for all ranks: their notes, if all went well."""
        assert self.ended() == [0, 0], self.logs()
        return self.notes()

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads((self.place / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    def logs(self) -> str:
        return "\n".join(p.read_text()[-4000:] for p in sorted(self.place.glob("rank-*.log")))

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        assert self.ended() == [-signal.SIGKILL] * 2
