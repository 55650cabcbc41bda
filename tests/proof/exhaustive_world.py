"""The states of the exhaustive search, and the moves in them.

Production runs as it is: coordinator, applier, publishing, setting aside, evidence, trash, readers'
leases, and below them ledger, lifecycle, recovery and retention. Only the environment is modelled
(``exhaustive_disk``: tree of tokens, record journal, epoch), and the moves of the world: writers,
damage, crashes. A state is a value; an action loads a coordinator from it, lets it work, and takes
the new value out.

How an action becomes several transitions:

* ``coordinator/coordinator.py``, ``coordinator/applier.py``, ``disk/publishing.py`` and
  ``disk/setting_aside.py`` order it as journal record, effect, next journal record, ... . Each
  storage call that changes the tree and each journal record is a point. A crash before any point is
  a separate transition: durable parts are kept, the rest is gone.
* The same points, when the epoch is taken over instead: the old process's next rename may land later,
  at any time (the zombie); its writers may go on writing; anything else of it must stop (I9).
* A reader may take a step at any point of an action: its calls are recorded and replayed, so that
  it stops and goes on between its calls too.
* A storage call may fail at any point, once or with its effect.

Left out: foreign parts and in-place directories, lost writes, time.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import ckptfsm.coordinator.applier as applier_module
import ckptfsm.coordinator.coordinator as coordinator_module
import ckptfsm.coordinator.opening as opening_module
import ckptfsm.core.ledger as ledger_module
import ckptfsm.disk.inspection as evidence_module
import ckptfsm.disk.reader_lease as readers_module
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core import documents, layout, lifecycle, recovery
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    Fenced,
    IllegalTransition,
    OutcomeUnknown,
    StepNotFoundError,
)
from ckptfsm.core.events import Command, Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Identity
from ckptfsm.core.requests import SaveRequest
from ckptfsm.core.retention import KeepAll, Policy
from ckptfsm.disk.assembly import Assembly
from proof.exhaustive_disk import (
    EMPTY,
    Dir,
    Disk,
    EpochLease,
    Journaled,
    RecordJournal,
    StillClock,
    plain,
    tree,
)

TORN = b"torn, was "  # and its content, for the oracle alone
STOCK = "stock"
IDENTITY = Identity("host", 1, "", "nonce")
CLOCK = StillClock()
READER = "reader"


class Broken(BaseException):  # no handler of production may take it for one of its errors
    """A promise did not hold."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise, self.what = promise, what


class Paused(BaseException):
    """A reader stops before its next call; nothing of it may be cleaned up."""


class Left(NamedTuple):
    """How often each thing may still happen in one history: the bounds of the search.

    ``outsiders``: something that a person or another trainer does at the root between two runs.
    ``jobs``: a job ends, or its record is damaged.
    """

    requests: int = 0
    crashes: int = 0
    takeovers: int = 0
    deaths: int = 0
    damages: int = 0
    errors: int = 0
    readers: int = 0
    pins: int = 0
    deletes: int = 0
    rollbacks: int = 0
    outsiders: int = 0
    jobs: int = 0

    def less(self, name: str) -> Left:
        return self._replace(**{name: getattr(self, name) - 1})


@dataclass(frozen=True)
class Scope:
    """A bounded world. ``stock``: steps that lie there before the first start, in stock format."""

    name: str
    left: Left
    steps: int = 2
    world_size: int = 1
    parts: tuple[PartSpec, ...] = (PartSpec("state", "file"),)
    retention: Policy = field(default_factory=KeepAll)
    stock: tuple[int, ...] = ()
    tracker: bytes | None = None
    resume: recovery.Resume = "fallback"
    holds: Mapping[str, int] = field(default_factory=dict)

    @property
    def options(self) -> CoordinatorOptions:
        return CoordinatorOptions(self.retention, self.resume, False, 0.0, holds=self.holds)


class Live(NamedTuple):
    """The memory of a coordinator."""

    checkpoints: tuple[Checkpoint, ...]
    pins: frozenset[int]
    readers: frozenset[int]
    held: frozenset[int]
    pending: tuple[Command, ...]
    retention_due: bool
    requests: int


