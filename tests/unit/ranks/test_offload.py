"""Load before the fork, offload after: the hook around a save, on every rank, without torch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from groups import GroupJob

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import CkptFsmError, OffloadFailed, SaveFailed, SaveRefused
from ckptfsm.core.events import Failed
from ckptfsm.core.ports import OffloadHook
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FakeDriver, FifoGate, ThreadTransport, fake_ports, run_ranks

QUICK = {"exit_timeout_s": 0.5, "close_timeout_s": 20.0, "busy_timeout_s": 20.0}
TEMPLATE = {"where": None}


class Trainer:
    """State that is somewhere. ``calls``: those of the hook, and those that make the state, in
    order."""

    def __init__(self) -> None:
        self.where = "host"
        self.calls: list[str] = []
        self.failures: dict[str, BaseException] = {}

    def load(self) -> None:
        self._do("load", "device")

    def offload(self) -> None:
        self._do("offload", "host")

    def state(self) -> dict[str, object]:
        self.calls.append("state")
        return {"where": self.where}

    def parts(self) -> dict[str, object]:
        self._do("parts", self.where)
        return {"inner": {"where": self.where}}

    @property
    def staging(self) -> OffloadHook:
        return OffloadHook(self.load, self.offload)

    def _do(self, call: str, where: str) -> None:
        self.calls.append(call)
        if call in self.failures:
            raise self.failures[call]
        self.where = where


class Running:
    """A single rank: a manager, its trainer and its driver."""

    def __init__(self, root: Path, transport: ThreadTransport | None = None, **settings) -> None:
        self.trainer = Trainer()
        self.driver = FakeDriver(transport.rank if transport is not None else 0)
        staging = self.trainer.staging
        ports = fake_ports(root, driver=self.driver, transport=transport, staging=staging)
        self.manager = Manager(ports, make_config({**QUICK, **settings}))

    def save(self, step: int) -> SaveHandle:
        return self.manager.save(step, self.trainer.state)

    def outcome(self, step: int) -> str:
        try:
            self.save(step).wait()
        except CkptFsmError as error:
            return f"{error.kind}: {error.message}"
        return "saved"


@pytest.fixture
def alone(tmp_path: Path):
    running = Running(tmp_path / "root")
    yield running
    running.manager.abandon()


def test_state_is_loaded_before_it_is_made_and_offloaded_after_the_fork(alone: Running):
    """Catches: a draft of the state where it was before, an offload that the writer sees."""
    handle = alone.save(1)
    assert alone.trainer.calls == ["load", "state", "offload"]
    assert alone.trainer.where == "host"
    handle.wait()
    assert alone.manager.restore(TEMPLATE).state == {"where": "device"}


def test_parts_may_be_functions(alone: Running):
    """Catches: a part that is made before the state was loaded."""
    alone.manager.save(1, parts={"a": alone.trainer.state, "notes": b"plain"}).wait()
    assert alone.manager.restore(parts={"a": TEMPLATE}).parts == {"a": {"where": "device"}}


def test_a_sync_save_offloads_before_it_waits(tmp_path: Path):
    """Catches: the accelerator held for as long as the disk takes."""
    seen: list[str] = []
    running = Running(tmp_path / "root", sync=True)
    hooked = Manager(
        fake_ports(tmp_path / "other", staging=running.trainer.staging),
        make_config({**QUICK, "sync": True}),
        hooks=[lambda record: seen.append(f"{record.dest.value} {running.trainer.where}")],
    )
    hooked.save(1, running.trainer.state)
    assert seen[-1] == "tracked host"
    for manager in (hooked, running.manager):
        manager.close()


@pytest.mark.parametrize("call", ["draft", "merge", "stage"])
def test_offload_runs_when_the_save_does_not_begin(alone: Running, call: str):
    """Catches: state left on the accelerator by a save that was refused or could not be staged."""
    alone.driver.failures[call] = OSError("no")
    assert alone.outcome(1) != "saved"
    assert alone.trainer.calls == ["load", "state", "offload"]
    alone.driver.failures.clear()
    assert alone.outcome(2) == "saved"


def test_the_hook_is_called_once_per_save_that_begins(tmp_path: Path):
    """Catches: gigabytes moved for a save that is skipped."""
    gate = FifoGate(tmp_path / "gate")
    running = Running(tmp_path / "root", on_busy="skip")
    running.driver.before_write = gate.hold
    first = running.save(1)
    calls = list(running.trainer.calls)
    assert running.save(2).skipped
    assert running.trainer.calls == calls
    gate.open()
    first.wait()
    running.manager.close()


@pytest.mark.parametrize("call", ["load", "offload"])
def test_an_interrupt_in_the_hook_comes_out(alone: Running, call: str):
    """Catches: a Ctrl-C taken for a failed load; state left on the accelerator; a root that is lost."""
    alone.trainer.failures[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        alone.save(1)
    assert alone.trainer.calls[-1] == "offload"
    alone.trainer.failures.clear()
    alone.manager.wait_until_finished()
    assert alone.outcome(2) == "saved"


# --------------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("culprit", [0, 1])
def test_I10_load_fails_on_one_rank(tmp_path: Path, culprit: int):
    """Catches: a rank that makes its state, which may hold collectives, without the others."""

    def work(transport: ThreadTransport):
        running = Running(tmp_path / "root", transport)
        if transport.rank == culprit:
            running.trainer.failures["load"] = RuntimeError("out of memory")
        first = running.outcome(1)
        calls = list(running.trainer.calls)
        running.trainer.failures.clear()
        second = running.outcome(2)
        running.manager.close()
        return first, calls, second

    results = run_ranks(2, work)
    assert results[0] == results[1]
    first, calls, second = results[0]
    assert first.startswith(SaveRefused.kind) and "out of memory" in first
    assert f"rank {culprit} cannot" in first
    assert calls == ["load", "offload"] and second == "saved"


@pytest.mark.parametrize("refused", [False, True])
def test_I10_offload_fails_on_one_rank(tmp_path: Path, refused: bool):
    """Catches: an error that only its rank raises, or that costs a checkpoint that is good."""

    def work(transport: ThreadTransport):
        running = Running(tmp_path / "root", transport)
        if refused:
            running.driver.failures["draft"] = OSError("no")
        if transport.rank == 1:
            running.trainer.failures["offload"] = MemoryError("host is full")
        try:
            running.save(1)
            error = None
        except OffloadFailed as failed:
            error = str(failed)
        running.manager.wait_until_finished()
        steps = running.manager.all_steps()
        running.manager.close()
        return error, steps

    results = run_ranks(2, work)
    assert results[0] == results[1]
    error, steps = results[0]
    assert "rank 1: offload: MemoryError: host is full" in error
    assert steps == ([] if refused else [1])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_save_without_the_hook_costs_no_exchange_more(tmp_path: Path, hooked: bool):
    """Catches: every trainer paying for the hook."""

    def work(transport: ThreadTransport):
        staging = Trainer().staging if hooked else None
        ports = fake_ports(
            tmp_path / "root",
            driver=FakeDriver(transport.rank),
            transport=transport,
            staging=staging,
        )
        manager = Manager(ports, make_config(QUICK))
        before = transport.exchanges
        handle = manager.save(1, {"where": "host"})
        cost = transport.exchanges - before
        handle.wait()
        manager.close()
        return cost

    assert run_ranks(2, work) == ([5, 5] if hooked else [3, 3])


# -------------------------------------------------------------------------------- with a controller


def group_job(root: Path) -> tuple[GroupJob, list[Trainer]]:
    """A group of two workers with the hook."""
    job = GroupJob(root, {"actor": 2})
    trainers = [Trainer(), Trainer()]
    for worker, trainer in zip(job.groups["actor"].workers, trainers, strict=True):
        ports = worker._ports
        worker._ports = fake_ports(
            root, driver=ports.driver, transport=ports.transport, staging=trainer.staging
        )
    return job, trainers


def write_share(job: GroupJob, trainers: list[Trainer], step: int):
    save = job.begin(step)
    events = job.groups["actor"].write(save.tickets["actor"], [t.state for t in trainers])
    job.controller.feed(events)
    return save, events


def test_a_group_loads_and_offloads_too(tmp_path: Path):
    """Catches: a hook that works in one kind of job only."""
    job, trainers = group_job(tmp_path / "root")
    save, _ = write_share(job, trainers, 1)
    assert [t.calls for t in trainers] == [["load", "state", "offload"]] * 2
    save.handle.wait()
    assert job.controller.latest_step() == 1
    job.controller.close()


@pytest.mark.parametrize("call", ["", "load", "parts"])
def test_parts_that_one_function_makes_are_made_when_all_are_loaded(tmp_path: Path, call: str):
    """Catches: parts that are made where the state was before, or on the ranks that could load only;
    what their making raised, on one rank, with the others left waiting."""
    job, trainers = group_job(tmp_path / "root")
    if call:
        trainers[1].failures[call] = RuntimeError("out of memory")
    save = job.begin(1)
    group, makers = job.groups["actor"], iter(trainers)
    events = group.write(save.tickets["actor"], [None, None], parts=lambda: next(makers).parts())
    job.controller.feed(events)
    made = [] if call == "load" else ["parts"]
    assert [t.calls for t in trainers] == [["load", *made, "offload"]] * 2
    failed = [event.detail for event in events if isinstance(event, Failed)]
    if call:
        assert any("RuntimeError: out of memory" in detail for detail in failed)
    else:
        save.handle.wait()
    job.controller.abandon()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"model": {"w": 1}}, {"optim": {"w": 2}}], "names the directories"),
        (
            [{"model": {"w": 1}}, {"model": {"w": 1}, "optim": None}],
            "parts that rank 0 does not ask for",
        ),
        ([{"model": {"w": 1}}, None], "maps directories"),
        ([{"model": {"w": 1}}, ["model"]], "maps directories"),
        ([{"model": {"w": 1}}, {1: {"w": 1}, "model": {"w": 1}}], "maps directories"),
    ],
)
def test_I3_parts_that_do_not_fit_together_fail_the_save(tmp_path: Path, given: Any, words: str):
    """Catches: a checkpoint that is tracked and cannot be loaded, as one rank's shard lies where the
    others' metadata does not look; ranks that wait for one that raised alone."""
    job, _ = group_job(tmp_path / "root")
    save, makers = job.begin(1), iter(given)
    events = job.groups["actor"].write(
        save.tickets["actor"], [None, None], parts=lambda: next(makers)
    )
    assert {type(event) for event in events} == {Failed}
    job.controller.feed(events)
    with pytest.raises(SaveFailed, match=words):
        save.handle.wait()
    job.controller.abandon()


