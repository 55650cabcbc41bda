"""The transitions from a state of the exhaustive search, in a fixed order.

A coordinator's action is done once undisturbed; that run shows its points. Then the same action
again: crashed or overtaken before each point, failed at each call, read into at each call, fenced
at each check. The moves of the world beside it (writers, a reader, damage, the zombie's one rename)
come after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import Any

from ckptfsm.core import layout
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from proof.exhaustive_disk import Dir, tree
from proof.exhaustive_promises import PUBLISHED, Watch, judge, tracker_step
from proof.exhaustive_world import (
    TORN,
    Action,
    Broken,
    Left,
    Moment,
    Reader,
    Run,
    Scope,
    World,
    Writer,
    coordinator_actions,
    failing,
    forget_done,
    parts_of,
    perform,
    reading,
    record_of_job,
    reopen,
    step_reader,
    write_part,
)

Work = Callable[[Run], World]


@dataclass(frozen=True)
class Next:
    """A transition: its label, and the state after it, or the promise it broke."""

    action: str
    world: World | None
    broken: Broken | None = None
    before: Moment | None = None

    @property
    def text(self) -> str:
        return f"{self.action}: {self.before.text}" if self.before is not None else self.action


class Moves:
    """The transitions of one scope. Remembers which starts it has seen to be idempotent."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._watch = Watch(scope)
        self._started: set[Any] = set()

    def after(self, world: World) -> Iterator[Next]:
        """Everything that can happen next."""
        if world.refused:
            return
        if world.live is None:
            yield from self._around(world, Action("start", lambda c: c.open()), self._start)
        else:
            for action in coordinator_actions(world, self.scope):

                def work(run: Run, action: Action = action) -> World:
                    return perform(run, self.scope, action)

                yield from self._around(world, action, work)
            if world.left.crashes:
                yield Next("crash", crashed(world))
            if world.left.takeovers:
                yield Next("taken over", crashed(world, takeover=True))
        yield from self._environment(world)

    # ----------------------------------------------------------------------------- the coordinator

    def _around(self, world: World, action: Action, work: Work) -> Iterator[Next]:
        run = Run(world, self._watch)
        yield _attempt(action.text, run, work)
        spent = world._replace(left=world.left.less(action.cost)) if action.cost else world
        if action.writers is not None:
            spent = spent._replace(writers=action.writers)
        if world.left.crashes:
            moments = {(m.disk, m.journal): m for m in reversed(run.moments)}
            for moment in reversed(moments.values()):
                yield Next(f"{action.text}; crash before", crashed(spent, moment), before=moment)
        if world.left.errors:
            less = world._replace(left=world.left.less("errors"))
            for at in range(1, run.points + 1):
                again = Run(less, self._watch)
                again.interject = failing(at)
                yield _attempt(f"{action.text}; error at call {at}", again, work)
        if world.live is None:
            return
        if any(
            layout.MEGATRON.parse_published(m.args[0]) for m in run.moments if m.call == "rename"
        ):
            yield from self._read_into(world, action, work, run.points)
        if world.left.takeovers:
            yield from self._overtaken(world, spent, action, work, run)

    def _overtaken(
        self, world: World, spent: World, action: Action, work: Work, run: Run
    ) -> Iterator[Next]:
        """I9: a checked rename may still land, as the zombie; an unchecked one must not."""
        for moment in run.moments:
            taken = crashed(spent, moment, takeover=True)
            yield Next(f"{action.text}; taken over before", taken, before=moment)
        for at in range(1, run.lease.checks + 1):
            fenced = Run(world, self._watch, fenced_at=at)
            found = _attempt(f"{action.text}; fenced at check {at}", fenced, work)
            if found.broken is not None:
                yield found

    def _read_into(self, world: World, action: Action, work: Work, points: int) -> Iterator[Next]:
        """A reader goes on, a little or to the end, in the middle of a move of a directory."""
        for reader, left in readers_that_may_step(world):
            for at, to_the_end in product(range(1, points + 1), (False, True)):
                run = Run(world._replace(left=left), self._watch)
                run.interject = reading(at, reader, to_the_end=to_the_end)
                how = "goes on" if not to_the_end else "takes its lease"
                text = f"{action.text}; at call {at} the reader of step {reader.step} {how}"
                yield _attempt(text, run, work)

    def _start(self, run: Run) -> World:
        """A start, and the promises after it: evidence is used, the tracker is right (I2, I8)."""
        before, scope = run.world, self.scope
        after = reopen(run, scope)
        known = [c for c in before.journal.checkpoints if c.state in PUBLISHED]
        whole = [c for c in known if _is_whole(before.disk, c.id, c.provenance, scope)]
        if after.refused and whole and not _is_in_others_use(before):
            raise Broken("I8", f"refused to start, and {whole[0].id} is whole")
        if after.live is None:
            return after
        tracked = [c.step for c in after.live.checkpoints if c.state is State.TRACKED]
        if not tracked and (whole or tracker_step(before.disk) is not None):
            raise Broken("I8", "started from scratch in the face of evidence")
        _check_unasked(before, after)
        if after.live.pending or run.interject is not None:
            return after
        for checkpoint in after.live.checkpoints:
            here = _is_whole(after.disk, checkpoint.id, checkpoint.provenance, scope)
            if checkpoint.state is State.TRACKED and not here:
                raise Broken("I2", f"started with {checkpoint.id}, which is not whole")
        if tracked and tracker_step(after.disk) != max(tracked):
            said = tracker_step(after.disk)
            raise Broken("I2", f"started at {max(tracked)}, the tracker says {said}")
        if (after.disk, after.journal) not in self._started:
            self._started.add((after.disk, after.journal))
            self._start_again(after)
        return after

    def _start_again(self, after: World) -> None:
        """I8: starting once more changes nothing but the epoch."""
        again = Run(after._replace(live=None, epoch=after.epoch + 1), self._watch)
        second = reopen(again, self.scope)
        gone = State.QUARANTINED  # a start forgets those that were moved aside
        there, then = (
            {c.id: c.state for c in world.journal.checkpoints if c.state is not gone}
            for world in (after, second)
        )
        same = second.disk == after.disk and there == then
        if second.live is None or not same or second.acked != after.acked:
            raise Broken("I8", "a second start decides otherwise than the first")

    # ------------------------------------------------------------------------------ the environment

    def _environment(self, world: World) -> Iterator[Next]:
        for writer in world.writers:
            if writer.alive:
                yield from self._write(world, writer)
        if world.zombie is not None:
            yield Next(f"the zombie's rename lands: {' -> '.join(world.zombie)}", _land(world))
        if world.reader is not None and world.reader.told:
            yield Next("the reader is done", _release(world))
        for reader, left in readers_that_may_step(world):
            run = Run(world, _look_away)
            stepped = step_reader(run.disk, reader)
            after = world._replace(disk=run.disk.value, reader=stepped, left=left)
            said = f", told: {stepped.told}" if stepped.told else ""
            yield Next(f"the reader of step {reader.step} goes on{said}", after)
        if world.left.jobs:
            yield from _end_jobs(world._replace(left=world.left.less("jobs")), self.scope)
        if world.left.damages:
            yield from self._damage(world)
        if world.left.outsiders and world.live is None:
            yield from _outsiders(world._replace(left=world.left.less("outsiders")))

    def _write(self, world: World, writer: Writer) -> Iterator[Next]:
        """A writer goes on, dies by itself, or is killed because its attempt has failed."""
        name = f"writer of rank {writer.rank} of {writer.of}"
        disk, wrote = write_part(world.disk, self.scope, writer), writer.wrote + 1
        dead = writer._replace(alive=False)
        if disk is None:
            yield Next(f"{name} finds its directory gone", _with_writer(world, writer, dead))
        else:
            alive = wrote < len(parts_of(self.scope, writer.rank))
            then = writer._replace(wrote=wrote, alive=alive)
            written = _with_writer(world._replace(disk=disk), writer, then)
            yield Next(f"{name} writes a part", written)
        living = world.live.checkpoints if world.live is not None else ()
        if any(c.id == writer.of and c.state is State.FAILED for c in living):
            yield Next(f"{name} is killed", _with_writer(world, writer, dead))
        elif world.left.deaths:
            less = world._replace(left=world.left.less("deaths"))
            yield Next(f"{name} dies", _with_writer(less, writer, dead))

    def _damage(self, world: World) -> Iterator[Next]:
        """The world guts or removes what was published, or tears the tracker."""
        left = world.left.less("damages")
        for name, node in sorted(world.disk.names.items()):
            step = layout.MEGATRON.parse_published(name)
            verdict = judge(node, self.scope)
            if step is None or not isinstance(node, Dir) or not verdict.complete:
                continue
            damaged = world.damaged | {verdict.of or AttemptId(step, 0, 0)}
            shard = next(n for n in sorted(node.names) if n.startswith(("state_", "shard")))
            for text, value in (("gutted", node.put(shard, None)), ("removed", None)):
                disk = world.disk.put(name, value)
                then = world._replace(disk=disk, damaged=damaged, left=left)
                yield Next(f"{name} is {text}", then)
        said = tracker_step(world.disk)
        if said is not None and world.live is None:
            disk = world.disk.put(layout.TRACKER, TORN + b"%d" % said)
            yield Next("the tracker is torn", world._replace(disk=disk, left=left))


