"""Simulation of whole jobs: that it can fail.

That all promises hold is the business of ``proof.simulation``; here broken libraries must be caught.
"""

from __future__ import annotations

import os
import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
from proof import simulation
from proof.coverage import Coverage
from proof.layer import Budget, LayerResult
from proof.sim import Run, SimulationFailed, simulate
from proof.sim import watch as watch_module
from proof.sim.answers import REPLAYED
from proof.sim.damage import draw_meddling
from proof.sim.faults import Faults, can_strike
from proof.sim.job import Job, Op, Trainer
from proof.sim.ports import WorldGroup, WorldTransport
from proof.sim.run import _TIMES, Scenario
from proof.sim.site import Site
from proof.sim.storage import WorldStorage
from proof.sim.watch import Confirmed, JournalModel, Watch
from proof.sim.world import Process, World

import ckptfsm.disk.durable as durable
from ckptfsm.adapters.fork import Outcome
from ckptfsm.coordinator import accepting
from ckptfsm.coordinator.applier import Applier
from ckptfsm.core import keeping
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import DamagedRoot, RootBusy
from ckptfsm.core.events import ShardReported, WriterGone
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import CheckpointInfo, LatestN, Policy
from ckptfsm.disk import situation
from ckptfsm.disk.journal import JournalWriter
from ckptfsm.disk.ownership import RootOwnership
from ckptfsm.disk.publishing import Publisher
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.participant import Participant
from ckptfsm.testing.invariants import RootBroken, check_root
from ckptfsm.testing.simfs import SimDisk, SimStorage
from ckptfsm.writers.rank_writer import RankWriter

TRACKER = "latest_checkpointed_iteration.txt"


def simulate_groups(seed: int) -> Counter[str]:
    """A run of a controller whose workers' answers come late and twice: which did, and how often."""
    scenario = Scenario(seed, None, Coverage())
    scenario.layout, scenario.site.watch.in_place, scenario.site.stale = "groups", False, 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scenario.site.world.run(scenario.main)
    return scenario.site.replayed


def test_I5_F11_answers_of_workers_come_late_and_twice():
    """Catches: a controller that hands them on, and a simulation in which none of a kind comes."""
    replayed = sum((simulate_groups(seed) for seed in range(25)), Counter())
    assert min(replayed[kind] for kind in REPLAYED) > 0, replayed


@pytest.mark.parametrize("change", ["relabelled", "older", "repeated"])
def test_I5_a_controller_that_takes_void_answers_is_found(change: str, monkeypatch):
    """Catches: a judge that looks at the ledger's filter, and not at the controller's."""
    take = Controller._take
    monkeypatch.setattr(Controller, "_take", partialmethod(TAKES[change], take))
    with pytest.raises(SimulationFailed, match="is handed on") as found:
        for seed in range(25):
            simulate_groups(seed)
    assert found.value.promise == "I5"


def relabel(controller: Any, take: Any, event: Any) -> None:
    """Takes what a worker said of any attempt for the newest one's."""
    if controller._flights and not isinstance(event, WriterGone):
        event = replace(event, of=max(controller._flights, key=lambda of: of.attempt))
    take(controller, event)


def take_older(controller: Any, take: Any, event: Any) -> None:
    """Hands on what is of no attempt in flight."""
    if event.of in controller._flights or isinstance(event, WriterGone):
        take(controller, event)
    else:
        controller._reports.outbox.append(event)


def take_again(controller: Any, take: Any, event: Any) -> None:
    """Forgets what it has taken."""
    for flight in controller._flights.values():
        flight.taken.clear()
    take(controller, event)


TAKES = {"relabelled": relabel, "older": take_older, "repeated": take_again}


class KeepEven(Policy):
    """A trainer's policy: right."""

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return {c.step for c in checkpoints if c.step % 2 == 0}


class Raises(Policy):
    """A trainer's policy: it raises, which keeps everything."""

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        raise RuntimeError("a bug in a policy")


