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

from cluster import (  # noqa: E402  of tests/megatron, which only run.py puts on the path
    Cluster,
    ForkServer,
    states_of,
    steps_on_disk,
    tracked_step,
)

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
