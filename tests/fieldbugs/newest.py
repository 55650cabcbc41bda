"""Reports of 2026, on megatron-core 0.17 to 0.19 and verl 0.9: a model of each, and the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from proof.fuzz import common_archive, written_metadata

from ckptfsm.core.ports import Storage
from ckptfsm.core.retention import EveryNSteps, LatestN
from ckptfsm.disk.stock import StockVerdict, inspect_stock
from ckptfsm.integrations.verl.ranks import is_within_an_epoch
from ckptfsm.testing.simfs import SimDisk, SimStorage
from fieldbugs.model import Action
from fieldbugs.player import Player, RealTrainer, SimTrainer
from fieldbugs.report import Report
from fieldbugs.saveloop import Believing, Job, SaveLoop
from fieldbugs.staging import SharedStaging, StagesTogether, each_holds_its_own
from fieldbugs.verl import left_in_order, real

# --------------------------------------------------------------------------------- no common.pt


@dataclass(frozen=True)
class Seen:
    """``saved``: the checkpoint is there. ``taken``: whether the adopter took it."""

    saved: bool = False
    taken: bool | None = None


class Adopter:
    """An adopter of a checkpoint whose common state lies in a shard. ``wants_file``: the old way."""

    def __init__(self, *, wants_file: bool) -> None:
        self.wants_file = wants_file

    def initial(self) -> Seen:
        return Seen()

    def actions(self, seen: Seen) -> Iterator[tuple[Action, Seen]]:
        if not seen.saved:
            yield Action("stock_saves", 100), replace(seen, saved=True)
        elif seen.taken is None:
            yield Action("adopts", 100), replace(seen, taken=not self.wants_file)

    def broken(self, seen: Seen) -> str:
        return "I8: step 100 is whole and refused: no common.pt" if seen.taken is False else ""

    def show(self, seen: Seen) -> str:
        there = "100 complete, common state in a shard" if seen.saved else "nothing"
        return there if seen.taken is None else f"{there}; taken: {seen.taken}"


class JudgesStock(Player):
    """The production judge of stock checkpoints, on what megatron-core 0.19 writes."""

    SHARDS = ("__0_0.distcp", "__0_1.distcp")

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.verdict: StockVerdict | None = None

    def stock_saves(self, step: int) -> None:
        self.reader().mkdir(f"{step}")
        files = {
            ".metadata": written_metadata("shard"),
            "metadata.json": b'{"sharded_backend":"torch_dist"}',
            self.SHARDS[0]: bytes(100),
            self.SHARDS[1]: common_archive(),
        }
        for name, data in files.items():
            self.disk.plant_file(f"{step}/{name}", data)

    def adopts(self, step: int) -> None:
        self.verdict = inspect_stock(self.reader(), f"{step}")

    def reader(self) -> Storage:
        return SimStorage(self.disk, "reader")

    def show(self) -> str:
        return "100 complete" if self.verdict is None else f"taken: {self.verdict.acceptable}"

    def judge(self) -> None:
        """There is no root of ours: ``expect`` looks at the verdict."""


def whole_or_refused(player: JudgesStock) -> None:
    """Taken without ``common.pt``; refused, with the shard's name, where the common state is gutted."""
    assert player.verdict is not None and player.verdict.acceptable, player.verdict
    shard = f"100/{JudgesStock.SHARDS[1]}"
    player.reader().unlink(shard)
    player.disk.plant_file(shard, bytes(len(common_archive())))
    player.adopts(100)
    assert not player.verdict.acceptable and JudgesStock.SHARDS[1] in player.verdict.reason, (
        player.verdict
    )


def judges_stock(directory: Path) -> JudgesStock:
    return JudgesStock()


# ------------------------------------------------------------------------------ the missing queue


class NoSuchQueue(Believing):
    """The queue that a request is handed to is no longer there: the call raises, nothing is written."""

    def saved(self, job: Job, step: int) -> Job:
        wrong = f"I10: the save of step {step} ends the training: its queue cannot be imported"
        return replace(super().saved(job, step), wrong=wrong)


def saved_without_it(trainer: RealTrainer) -> None:
    """The library schedules by itself: the save is tracked when the trainer leaves."""
    trainer.leave()
    left_in_order(trainer)


# ----------------------------------------------------------------------------- the retain interval

INTERVAL = 200


class KeepsInterval(SaveLoop):
    """Keep the newest and the multiples of the interval, and nothing else."""

    def extra_steps(self, job: Job) -> list[int]:
        return [step for step in job.complete()[:-1] if step % INTERVAL]

    def retired(self, job: Job) -> Job:
        return job.drop(*self.extra_steps(job))

    def bounded(self, job: Job) -> Job:
        extra = self.extra_steps(job)
        wrong = f"F26: step {extra[0]} stays, outside of the interval {INTERVAL}" if extra else ""
        return replace(job, wrong=job.wrong or wrong)


class IgnoresInterval(KeepsInterval):
    """The interval is a documented setting that no code reads."""

    def retired(self, job: Job) -> Job:
        return job