class Nothing(Policy):
    """A trainer's policy: keeps nothing; the library keeps the necessary steps (I7)."""

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return set()


@pytest.mark.parametrize("policy", [KeepEven(), Raises(), Nothing(), LatestN(0)])
def test_I7_a_trainers_policy_can_be_simulated(policy: Policy):
    """Catches: a policy, right or wrong, that empties the store or stops a save."""
    for seed in range(100, 115):
        run = simulate(seed, retention=policy)
        assert run.failure is None, "\n".join([*run.tail, str(run.failure)])


# ------------------------------------------------------------------------------------- it can fail


def first_failure(most: int = 400, what: str = "") -> SimulationFailed:
    for seed in range(most):
        failure = simulate(seed).failure
        if failure is not None and what in failure.what:
            return failure
    raise AssertionError(f"{most} runs did not find it")


def no_effect(*arguments: Any, **keywords: Any) -> None:
    """Stands for a call that was left out."""


def test_F4_a_missing_fsync_of_a_directory_is_found(monkeypatch):
    monkeypatch.setattr(Publisher, "_fsync_names", no_effect)
    assert first_failure().promise == "I4"


def test_F4_a_missing_fsync_of_a_file_is_found(monkeypatch):
    def write_new(storage: Any, path: str, data: bytes) -> None:
        handle = storage.open_exclusive(path)
        durable.write_all(storage, handle, data)
        storage.close(handle)

    monkeypatch.setattr(durable, "write_new", write_new)
    assert first_failure().promise in ("I2", "I3", "I4")


def test_F12_missing_fencing_is_found(monkeypatch):
    monkeypatch.setattr(RootOwnership, "check", no_effect)
    assert first_failure().promise == "I9"


def test_an_effect_before_its_journal_record_is_found(monkeypatch):
    monkeypatch.setattr(JournalWriter, "append", no_effect)
    assert first_failure().promise == "I1"


def test_F1_an_ignored_exit_code_is_found(monkeypatch):
    monkeypatch.setattr(Outcome, "succeeded", property(lambda outcome: outcome.error is None))
    assert first_failure().promise in ("I10", "I3")


def test_I7_retention_that_forgets_pins_is_found(monkeypatch):
    real = Ledger.protected
    monkeypatch.setattr(Ledger, "protected", lambda s, *found: real(s, (), ()))

    def kept(facts):
        return kept_wherever_it_lies(replace(facts, holds=replace(facts.holds, **nobody)))

    nobody = {"pinned": False, "leased": False}
    kept_wherever_it_lies = keeping._kept_wherever_it_lies
    monkeypatch.setattr(keeping, "_kept_wherever_it_lies", kept)
    assert first_failure().promise == "I7"


def test_F26_an_adoption_without_its_pin_is_found(monkeypatch):
    """Catches: a stranger's save in use, and nothing that keeps it from retention."""
    monkeypatch.setattr(Applier, "pin", no_effect)
    assert first_failure(what="without its pin").promise == "I8"


