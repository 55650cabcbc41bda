"""Commands that change a root: the same on a dead root and through the inbox of a living owner."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
from cli_runs import ran, said
from fakes import fake_ports
from managers import QUICK, weights
from real_roots import TREE, crashed, real_job, real_root

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli import changing
from ckptfsm.coordinator.operator_requests import carry_out
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import Asked, RequestKind, encode
from ckptfsm.core.errors import CkptFsmError, ConfigError, SaveRefused
from ckptfsm.core.layout import ANSWERS, INBOX, PRIVATE, request_name
from ckptfsm.core.retention import BestN, LatestN
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inbox import Inbox, send, take_back
from ckptfsm.disk.setting_aside import Mover
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.harness import FakeJob, SimClock


def served(job: FakeJob, command: Callable[[], tuple[int, str, str]]) -> tuple[int, str, str]:
    """Run a command while a living owner looks into its inbox."""
    found: list[tuple[int, str, str]] = []
    asking = threading.Thread(target=lambda: found.append(command()))
    asking.start()
    while asking.is_alive():
        job.coordinator.tick()
        asking.join(0.01)
    return found[0]


def steps(job: FakeJob) -> list[int]:
    return [c.step for c in job.coordinator.ledger.checkpoints.values()]


@pytest.fixture
def living(tmp_path):
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    yield job
    job.close()
    job.storage.close_root()


def test_a_pin_of_a_dead_root_is_there_until_it_is_ended(tmp_path, capsys):
    real_root(tmp_path, 10, 20, 30, parts=TREE)
    assert "step 10 is pinned" in said(capsys, "pin", "10", "--reason", "paper", "-r", tmp_path)
    assert "pin: paper" in said(capsys, "ls", "-r", tmp_path)
    refused = ran(capsys, "prune", "10", "--apply", "-r", tmp_path)
    assert refused[0] == 3 and "kept by: pin" in refused[2]
    said(capsys, "unpin", "10", "-r", tmp_path)
    assert "pruned: 10" in said(capsys, "prune", "10", "--apply", "-r", tmp_path)
    assert not (tmp_path / "iter_0000010").exists()


def test_I7_prune_of_a_dead_root_never_takes_the_latest(tmp_path, capsys):
    real_root(tmp_path, 10, 20, 30, parts=TREE)
    args = ("prune", "--keep-latest", "0", "-r", tmp_path)
    assert said(capsys, *args, "--dry-run") == "would prune: 10, 20\n"
    assert (tmp_path / "iter_0000010").exists()
    said(capsys, *args, "--apply")
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == ["iter_0000030"]
    assert said(capsys, *args, "--apply") == "nothing to prune: everything is kept\n"


@pytest.mark.parametrize("which", [("--keep-latest", "1"), ("20",)], ids=["policy", "step"])
def test_I2_a_prune_of_a_dead_root_verifies_the_latest_first(which, tmp_path, capsys):
    """Catches: the last good checkpoint deleted by hand, because a newer one is there and is damaged."""
    real_root(tmp_path, 10, 20, 30, parts=TREE)
    file = tmp_path / "iter_0000030/__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    args = ("prune", *which, "--apply", "-r", tmp_path)
    status, out, err = ran(capsys, *args)
    assert (status, out) == (1, "") and "nothing is pruned, because the latest is damaged" in err
    assert len(list(tmp_path.glob("iter_*"))) == 3
    file.write_bytes(content)
    assert "pruned: 20" in said(capsys, *args)


def test_multiples_are_kept_by_a_prune_of_a_dead_root(tmp_path, capsys):
    """Catches: an option of two that is not looked at."""
    real_root(tmp_path, *range(10, 70, 10))
    args = ("prune", "--dry-run", "--keep-every", "20", "-r", tmp_path)
    assert said(capsys, *args) == "would prune: 10, 30, 50\n"
    assert said(capsys, *args, "--keep-latest", "2") == "would prune: 10, 30\n"


def test_a_living_owner_prunes_by_no_policy_of_a_person(living, tmp_path, capsys):
    """Catches: a person who believes that the job used the policy of the command."""
    for which in ("--dry-run", "--apply"):
        status, out, err = ran(capsys, "prune", which, "--keep-latest", "1", "-r", tmp_path)
        assert (status, out) == (2, "") and "the policy of its trainer" in err
    living.coordinator.tick()
    assert steps(living) == [10, 20, 30]


def test_a_dry_run_on_a_dead_root_uses_the_recorded_policy(tmp_path, capsys):
    """Catches: a person who has to guess the policy of a job that has ended."""
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    job.close()
    real_job(tmp_path, retention=LatestN(2)).close()
    assert said(capsys, "prune", "--dry-run", "-r", tmp_path) == "would prune: 10\n"
    refused = ran(capsys, "prune", "--apply", "-r", tmp_path)
    assert refused[0] == 2 and "give --keep-latest" in refused[2]


def test_I7_a_command_prunes_nothing_that_a_job_of_the_trainer_holds(tmp_path, capsys):
    """Catches: a person who prunes a dead root, and a second one, of what was not copied yet."""
    real_root(tmp_path, 10, 20, 30, 40, parts=TREE, holds={"copy": 20})
    held, other = (
        ("prune", "20", "--apply", "-r", tmp_path),
        ("prune", "10", "--apply", "-r", tmp_path),
    )
    for _ in range(2):
        status, _, err = ran(capsys, *held)
        assert status == 3 and "step 20 is kept by: job" in err
        said(capsys, "pin", "30", "-r", tmp_path)  # its segment must have the job, too
    assert "pruned: 10" in said(capsys, *other)
    told = said(capsys, "prune", "--keep-latest", "1", "--dry-run", "-r", tmp_path)
    assert told == "nothing to prune: everything is kept\n"


def test_a_command_leaves_the_policy_of_the_trainer_recorded(tmp_path, capsys):
    """Catches: an unpin after which nothing tells that the step is to be deleted."""
    job = real_job(tmp_path, retention=LatestN(2))
    job.save(10)
    job.coordinator.pin(10, "paper")
    for step in (20, 30):
        job.save(step)
    job.close()
    said(capsys, "unpin", "10", "-r", tmp_path)
    assert said(capsys, "prune", "--dry-run", "-r", tmp_path) == "would prune: 10\n"
    assert "No rule of the trainer's policy keeps it" in said(
        capsys, "explain", "10", "-r", tmp_path
    )


@pytest.mark.parametrize(
    "command", [("pin", "10"), ("prune", "10", "--apply")], ids=["pin", "prune"]
)
def test_F5_a_command_on_a_full_disk_says_what_may_be_removed(
    command, tmp_path, capsys, monkeypatch
):
    """Catches: a bare error of the system from the commands that are to free space."""
    real_root(tmp_path, 10, 20, parts=TREE)

    def full(storage, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(PosixStorage, "open_exclusive", full)
    status, _, err = ran(capsys, *command, "-r", tmp_path)
    assert status == 1 and "only .ckptfsm/trash/gone-* may be removed by hand" in err
    assert "-> None" not in err and "runbook disk-full" in err
    assert len(list(tmp_path.glob("iter_*"))) == 2


def test_a_refused_command_gives_no_advice_to_programmers(living, tmp_path, capsys):
    """Catches: a person on call who is told to change the code of the trainer."""
    status, _, err = ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)
    refused = ran(capsys, "adopt", "iter_0000020", "-r", tmp_path)
    missing = ran(capsys, "show", "99", "-r", tmp_path)
    assert "owned by another manager" in refused[2] and "ckptfsm ls" in missing[2]
    said_to_them = err + refused[2] + missing[2]
    assert not any(
        w in said_to_them for w in ("init_process_group", "takeover", "all_steps", "fix the")
    )


def test_rollback_of_a_dead_root_puts_later_steps_into_quarantine(tmp_path, capsys):
    real_root(tmp_path, 10, 20, 30)
    out = said(capsys, "rollback", "10", "--yes", "-r", tmp_path)
    assert "steps that go to quarantine: 20, 30" in out and "step 10 is the latest" in out
    assert "would resume from step 10" in said(capsys, "explain", "--resume", "-r", tmp_path)
    assert len(list((tmp_path / ".ckptfsm/quarantine").iterdir())) == 2


def test_rollback_asks_first(tmp_path, capsys, monkeypatch):
    real_root(tmp_path, 10, 20)
    monkeypatch.setattr("typer.confirm", lambda question: False)
    assert ran(capsys, "rollback", "10", "-r", tmp_path)[0] == 3
    assert "would resume from step 20" in said(capsys, "explain", "--resume", "-r", tmp_path)


def test_a_living_owner_pins_unpins_and_prunes_by_its_own_policy(tmp_path, capsys):
    job = real_job(tmp_path, retention=LatestN(2))
    for step in (10, 20):
        job.save(step)
    pinned = served(job, lambda: ran(capsys, "pin", "10", "-r", tmp_path))
    assert pinned == (0, "step 10 is pinned\n", "")
    job.save(30)
    assert steps(job) == [10, 20, 30]
    dry = served(job, lambda: ran(capsys, "prune", "--dry-run", "-r", tmp_path))
    assert dry[1] == "retention keeps every checkpoint\n"
    freed = served(job, lambda: ran(capsys, "unpin", "10", "-r", tmp_path))
    assert "retention has given it up" in freed[1]
    assert steps(job) == [20, 30]
    job.save(40)
    job.close()


@pytest.fixture
def unproven(tmp_path):
    """A job that has just started with a smaller keep, and has not read its latest step, 30."""
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    job.close()
    job.storage.close_root()
    job = real_job(tmp_path, retention=LatestN(1))
    yield job
    job.close()
    job.storage.close_root()


def test_I2_a_person_prunes_nothing_before_the_latest_was_verified(unproven, tmp_path, capsys):
    """Catches: the last good checkpoint deleted by a command, before restore finds that the latest one
    is damaged."""
    args = ("prune", "--dry-run", "-r", tmp_path)
    status, out, _ = served(unproven, lambda: ran(capsys, *args))
    assert status == 0 and out.startswith("would prune: 10, 20; retention waits for the next save")
    args = ("prune", "--apply", "-r", tmp_path)
    status, out, _ = served(unproven, lambda: ran(capsys, *args))
    assert status == 3 and "waits for the next save" in out and "latest, step 30" in out
    assert steps(unproven) == [10, 20, 30]
    latest = unproven.coordinator.locate(None)
    unproven.coordinator.release(latest.lease, verified=30)
    assert served(unproven, lambda: ran(capsys, *args)) == (0, "pruned: 10, 20\n", "")
    assert steps(unproven) == [30]


def test_I2_a_named_step_is_not_deleted_before_the_latest_was_verified(unproven, tmp_path, capsys):
    """Catches: a named step deleted by the next job, before restore finds that the latest is damaged."""
    status, out, _ = served(unproven, lambda: ran(capsys, "prune", "20", "--apply", "-r", tmp_path))
    assert status == 3 and "step 20 is not deleted" in out and "the latest, step 30" in out
    dry = served(unproven, lambda: ran(capsys, "prune", "20", "--dry-run", "-r", tmp_path))
    assert dry[1].startswith("would prune: 20; retention waits")
    assert steps(unproven) == [10, 20, 30]
    unproven.save(40)
    assert steps(unproven) == [40]


def test_I2_an_unpin_prunes_nothing_before_the_latest_was_verified(unproven, tmp_path, capsys):
    unproven.coordinator.pin(10, "paper")
    args = ("unpin", "10", "-r", tmp_path)
    status, out, _ = served(unproven, lambda: ran(capsys, *args))
    assert status == 0 and out.startswith("step 10 is not pinned any more; retention waits")
    assert unproven.coordinator.ledger.pins == frozenset()
    assert steps(unproven) == [10, 20, 30]
    again = served(unproven, lambda: ran(capsys, "unpin", "30", "-r", tmp_path))
    assert again == (0, "step 30 is not pinned any more\n", "")
    unproven.save(40)
    assert steps(unproven) == [40]


def test_a_living_owner_answers_while_its_trainer_computes(tmp_path, capsys, monkeypatch):
    """Catches: a request that waits for the next poll, which may be hours away."""
    monkeypatch.setattr("ckptfsm.ranks.coordinator_client._INBOX_S", 0.01)
    manager = Manager(fake_ports(tmp_path), make_config(QUICK))
    manager.save(10, weights(10)).wait()
    manager.save(20, weights(20)).wait()
    for command in (("pin", "10"), ("rollback", "10", "--yes")):
        assert ran(capsys, *command, "--wait", "30", "-r", tmp_path)[0] == 0
    assert manager.all_steps() == [10, 20], "the trainer has not asked"
    manager.poll()
    assert manager.all_steps() == [10]
    manager.close()


def test_metrics_of_a_dead_root_are_there_for_the_next_owner(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    told = said(capsys, "record-metrics", "10", "val=0.5", "a=b=-1e3", "-r", tmp_path)
    assert told == "step 10 has: a=b -1000, val 0.5\n"
    assert "metric val: 0.5" in said(capsys, "show", "10", "-r", tmp_path)
    assert "was measured: a=b -1000, val 0.5" in said(capsys, "log", "--step", "10", "-r", tmp_path)
    assert "was measured" not in said(capsys, "log", "--step", "20", "-r", tmp_path)
    job = real_job(tmp_path, retention=LatestN(1) | BestN("val"))
    job.save(30)
    assert steps(job) == [10, 30]
    job.close()


def test_a_living_owner_decides_anew_when_metrics_come(tmp_path, capsys):
    job = real_job(tmp_path, retention=LatestN(2) | BestN("val", mode="max"))
    for step in (10, 20):
        job.save(step)
    for step, value in ((10, "0.5"), (20, "0.7")):
        asked = ("record-metrics", step, f"val={value}", "-r", tmp_path)
        assert served(job, lambda asked=asked: ran(capsys, *asked))[0] == 0
    job.save(30)
    assert steps(job) == [20, 30]
    missing = served(job, lambda: ran(capsys, "record-metrics", "10", "val=1", "-r", tmp_path))
    assert missing[0] == 3 and "no checkpoint of step 10" in missing[1]
    job.close()


def test_a_living_owner_refuses_the_latest_and_says_why(living, tmp_path, capsys):
    status, out, _ = served(living, lambda: ran(capsys, "prune", "30", "--apply", "-r", tmp_path))
    assert status == 3 and "kept by: latest" in out
    assert steps(living) == [10, 20, 30]


def test_a_living_owner_refuses_a_rollback_while_a_save_is_in_flight(living, tmp_path, capsys):
    living.fork(of := living.request(40))
    status, out, _ = served(living, lambda: ran(capsys, "rollback", "10", "--yes", "-r", tmp_path))
    assert status == 3 and "step 40 is in flight" in out
    for rank in range(2):
        living.write(of, rank)
    assert steps(living) == [10, 20, 30, 40]


def test_a_living_owner_refuses_a_rollback_while_it_restores_a_later_step(living):
    """Catches: a directory that goes to quarantine while the job loads it."""
    found = living.coordinator.locate(20)
    with pytest.raises(SaveRefused, match="reads step 20"):
        carry_out(living.coordinator, Asked(nonce="8" * 32, epoch=1, errand="rollback", step=10))
    assert living.coordinator.ledger.latest().step == 30
    carry_out(living.coordinator, Asked(nonce="9" * 32, epoch=1, errand="rollback", step=20))
    living.coordinator.release(found.lease)
    carry_out(living.coordinator, Asked(nonce="a" * 32, epoch=1, errand="rollback", step=10))
    assert living.coordinator.ledger.latest().step == 10


SAID_OF_NOTHING = {
    "pin": "there is no checkpoint of step 99",
    "unpin": "step 99 is not pinned any more",
    "prune": "retention keeps every checkpoint",
    "prune_step": "there is no checkpoint of step 99",
    "rollback": "there is no checkpoint of step 99",
    "drop": "'99.e1.a1' is not in quarantine",
    "record_metrics": "there is no checkpoint of step 99",
}


@pytest.mark.parametrize("errand", get_args(RequestKind))
def test_every_errand_is_carried_out_or_refused(living, errand):
    """Catches: an errand that no table has, and a request of another program without a step."""
    asked = Asked(
        nonce="b" * 32, epoch=1, errand=errand, step=99, name="99.e1.a1", metrics={"a": 1.0}
    )
    try:
        said = carry_out(living.coordinator, asked)
    except CkptFsmError as error:
        said = error.message
    assert said == SAID_OF_NOTHING[errand]
    if errand != "prune":
        with pytest.raises(ConfigError, match=f"{errand} needs a (step|name in quarantine)"):
            carry_out(living.coordinator, Asked(nonce="b" * 32, epoch=1, errand=errand))


def test_unpin_tells_no_end_of_a_step_that_was_never_there(tmp_path, capsys):
    real_root(tmp_path, 10)
    assert said(capsys, "unpin", "99", "-r", tmp_path) == "step 99 is not pinned any more\n"


def test_F6_a_prune_that_the_disk_put_off_is_not_called_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Mover, "prune", Mock(side_effect=OSError(errno.EIO, "the disk is gone")))
    for number, which in enumerate((("10",), ("--keep-latest", "1"))):
        root = real_root(tmp_path / str(number), 10, 20, parts=TREE)
        status, out, err = ran(capsys, "prune", *which, "--apply", "-r", root)
        assert (status, out) == (1, "") and "is not removed yet" in err


def test_rollback_names_only_the_steps_that_it_moves(tmp_path, capsys):
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    job.coordinator.rollback(20)
    job.fail(job.request(25))
    crashed(job)
    out = said(capsys, "rollback", "10", "--yes", "-r", tmp_path)
    assert out.startswith("steps that go to quarantine: 20\n")


def test_a_request_without_an_answer_is_taken_back(living, tmp_path, capsys):
    """Catches: a request that is carried out hours later, when the person has gone on otherwise."""
    status, _, err = ran(capsys, "rollback", "10", "--yes", "--wait", "0.1", "-r", tmp_path)
    assert status == 3 and "the request was taken back" in err
    living.coordinator.tick()
    assert steps(living) == [10, 20, 30]


@pytest.mark.parametrize("end", ("close", "crash"))
def test_a_command_whose_owner_leaves_opens_the_root_itself(end, tmp_path, capsys, monkeypatch):
    """Catches: metrics of an evaluation that are lost because the job came to its end just then."""
    job = real_job(tmp_path)
    job.save(10)
    job.save(20)

    def leave(seconds):
        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "requests", lambda inbox: ())
            job.close() if end == "close" else crashed(job)

    with monkeypatch.context() as patch:
        patch.setattr(changing.time, "sleep", leave)
        told = said(capsys, "record-metrics", "10", "val=2", "-r", tmp_path)
    assert told == "step 10 has: val 2\n" and not list((tmp_path / INBOX).iterdir())
    assert "metric val: 2" in said(capsys, "show", "10", "-r", tmp_path)
    job = real_job(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(changing.time, "sleep", leave)
        status, _, err = ran(capsys, "prune", "--apply", "-r", tmp_path)
    assert status == 2 and "give --keep-latest" in err, "there is no policy to prune by"


def test_a_request_to_an_owner_that_died_is_not_carried_out_by_the_next(tmp_path):
    job = real_job(tmp_path)
    for step in (10, 20):
        job.save(step)
    send(job.storage, Asked(nonce="0" * 32, epoch=1, errand="rollback", step=10))
    crashed(job)
    job = real_job(tmp_path)
    job.coordinator.tick()
    assert steps(job) == [10, 20]
    assert not list((tmp_path / INBOX).iterdir())
    job.close()


def test_a_request_that_is_carried_out_cannot_be_taken_back(living, monkeypatch):
    """Catches: a person who is told that the rollback was taken back, while it goes on."""
    send(living.storage, Asked(nonce="5" * 32, epoch=1, errand="rollback", step=10))
    roll_back, taken_back = living.coordinator.rollback, []

    def after_a_look(step):
        taken_back.append(take_back(living.storage, "5" * 32))
        roll_back(step)

    monkeypatch.setattr(living.coordinator, "rollback", after_a_look)
    living.coordinator.tick()
    assert taken_back == [False] and steps(living) == [10, 20, 30]
    assert living.coordinator.ledger.latest().step == 10


def test_a_request_that_was_taken_back_at_the_last_moment_is_not_carried_out(living, monkeypatch):
    send(living.storage, Asked(nonce="6" * 32, epoch=1, errand="pin", step=10))
    read = Inbox._read

    def and_take_back(inbox, nonce):
        asked = read(inbox, nonce)
        assert take_back(living.storage, nonce)
        return asked

    monkeypatch.setattr(Inbox, "_read", and_take_back)
    living.coordinator.tick()
    assert living.coordinator.ledger.pins == frozenset()
    assert not list_names(living.storage, ANSWERS)


def test_an_owner_that_dies_before_its_answer_leaves_nothing_to_refuse(tmp_path, monkeypatch):
    """Catches: the next owner says that a rollback was refused which the last one had carried out."""
    job = real_job(tmp_path)
    for step in (10, 20):
        job.save(step)
    send(job.storage, Asked(nonce="7" * 32, epoch=1, errand="rollback", step=10))
    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "answer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.coordinator.tick()
    crashed(job)
    job = real_job(tmp_path)
    job.coordinator.tick()
    assert steps(job) == [10] and not list_names(job.storage, ANSWERS)
    job.close()


@pytest.mark.parametrize(
    ("error", "status"), ((KeyboardInterrupt(), 130), (OSError(errno.ESTALE, "stale"), 1))
)
def test_a_command_that_is_broken_off_takes_its_request_back(
    error, status, living, tmp_path, capsys, monkeypatch
):
    """Catches: a rollback that comes minutes after its Ctrl-C."""
    monkeypatch.setattr(changing.time, "sleep", Mock(side_effect=error))
    assert ran(capsys, "rollback", "10", "--yes", "-r", tmp_path)[0] == status
    monkeypatch.undo()
    living.coordinator.tick()
    assert living.coordinator.ledger.latest().step == 30


def test_a_ctrl_c_after_the_owner_took_the_request_says_so(living, tmp_path, capsys, monkeypatch):
    def serve_and_interrupt(seconds):
        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "answer", Mock())
            living.coordinator.tick()
        raise KeyboardInterrupt

    monkeypatch.setattr(changing.time, "sleep", serve_and_interrupt)
    status, _, err = ran(capsys, "pin", "10", "-r", tmp_path)
    assert status == 130 and "the owner took the request" in err
    assert living.coordinator.ledger.pins == {10}


def test_the_outcome_is_unknown_if_the_owner_dies_after_it_took_the_request(
    tmp_path, capsys, monkeypatch
):
    """Catches: the status of a command that failed, after which a person asks for the same again."""
    job = real_job(tmp_path)
    job.save(10)
    job.coordinator.pin(10, "paper")

    def serve_and_die(seconds):
        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "answer", Mock())
            job.coordinator.tick()
        crashed(job)

    with monkeypatch.context() as patch:
        patch.setattr(changing.time, "sleep", serve_and_die)
        status, out, err = ran(capsys, "unpin", "10", "-r", tmp_path)
    assert (status, out) == (3, "") and "the owner took the request" in err
    assert "pin: paper" not in said(capsys, "ls", "-r", tmp_path), "it was carried out"


def test_a_request_that_cannot_be_removed_is_carried_out_once(living, monkeypatch):
    send(living.storage, Asked(nonce="1" * 32, epoch=1, errand="pin", step=10))
    monkeypatch.setattr("ckptfsm.disk.inbox.remove_marker", lambda *given: True)
    living.coordinator.tick()
    living.coordinator.unpin(10)
    living.coordinator.tick()
    assert living.coordinator.ledger.pins == frozenset()


@pytest.mark.parametrize(
    "content",
    (
        b"",
        b"{",
        b'{"schema_version": 99}',
        encode(Asked(nonce="3" * 32, epoch=1, errand="pin", step=10)),
        b'{"nonce": "%b", "epoch": 1, "errand": "record_metrics", "metrics": 5}' % (b"2" * 32),
    ),
)
def test_F30_a_hostile_request_is_answered_and_changes_nothing(content, living, tmp_path):
    send(living.storage, Asked(nonce="4" * 32, epoch=1, errand="unpin", step=10))
    assert take_back(living.storage, "4" * 32)
    (tmp_path / request_name("2" * 32)).write_bytes(content)
    (tmp_path / INBOX / "../inbox/notes.txt").write_text("x")
    living.coordinator.tick()
    assert living.coordinator.ledger.pins == frozenset()
    assert "cannot be read" in (tmp_path / ANSWERS / f"{'2' * 32}.json").read_text()
    assert not (tmp_path / request_name("2" * 32)).exists()


@pytest.mark.parametrize("make", (os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)))
def test_a_request_that_is_no_file_does_not_keep_the_others(make, living, tmp_path):
    """Catches: an inbox that serves no person any more."""
    send(living.storage, Asked(nonce="5" * 32, epoch=1, errand="pin", step=10))
    make(tmp_path / request_name("2" * 32))
    living.coordinator.tick()
    assert living.coordinator.ledger.pins == {10}
    assert "cannot be read" in (tmp_path / ANSWERS / f"{'2' * 32}.json").read_text()


def test_a_command_waits_for_the_answer_to_a_request_that_was_taken(
    living, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(changing, "take_back", lambda *given: living.coordinator.tick())
    asked = ("pin", "10", "--wait", "0", "-r", tmp_path)
    assert ran(capsys, *asked) == (0, "step 10 is pinned\n", "")


class Passing(SimClock):
    """Time that also passes from look to look."""

    def monotonic(self) -> float:
        self.sleep(0.3)
        return self.now


def test_a_flood_of_requests_is_served_a_little_at_a_time(tmp_path):
    """Catches: a trainer that waits until thousands of requests are answered."""
    (tmp_path / PRIVATE).mkdir()
    storage = PosixStorage(tmp_path)
    inbox = Inbox(storage, 1, "owner", Passing())
    for number in range(12):
        epoch = 1 + number % 2
        send(storage, Asked(nonce=f"{number:032x}", epoch=epoch, errand="pin", step=10))
    served = []
    for rounds in range(12):
        for asked in inbox.requests():
            served.append(asked.nonce)
            inbox.answer(asked.nonce, "done")
        assert len(list((tmp_path / ANSWERS).iterdir())) <= 4 * (rounds + 1)
    storage.close_root()
    assert served == [f"{number:032x}" for number in range(0, 12, 2)]
    assert len(list((tmp_path / ANSWERS).iterdir())) == 12
    assert not list((tmp_path / INBOX).iterdir())


def test_files_of_persons_who_died_are_removed_after_an_hour(tmp_path):
    """Catches: a file for each command that was killed, for ever."""
    (tmp_path / PRIVATE).mkdir()
    storage, clock = PosixStorage(tmp_path), SimClock()
    send(storage, Asked(nonce="7" * 32, epoch=1, errand="pin", step=10))
    for name in (f"{INBOX}/x.json.tmp-9.0", f"{ANSWERS}/notes"):
        (tmp_path / name).write_text("x")
    inbox = Inbox(storage, 2, "owner", clock)
    assert list(inbox.requests()) == []
    left = [sorted(os.listdir(tmp_path / directory)) for directory in (INBOX, ANSWERS)]
    assert left == [["x.json.tmp-9.0"], [f"{'7' * 32}.json", "notes"]]
    clock.sleep(3601)
    assert list(inbox.requests()) == []
    storage.close_root()
    left = [os.listdir(tmp_path / directory) for directory in (INBOX, ANSWERS)]
    assert left == [[], ["notes"]]


def test_ctrl_c_while_the_command_is_made_ready_has_status_130(tmp_path, capsys, monkeypatch):
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptfsm.cli.app.run", interrupted)
    assert ran(capsys, "ls", "-r", tmp_path) == (130, "", "")


@pytest.mark.parametrize(
    "fields",
    (
        b'"errand": "pin", "step": 10, "reason": "\\ud800"',
        b'"errand": "pin", "step": 10, "reason": "\\u0000\\n"',
        b'"errand": "pin", "step": 99999999999999999999',
        b'"errand": "record_metrics", "step": 10, "metrics": {"a": NaN}',
        b'"errand": "record_metrics", "step": 10, "metrics": {"": 1}',
        b'"errand": "drop", "name": "../../iter_0000010"',
        b'"errand": "drop"',
        b'"errand": "rollback"',
    ),
)
def test_F30_a_hostile_request_does_not_stop_the_owner(fields, living, tmp_path):
    nonce = "b" * 32
    (tmp_path / INBOX).mkdir()
    (tmp_path / ANSWERS).mkdir()
    head = f'{{"schema_version": 1, "nonce": "{nonce}", "epoch": 1, '.encode()
    (tmp_path / request_name(nonce)).write_bytes(head + fields + b"}")
    living.coordinator.tick()
    assert (tmp_path / ANSWERS / f"{nonce}.json").exists()
    living.save(40)
    assert steps(living) == [10, 20, 30, 40]


def test_a_lease_keeps_a_step_while_the_command_runs(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    assert said(capsys, "lease", "10", "--ttl", "0", "-r", tmp_path) == f"{tmp_path}/iter_0000010\n"
    assert not list((tmp_path / ".ckptfsm/readers").iterdir())


class Sleeps(SimClock):
    """Time of a command that holds a lease: the files of leases are kept at each sleep."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.seen = root, []

    def sleep(self, seconds: float) -> None:
        (lease,) = (self.root / ".ckptfsm/readers").iterdir()
        self.seen.append((seconds, lease.read_bytes()))
        super().sleep(seconds)


