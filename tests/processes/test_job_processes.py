"""Jobs of ``on_tracked`` as real processes, beside trainers that close, die and come again."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_runs import said
from fakes import environment, fake_ports

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.jobs import Job
from ckptfsm.disk.ownership import newest_epoch
from ckptfsm.follow.beside import JobsBeside
from ckptfsm.ranks.manager import Manager

TRAINER = """
import json, logging, sys
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from fakes import fake_ports
class Told(logging.Handler):
    def emit(self, record):
        if record.event.startswith("job"):
            print(record.event, getattr(record, "step", ""), flush=True)
        elif record.event == "transition" and record.record.dest.value == "pruned":
            print("pruned", record.record.step, flush=True)
logging.getLogger("ckptfsm").addHandler(Told())
logging.getLogger("ckptfsm").setLevel("INFO")
config = make_config({"retention": {"latest_n": 1}, **json.loads(sys.argv[2])})
with Manager(fake_ports(sys.argv[1]), config) as manager:
    print("open", manager.latest_step(), flush=True)
    for line in sys.stdin:
        manager.save(int(line), parts={"x": line.encode()}).wait()
        print("saved", int(line), flush=True)
"""
# Each attempt writes its number and a child's into "begun", and goes on at a word in "go". The child
# leads a group of its own.
CHILD = "echo {step} $0 $PPID > begun; exec sleep 600"
HELD = f"timeout 600 sh -c '{CHILD}' $$ & read word < go; kill $!; cat {{path}}/x >> done"
LIMIT_S = 120.0


class Trainer:
    def __init__(self, place: Path, **settings: object) -> None:
        command = [sys.executable, "-c", TRAINER, str(place / "root"), json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            cwd=place,
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.words: list[str] = []

    def hear(self, words: str) -> None:
        """Read lines until these words come."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, (words, self.words)
            self.words.append(line.strip())
            if line.strip() == words:
                return

    def save(self, step: int) -> None:
        assert self.process.stdin is not None
        print(step, file=self.process.stdin, flush=True)
        self.hear(f"saved {step}")

    def close(self) -> None:
        """Let it close its manager, without waiting for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)

    def end(self) -> int:
        self.words += self.process.communicate(timeout=LIMIT_S)[0].splitlines()
        return self.process.returncode


@contextmanager
def training(place: Path, text: str, **settings: object) -> Iterator[Trainer]:
    job = {"name": "export", "command": ["sh", "-c", text], "backoff_s": 0.0}
    trainer = Trainer(place, on_tracked=[{**job, **settings.pop("job", {})}], **settings)
    try:
        yield trainer
    finally:
        trainer.kill()


def begun(place: Path) -> tuple[int, int, int]:
    """Wait until an attempt begins. Returns its step, its process and that one's child."""
    step, pid, child = map(int, (place / "begun").read_text().split())
    return step, pid, child


def is_gone(pid: int) -> bool:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watched], [], [], LIMIT_S)
    os.close(watched)
    return bool(ended)


def state(place: Path, name: str) -> tuple[str, int]:
    found = json.loads((place / f"root/.ckptfsm/jobs/{name}.export.json").read_text())
    return found["state"], found["begun"]


def published(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "root").glob("iter_*"))


