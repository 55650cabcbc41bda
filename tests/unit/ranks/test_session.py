"""The requests of a trainer to a manager or a controller: errors on every rank, hooks, and slow
answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from managers import QUICK, TEMPLATE, weights

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DeadlineExceeded,
)
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import LatestN
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage


def test_I10_torchs_exception_of_a_question_reaches_every_rank(tmp_path: Path, monkeypatch):
    """Catches: an error that is no ``Exception``, raised by rank 0 alone, between two
    exchanges: the other ranks wait for its answer."""

    class CheckpointException(BaseException):
        pass

    def pin(coordinator: Coordinator, step: int, reason: str) -> None:
        raise CheckpointException("of torch")

    monkeypatch.setattr(Coordinator, "pin", pin)

    def work(transport: ThreadTransport) -> int:
        ports = fake_ports(
            tmp_path / "root", driver=FakeDriver(transport.rank), transport=transport
        )
        manager = Manager(ports, make_config(QUICK))
        with pytest.raises(CkptFsmError, match="of torch"):
            manager.pin(1)
        manager.save(1, weights(1)).wait()
        manager.close()
        return manager.latest_step()

    assert run_ranks(2, work) == [1, 1]


CALLS = {
    "pin": lambda manager: manager.pin(2),
    "wait": lambda manager: manager.wait_until_finished(3),
    "save": lambda manager: manager.save(9, weights(9)),
    "poll": lambda manager: manager.poll(),
    "restore": lambda manager: manager.restore(TEMPLATE),
    "close": lambda manager: manager.close(),
    "abandon": lambda manager: manager.abandon(),
}


@pytest.mark.parametrize("call", CALLS)
def test_F24_a_hook_that_calls_its_manager_is_refused(call: str, tmp_path: Path):
    """Catches: a call from inside a hook that takes news before those that the
    hook was called for. The manager then waits for ever for the end of a save that has ended."""
    managers: list[Manager] = []
    refused: list[str] = []

    def hook(record: TransitionRecord) -> None:
        if managers and (record.step, record.dest) == (2, State.TRACKED):
            with pytest.raises(ConfigError, match="a hook"):
                CALLS[call](managers[0])
            refused.append(call)

    ports = fake_ports(tmp_path / "root")
    manager = Manager(ports, make_config({**QUICK, "retention": LatestN(1)}), (hook,))
    managers.append(manager)
    for step in (1, 2, 3):
        manager.save(step, weights(step))
        manager.wait_until_finished()
    assert refused == [call] and manager.all_steps() == [3]
    manager.close()


class Stuck:
    """Holds the coordinator's thread at a call, once it is armed, until it is let go."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.armed = False
        self.go = threading.Event()

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.armed and method == self.method and self.path in path:
            self.armed = False
            assert self.go.wait(30)


@pytest.mark.parametrize("call", ["rollback", "pin"])
def test_I2_a_rollback_that_was_too_slow_is_seen_once_it_is_done(call: str, tmp_path: Path):
    """Catches: ranks that see the steps of before a rollback, for ever, because it was
    done only after its deadline: they do not save where it is due. After a slow ``pin``, of
    which there is no news, they are quiet again."""
    go = threading.Event()

    def work(transport: ThreadTransport) -> list[object]:
        stuck = Stuck("open_exclusive", TRACKER if call == "rollback" else "pins/")
        stuck.go = go
        storage = FaultStorage(PosixStorage(tmp_path / "root"), before=stuck)
        where = (lambda create: storage) if transport.rank == 0 else tmp_path / "root"
        ports = fake_ports(where, driver=FakeDriver(transport.rank), transport=transport)
        settings = {"effect_timeout_s": 0.5, "save_interval_steps": 10, **QUICK}
        manager = Manager(ports, make_config(settings))
        for step in (10, 20, 30):
            manager.save(step, weights(step)).wait()
        manager.wait_until_finished()
        stuck.armed = True
        with pytest.raises(DeadlineExceeded):
            getattr(manager, call)(10)
        manager.poll()
        seen = [manager.all_steps()]
        if transport.rank == 0:
            go.set()
        manager.wait_until_finished()
        seen += [manager.all_steps(), manager.should_save(20), manager._participant.view.quiet]
        idle = transport.exchanges
        manager.poll()
        assert transport.exchanges == idle, "it costs nothing any more"
        manager.close()
        return seen

    after = [[10], True, True] if call == "rollback" else [[10, 20, 30], False, True]
    assert run_ranks(2, work) == [[[10, 20, 30], *after]] * 2
