"""The promises that must hold: at every point of an action, in every state, and for every event in
every state.

Rules: judged from the tree, the records and the table's outcome by the words of the promises, with
none of production's questions. A check that the world itself made void (it gutted that directory, a
fenced process landed its one effect) is left out for exactly that checkpoint, or for that history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import ckptfsm.core.ledger as ledger_module
import ckptfsm.core.retention as retention_module
from ckptfsm.core import documents, layout, lifecycle
from ckptfsm.core.errors import IllegalTransition
from ckptfsm.core.events import (
    UNUSABLE,
    Adopted,
    Cleaned,
    Event,
    Failed,
    FinalizersRan,
    FoundPublished,
    Published,
    PublishedOnDisk,
    Removed,
    Reprieved,
    SaveRequested,
    ShardReported,
    Superseded,
    TrackerWritten,
    Withdrawn,
    WriterForked,
    WriterGone,
    WritersLost,
)
from ckptfsm.core.layout import PINS, QUARANTINE, READERS, STAGING, TRACKER, TRASH
from ckptfsm.core.ledger import KnownCheckpoints, Ledger, Rejected
from ckptfsm.core.lifecycle import EVENTS, IN_FLIGHT, UNPUBLISHED, Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.disk.durable import TEMPORARY
from proof.coverage import Coverage
from proof.exhaustive_disk import Dir
from proof.exhaustive_world import (
    STOCK,
    TORN,
    Broken,
    Reader,
    Run,
    Scope,
    World,
    held,
    is_effect,
    is_gutted,
    parts_of,
    shard_name,
)

PUBLISHED = frozenset({State.FINALIZED, State.TRACKED, State.PRUNABLE})
_GONE = f"{TRASH}/gone-"
_MAY_UNLINK = (TRASH, PINS, READERS, layout.EPOCHS)


class Verdict(NamedTuple):
    """The kind of a directory: the attempt of its manifest, if any, and whether all files are
    there."""

    of: AttemptId | None
    complete: bool


def require(holds: bool, promise: str, what: str) -> None:
    if not holds:
        raise Broken(promise, what)


def judge(node: Dir | bytes | None, scope: Scope) -> Verdict:
    """Complete: every shard and every receipt of every declared part and rank, and a manifest."""
    if not isinstance(node, Dir):
        return Verdict(None, False)
    if node.note is None:
        node.note = _judge(node, scope)
    verdict: Verdict = node.note
    return verdict


def _judge(node: Dir, scope: Scope) -> Verdict:
    manifest = node.get(layout.MANIFEST)
    if not isinstance(manifest, bytes):
        return Verdict(None, STOCK in node.names and "shard" in node.names)
    said = json.loads(manifest)
    of = AttemptId(said["step"], said["epoch"], said["attempt"])
    return Verdict(of, _holds_all(node, of, scope))


def _holds_all(node: Dir | bytes | None, of: AttemptId, scope: Scope) -> bool:
    """Every declared shard with the content its rank wrote for this attempt, and its receipt."""
    return isinstance(node, Dir) and all(
        node.get(shard_name(part, rank)) == f"{of} {part} {rank}".encode()
        and isinstance(node.get(layout.receipt_name(part, rank)), bytes)
        for rank in range(scope.world_size)
        for part in parts_of(scope, rank)
    )


def tracker_step(disk: Dir) -> int | None:
    content = disk.names.get(TRACKER)
    return int(content) if isinstance(content, bytes) and content.strip().isdigit() else None


def marked(disk: Dir, directory: str) -> set[int]:
    """The steps that pins or leases name."""
    node = disk.get(directory)
    names = node.names if isinstance(node, Dir) else {}
    return {int(n.split(".")[0]) for n in names if n.endswith(".json")}


# ------------------------------------------------------------------------------ while it happens


class Watch:
    """Looks at every change before it is made. There is one per scope; the run calls it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, run: Run, call: str, args: tuple[Any, ...]) -> None:
        if call in ("fsync", "renamed"):
            return
        if run.lease.fenced:
            raise Broken("I9", f"{call} {args} by a fenced coordinator")
        if not run.fresh and is_effect(call, args):
            raise Broken("I9", f"{call} {args} with no look at the epoch since the last effect")
        if call == "rename":
            self._renamed(run, *args)
        elif call in ("unlink", "rmdir"):
            self._deleted(run, args[0])
        elif call == "append" and isinstance(args[0], documents.TransitionRecord):
            self._recorded(run, args[0])

    def _renamed(self, run: Run, src: str, dst: str) -> None:
        """A directory leaves its name only as the journal says (I1)."""
        node = run.disk.value.get(src)
        step = layout.MEGATRON.parse_published(src)
        if step is not None:
            verdict = judge(node, self.scope)
            of = verdict.of or _of_step(run, step)
            state = run.journal.value.state_of(of)
            aside = dst.startswith(QUARANTINE) and (state == "quarantined" or not verdict.complete)
            pruned = dst.startswith(TRASH) and state == "prunable"
            require(aside or pruned, "I1", f"{src} ({state}) was moved to {dst}")
        elif src.startswith(STAGING) and dst.startswith(TRASH):
            state = run.journal.value.state_of(layout.parse_attempt(src.rpartition("/")[2]))
            require(state == "failed", "I1", f"{src} ({state}) was moved to {dst}")
        elif src.startswith(TRASH) and dst.startswith(_GONE) and TEMPORARY not in src:
            state = run.journal.value.state_of(layout.parse_aside(src.rpartition("/")[2]))
            require(state == "absent", "I1", f"{src} ({state}) was moved to {dst}")
        elif src.startswith(TRASH) and dst.startswith(QUARANTINE):
            state = run.journal.value.state_of(layout.parse_aside(src.rpartition("/")[2]))
            kept = state in ("quarantined", "absent")
            require(kept, "I1", f"{src} ({state}) was moved to {dst}")
        elif layout.MEGATRON.parse_published(dst) is not None:
            moved = layout.parse_attempt(src.rpartition("/")[2])
            gutted = moved is not None and is_gutted(
                run.world, moved
            )  # a prune gives back what it took
            whole = gutted or judge(node, self.scope).complete
            require(whole, "I4", f"{src} got the name {dst}, incomplete")
        else:
            require(TEMPORARY in src, "I1", f"{src} was moved to {dst}")

    def _deleted(self, run: Run, path: str) -> None:
        """Only trash, markers and temporaries; and nothing the journal still counts on (I1)."""
        empty = layout.MEGATRON.parse_published(path) is not None  # or there is no such call
        ours = empty or path.startswith(_MAY_UNLINK) or TEMPORARY in path.rpartition("/")[2]
        require(ours, "I1", f"{path} was deleted in place")
        top = path.removeprefix(f"{TRASH}/").split("/")[0].split(".tmp")[0]
        trashed = path.startswith(TRASH)
        require(
            not trashed or layout.is_deletable(top), "I1", f"{path} was not given up, and deleted"
        )
        of = layout.parse_attempt(top.removeprefix("gone-"))
        if trashed and of is not None and not run.world.scarred:
            state = run.journal.value.state_of(of)
            require(
                state in ("absent", "failed") or _elsewhere(run, of, self.scope),
                "I1",
                f"{path} was deleted while {of} is {state}",
            )

    def _recorded(self, run: Run, record: documents.TransitionRecord) -> None:
        """The content of a record must be so on disk before it is written."""
        if run.world.scarred:
            return
        disk, of, scope = run.disk.value, record.of, self.scope
        at_name = judge(disk.get(layout.MEGATRON.published_name(of.step)), scope)
        if record.dest is State.SHARDS_WRITTEN:
            here = _holds_all(disk.get(layout.staging_dir(of)), of, scope)
            require(here, "I3", f"{of} is shards_written, but a shard is missing")
        elif record.dest is State.FINALIZED:
            require(at_name == (of, True), "I3", f"{of} is finalized, but not complete at its name")
        elif record.dest is State.TRACKED and record.source is State.FINALIZED:
            require(tracker_step(disk) == of.step, "I2", f"{of} is tracked, the tracker differs")
        elif record.dest is State.PRUNABLE:
            newer = [c for c in run.journal.value.checkpoints if c.state is State.TRACKED]
            require(any(c.step > of.step for c in newer), "I7", f"the latest, {of}, is prunable")
            require(of.step not in marked(disk, PINS), "I7", f"{of} is pinned and prunable")
            require(not held(disk, of, scope), "I7", f"a job holds {of}, which is prunable")
        elif record.dest is State.PRUNED:
            require(at_name.of != of, "I1", f"{of} is pruned, but still at its name")
            require(of.step not in marked(disk, PINS), "I7", f"{of} was pinned when it was pruned")
            reader = run.world.reader or Reader(-1)
            lost = reader.told == "there" and reader.step == of.step
            require(not lost, "I7", f"{of} was pruned under a reader that was told it is there")
        elif record.dest is State.DISCARDED:
            alive = [
                w for w in run.world.writers if w.of == of and w.alive and not _foreign(w, run)
            ]
            require(not alive, "I1", f"{of} is discarded while {alive} may write")
            require(at_name.of != of, "I1", f"{of} was published and is discarded")
        elif record.dest is State.QUARANTINED and record.reason in UNUSABLE:
            known = is_gutted(run.world, of) or at_name != (of, True)
            passed = record.source is State.FINALIZED and _is_passed(run, of.step)
            require(known or passed, "I2", f"{of} is withdrawn as damaged, and is whole")