def test_F2_a_trainer_that_is_killed_ends_its_job_and_the_next_begins_it_again(tmp_path, capsys):
    """I7. Catches: an export that outlives its trainer and reads what the next one prunes, or that is
    lost with it; a step that goes while its job runs; one that stays for ever after.
    """
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with training(tmp_path, HELD) as first:
        first.hear("open None")
        first.save(1)
        step, pid, child = begun(tmp_path)
        assert step == 1
        first.save(2)
        assert published(tmp_path) == ["iter_0000001", "iter_0000002"]
        assert "export: running" in said(capsys, "ls", "-r", tmp_path / "root")
        first.kill()
        assert is_gone(pid) and is_gone(child)
        assert state(tmp_path, "1.e1.a1") == ("running", 1)
        assert "export: interrupted" in said(capsys, "ls", "-r", tmp_path / "root")
    with training(tmp_path, HELD) as second:
        second.hear("open 2")
        assert begun(tmp_path)[0] == 1, "again"
        assert state(tmp_path, "1.e1.a1") == ("running", 2)
        second.save(3)
        assert published(tmp_path) == ["iter_0000001", "iter_0000003"]
        (tmp_path / "go").write_text("on\n")
        second.hear("job_done 1")
        assert begun(tmp_path)[0] == 3
        second.save(4)
        assert published(tmp_path) == ["iter_0000003", "iter_0000004"]
        (tmp_path / "go").write_text("on\n")
        second.hear("job_done 3")
        assert begun(tmp_path)[0] == 4
    assert (tmp_path / "done").read_text().split() == ["1", "3"]
    out = said(capsys, "ls", "-r", tmp_path / "root")
    assert "JOBS" in out
    assert "the job export was missed for step 2: its checkpoint was pruned before its turn" in out
    assert "job export: interrupted" in said(capsys, "show", "4", "-r", tmp_path / "root")
    assert "jobs of on_tracked" in said(capsys, "tree", "-r", tmp_path / "root")


HOLDS = {"job": {"hold": True, "queue": 1}}