class Writer(NamedTuple):
    """A rank's writer of one attempt: how many of its parts it wrote, and whether it lives."""

    of: AttemptId
    rank: int
    wrote: int
    alive: bool


class Reader(NamedTuple):
    """An evaluator outside the job: the answers its storage calls got, and the step that it was
    told."""

    step: int
    log: tuple[Any, ...] = ()
    told: str = ""


class World(NamedTuple):
    """A state. ``acked`` is the step last acknowledged; ``damaged`` are the steps that the world
    gutted.

    ``zombie`` is a rename that a fenced process checked and has not made yet; ``scarred`` once it was.
    """

    disk: Dir
    journal: Journaled
    live: Live | None
    epoch: int
    writers: tuple[Writer, ...]
    reader: Reader | None
    zombie: tuple[str, str] | None
    scarred: bool
    acked: int | None
    damaged: frozenset[AttemptId]
    refused: bool
    left: Left


class Moment(NamedTuple):
    """The durable state before a point of an action; ``next`` is the call that would come."""

    call: str
    args: tuple[Any, ...]
    disk: Dir
    journal: Journaled
    acked: int | None
    checked: bool

    @property
    def text(self) -> str:
        if self.call == "append":
            record = self.args[0]
            event = getattr(record, "event", record.type)
            of = f" {record.of}" if isinstance(record, documents.TransitionRecord) else ""
            return f"journal {event}{of}"
        return f"{self.call} {' -> '.join(self.args)}"


POINTS = ("create", "rename", "mkdir", "rmdir", "unlink", "append")
Watch = Callable[["Run", str, tuple[Any, ...]], None]


class Run:
    """An action at work: a disk, a journal, a lease, and the moments it went through."""

    def __init__(self, world: World, watch: Watch, fenced_at: int = 0) -> None:
        self.world = world
        self.acked = world.acked
        self.moments: list[Moment] = []
        self.points = 0
        self.checked = False
        self.fresh = False  # the epoch was looked at since the last effect
        self.interject: Callable[[Run, int], None] | None = None
        self.disk = Disk(world.disk, self._before)
        self.disk.journal = RecordJournal(world.journal, self._before, self._journaled)  # type: ignore[attr-defined]
        self.disk.lease = EpochLease(world.epoch, self._before, fenced_at)  # type: ignore[attr-defined]
        self._watch = watch

    @property
    def journal(self) -> RecordJournal:
        return self.disk.journal  # type: ignore[attr-defined,no-any-return]

    @property
    def lease(self) -> EpochLease:
        return self.disk.lease  # type: ignore[attr-defined,no-any-return]

    def _before(self, call: str, args: tuple[Any, ...]) -> None:
        if call == "check":
            self.checked = self.fresh = True
            return
        self._watch(self, call, args)
        if is_effect(call, args):
            self.fresh = False
        if call in POINTS:
            if call not in ("rmdir", "unlink") or self._is_first_unlink():
                self.moments.append(
                    Moment(
                        call, args, self.disk.value, self.journal.value, self.acked, self.checked
                    )
                )
            self.checked = self.checked and call in ("create", "append")
        self.points += 1
        if self.interject is not None:
            self.interject(self, self.points)

    def _is_first_unlink(self) -> bool:
        """No code reads a directory that is being deleted: half-deleted is looked at once or twice."""
        return sum(m.call in ("rmdir", "unlink") for m in self.moments) < 2

    def _journaled(self, record: Any) -> None:
        """The step that the record acknowledges, or takes back for a reason it names (I2)."""
        tracked = [c.step for c in self.journal.value.checkpoints if c.state is State.TRACKED]
        if isinstance(record, documents.RollbackStarted):
            self.acked = record.to_step
        elif isinstance(record, documents.RollbackFinished):
            self.acked = max(tracked, default=None)
        elif isinstance(record, documents.TransitionRecord):
            if record.dest is State.TRACKED:  # also one that comes back, as nothing newer is whole
                self.acked = max(record.step, self.acked if self.acked is not None else -1)
            elif record.dest is State.QUARANTINED and is_gutted(self.world, record.of):
                self.acked = max(tracked, default=None)


