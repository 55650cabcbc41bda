"""A trainer's save loop without a state machine, as small as it goes, done right.

A request makes a partial directory; writers finish; a poll completes the written ones, moves the
tracker, then lets retention have its turn; a restart looks for complete ones. Each report is this
class with one hook done the old way, so the bug can be read off its few lines.

Rules: with ``overlap`` several saves may be in flight, as some of the reported software allows. A kill
loses the memory of the process, never the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fieldbugs.model import Action

TORN = -1


@dataclass(frozen=True)
class Job:
    """``disk``: step -> partial, complete, hollow (a shard is missing) or gutted (half deleted).

    ``pending``: step -> writing, written or dead, in memory like ``memory``, the steps this process
    saved. ``best`` is the newest step that ever was complete; ``wrong`` the promise that broke.
    """

    tracker: int | None = None
    disk: tuple[tuple[int, str], ...] = ()
    pending: tuple[tuple[int, str], ...] = ()
    memory: tuple[int, ...] = ()
    alive: bool = True
    ahead: int = 0
    no_quota: bool = False
    held: int | None = None
    best: int | None = None
    crashes: int = 0
    wrong: str = ""

    def status(self, step: int | None) -> str:
        return dict(self.disk).get(step or 0, "gone")

    def complete(self) -> list[int]:
        return [step for step, status in self.disk if status == "complete"]

    def put(self, step: int, status: str) -> Job:
        return replace(self, disk=tuple(sorted({**dict(self.disk), step: status}.items())))

    def drop(self, *steps: int) -> Job:
        return replace(self, disk=tuple(item for item in self.disk if item[0] not in steps))

    def mark(self, step: int, how: str) -> Job:
        pending = tuple((s, how if s == step else h) for s, h in self.pending)
        return replace(self, pending=pending)

    def forget(self, step: int) -> Job:
        return replace(self, pending=tuple(item for item in self.pending if item[0] != step))

    def lost(self) -> Job:
        """The process is gone with everything in its memory."""
        return replace(self, pending=(), memory=(), alive=False, ahead=0, crashes=self.crashes + 1)


class SaveLoop:
    """The loop done right. ``extra`` are the verbs that a report needs beyond the common ones."""

    def __init__(
        self,
        *extra: str,
        steps: tuple[int, ...] = (100, 200),
        keep: int = 1,
        crash: str = "kill",
        crashes: int = 1,
        overlap: bool = False,
    ) -> None:
        self.extra = frozenset(extra)
        self.steps = steps
        self.keep = keep
        self.crash = crash
        self.crashes = crashes
        self.overlap = overlap

    def key(self) -> tuple[object, ...]:
        """Two models with the same key are the same."""
        return (type(self), *(tuple(sorted(vars(self).items()))))

    # ------------------------------------------------------------------------------- the model

    def initial(self) -> Job:
        return Job()

    def broken(self, job: Job) -> str:
        return job.wrong

    def actions(self, job: Job) -> Iterator[tuple[Action, Job]]:
        if not job.alive:
            yield Action("restart"), self.restarted(job)
            if "restart_at" in self.extra:
                for step in self.steps:
                    yield Action("restart_at", step), self.restarted_at(job, step)
            return
        if "train" in self.extra and job.ahead < 1 and job.pending:
            yield Action("train"), replace(job, ahead=job.ahead + 1)
        for step in self.steps:
            if self.may_save(job, step):
                yield Action("save", step), self.saved(job, step)
        for step, how in job.pending:
            if how == "writing":
                yield Action("written", step), job.mark(step, "written")
                if "writer_dies" in self.extra:
                    yield Action("writer_dies", step), job.mark(step, "dead")
                if "no_space" in self.extra:
                    yield Action("no_space", step), self.no_space(job, step)
        if job.pending:
            yield Action("poll"), self.bounded(self.polled(job))
            written = "written" in dict(job.pending).values()
            if "kill_in_poll" in self.extra and written and job.crashes < self.crashes:
                yield Action("kill_in_poll"), self.killed_at_tracker(job)
        yield from self._happenings(job)

    def _happenings(self, job: Job) -> Iterator[tuple[Action, Job]]:
        if "no_quota" in self.extra and not job.no_quota:
            yield Action("no_quota"), replace(job, no_quota=True)
        if "held_open" in self.extra and job.held is None:
            for step in job.complete():
                yield Action("held_open", step), replace(job, held=step)
        if "leave" in self.extra and job.pending:
            yield Action("leave"), self.left(job)
        if self.crash and job.crashes < self.crashes:
            yield Action(self.crash), job.lost()

    def show(self, job: Job) -> str:
        tracker = {None: "-", TORN: "torn"}.get(job.tracker, str(job.tracker))
        disk = ", ".join(f"{step} {status}" for step, status in job.disk) or "nothing"
        return f"tracker {tracker}; {disk}"

    # ------------------------------------------------------------------- hooks: possible bugs

    def may_save(self, job: Job, step: int) -> bool:
        """Steps only grow, and a step is saved once."""
        if job.pending and not self.overlap:
            return False
        busy = max((s for s, _ in job.pending), default=-1)
        return step > max(job.tracker or -1, busy) and job.status(step) != "complete"

    def saved(self, job: Job, step: int) -> Job:
        """The save is asked for: its directory appears, its writers begin."""
        return replace(job.put(step, "partial"), pending=(*job.pending, (step, "writing")))

    def polled(self, job: Job) -> Job:
        for step, how in job.pending:
            if how == "written":
                job = self.finalized(job.forget(step), step)
            elif how == "dead":
                job = self.writer_died(job.forget(step), step)
        return job

    def writer_died(self, job: Job, step: int) -> Job:
        """The save failed; nothing of it stays."""
        return job.drop(step)

    def no_space(self, job: Job, step: int) -> Job:
        """The writers could not write all; the save failed."""
        return job.forget(step).drop(step)

    def finalized(self, job: Job, step: int) -> Job:
        """Everything is written: complete the directory, track it, let retention have its turn."""
        job = replace(job.put(step, "complete"), best=max(step, job.best or 0))
        job = replace(job, memory=(*job.memory, step))
        if job.no_quota:
            return job  # the tracker cannot be written now; a restart does it
        return self.retired(self.tracked(job, step))

    def tracked(self, job: Job, step: int) -> Job:
        return replace(job, tracker=max(step, job.tracker or 0))

    def retired(self, job: Job) -> Job:
        """Keep the newest of the complete ones that are not newer than the tracker."""
        known = [step for step in job.complete() if step <= (job.tracker or 0)]
        return job.drop(*(step for step in known[: -self.keep] if step != job.held))

    def left(self, job: Job) -> Job:
        """Leaving in order waits for the writers and completes what they wrote."""
        for step, how in job.pending:
            job = job.mark(step, "written" if how == "writing" else how)
        job = self.polled(job)
        if job.pending and not job.wrong:
            step, how = job.pending[0]
            what = f"step {step} was asked for and is neither tracked nor failed"
            if how == "dead":
                what = f"leaving waits for ever for the dead worker of step {step}"
            return replace(job, wrong=f"I10: {what}")
        return replace(job.lost(), crashes=job.crashes)

    def killed_at_tracker(self, job: Job) -> Job:
        """The process dies while the tracker is written: it says what it said."""
        for step, how in job.pending:
            if how == "written":
                job = replace(job.put(step, "complete"), best=max(step, job.best or 0))
        return job.lost()

    def restarted(self, job: Job) -> Job:
        job = replace(job, alive=True, no_quota=False)
        step = self.found(job)
        return self.resumed(replace(job, tracker=step), step)

    def found(self, job: Job) -> int | None:
        """The directory to resume from: the newest that is complete."""
        return max(job.complete(), default=None)

    def restarted_at(self, job: Job, step: int) -> Job:
        """A step that is not complete is refused: the operator has to choose another."""
        job = replace(job, alive=True)
        return self.resumed(job, step) if job.status(step) == "complete" else job

    # -------------------------------------------------------------------------------- the judge

    def resumed(self, job: Job, step: int | None) -> Job:
        """Training goes on from ``step``: is it a checkpoint?"""
        wrong = ""
        if step is None:
            if job.best is not None:
                wrong = f"I8: starts from scratch although step {job.best} was complete"
        elif job.status(step) != "complete":
            wrong = f"I2: resumes from step {step}, which is {job.status(step)}"
        return replace(job, wrong=wrong)

    def bounded(self, job: Job) -> Job:
        """Retention has had its turn: are there more than it should keep?"""
        extra = len([step for step in job.complete() if step != job.held]) - self.keep
        if extra > 0 and not job.wrong and not job.no_quota:
            what = f"{len(job.complete())} checkpoints stay where {self.keep} should"
            return replace(job, wrong=f"F26: {what}")
        return job


class Believing(SaveLoop):
    """As right as the other, if nothing else is wrong: a restart believes the tracker alone."""

    def found(self, job: Job) -> int | None:
        return job.tracker