class HidesTheSecond:
    """Names of step 2 appear two seconds late on the other host."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, owner: Process, gone: str, made: str) -> None:
        if made == "iter_0000002":
            self.site.hidden.put(made, owner.host, 2.0)


def test_F9_a_restore_on_another_host_waits_for_names_that_it_does_not_see_yet():
    """Found by simulation. Catches: a sound, acknowledged checkpoint, withdrawn as damaged."""
    world = World(1)
    site = Site(world, Watch(world.disk), Faults(), Coverage(), switch=0.0, lag_s=2.0)
    site.lag = HidesTheSecond(site)
    script = [Op(kind, 0.0) for kind in ("save", "wait", "save", "wait", "restore")]
    config = make_config({**_TIMES, "on_failure": "raise"})
    job = Job(site, 1, 2, config, script, hosts=("a", "b"))
    control = world.process("control")
    world.run(world.spawn(control, "control", lambda: job.start().wait(900)))
    assert world.disk.snapshot()[TRACKER] == b"2\n"


@pytest.mark.damages_journal("the planted bug journals a step twice")
def test_F15_a_step_that_is_saved_twice_is_found(monkeypatch):
    monkeypatch.setattr(Ledger, "refuse", no_effect)
    monkeypatch.setattr(accepting, "_clear_the_name", no_effect)
    assert first_failure(what="is saved once more").promise == "I1"


def test_F23_a_part_that_is_not_looked_for_is_found(monkeypatch):
    monkeypatch.setattr(RankWriter, "_missing_receipt", lambda writer: "")
    assert first_failure(what="never written").promise == "I3"


def test_I8_a_sound_root_that_is_given_up_is_found(monkeypatch):
    """Catches: judges that excuse any refusal once a harmless stray was planted."""
    plan = situation.plan

    def give_up(ledger: Ledger, evidence: Any, *others: Any, **keywords: Any) -> Any:
        if 900_000 in evidence.published or "iter_0900000" in evidence.strays:
            raise DamagedRoot("gives up because of a stray")
        return plan(ledger, evidence, *others, **keywords)

    monkeypatch.setattr(situation, "plan", give_up)
    assert first_failure(what="because of a stray").promise == "I8"


def test_I10_an_error_that_stops_the_coordinator_is_found(monkeypatch):
    """Catches: a bug that comes out as an unknown outcome, which every trainer must expect."""
    monkeypatch.setattr(Applier, "retry_pending", lambda applier: {}["a bug"])
    assert first_failure(what="KeyError('a bug')").promise == "I10"


def test_F28_silence_about_missing_polls_is_found(monkeypatch):
    monkeypatch.setattr(Participant, "watch_polls", no_effect)
    assert first_failure(what="nobody polls").promise == "I10"


# ------------------------------------------------------------------------------------------- world


def in_world(work: Any) -> World:
    world = World(1)
    process = world.process("p")
    main = world.spawn(process, "main", lambda: work(world, process))
    world.run(main)
    return world


def test_time_passes_only_when_everybody_waits():
    seen: list[tuple[str, float]] = []

    def work(world: World, process: Any) -> None:
        def other() -> None:
            world.sleep(5)
            seen.append(("other", world.now))

        task = world.spawn(process, "other", other)
        world.pause()
        seen.append(("main", world.now))
        assert not world.join(task, 1.0)
        assert world.join(task, 10.0)

    assert in_world(work).now == 5
    assert seen == [("main", 0.0), ("other", 5.0)]


def test_I10_a_deadlock_is_a_violation():
    with pytest.raises(SimulationFailed, match="nobody can run"):
        in_world(lambda world, process: world.park())


def test_I10_a_run_without_end_is_a_violation():
    def work(world: World, process: Any) -> None:
        while True:
            world.pause()

    with pytest.raises(SimulationFailed, match="does not end"):
        in_world(work)


def test_a_killed_process_runs_no_further():
    """Catches: code that survives its death by catching everything."""
    ran: list[str] = []

    def work(world: World, process: Any) -> None:
        victim = world.process("victim")

        def stubborn() -> None:
            try:
                world.sleep(100)
            except BaseException:
                ran.append("caught")
            world.sleep(1)
            ran.append("survived")

        task = world.spawn(victim, "victim", stubborn)
        world.sleep(1)
        world.kill(victim)
        assert world.join(task, 50)

    in_world(work)
    assert ran == ["caught"]


def test_an_error_of_a_program_is_a_violation():
    def work(world: World, process: Any) -> None:
        raise KeyError("a bug")

    with pytest.raises(SimulationFailed, match="KeyError"):
        in_world(work)


def quiet_site() -> tuple[Site, World]:
    world = World(1)
    return Site(world, Watch(world.disk), Faults(), Coverage(), switch=0.0), world


@pytest.mark.parametrize(("fault", "number"), [("kill_after", "F2"), ("power_after", "F4")])
@pytest.mark.parametrize("call", ["listdir", "stat", "mkdir"])
def test_a_death_after_a_call_strikes_and_is_counted_once(fault: str, number: str, call: str):
    """Catches: deaths that are counted and never happen: after a read, or a call that failed."""
    site, world = quiet_site()
    site.before_call = lambda *ignored: fault  # type: ignore[method-assign]
    victim = world.process("victim", role="trainer")
    storage = WorldStorage(site, victim)
    survived: list[str] = []

    def work() -> None:
        getattr(storage, call)("name" if call != "listdir" else "")
        survived.append(call)

    controller = world.process("controller")
    task = world.spawn(victim, "victim", work)
    world.run(world.spawn(controller, "main", lambda: world.join(task)))
    assert not survived and not victim.alive
    assert site.coverage.faults[f"{number} x absent"] == 1


def test_every_call_of_a_direct_file_is_made_and_can_be_struck(monkeypatch):
    """Catches: a call that no fault strikes, that others never see, or that is not passed on."""
    site, world = quiet_site()
    storage = WorldStorage(site, world.process("p"))
    faults = {"allocate": "full", "truncate": "error"}
    struck: list[str] = []
    monkeypatch.setattr(site, "before_call", lambda owner, method, path: faults.get(method, ""))

    def work() -> None:
        handle = storage.open_exclusive("f", direct=True)
        for call in (storage.allocate, storage.truncate):
            with pytest.raises(OSError):
                call(handle, 8192)
            struck.append(call.__name__)
        assert world.disk.snapshot() == {"f": b""}
        faults.clear()
        assert storage.allocate(handle, 8192) is True
        assert storage.pwrite(handle, b"x" * 4096, 0) == 4096
        storage.truncate(handle, 5000)
        storage.close(handle)

    world.run(world.spawn(world.process("control"), "main", work))
    assert world.disk.snapshot() == {"f": b"x" * 4096 + bytes(904)}
    assert struck == ["allocate", "truncate"]
    made = [(method, what) for _, method, path, what in world.history if path == "f"]
    assert made == [
        ("open_exclusive", ""),
        ("allocate", "full!"),
        ("truncate", "error!"),
        ("allocate", ""),
        ("pwrite", ""),
        ("truncate", ""),
        ("close", ""),
    ]
    assert can_strike("full", "allocate") and can_strike("error", "truncate")


@pytest.mark.parametrize("call", ["allocate", "truncate"])
def test_I1_a_late_writer_that_changes_the_size_of_a_published_file_is_found(call: str):
    """Catches: a judge that looks at writes only, or only at the name the file was opened under."""
    site, world = quiet_site()
    storage = WorldStorage(site, world.process("late"))

    def work() -> None:
        handle = storage.open_exclusive("shard")
        storage.rename("shard", "renamed")
        site.watch._files.add(world.disk.find("renamed"))
        getattr(storage, call)(handle, 8192)

    with pytest.raises(SimulationFailed, match="a late write into a published"):
        world.run(world.spawn(world.process("control"), "main", work))


def test_F33_a_death_before_any_save_began_is_none_of_the_very_first():
    """Catches: a fault counted as exercised by a start that was killed on an empty root."""
    site, _ = quiet_site()
    site.count_death()
    assert not site.coverage.faults
    site.watch.models[1], site.watch.newest_epoch = JournalModel({(1, 1, 1): "requested"}), 1
    site.count_death()
    assert site.coverage.faults == {"F33 x requested": 1}


def test_F11_a_duplicate_of_an_attempts_report_is_no_stale_one():
    """Catches: stale reports counted as exercised though they cannot be taken for another
    attempt's."""
    site, world = quiet_site()
    site.stale = 1.0
    process = world.process("p")
    old, new = AttemptId(1, 1, 1), AttemptId(1, 1, 2)
    own = ShardReported(new, "state", 0, 1, 10)
    for sent, strikes in ((own, 0), (ShardReported(old, "state", 0, 1, 10), 1)):
        transport = WorldTransport(WorldGroup(site, 1, 1.0), 0, process, [sent])
        assert len(transport._distort([own])) == 2
        assert site.coverage.faults["F11 x absent"] == strikes


