"""The state machine that Hypothesis drives over a production manager on a simulated disk.

A single trainer at a time: its manager, its writers (moved by the rules), a simulated disk that
loses power, storage faults at rates drawn per run, people and readers who pin, lease, roll back and
delete. The promises are judged after every rule by reading the disk as a stranger.
"""

from __future__ import annotations

import errno
import random
import warnings
from dataclasses import replace

from fakes import FakeDriver, FakeShard, fake_ports
from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from inline import InlineExecutor
from sim_writers import SimWriters

from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    IllegalTransition,
    RootBusy,
    StepNotFoundError,
)
from ckptfsm.core.events import Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.layout import MEGATRON, QUARANTINE
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakePart, SimClock, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from proof.drawn_roots import policies

CODES = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EINTR)
RATES = (0.0, 0.0, 0.005, 0.03)


class Chaos:
    """The hook around every changing storage call of a trainer: faults at a rate, and one death.

    ``depth`` counts calls since the trainer began; ``die_in`` calls from now the process is killed.
    """

    def __init__(self, seed: int, rate: float) -> None:
        self.rng = random.Random(seed)
        self.rate = rate
        self.depth = 0
        self.die_in: int | None = None

    def before(self, index: int, method: str, path: str) -> None:
        self.depth += 1
        if self.die_in is not None:
            self.die_in -= 1
            if self.die_in < 0:
                self.die_in = None
                raise ProcessDead(f"before {method} {path}")
        if self.rate and self.rng.random() < self.rate:
            raise OSError(self.rng.choice(CODES), "injected", path)

    def after(self, index: int, method: str, path: str) -> None:
        """The call happened, and still reports an error: an unknown outcome (F8)."""
        if self.rate and method in ("rename", "fsync_dir") and self.rng.random() < self.rate / 3:
            raise OSError(errno.ESTALE, "injected after", path)


