"""Reports about Megatron-Bridge, Megatron-LM and megatron-core."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fakes import FakeDriver, FakeRequest, ThreadTransport, fake_ports, run_ranks

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import WriterDied
from ckptfsm.core.layout import MEGATRON, TRACKER
from ckptfsm.core.ledger import Rejected
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakePart, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimStorage
from fieldbugs.model import Action
from fieldbugs.player import RealTrainer, SimTrainer
from fieldbugs.report import Report
from fieldbugs.saveloop import TORN, Believing, Job, SaveLoop
from fieldbugs.verl import held, resumed_from_100, sim

BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"
LM = "https://github.com/NVIDIA/Megatron-LM"
STRATEGIES = f"{LM}/blob/core_v0.16.1/megatron/core/dist_checkpointing/strategies"
RESILIENCY = "https://github.com/NVIDIA/nvidia-resiliency-ext"

# ---------------------------------------------------------------------------------------- retention


class KeepsNewestListed(Believing):
    """Retention after a tracker update counts every directory that is listed, in flight or not."""

    def retired(self, job: Job) -> Job:
        return job.drop(*[step for step, _ in job.disk][: -self.keep])


class CleansByListing(Believing):
    """Before a save all but the newest listed directory are deleted; a partial one is the newest."""

    def saved(self, job: Job, step: int) -> Job:
        return super().saved(job.drop(*[s for s, _ in job.disk][: -self.keep]), step)


def one_in_flight_takes_no_place(trainer: SimTrainer) -> None:
    """The overlap is refused; and if retention has a turn while one is in flight, 100 stays."""
    assert trainer.resumed == trainer.tracker() == 100 and trainer.steps() == [100]
    assert [(e.step, e.in_flight) for e in trainer.refused] == [(200, 100)]
    resumed_from = trainer.job.coordinator.locate(None)
    trainer.job.coordinator.release(resumed_from.lease, verified=100)
    trainer.save(200)
    for written in (False, True):
        if written:
            trainer.written(200)
        trainer.job.coordinator.pin(100, "make retention look")
        trainer.job.coordinator.unpin(100)
        trainer.judge()
        assert trainer.steps() == [100] and trainer.tracker() == 100
    trainer.poll()
    assert trainer.steps() == [200] and trainer.tracker() == 200


# -------------------------------------------------------------------------------------- completions


@dataclass(frozen=True)
class Calls:
    """A queue numbers its calls from 0; ``done`` are the numbers that the worker said are complete.

    ``run`` counts the queues of one process. ``writers``: (run, number, step) still writing.
    """

    run: int = 0
    asked: int = 0
    pending: tuple[tuple[int, int], ...] = ()
    writers: tuple[tuple[int, int, int], ...] = ()
    done: frozenset[tuple[int, int]] = frozenset()
    disk: tuple[tuple[int, str], ...] = ()
    tracker: int | None = None
    wrong: str = ""


class Completions:
    """Done right, a completion names the run of the queue it belongs to. ``forgets`` it: the old way."""

    STEPS = (100, 200)

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets

    def key(self) -> tuple[object, ...]:
        return (type(self), self.forgets)

    def initial(self) -> Calls:
        return Calls()

    def actions(self, state: Calls) -> Iterator[tuple[Action, Calls]]:
        for step in self.STEPS:
            if step > max((s for s, _ in state.disk), default=0) and not state.pending:
                yield Action("save", step), self._saved(state, step)
        for writer in state.writers:
            yield Action("written", writer[2]), self._written(state, writer)
        if state.pending:
            yield Action("poll"), self._polled(state)
        if state.run == 0:
            yield Action("retry"), replace(state, run=1, asked=0, pending=())

    def _saved(self, state: Calls, step: int) -> Calls:
        number = state.asked
        return replace(
            state,
            asked=number + 1,
            pending=(*state.pending, (number, step)),
            writers=(*state.writers, (state.run, number, step)),
            disk=(*state.disk, (step, "partial")),
        )

    def _written(self, state: Calls, writer: tuple[int, int, int]) -> Calls:
        run, number, _ = writer
        left = tuple(w for w in state.writers if w != writer)
        told = (0 if self.forgets else run, number)
        return replace(state, writers=left, done=state.done | {told})

    def _polled(self, state: Calls) -> Calls:
        for number, step in state.pending:
            told = (0 if self.forgets else state.run, number)
            if told not in state.done:
                continue
            writing = step in {s for _, _, s in state.writers}
            wrong = f"I5: another save's completion finalized step {step}, still being written"
            disk = {**dict(state.disk), step: "hollow" if writing else "complete"}
            pending = tuple(p for p in state.pending if p[0] != number)
            state = replace(state, disk=tuple(sorted(disk.items())), tracker=step, pending=pending)
            state = replace(state, wrong=wrong if writing else "")
        return state

    def broken(self, state: Calls) -> str:
        return state.wrong

    def show(self, state: Calls) -> str:
        disk = ", ".join(f"{step} {status}" for step, status in state.disk) or "nothing"
        return f"tracker {state.tracker or '-'}; {disk}"


def stale_reports_are_rejected(trainer: SimTrainer) -> None:
    """The words of the abandoned writers counted for nothing: neither for 200 nor for 100 again."""
    busy = trainer.job.coordinator.ledger.in_flight()
    assert busy is not None and (busy.step, busy.state) == (200, State.FORKED)
    assert not busy.reported and trainer.tracker() is None and trainer.steps() == []
    trainer.written(200)
    late = list(trainer.waiting)
    trainer.job.fail(trainer.attempts[200])
    trainer.save(200)
    trainer.waiting = []
    trainer.job.deliver(late)
    busy = trainer.job.coordinator.ledger.in_flight()
    assert busy is not None and busy.state is State.FORKED and not busy.reported
    assert isinstance(trainer.job.coordinator.ledger.report(late[0]), Rejected)
    trainer.written(200)
    trainer.poll()
    assert trainer.tracker() == 200 and trainer.acknowledged == [200]


@dataclass(frozen=True)
class Queued:
    """``results``: whose write results lie in the process-wide queue, first in first out."""

    pending: tuple[int, ...] = ()
    written: frozenset[int] = frozenset()
    results: tuple[int, ...] = ()
    tracker: int | None = None
    wrong: str = ""


class ResultsQueue:
    """Two saves in flight. Done right, each has a separate channel; ``shared``: one queue for all."""

    STEPS = (100, 200)

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared

    def key(self) -> tuple[object, ...]:
        return (type(self), self.shared)

    def initial(self) -> Queued:
        return Queued()

    def actions(self, state: Queued) -> Iterator[tuple[Action, Queued]]:
        for step in self.STEPS:
            if step > max((*state.pending, state.tracker or 0)):
                yield Action("save", step), replace(state, pending=(*state.pending, step))
        for step in state.pending:
            if step not in state.written:
                done = replace(state, written=state.written | {step})
                yield Action("written", step), replace(done, results=(*state.results, step))
        if state.pending:
            yield Action("poll"), self._polled(state)

    def _polled(self, state: Queued) -> Queued:
        for step in state.pending:
            if step not in state.written:
                break  # finalized in the order of the requests
            taken = state.results[0] if self.shared else step
            left = list(state.results)
            left.remove(taken)
            wrong = "" if taken == step else f"I5: step {step} has the metadata of step {taken}"
            state = replace(state, pending=state.pending[1:], results=tuple(left), tracker=step)
            state = replace(state, wrong=state.wrong or wrong)
        return state

    def broken(self, state: Queued) -> str:
        return state.wrong

    def show(self, state: Queued) -> str:
        waiting = ", ".join(map(str, state.results)) or "nothing"
        return f"tracker {state.tracker or '-'}; queued results: {waiting}"


class TwoParts(SimTrainer):
    """A checkpoint of two parts whose shards differ in size, so that their results can be told apart."""

    def __init__(self) -> None:
        super().__init__(parts=(PartSpec("a", directory="a"), PartSpec("b", directory="b")))

    def part(self, spec: PartSpec, of: AttemptId, rank: int) -> FakePart:
        body = fake_content(of, rank) + b"." * (ord(spec.name) + rank)
        content = body + hashlib.sha256(body).hexdigest().encode()
        return FakePart(spec.name, spec.directory, rank, content)


def results_are_not_mixed(trainer: TwoParts) -> None:
    """The overlap was refused; each part's metadata has the results of its shards."""
    assert trainer.tracker() == 100 and trainer.steps() == [100]
    for part in "ab":
        directory = f"{MEGATRON.published_name(100)}/{part}"
        recorded = json.loads(trainer.reader().read(f"{directory}/.metadata", 1 << 16))
        shards = [trainer.reader().stat(f"{directory}/__{r}_0.distcp").size for r in range(2)]
        assert recorded == [[[rank, size]] for rank, size in enumerate(shards)], (part, recorded)
    trainer.save(200)
    trainer.written(200)
    trainer.poll()
    assert trainer.tracker() == 200


