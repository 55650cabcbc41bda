"""verl's drop-in in the driver, without verl: a trainer with verl's calls, workers without torch.

``tests/integrations/test_verl.py`` has the real trainers and managers of verl, where verl is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from groups import Group

from ckptfsm.core.errors import (
    ConfigError,
    PollMissingWarning,
    SaveFailed,
    SaveFailedWarning,
    UntriedVersionWarning,
)
from ckptfsm.core.events import Event
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.parts import AttemptId
from ckptfsm.integrations.verl import install, trainer
from ckptfsm.integrations.verl.ranks import is_within_an_epoch
from ckptfsm.integrations.verl.trainer import attach
from ckptfsm.ranks.tickets import Ticket

SIZES = {"actor": 2, "critic": 1}


class Config(dict[str, Any]):
    """Keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class WorkerGroup:
    """A role as verl has it. ``broken``: its workers raise when they are to save."""

    def __init__(self, role: str, root: Path) -> None:
        self.group = Group(role, SIZES[role], root)
        self.workers = [self] * SIZES[role]
        self.broken = False

    def save_checkpoint(self, path: str, ticket: Ticket, step: int, **more: Any) -> None:
        if self.broken:
            raise RuntimeError("made up: a worker is gone")
        states = [{"w": b"%d" % step}] * self.group.size
        self.group.write(ticket, states)

    def poll(self, failed: tuple[AttemptId, ...]) -> list[Event]:
        return self.group.poll(failed)


@dataclass(frozen=True, eq=False)
class Answered:
    """A call that was answered at once. See ``ckptfsm.integrations.verl.Calls``."""

    value: list[Event]


class AtOnce:
    def submit(self, worker: Any, function: Callable[..., Any], *arguments: Any) -> Answered:
        return Answered([] if function is attach else worker.poll(arguments[1]))

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return calls

    def result(self, call: Answered) -> list[Event]:
        return call.value


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"position": 1}


class Trainer:
    """The parts of verl's trainer that ``install`` looks for, and verl's way to load."""

    use_critic = True
    checkpoints: Any

    def __init__(self, root: Path, *, async_save: bool = True, **more: Any) -> None:
        values = {
            "default_local_dir": str(root),
            "default_hdfs_dir": None,
            "resume_mode": "auto",
            "resume_from_path": None,
            **more,
        }
        actor = Config(checkpoint=Config(async_save=async_save))
        rollout = Config(actor=actor)
        self.config = Config(trainer=Config(values), actor_rollout_ref=rollout)
        self.actor_rollout_wg = WorkerGroup("actor", root)
        self.critic_wg = WorkerGroup("critic", root)
        self.train_dataloader = Loader()
        self.global_steps = 0

    def _save_checkpoint(self) -> None:
        """As verl does."""

    def _load_checkpoint(self) -> None:
        tracker = Path(self.config.trainer.default_local_dir, TRACKER)
        if tracker.exists():
            self.global_steps = int(tracker.read_text())

    def _start_profiling(self, profiles: bool) -> None:
        """As verl does."""

    def fit(self) -> None:
        self._load_checkpoint()
        for _ in range(4):
            self._start_profiling(False)
            self.save()

    def save(self) -> None:
        self.global_steps += 1
        self._save_checkpoint()


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the trainers of one run. ``settings`` are those of ``install``."""
    monkeypatch.setattr(trainer, "_dumped", lambda state: json.dumps(state).encode())  # no torch
    began = []

    def make(settings: dict[str, Any] | None = None, **more: Any) -> Any:
        installed: Any = install(
            Trainer(tmp_path / "root", **more),
            extra_parts=lambda _: {},
            calls=AtOnce(),
            **(settings or {}),
        )
        began.append(installed)
        return installed

    yield make
    for one in began:
        one.checkpoints.abandon()


def steps(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("global_step_*"))


def tracked(root: Path) -> str:
    return (root / TRACKER).read_text().strip()


def test_the_loop_polls_and_its_end_waits(start: Start, tmp_path: Path) -> None:
    """Catches: verl #6067, #7363, #7952: asynchronous saves that are never polled, or the last of a
    run."""
    began = start(max_actor_ckpt_to_keep=2, max_critic_ckpt_to_keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PollMissingWarning)
        began.fit()
    assert tracked(tmp_path / "root") == "4"
    assert steps(tmp_path / "root") == ["global_step_3", "global_step_4"]


def test_a_loop_that_does_not_poll_is_told(start: Start) -> None:
    """Catches: verl #4253: a save is never finalized, without a word."""
    began = start()
    began.save()
    with pytest.warns(PollMissingWarning, match="poll\\(\\) was not called"):
        began.save()


