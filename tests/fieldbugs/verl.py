"""Reports about verl: trackers too early, never, or by the wrong rank; deletion likewise."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fakes import FakeDraft, FakeDriver, FakeRequest

from ckptfsm.core.errors import PollMissingWarning, StepExistsError, StepNotFoundError, WriterDied
from ckptfsm.core.layout import JOURNAL, STAGING, TRACKER
from ckptfsm.testing.faults import FaultStorage, crash_at
from ckptfsm.testing.harness import check_root
from ckptfsm.testing.simfs import ProcessDead
from fieldbugs.model import Action
from fieldbugs.player import RealTrainer, SimTrainer
from fieldbugs.report import Report
from fieldbugs.saveloop import Believing, Job, SaveLoop

PULL = "https://github.com/verl-project/verl/pull"
CLEAN_UP = (
    "https://github.com/verl-project/verl/blob/main/verl/utils/checkpoint/checkpoint_manager.py"
)
ISSUE = "https://github.com/verl-project/verl/issues"


def sim(directory: Path) -> SimTrainer:
    return SimTrainer()


def real(directory: Path) -> RealTrainer:
    return RealTrainer(directory)


def held(directory: Path) -> RealTrainer:
    return RealTrainer(directory, hold=True)


def resumed_from_100(trainer: SimTrainer) -> None:
    """100 is the last that was acknowledged: it is there and tracked, and training goes on from it."""
    assert trainer.resumed == trainer.tracker() == 100
    assert trainer.steps() == [100]
    assert trainer.acknowledged == [100]
    assert trainer.reader().listdir(STAGING) == [], "the lost attempt still holds its space"
    trainer.save(300)
    trainer.written(300)
    trainer.poll()
    assert (trainer.tracker(), trainer.steps()) == (300, [300]), "saving goes on"


# ------------------------------------------------------------------------- never scheduled, never polled


class NeverScheduled(Believing):
    """The request is made and thrown away: no writer, no finalizer."""

    def saved(self, job: Job, step: int) -> Job:
        return super().saved(job, step).mark(step, "thrown away")


class NobodyPolls(Believing):
    """The only caller of the finalizer is gone; leaving does not drain either."""

    def polled(self, job: Job) -> Job:
        return job


def left_in_order(trainer: RealTrainer) -> None:
    """Leaving drained the save: tracked, acknowledged, resumable."""
    assert trainer.acknowledged == [100]
    assert not trainer.failures
    trainer.restart()
    assert trainer.manager.latest_step() == 100
    restored = trainer.manager.restore({"weights": None})
    assert restored is not None and restored.state["weights"] == b"at the save"


def left_though_nobody_polled(trainer: RealTrainer) -> None:
    """As above, and a trainer that forgets to poll is told, with the step."""
    left_in_order(trainer)
    trainer.save(200)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.manager.should_save(250)
    told = [str(w.message) for w in seen if w.category is PollMissingWarning]
    assert len(told) == 1 and "step 200" in told[0], told
    trainer.leave()
    assert trainer.acknowledged == [100, 200]


# ------------------------------------------------------------------- tracker and deletion at the request


class TracksAtRequest(Believing):
    """The tracker is written when the save is asked for."""

    def saved(self, job: Job, step: int) -> Job:
        return self.tracked(super().saved(job, step), step)


class DeletesAtRequest(Believing):
    """Earlier checkpoints are deleted when the save is asked for."""

    def saved(self, job: Job, step: int) -> Job:
        job = super().saved(job, step)
        return job.drop(*(older for older in job.complete() if older < step))


class FullDiskEndsTheJob(DeletesAtRequest):
    """A synchronous save: the error of a full disk ends the job, with the old one deleted."""

    def no_space(self, job: Job, step: int) -> Job:
        return job.lost()


def started_at_zero(trainer: SimTrainer) -> None:
    """A crash in the very first save: nothing is tracked, nothing partial stays."""
    assert trainer.resumed is None and trainer.tracker() is None
    assert trainer.steps() == [] and trainer.acknowledged == []
    failed = [d for d in trainer.report.decisions if d.result == "failed"]
    assert len(failed) == 1 and "gone" in failed[0].why, trainer.report.decisions
    assert trainer.reader().listdir(STAGING) == []


def failed_without_harm(trainer: SimTrainer) -> None:
    """The full disk failed the save of 200 alone, and its space was given back."""
    dests = [(r.step, r.dest, r.reason) for r in trainer.job.records]
    assert trainer.resumed == 100, dests
    trainer.disk.capacity = None
    resumed_from_100(trainer)


# ------------------------------------------------------------------------------- the writer's memory


@dataclass(frozen=True)
class Host:
    """Host memory in units of one optimizer. ``copy`` is the trainer's staged copy."""

    copy: int = 0
    child: bool = False
    rewritten: bool = False

    def used(self) -> int:
        """The optimizer, its staged copy, and the pages the child keeps from before the rewrite."""
        return 1 + self.copy + int(self.child and self.rewritten)


