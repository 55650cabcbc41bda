"""The state machine that Hypothesis drives over recovery: our runs, and the changes by strangers
between them.

A single rank and part on a simulated disk. Every run of ours may die, or meet an error, at any
call; a stock trainer saves steps, power fails, shards rot, and a person spoils the tracker. The
model knows only the fate of each content, and judges the disk by names and bytes.

Documented, so allowed, each as narrowly as it can be told (see ``docs/decisions/0007``):

* A stock save at a step that we had published: recovery may take it aside, whole. The same goes for
  an adopted step that was damaged before, if a start was cut short in between. A directory that it
  could not take, as the disk failed, is a stranger's for the next start.
* A checkpoint that a rollback or a fresh start could not move, as the disk failed, is still at its
  name. The checkpoint may come back (``loose``) once a stranger saved above it, and a start with
  nothing else to resume from refuses. A power loss may show an adopted checkpoint, not moved
  durably, at both names: it may be adopted anew.
* An interrupted rollback is refused if a start could not lift the tracker from a rotten step, until
  the tracker is set aside.

Left out: a stock save of exactly the newest step while a rollback is interrupted; torn manifests.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from hypothesis import currently_in_test_context, target
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from strangers import SHARD, stock_saves

from ckptfsm.core.errors import CkptFsmError, DamagedRoot, IllegalTransition
from ckptfsm.core.layout import MANIFEST, MEGATRON, QUARANTINE, TRACKER, TRASH, parse_tracker
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.disk.journal import read_history
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage

CODES = (errno.EIO, errno.ENOSPC)
RATES = (0.0, 0.0, 0.0, 0.02)
KEEPS = st.sampled_from((None, 1, 2))
ANY = 1 << 40  # beyond every step
DIES = 0  # a blow that is no error of the disk
Blow = tuple[int, int] | None


def blows(calls: int, *codes: int) -> st.SearchStrategy[Blow]:
    """None, or at which of so many calls which blow falls."""
    return st.none() | st.tuples(st.integers(0, calls), st.sampled_from((DIES, DIES, *codes)))


class Chance:
    """The hook before every changing call of a run: errors at a rate, and one blow at a given call.

    A blow is the process's death, or an error of the disk. ``depth`` is how many calls it came after,
    ``errors`` how many the disk reported, both since ``arm``; ``ever``, since the run began.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rng, self.rate, self.ever = random.Random(seed), rate, 0
        self.arm(None)

    def arm(self, blow: Blow) -> None:
        self.blow = blow
        self.depth = self.errors = 0

    def __call__(self, index: int, method: str, path: str) -> None:
        self.depth += 1
        code = self.rng.choice(CODES) if self.rate and self.rng.random() < self.rate else 0
        if self.blow is not None and self.depth > self.blow[0]:
            code = self.blow[1]
            self.blow = None
            if code == DIES:
                raise ProcessDead(f"before {method} {path}")
        if code:
            self.errors += 1
            self.ever += 1
            raise OSError(code, "injected", path)


@dataclass(frozen=True)
class Copy:
    """The files of a complete checkpoint by their names in it; ``ours``: not a stranger's."""

    ours: bool
    files: Mapping[str, bytes] = field(repr=False)