def is_effect(call: str, args: tuple[Any, ...]) -> bool:
    """The effects forbidden to a fenced process: a directory or the tracker gets, changes or loses
    its name."""
    if call == "mkdir":
        return bool(layout.parse_attempt(args[0].removeprefix(f"{layout.STAGING}/")))
    if call != "rename":
        return False
    src, dst = args
    if layout.TRACKER in (src, dst):
        return True
    published = layout.MEGATRON.parse_published(src), layout.MEGATRON.parse_published(dst)
    cleaned = src.startswith(layout.STAGING) and dst.startswith(layout.TRASH)
    return cleaned or published != (None, None)


def is_gutted(world: World, of: AttemptId) -> bool:
    """The world damaged it; of a stock directory only the step is known."""
    return of in world.damaged or AttemptId(of.step, 0, 0) in world.damaged


# ------------------------------------------------------------------------- production, abstracted


@dataclass(frozen=True)
class Verdict:
    acceptable: bool
    reason: str = "no stock checkpoint"


@contextmanager
def production() -> Iterator[None]:
    """Production code on tokens: its journal file, its lock and its stock judge belong to the
    search.

    ``apply`` is replaced by ``apply_row``, proven equal elsewhere, and parsing is remembered: the same
    bytes are the same document.
    """
    parsed: dict[tuple[Any, bytes], Any] = {}
    original = evidence_module.decode

    def decode(model: Any, data: bytes, file: str) -> Any:
        found = parsed.get((model, data))
        if found is None:
            found = parsed[model, data] = original(model, data, file)
        return found

    def inspect_unlisted(storage: Any, layout: Any, directory: str) -> Verdict:
        node = storage.value.get(directory)
        return Verdict(isinstance(node, Dir) and STOCK in node.names and "shard" in node.names)

    def history(storage: Any, known: Any = None) -> Any:
        return storage.journal.value.history(storage.lease.epoch - 1)

    replaced: list[tuple[Any, str, Any]] = [
        (ledger_module, "apply", lambda c, e: lifecycle.apply_row(c, e)),
        (evidence_module, "decode", decode),
        (evidence_module, "inspect_unlisted", inspect_unlisted),
        (applier_module, "JournalWriter", lambda storage, epoch: storage.journal),
        (opening_module, "newest_segment", lambda storage: 0),
        (opening_module, "open_root", lambda storage, identity, **options: storage.lease),
        (opening_module, "read_history", history),
        (coordinator_module, "read_history", history),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    logger = logging.getLogger("ckptfsm")
    level = logger.level
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        logger.setLevel(level)
        for module, name, value in before:
            setattr(module, name, value)


def first_world(scope: Scope) -> World:
    """Before the first start: an empty root, or the remains of a stock run."""
    disk = tree()
    for directory in layout.DIRECTORIES:
        disk = disk.put(directory, EMPTY)
    for step in scope.stock:
        disk = disk.put(layout.MEGATRON.published_name(step), tree(stock=b"", shard=b"%d" % step))
    if scope.tracker is not None:
        disk = disk.put(layout.TRACKER, scope.tracker)
    return World(
        disk, Journaled(), None, 1, (), None, None, False, None, frozenset(), False, scope.left
    )


# ---------------------------------------------------------------------------------------- writers


def shard_name(part: str, rank: int) -> str:
    return f"{part}_{rank}.distcp"


def receipt_of(of: AttemptId, part: str, rank: int, world_size: int) -> bytes:
    content = f"{of} {part} {rank}".encode()
    entry = documents.FileEntry(name=shard_name(part, rank), bytes=len(content))
    return documents.encode(
        documents.Receipt(
            step=of.step,
            epoch=of.epoch,
            attempt=of.attempt,
            part=part,
            rank=rank,
            world_size=world_size,
            files=(entry,),
        )
    )


def parts_of(scope: Scope, rank: int) -> list[str]:
    return [p.name for p in scope.parts if p.ranks is None or rank in p.ranks]


def write_part(disk: Dir, scope: Scope, writer: Writer) -> Dir | None:
    """The next part of a rank: shard and receipt. None where the directory was moved away."""
    base = layout.staging_dir(writer.of)
    if disk.get(base) is None:
        return None
    part = parts_of(scope, writer.rank)[writer.wrote]
    disk = disk.put(
        f"{base}/{shard_name(part, writer.rank)}", f"{writer.of} {part} {writer.rank}".encode()
    )
    directory = base
    for piece in f"{layout.RECEIPTS}/{part}".split("/"):
        directory = f"{directory}/{piece}"
        if disk.get(directory) is None:
            disk = disk.put(directory, EMPTY)
    receipt = receipt_of(writer.of, part, writer.rank, scope.world_size)
    return disk.put(f"{base}/{layout.receipt_name(part, writer.rank)}", receipt)


# ----------------------------------------------------------------------------------------- reader


class ReaderStorage:
    """Gives a reader its recorded answers again, then lets it make calls up to the next pause."""

    def __init__(self, disk: Disk, log: tuple[Any, ...]) -> None:
        self.root = disk.root
        self.log = list(log)
        self._replayed = 0
        self._given = len(log)
        self._disk = disk

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._replayed < self._given:
                self._replayed += 1
                return self._answer(self.log[self._replayed - 1])
            if name in ("rename", "stat") and len(self.log) > self._given:
                raise Paused
            try:
                answer = (getattr(self._disk, name)(*arguments), 0)
            except OSError as error:
                answer = (None, error.errno or 0)
            self.log.append(answer)
            return self._answer(answer)

        return call

    @staticmethod
    def _answer(answer: tuple[Any, int]) -> Any:
        if answer[1]:
            raise OSError(answer[1], "as recorded")
        return answer[0]


class LeaseAlone(readers_module.ReaderLease):
    """A lease without a look into the journal, which is no file of this world."""

    def _known(self) -> list[Checkpoint]:
        return []


def step_reader(disk: Disk, reader: Reader) -> Reader:
    """Let a reader go on to its next pause, or to the end of taking its lease."""
    storage: Any = ReaderStorage(disk, reader.log)
    lease = LeaseAlone(disk.root, reader.step, storage=storage)
    lease._nonce, lease._file = READER, f"{layout.READERS}/{reader.step}.{READER}.json"
    try:
        lease.__enter__()
    except Paused:
        return reader._replace(log=tuple(storage.log))
    except StepNotFoundError:
        return Reader(reader.step, (), "gone")
    return Reader(reader.step, (), "there")


# ------------------------------------------------------------------------------------ coordinator


def load(run: Run, scope: Scope) -> Coordinator:
    """A coordinator as it was; not yet open where the state has none."""
    made = Coordinator(
        run.disk,  # type: ignore[arg-type]
        clock=CLOCK,
        identity=IDENTITY,
        options=scope.options,
        finishers={},
        provenance={},
    )
    live = run.world.live
    if live is None:
        return made
    disk: Any = run.disk
    lease: Any = run.lease
    names = layout.MEGATRON
    assembly_of = partial(Assembly, disk, CLOCK, lease.tag, {}, {}, 0.0, names)
    applier = applier_module.Applier(
        disk, CLOCK, lease, assembly_of, names, made.news, scope.retention, holds=scope.holds
    )
    known = ledger_module.KnownCheckpoints({c.id: c for c in live.checkpoints})
    applier.ledger = ledger_module.Ledger(known, live.pins, live.readers, live.held)
    applier.pending = live.pending
    applier.retention_due = live.retention_due
    made._requests = live.requests
    made._opened, made._ownership = applier, run.lease  # type: ignore[assignment]
    return made


def save(coordinator: Coordinator) -> Live:
    """Its memory at this moment."""
    applier = coordinator._applier
    ledger = applier.ledger
    return Live(
        tuple(plain(ledger.checkpoints[of]) for of in sorted(ledger.checkpoints)),
        frozenset(ledger.pins),
        frozenset(ledger.readers),
        frozenset(ledger.held),
        tuple(dict.fromkeys(applier.pending)),
        applier.retention_due,
        coordinator._requests,
    )


class Action(NamedTuple):
    """A call of the coordinator, with its cost and its effect on the world beside it."""

    text: str
    work: Callable[[Coordinator], Any]
    cost: str = ""
    writers: tuple[Writer, ...] | None = None


def coordinator_actions(world: World, scope: Scope) -> Iterator[Action]:
    """All requests that a living coordinator can get."""
    assert world.live is not None
    tracked = [c.step for c in world.live.checkpoints if c.state is State.TRACKED]
    flying = next((c for c in world.live.checkpoints if c.state in lifecycle.IN_FLIGHT), None)
    if world.left.requests and flying is None:
        for step in range(max(tracked, default=0) + 1, scope.steps + 1):
            request = SaveRequest(step, scope.parts, scope.world_size)
            yield Action(f"save({step})", lambda c, r=request: c.request(r), "requests")
    for checkpoint in world.live.checkpoints:
        yield from _reports(world, scope, checkpoint)
    busy = world.live.pending or world.live.retention_due
    trash = world.disk.get(layout.TRASH)
    if busy or (isinstance(trash, Dir) and trash.names):
        yield Action("tick", lambda c: c.tick())
    if any(not held(world.disk, c, scope) for c in _held_in_memory(world.live)):
        yield Action("hears that a job is done", lambda c: c.job_ended())
    for of in sorted(c.id for c in world.live.checkpoints if c.state is State.TRACKED):
        step = of.step
        if step in world.live.pins:
            yield Action(f"unpin({step})", lambda c, s=step: c.unpin(s))
        elif world.left.pins:
            yield Action(f"pin({step})", lambda c, s=step: c.pin(s, "test"), "pins")
        if world.left.deletes and step != tracked[-1]:
            yield Action(f"delete({step})", lambda c, s=step: c.delete(s), "deletes")
        if world.left.rollbacks and flying is None and step != tracked[-1]:
            yield Action(f"rollback({step})", lambda c, s=step: c.rollback(s), "rollbacks")
        if is_gutted(world, of):
            yield Action(f"withdraw_damaged({step})", lambda c, s=step: c.withdraw_damaged(s, ""))


def held(disk: Dir, of: AttemptId, scope: Scope) -> bool:
    """True if a job holds an attempt, and its record does not say that it is done."""
    names = (layout.job_name(of, job) for job in scope.holds)
    return any(disk.get(name) != record_of_job(name) for name in names)


def record_of_job(name: str) -> bytes:
    """The record of a job that is done, by its name."""
    found = layout.parse_job(name.rpartition("/")[2])
    assert found is not None
    of, job = found
    state = documents.JobState.DONE
    record = documents.JobRecord(
        step=of.step, epoch=of.epoch, attempt=of.attempt, job=job, state=state
    )
    return documents.encode(record)


def _held_in_memory(live: Live) -> list[AttemptId]:
    tracked = (c.id for c in live.checkpoints if c.state is State.TRACKED)
    return [of for of in tracked if of.step in live.held]


def _reports(world: World, scope: Scope, checkpoint: Checkpoint) -> Iterator[Action]:
    """The reports that ranks can make of one attempt: forks, shards, failures, ends of writers."""
    of, size = checkpoint.id, scope.world_size
    writers = {w.rank: w for w in world.writers if w.of == of}

    def report(text: str, *events: Any, **more: Any) -> Action:
        return Action(f"{of}: {text}", lambda c: c.report(list(events)), **more)

    if checkpoint.state in lifecycle.UNPUBLISHED:
        for rank in sorted(checkpoint.writers - set(writers)):
            forked = (*world.writers, Writer(of, rank, 0, True))
            event = WriterForked(of, rank, size)
            yield report(f"rank {rank} forks", event, writers=tuple(sorted(forked)))
        if world.left.deaths:
            yield report("its save is given up", Failed(of, "writer_hung"), cost="deaths")
            wrong = WriterForked(of, 0, size + 1)
            yield report("rank 0 reports a wrong world size", wrong, cost="deaths")
    for rank, writer in sorted(writers.items()):
        for part in parts_of(scope, rank)[: writer.wrote]:
            if (part, rank) not in checkpoint.reported:
                shard = ShardReported(of, part, rank, size, 1)
                if checkpoint.state in lifecycle.UNPUBLISHED:
                    yield report(f"rank {rank} reports {part}", shard)
        dead = not writer.alive and writer.wrote < len(parts_of(scope, rank))
        if dead and checkpoint.state in lifecycle.UNPUBLISHED:
            yield report(
                f"rank {rank} reports its writer's death", Failed(of, "writer_died", "", rank)
            )
    if checkpoint.state is State.FAILED:
        living = {w.rank for w in writers.values() if w.alive}
        for rank in sorted(checkpoint.writers - checkpoint.gone - living):
            yield report(f"rank {rank} reports its writer gone", WriterGone(of, rank))


FATAL = (Fenced, OutcomeUnknown, IllegalTransition)
LEFT_AS_IT_IS = (CkptFsmError, OSError)


def perform(run: Run, scope: Scope, action: Action) -> World:
    """Let production do it. A fatal error stops the coordinator: the world it leaves has none."""
    made = load(run, scope)
    stopped = False
    try:
        action.work(made)
    except IllegalTransition as error:
        raise Broken("I11", f"the coordinator made an illegal move: {error}") from error
    except LEFT_AS_IT_IS:
        stopped = made.fatal is not None
    if made.fatal is not None:
        stopped = True
        cause = made.fatal.__cause__
        if not isinstance(cause, (CkptFsmError, OSError, type(None))):
            raise Broken("I10", f"{action.text} stops the coordinator: {cause!r}")
    left = run.world.left.less(action.cost) if action.cost else run.world.left
    writers = run.world.writers if action.writers is None else action.writers
    after = run.world._replace(
        disk=run.disk.value, journal=run.journal.value, acked=run.acked, left=left
    )
    if stopped:
        return after._replace(live=None, writers=(), epoch=after.epoch + 1)
    return forget_done(after._replace(live=save(made), writers=writers))


def forget_done(world: World) -> World:
    """Writers that are no longer waited for and that cannot write again."""
    if world.live is None:
        return world
    living = {c.id for c in world.live.checkpoints if c.state in lifecycle.UNFINISHED}
    kept = tuple(w for w in world.writers if w.of in living or w.alive)
    return world._replace(writers=kept)


def reopen(run: Run, scope: Scope) -> World:
    """Start again on what is there. ``DamagedRoot``: a person must look, nothing may be changed."""
    made = load(run, scope)
    refused = False
    try:
        made.open()
    except DamagedRoot:
        refused = True
    except IllegalTransition as error:
        raise Broken("I8", f"a restart makes an illegal move: {error}") from error
    except LEFT_AS_IT_IS as error:
        if run.interject is None:
            raise Broken("I8", f"a restart stops with {error!r}") from error
        after = run.world._replace(disk=run.disk.value, journal=run.journal.value, acked=run.acked)
        return after._replace(live=None, epoch=after.epoch + 1)
    after = run.world._replace(disk=run.disk.value, journal=run.journal.value, acked=run.acked)
    if refused:
        if after.disk != run.world.disk or after.journal != run.world.journal:
            raise Broken("I8", "a refused start changed the root")
        return after._replace(refused=True)
    return after._replace(live=save(made), refused=False)


def failing(at: int) -> Callable[[Run, int], None]:
    """A call that fails at the ``at``-th point of an action."""

    def interject(run: Run, point: int) -> None:
        if point == at:
            raise OSError(errno.EIO, "an injected error")

    return interject


def reading(at: int, reader: Reader, *, to_the_end: bool) -> Callable[[Run, int], None]:
    """A reader that goes on at the ``at``-th point: to its next pause, or until it has been told."""

    def interject(run: Run, point: int) -> None:
        if point != at:
            return
        quiet = Disk(run.disk.value, lambda call, args: None)  # its calls are no points
        then = step_reader(quiet, reader)
        while to_the_end and not then.told:
            then = step_reader(quiet, then)
        run.disk.value = quiet.value
        run.world = run.world._replace(reader=then)

    return interject
