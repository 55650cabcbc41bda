"""Commands of a script for a job of ours: it opens, saves, fails, prunes and closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from script_runs import Calls, Run
from script_words import part_of, short

from ckptfsm.core.events import Failed, FinalizersRan, WriterForked, WriterGone
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Identity
from ckptfsm.core.retention import BestN, KeepAll, LatestN, Policy
from ckptfsm.testing.harness import FakeJob

if TYPE_CHECKING:
    from script_story import Story


NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def do_open(story: Story, *options: str) -> None:
    """``open [fresh|strict] [takeover] [keep=N] [best=N] [ranks=N] [hold=N]``: another run begins.

    With ``hold`` its job ``copy`` holds the multiples of N.
    """
    named = dict(o.split("=") for o in options if "=" in o)
    name = NAMES[len(story.names)]
    story.names.append(name)
    hooks, story.waiting = story.waiting, []
    resume = next((o for o in options if o in ("fresh", "strict")), "fallback")
    retention: Policy = LatestN(int(named["keep"])) if "keep" in named else KeepAll()
    if "best" in named:
        retention |= BestN("loss", int(named["best"]))
    job = FakeJob(
        Calls(story, name, hooks),
        ranks=int(named.get("ranks", 2)),
        retention=retention,
        resume=resume,
        takeover="takeover" in options,
        holds={"copy": int(named["hold"])} if "hold" in named else {},
        identity=Identity("sim", sum(name.encode()), name, name),
    )
    run = Run(name, job, hooks)
    story.runs.append(run)
    try:
        report = job.open()
    except Exception:
        story.end(run)  # it is refused, and the lock is free
        raise
    story.said += [f"{short(d.subject)}: {d.result}" for d in report.decisions]
    story.said += [f"warning: {short(w)}" for w in report.warnings]


def do_reopen(story: Story, *options: str) -> None:
    """The next run, after the end of this one, if it lives."""
    if story.runs:
        do_kill(story)
    do_open(story, *options)


def do_reopen_if_dead(story: Story, *options: str) -> None:
    if not story.runs:
        do_open(story, *options)


def do_reopen_if_stopped(story: Story) -> None:
    if story.job.coordinator.fatal is not None:
        do_reopen(story)


def do_ours_saves(story: Story, step: str) -> None:
    """A job of ours comes, saves a step, and leaves."""
    do_open(story, "takeover")
    do_save(story, step)
    do_close(story)


def do_kill(story: Story) -> None:
    story.end(story.run)


def do_close(story: Story) -> None:
    run = story.run
    run.job.close()
    story.end(run)


def do_save(story: Story, *steps: str) -> None:
    for step in steps:
        story.job.save(int(step))


def do_request(story: Story, step: str, *parts: str) -> None:
    _ask(story, int(step), parts, in_place=False)


def do_begin(story: Story, step: str, *parts: str) -> None:
    """A request that every rank has forked for."""
    _ask(story, int(step), parts, in_place=False)
    story.job.fork(story.run.of)


def do_begin_in_place(story: Story, step: str, *parts: str) -> None:
    _ask(story, int(step), parts, in_place=True)
    story.job.fork(story.run.of)


def _ask(story: Story, step: int, parts: Sequence[str], *, in_place: bool) -> None:
    specs = tuple(part_of(text) for text in parts) or (PartSpec("state"),)
    story.run.of = story.job.request(step, specs, in_place=in_place)


def do_write(story: Story, *ranks: str) -> None:
    """Ranks write and report their shares of the save in flight."""
    for rank in map(int, ranks):
        story.job.write(story.run.of, rank)


def do_finalized(story: Story, *ranks: str) -> None:
    story.job.coordinator.report([FinalizersRan(story.run.of, int(r)) for r in ranks])


def do_wrong_world(story: Story, rank: str) -> None:
    story.job.coordinator.report([WriterForked(story.run.of, int(rank), story.job.ranks + 1)])


def do_fail(story: Story, reason: str = "writer_died") -> None:
    """The save in flight fails, and its writers are gone."""
    story.job.fail(story.run.of, reason)


def do_failed(story: Story, reason: str = "writer_hung") -> None:
    """The save in flight fails, and its writers may live."""
    story.job.coordinator.report([Failed(story.run.of, reason)])


def do_gone(story: Story, *ranks: str) -> None:
    story.job.coordinator.report([WriterGone(story.run.of, int(r)) for r in ranks])


def do_rollback(story: Story, step: str) -> None:
    story.job.coordinator.rollback(int(step))


def do_delete(story: Story, step: str) -> None:
    story.job.coordinator.delete(int(step))


def do_pin(story: Story, step: str) -> None:
    story.job.coordinator.pin(int(step), "keep")


def do_unpin(story: Story, step: str) -> None:
    story.job.coordinator.unpin(int(step))


def do_measure(story: Story, step: str, loss: str) -> None:
    """The loss of a step comes after its save."""
    story.job.coordinator.record_metrics(int(step), {"loss": float(loss)})


def do_withdraw(story: Story, step: str) -> None:
    story.job.coordinator.withdraw_damaged(int(step), "bit rot")


def do_restore(story: Story) -> None:
    """The newest is found to be read, and let go."""
    found = story.job.coordinator.locate(None)
    story.said.append(f"located {found.step if found else None} {found.problem if found else ''}")
    if found:
        story.job.coordinator.release(found.lease)


def do_verify(story: Story) -> None:
    """The newest is restored: all its digests agree."""
    found = story.job.coordinator.locate(None)
    assert found is not None, "there is none to verify"
    story.job.coordinator.release(found.lease, verified=found.step)


def do_tick(story: Story, times: str = "1") -> None:
    for _ in range(int(times)):
        story.job.clock.now += 60
        story.job.coordinator.tick()


def do_empty(story: Story, pieces: str) -> None:
    """The trash is emptied in the background, so many files at most."""
    story.said.append(f"deleted {story.job.coordinator._applier.give_space_back(int(pieces))}")


def do_failing_saves(story: Story, times: str) -> None:
    for _ in range(int(times)):
        story.job.fail(story.job.request(2))


def do_cannot_write(story: Story, part: str) -> None:
    """The last rank begins to write a part and cannot."""
    story.job.cannot = frozenset({part})


def do_failing_rollback(story: Story, step: str) -> None:
    """A rollback that cannot move anything, ever."""
    story.do_when("always", "rename", "->", "QUARANTINE:", "fail", "EIO")
    do_rollback(story, step)


def do_reopen_after_damage(story: Story) -> None:
    """The next run, after the newest step was gutted."""
    do_close(story)
    story.attempt("put @2/SHARD gutted")
    do_open(story)


def do_end_writers_or_reopen(story: Story) -> None:
    """The writers of the failed attempt end, or died with their job."""
    if story.runs:
        do_gone_of_failed(story)
    else:
        do_open(story)


def do_gone_of_failed(story: Story) -> None:
    for failed in story.job.coordinator.ledger.in_state(State.FAILED):
        story.job.coordinator.report([WriterGone(failed.id, r) for r in range(story.job.ranks)])


def do_dying_start(story: Story) -> None:
    """A start that dies before it writes the tracker."""
    story.do_when("open_exclusive", "TRACKER:", "die")
    story.attempt("open")