# ------------------------------------------------------------------------------------- the live step


class NamesLiveStep(Believing):
    """The finalizer reads the step when it runs, not when it was made."""

    def tracked(self, job: Job, step: int) -> Job:
        named = step + job.ahead
        wrong = (
            "" if job.status(named) == "complete" else f"I2: the tracker names {named}, not there"
        )
        return replace(job, tracker=named, wrong=wrong)


def names_the_saved_step(trainer: RealTrainer) -> None:
    """Step, directory and content are those of the call."""
    assert trainer.acknowledged == [100]
    assert int((trainer.root / TRACKER).read_text()) == 100
    manifest = json.loads(
        (trainer.root / MEGATRON.published_name(100) / ".ckptfsm/manifest.json").read_text()
    )
    assert manifest["step"] == 100
    trainer.restart()
    restored = trainer.manager.restore({"weights": None})
    assert restored is not None and restored.step == 100
    assert restored.state["weights"] == b"at the save"


# -------------------------------------------------------------------------------------- dead workers


class WaitsForTheDead(Believing):
    """A worker that is gone never reports; no code looks whether it lives."""

    def polled(self, job: Job) -> Job:
        alive = replace(job, pending=tuple(p for p in job.pending if p[1] != "dead"))
        dead = tuple(p for p in job.pending if p[1] == "dead")
        after = super().polled(alive)
        return replace(after, pending=(*after.pending, *dead))