def _is_passed(run: Run, step: int) -> bool:
    """True if a newer step is tracked: one that was never acknowledged must not take its place."""
    checkpoints = run.journal.value.checkpoints
    return any(c.step > step for c in checkpoints if c.state is State.TRACKED)


def _foreign(writer: Any, run: Run) -> bool:
    """A writer of a generation that was taken over: no coordinator can ask it."""
    return bool(writer.of.epoch < run.world.epoch)


def _of_step(run: Run, step: int) -> AttemptId | None:
    """A stock directory carries no manifest: the journal says whose it is."""
    found = [c for c in run.journal.value.checkpoints if c.step == step]
    adopted = [c.id for c in found if c.provenance == "adopted"]
    return adopted[0] if adopted else None


def _elsewhere(run: Run, of: AttemptId, scope: Scope) -> bool:
    """A deleted directory is a second copy or a remainder: the checkpoint itself is at its name."""
    return judge(run.disk.value.get(layout.MEGATRON.published_name(of.step)), scope) == (of, True)


# ---------------------------------------------------------------------------------- in every state


def check_world(world: World, scope: Scope) -> None:
    """The promises on a state, whether a coordinator lives in it or not."""
    whole = _check_names(world, scope)
    if world.scarred:
        return
    _check_tracker(world, whole)
    _check_journal(world, scope, whole)
    _check_reader(world, scope)
    if world.live is not None:
        _check_live(world)


