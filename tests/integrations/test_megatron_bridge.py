"""Megatron-Bridge's real ``pretrain``, on two CPU ranks over gloo, by its own manager and by ours."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not (
    find_spec("megatron") and find_spec("megatron.bridge")
):  # importing it needs a GPU's packages
    pytest.skip("megatron.bridge is not there", allow_module_level=True)

import torch  # noqa: E402
from cluster import (  # noqa: E402  of tests/megatron, which only run.py puts on the path
    Cluster,
    ForkServer,
    states_of,
    steps_on_disk,
    tracked_step,
)
from transformers import AutoModelForCausalLM  # noqa: E402

from ckptfsm.core.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.integration
JOB = Path(__file__).with_name("megatron_bridge_job.py")
TRAIN = "megatron_bridge_job.train"
POINTER = "latest_train_state.pt"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        # A process that forks has one thread: libraries of Bridge's start others.
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
        server = ForkServer(JOB)
    yield server
    server.close()


@pytest.fixture
def cluster(server: ForkServer, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(server, tmp_path / "jobs") as cluster:
        yield cluster


def test_stock_and_we_go_on_from_each_other_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a step of ours that Bridge cannot load, or one of Bridge's that is not adopted; counters,
    scheduler or random states that are lost; Bridge's own tracker, left behind and read first;
    ``most_recent_k`` that is not followed; a file of Bridge's that is missing in a step."""
    root = tmp_path / "root"

    def digests(last: int, ours: bool, place: Path = root) -> dict[str, str]:
        ranks = cluster.run(TRAIN, root=str(place), last=last, ours=ours, most_recent_k=2)
        assert ranks[0] == ranks[1]
        found: dict[str, str] = ranks[0]["digests"]
        return found

    whole = digests(9, False, tmp_path / "undisturbed")
    stock = digests(3, False)
    assert (root / POINTER).exists()
    ours = digests(7, True)
    assert not (root / POINTER).exists()
    assert tracked_step(root) == 7
    assert {step: state for step, state in states_of(root).items() if step > 3} == {
        6: "tracked",
        7: "tracked",
    }
    names = {path.name for path in (root / "iter_0000007").iterdir()}
    assert {"train_state.pt", "run_config.yaml", "metadata.json", "tokenizer"} <= names
    again = digests(9, False)
    assert {**stock, **ours, **again} == whole
    assert [min(map(int, each)) for each in (stock, ours, again)] == [0, 3, 7]
    assert {8, 9} <= set(steps_on_disk(root))


def test_a_checkpoint_of_ours_is_exported_and_transformers_loads_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Catches: a directory of ours that Bridge's export does not read; weights of another step."""
    described, values, to = (str(tmp_path / name) for name in ("hf", "values.pt", "out"))
    path = tmp_path / "root/iter_0000002"
    given = {"root": str(path.parent), "values": values}
    cluster.run("megatron_bridge_job.train_llama", described=described, **given)
    given = {"path": str(path), "step": 2, "to": to}
    [_] = cluster.run("megatron_bridge_job.export", ranks=1, described=described, **given)
    exported = f"{to}/step_0000002"
    model, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(told.values()), told
    wanted, found = in_names_of_llama(torch.load(values)), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def in_names_of_llama(megatron: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's parameters of two layers, as transformers has them."""
    found = {}
    for here, there in {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    }.items():
        found[f"{there}.weight"] = megatron[f"module.{here}.weight"]
    for layer in ("layers.0", "layers.1"):
        values = {
            name.removeprefix(f"module.decoder.{layer}."): value for name, value in megatron.items()
        }
        groups = values["self_attention.linear_qkv.weight"].reshape(2, 4, 8, 32)  # of two queries
        gate, up = values["mlp.linear_fc1.weight"].chunk(2)
        for name, value in {
            "self_attn.q_proj": groups[:, :2].reshape(32, 32),
            "self_attn.k_proj": groups[:, 2].reshape(16, 32),
            "self_attn.v_proj": groups[:, 3].reshape(16, 32),
            "self_attn.o_proj": values["self_attention.linear_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": values["mlp.linear_fc2.weight"],
            "input_layernorm": values["input_layernorm.weight"],
            "post_attention_layernorm": values["pre_mlp_layernorm.weight"],
        }.items():
            found[f"model.{layer}.{name}.weight"] = value
    return found


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"ckpt_format": "fsdp_dtensor"}, "use torch_dist"),
        ({"non_persistent_save_interval": 5}, "leave it out"),
        ({"also_save_hf_checkpoint": True}, "export after"),
        ({"most_recent_k": 0}, "would delete every checkpoint"),
        ({"save": "msc://profile/run"}, "is no directory"),
    ],
)
def test_what_is_not_saved_here_is_refused(
    setting: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a setting that is kept in silence and means something else."""
    import megatron_bridge_cpu  # noqa: F401  before Bridge

    from ckptfsm.integrations.megatron_bridge import BridgeCheckpoints

    plain = {
        "ckpt_format": "torch_dist",
        "non_persistent_save_interval": None,
        "non_persistent_ckpt_type": None,
        "also_save_hf_checkpoint": False,
        "most_recent_k": -1,
        "save": str(tmp_path),
    }
    with pytest.raises(ConfigError, match=said):
        BridgeCheckpoints(SimpleNamespace(**{**plain, **setting}))
    assert not list(tmp_path.iterdir())
