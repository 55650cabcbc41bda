"""Lightning's real ``Trainer`` with our checkpoints, in one process and on two CPU ranks over gloo.

Stock means the same ``Trainer`` without them. Every resumed run is compared with one that never
stopped, loss by loss and batch by batch: weights, moments, dropout and data come back bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_job import Run, Small, Stop, losses, rank

from ckptfsm.core.errors import ConfigError, ReshardWarning
from ckptfsm.core.retention import LatestN
from ckptfsm.integrations.lightning import FILE, LightningCheckpoints, retain

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

PATIENCE_S = 240.0


def steps_in(root: Path) -> list[int]:
    return sorted(int(each.name[5:]) for each in root.glob("iter_*"))


def file_of(root: Path, step: int) -> str:
    return str(root / f"iter_{step:07d}" / FILE)


@pytest.fixture(scope="module")
def whole() -> dict[int, list[float]]:
    """An undisturbed run of stock Lightning, without a validation."""
    return losses()


@pytest.fixture(scope="module")
def forks() -> Any:
    """A process that has imported Lightning once, and forks ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_job"])
    return context


@pytest.fixture
def two(forks: Any, tmp_path: Path) -> Any:
    """Runs two ranks, and gives the losses of each; None for one that was killed."""

    def run(**how: Any) -> list[dict[int, list[float]] | None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        files = [tmp_path / f"rank{number}.json" for number in range(2)]
        for each in files:
            each.unlink(missing_ok=True)
        ranks = [
            forks.Process(target=rank, args=(number, port, str(file), how))
            for number, file in enumerate(files)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(PATIENCE_S)
            if each.exitcode is None:
                each.kill()
        ends = [each.exitcode for each in ranks]
        assert ends == [-signal.SIGKILL if how.get("kill") else 0] * 2, ends
        return [
            {int(step): of for step, of in json.loads(file.read_text()).items()}
            if file.exists()
            else None
            for file in files
        ]

    return run


# --------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("stateful", [False, True])
def test_a_run_that_resumes_within_an_epoch_is_one_that_never_stopped(
    tmp_path: Path, whole: Any, stateful: bool
) -> None:
    """Catches: random numbers, or the place in shuffled data, that are not restored. The second run
    has another seed, and stops at the last batch of an epoch."""
    if stateful:
        pytest.importorskip("torchdata")
        whole = losses(stateful=True)
    root, how = str(tmp_path), {"stateful": stateful}
    first = losses(root=root, stop=3, **how)
    last = 7 if stateful else 5
    second = losses(root=root, stop=last, seed=7, **how)
    third = losses(root=root, seed=8, **how)
    assert (list(first), min(second), min(third)) == ([1, 2, 3], 4, last + 1)
    assert {**first, **second, **third} == whole
    assert steps_in(tmp_path) == list(whole)


@pytest.mark.parametrize(("validates", "stop"), [(1.0, 5), (2, 5), (2, 2)])
def test_a_validation_leaves_no_trace_in_a_resumed_run(
    tmp_path: Path, validates: Any, stop: int
) -> None:
    """Catches: a save before a validation that uses random numbers, which a resumed run leaves out,
    and the validation that Lightning repeats. (1.0, 5): at the end of an epoch; (2, 2): within it."""
    undisturbed = losses(validates=validates, epochs=2)
    first = losses(root=str(tmp_path), validates=validates, epochs=2, stop=stop)
    second = losses(root=str(tmp_path), validates=validates, epochs=2, seed=7)
    assert min(second) == stop + 1
    assert {**first, **second} == undisturbed


def test_stock_resumes_ours_and_we_resume_stock(tmp_path: Path) -> None:
    """Catches: a file that stock Lightning cannot load, or one of its own that we cannot."""
    root, stock, following = tmp_path / "ours", tmp_path / "stock", tmp_path / "next"
    keeps = [ModelCheckpoint(stock, save_top_k=-1)]
    Run(root=str(root), every=None, epochs=1, callbacks=keeps).fit()
    weights = []
    for into, load in (
        ("", file_of(root, 5)),
        (str(following), str(stock / "epoch=0-step=5.ckpt")),
    ):
        _, trainer = Run(root=into, load=load, every=None, epochs=2, seed=3).fit()
        weights.append(trainer.lightning_module.state_dict())
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    assert steps_in(following) == [10]


def test_our_file_is_the_one_that_stock_would_write(tmp_path: Path) -> None:
    """Catches: a checkpoint dict with other keys than Lightning's, and a monitored best that is not
    found after ``fit``."""
    stock, root = tmp_path / "stock", tmp_path / "ours"
    beside = [ModelCheckpoint(stock, filename="lightning", save_top_k=-1)]
    how: dict[str, Any] = {"monitor": "val", "save_top_k": 1}
    _, trainer = Run(
        root=str(root), every=None, epochs=3, validates=1.0, callbacks=beside, own=how
    ).fit()
    own = next(each for each in trainer.checkpoint_callbacks if type(each) is not ModelCheckpoint)
    ours, theirs = (torch.load(each) for each in (file_of(root, 15), beside[0].best_model_path))
    theirs.pop("callbacks"), ours.pop("callbacks")
    assert ours.keys() == theirs.keys() and str(ours) == str(theirs)
    assert own.last_model_path == file_of(root, 15)
    best = own.best_model_path
    assert set(steps_in(root)) == {15, int(Path(best).parent.name[5:])}
    again = Small()
    rows = trainer.fit_loop.epoch_loop.val_loop._data_source.instance
    trainer.validate(again, rows, ckpt_path="best")
    saved = torch.load(best)["state_dict"]
    assert all(torch.equal(each, saved[name]) for name, each in again.state_dict().items())
    trainer.validate(again, rows, ckpt_path="last")
    assert torch.equal(again.net[0].weight, ours["state_dict"]["net.0.weight"])


def test_a_sigterm_saves_after_its_batch(tmp_path: Path, whole: Any) -> None:
    """Catches: a preempted run that loses its steps since the last save."""
    how: dict[str, Any] = {"root": str(tmp_path), "every": None}
    with pytest.raises(SIGTERMException):
        Run(**how, stop=3, signal=signal.SIGTERM).fit()
    assert steps_in(tmp_path) == [3]
    second = losses(**how, seed=7)
    assert second == {step: of for step, of in whole.items() if step > 3}


def test_a_sigterm_within_accumulated_batches_waits_for_the_optimizer(tmp_path: Path) -> None:
    """Catches: a checkpoint without the gradients of batches that a resumed run does not repeat."""
    how: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 2}, "epochs": 2}
    ends = [Run(**how).fit()]
    how["root"] = str(tmp_path)
    signals = Stop(-1, signal.SIGTERM, batch=2)
    with pytest.raises(SIGTERMException):
        Run(**how, every=None, callbacks=[signals]).fit()
    assert steps_in(tmp_path) == [2]
    ends.append(Run(**how, every=None, seed=7).fit())
    assert ends[1][0] == {step: of for step, of in ends[0][0].items() if step > 2}
    whole, resumed = (end.lightning_module.state_dict() for _, end in ends)
    assert all(torch.equal(each, resumed[name]) for name, each in whole.items())