class Look:
    """The checkpoints on a disk, by bytes: ``at`` has the whole ones by step.

    ``whole`` has those and the whole ones in quarantine, ``trashed`` the whole ones in the trash.
    """

    def __init__(self, disk: SimDisk, copies: Mapping[bytes, Copy]) -> None:
        self.files = {p: c for p, c in disk.snapshot().items() if isinstance(c, bytes)}
        self.tracker = self.files.get(TRACKER)
        found = parse_tracker(self.tracker) if self.tracker is not None else None
        self.step = found if isinstance(found, int) else None
        self.names = [n for n in disk.listed("") if MEGATRON.parse_published(n) is not None]
        self.at: dict[int, bytes] = {}
        self.whole: set[bytes] = set()
        self.trashed: set[bytes] = set()
        for path, shard in self.files.items():
            directory, _, name = path.rpartition("/")
            if name == SHARD and shard in copies and self._holds(directory, copies[shard]):
                self._note(directory, shard)

    def _holds(self, directory: str, copy: Copy) -> bool:
        return all(self.files.get(f"{directory}/{n}") == data for n, data in copy.files.items())

    def _note(self, directory: str, shard: bytes) -> None:
        step = MEGATRON.parse_published(directory)
        if step is not None:
            self.at[step] = shard
        if step is not None or directory.startswith(f"{QUARANTINE}/"):
            self.whole.add(shard)
        elif directory.startswith(f"{TRASH}/"):
            self.trashed.add(shard)

    def evidence(self, known: Collection[int] = ()) -> list[str]:
        """The names of steps, but for those at which a save has only begun, and none is ``known``."""
        more = [name for name in self.names if set(self.below(name)) - {"common.pt"}]
        return [n for n in self.names if n in more or MEGATRON.parse_published(n) in known]

    def shard(self, step: int) -> bytes:
        return self.files.get(f"{MEGATRON.published_name(step)}/{SHARD}", b"")

    def below(self, directory: str) -> dict[str, bytes]:
        start = f"{directory}/"
        return {p.removeprefix(start): c for p, c in self.files.items() if p.startswith(start)}


@dataclass
class Expected:
    """The expectation of a default start: the steps that are ``sure`` to be in use, and those that
    ``may`` be.

    ``odd``: those that may be resumed from, as the content of the tracker or of the directory is
    unknown.
    """

    refusal: bool = False
    nothing: bool = False
    sure: set[int] = field(default_factory=set)
    may: set[int] = field(default_factory=set)
    odd: set[int] = field(default_factory=set)