class Tensor(str):
    """Something that a weak reference can watch."""

    __slots__ = ("__weakref__",)


@dataclass
class Watched:
    """A trainer that looks at its offload whether what it handed over is still held."""

    made: list[weakref.ref[Tensor]] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)

    def parts(self) -> dict[str, object]:
        tensor = Tensor("on the device")
        self.made.append(weakref.ref(tensor))
        return {"inner": {"where": tensor}}

    def offload(self) -> None:
        self.held.append(self.made[-1]() is not None)


def test_offload_comes_when_a_groups_parts_were_let_go_of(tmp_path: Path):
    """Catches: memory of the accelerator that is not free when the hook returns it."""
    job = GroupJob(tmp_path / "root", {"actor": 1})
    (worker,), watched = job.groups["actor"].workers, Watched()
    ports = worker._ports
    staging = OffloadHook(lambda: None, watched.offload)
    worker._ports = worker._share._ports = fake_ports(
        tmp_path / "root", driver=ports.driver, transport=ports.transport, staging=staging
    )
    save = job.begin(1)
    job.controller.feed(worker.write(save.tickets["actor"], parts=watched.parts))
    assert watched.held == [False]
    job.controller.abandon()


@pytest.mark.parametrize("call", ["load", "offload"])
def test_a_group_reports_the_error_of_the_hook(tmp_path: Path, call: str):
    """Catches: an error of the hook that the controller does not hear of, or that hangs the group."""
    job, trainers = group_job(tmp_path / "root")
    trainers[1].failures[call] = RuntimeError("out of memory")
    save, events = write_share(job, trainers, 1)
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed and f"{call}: RuntimeError: out of memory" in failed[0].detail
    assert [t.calls[-1] for t in trainers] == ["offload", "offload"]
    with pytest.raises(CkptFsmError, match="out of memory"):
        save.handle.wait()
    trainers[1].failures.clear()
    write_share(job, trainers, 2)[0].handle.wait()
    job.controller.close()