def test_F32_only_a_refusal_that_names_a_living_owner_counts():
    """Catches: a refusal counted as clear that names no process, a dead one, or the wrong host."""
    site, world = quiet_site()
    config = make_config({**_TIMES, "on_failure": "raise"})
    owner, dead = world.process("owner", role="trainer"), world.process("dead", role="trainer")
    dead.alive = False
    mine = world.process("mine", role="trainer")
    trainer = Trainer(Job(site, 1, 1, config, []), 0, mine, WorldGroup(site, 1, 1.0))
    trainer.job.processes.append(mine)
    named = [(owner.host, owner.pid), (dead.host, dead.pid), ("z", owner.pid), ("unknown", None)]
    named.append((mine.host, mine.pid))
    found = [trainer._is_named(RootBusy("busy", root="/sim", host=h, pid=p)) for h, p in named]
    assert found == [True, False, False, False, False]


def test_F9_another_host_sees_names_late():
    """Catches: a lag that shows what was removed as gone, strikes one host only, or never ends."""
    site, world = quiet_site()
    site.lag_s = 2.0
    site.chance = lambda probability: True  # type: ignore[method-assign]
    here, there = (WorldStorage(site, world.process(host, host)) for host in "ab")

    def work() -> None:
        for one, other in ((here, there), (there, here)):
            one.mkdir("new")
            assert one.listdir("") == ["new"] and not other.listdir("")
            with pytest.raises(FileNotFoundError):
                other.stat("new")
            one.rename("new", "old")
            one.rmdir("old")
            assert not one.listdir("") and other.listdir("") == ["new", "old"]
            with pytest.raises(FileNotFoundError):
                other.stat("old")
            world.sleep(2.0)
            assert not other.listdir("")
        here.mkdir("seen")
        there.mkdir("seen/inner")  # so it is there
        assert there.listdir("") == ["seen"] and not here.listdir("seen")

    world.run(world.spawn(world.process("control"), "main", work))
    assert site.coverage.faults["F9 x absent"] == 7


