"""Reports on Accelerate and transformers' Trainer, which write where they resume from."""

from __future__ import annotations

from dataclasses import replace

from fieldbugs.report import Report
from fieldbugs.saveloop import Job, SaveLoop
from fieldbugs.verl import resumed_from_100, sim

ACCELERATE = "https://github.com/huggingface/accelerate"
TRANSFORMERS = "https://github.com/huggingface/transformers/issues"


class MakesRoomFirst(SaveLoop):
    """The limit counts the checkpoint to come: older ones are deleted before it is written."""

    def saved(self, job: Job, step: int) -> Job:
        room = self.keep - 1
        older = job.complete()
        return super().saved(job.drop(*older[: len(older) - room]), step)


class ResumesFromTheNewestName(SaveLoop):
    """The greatest number among the directories is the checkpoint, whatever is in it."""

    def found(self, job: Job) -> int | None:
        return max((step for step, _ in job.disk), default=None)

    def resumed(self, job: Job, step: int | None) -> Job:
        """Without a whole one nothing is lost: a person removes the directory and begins anew."""
        if job.best is None:
            return replace(job, disk=(), tracker=None)
        return super().resumed(job, step)


REPORTS = (
    Report(
        "accelerate-total-limit",
        "`save_state` with `total_limit=1` deletes the old checkpoint before it writes the new one",
        (f"{ACCELERATE}/blob/v1.15.0/src/accelerate/accelerator.py",),
        MakesRoomFirst(),
        SaveLoop(),
        sim,
        resumed_from_100,
        "an old checkpoint is deleted when a newer one is tracked, and not before",
    ),
    Report(
        "transformers-35782",
        "a half-written newest directory is the one to resume from: every restart fails",
        (f"{TRANSFORMERS}/35782", f"{TRANSFORMERS}/35525"),
        ResumesFromTheNewestName(),
        SaveLoop(),
        sim,
        resumed_from_100,
        "a directory has its name when it is whole; a torn one of a stock run is passed over",
        aliases=("transformers-35525",),
    ),
)