def _check_names(world: World, scope: Scope) -> dict[int, Verdict]:
    """I4: a published directory is complete, unless the world itself gutted it."""
    whole: dict[int, Verdict] = {}
    for name, node in world.disk.names.items():
        step = layout.MEGATRON.parse_published(name)
        if step is None:
            continue
        verdict = whole[step] = judge(node, scope)
        gutted = is_gutted(world, verdict.of or AttemptId(step, 0, 0))
        require(verdict.complete or gutted, "I4", f"{name} is not complete")
    return whole


def _check_tracker(world: World, whole: dict[int, Verdict]) -> None:
    """I2: the tracker names a complete checkpoint, never older than the acknowledged one."""
    if world.acked is None:
        return
    step = tracker_step(world.disk)
    if step is None:
        torn = world.disk.names.get(TRACKER, b"")[:5] == TORN[:5]  # the world did that
        require(torn, "I2", "something was tracked, and the tracker names no step")
        return
    gutted = {of.step for of in world.damaged}
    complete = step in whole and whole[step].complete
    require(complete or step in gutted, "I2", f"the tracker names step {step}: not complete")
    lowered = world.acked in gutted or world.journal.intent.rolling_back
    require(
        step >= world.acked or lowered, "I2", f"{world.acked} was tracked, the tracker says {step}"
    )


def _check_journal(world: World, scope: Scope, whole: dict[int, Verdict]) -> None:
    """I3, I1: directories that the journal counts on are there; I2: the latest was acknowledged."""
    tracked = [-1]
    for checkpoint in world.journal.checkpoints:
        of, state = checkpoint.id, checkpoint.state
        if state is State.TRACKED:
            tracked.append(of.step)
        adopted = checkpoint.provenance == "adopted"
        if state not in PUBLISHED or is_gutted(world, of):
            continue
        there = whole.get(of.step)
        good = there is not None and there.complete and (there.of == of or adopted)
        if state is State.PRUNABLE and not good:
            good = judge(world.disk.get(layout.trash_dir(of)), scope).complete
        require(good, "I3", f"{of} is {state.value}, but not complete on disk")
    if world.acked is not None and not world.journal.intent.rolling_back:
        require(max(tracked) == world.acked, "I2", f"{world.acked} was tracked, {tracked} are")


def _check_reader(world: World, scope: Scope) -> None:
    """F27: a reader that was told the step is there can read it, or the prune is undecided."""
    reader = world.reader
    if reader is None or reader.told != "there":
        return
    if world.disk.get(layout.MEGATRON.published_name(reader.step)) is not None:
        return
    if reader.step in {of.step for of in world.damaged}:
        return
    at_step = [c for c in world.journal.checkpoints if c.step == reader.step]
    undecided = any(c.state is State.PRUNABLE for c in at_step)
    moved = any(layout.quarantine_dir(c.id) for c in at_step if c.state is State.QUARANTINED)
    aside = world.disk.get(QUARANTINE)
    assert isinstance(aside, Dir)
    moved = moved or any(name.startswith(f"{reader.step}.") for name in aside.names)
    require(undecided or moved, "I7", f"step {reader.step} is gone under its reader")