def test_no_death_is_drawn_that_does_not_happen(monkeypatch):
    """Catches: a fault that is drawn for a call and forgotten on the way there."""
    drawn, died = 0, 0
    strike, strike_dead = Site._strike, Site.strike_dead

    def count_drawn(site: Site, kind: str, owner: Any, method: str) -> str:
        nonlocal drawn
        fault = strike(site, kind, owner, method)
        drawn += fault.endswith("_after")
        return fault

    def count_died(site: Site, owner: Any, fault: str) -> None:
        nonlocal died
        died += "_strike" not in {f.name for f in traceback.extract_stack(limit=3)}
        strike_dead(site, owner, fault)

    monkeypatch.setattr(Site, "_strike", count_drawn)
    monkeypatch.setattr(Site, "strike_dead", count_died)
    for seed in range(40):
        simulate(seed)
    assert drawn == died > 2


def test_every_run_draws_rates_between_jobs():
    """Catches: damage that every run meets equally often, or some kind that none does."""
    runs = [draw_meddling(random.Random(seed)) for seed in range(200)]
    for meddler in runs[0]:
        rates = sorted(run[meddler] for run in runs)
        assert rates[50] == 0.0 and rates[-1] > 0.5, meddler


def test_F29_a_root_that_a_writer_holds_is_found(monkeypatch):
    """Catches: a start that is refused for the sake of an orphan, without a verdict."""
    monkeypatch.setattr(SimDisk, "kill", no_effect)  # a dead trainer's lock stays
    assert first_failure(what="nobody has the root").promise == "I8"


# ------------------------------------------------------------------------------------------ judges


def watched(process: str = "p") -> tuple[SimDisk, SimStorage, Watch]:
    disk = SimDisk()
    return disk, SimStorage(disk, process), Watch(disk)