def interval(directory: Path) -> SimTrainer:
    return SimTrainer(retention=LatestN(1) | EveryNSteps(INTERVAL))


def keeps_the_interval(trainer: SimTrainer) -> None:
    """100 went when 200 was tracked; 200 stays when 300 is, and 300 goes for 400."""
    assert trainer.steps() == [200] and trainer.tracker() == 200, trainer.tracker()
    for step, left in ((300, [200, 300]), (400, [200, 400])):
        trainer.save(step)
        trainer.written(step)
        trainer.poll()
        trainer.judge()
        assert trainer.steps() == left, trainer.steps()


# ------------------------------------------------------------------------------ the skipped epoch

BATCHES = 2  # of an epoch


@dataclass(frozen=True)
class Epochs:
    """``saved``: the newest step, which has ended an epoch. ``trained``: batches of the next one."""

    saved: int = 0
    resumed: bool = False
    trained: int | None = None


class Resumes:
    """A run that ends with an epoch, and its next start. ``loads_all``: a used-up loader state, too."""

    def __init__(self, *, loads_all: bool) -> None:
        self.loads_all = loads_all

    def initial(self) -> Epochs:
        return Epochs()

    def actions(self, run: Epochs) -> Iterator[tuple[Action, Epochs]]:
        if not run.saved:
            yield Action("saves", BATCHES), replace(run, saved=BATCHES)
        elif not run.resumed:
            yield Action("resumes"), replace(run, resumed=True)
        elif run.trained is None:
            yield Action("trains_an_epoch"), replace(run, trained=0 if self.loads_all else BATCHES)

    def broken(self, run: Epochs) -> str:
        return "I8: the next epoch is skipped without a word" if run.trained == 0 else ""

    def show(self, run: Epochs) -> str:
        return f"saved {run.saved}, trained since: {run.trained}"


class TrainsEpochs(Player):
    """A data loader with verl's kind of state, resumed by the drop-in's rule."""

    def __init__(self) -> None:
        super().__init__()
        self.saved, self.position, self.trained = 0, 0, 0

    def reader(self) -> Storage:
        return SimStorage(SimDisk(), "reader")

    def saves(self, step: int) -> None:
        self.saved, self.position = step, step  # nothing is left of the epoch

    def resumes(self) -> None:
        if not is_within_an_epoch(self.saved, BATCHES):
            self.position = 0

    def trains_an_epoch(self) -> None:
        self.trained = BATCHES - self.position

    def show(self) -> str:
        return f"saved {self.saved}, trained since: {self.trained}"

    def judge(self) -> None:
        """There is no root of ours: ``expect`` looks at what was trained."""


def trains_on(player: TrainsEpochs) -> None:
    """The whole next epoch; and the rest of one that was cut off."""
    assert player.trained == BATCHES, player.trained
    player.saves(1)
    player.resumes()
    player.trains_an_epoch()
    assert player.trained == BATCHES - 1, player.trained


def trains_epochs(directory: Path) -> TrainsEpochs:
    return TrainsEpochs()


REPORTS = (
    Report(
        "verl-7401",
        "the state of a data loader that is used up is loaded: an epoch is skipped, silently",
        ("https://github.com/verl-project/verl/issues/7401",),
        Resumes(loads_all=True),
        Resumes(loads_all=False),
        trains_epochs,
        trains_on,
        "after a step that ended an epoch the next one begins anew",
    ),
    Report(
        "swift-9908",
        "an adopter takes the common state for missing where there is no `common.pt`",
        (
            "https://github.com/modelscope/ms-swift/pull/9908",
            "https://github.com/modal-projects/training-gym/pull/511",
        ),
        Adopter(wants_file=True),
        Adopter(wants_file=False),
        judges_stock,
        whole_or_refused,
        "the common state is looked for where `.metadata` says; a gutted one is refused by name",
        aliases=("training-gym-511",),
    ),
    Report(
        "verl-8000",
        "`async_calls` is imported from where megatron-core no longer has it: no save is scheduled",
        ("https://github.com/verl-project/verl/issues/8000",),
        NoSuchQueue("leave", steps=(100,), crash=""),
        SaveLoop("leave", steps=(100,), crash=""),
        real,
        saved_without_it,
        "a save needs no queue of the trainer's; leaving in order drains it",
    ),
    Report(
        "nvrx-staging",
        "the next save is staged into the shared memory that a slow writer still reads",
        ("https://github.com/NVIDIA/nvidia-resiliency-ext",),
        SharedStaging(shared=True),
        SharedStaging(shared=False),
        StagesTogether,
        each_holds_its_own,
        "what lies in memory that processes share is copied before the writer is forked",
    ),
    Report(
        "bridge-5778",
        "the documented retain interval is read by nobody: checkpoints outside of it stay",
        ("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5778",),
        IgnoresInterval(crash=""),
        KeepsInterval(crash="", steps=(100, 200, 300)),
        interval,
        keeps_the_interval,
        "retention is one policy, asked after every tracked save: `LatestN(1) | EveryNSteps(200)`",
    ),
)