class RecoveryMachine(RuleBasedStateMachine):
    """See the module. Steps are small numbers; a content is known by the bytes of its one shard."""

    @initialize(saved=st.integers(0, 3), adopted=st.integers(0, 2), keep=KEEPS)
    def begin(self, saved, adopted, keep) -> None:
        self.disk = SimDisk()
        self.job: FakeJob | None = None
        self.runs = self.stock_saved = 0
        self.deepest = 0  # how many calls into what it was doing a process died, at most
        self.copies: dict[bytes, Copy] = {}
        self.owed: set[bytes] = set()  # must be somewhere, whole
        self.tracked: dict[int, bytes] = {}  # by our last run
        self.unsure: dict[bytes, int] = {}  # saves that were cut short: they may become tracked
        self.offered: dict[bytes, int] = {}  # decided on by starts that were cut short, perhaps
        self.newest = ANY  # in the journal, if such starts journaled any: at least this
        self.loose: set[bytes] = set()  # withdrawn, and still at their names
        self.left: set[bytes] = set()  # rolled back, or left by a fresh start
        self.afloat: set[bytes] = set()  # adopted ones of these, perhaps not moved durably
        self.shaky: dict[bytes, int] = {}  # a stock trainer's that a power loss may take
        self.lost: set[int] = set()  # such steps: their content is unknown
        self.rotten: set[bytes] = set()
        self.strange: set[int] = set()  # steps that others wrote or that rotted
        self.interrupted: tuple[str, int] | None = None
        self.in_service = False  # something was tracked, and no fresh start begun since
        # The tracker that others left since the last opening, or that the opening could not lift.
        self.theirs: set[bytes | None] = set()
        self.unsynced: object | None = None  # the tracker as a stock trainer left it
        self.keep: int | None = None
        self.refusals: set[str] = set()
        for step in range(1, adopted + 1):
            self.stock(step, tracked=True, synced=True)
        self.start("fallback", keep, None, 0.0, 0)
        for _ in range(saved):
            self.save(1, None)

    def alive(self) -> bool:
        return self.job is not None

    def dead(self) -> bool:
        return self.job is None

    def waits(self) -> bool:
        """True if a tick has something to do."""
        if self.job is None:
            return False
        failed = self.job.storage.before.ever  # retention may have been put off
        return bool(failed or self.job.coordinator.busy or self.disk.listed(TRASH))

    # ---------------------------------------------------------------------------------- our runs

    def new_run(self, disk: SimDisk, resume: str, chance: Chance | None = None) -> FakeJob:
        self.runs += 1
        name = f"run{self.runs}"
        return FakeJob(
            FaultStorage(SimStorage(disk, name), before=chance),
            ranks=1,
            retention=LatestN(self.keep) if self.keep else KeepAll(),
            resume=resume,
            identity=Identity("sim", self.runs, f"boot:{name}", name),
        )

    def attempt(
        self, job: FakeJob, blow: Blow, work: Callable[[], object], refusable: bool = False
    ) -> BaseException | None:
        """Do it, under a blow. Returns the error it died of, or was refused for: typed, or
        injected.

        Without an error of the disk in this run, only a ``refusable`` call may be refused.
        """
        chance = job.storage.before
        chance.arm(blow)
        error: BaseException | None = None
        try:
            work()
        except IllegalTransition as found:
            raise AssertionError(f"I11: an illegal move was tried: {found}") from found
        except (ProcessDead, CkptFsmError) as found:
            error = found
        except OSError as found:
            assert found.strerror == "injected", f"I8: a raw error: {found!r}"
            error = found
        if isinstance(error, ProcessDead):
            self.deepest = max(self.deepest, chance.depth)
        if error is not None:
            reason = refusable or chance.ever or isinstance(error, ProcessDead)
            assert reason, f"I8: refused for no reason: {error!r}"
        chance.blow = None
        return error

    def end(self) -> None:
        self.disk.kill(f"run{self.runs}")
        self.job = None
        assert_journal_conforms(SimStorage(self.disk, "judge"))

    def in_ledger(self) -> list[int]:
        return [c.step for c in self.job.coordinator.ledger.in_state(State.TRACKED)]

    def look(self) -> Look:
        return Look(self.disk, self.copies)

    @precondition(dead)
    @rule(
        resume=st.sampled_from(("fallback", "fallback", "fallback", "fresh")),
        keep=KEEPS,
        blow=blows(50, *CODES) | blows(260, *CODES),
        rate=st.sampled_from(RATES),
        seed=st.integers(0, 99),
    )
    def start(self, resume, keep, blow, rate, seed) -> None:
        self.keep = keep
        before = self.look()
        job = self.new_run(self.disk, resume, Chance(rate, seed))
        error = self.attempt(job, blow, job.open, refusable=True)
        if job.storage.before.errors:
            self.lose_unsynced()  # an fsync that failed has dropped it
        expected = self.expected(before)
        self.job = job
        if error is None and resume == "fresh":
            self.begun_afresh(before)
        elif error is None:
            self.resumed(before, expected)
        if error is None:
            return
        cut = isinstance(error, ProcessDead) or job.storage.before.errors
        if cut:
            self.cut_short(resume, before, expected)
        elif resume == "fresh":
            self.moves_away(str(error), self.disk)
        else:
            assert isinstance(error, DamagedRoot), f"I8: {error!r}"
            ledger = read_history(SimStorage(self.disk, "judge")).ledger
            staged = (State.REQUESTED, State.FORKED, State.FAILED)
            journaled = (c.step for c in ledger.checkpoints.values() if c.state not in staged)
            empty = before.tracker is None and not before.evidence(frozenset(journaled))
            known = self.in_service or self.unsure or not empty
            assert known, f"I8: an empty root is refused: {error}"
            assert expected.refusal, f"I8: refused though {expected} is there: {error}"
        self.end()
        if not cut and resume != "fresh" and str(error) not in self.refusals:
            self.refusals.add(str(error))
            self.a_way_out_works(str(error))

    def cut_short(self, resume: str, before: Look, expected: Expected) -> None:
        """A start died, or met an error that ended it: some of its decisions may be carried out."""
        self.offered |= {
            shard: step for step, shard in self.tracked.items()
        }  # and withdrawn, if damaged
        if resume == "fresh":
            goal = self.interrupted[1] if self.interrupted is not None else ANY
            self.interrupted = ("fresh", goal)  # perhaps not begun: then the rollback goes on
            return
        asked = expected.sure | expected.may
        self.offered |= {before.at[step]: step for step in asked if step in before.at}
        self.newest = min(self.newest, max(expected.sure, default=min(asked, default=ANY)))
        seen = self.look()
        if seen.at.get(seen.step) in self.unsure:
            self.retired()

    def expected(self, seen: Look) -> Expected:
        """The steps that a default start has to resume from, and those that it may, as the disk is
        now."""
        kind, goal = self.interrupted or ("", ANY)
        found = Expected(nothing=seen.tracker is None and (not self.in_service or kind == "fresh"))
        moved = seen.step is not None and seen.tracker in self.theirs
        offered = self.offered.values()  # also a newer stock save there
        if seen.step is not None:
            limit = reach = seen.step
        else:  # the journal's newest counts, which may lack what was cut short
            sure_of = [step for step, shard in self.tracked.items() if shard not in self.unsure]
            limit = max(sure_of, default=min((self.newest, *self.tracked)))
            reach = max((*self.tracked, *offered)) if sure_of else ANY
        for step, shard in seen.at.items():
            sure = self.in_use(step, shard, limit)
            if sure and kind == "fresh":
                sure = step == seen.step
            if sure and step > goal:
                sure = step == seen.step and moved
            if sure:
                found.sure.add(step)
            elif shard not in self.left and (
                step <= reach or shard in self.loose or step in {*self.tracked, *offered}
            ):
                found.may.add(step)
        if seen.step is None and not found.sure:
            known = self.left - self.afloat
            found.odd |= {s for s, shard in seen.at.items() if shard not in known}
        found.odd |= self.lost
        for step, shard in self.tracked.items():  # being pruned: back, if what was newer is damaged
            if shard in seen.trashed and step not in seen.at:
                found.may.add(step)
        asked = (kind == "fresh" and seen.tracker is not None) or (goal < ANY and moved)
        found.refusal = asked or not found.sure
        return found

    def in_use(self, step: int, shard: bytes, limit: int) -> bool:
        """True for a step that was tracked by us, or that a stranger's tracker has reached."""
        if shard in self.left | self.loose or step in self.lost:
            return False
        last = self.tracked.get(step)
        if last is None:
            published = (at for s, at in self.unsure.items() if s == shard or s in self.rotten)
            return step <= limit and step not in published
        stranger = last != shard and (
            self.copies[last].ours or last in self.rotten & self.offered.keys()
        )
        return not stranger

    def resumed(self, before: Look, expected: Expected) -> None:
        """A default start went through: was it right? Then what is tracked by now is in use."""
        seen, job = self.look(), self.job
        now = self.in_ledger()
        latest, busy = max(now, default=None), job.coordinator.busy
        if latest is None:
            assert expected.nothing and not expected.sure, f"I8: from nothing, {expected}"
        else:
            cut_short = self.unsure.get(seen.shard(latest)) == latest
            assert cut_short or latest in expected.sure | expected.may | expected.odd, (
                f"I8: {latest} unasked, {expected}"
            )
            assert latest >= max(expected.sure, default=-1), f"I2: {latest}, {expected}"
            if cut_short:
                self.retired()
        for step in expected.sure:
            kept = latest is None or step in now or before.at[step] not in self.owed
            assert kept, f"I2: {step} was in use, and is not tracked"
        assert busy or seen.step == latest, f"I2: the tracker says {seen.tracker!r}, not {latest}"
        afresh = latest is None and self.interrupted is not None
        asked = set(before.at) if afresh else expected.sure | expected.may
        self.settle(seen, now, {before.at[step] for step in asked if step in before.at})
        self.in_service = latest is not None

    def settle(self, seen: Look, now: list[int], asked: set[bytes]) -> None:
        """Steps that are tracked now count; those that were, or were ``asked`` about, are left
        behind."""
        before, last = {*self.tracked.values(), *self.unsure, *self.loose}, self.tracked
        self.tracked = {}
        for step in now:
            directory = MEGATRON.published_name(step)
            shard = seen.shard(step)
            if step in self.lost:
                ours = f"{directory}/{MANIFEST}" in seen.files
                self.copies[shard] = Copy(ours, seen.below(directory))
            else:
                assert seen.at.get(step) == shard, f"I4: {step} is tracked, and not whole"
            self.tracked[step] = shard
            if step not in {*last, *self.offered.values()}:
                self.shaky.pop(shard, None)
            elif (
                step in self.lost
            ):  # perhaps only kept, not made durable: nothing is given up for it
                self.shaky[shard] = step
        standing = {shard for step, shard in seen.at.items() if step not in now}
        kept = set(self.tracked.values())
        busy = self.job.coordinator.busy
        assert busy or not (before - kept) & standing, f"I8: left at their names: {sorted(seen.at)}"
        gone = (before | asked) - kept
        again = {
            seen.at[s] for s, shard in last.items() if s in seen.at and self.copies[shard].ours
        }
        out = self.job.coordinator.ledger.in_state(State.QUARANTINED) if busy else []
        waiting = gone & standing & {seen.at.get(c.step, b"") for c in out}
        self.loose = {s for s in waiting if self.copies[s].ours or s not in again}
        self.left = (self.left | gone) - standing - kept
        self.afloat = {s for s in self.left & gone if not self.copies[s].ours} if busy else set()
        self.owed |= kept
        self.lost -= set(now)
        self.unsure, self.offered, self.newest = {}, {}, ANY
        self.interrupted = None
        if seen.step != max(now, default=None):
            self.theirs = {seen.tracker}
        else:  # one that was right is kept as it is, not made durable: power may leave it empty
            earlier = self.theirs if busy else set()  # a second write may not be durable yet
            self.theirs = earlier | ({b""} if self.disk.find(TRACKER) is self.unsynced else set())

    def begun_afresh(self, before: Look) -> None:
        seen, busy = self.look(), self.job.coordinator.busy
        now = self.in_ledger()
        assert not now, f"I8: begun afresh, and {now} is tracked"
        assert busy or not seen.evidence(), f"I8: begun afresh, and {seen.evidence()} are there"
        assert seen.tracker is None, "I8: begun afresh, and the tracker is there"
        self.settle(seen, [], set(before.at.values()))
        self.in_service = False

    def moves_away(self, said: str, disk: SimDisk) -> None:
        """A fresh start was refused: a person moves away what it names, nothing of which is whole."""
        assert "move it away first" in said, f"I8: a fresh start is refused: {said}"
        for name in set(re.findall(r"iter_\d+", said)):
            step = MEGATRON.parse_published(name)
            assert step in self.lost or step not in Look(disk, self.copies).at, f"I8: {said}"
            disk.uproot(name)

    def a_way_out_works(self, said: str) -> None:
        """As ``docs/failures.md`` has it: begin afresh, or set aside what the refusal asks about."""
        fork = self.disk.fork()
        for _ in range(2):
            job = self.new_run(fork, "fresh")
            try:
                job.open()
            except DamagedRoot as error:
                fork.kill(f"run{self.runs}")
                self.moves_away(str(error), fork)
            else:
                break
        seen = Look(fork, self.copies)
        assert not seen.evidence() and seen.tracker is None, f"I8: no way out of {said}"

    @precondition(alive)
    @rule(ahead=st.integers(1, 3), blow=blows(100))
    def save(self, ahead, blow) -> None:
        step, job = max((*self.tracked, 0)) + ahead, self.job
        begun: list[bytes] = []

        def work() -> None:
            of = job.request(step)
            begun.append(fake_content(of, 0))
            job.fork(of)
            job.write(of, 0)

        name = MEGATRON.published_name(step)
        error = self.attempt(job, blow, work, refusable=name in self.look().names)
        seen = self.look()
        if begun:
            files = seen.below(name)
            if error is not None:  # a roll forward may have to write it once more
                files.pop(MANIFEST, None)
            self.copies[begun[0]] = Copy(True, files)
            self.unsure[begun[0]] = step
        if begun and seen.step == step:
            self.tracked[step] = begun[0]
            self.retired()
        if error is not None or (job.storage.before.errors and step not in self.in_ledger()):
            self.end()
            return
        assert seen.step == step, f"I2: {step} is tracked, and the tracker says {seen.tracker!r}"
        self.unsure.pop(begun[0])
        self.owed.add(begun[0])
        self.strange.discard(step)
        self.in_service = True

    def retired(self) -> None:
        """Retention had its turn: steps that are not among the newest ``keep`` may be deleted."""
        seen = self.look()
        if not self.keep or seen.step is None:
            return
        steps = sorted({s for s in (*seen.at, *self.tracked) if s <= seen.step})
        for step in steps[: -self.keep]:
            shards = {seen.at.get(step), self.tracked.get(step)} - {None}
            self.owed -= {shard for shard in shards if self.copies[shard].ours}

    @precondition(alive)
    @rule(back=st.integers(1, 2), blow=blows(45))
    def roll_back(self, back, blow) -> None:
        job, older = self.job, self.in_ledger()[:-1]
        if not older:
            return
        step, found = older[max(-back, -len(older))], self.look().tracker
        error = self.attempt(job, blow, partial(job.coordinator.rollback, step))
        if error is not None:
            assert job.storage.before.errors or isinstance(error, ProcessDead), f"I8: {error}"
            self.interrupted = ("rollback", step)
            seen = self.look()
            spoilt = seen.step is None and seen.tracker == found  # a repair of it had failed
            if not spoilt:
                self.theirs.discard(seen.tracker)  # it was not moved since we began
            self.end()
            return
        seen = self.look()
        assert seen.step == step, f"I2: rolled back to {step}, the tracker says {seen.tracker!r}"
        now = self.in_ledger()
        kept = {s for s in older if s <= step}
        assert kept <= set(now) <= {s for s in self.tracked if s <= step}, f"I2: {now}, not {kept}"
        self.settle(seen, now, set())

    @precondition(waits)
    @rule(blow=blows(30))
    def tick(self, blow) -> None:
        """Time passes: pending commands are tried again, and the trash is emptied."""
        job = self.job
        if job.acknowledged:
            self.retired()
        for _ in range(3):
            job.clock.now += 60
            if self.attempt(job, blow, job.coordinator.tick) is not None:
                self.end()
                return

    @precondition(alive)
    @rule(closes=st.booleans(), blow=blows(45))
    def leave(self, closes, blow) -> None:
        if closes:
            self.attempt(self.job, blow, self.job.close)
        self.end()

    # ---------------------------------------------------------------------------------- strangers

    def stock(self, step: int, tracked: bool, synced: bool) -> None:
        self.stock_saved += 1
        shard = (b"stock %d " % self.stock_saved).ljust(100, b".")
        stock_saves(self.disk, step, shard, tracked=tracked, synced=synced)
        self.copies[shard] = Copy(False, Look(self.disk, {}).below(MEGATRON.published_name(step)))
        self.owed.add(shard)
        self.strange.add(step)
        self.lost.discard(step)
        if not synced:
            self.shaky[shard] = step
        if tracked:
            self.theirs.add(b"%d" % step)
            self.unsynced = None if synced else self.disk.find(TRACKER)

    @precondition(dead)
    @rule(ahead=st.integers(-2, 3), tracked=st.booleans(), synced=st.booleans())
    def stock_saves(self, ahead, tracked, synced) -> None:
        named = [MEGATRON.parse_published(name) for name in self.look().names]
        step = max((*named, *self.tracked, 0)) + ahead
        if step >= 1 and step not in named and (ahead > 0 or step not in self.tracked):
            self.stock(step, tracked, synced)

    @precondition(dead)
    @rule(back=st.integers(0, 2), tracked=st.booleans(), synced=st.booleans())
    def stock_saves_anew(self, back, tracked, synced) -> None:
        step = self.one_of(self.look().names, back)
        rolling = self.interrupted is not None and self.interrupted[0] == "rollback"
        if step is None or (rolling and step == max(self.tracked)):
            return
        before = self.look().shard(step)
        self.destroyed(step)
        self.disk.uproot(MEGATRON.published_name(step))
        self.stock(step, tracked, synced)
        if before in self.loose and not self.copies[before].ours:  # not told apart: see decision 7
            self.loose.add(self.look().shard(step))

    def one_of(self, names: list[str], back: int) -> int | None:
        """The step that is so many from the newest."""
        return MEGATRON.parse_published(names[-1 - back]) if back < len(names) else None

    def destroyed(self, step: int) -> None:
        """The directory at a step's name is no more; a power loss may have shown it at two names."""
        shard = self.look().shard(step)
        self.owed.discard(shard)
        self.rotten |= {shard} & set(self.unsure)
        self.strange.add(step)

    @precondition(dead)
    @rule(back=st.integers(0, 2), cut=st.booleans())
    def rots(self, back, cut) -> None:
        step = self.one_of(self.look().names, back)
        shard = self.look().shard(step) if step is not None else b""
        if not shard:
            return
        path = f"{MEGATRON.published_name(step)}/{SHARD}"
        self.destroyed(step)
        self.rotten.add(shard)
        if cut:
            self.disk.overwrite(path, shard[:-1])
        else:
            self.disk.uproot(path)

    @precondition(lambda self: self.dead() and self.disk.listed(""))
    @rule(how=st.just("all_lost") | st.integers(0, 99))
    def power_fails(self, how) -> None:
        self.disk.crash(how if isinstance(how, str) else random.Random(how))
        self.lose_unsynced()
        seen = self.look()
        theirs = tuple(t for t in self.theirs if t)
        half = bool(seen.tracker) and any(t.startswith(seen.tracker) for t in theirs)
        if half or (
            self.theirs and seen.step not in self.tracked
        ):  # a stranger's, half on the disk
            self.theirs.add(seen.tracker)

    def lose_unsynced(self) -> None:
        self.owed -= set(self.shaky)
        self.lost |= set(self.shaky.values())
        self.shaky = {}

    @precondition(lambda self: self.dead() and self.disk.listed(""))
    @rule(torn=st.booleans())
    def spoils_the_tracker(self, torn) -> None:
        if self.look().tracker is not None:
            self.disk.uproot(TRACKER)
        if torn:
            self.disk.plant_file(TRACKER, b"1x")
        self.theirs.add(self.look().tracker)

    # ---------------------------------------------------------------------------------- invariants

    @invariant()
    def I1_I2_I4_the_disk_holds_what_was_promised(self) -> None:
        if not hasattr(self, "disk"):
            return
        seen = self.look()
        gone = [self.copies[shard] for shard in self.owed - seen.whole]
        assert not gone, f"I1: nowhere any more: {gone}"
        odd = self.strange | self.lost
        by_us = seen.tracker not in self.theirs
        kind, _ = self.interrupted or ("", ANY)
        if by_us and self.in_service and kind != "fresh":
            assert seen.tracker is not None, "I2: the tracker is gone"
        if by_us and seen.tracker is not None:
            assert seen.step in {*seen.at, *odd}, f"I2: the tracker says {seen.tracker!r}"
        if seen.tracker is None or (seen.step is not None and by_us):
            check_root(SimStorage(self.disk, "judge"), None, odd)

    def teardown(self) -> None:
        """Without faults the root opens, or says why not; then a run saves, and the next finds it."""
        if not hasattr(self, "disk"):
            return
        if currently_in_test_context():  # a kept example is played without Hypothesis
            target(float(self.deepest), label="crash depth")
        if self.alive():
            self.leave(False, None)
        self.start("fallback", None, None, 0.0, 0)
        if self.dead():
            self.start("fresh", None, None, 0.0, 0)
        if self.dead():
            self.start("fresh", None, None, 0.0, 0)
        assert self.alive(), "I8: the root cannot be opened any more"
        free = {MEGATRON.parse_published(name) for name in self.look().names}
        step = max((*free, *self.tracked, 0)) + 1
        self.save(step - max((*self.tracked, 0)), None)
        assert self.alive(), "the run cannot go on"
        self.leave(True, None)
        self.start("fallback", None, None, 0.0, 0)
        assert self.alive() and max(self.tracked) == step