def test_check_root_judges_tracker_and_directories():
    """Catches: a judge that lets a torn tracker, a missing step or a regression pass."""
    disk, storage, _ = watched()
    assert check_root(storage, None) is None
    with pytest.raises(RootBroken, match="I2: step 3 was acknowledged"):
        check_root(storage, 3)
    disk.plant_file(TRACKER, b"3")
    with pytest.raises(RootBroken, match="I2: the tracker names 3"):
        check_root(storage, None)
    assert check_root(storage, 3, ignore={3}) == 3
    disk.overwrite(TRACKER, b"x")
    with pytest.raises(RootBroken, match="I2: the tracker says"):
        check_root(storage, None)
    storage.mkdir("iter_0000003")
    with pytest.raises(RootBroken, match="I4"):
        check_root(storage, None)


def test_the_watch_judges_moves_without_a_reason():
    """Catches: a watch that lets a directory be published, moved or deleted without a journal."""
    disk, storage, watch = watched()
    for path in (".ckptfsm", ".ckptfsm/staging", ".ckptfsm/trash"):
        storage.mkdir(path)
    with pytest.raises(RootBroken, match="without a journal"):
        watch.changed("p", 0.0, "mkdir", ".ckptfsm/staging/1.e1.a1")
    with pytest.raises(RootBroken, match="is published as"):
        watch.changed("p", 0.0, "rename", "elsewhere", "iter_0000001")
    with pytest.raises(RootBroken, match="the tracker is deleted"):
        watch.changed("p", 0.0, "unlink", TRACKER)
    with pytest.raises(RootBroken, match="without a fresh start"):
        watch.changed("p", 0.0, "rename", TRACKER, ".ckptfsm/quarantine/tracker")
    for change in ("write", "pwrite", "allocate", "truncate"):
        with pytest.raises(RootBroken, match="journal of another epoch"):
            watch.changed("p", 0.0, change, ".ckptfsm/journal/000007.ndjson")


def test_I9_bringing_a_directory_back_needs_a_fresh_look():
    """Catches: a watch that takes a bring-back from the trash for no effect."""
    _, _, watch = watched()
    watch.changed("p", 0.0, "link", ".ckptfsm/epochs/taking", ".ckptfsm/epochs/epoch-1")
    back = ("rename", ".ckptfsm/trash/1.e1.a1", "iter_0000001")
    with pytest.raises(RootBroken, match="I9: p acts on .*, its epoch unchecked"):
        watch.changed("p", 0.0, *back)
    watch.looked("p")
    with pytest.raises(RootBroken, match="I1: .* comes back from the trash, not from prunable"):
        watch.changed("p", 0.0, *back)
    watch.newest_epoch = 2  # one checked effect of a fenced one may land, and no second one
    for broken in ("I1", "I9: p of epoch 1 acts again"):
        watch.looked("p")
        with pytest.raises(RootBroken, match=broken):
            watch.changed("p", 0.0, *back)


def test_I9_the_watch_tells_an_epoch_given_back_from_one_taken_away():
    """Catches: a watch that lets the epoch of a living owner be removed, and then takes the one before
    it for the newest."""
    disk, storage, watch = watched()
    for path in (".ckptfsm", ".ckptfsm/epochs"):
        storage.mkdir(path)

    def take(process: str, epoch: int) -> None:
        disk.plant_file(f".ckptfsm/epochs/epoch-{epoch}", b"{}")
        watch.changed(process, 0.0, "link", "taking", f".ckptfsm/epochs/epoch-{epoch}")

    def remove(process: str, epoch: int) -> None:
        storage.unlink(f".ckptfsm/epochs/epoch-{epoch}")
        watch.changed(process, 0.0, "unlink", f".ckptfsm/epochs/epoch-{epoch}")

    take("old", 1)
    take("new", 2)
    remove("new", 1)
    assert watch.newest_epoch == 2
    take("newer", 3)
    remove("newer", 3)  # its opening failed on a full disk
    assert watch.newest_epoch == 2
    take("newest", 3)
    for process in ("old", "newer"):
        with pytest.raises(RootBroken, match=f"I9: {process} removes epoch 3, which is newest's"):
            watch.changed(process, 0.0, "unlink", ".ckptfsm/epochs/epoch-3")


