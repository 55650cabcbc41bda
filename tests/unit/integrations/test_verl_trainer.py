"""The checkpoints of a trainer of verl, without verl and Ray: a trainer of the few names that count."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeDriver, fake_ports
from groups import SETTINGS

from ckptfsm.core.config import CheckpointConfig, make_config
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    ManagerClosed,
    RankInterrupted,
    SaveFailed,
    SaveFailedWarning,
)
from ckptfsm.core.jobs import Copy, Job
from ckptfsm.core.retention import LatestN
from ckptfsm.integrations.verl import trainer as trainer_module
from ckptfsm.integrations.verl.trainer import Checkpoints, Options, attach, copies_of
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.group_worker import BaseGroupWorker


class Conf(dict):
    """A configuration as verl's: keys are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Direct:
    """Calls of a worker in this process. ``settings`` are those that it was attached with."""

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []

    def submit(self, worker: BaseGroupWorker, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is attach:
            self.settings.append(arguments[2])
            return None
        return tuple(worker.poll(arguments[1]))

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return list(calls)

    def result(self, call: Any) -> Any:
        return call


class Role:
    """verl's worker group of one worker, which forks its writer."""

    def __init__(self, root: Path) -> None:
        self.workers = [BaseGroupWorker(fake_ports(root, driver=FakeDriver(0)))]
        self.said: list[Any] = []

    def save_checkpoint(self, directory: str, ticket: Any, step: int, **ignored: Any) -> None:
        self.workers[0].write(ticket, {"w": step})  # reported at the next poll


class Run:
    """Trainers of one root. ``there`` is a place for copies."""

    def __init__(self, place: Path) -> None:
        self.root, self.there = place / "root", place / "there"
        self.there.mkdir()
        self.begun: list[Checkpoints] = []
        self.calls = Direct()

    def start(
        self,
        settings: Any = SETTINGS,
        hooks: Any = (),
        **config: Any,
    ) -> Checkpoints:
        named = {"default_local_dir": str(self.root), "default_hdfs_dir": None, **config}
        actor = {"checkpoint": {"async_save": True}}
        trainer = SimpleNamespace(
            config=SimpleNamespace(
                trainer=Conf(named), actor_rollout_ref=SimpleNamespace(actor=actor)
            ),
            actor_rollout_wg=Role(self.root),
            global_steps=0,
            train_dataloader=SimpleNamespace(state_dict=dict),
        )
        options = Options(None, self.calls, settings, hooks)
        self.begun.append(Checkpoints(trainer, options))
        return self.begun[-1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(trainer_module, "_dumped", repr_of)  # torch's takes seconds to import
    run = Run(tmp_path)
    yield run
    for checkpoints in run.begun:
        checkpoints.abandon()


def repr_of(state: Any) -> bytes:
    return repr(state).encode()


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints._trainer.global_steps = step
    checkpoints.save()


def test_hooks_hear_of_a_save(run: Run):
    """Catches: metrics that stay empty under verl."""
    heard: list[Any] = []
    checkpoints = run.start(hooks=[heard.append])
    save(checkpoints, 1)
    checkpoints.poll(wait=True)
    assert [record.dest.value for record in heard][-1] == "tracked"


def test_jobs_run_on_what_verl_saves(run: Run):
    """Catches: jobs that are taken from the settings and never run under verl."""
    job = Job(name="list", command=("sh", "-c", "ls {path} > {path}.listed"))
    checkpoints = run.start(settings={**SETTINGS, "on_tracked": [job], "jobs_drain_s": 60.0})
    save(checkpoints, 1)
    checkpoints.poll(wait=True)
    checkpoints.close()
    assert "data.pt" in (run.root / "global_step_1.listed").read_text()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_F5_verl_goes_on_while_the_tracker_is_blocked(run: Run, asynchronous: bool):
    """Catches: a training that stands still, or ends, for a tracker that cannot be written; workers that
    write for a save that was skipped."""
    settings = {**SETTINGS, "on_failure": "warn"}
    checkpoints = run.start(settings=settings)
    actor = checkpoints._trainer.config.actor_rollout_ref.actor
    actor["checkpoint"]["async_save"] = asynchronous
    save(checkpoints, 1)
    checkpoints.poll(wait=True)
    tracker = run.root / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    tracker.mkdir()
    with pytest.warns(SaveFailedWarning, match="step 2 .*blocked.*EISDIR"):
        save(checkpoints, 2)
        save(checkpoints, 3)
        checkpoints.poll()
    assert checkpoints.controller.step_in_flight() == 2
    tracker.rmdir()
    save(checkpoints, 4)
    checkpoints.close()
    assert checkpoints.controller.all_steps() == [1, 2, 4]


def is_free(root: Path) -> bool:
    Controller(root, {}, list, layout="verl", **SETTINGS).close()  # RootBusy if not
    return True


# ------------------------------------------------------------------------------------------ copies


def test_verls_remote_directory_gets_each_step_before_it_is_pruned(run):
    """Catches: ``default_hdfs_dir`` without a copy; a step that is pruned before; an end without the
    last copy."""
    there = run.there / "runs/new"
    there.mkdir(parents=True)
    checkpoints = run.start(
        settings={**SETTINGS, "retention": LatestN(1)}, default_hdfs_dir=str(there)
    )
    for step in (1, 2):
        save(checkpoints, step)
        checkpoints.poll(wait=True)
    checkpoints.close()
    for step in (1, 2):
        assert (there / f"global_step_{step}/.ckptfsm/manifest.json").exists()
    assert [path.name for path in run.root.glob("global_step_*")] == ["global_step_2"]
    assert is_free(run.root)


def test_an_end_tells_which_copies_are_missing_and_gives_the_root_back(run):
    """Catches: a machine that is given back with the only copy; an end that hangs or raises for it."""
    (run.there / "place/global_step_1/of-another").mkdir(parents=True)
    (run.there / "place/global_step_1/of-another/file").touch()
    copies = [Copy(str(run.there / "place"), name="far", attempts=1)]
    checkpoints = run.start(settings={**SETTINGS, "copies": copies})
    assert checkpoints.controller.config.jobs_drain_s == 3600.0
    save(checkpoints, 1)
    with pytest.warns(UserWarning, match="jobs that hold steps 1 are not done: far. The next"):
        checkpoints.close()
    assert is_free(run.root)


def test_the_copies_of_the_settings_go_along_with_verls():
    """Catches: two jobs for one place, a copy of the settings that is lost."""
    config = SimpleNamespace(trainer=Conf(default_hdfs_dir="hdfs://host/run"))
    own = Copy("hdfs://host/run", every=2)
    assert copies_of(config, [own]) == (own,)
    found = copies_of(config, [Copy("s3://bucket/run")])
    assert [copy.to for copy in found] == ["s3://bucket/run", "hdfs://host/run"]
    assert copies_of(SimpleNamespace(trainer=Conf(default_hdfs_dir=None)), ()) == ()


# ---------------------------------------------------------------------------------- close, abandon


def test_a_failed_save_at_the_end_gives_the_root_back(run):
    """Catches: a failed save that is raised before the root is given back."""
    checkpoints = run.start()
    checkpoints.groups["actor"].workers[0]._ports.driver.before_write = full
    save(checkpoints, 1)
    with pytest.raises(SaveFailed, match="No space left"):
        checkpoints.close()
    assert is_free(run.root)
    checkpoints.close()


def full(*ignored: Any) -> None:
    raise OSError(28, "No space left on device")


def test_closing_after_leaving_with_a_save_in_flight_waits_for_nothing(run):
    """Catches: a close in a launcher's ``finally`` that hides the error that the loop ended
    with."""
    checkpoints = run.start()
    checkpoints.groups["actor"].save_checkpoint = nothing
    save(checkpoints, 1)
    checkpoints.abandon()
    checkpoints.close()
    with pytest.raises(ManagerClosed):
        checkpoints.controller.wait_until_finished()
    assert is_free(run.root)


def nothing(*ignored: Any, **also: Any) -> None:
    """Workers that do not begin."""


def test_an_interrupt_of_another_rank_ends_the_save_that_it_struck(run):
    """Catches: a trainer that goes on with a failed save, while the rank that was interrupted leaves."""
    checkpoints = run.start()
    checkpoints.groups["actor"].save_checkpoint = interrupted
    with pytest.raises(RankInterrupted):
        save(checkpoints, 1)
    with pytest.raises(SaveFailed, match="not every worker was called: RankInterrupted"):
        checkpoints.poll(wait=True)


def interrupted(*ignored: Any, **also: Any) -> None:
    raise RankInterrupted("rank 1 was interrupted", rank=1)


# ---------------------------------------------------------------------------------- the beginning


@pytest.mark.parametrize(
    "times",
    [
        {"effect_timeout_s": 60.0, "exchange_timeout_s": 120.0},
        {"effect_timeout_s": 700.0, "exchange_timeout_s": 800.0},
    ],
)
def test_settings_that_a_driver_takes_are_good_for_its_workers(run, times):
    """Catches: half of two settings that belong together, sent to the workers; a setting that never
    reaches them, and so has no effect."""
    of_workers = {"writer_files": 3, "common_state": "file"}
    checkpoints = run.start(settings={**SETTINGS, **times, **of_workers})
    assert checkpoints.controller.latest_step() is None
    (settings,) = run.calls.settings
    config = make_config(settings)
    assert config.effect_timeout_s == times["effect_timeout_s"]
    assert (config.writer_files, config.common_state) == (3, "file")


@pytest.mark.parametrize("place", ["other", "root"])
def test_resuming_below_the_latest_step_is_refused_wherever_from(run, tmp_path, place):
    """Catches: a step of another root: its first save would be refused, after training up to it."""
    checkpoints = run.start()
    save(checkpoints, 10)
    checkpoints.close()
    path = str(tmp_path / place / "global_step_3")
    again = run.start(resume_mode="resume_path", resume_from_path=path)
    with pytest.raises(ConfigError, match="step 3, but .* has step 10"), again.loading():
        pass
    assert again.controller.all_steps() == [10]


def test_resuming_from_elsewhere_at_or_above_the_latest_step(run, tmp_path):
    """Catches: a check that refuses what would go well."""
    checkpoints = run.start()
    save(checkpoints, 10)
    checkpoints.close()
    path = str(tmp_path / "other/global_step_10")
    again = run.start(resume_mode="resume_path", resume_from_path=path)
    with again.loading():
        pass
    save(again, 11)
    again.close()


@pytest.mark.parametrize("inner", ["", "actor/"])
def test_steps_of_stock_verl_with_fsdp_are_refused_with_a_way_out(run, inner):
    """Catches: advice to repair what is whole, or to begin again and move it to quarantine."""
    for step in (9, 10):
        shard = run.root / f"global_step_{step}/{inner}model_world_size_1_rank_0.pt"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"made up")
    (run.root / "latest_checkpointed_iteration.txt").write_text("10")
    path = f"{run.root}/global_step_10"
    with pytest.raises(DamagedRoot, match=f"another .*trainer.resume_from_path={path}"):
        run.start().controller  # noqa: B018
    assert shard.read_bytes() == b"made up"


def test_a_damaged_checkpoint_of_ours_is_not_taken_for_a_stock_one(run):
    """Catches: a damaged checkpoint of ours that is refused with the way out for steps of stock
    verl."""
    for name in (".ckptfsm/manifest.json", "model_world_size_1_rank_0.pt"):
        path = run.root / "global_step_10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"made up")
    (run.root / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(DamagedRoot, match="none to resume from"):
        run.start().controller  # noqa: B018


def test_that_nothing_is_deleted_after_a_load_is_said(run):
    """Catches: a disk that a user expects to be freed, without a word that it is not."""
    checkpoints = run.start(resume_mode="auto", del_local_ckpt_after_load=True)
    with pytest.warns(UserWarning, match="del_local_ckpt_after_load"), checkpoints.loading():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with checkpoints.loading():
            pass


def test_every_setting_has_an_effect_or_is_refused():
    """Catches: a new setting of the library that no code under verl heeds, without a word."""
    of_controller = {
        "retention",
        "sync",  # refused, with a special reason
        "on_failure",
        "on_busy",
        "resume",
        "takeover",
        "verify",
        "layout",
        "poll_warning_steps",
        "writer_timeout_s",
        "busy_timeout_s",
        "close_timeout_s",
        "exit_timeout_s",
        "visibility_timeout_s",
        "reader_timeout_s",
        "on_tracked",
        "copies",
        "fetch_from",
        "jobs_drain_s",
    }
    heeded = of_controller | set(trainer_module._WORKER_SETTINGS)
    assert heeded | set(trainer_module._OF_NOBODY) == set(CheckpointConfig.model_fields)
    assert not heeded & set(trainer_module._OF_NOBODY)