def test_a_save_that_waits_for_a_validation_is_made_without_one(tmp_path: Path) -> None:
    """Catches: saves that are dropped, with nothing to validate with, and at the end of the training."""
    losses(root=str(tmp_path), validates=1, held=0, epochs=1)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_an_exception_saves_if_asked_and_leaves_the_root_free(tmp_path: Path, whole: Any) -> None:
    """Catches: ``save_on_exception`` without effect, and a root that stays locked."""
    how: dict[str, Any] = {"root": str(tmp_path), "every": 2}
    losses(**how, stop=3)
    assert steps_in(tmp_path) == [2]
    losses(**how, stop=3, own={"save_on_exception": True})
    assert steps_in(tmp_path) == [2, 3]


def test_retention_deletes_only_after_a_newer_one_is_tracked(tmp_path: Path) -> None:
    """Catches: a checkpoint that is deleted before the next one can be resumed from."""
    there: list[int] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > 1:
                tracker = tmp_path / "latest_checkpointed_iteration.txt"
                there.append(int(tracker.read_text()) if tracker.exists() else 0)
                assert not there[-1] or Path(file_of(tmp_path, there[-1])).exists()

    losses(root=str(tmp_path), callbacks=[Look()], own={"retention": LatestN(1)}, epochs=1)
    assert steps_in(tmp_path) == [5] and there == sorted(there) and any(there)


def test_a_callback_that_changes_the_weights_changes_no_checkpoint(tmp_path: Path) -> None:
    """Catches: weights that are read after the save, when a callback has changed them in a way that
    torch does not count, as Lightning's averages of weights do."""

    class Grow(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.wide = torch.nn.Parameter(torch.zeros(1 << 20))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.wide.data.add_(1)  # after the save: our callback was the first

    how = Run(root=str(tmp_path), epochs=1)
    trainer, module, rows, held = how.make(1)
    trainer.callbacks.append(Grow())
    trainer.fit(module, rows, held)
    for step in steps_in(tmp_path):
        saved = torch.load(file_of(tmp_path, step))["state_dict"]["wide"]
        assert torch.equal(saved, torch.full_like(saved, step - 1))


def test_stock_trains_batches_twice_and_repeats_the_order_of_the_first_epoch(
    tmp_path: Path, whole: Any
) -> None:
    """Catches: a release of Lightning that restores the place in the data and the random numbers
    (pytorch-lightning #19764): then the page has to say so. Compare the first test of this file."""
    keeps = [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)]
    losses(stop=6, callbacks=keeps)
    data = {step: of[1] for step, of in whole.items()}
    for step, again in ((3, {4: 1, 5: 2}), (5, {6: 1, 7: 2, 8: 3, 9: 4, 10: 5})):
        resumed = losses(load=str(tmp_path / f"epoch=0-step={step}.ckpt"), epochs=2)
        assert {later: resumed[later][1] for later in again} == {
            later: data[earlier] for later, earlier in again.items()
        }


