"""Reports about torchtitan's checkpointer: a model of each, and the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptfsm.core.retention import LatestN
from fieldbugs.player import SimTrainer
from fieldbugs.report import Report
from fieldbugs.saveloop import Job, SaveLoop
from fieldbugs.verl import left_in_order, real

PULL = "https://github.com/pytorch/torchtitan/pull"


class PurgesByName(SaveLoop):
    """When a save is dispatched, all but the newest names are deleted, whatever is in them."""

    def saved(self, job: Job, step: int) -> Job:
        job = super().saved(job, step)
        return job.drop(*[name for name, _ in job.disk][: -self.keep])


class LeavesAtOnce(SaveLoop):
    """The end closes what the checkpointer has, and does not wait for the save in flight."""

    def left(self, job: Job) -> Job:
        step, _ = job.pending[0]
        gone = replace(job.lost(), crashes=job.crashes)
        wrong = f"I10: step {step} was asked for and is neither tracked nor failed"
        return replace(gone, wrong=wrong)


def keeps_two(directory: Path) -> SimTrainer:
    return SimTrainer(retention=LatestN(2))


def halves_take_no_place(trainer: SimTrainer) -> None:
    """100 is there after two lost saves, and stays until two newer ones are tracked."""
    assert trainer.resumed == trainer.tracker() == 100 and trainer.steps() == [100]
    for step, kept in ((400, [100, 400]), (500, [400, 500])):
        trainer.save(step)
        trainer.written(step)
        trainer.poll()
        assert (trainer.tracker(), trainer.steps()) == (step, kept)


REPORTS = (
    Report(
        "titan-4197",
        "the purge counts half checkpoints and the save in flight, and deletes the last whole one",
        (f"{PULL}/4197",),
        PurgesByName(keep=2, steps=(100, 200, 300), crashes=2),
        SaveLoop(keep=2, steps=(100, 200, 300), crashes=2),
        keeps_two,
        halves_take_no_place,
        "retention counts tracked checkpoints, and acts after a newer one is tracked",
    ),
    Report(
        "titan-4270",
        "the end of the data closes the checkpointer, which does not wait for the save in flight",
        (f"{PULL}/4270",),
        LeavesAtOnce("leave", steps=(100,), crash=""),
        SaveLoop("leave", steps=(100,), crash=""),
        real,
        left_in_order,
        "leaving in order drains the save; after an error the next start decides about it",
    ),
)