def test_of_two_counts_the_larger_one_counts(start: Start, tmp_path: Path) -> None:
    """Catches: a step that one role was to keep and that goes because of the other's count."""
    with pytest.warns(UserWarning, match="cannot both"):
        began = start(async_save=False, max_actor_ckpt_to_keep=1, max_critic_ckpt_to_keep=2)
        for _ in range(3):
            began.save()
    assert steps(tmp_path / "root") == ["global_step_2", "global_step_3"]


def test_F18_a_torn_tracker_is_mended_before_verl_loads(start: Start, tmp_path: Path) -> None:
    """Catches: verl's code on a torn tracker: ``ValueError``, or training from scratch."""
    began = start(async_save=False)
    began.save()
    began.checkpoints.close()
    (tmp_path / "root" / TRACKER).write_text("")
    again = start()
    again._load_checkpoint()
    assert again.global_steps == 1


def test_I10_a_role_whose_workers_are_gone_fails_the_save(start: Start, tmp_path: Path) -> None:
    """Catches: half a step that passes for a checkpoint, or is waited for until its deadline."""
    began = start({"writer_timeout_s": 10.0}, async_save=False)
    began.save()
    began.critic_wg.broken = True
    with pytest.raises(SaveFailed, match="the workers of 'critic'"):
        began.save()
    assert (tracked(tmp_path / "root"), steps(tmp_path / "root")) == ("1", ["global_step_1"])


def test_training_goes_on_after_a_failed_save_if_it_is_to(start: Start) -> None:
    """Catches: ``on_failure="warn"``, which ends a training that saves synchronously all the same."""
    began = start({"writer_timeout_s": 10.0, "on_failure": "warn"}, async_save=False)
    began.critic_wg.broken = True
    with pytest.warns(SaveFailedWarning, match="the workers of 'critic'"):
        began.save()
    began.critic_wg.broken = False
    began.save()
    assert began.checkpoints.controller.all_steps() == [2]


def _own_save(trainer: Any) -> None:
    """The save of a recipe's trainer, with unknown content."""


def test_a_subclass_with_another_save_is_refused_when_it_is_made(tmp_path: Path) -> None:
    """Catches: a subclass that was made later, with a save that is silently not called."""
    ours: Any = install(Trainer, extra_parts=lambda _: {})
    own = {"_save_checkpoint": _own_save, "__module__": "a.recipe"}
    later = type("Later", (ours,), own)
    with pytest.raises(ConfigError, match=r"Later saves in its own way \(a.recipe\)"):
        later(tmp_path / "root")
    assert type("Same", (ours,), {})(tmp_path / "root").checkpoints is not None
    told: Any = install(later, extra_parts=lambda _: {})
    assert told(tmp_path / "root").checkpoints is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"writer_timeout": 5.0}, "unknown configuration key 'writer_timeout'; did you mean"),
        ({"sync": True}, "a controller cannot save synchronously"),
        ({"layout": "megatron"}, "verl's layout is 'verl'"),
        ({"on_failure": 3}, "on_failure is 'raise' or 'warn'"),
        ({"save_interval_steps": 5}, "save_interval_steps has no effect here: verl decides when"),
        ({"preemption_signals": ["SIGTERM"]}, "preemption_signals has no effect here"),
        ({"reshard_drops": ()}, "reshard_drops has no effect here: verl's own code loads"),
    ],
)
def test_a_setting_that_is_none_is_refused_at_once(settings: dict[str, Any], said: str) -> None:
    """Catches: a typing error that is told once a cluster was set up."""
    with pytest.raises(ConfigError, match=said):
        install(Trainer, extra_parts=lambda _: {}, **settings)


@pytest.mark.parametrize("options", [{}, {"extra_parts": lambda _: {}}])
def test_the_sft_trainer_of_ray_is_refused_with_a_way_out(options: dict[str, Any]) -> None:
    """Catches: a trainer that takes the installation, and saves as ever; advice that does not help."""
    kind = type("SFTTrainer", (), {"__module__": "verl.trainer.sft_trainer_ray"})
    with pytest.raises(ConfigError, match="not supported: .*-m ckptfsm.integrations.verl.sft"):
        install(kind, **options)


def test_rays_handle_of_a_class_is_no_trainer(tmp_path: Path) -> None:
    """Catches: an import that fails: Ray makes an object of a class when it is decorated."""
    ours: Any = install(Trainer, extra_parts=lambda _: {})
    later = type("Later", (ours,), {"_save_checkpoint": _own_save})
    handle: Any = type("Handle", (type("ActorClass", (), {"__module__": "ray.actor"}), later), {})
    assert handle.__new__(handle).checkpoints is None