def _check_live(world: World) -> None:
    """At most one in flight; memory and journal agree (I11)."""
    assert world.live is not None
    flying = [c.id for c in world.live.checkpoints if c.state in IN_FLIGHT]
    require(len(flying) <= 1, "I5", f"several are in flight: {flying}")
    memory = {c.id: c.state for c in world.live.checkpoints}
    journal = {c.id: c.state for c in world.journal.checkpoints}
    require(memory == journal, "I11", f"memory has {memory}, the journal {journal}")
    for checkpoint in world.live.checkpoints:
        if checkpoint.state in (State.SHARDS_WRITTEN, State.FINALIZED):
            continue
        wrote = {(w.of, w.rank): w.wrote for w in world.writers}
        if checkpoint.state in UNPUBLISHED:
            honest = all(wrote.get((checkpoint.id, rank), 0) for _, rank in checkpoint.reported)
            require(honest, "I5", f"{checkpoint.id} counts {set(checkpoint.reported)}")


def is_settled(world: World) -> bool:
    """Nothing is left to do, or a person must look (I10)."""
    if world.refused:
        return True
    if world.live is None or world.live.pending or world.live.retention_due:
        return False
    busy = lifecycle.UNFINISHED | {State.PRUNABLE}
    return not any(c.state in busy for c in world.live.checkpoints)


# ------------------------------------------------------------------- every event in every state


def offers(checkpoint: Checkpoint) -> Iterator[Event]:
    """Every event, honest and not: undeclared and repeated ranks, other sizes, other attempts."""
    of, size = checkpoint.id, checkpoint.world_size
    other = AttemptId(of.step, of.epoch, of.attempt + 7)
    parts = checkpoint.parts or (PartSpec("state", "file"),)
    yield SaveRequested(of, parts, size)
    for rank in (*range(size), size, -1):
        yield WriterForked(of, rank, size)
        yield WriterGone(of, rank)
        yield FinalizersRan(of, rank)
        for part in (*(p.name for p in parts), "ghost"):
            yield ShardReported(of, part, rank, size, 1)
    yield WriterForked(of, 0, size + 1)
    yield ShardReported(of, parts[0].name, 0, size + 1, 1)
    yield ShardReported(other, parts[0].name, 0, size, 1)
    for newer in (None, of.step - 1, of.step, of.step + 1):
        yield Superseded(of, newer)
        yield Superseded(of, newer, ("pin",))
    yield PublishedOnDisk(of)
    yield Published(of)
    yield FoundPublished(of)
    yield TrackerWritten(of)
    yield Reprieved(of, "test")
    yield Removed(of)
    yield Failed(of, "test")
    yield WritersLost(of)
    yield Cleaned(of)
    yield Withdrawn(of, "damaged")
    yield Adopted(of)