class Memory:
    """An optimizer offloaded to host memory, saved by a forked child; there is room for two of it."""

    ROOM = 2

    def __init__(self, *, keeps_copy: bool) -> None:
        self.keeps_copy = keeps_copy

    def key(self) -> tuple[object, ...]:
        return (type(self), self.keeps_copy)

    def initial(self) -> Host:
        return Host()

    def actions(self, host: Host) -> Iterator[tuple[Action, Host]]:
        if not host.child:
            yield Action("save", 100), Host(copy=int(self.keeps_copy), child=True)
        yield Action("train"), replace(host, rewritten=True)
        if host.child:
            yield Action("written", 100), Host()

    def broken(self, host: Host) -> str:
        if host.used() <= self.ROOM:
            return ""
        return "I10: out of memory: the kernel kills the trainer, and nobody is told why"

    def show(self, host: Host) -> str:
        return f"{host.used()} of {self.ROOM} units used"


class Staged:
    """The copies that a draft makes of the trainer's tensors before the fork."""

    def __init__(self, data: bytes) -> None:
        self.data = data


@dataclass(slots=True)
class StagingDraft(FakeDraft):
    """A draft that stages a copy, as one for CUDA tensors has to, and lets it go when told."""

    copies: dict[str, Any] = field(default_factory=dict)

    def stage(self, location: str, specs: Any, planned: Any) -> Any:
        for name, value in self.values.items():
            self.copies[name] = {**value, "staged": Staged(b"x" * 1000)}
            self.driver.staged.append(weakref.ref(self.copies[name]["staged"]))  # type: ignore[attr-defined]
        self.values = dict(self.copies)  # the writers are made from these
        return FakeDraft.stage(self, location, specs, planned)

    def changed(self) -> str:
        return ""

    def let_go(self) -> None:
        self.values = {}
        self.copies = {}


@dataclass
class StagingDriver(FakeDriver):
    """See ``StagingDraft``. ``staged`` refers weakly to every copy that was made."""

    staged: list[Any] = field(default_factory=list)

    def draft(self, parts: Any) -> StagingDraft:
        plain = super().draft(parts)
        return StagingDraft(
            plain.specs, plain.in_place, plain.summary, plain.expected_bytes, self, dict(parts)
        )


def staging(directory: Path) -> RealTrainer:
    return RealTrainer(directory, hold=True, driver=StagingDriver())


def holds_no_copy(trainer: RealTrainer) -> None:
    """While the writer runs, the trainer holds no copy; if the kernel kills it, only the save fails."""
    gc.collect()
    assert isinstance(trainer.driver, StagingDriver)
    assert len(trainer.driver.staged) == 1
    assert trainer.driver.staged[0]() is None, "the trainer still holds the staged copy"
    assert trainer.children[0].poll() is None, "the writer should still be running"
    trainer.writer_dies(100)
    trainer.poll()
    assert [type(e) for e in trainer.failures] == [WriterDied]
    assert "SIGKILL" in str(trainer.failures[0])
    trainer.hold = False
    trainer.save(101)
    trainer.poll()
    assert trainer.acknowledged == [101]


# ------------------------------------------------------------------------------ which rank does what


@dataclass(frozen=True)
class Ranks:
    """Two ranks; when all is written each runs its finalizers, in any order. Rank 0 completes."""

    hosts: tuple[str, ...] = ()
    tracker: int | None = None
    disk: tuple[tuple[int, str], ...] = ()
    step: int | None = None
    written: bool = True
    finished: frozenset[int] = frozenset({0, 1})
    alive: bool = True
    crashed: bool = False
    wrong: str = ""

    def with_status(self, step: int, status: str) -> Ranks:
        return replace(self, disk=tuple(sorted({**dict(self.disk), step: status}.items())))

    def without_older(self, step: int) -> Ranks:
        older = [s for s, status in self.disk if s < step and status == "complete"]
        return replace(self, disk=tuple(item for item in self.disk if item[0] not in older))


