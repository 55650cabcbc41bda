"""The trainer's thread that starts the process of the jobs: what it does when that process dies."""

from __future__ import annotations

import sys
import threading

import pytest

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.jobs import Job
from ckptfsm.follow import beside
from ckptfsm.follow.beside import JobsBeside, require_commands
from ckptfsm.follow.runner import Stop

LIMIT_S = 60.0
CONFIG = {"on_tracked": [{"name": "export", "command": "a:b"}]}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no_such_module:run", "there is no module 'no_such_module'"),
        ("ckptfsm.follow.nothing:run", "there is no module 'ckptfsm.follow.nothing'"),
        ("json.decoder.more:run", "there is no module 'json.decoder.more'"),
        ("ckptfsm.follow.beside:nothing", "'ckptfsm.follow.beside' has no function 'nothing'"),
        (("no-such-program", "{path}"), "there is no program 'no-such-program'"),
        (("/etc/passwd",), "there is no program '/etc/passwd'"),
    ],
)
def test_F28_a_command_that_is_not_there_is_refused_at_the_start(command, words):
    """Catches: a job that fails at its first checkpoint, hours after the start, for a typing error."""
    with pytest.raises(ConfigError, match=words) as raised:
        require_commands([Job(name="export", command=command)])
    assert raised.value.facts == {"key": "on_tracked", "job": "export"}


@pytest.mark.parametrize(
    "command",
    [
        "ckptfsm.follow.beside:require_commands",
        "json:decoder.JSONDecoder",
        "os.path:exists",
        "math:sqrt",
        "zipfile:main",
        ("sh", "-c", "exit 1"),
        ("{path}/run",),
        (sys.executable,),
    ],
)
def test_F28_a_command_that_is_there_is_taken_and_not_imported(command):
    """Catches: a start that imports a user's exporter, with all that it needs, into the trainer."""
    before = set(sys.modules)
    require_commands([Job(name="export", command=command)])
    assert set(sys.modules) <= before


def test_F28_a_program_is_looked_for_where_its_job_looks(tmp_path):
    program = tmp_path / "uploader"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    job = {"name": "export", "command": ("uploader",)}
    require_commands([Job(**job, environment={"PATH": str(tmp_path)})])
    with pytest.raises(ConfigError, match="there is no program 'uploader'"):
        require_commands([Job(**job)])


class Dying:
    """A process that dies as it starts, ``deaths`` times; the next one ends well."""

    deaths = 0
    started: list[Dying]
    died: threading.Event
    is_open = False

    def __init__(self, *_: object, **__: object) -> None:
        self.sent: list[object] = []
        self.started.append(self)

    def send(self, message: object, fds: object = ()) -> None:
        self.sent.append(message)

    def exitcode(self) -> int:
        return -9 if len(self.started) <= self.deaths else 0

    def listen(self, _: float) -> list[object]:
        return []

    def kill(self, *_: object) -> None: ...

    def close(self) -> None:
        self.died.set()


def not_interrupted() -> None:
    """No signal came."""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin the jobs, whose process dies so many times."""
    storage = PosixStorage(tmp_path / "root")
    monkeypatch.setattr(beside, "Spawned", Dying)
    monkeypatch.setattr(Dying, "started", [], raising=False)
    monkeypatch.setattr(Dying, "died", threading.Event(), raising=False)

    def begun(deaths: int) -> JobsBeside:
        monkeypatch.setattr(Dying, "deaths", deaths)
        return JobsBeside(make_config(CONFIG), storage, 1)

    yield begun
    storage.close_root()


def test_F1_a_process_that_dies_again_and_again_is_started_after_longer_pauses(
    begin, monkeypatch, caplog
):
    """Catches: jobs that end for good after three deaths, and a storm of starts."""
    pauses = []
    monkeypatch.setattr(JobsBeside, "_rest", lambda _, pause_s: pauses.append(pause_s))
    jobs = begin(10)
    jobs._thread.join(LIMIT_S)
    assert len(Dying.started) == 11
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 256.0]
    told = [(each.event, each.message) for each in caplog.records]
    assert len(told) == 10 and told[2] == (
        "jobs_ended",
        "the process of the jobs ended with -9; again in 4 s. If it was killed, see dmesg",
    )


@pytest.mark.parametrize("deaths", [1, 9])
def test_a_drain_waits_for_no_pause_and_starts_the_process_once(begin, monkeypatch, caplog, deaths):
    """Catches: a drain that leaves the jobs that wait, as their process had died before."""
    monkeypatch.setattr(beside, "_PAUSE_S", 1e6)
    jobs = begin(deaths)
    assert Dying.died.wait(LIMIT_S)
    jobs.drain(LIMIT_S, not_interrupted)
    assert not jobs._thread.is_alive() and len(Dying.started) == 2
    assert Dying.started[1].sent[1:] == [Stop(LIMIT_S)]
    ends = [each.message for each in caplog.records][1:]
    assert len(ends) == (deaths > 1)
    assert all("; the jobs wait for the next manager." in each for each in ends)


def test_a_close_ends_a_pause(begin, monkeypatch):
    """Catches: a trainer that waits for the end of a pause, and a process that begins after it."""
    monkeypatch.setattr(beside, "_PAUSE_S", 1e6)
    jobs = begin(9)
    assert Dying.died.wait(LIMIT_S)
    jobs.stop()
    assert not jobs._thread.is_alive() and len(Dying.started) == 1