class DeadMeansDone(Believing):
    """A writer that no longer lives counts as done; the finalizers run."""

    def writer_died(self, job: Job, step: int) -> Job:
        wrong = f"I3: step {step} is tracked without the shards of its killed writer"
        return replace(self.tracked(job.put(step, "hollow"), step), wrong=wrong)


def bounded_failure(trainer: RealTrainer) -> None:
    """Leaving told of the dead writer at once; a hung one fails at its deadline; no rank is stranded."""
    assert [type(e) for e in trainer.failures] == [WriterDied]
    assert (trainer.failures[0].step, trainer.failures[0].rank) == (100, 0)
    assert "SIGKILL" in str(trainer.failures[0])
    trainer.restart()
    assert trainer.manager.latest_step() is None
    trainer.save(200)
    trainer.clock.advance(trainer.manager.config.writer_timeout_s + 1)
    trainer.poll()
    assert trainer.failures[1].reason == "writer_hung", trainer.failures
    errors = run_ranks(2, _Stranded(trainer.root.parent / "two"))
    assert [type(e) for e in errors] == [WriterDied, WriterDied], errors
    assert {e.rank for e in errors if isinstance(e, WriterDied)} == {1}


@dataclass
class _Stranded:
    """Two ranks: the writer of rank 1 is killed, both wait for the save."""

    root: Path

    def __call__(self, transport: ThreadTransport) -> None:
        driver = FakeDriver(transport.rank, before_write=_die_on_rank_1)
        ports = fake_ports(self.root, driver=driver, transport=transport)
        manager = Manager(ports, make_config({"exit_timeout_s": 1.0, "busy_timeout_s": 20.0}))
        try:
            manager.save(100, {"weights": b"w"}).wait()
        finally:
            manager.abandon()