class RankLoop:
    """Done right: rank 0, which completes the directory, is the only one to track and to delete."""

    STEPS = (100, 200)

    def key(self) -> tuple[object, ...]:
        return (type(self),)

    def initial(self) -> Ranks:
        return Ranks()

    def actions(self, state: Ranks) -> Iterator[tuple[Action, Ranks]]:
        if not state.alive:
            yield Action("restart"), self.restarted(state)
            return
        if not state.hosts:
            for hosts in (("a3", "b7"), ("b7", "a3")):
                yield Action("place", who=hosts), replace(state, hosts=hosts)
            return
        for step in self.STEPS:
            if state.finished == {0, 1} and step > (state.step or 0):
                begun = replace(state, step=step, written=False, finished=frozenset())
                yield Action("save", step), begun.with_status(step, "partial")
        if not state.written:
            yield Action("written", state.step), replace(state, written=True)
        else:
            for rank in {0, 1} - state.finished:
                after = self.finalized(replace(state, finished=state.finished | {rank}), rank)
                yield Action("finalizes", state.step, rank), after
        if not state.crashed:
            yield Action("kill"), replace(state, alive=False, crashed=True)

    def finalized(self, state: Ranks, rank: int) -> Ranks:
        """``rank`` runs its finalizers; those of rank 0 complete the directory."""
        assert state.step is not None
        if rank == 0:
            done = state.with_status(state.step, "complete").without_older(state.step)
            return replace(done, tracker=state.step)
        return state

    def restarted(self, state: Ranks) -> Ranks:
        status = dict(state.disk).get(state.tracker or 0, "gone")
        wrong = ""
        if state.tracker is not None and status != "complete":
            wrong = f"I2: resumes from step {state.tracker}, which is {status}"
        ready = replace(state, written=True, finished=frozenset({0, 1}))
        return replace(ready, alive=True, step=state.tracker, wrong=wrong)

    def broken(self, state: Ranks) -> str:
        return state.wrong

    def show(self, state: Ranks) -> str:
        disk = ", ".join(f"{step} {status}" for step, status in state.disk) or "nothing"
        return f"tracker {state.tracker or '-'}; {disk}"


class GuessedRank(RankLoop):
    """The rank on the node whose name sorts first takes itself for rank 0 and writes the tracker."""

    def finalized(self, state: Ranks, rank: int) -> Ranks:
        before = state.tracker
        state = replace(super().finalized(state, rank), tracker=before)
        if state.hosts[rank] == min(state.hosts):
            state = replace(state, tracker=state.step)
        return state


class EveryRankDeletes(RankLoop):
    """Every rank deletes what came before as soon as it is done itself."""

    def finalized(self, state: Ranks, rank: int) -> Ranks:
        assert state.step is not None
        return super().finalized(state, rank).without_older(state.step)


def no_other_rank_decides(trainer: SimTrainer) -> None:
    """Rank 1 wrote below its attempt's directory and nowhere else; the coordinator did the rest."""
    for rank, storages in trainer.calls.items():
        calls = [call for storage in storages for call in storage.calls]
        strays = [(m, p) for m, p in calls if not p.startswith(f"{STAGING}/") and "->" not in p]
        assert not strays, f"rank {rank} touched {strays}"
        moved = [p for m, p in calls if "->" in p and not p.startswith(f"{STAGING}/")]
        assert not moved, f"rank {rank} moved {moved}"
        assert not [p for m, p in calls if m in ("unlink", "rmdir")], f"rank {rank} deleted"


def tracked_by_rank_0_alone(trainer: SimTrainer) -> None:
    """The save of which only one rank reported is failed; one with both is tracked, once."""
    started_at_zero(trainer)
    no_other_rank_decides(trainer)
    trainer.save(100)
    trainer.written(100)
    for rank in (1, 0):
        assert trainer.tracker() is None
        trainer.finalizes(100, rank)
    assert trainer.tracker() == 100


def deleted_by_rank_0_alone(trainer: SimTrainer) -> None:
    no_other_rank_decides(trainer)
    resumed_from_100(trainer)


# ------------------------------------------------------------------------------ saves that are
# never tracked


