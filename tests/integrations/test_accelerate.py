"""The real Accelerate on two CPU ranks over gloo, with the drop-in and without.

Every run must go through the very parameters of a run of stock code that never stopped: model,
optimizer, learning rate, a registered object and each rank's random numbers come back bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("accelerate"):
    pytest.skip("accelerate is not installed", allow_module_level=True)

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402
from accelerate_job import Progress  # noqa: E402
from accelerate_ranks import Jobs, run  # noqa: E402

from ckptfsm.core.errors import (  # noqa: E402
    ConfigError,
    DamagedRoot,
    RecoveryWarning,
    ReshardWarning,
)
from ckptfsm.core.retention import LatestN  # noqa: E402
from ckptfsm.integrations.accelerate import install  # noqa: E402

pytestmark = pytest.mark.integration
JOB = "accelerate_job.train"
LAST = 4


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The root of a run of stock code, and what each rank went through; made once for each kind."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            arguments = {"project": str(place / "project"), "last": LAST, "kind": kind}
            whole = run(place / "job", JOB, 2, ours=False, resume=False, **arguments)
            made[kind] = place / "project/checkpoints", whole
        return made[kind]

    return of


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("checkpoint_*"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_stock_and_ours_resume_each_other_bit_for_bit(
    tmp_path: Path, stock: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    before, whole = stock(kind)
    root = tmp_path / "project/checkpoints"
    shutil.copytree(before / "checkpoint_0", root / "checkpoint_0")
    jobs = Jobs(tmp_path, JOB, {"project": str(tmp_path / "project"), "kind": kind}, whole)
    jobs(begin=1, last=3, fails_in=2 if kind == "ddp" else 0)  # adopts what stock wrote
    jobs(begin=3, last=LAST, ours=False)  # stock, by the path
    assert names(root) == [f"checkpoint_{number}" for number in range(LAST)]


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(
    tmp_path: Path, stock: Callable[[str], tuple[Path, Any]]
) -> None:
    """With ``total_limit=1``: the old one is there until the new one is whole."""
    root = tmp_path / "project/checkpoints"
    arguments = {"project": str(tmp_path / "project"), "total_limit": 1}
    jobs = Jobs(tmp_path, JOB, arguments, stock("ddp")[1])
    jobs.killed_in(2)
    assert names(root) == ["checkpoint_0"]
    jobs(begin=1, last=3)
    assert names(root) == ["checkpoint_2"]


# ------------------------------------------------------------------------------------- one process


def numbered(project: Path) -> Accelerator:
    """A new process's accelerator, as far as naming is concerned."""
    made = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(project), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    made.prepare(torch.nn.Linear(2, 2))
    return made


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    """Stock begins again at 0: what it saves after a restart is deleted as the oldest, and the next
    restart resumes from before it."""
    for ours, left in (
        (False, ["checkpoint_0", "checkpoint_3"]),
        (True, ["checkpoint_3", "checkpoint_4"]),
    ):
        project = tmp_path / str(ours)
        for saves in (4, 1):
            accelerator = numbered(project)
            with install(accelerator) if ours else nullcontext():
                if saves == 1:
                    accelerator.load_state()
                for _ in range(saves):
                    accelerator.save_state()
        assert names(project / "checkpoints") == left


@pytest.fixture
def accelerator(tmp_path: Path) -> Accelerator:
    made = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=str(tmp_path)))
    model = torch.nn.Linear(2, 2)
    made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return made


def test_directories_that_the_trainer_names_itself(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    root = tmp_path / "out"
    with install(accelerator, root, layout="hf", retention=LatestN(1)):
        assert accelerator.load_state() is None  # nothing is there
        for step in (10, 20):
            path = accelerator.save_state(str(root / f"checkpoint-{step}"))
            assert Path(path, "optimizer.bin").exists()
        with pytest.raises(ConfigError, match="output_dir") as refused:
            accelerator.save_state(str(root / "epoch_1"))
        assert refused.value.facts["key"] == "output_dir"
        assert accelerator.load_state() == 20
    assert sorted(p.name for p in root.glob("checkpoint-*")) == ["checkpoint-20"]
    assert accelerator.save_state.__func__ is Accelerator.save_state


def test_a_save_beside_the_training_is_waited_for(accelerator: Accelerator, tmp_path: Path) -> None:
    with install(accelerator, tmp_path / "out", sync=False):
        for number in (1, 2):
            accelerator.save_state(str(tmp_path / f"out/checkpoint_{number}"))
        assert accelerator.load_state() == 2
        accelerator.save_state(str(tmp_path / "out/checkpoint_3"))
    assert names(tmp_path / "out") == [f"checkpoint_{number}" for number in (1, 2, 3)]


def test_a_changed_file_is_not_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    with install(accelerator, tmp_path / "out"):
        path = Path(accelerator.save_state(str(tmp_path / "out/checkpoint_1")))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with (
        install(accelerator, tmp_path / "out"),
        pytest.raises(DamagedRoot, match=r"model\.safetensors"),
    ):
        accelerator.load_state()


def test_missing_random_states_are_warned_of(accelerator: Accelerator, tmp_path: Path) -> None:
    """Stock code only logs that it goes on with other random numbers."""
    with install(accelerator, tmp_path / "out"):
        accelerator.save_state(str(tmp_path / "out/checkpoint_1"))
        accelerator.state._shared_state["process_index"] = 1
        try:
            with pytest.warns(ReshardWarning, match="random_states_1"):
                accelerator.load_state()
        finally:
            accelerator.state._shared_state["process_index"] = 0


def test_a_stock_save_that_was_cut_off_before_its_last_file_is_passed_over(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Registered objects come after the random states. Stock code raises RuntimeError."""
    accelerator.register_for_checkpointing(Progress())
    for step in (1, 2, 3):
        accelerator.save_state(str(tmp_path / f"out/checkpoint_{step}"))
    for step in (2, 3):
        (tmp_path / f"out/checkpoint_{step}/custom_checkpoint_0.pkl").unlink()
    with install(accelerator, tmp_path / "out"):
        with pytest.warns(RecoveryWarning, match="step 3 has 0 of the 1"):
            assert accelerator.load_state() == 1
        accelerator.register_for_checkpointing(Progress())  # which no checkpoint has
        with pytest.raises(RuntimeError, match="custom checkpoints"):
            accelerator.load_state()
        assert names(tmp_path / "out") == ["checkpoint_1"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "root"),
        ({"root": "r", "engine": "eager"}, "engine"),
        ({"root": "r", "exchange_every": 2}, "exchange_every"),
        ({"root": "r", "on_failure": 2}, "on_f"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    accelerator: Accelerator, tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    if "root" in settings:
        settings = {**settings, "root": tmp_path / "out"}
    with pytest.raises(ConfigError) as refused:
        install(accelerator, **settings)
    assert str(refused.value.facts["key"]).startswith(key)


def test_files_of_each_node_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(ConfigError, match="save_on_each_node"):
        install(accelerator, tmp_path / "out")