def _end_jobs(world: World, scope: Scope) -> Iterator[Next]:
    """A job is done with a tracked checkpoint; before that its record may be damaged."""
    for checkpoint in world.journal.checkpoints:
        for job in scope.holds if checkpoint.state is State.TRACKED else ():
            name = layout.job_name(checkpoint.id, job)
            record, before = record_of_job(name), world.disk.get(name)
            if before != record:
                there = world.disk
                if there.get(layout.JOBS) is None:
                    there = there.put(layout.JOBS, Dir({}))
                done = world._replace(disk=there.put(name, record))
                yield Next(f"the job {job} is done with {checkpoint.id}", done)
                if before is None:
                    torn = world._replace(disk=there.put(name, record[:-1]))
                    yield Next(f"the record of {job} for {checkpoint.id} is torn", torn)


def crashed(world: World, moment: Moment | None = None, *, takeover: bool = False) -> World:
    """The remains of a crash; or a takeover: the old writers go on, one checked rename may still
    land."""
    after = world._replace(
        live=None,
        epoch=world.epoch + 1,
        writers=tuple(w for w in world.writers if w.alive) if takeover else (),
        left=world.left.less("takeovers" if takeover else "crashes"),
    )
    if moment is not None:
        after = after._replace(disk=moment.disk, journal=moment.journal, acked=moment.acked)
        if takeover and moment.call == "rename" and moment.checked:
            after = after._replace(zombie=moment.args)
    return after