class NobodyTracks(Believing):
    """The trainer leaves the tracker to the backend, and this backend has no code for it."""

    def tracked(self, job: Job, step: int) -> Job:
        return job


def foreign(directory: Path) -> RealTrainer:
    return RealTrainer(directory, request=FakeRequest(b"written by another backend"))


def every_backend_is_tracked(trainer: RealTrainer) -> None:
    """The coordinator tracks, whatever wrote; without a tracker, journal or manifests say it."""
    assert trainer.acknowledged == [100]
    assert trainer.manager.latest_step() == 100
    for lost in (TRACKER, JOURNAL):
        trainer.leave()
        path = trainer.root / lost
        for file in path.iterdir() if path.is_dir() else [path]:
            file.unlink()
        (trainer.root / TRACKER).unlink(missing_ok=True)
        trainer.restart()
        assert trainer.manager.latest_step() == 100, f"without {lost}"
        trainer.judge()
    trainer.request = None
    trainer.save(200)
    trainer.poll()
    assert trainer.acknowledged == [100, 200]


# ------------------------------------------------------------------------------- deletion by halves


class DeletesOnlyActor(Believing):
    """Only ``actor/`` is deleted; that the directory exists is taken for a checkpoint."""

    def retired(self, job: Job) -> Job:
        for step in job.complete()[: -self.keep]:
            job = job.put(step, "gutted")
        return job

    def restarted_at(self, job: Job, step: int) -> Job:
        job = replace(job, alive=True)
        return self.resumed(job, step) if job.status(step) in ("complete", "gutted") else job


class PrunesFromMemory(Believing):
    """The list of deletions is in memory, and a restart begins it anew."""

    def retired(self, job: Job) -> Job:
        job, kept = job.drop(*job.memory[: -self.keep]), job.memory[-self.keep :]
        return replace(job, memory=kept)


class RegistersTwice(PrunesFromMemory):
    """A step that is saved again is put on the list again: it deletes itself."""

    def may_save(self, job: Job, step: int) -> bool:
        return not job.pending and step >= (job.tracker or 0)

    def saved(self, job: Job, step: int) -> Job:
        again = job.status(step) == "complete"
        return replace(job, pending=((step, "writing"),)) if again else super().saved(job, step)


def never_half_deleted(trainer: SimTrainer) -> None:
    """100 left its name in one rename: asking for it is an error, at every crash point of the prune."""
    assert trainer.steps() == [200] and trainer.resumed == 200
    try:
        trainer.job.coordinator.locate(100)
    except StepNotFoundError as error:
        assert error.available == (200,)
    else:
        raise AssertionError("step 100 was offered")
    assert crash_points_of_a_prune() > 10


def crash_points_of_a_prune() -> int:
    """Lose power at every call of a save that prunes: each published one is whole. Returns their
    number."""
    index = 0
    while True:
        trainer = SimTrainer()
        trainer.save(100)
        trainer.written(100)
        trainer.poll()
        trainer.save(200)
        trainer.written(200)
        storage = trainer.job.storage
        assert isinstance(storage, FaultStorage)
        storage.before = crash_at(len(storage.calls) + index)
        try:
            trainer.poll()
        except ProcessDead:
            trainer.disk.crash("all_kept" if index % 2 else "all_lost")
            check_root(trainer.reader(), 100)
            trainer.open()
            check_root(trainer.reader(), 100)
            index += 1
        else:
            return index


def bounded_after_a_restart(trainer: SimTrainer) -> None:
    """The journal knows every earlier checkpoint: one stays where one should."""
    assert trainer.steps() == [200] and trainer.tracker() == 200
    assert trainer.acknowledged == [100, 200]


def the_same_step_is_refused(trainer: SimTrainer) -> None:
    """Saved again, it is refused with a typed error; it is still there."""
    assert trainer.resumed == trainer.tracker() == 100
    assert trainer.steps() == [100]
    try:
        trainer.job.request(100)
    except StepExistsError as error:
        assert (error.step, error.latest) == (100, 100)
    else:
        raise AssertionError("step 100 was accepted again")


# ---------------------------------------------------------------------------------------- the reports