def test_I8_the_watch_tells_a_hopeless_root(monkeypatch):
    """Catches: a watch that takes a whole checkpoint for lost, or a lost one for whole."""
    disk, storage, watch = watched()
    whole = {"iter_0000001": (1, 1, 1), "iter_0000002": (2, 1, 2)}

    def check(storage: Any, name: str) -> tuple[int, int, int]:
        if name not in whole:
            raise RootBroken(f"I4: {name}")
        return whole[name]

    monkeypatch.setattr(watch_module, "check_directory", check)
    assert watch.hopeless()
    for name in ("iter_0000001", "iter_0000002", "iter_0900000"):
        storage.mkdir(name)
    watch.strays.add(900_000)
    disk.plant_file(TRACKER, b"1")
    assert not watch.hopeless()  # no journal is left: the tracker says what was in use
    watch.damaged.add(1)
    assert watch.hopeless()
    watch.models[1] = JournalModel({(1, 1, 1): "tracked", (2, 1, 2): "tracked"})
    assert not watch.hopeless()
    watch.models[1].states[2, 1, 2] = "quarantined"
    assert watch.hopeless()


@pytest.mark.parametrize(
    ("named", "to", "changes", "allowed"),
    [
        (4, 2, {}, True),
        (4, 1, {}, False),  # 2 is whole
        (4, 1, {2: "prunable"}, False),
        (4, 2, {2: "prunable"}, True),
        (3, 2, {3: "finalized"}, True),  # 3 waits to be tracked and is damaged
        (4, 2, {3: "finalized"}, True),  # it waits, and it was not acknowledged
        (2, 1, {}, False),  # it named what is whole
    ],
)
def test_I2_the_watch_tells_how_far_the_tracker_may_fall_back(named, to, changes, allowed):
    """Catches: a watch that lets the tracker pass over what is whole, or not fall back at all."""
    disk, storage, watch = watched()
    model = JournalModel({(s, 1, s): changes.get(s, "tracked") for s in (1, 2, 3, 4)})
    for s in (1, 2, 3, 4):
        storage.mkdir(f"iter_{s:07d}")
        watch._remember(f"iter_{s:07d}", (s, 1, s))
    watch.damaged.add(4)
    if 3 not in changes or named == 3:
        watch.damaged.add(3)
    disk.plant_file(TRACKER, str(named).encode())
    assert watch._fell_back(model, to) is allowed
    watch._complete[disk.find("iter_0000002")] = (2, 9, 9)  # another attempt has its name
    if to == 1 and named != 2:
        assert watch._fell_back(model, to)


def test_I7_the_watch_protects_a_reader():
    disk, storage, watch = watched()
    storage.mkdir("iter_0000001")
    disk.plant_file("iter_0000001/f", b"x")
    watch._remember("iter_0000001", (1, 1, 1))
    watch.granted("reader", 1, until=10.0)
    token = disk.find("iter_0000001/f")
    with pytest.raises(RootBroken, match="while reader reads step 1"):
        watch.deleting(token, ".ckptfsm/trash/1.e1.a1/f", 5.0)
    watch.deleting(token, ".ckptfsm/trash/1.e1.a1/f", 11.0)
    watch.returned("reader")
    watch.deleting(token, ".ckptfsm/trash/1.e1.a1/f", 5.0)


# ------------------------------------------------------------------------------------------- layer