class Callback:
    """verl's ``CheckpointCallback``: notes each call, and the step that the tracker names then."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[tuple[int, str, str]] = []

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **more: Any) -> None:
        assert trainer.checkpoints and more == {"async_save": False}
        self.told.append((global_step, Path(checkpoint_dir).name, tracked(self.root)))
        if global_step == 3:
            raise OSError("made up: the registry is away")


@pytest.mark.parametrize("async_save", [False, True])
def test_verls_callback_is_told_of_tracked_steps(
    start: Start, tmp_path: Path, async_save: bool
) -> None:
    """Catches: a callback that is told of a directory that may never be a checkpoint, or of
    nothing; its error, which is to end the training, swallowed."""
    began = start(async_save=async_save)
    began.checkpoint_callback = Callback(tmp_path / "root")
    told = began.checkpoint_callback.told
    began.save()
    assert len(told) == (0 if async_save else 1)
    began.checkpoints.poll(wait=True)
    began.save()
    began.checkpoints.poll(wait=True)
    assert told == [(1, "global_step_1", "1"), (2, "global_step_2", "2")]
    with pytest.raises(OSError, match="made up"):
        began.save()
        began.checkpoints.close()
    assert len(told) == 3 and tracked(tmp_path / "root") == "3"
    began.checkpoints.close()
    assert start().checkpoints.controller.latest_step() == 3, "the root was given back"


def test_verls_callback_is_not_told_of_rolled_back_steps(start: Start, tmp_path: Path) -> None:
    """Catches: a registry that gets a directory which is gone."""
    began = start(async_save=True)
    began.checkpoint_callback = Callback(tmp_path / "root")
    began.save()
    began.checkpoints.poll(wait=True)
    began.save()
    began.checkpoints.controller.wait_until_finished()
    began.checkpoints.controller.rollback(1)
    began.checkpoints.poll()
    assert [step for step, *_ in began.checkpoint_callback.told] == [1]


def test_verls_callback_is_told_once_of_a_step_that_was_saved_anew(
    start: Start, tmp_path: Path
) -> None:
    """Catches: two entries of a registry for one directory."""
    began = start(async_save=True)
    began.checkpoint_callback = Callback(tmp_path / "root")
    began.save()
    began.save()
    began.checkpoints.controller.wait_until_finished()
    began.checkpoints.controller.rollback(1)
    began.global_steps = 1
    began.config.actor_rollout_ref.actor["checkpoint"]["async_save"] = False
    began.save()
    assert [step for step, *_ in began.checkpoint_callback.told] == [1, 2]


def test_a_verl_that_was_never_tried_is_used_with_a_warning(monkeypatch):
    """Catches: a new release that is refused, or used without a word."""
    monkeypatch.setattr("ckptfsm.integrations.verl.trainer.installed", lambda name: "0.99.0")
    with pytest.warns(UntriedVersionWarning, match="verl 0.99.0 was never tried"):
        install(Trainer, extra_parts=lambda _: {})


@pytest.mark.parametrize(
    ("without", "run", "said"),
    [
        (
            "torch",
            "runpy.run_module('ckptfsm.integrations.verl.sft', run_name='__main__')",
            "torch",
        ),
        ("torch", "import ckptfsm.integrations.verl.rank_manager", "torch"),
        (
            "torch=2.1.0",
            "import ckptfsm.integrations.verl.sft",
            "torch 2.1.0 is too old: install 2.6",
        ),
        ("verl", "ckptfsm.integrations.verl.install_in_verl()", "verl"),
    ],
)
def test_a_missing_or_too_old_package_is_named(without: str, run: str, said: str) -> None:
    """Catches: a bare ModuleNotFoundError, which does not name the package to install."""
    name, _, version = without.partition("=")
    lines = f"""
        import runpy, sys, types
        import ckptfsm.integrations.verl
        from ckptfsm.core.errors import ConfigError
        sys.modules["{name}"] = None
        if "{version}":
            sys.modules["{name}"] = types.ModuleType("{name}")
            sys.modules["{name}"].__version__ = "{version}"
        try:
            {run}
        except ConfigError as error:
            print(error.message)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said in done.stdout, done.stderr
    assert version or "pip install 'ckptfsm[" in done.stdout


@pytest.mark.parametrize(
    ("step", "batches", "within"), [(3, 4, True), (4, 4, False), (0, 4, False), (3, 0, False)]
)
def test_an_epoch_has_batches_left(step: int, batches: int, within: bool) -> None:
    """Catches: an empty loader, at which a resume would divide by zero; an epoch that is over."""
    assert is_within_an_epoch(step, batches) == within