REPORTS = (
    Report(
        "verl-4253",
        "an async save is asked for and never scheduled, so it is never finalized",
        (f"{PULL}/4253",),
        NeverScheduled("leave", steps=(100,), crash=""),
        SaveLoop("leave"),
        real,
        left_in_order,
        "a request is journaled and forked inside `save`; leaving in order drains it, or says it failed",
    ),
    Report(
        "verl-4638-tracker",
        "the tracker is written before the async save has finished",
        (f"{PULL}/4638", f"{PULL}/4667"),
        TracksAtRequest(),
        SaveLoop(),
        sim,
        started_at_zero,
        "the tracker moves only from `finalized`; the lost attempt is failed, its space given back",
        aliases=("verl-4638", "verl-4667", "verl-4667-tracker"),
    ),
    Report(
        "verl-4638-prune",
        "async_save with remove_previous_ckpt_in_save: the previous checkpoint is deleted before the "
        "new one exists",
        (f"{PULL}/4638", f"{PULL}/4667"),
        DeletesAtRequest(),
        SaveLoop(),
        sim,
        resumed_from_100,
        "deletion begins at `prunable`, and only a newer tracked checkpoint leads there",
        aliases=("verl-4667-prune",),
    ),
    Report(
        "verl-4638-memory",
        "the forked writer of an offloaded optimizer needs the memory of a further copy",
        (f"{PULL}/4638", f"{PULL}/4667"),
        Memory(keeps_copy=True),
        Memory(keeps_copy=False),
        staging,
        holds_no_copy,
        "after the fork the trainer holds no copy; a writer killed for memory fails its save, no more",
        aliases=("verl-4667-memory",),
    ),
    Report(
        "verl-4873",
        "keep=1: the old checkpoint is deleted before the new save completes, which then fails",
        (f"{PULL}/4873",),
        FullDiskEndsTheJob("no_space", crash=""),
        SaveLoop("no_space"),
        sim,
        failed_without_harm,
        "the full disk fails the new save alone; the old one is not touched",
    ),
    Report(
        "verl-5016",
        "the rank that writes the tracker is guessed from node ids",
        (f"{PULL}/5016",),
        GuessedRank(),
        RankLoop(),
        sim,
        tracked_by_rank_0_alone,
        "one coordinator, at global rank 0, tracks when every rank's receipt is there",
    ),
    Report(
        "verl-6067",
        "the only caller of the finalizer is removed: nothing polls, nothing is ever tracked",
        (f"{PULL}/6067", f"{PULL}/7363", f"{ISSUE}/8000"),
        NobodyPolls("leave", steps=(100,), crash=""),
        SaveLoop("leave"),
        real,
        left_though_nobody_polled,
        "leaving in order drains; a trainer that never polls is warned, with the step",
        aliases=("verl-7363",),
    ),
    Report(
        "verl-7952",
        "a backend for which nobody writes the tracker: silent restart from 0",
        (f"{ISSUE}/7952", f"{PULL}/7955", "https://github.com/rllm-org/rllm/issues/897"),
        NobodyTracks("leave", keep=9, crash=""),
        SaveLoop("leave", keep=9),
        foreign,
        every_backend_is_tracked,
        "the coordinator tracks every kind of part; evidence without a tracker is never scratch",
        aliases=("rllm-897",),
    ),
    Report(
        "verl-ranks-delete",
        "ranks other than 0 delete the old checkpoint while rank 0 has not moved the tracker",
        (CLEAN_UP,),
        EveryRankDeletes(),
        RankLoop(),
        sim,
        deleted_by_rank_0_alone,
        "no rank but the coordinator deletes or tracks",
    ),
    Report(
        "verl-gutted",
        "only `actor/` is deleted: a gutted directory still passes the existence check",
        (CLEAN_UP,),
        DeletesOnlyActor("restart_at"),
        SaveLoop("restart_at"),
        sim,
        never_half_deleted,
        "a checkpoint leaves its name whole, in one rename, before anything in it is deleted",
    ),
    Report(
        "verl-forgets",
        "a restart forgets what is to be deleted, and the disk fills",
        (CLEAN_UP,),
        PrunesFromMemory(),
        SaveLoop(),
        sim,
        bounded_after_a_restart,
        "retention looks at every checkpoint that the journal knows",
    ),
    Report(
        "verl-same-step",
        "the same step is registered twice; with keep=1 it deletes itself",
        (CLEAN_UP,),
        RegistersTwice(),
        SaveLoop(),
        sim,
        the_same_step_is_refused,
        "a saved step is refused (`StepExistsError`), and the tracked one is never prunable",
    ),
)