def test_the_layer_counts_and_names_the_command(monkeypatch, capsys):
    """Catches: a violation that is lost on its way, or cannot be replayed."""
    monkeypatch.setattr(Publisher, "_fsync_names", no_effect)
    part = simulation.run_chunk(range(2))
    result = LayerResult("simulation")
    simulation._add(result, part)
    assert result.explored["runs"] == 2 and result.explored["storage calls"] > 100
    assert len(result.violations) == 2
    assert result.violations[0].replay.endswith("proof.simulation --seed 0")
    assert result.coverage.rows and result.coverage.pairs
    assert simulation.main(["--seed", "0", "--tail", "5"]) == 1
    assert "VIOLATION I4" in capsys.readouterr().out


def test_a_run_strikes_where_it_aims():
    """Catches: an aim that is never hit, and states soon over that are left to luck."""
    for aim in (State.FORKED, State.FINALIZED):
        coverage = Coverage()
        failures = [simulate(seed, aim=aim, coverage=coverage).failure for seed in range(16)]
        assert failures == [None] * 16
        struck = coverage.faults[f"F2 x {aim.value}"], coverage.faults[f"F13 x {aim.value}"]
        assert min(struck) > 0, f"{aim}: killed, stopped {struck}"
    assert simulation.main(["--seed", "0", "--aim", "forked", "--tail", "1"]) == 0


def test_the_layer_shares_seeds_out_and_stops_when_told(monkeypatch):
    """Catches: seeds that are never run, or a hurried run that goes on after a finding."""
    monkeypatch.setattr(simulation, "_CHUNK", 4)
    monkeypatch.setattr(simulation, "_CHUNK_HURRIED", 3)
    monkeypatch.setattr(Budget, "pick", lambda self, **amounts: 6)
    monkeypatch.setattr(simulation, "_check_reruns", no_effect)
    monkeypatch.setattr(simulation, "AIMED", {State.FORKED: 3})
    assert simulation.run(Budget(processes=2)).explored["runs"] == 12, (
        "six, and six aimed at one state"
    )
    monkeypatch.setattr(Publisher, "_fsync_names", no_effect)
    assert simulation.run(Budget(processes=1, stop_at_first=True)).explored["runs"] == 3


def test_a_run_without_late_answers_is_red():
    """Catches: late answers that are no longer made, and a gate that is as green as before."""
    result = LayerResult("simulation", dict.fromkeys((*REPLAYED, "runs"), simulation._ENOUGH))
    simulation._check_replayed(result)
    assert not result.violations
    result.explored[REPLAYED[1]] = 0
    simulation._check_replayed(result)
    assert [v.what[:29] for v in result.violations] == ["no answers of failed attempts"]


def test_a_soak_ends_though_its_seeds_do_not(monkeypatch):
    """Catches: a soak that hands out seeds without end before it takes the first result."""
    monkeypatch.setattr(simulation, "_CHUNK", 2)
    monkeypatch.setattr(simulation, "_check_reruns", no_effect)
    result = simulation.run(Budget(profile="soak", processes=2, hours=0.0))
    assert result.explored["runs"] == 2 and not result.violations


def test_a_worker_that_is_killed_is_a_violation(monkeypatch):
    """Catches: a layer that waits for ever for a worker without memory, or counts without it."""
    real = simulation.simulate

    def simulate_or_die(seed: int, **others: Any) -> Run:
        if seed == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(seed, **others)

    monkeypatch.setattr(simulation, "_CHUNK", 1)
    monkeypatch.setattr(simulation, "AIMED", {})
    monkeypatch.setattr(Budget, "pick", lambda self, **amounts: 20)
    monkeypatch.setattr(simulation, "simulate", simulate_or_die)
    result = simulation.run(Budget(processes=2))
    assert [v.what[:28] for v in result.violations] == ["a worker process died, and w"]
    assert "11 to 11" in result.violations[0].what
    assert 4 <= result.explored["runs"] <= 11  # 8 chunks are ahead


def test_F27_a_lease_that_a_person_removed_keeps_nothing():
    """Catches: a judge that blames the pruner for a lease that went with the private directory."""
    watch = Watch(SimDisk())
    watch.readers["reader"] = Confirmed(3, frozenset(), until=100.0)
    watch.began_anew()
    assert not watch.readers
