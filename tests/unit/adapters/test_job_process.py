"""An attempt of a job: its process, its environment, its end, and the end of all it started."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading

import pytest

from ckptfsm.adapters.job_process import JobCall, JobProcess, environment_of_job

WAIT_S = 60.0
FUNCTIONS = """
import json, os, signal, sys
class Tools:
    @staticmethod
    def note(path, step, metrics):
        with open("noted", "w") as file:
            json.dump([path, step, metrics, sys.argv, "torch" in sys.modules], file)
def stand(path, step, metrics):
    with open("/proc/self/oom_score_adj") as score:
        found = [os.nice(0), int(score.read()), os.getpgid(0) == os.getpid(), os.getcwd()]
    found.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    with open("stand", "w") as file:
        json.dump(found, file)
def fail(path, step, metrics):
    print("before")
    raise ValueError("no disk\\there")
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "functions_of_jobs.py").write_text(FUNCTIONS)
    made: list[JobProcess] = []

    def started(*program: str, function: str = "", ignored=(), **more: str) -> JobProcess:
        call = JobCall("/root/iter_0000007", 7, {"loss": 0.5}, program, function)
        imports = [str(tmp_path), *sys.path]
        variables = environment_of_job(os.environ, "/root", more)
        made.append(JobProcess(call, variables, imports, str(tmp_path), ignored))
        return made[-1]

    yield started
    for process in made:
        process.kill()


def verdict(process: JobProcess) -> str:
    found = None
    while found is None:
        readable, _, _ = select.select(process.watched(), [], [], WAIT_S)
        assert readable, "the process does not end"
        found = process.ended()
    return found


def is_gone(pid: int, within_s: float = WAIT_S) -> bool:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watched], [], [], within_s)
    os.close(watched)
    return bool(ended)


def test_a_function_is_called_with_path_step_and_metrics(start, tmp_path):
    process = start(function="functions_of_jobs:Tools.note")
    assert process.running and verdict(process) == "" and not process.running
    found = json.loads((tmp_path / "noted").read_text())
    assert found == ["/root/iter_0000007", 7, {"loss": 0.5}, ["functions_of_jobs"], False]


def test_an_attempt_stands_back(start, tmp_path, monkeypatch):
    """Catches: a job that slows training, that the trainer is killed for, or that a Ctrl-C ends."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert verdict(start(function="functions_of_jobs:stand")) == ""
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert json.loads((tmp_path / "stand").read_text()) == [19, 1000, True, str(tmp_path), True]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (("sh", "-c", "exit 0"), ""),
        (("sh", "-c", "echo a; echo b >&2; exit 3"), "exit status 3: a | b"),
        (("sh", "-c", "exit 213"), "exit status 213"),  # means something for functions alone
        (("sh", "-c", "kill -KILL $$"), "killed by SIGKILL"),
        (("there-is-no-such-program",), "exit status 127: there-is-no-such-program: No such file"),
    ],
)
def test_the_end_of_a_program_is_told(start, program, words):
    found = verdict(start(*program))
    assert found.startswith(words) and bool(found) is bool(words)


def test_the_error_of_a_function_is_told(start):
    found = verdict(start(function="functions_of_jobs:fail"))
    assert found.startswith("exit status 1: before | Traceback")
    assert "ValueError: no disk" in found


def test_only_the_end_of_a_long_output_is_kept(start):
    """Catches: a job that fills the memory, or that stops because nobody reads its output."""
    found = verdict(start("sh", "-c", "seq 1 100000; exit 1"))
    assert found.endswith("| 99999 | 100000") and len(found) < 3000


def test_all_that_an_attempt_started_ends_with_it(start, tmp_path):
    """Catches: an upload in the background that reads a step which is pruned by now."""
    assert verdict(start("sh", "-c", "sleep 600 & echo $! > child")) == ""
    child = int((tmp_path / "child").read_text())
    killed = is_gone(child, 5.0)
    if not killed:
        os.kill(child, signal.SIGKILL)
    assert killed


def test_an_attempt_is_killed_with_all_it_started(start, tmp_path):
    os.mkfifo(tmp_path / "ready")
    process = start("sh", "-c", "sleep 600 & echo $! > child; echo 1 > ready; wait")
    assert (tmp_path / "ready").read_text() == "1\n"
    process.kill()
    assert not process.running and is_gone(int((tmp_path / "child").read_text()))
    process.kill()
    assert process.last_output() == ""


def test_a_closed_output_is_not_watched(start, tmp_path):
    """Catches: a supervisor that turns without a pause, because the end of the output can be read."""
    os.mkfifo(tmp_path / "ready")
    os.mkfifo(tmp_path / "go")
    process = start("sh", "-c", "exec >&- 2>&-; echo 1 > ready; read x < go")
    assert (tmp_path / "ready").read_text() == "1\n"
    assert process.ended() is None and len(process.watched()) == 1
    (tmp_path / "go").write_text("on\n")
    assert verdict(process) == ""


def test_an_end_that_nobody_asked_for_can_still_be_watched(start):
    """Catches: a descriptor that is closed, or another file's, when the runner waits for it."""
    process = start("true")
    for thread in threading.enumerate():
        if thread.name == "ckptfsm-child":
            thread.join()
    assert not process.running and verdict(process) == ""


@pytest.mark.parametrize(
    ("number", "said"), [(40, "killed by signal 40"), (10, "killed by SIGUSR1"), (12, "")]
)
def test_an_attempt_hears_signals_but_those_that_are_the_trainers(start, number, said):
    """Catches: a signal without a name that ends the process of all jobs; a program that cannot be
    ended; one that a signal to all processes of the trainer's step ends."""
    assert verdict(start("sh", "-c", f"kill -{number} $$", ignored=[12])) == said


@pytest.mark.parametrize("variables", [{"A=B": "1"}, {"": "1"}, {"A": "nul\0"}])
def test_a_variable_that_no_process_can_have_is_an_error(tmp_path, variables):
    """Catches: a job that runs with another variable than was meant."""
    call = JobCall("/root", 1, {}, ("true",))
    with pytest.raises(ValueError, match="NUL|no variable"):
        JobProcess(call, variables, sys.path, str(tmp_path))


def test_a_directory_that_is_gone_is_an_error(tmp_path):
    call = JobCall("/root", 1, {}, ("true",))
    with pytest.raises(OSError, match="gone"):
        JobProcess(call, os.environ, sys.path, str(tmp_path / "gone"))


def test_the_variables_lead_to_no_rank_and_no_accelerator():
    """Catches: an export that waits for the trainer's ranks, or takes the memory of its GPU."""
    given = {
        "HOME": "/home",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "node",
        "TORCHELASTIC_RUN_ID": "x",
        "RANKED": "stays",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    found = environment_of_job(given, "/root", {"HF_HOME": "/hf"})
    assert found == {
        "HOME": "/home",
        "RANKED": "stays",
        "CUDA_VISIBLE_DEVICES": "",
        "CKPTFSM_ROOT": "/root",
        "HF_HOME": "/hf",
    }
    assert (
        environment_of_job({}, "/r", {"CUDA_VISIBLE_DEVICES": "7"})["CUDA_VISIBLE_DEVICES"] == "7"
    )