def _die_on_rank_1(part: str, rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def held_foreign(directory: Path) -> RealTrainer:
    return RealTrainer(directory, hold=True, request=FakeRequest(b"foreign"))


def no_finalizer_ran(trainer: RealTrainer) -> None:
    """The killed writer failed its save: no finalizer ran for it, nothing is published or tracked."""
    assert trainer.driver.finalized == []
    assert [type(e) for e in trainer.failures] == [WriterDied]
    assert not (trainer.root / TRACKER).exists()
    assert not (trainer.root / MEGATRON.published_name(100)).exists()
    trainer.hold = False
    trainer.save(101)
    trainer.poll()
    assert len(trainer.driver.finalized) == 1 and trainer.acknowledged == [101]


# --------------------------------------------------------------------------------------- the tracker


class TruncatesTracker(Believing):
    """The tracker is opened for writing, which empties it; a torn one ends the job with status 0."""

    def killed_at_tracker(self, job: Job) -> Job:
        return replace(super().killed_at_tracker(job), tracker=TORN)

    def restarted(self, job: Job) -> Job:
        if job.tracker == TORN:
            return replace(job, wrong="I8: the restart ends with status 0, as if all were done")
        return super().restarted(job)


def never_torn(trainer: SimTrainer) -> None:
    """Rolled forward; whole at every call of a tracker write; a torn one is rebuilt, with a word."""
    assert trainer.resumed == trainer.tracker() == 100 and trainer.acknowledged == [100]
    assert crash_points_of_a_tracker() > 5
    for torn in (b"", b"\0\0\0", b"1", b"1OO"):
        trainer.job.close()
        storage = SimStorage(trainer.disk, "somebody")
        storage.unlink(TRACKER)
        trainer.disk.plant_file(TRACKER, torn)
        trainer.open()
        assert trainer.resumed == trainer.tracker() == 100, torn
        assert any("the tracker" in w for w in trainer.report.warnings), (torn, trainer.report)


def crash_points_of_a_tracker() -> int:
    """Die at each call on the tracker, by kill and by power: it is old or new. Their number."""
    index = 0
    while True:
        for power in (False, True):
            trainer = SimTrainer()
            for step in (100, 200):
                trainer.save(step)
                trainer.written(step)
                if step == 100:
                    trainer.poll()
            storage = trainer.job.storage
            assert isinstance(storage, FaultStorage)
            storage.after = _DieAtTracker(index)
            try:
                trainer.poll()
            except ProcessDead:
                trainer.power() if power else trainer.kill()
                assert trainer.reader().read(TRACKER, 10) in (b"100\n", b"200\n")
                check_root(trainer.reader(), 100)
                trainer.open()
                assert trainer.resumed == 200
            else:
                return index
        index += 1


class _DieAtTracker:
    """A hook that kills the process at the n-th call that touches the tracker or its directory."""

    def __init__(self, index: int) -> None:
        self.left = index

    def __call__(self, index: int, method: str, path: str) -> None:
        if TRACKER in path or (method, path) == ("fsync_dir", ""):
            self.left -= 1
            if self.left < 0:
                raise ProcessDead(f"{method} {path}")


# ---------------------------------------------------------------------------------------- the reports


def two_parts(directory: Path) -> TwoParts:
    return TwoParts()


REPORTS = (
    Report(
        "bridge-5184",
        "retention keeps the in-flight newest directory and deletes the tracked one",
        (f"{BRIDGE}/pull/5184", f"{BRIDGE}/pull/4678"),
        KeepsNewestListed(overlap=True),
        SaveLoop(overlap=True),
        sim,
        one_in_flight_takes_no_place,
        "retention sees tracked checkpoints only; one is in flight per root; the tracked one is kept",
    ),
    Report(
        "bridge-5117",
        "a completion that survived a failed run finalizes the first save of the next",
        (f"{BRIDGE}/pull/5117",),
        Completions(forgets=True),
        Completions(forgets=False),
        sim,
        stale_reports_are_rejected,
        "a report counts for its own (epoch, step, attempt, part, rank); every other is rejected",
    ),
    Report(
        "bridge-3267",
        "the finalize closure reads the live step: the tracker names another iteration",
        (f"{BRIDGE}/issues/3267", f"{BRIDGE}/pull/3269"),
        NamesLiveStep("train", steps=(100,), crash=""),
        SaveLoop("train"),
        held,
        names_the_saved_step,
        "what was requested is frozen in the journal at the call; nothing later reads a live step",
    ),
    Report(
        "megatron-6970",
        "a killed persistent worker is polled for ever; the blocking finalize hangs",
        (f"{LM}/issues/6970", f"{LM}/pull/6971"),
        WaitsForTheDead("writer_dies", "leave", steps=(100,), crash=""),
        SaveLoop("writer_dies", "leave"),
        held,
        bounded_failure,
        "a dead or hung writer becomes `failed(reason)` in bounded time, on every rank alike",
    ),
    Report(
        "megatron-results",
        "requests in flight together swap their results: committed, and unloadable",
        (f"{STRATEGIES}/filesystem_async.py", f"{BRIDGE}/pull/5842"),
        ResultsQueue(shared=True),
        ResultsQueue(shared=False),
        two_parts,
        results_are_not_mixed,
        "one in flight per root; results travel in the receipt of their own attempt, part and rank",
    ),
    Report(
        "megatron-temporal",
        "a SIGKILLed writer counts as done, and the finalizers run",
        (f"{STRATEGIES}/async_utils.py", f"{RESILIENCY}/pull/36"),
        DeadMeansDone("writer_dies", steps=(100,), crash=""),
        SaveLoop("writer_dies"),
        held_foreign,
        no_finalizer_ran,
        "done means exit code 0 and a receipt of the same attempt; otherwise no finalizer runs",
    ),
    Report(
        "megatron-tracker",
        "the tracker is truncated before it is written; a torn one ends the restart with status 0",
        (f"{LM}/blob/core_v0.16.1/megatron/training/checkpointing.py",),
        TruncatesTracker("kill_in_poll", steps=(100,), crash=""),
        SaveLoop("kill_in_poll"),
        sim,
        never_torn,
        "the tracker is put by rename and read back; a torn one is rebuilt from journal and manifests",
    ),
    Report(
        "megatron-non-persistent",
        "cleanup keeps a partial newest directory and deletes the tracked one",
        (f"{LM}/blob/core_v0.16.1/megatron/training/checkpointing.py", f"{BRIDGE}/pull/4820"),
        CleansByListing(crashes=2),
        SaveLoop(crashes=2),
        sim,
        resumed_from_100,
        "failed and partial attempts never occupy a keep slot",
    ),
)