# ---------------------------------------------------------------------------------- two ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resume_after_sigkills_during_a_save(
    tmp_path: Path, two: Any, strategy: str
) -> None:
    """Catches: random numbers of one rank for all, and a killed save that is taken for whole. Stock
    Lightning loads the newest checkpoint, too."""
    how: dict[str, Any] = {"strategy": strategy, "epochs": 2}
    undisturbed = two(**how)
    root = tmp_path / "root"
    two(root=str(root), kill=4, **how)
    resumed = two(root=str(root), **how)
    begun = min(resumed[0])
    assert begun in (4, 5)  # 4: the killed save is discarded
    for number in range(2):
        expected = {step: of for step, of in undisturbed[number].items() if step >= begun}
        assert resumed[number] == expected
    assert undisturbed[0] != undisturbed[1]
    newest = root / "iter_0000005"
    stock = two(load=str(newest if strategy == "fsdp2" else newest / FILE), **how)
    assert [min(each) for each in stock] == [6, 6]
    if strategy == "ddp":  # on one rank: without the random numbers, and with a word of it
        with pytest.warns(ReshardWarning, match="rng_state"):
            alone = losses(root=str(root), epochs=3)
        assert min(alone) == 11


def test_a_sigterm_to_one_of_two_ranks_saves_on_both(tmp_path: Path, two: Any) -> None:
    """Catches: ranks that end at different batches, or wait for each other for ever."""
    how: dict[str, Any] = {"strategy": "ddp", "epochs": 1}
    undisturbed = two(**how)
    how |= {"root": str(tmp_path / "root"), "every": None}
    two(**how, stop=3, signal=signal.SIGTERM, own={"exchange_every": 1})
    assert steps_in(tmp_path / "root") == [3]
    resumed = two(**how)
    for ours, whole in zip(resumed, undisturbed, strict=True):
        assert ours == {step: of for step, of in whole.items() if step > 3}


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"save_last": True}, "ckpt_path='last'"),
        ({"save_weights_only": True}, "trainer.save_checkpoint"),
        ({"filename": "x"}, "layout"),
        ({"save_interval_steps": 3}, "every_n_train_steps"),
        ({"agree_when_idle": False}, "SIGTERM"),
        ({"save_interval_s": 3.0}, "train_time_interval"),
        ({"save_top_k": 2}, "monitor"),
        ({"save_top_k": 1, "retention": LatestN(1)}, "one of them"),
    ],
)
def test_arguments_with_another_meaning_are_refused(how: dict[str, Any], words: str) -> None:
    """Catches: an argument of ``ModelCheckpoint`` that is taken and has no effect."""
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        LightningCheckpoints("root", **how)


def test_what_saves_in_another_way_is_refused(tmp_path: Path) -> None:
    """Catches: a plugin, or a callback in our root, that saves or deletes beside us."""
    root = str(tmp_path)
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        losses(root=root, trainer={"plugins": [AsyncCheckpointIO()]})
    with pytest.raises(ConfigError, match="writes and deletes in the root"):
        losses(root=root, callbacks=[ModelCheckpoint(tmp_path / "beside")])


def test_a_run_never_begins_at_zero_beside_checkpoints(tmp_path: Path) -> None:
    """Catches: a forgotten ``ckpt_path``, which trains from the beginning, and an older step."""
    losses(root=str(tmp_path), stop=3)
    for load in (None, file_of(tmp_path, 2)):
        with pytest.raises(ConfigError, match=r"ckpt_path='last'.*ckptfsm rollback"):
            losses(root=str(tmp_path), load=load)
    with pytest.raises(ConfigError, match="no checkpoint of it"):
        losses(root=str(tmp_path), load=str(tmp_path / "last.ckpt"))


def test_a_run_of_stock_goes_on_with_ours(tmp_path: Path) -> None:
    """Catches: a beginning at zero with ours in the place of ``ModelCheckpoint``, or beside it; and
    another callback's newer, unverified file that is taken before the root's steps."""
    old, root = tmp_path / "old", tmp_path / "root"

    def keeps() -> list[Any]:
        return [ModelCheckpoint(old, save_last=True, every_n_train_steps=2)]

    losses(stop=4, callbacks=keeps(), epochs=1)
    copied = shutil.copytree(old, tmp_path / "copied")
    assert list(losses(root=str(copied), epochs=1)) == [5]
    assert steps_in(copied) == [5]
    assert list(losses(root=str(root), stop=7, every=7, callbacks=keeps())) == [5, 6, 7]
    for file in old.iterdir():
        os.utime(file)
    assert min(losses(root=str(root), stop=8, callbacks=keeps())) == 8
    shutil.rmtree(root)
    root.mkdir()
    shutil.copy(next(copied.glob("epoch*.ckpt")), root)
    for load in (None, "last"):
        with pytest.raises(ConfigError, match="at zero.*ckpt_path="):
            losses(root=str(root), load=load)


def test_save_top_k_is_a_retention() -> None:
    """Catches: a k that keeps less than was meant."""
    assert retain(1, None, "min") == LatestN(1)
    assert "BestN" in repr(retain(3, "val", "max"))
    made = LightningCheckpoints("root", train_time_interval=timedelta(seconds=1))
    assert made.dirpath == os.path.realpath("root")