class TrainerMachine(RuleBasedStateMachine):
    """See the module. Steps grow by a drawn number; a run that lost its root for good ends."""

    attempts = Bundle("attempts")
    leases = Bundle("leases")

    @initialize(seed=st.integers(0, 2**16), rate=st.sampled_from(RATES), policy=policies())
    def begin(self, seed, rate, policy):
        self.disk = SimDisk()
        self.chaos = Chaos(seed, rate)
        self.runs = 0
        self.clock = SimClock()
        self.policy = policy
        self.manager = None
        self.acknowledged: int | None = None
        self.lost = False
        self.handles = []
        self.deepest = 0
        self.flying_at_end = 0
        self.readers: dict[int, ReaderLease] = {}
        self.leases_made = 0
        self.taken_back: set[int] = set()
        self.start()

    # -------------------------------------------------------------------------------- the trainer

    def start(self) -> None:
        """A new process opens the root. With faults it may fail to; then nothing runs."""
        self.runs += 1
        name = f"trainer{self.runs}"
        self.chaos.depth = 0
        storage = FaultStorage(
            SimStorage(self.disk, name), before=self.chaos.before, after=self.chaos.after
        )
        self.writers = NamingWriters(self.disk, f"{name}-writer", self.chaos.before)
        self.driver = FakeDriver(0)
        identity = Identity("sim", self.runs, f"boot:{self.runs}", name)
        ports = fake_ports(
            _Storage(storage),
            driver=self.driver,
            clock=self.clock,
            executor=InlineExecutor,
            identity=_Same(identity),
            launch=self.writers,
        )
        config = CheckpointConfig(
            retention=self.policy, on_failure="warn", visibility_timeout_s=0.5, busy_timeout_s=5.0
        )
        self.manager = None
        self.attempt(self._open, ports, config)

    def _open(self, ports, config) -> None:
        self.manager = Manager(ports, config)
        latest = self.manager.latest_step()
        assert self.acknowledged is None or (latest is not None and latest >= self.acknowledged), (
            f"I2: {self.acknowledged} was acknowledged, the restart resumes from {latest}"
        )

    def attempt(self, work, *arguments):
        """Do something that may be killed or refused; only typed errors may come out."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return work(*arguments)
        except ProcessDead:
            self.end("kill")
        except IllegalTransition as error:
            raise AssertionError(f"I11: an illegal move was tried: {error}") from error
        except CkptFsmError as error:
            if isinstance(error, DamagedRoot) and not self.chaos.rate:
                raise AssertionError(f"I8: the root was given up: {error}") from error
        return None

    def listen(self) -> None:
        """The steps that the trainer was told of by now."""
        for handle in self.handles:
            if handle.state is State.TRACKED:
                self.acknowledged = max(self.acknowledged or 0, handle.step)
        self.handles = [h for h in self.handles if not h.done]

    def end(self, how: str, chooser: random.Random | None = None) -> None:
        """The trainer is gone: killed (its files stay as they are), or with the power."""
        self.listen()
        self.deepest = max(self.deepest, self.chaos.depth)
        self.flying_at_end += len(self.writers.running())
        for writer in self.writers.running():
            writer.kill(0.0)
        self.disk.kill(f"trainer{self.runs}")
        if how == "power":
            self.disk.crash(chooser or "all_lost")
        assert_journal_conforms(SimStorage(self.disk, "judge"))
        self.manager = None
        self.chaos.die_in = None
        self.handles = []

    def alive(self) -> bool:
        return self.manager is not None

    # -------------------------------------------------------------------------------------- saves

    @precondition(alive)
    @rule(
        target=attempts,
        delta=st.integers(-1, 3),
        file=st.booleans(),
        die_in=st.none() | st.integers(0, 60),
    )
    def save(self, delta, file, die_in):
        step = (self.manager.latest_step() or 0) + delta
        parts = {"state": {"w": step}, **({"data": b"cursor"} if file else {})}
        if self.manager._participant.view.in_flight is not None:
            return multiple()  # save() would wait for a writer that only a rule can move
        self.chaos.die_in = die_in
        handle = self.attempt(_Save(self.manager, step, parts))
        self.chaos.die_in = None
        if handle is None:
            return multiple()
        assert self.manager is None or handle.step == step, "a handle of another step"
        self.handles.append(handle)
        return handle.attempt

    @precondition(alive)
    @rule(how=st.sampled_from(("finish", "finish", "die", "error")), calls=st.integers(0, 25))
    def move_writers(self, how, calls):
        for writer in self.writers.running():
            if how == "die":
                writer.die(calls)
            else:
                writer.finish()

    @precondition(alive)
    @rule(rounds=st.integers(1, 4), die_in=st.none() | st.integers(0, 80))
    def poll(self, rounds, die_in):
        self.chaos.die_in = die_in
        for _ in range(rounds):
            if self.manager is not None:
                self.attempt(self.manager.poll)
        self.chaos.die_in = None
        self.listen()

    @precondition(alive)
    @rule()
    def hang(self):
        """Every writer hangs beyond its deadline: its attempt fails, nothing waits for ever (I10)."""
        running = self.writers.running()
        if not running or self.chaos.rate:
            return
        self.clock.sleep(2000.0)
        for _ in range(4):
            if self.manager is not None:
                self.attempt(self.manager.poll)
        assert not [w for w in running if w.running], "I10: a hung writer was not ended"
        self.listen()

    @precondition(alive)
    @rule(of=attempts, rank=st.integers(0, 1), kind=st.integers(0, 3))
    def lie(self, of, rank, kind):
        """A report of whatever attempt arrives late, or from a rank that does not exist (I5)."""
        living = self.manager._client._coordinator.ledger.checkpoints.get(of)
        if living is not None and rank == 0:
            return  # that would be the truth
        event = (
            WriterForked(of, rank, 1),
            ShardReported(of, "state", rank, 1, 7),
            WriterGone(of, rank),
            Failed(of, "a lie", "", rank),
        )[kind]
        if isinstance(event, Failed) and living is not None:
            return
        coordinator = self.manager._client._coordinator
        before = dict(coordinator.ledger.checkpoints)
        self.attempt(coordinator.report, [event])
        assert dict(coordinator.ledger.checkpoints) == before, f"I5: {event} counted"

    # ------------------------------------------------------------------------------------- people

    @precondition(alive)
    @rule(data=st.data(), what=st.sampled_from(("pin", "unpin", "delete", "record_metrics")))
    def people(self, data, what):
        steps = self.manager.all_steps()
        if not steps:
            return
        step = data.draw(st.sampled_from(steps))
        more = ({"loss": data.draw(st.floats(0, 9))},) if what == "record_metrics" else ()
        self.attempt(getattr(self.manager, what), step, *more)
        if what == "delete" and self.manager is not None:
            assert step != max(steps) or step in self.manager.all_steps(), "I7: deleted the latest"

    @precondition(lambda self: self.alive() and self.manager._participant.view.in_flight is None)
    @rule(data=st.data(), die_in=st.none() | st.integers(0, 60))
    def rollback(self, data, die_in):
        steps = self.manager.all_steps()
        if not steps:
            return
        step = data.draw(st.sampled_from(steps))
        self.listen()
        self.acknowledged = step  # from the call on, nothing newer is promised
        self.taken_back.update(later for later in steps if later > step)
        self.chaos.die_in = die_in
        self.attempt(self.manager.rollback, step)
        self.chaos.die_in = None

    @precondition(alive)
    @rule(target=leases, data=st.data())
    def take_lease(self, data):
        steps = self.manager.all_steps()
        if not steps:
            return multiple()
        self.leases_made += 1
        step = data.draw(st.sampled_from(steps))
        lease = ReaderLease("", step, storage=SimStorage(self.disk, f"reader{self.leases_made}"))
        try:
            lease.__enter__()
        except StepNotFoundError:
            return multiple()
        self.readers[self.leases_made] = lease
        return self.leases_made

    @rule(lease=consumes(leases))
    def read_and_give_back(self, lease):
        """A step that a reader was told of stays there, whole, for as long as it holds the lease.

        A rollback takes it to quarantine all the same: whole, too.
        """
        found = self.readers.pop(lease, None)
        if found is None:
            return
        storage = found._storage
        name = MEGATRON.published_name(found._step)
        if lookup(storage, name) is None and found._step in self.taken_back:
            asides = [n for n in storage.listdir(QUARANTINE) if n.startswith(f"{found._step}.")]
            name = f"{QUARANTINE}/{asides[0]}"
        assert storage.read(f"{name}/.ckptfsm/manifest.json", 1 << 20), "F27: half a checkpoint"
        assert storage.read(f"{name}/__0_0.distcp", 1 << 20), "F27: half a checkpoint"
        found.__exit__(None, None, None)

    # -------------------------------------------------------------------------------- ends and starts

    @precondition(alive)
    @rule()
    def second_trainer_is_refused(self):
        name = f"intruder{self.runs}"
        identity = Identity("sim", 10_000 + self.runs, "boot:x", name)
        before = self.disk.snapshot()
        ports = fake_ports(
            _Storage(SimStorage(self.disk, name)),
            clock=self.clock,
            executor=InlineExecutor,
            identity=_Same(identity),
            launch=self.writers,
        )
        try:
            Manager(ports, CheckpointConfig())
        except RootBusy:
            assert self.disk.snapshot() == before, "F32: an intruder changed the root"
        else:
            raise AssertionError("F12: two trainers on one root")
        finally:
            self.disk.kill(name)

    @precondition(alive)
    @rule(how=st.sampled_from(("kill", "power", "power")), seed=st.integers(0, 2**10))
    def crash(self, how, seed):
        self.drop_readers(how)
        self.end(how, random.Random(seed))

    def drop_readers(self, how: str) -> None:
        if how == "power":
            self.readers.clear()

    @precondition(alive)
    @rule()
    def close(self):
        for writer in self.writers.running():
            writer.finish()
        self.attempt(self.manager.close)
        if self.manager is not None:
            self.end("kill")

    @precondition(lambda self: not self.alive())
    @rule(policy=st.none() | policies(), die_in=st.none() | st.integers(0, 90))
    def restart(self, policy, die_in):
        self.policy = policy if policy is not None else self.policy
        self.chaos.die_in = die_in
        self.start()
        self.chaos.die_in = None

    # --------------------------------------------------------------------------------- invariants

    @invariant()
    def I2_I3_I4_the_disk_is_what_was_promised(self):
        if self.runs:
            check_root(SimStorage(self.disk, "judge"), self.acknowledged)

    @invariant()
    def I11_the_journal_is_readable(self):
        """Whether it is a legal trace is judged whenever a trainer ends: that takes longer."""
        if self.runs:
            read_history(SimStorage(self.disk, "judge"))

    def teardown(self):
        """Without faults the root opens, saves and prunes again, whatever happened before (I8)."""
        if not hasattr(self, "disk"):
            return
        target(float(self.deepest), label="crash depth")
        target(float(self.flying_at_end), label="writers in flight at an end")
        self.readers.clear()
        if self.alive():
            self.end("power")
        self.chaos.rate = 0.0
        self.chaos.die_in = None
        self.start()
        assert self.manager is not None, "I8: the root cannot be opened any more"
        step = (self.manager.latest_step() or 0) + 1
        handle = self.attempt(_Save(self.manager, step, {"state": {"w": step}}))
        for _ in range(12):
            self.writers.for_each(_finish)
            self.attempt(self.manager.poll)
            self.clock.sleep(6.0)
        assert handle is not None and handle.state is State.TRACKED, "the run cannot go on"
        assert self.manager.latest_step() == step
        check_root(SimStorage(self.disk, "judge"), step)
        assert_journal_conforms(SimStorage(self.disk, "judge"))


class NamingWriters(SimWriters):
    """Writers of shards that name their attempt and rank, so that the judge sees another's content."""

    def __call__(self, storage, job):
        named = tuple(
            FakePart(p.name, p.directory, p.rank, fake_content(job.of, p.rank))
            if isinstance(p, FakeShard)
            else p
            for p in job.parts
        )
        return super().__call__(storage, replace(job, parts=named))


def _finish(writer) -> None:
    writer.finish()


class _Storage:
    def __init__(self, storage) -> None:
        self.storage = storage

    def __call__(self, create: bool):
        return self.storage


class _Same:
    def __init__(self, value) -> None:
        self.value = value

    def __call__(self):
        return self.value


class _Save:
    def __init__(self, manager, step, parts) -> None:
        self.manager, self.step, self.parts = manager, step, parts

    def __call__(self):
        return self.manager.save(self.step, parts=self.parts)
