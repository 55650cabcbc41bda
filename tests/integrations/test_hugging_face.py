"""What the job of ``hugging_face`` writes: transformers' own ``from_pretrained`` is the judge."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("transformers") or not find_spec("accelerate"):
    pytest.skip("transformers is not installed", allow_module_level=True)

import torch  # noqa: E402
from accelerate.utils import merge_fsdp_weights  # noqa: E402
from accelerate_ranks import run  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from ckptfsm.integrations.hugging_face import (  # noqa: E402
    HuggingFaceSettings,
    export_checkpoint,
)

pytestmark = pytest.mark.integration


def test_transformers_loads_what_a_job_exported_from_fsdp2_bit_for_bit(tmp_path: Path) -> None:
    """Catches: a tensor that is not joined from the ranks' shards; a name or a file that transformers
    does not find; a tokenizer that is not there; a job that does not run as the page says."""
    to, values, described = tmp_path / "out", tmp_path / "values.pt", tmp_path / "described"
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(described)
    environment = {
        "CKPTFSM_HF_TO": str(to),
        "CKPTFSM_HF_MODEL": str(described),
        "CKPTFSM_HF_FILE_MB": "0.003",
    }
    given = {"root": str(tmp_path / "root"), "values": str(values), "environment": environment}
    run(tmp_path / "job", "hugging_face_job.train", 2, **given)
    exported = to / "step_0000002"
    assert len(list(exported.glob("*.safetensors"))) > 2
    model, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(told.values()), told
    wanted, found = torch.load(values), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype == torch.bfloat16
        assert torch.equal(found[name], value), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(exported)("one two")["input_ids"] == [1, 2]


def test_what_trainer_saved_under_fsdp2_is_exported_as_accelerate_merges_it(tmp_path: Path) -> None:
    """Catches: the directory of FSDP inside of a checkpoint of Trainer, which is read otherwise."""
    root = tmp_path / "out"
    arguments = {"root": str(root), "last": 1, "kind": "fsdp2", "resume": False}
    run(tmp_path / "job", "transformers_job.train", 2, **arguments)
    (tmp_path / "config.json").write_text("{}")
    settings = HuggingFaceSettings(
        to=str(tmp_path / "hf"), model=str(tmp_path), part="pytorch_model_fsdp_0"
    )
    export_checkpoint(root / "checkpoint-1", 1, settings)
    merge_fsdp_weights(str(root / "checkpoint-1/pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged/model.safetensors")
    found = load_file(tmp_path / "hf/step_0000001/model.safetensors")
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name], value) for name, value in merged.items())