def readers_that_may_step(world: World) -> Iterator[tuple[Reader, Left]]:
    """The reader on its way, or one that begins on any step that could be there."""
    if world.reader is not None:
        if not world.reader.told:
            yield world.reader, world.left
    elif world.left.readers:
        for name in sorted(world.disk.names):
            step = layout.MEGATRON.parse_published(name)
            if step is not None:
                yield Reader(step), world.left.less("readers")


def _attempt(text: str, run: Run, work: Work) -> Next:
    try:
        return Next(text, work(run))
    except Broken as broken:
        return Next(text, None, broken)


def _look_away(run: Run, call: str, args: tuple[Any, ...]) -> None:
    """Moves of the world are not judged."""


def _is_whole(disk: Dir, of: AttemptId, provenance: str, scope: Scope) -> bool:
    verdict = judge(disk.get(layout.MEGATRON.published_name(of.step)), scope)
    return verdict.complete and (verdict.of == of or provenance == "adopted")


def _is_in_others_use(world: World) -> bool:
    """True if an outsider wrote the tracker while a rollback was unfinished: a person must look."""
    content = world.disk.names.get(layout.TRACKER)
    by_outsider = isinstance(content, bytes) and not content.endswith(b"\n")
    return world.journal.intent.rolling_back and by_outsider


def _check_unasked(before: World, after: World) -> None:
    """A directory newer than the step in use is reported, never resumed from unasked."""
    assert after.live is not None
    in_use = tracker_step(before.disk)
    content = before.disk.names.get(layout.TRACKER)
    if isinstance(content, bytes) and content.startswith(TORN) and before.journal.checkpoints:
        in_use = int(content.removeprefix(TORN))  # the journal could have told
    known = {c.id for c in before.journal.checkpoints}
    for checkpoint in after.live.checkpoints:
        new = checkpoint.provenance == "adopted" and checkpoint.id not in known
        if new and in_use is not None and checkpoint.step > in_use:
            raise Broken("I8", f"{checkpoint.id}, newer than {in_use}, was adopted unasked")


def _with_writer(world: World, writer: Writer, then: Writer) -> World:
    writers = tuple(sorted(then if w == writer else w for w in world.writers))
    return forget_done(world._replace(writers=writers))


def _land(world: World) -> World:
    """A rename that was checked before the takeover; it may find nothing to rename any more."""
    assert world.zombie is not None
    run = Run(world, _look_away)
    try:
        run.disk.rename(*world.zombie)
    except OSError:
        return world._replace(zombie=None)
    return world._replace(zombie=None, scarred=True, disk=run.disk.value)


def _outsiders(world: World) -> Iterator[Next]:
    """Another trainer goes on from the tracker. A person puts a checkpoint back, or clears staging."""
    disk, named = world.disk, tracker_step(world.disk) or 0
    step = next(s for s in count(named + 1) if not disk.get(layout.MEGATRON.published_name(s)))
    saved = disk.put(layout.MEGATRON.published_name(step), tree(stock=b"", shard=b"%d" % step))
    yield Next(f"another trainer saves step {step}", _named(world, saved, step))
    for name in _names_in(disk, layout.QUARANTINE):
        of = layout.parse_aside(name)
        home = layout.MEGATRON.published_name(of.step) if of is not None else ""
        if of is not None and of.step > named and not disk.get(home):
            node = disk.get(f"{layout.QUARANTINE}/{name}")
            back = disk.put(f"{layout.QUARANTINE}/{name}", None).put(home, node)
            yield Next(f"a person puts {of} back", _named(world, back, of.step))
    for name in _names_in(disk, layout.STAGING):
        gone = disk.put(f"{layout.STAGING}/{name}", None)
        yield Next(f"a person removes {name} in staging", world._replace(disk=gone))


def _named(world: World, disk: Dir, step: int) -> World:
    """The tracker as a stock trainer or a person writes it: without a newline."""
    return world._replace(disk=disk.put(layout.TRACKER, b"%d" % step))


def _names_in(disk: Dir, directory: str) -> list[str]:
    node = disk.get(directory)
    return sorted(node.names) if isinstance(node, Dir) else []


def _release(world: World) -> World:
    assert world.reader is not None
    name = f"{layout.READERS}/{world.reader.step}.reader.json"
    disk = world.disk.put(name, None) if world.disk.get(name) is not None else world.disk
    return world._replace(disk=disk, reader=None)