def test_a_lease_is_renewed_while_the_command_runs(tmp_path, capsys, monkeypatch):
    """Catches: a lease that expires after the job's reader timeout, below a command that runs."""
    real_root(tmp_path, 10, 20)
    clock = Sleeps(tmp_path)
    monkeypatch.setattr(changing, "time", clock)
    said(capsys, "lease", "10", "--ttl", "5", "-r", tmp_path)
    assert [seconds for seconds, _ in clock.seen] == [2, 2, 1]
    assert len({content for _, content in clock.seen}) == 3


class Withdrawn(Sleeps):
    """The same, in which a job takes the step away."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        (self.root / "iter_0000010").rename(self.root / ".ckptfsm/trash/10.e1.a1")


@pytest.mark.damages_journal("the directory leaves without a word in the journal")
def test_a_lease_that_is_lost_ends_the_command_with_an_error(tmp_path, capsys, monkeypatch):
    """Catches: a script that goes on copying below a lease that keeps nothing."""
    real_root(tmp_path, 10, 20)
    monkeypatch.setattr(changing, "time", Withdrawn(tmp_path))
    status, out, err = ran(capsys, "lease", "10", "--ttl", "100", "-r", tmp_path)
    assert (status, out) == (1, f"{tmp_path}/iter_0000010\n")
    assert "the lease is lost: step 10" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("prune",), "give --dry-run or --apply"),
        (("prune", "--apply", "--dry-run"), "give --dry-run or --apply"),
        (("prune", "--apply"), "give --keep-latest or --keep-every"),
        (("pin", "99"), "no checkpoint of step 99"),
        (("record-metrics", "99", "val=1"), "no checkpoint of step 99"),
        (("record-metrics", "10", "val=nan"), "finite number"),
        (("record-metrics", "10", "val=good"), "not a number: val=good"),
        (("record-metrics", "10", "val"), "give NAME=VALUE"),
        (("record-metrics", "10", "val=1", "val=2"), "each name once"),
        (("record-metrics", "10", "=1"), "name of a metric"),
        (("rollback", "99", "--yes"), "no checkpoint of step 99"),
        (("lease", "99", "--ttl", "0"), "step 99 is not at"),
        (("lease", "9" * 20), "Invalid value for 'step'"),
        (("rollback", "--yes", "9" * 20), "Invalid value for 'step'"),
        (("prune", "--apply", "9" * 20), "there is no checkpoint of step 9999"),
        (("pin", "10", "--reason", "x" * 1001), "reason: String should have at most 1000"),
        (("pin", "10", "--reason", "\udcff"), "reason: "),
        (("record-metrics", "10", "x\udcff=1"), "error: "),
        (("rollback", "--yes", "--", "-1"), "greater than or equal to 0"),
        (("ls", "--watch", "inf"), "Invalid value for '--watch'"),
    ),
)
def test_F30_bad_calls_are_told(arguments, words, tmp_path, capsys):
    real_root(tmp_path, 10)
    status, _, err = ran(capsys, arguments[0], "-r", tmp_path, *arguments[1:])
    assert status == 2 and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "call",
    (
        ("pin", "10"),
        ("unpin", "10"),
        ("prune", "10", "--dry-run"),
        ("prune", "--dry-run", "--keep-latest", "1"),
        ("rollback", "10", "--yes"),
        ("lease", "10", "--ttl", "0"),
        ("quarantine", "drop", "20.e1.a2", "--yes"),
        ("quarantine", "restore", "20.e1.a2"),
    ),
)
def test_the_root_is_the_last_argument_of_commands_that_change_it(call, tmp_path, capsys):
    """Catches: a command that changes another root than the one it is given; one that takes two."""
    roots = (real_root(tmp_path / name, 10, 20, parts=TREE) for name in ("before", "named"))
    before, named = roots
    if call[0] == "quarantine":
        assert ran(capsys, "rollback", "10", "--yes", "-r", named)[0] == 0
    assert ran(capsys, *call, named, "-r", before)[0] == 2, "the root is named twice"
    assert ran(capsys, *call, named)[::2] == (0, "")