def test_I7_nothing_is_pruned_before_the_job_that_holds_it_is_done(tmp_path, capsys):
    """Catches: a checkpoint without a copy, as retention or the queue was faster than the upload, or as
    its trainer was killed; one that stays for ever after its job is done.
    """
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with training(tmp_path, HELD, **HOLDS) as first:
        first.hear("open None")
        for step in (1, 2, 3):
            first.save(step)
        assert begun(tmp_path)[0] == 1
        assert published(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003"]
        (tmp_path / "go").write_text("on\n")
        first.hear("pruned 1")  # while the trainer computes
        _, pid, _ = begun(tmp_path)
        first.kill()
        assert is_gone(pid)
    refused = said(capsys, "prune", "2", "--dry-run", "-r", tmp_path / "root")
    assert refused.endswith("job\n")
    with training(tmp_path, HELD, jobs_drain_s=LIMIT_S, **HOLDS) as second:
        second.hear("open 3")
        second.save(4)
        assert published(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004"]
        second.close()
        for step in (2, 3, 4):
            assert begun(tmp_path)[0] == step
            (tmp_path / "go").write_text("on\n")
        assert second.process.wait(LIMIT_S) == 0
    assert published(tmp_path) == ["iter_0000004"]
    assert (tmp_path / "done").read_text().split() == ["1", "2", "3", "4"]


def test_I7_a_machine_that_is_lost_is_gone_on_from_by_the_copies(tmp_path, capsys):
    """Catches: a checkpoint that was pruned and is in no place; a start at zero beside its copies."""
    (tmp_path / "place").mkdir()
    settings = {"copies": [{"to": f"file://{tmp_path}/place"}]}
    with closing(Trainer(tmp_path, **settings)) as first:
        first.hear("open None")
        for step in (1, 2, 3):
            first.save(step)
        first.hear("pruned 2")  # 1 and 2 were copied, and 3 may have been
        first.kill()
    shutil.rmtree(tmp_path / "root")
    said(capsys, "fetch", f"file://{tmp_path}/place", tmp_path / "root")
    [last] = published(tmp_path)
    assert last in ("iter_0000002", "iter_0000003")
    assert (tmp_path / "root" / last / "x").read_text() == f"{int(last[-1])}\n"
    with closing(Trainer(tmp_path, jobs_drain_s=LIMIT_S, **settings)) as second:
        second.hear(f"open {int(last[-1])}")
        second.save(9)
        assert second.end() == 0
    assert published(tmp_path) == ["iter_0000009"]
    assert "9.e" in said(capsys, "ls", f"file://{tmp_path}/place")


def test_close_waits_for_no_job(tmp_path):
    """Catches: a program that hangs at its end in an upload, and a job that is lost by it."""
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with training(tmp_path, HELD) as trainer:
        trainer.hear("open None")
        trainer.save(1)
        _, pid, child = begun(tmp_path)
        assert trainer.end() == 0
        assert is_gone(pid) and is_gone(child)
    assert state(tmp_path, "1.e1.a1") == ("waiting", 0)
    assert os.listdir(tmp_path / "root/.ckptfsm/readers") == []


def supervisor_of(attempt: int) -> int:
    return int(Path(f"/proc/{attempt}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_of_jobs_that_is_stopped_ends_with_its_trainer(tmp_path, killed):
    """Catches: one that outlives its trainer with its attempt; a close that waits until it has missed
    its deadline, and kills it without a record."""
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with training(tmp_path, HELD, exit_timeout_s=LIMIT_S) as trainer:
        trainer.hear("open None")
        trainer.save(1)
        _, pid, child = begun(tmp_path)
        supervisor = supervisor_of(pid)
        os.kill(supervisor, signal.SIGSTOP)
        if killed:
            trainer.kill()
        else:
            assert trainer.end() == 0
        assert is_gone(supervisor) and is_gone(pid) and is_gone(child)
    assert state(tmp_path, "1.e1.a1") == (("running", 1) if killed else ("waiting", 0))


def test_close_drains_the_jobs_if_it_is_told_to(tmp_path):
    with training(tmp_path, "cat {path}/x >> done", jobs_drain_s=LIMIT_S) as trainer:
        trainer.hear("open None")
        trainer.save(1)
        assert trainer.end() == 0
    assert "job_done 1" in trainer.words
    assert (tmp_path / "done").read_text() == "1\n" and state(tmp_path, "1.e1.a1") == ("done", 1)


def test_a_command_in_the_drain_asks_the_trainer_and_ends_no_job(tmp_path, capsys, monkeypatch):
    """Catches: a root that is given back before its jobs have ended: a job that reports, or a person who
    pins, becomes the owner, and all jobs are killed.
    """
    root = tmp_path / "root"
    os.mkfifo(tmp_path / "go")
    drain = JobsBeside.drain

    def command_then_drain(jobs: JobsBeside, *limits: Any) -> None:
        out = said(capsys, "record-metrics", "1", "loss=2", "-r", root)
        assert "step 1 has: loss 2" in out and "export: running" in said(capsys, "ls", "-r", root)
        (tmp_path / "go").write_text("on\n")
        drain(jobs, *limits)

    monkeypatch.setattr(JobsBeside, "drain", command_then_drain)
    job = Job(name="export", command=("sh", "-c", f"read word < {tmp_path}/go"))
    settings = {"on_tracked": [job], "jobs_drain_s": LIMIT_S}
    with Manager(fake_ports(root), make_config(settings)) as manager:
        manager.save(1, parts={"x": b"1"}).wait()
    assert state(tmp_path, "1.e1.a1") == ("done", 1)
    assert newest_epoch(PosixStorage(root)) == 1
    assert "closed" in said(capsys, "log", "-r", root).splitlines()[-1]


def test_F1_a_process_of_jobs_that_is_killed_begins_again(tmp_path):
    """I7. Catches: jobs that end for good because the kernel had no memory left for their process. An
    upload that lives on beside the next attempt, and reads a step without a lease.
    """
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    with training(tmp_path, HELD) as trainer:
        trainer.hear("open None")
        trainer.save(1)
        _, pid, child = begun(tmp_path)
        os.kill(supervisor_of(pid), signal.SIGKILL)
        assert is_gone(pid)
        trainer.hear("jobs_ended")
        assert is_gone(child)
        trainer.hear("job_tried_again 1")
        assert begun(tmp_path)[0] == 1
        assert state(tmp_path, "1.e1.a1") == ("running", 2)
        (tmp_path / "go").write_text("on\n")
        trainer.hear("job_done 1")
        trainer.save(2)


def test_training_goes_on_beside_a_job_that_fails(tmp_path):
    with training(tmp_path, "exit 1", job={"attempts": 2}) as trainer:
        trainer.hear("open None")
        trainer.save(1)
        trainer.hear("job_tried_again 1")
        trainer.hear("job_failed 1")
        trainer.save(2)
        trainer.hear("job_failed 2")
        assert trainer.end() == 0
    assert state(tmp_path, "2.e1.a2") == ("failed", 2)