class Table:
    """Offers every event in every state of a checkpoint that was reached, once each."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.seen: set[Checkpoint] = set()
        self.ledgers: set[Any] = set()
        self.offered = 0

    def check(self, world: World) -> None:
        if world.live is None:
            return
        ledger: Ledger | None = None
        for checkpoint in world.live.checkpoints:
            if checkpoint in self.seen:
                continue
            self.seen.add(checkpoint)
            self._offer_all(checkpoint)
            nothing = lifecycle.absent(checkpoint.id)
            if nothing not in self.seen:
                self.seen.add(nothing)
                self._offer_all(nothing)
        key = (world.live.checkpoints, world.live.pins, world.live.readers, world.live.held)
        if key not in self.ledgers:
            self.ledgers.add(key)
            ledger = Ledger(KnownCheckpoints({c.id: c for c in world.live.checkpoints}), *key[1:])
            self._check_ledger(ledger)

    def _offer_all(self, checkpoint: Checkpoint) -> None:
        there = {checkpoint.id: checkpoint} if checkpoint.state is not State.ABSENT else {}
        alone = Ledger(KnownCheckpoints(there))
        for event in offers(checkpoint):
            self.offered += 1
            self.coverage.move(checkpoint, event)
            try:
                after, _ = lifecycle.apply_row(checkpoint, event)
            except IllegalTransition:
                outcome = alone.report(event)
                require(isinstance(outcome, Rejected), "I5", f"{event} counted in {checkpoint}")
                continue
            require(event.of == checkpoint.id, "I5", f"{event} counted for {checkpoint.id}")
            check_move(checkpoint, event, after)
            if after.state in lifecycle.ENDED and after not in self.seen:
                self.seen.add(after)
                self._offer_all(after)

    def _check_ledger(self, ledger: Ledger) -> None:
        """I7, for policies that keep all, some or nothing; and who may begin a save."""
        tracked = [c for c in ledger.checkpoints.values() if c.state is State.TRACKED]
        top = max((c.step for c in tracked), default=-1)
        retention = retention_module
        policies = (
            retention.LatestN(0),
            retention.LatestN(1),
            retention.EveryNSteps(2),
            retention.KeepAll(),
        )
        for policy in policies:
            kept = set(policy.preserve(retention.describe_tracked(ledger)))
            guarded = kept | ledger.pins | ledger.readers | ledger.held | {top}
            for offer in ledger.to_prune(kept):
                good = offer.of.step not in guarded and offer.newer_step == top
                require(good, "I7", f"{policy} lets {offer} go; guarded are {sorted(guarded)}")
            newest = {c.step for c in sorted(tracked, key=lambda c: c.step)[-1:]}
            if isinstance(policy, retention.LatestN) and policy.n == 1:
                require(kept == newest, "I7", f"{policy} keeps {kept}")
        for checkpoint in tracked:
            offer = ledger.superseded(checkpoint, ())
            self.coverage.move(checkpoint, offer)
            free = checkpoint.step not in ledger.pins | ledger.readers | ledger.held | {top}
            moved = lifecycle.find_row(checkpoint, offer) is not None
            require(moved == free, "I7", f"{offer} of {checkpoint.id} with pins {ledger.pins}")
        flying = any(c.state in IN_FLIGHT for c in ledger.checkpoints.values())
        for step in (top, top + 1):
            self._ask(ledger, step, allowed=not flying and step > top)

    @staticmethod
    def _ask(ledger: Ledger, step: int, *, allowed: bool) -> None:
        event = SaveRequested(AttemptId(step, 99, 99), (PartSpec("state"),), 1)
        try:
            ledger.refuse(event)
        except ledger_module.SaveRefused:
            require(not allowed or step < 0, "I10", f"step {step} is refused for no reason")
        else:
            require(allowed, "I5", f"step {step} may begin beside {sorted(ledger.checkpoints)}")


def check_move(before: Checkpoint, event: Event, after: Checkpoint) -> None:
    """The bounds of a legal move, whatever the table says."""
    dest = after.state
    what = f"{event} took {before.state.value} to {dest.value}"
    expected = {
        (p.name, r)
        for p in after.parts
        for r in (range(after.world_size) if p.ranks is None else p.ranks)
    }
    ranks = {r for _, r in expected}
    if isinstance(event, (ShardReported, WriterForked)):
        require(event.world_size == before.world_size and event.rank in ranks, "I5", what)
    if isinstance(event, ShardReported):
        key = (event.part, event.rank)
        fresh = key in expected and key not in before.reported and event.rank in before.forked
        require(fresh and after.reported == before.reported | {key}, "I5", what)
        written = dest is State.SHARDS_WRITTEN
        require(written == (after.reported == expected), "I3", f"{what} with {set(after.reported)}")
    if dest is State.FORKED and before.state is State.REQUESTED:
        require(after.forked == ranks, "I3", what)
    allowed = {
        State.FINALIZED: UNPUBLISHED,
        State.TRACKED: {State.FINALIZED, State.PRUNABLE, State.ABSENT},
        State.PRUNABLE: {State.TRACKED},
        State.PRUNED: {State.PRUNABLE},
        State.DISCARDED: {State.FAILED},
        State.QUARANTINED: {State.TRACKED, State.FINALIZED, State.PRUNABLE},
    }
    if dest in allowed:
        require(before.state in allowed[dest], "I1", what)
    if dest is State.FAILED:
        require(before.state in UNPUBLISHED | {State.FAILED}, "I1", what)
    if isinstance(event, Failed):
        require(not before.published, "I1", what)
    if isinstance(event, Published):
        require(before.published, "I4", what)
    if isinstance(event, FinalizersRan):
        fresh = event.rank in ranks and event.rank not in before.finalizers_ran
        require(fresh and lifecycle.has_finalizers(before), "I6", what)
    if isinstance(event, Superseded):
        newer = event.newer_step is not None and event.newer_step > before.step
        require(newer and not event.kept_by, "I7", what)
    if isinstance(event, Cleaned):
        require(after.gone == ranks, "I1", what)


assert set(EVENTS) <= {type(e) for e in offers(lifecycle.absent(AttemptId(1, 1, 1)))}
