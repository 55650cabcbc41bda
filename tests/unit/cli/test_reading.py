"""Commands that read: real roots, through the command line, and nothing on disk is changed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from signal import SIGINT

import pytest
from cli_runs import ran, said
from fakes import fake_ports
from managers import QUICK, weights
from real_roots import TREE, crashed, real_job, real_root
from strangers import newer_files

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli import main
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.events import SaveRequested
from ckptfsm.core.evidence import TrackerEvidence
from ckptfsm.core.explaining import Surroundings, explain
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.retention import EveryNSteps, LatestN
from ckptfsm.follow.jobs import JobRecords
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.harness import FakeJob


@pytest.fixture(autouse=True)
def _of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def files_of(root: Path) -> dict[str, tuple[int, int]]:
    """Each file and directory with its size and the time of its last change."""
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
    }


def test_ls_shows_the_reasons_that_keep_each_step(tmp_path, capsys):
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    job.coordinator.pin(10, "best of May")
    job.close()
    out = said(capsys, "ls", "-r", tmp_path).splitlines()
    assert "gave it back" in out[0]
    assert out[2].split() == ["STEP", "STATE", "AGE", "SIZE", "RANKS", "PARTS", "KEPT", "BY"]
    ends = {line.split()[0]: line.split("state")[-1].strip() for line in out[3:]}
    assert ends == {"10": "pin: best of May", "20": "retention", "30": "latest"}


@pytest.mark.parametrize("alive", [True, False])
def test_the_rule_that_keeps_a_step_is_named(tmp_path, capsys, alive):
    """Catches: a person who has to read the trainer's code to learn why a step is kept."""
    job = real_job(tmp_path, retention=LatestN(2) | EveryNSteps(20))
    for step in (10, 20, 30, 40):
        job.save(step)
    job.coordinator.pin(20, "")
    if not alive:
        job.close()
    out = said(capsys, "ls", "-r", tmp_path).splitlines()
    ends = {line.split()[0]: line.split("state")[-1].strip() for line in out[3:]}
    assert ends == {"20": "pin", "30": "retention: the latest 2", "40": "latest"}
    told = said(capsys, "explain", "30", "-r", tmp_path)
    assert "It is kept by the retention policy of the trainer: the latest 2.\n" in told
    if alive:
        job.close()


def test_ls_watch_shows_the_newest_that_fit_on_the_screen(tmp_path, capsys, monkeypatch):
    for name, value in (
        ("LINES", "8"),
        ("COLUMNS", "200"),
        ("FORCE_COLOR", "1"),
        ("NO_COLOR", "1"),
    ):
        monkeypatch.setenv(name, value)
    real_root(tmp_path, *range(10, 80, 10))
    monkeypatch.setattr(
        "ckptfsm.cli.reading.time.sleep", lambda seconds: os.kill(os.getpid(), SIGINT)
    )
    status, out, _ = ran(capsys, "ls", "--watch", "1", "-r", tmp_path)
    assert status == 130
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["50", "60", "70", "and"]


def test_ls_as_json_has_every_field(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    found = json.loads(said(capsys, "ls", "--json", "-r", tmp_path))
    assert found["root"] == str(tmp_path)
    first, second = found["checkpoints"]
    assert (first["step"], first["state"], first["attempt"]) == (10, "tracked", "10.e1.a1")
    assert (second["kept_by"], second["ranks"], second["parts"]) == (["latest"], 2, ["state"])
    assert first["bytes"] > 0 and 0 <= first["age_s"] < 600


def test_the_metrics_of_each_step_are_told_to_programs_and_people(tmp_path, capsys):
    """Catches: metrics that no export script can read, or a NaN that strict readers refuse."""
    manager = Manager(fake_ports(tmp_path), make_config(QUICK))
    for step, acc in ((10, 0.5), (20, float("nan"))):
        manager.save(step, weights(step), metrics={"acc": acc}).wait()
    manager.record_metrics(10, {"val": 2.0})
    manager.close()
    found = json.loads(said(capsys, "ls", "--json", "-r", tmp_path), parse_constant=pytest.fail)
    assert [each["metrics"] for each in found["checkpoints"]] == [
        {"acc": 0.5, "val": 2.0},
        {"acc": None},
    ]
    shutil.rmtree(tmp_path / "iter_0000010/.ckptfsm")  # the journal has them, too
    shown = said(capsys, "show", "10", "-r", tmp_path)
    assert "  metric acc: 0.5\n  metric val: 2\n" in shown


def test_ls_of_a_living_root_names_the_owner_and_the_save_in_flight(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    job.fork(job.request(20))
    out = said(capsys, "ls", "-r", tmp_path)
    assert f"its owner lives (pid {os.getpid()}" in out
    assert "forked" in out
    job.close()


def test_ls_names_a_directory_that_no_journal_explains(tmp_path, capsys):
    real_root(tmp_path, 10)
    (tmp_path / "iter_0000099").mkdir()
    out = said(capsys, "ls", "-r", tmp_path)
    assert "99  unknown" in out and "ckptfsm doctor" in out


def test_a_terminal_gets_lines_of_its_width_and_a_pipe_whole_ones(tmp_path, capsys, monkeypatch):
    """Catches: a pin's reason that moves the cursor or breaks the table, and one that a script reads
    cut off, because a pipe has no width.
    """
    reason = "\x1b[31mred\x07" + "long " * 40
    job = real_job(tmp_path)
    job.save(10)
    job.coordinator.pin(10, reason)
    job.close()
    for number in range(30):
        (tmp_path / f".ckptfsm/quarantine/left-{number}").mkdir()
    monkeypatch.setenv("COLUMNS", "60")
    whole = said(capsys, "ls", "-r", tmp_path)
    assert "\x1b" not in whole and "\x07" not in whole and whole.count("long") == 40
    assert "      left-29\n" in said(capsys, "tree", "-r", tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    out = said(capsys, "ls", "-r", tmp_path)
    assert "\x1b" not in out and "\x07" not in out
    assert max(map(len, out.splitlines()[2:])) <= 60
    assert "and 10 more" in said(capsys, "tree", "-r", tmp_path)


def test_a_root_of_verl_is_recognised_by_its_step_0(tmp_path, capsys):
    (tmp_path / "global_step_0").mkdir()
    assert "unknown" in said(capsys, "ls", "-r", tmp_path)


def with_jobs(root: Path, *records: tuple[AttemptId, str, JobState, int, str]) -> None:
    storage = PosixStorage(root)
    records_of_jobs = JobRecords(storage)
    records_of_jobs.begin()
    for of, job, state, begun, reason in records:
        record = JobRecord(
            step=of.step,
            epoch=of.epoch,
            attempt=of.attempt,
            job=job,
            state=state,
            begun=begun,
            reason=reason,
            at="2026-11-26T06:00:00.000+00:00",
        )
        records_of_jobs.put(record)
    storage.close_root()


def test_ls_show_and_tree_tell_the_states_of_jobs(tmp_path, capsys, monkeypatch):
    """Catches: an export that failed, or was missed, and that no command shows."""
    real_root(tmp_path, 10, 20)
    first, second = AttemptId(10, 1, 1), AttemptId(20, 1, 2)
    with_jobs(
        tmp_path,
        (first, "upload", JobState.FAILED, 3, "exit status 1: no\x1bnet"),
        (first, "export", JobState.DONE, 1, ""),
        (second, "export", JobState.RUNNING, 1, ""),
        (second, "upload", JobState.WAITING, 1, "exit status 1"),
        (AttemptId(5, 1, 9), "export", JobState.MISSED, 0, "its checkpoint was pruned"),
        (AttemptId(4, 1, 8), "export", JobState.DONE, 1, ""),
    )
    with monkeypatch.context() as terminal:
        for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", "80")):
            terminal.setenv(name, value)
        narrow = said(capsys, "ls", "-r", tmp_path).splitlines()[-5:]
    assert max(map(len, narrow[:3])) <= 80 and "export: done" in "".join(narrow[:3])
    monkeypatch.setenv("COLUMNS", "120")
    head, ten, twenty, missed = said(capsys, "ls", "-r", tmp_path).splitlines()[2:]
    assert head.split()[5:] == ["PARTS", "JOBS", "KEPT", "BY"]
    assert "  export: done, upload: failed  " in ten
    assert "  export: interrupted, upload: to retry  " in twenty
    assert missed == "the job export was missed for step 5: its checkpoint was pruned"
    found = json.loads(said(capsys, "ls", "--json", "-r", tmp_path))["checkpoints"]
    assert found[0]["jobs"] == ["export: done", "upload: failed"]
    shown = said(capsys, "show", "10", "-r", tmp_path)
    assert "  job upload: failed, 3 attempts, 2026-11-26T06:00:00.000+00:00: exit status 1" in shown
    assert "\x1b" not in shown and "  job export: done, 2026" in shown
    assert "jobs/  jobs of on_tracked, by attempt and name" in said(capsys, "tree", "-r", tmp_path)


def test_the_steps_that_a_job_holds_are_told_by_ls_explain_doctor_and_export(tmp_path, capsys):
    """Catches: a disk that fills up behind a job that fails, and no command that tells."""
    real_root(tmp_path, 10, 20, 30, retention=LatestN(1), holds={"copy": 1, "export": 100})
    first, second = AttemptId(10, 1, 1), AttemptId(20, 1, 2)
    with_jobs(
        tmp_path,
        (first, "copy", JobState.FAILED, 3, "exit status 1: no credentials"),
        (second, "copy", JobState.DONE, 1, ""),
        (AttemptId(5, 1, 9), "export", JobState.MISSED, 0, "its checkpoint was pruned"),
    )
    told = said(capsys, "ls", "-r", tmp_path).splitlines()
    assert told[3].endswith("copy: failed  job") and told[-1].startswith(
        "the job copy holds 2 steps"
    )
    assert "latest, job" in told[5]
    explained = said(capsys, "explain", "10", "-r", tmp_path)
    words = "copy (failed after 3 attempts: exit status 1: no credentials)"
    assert f"It is kept until these jobs are done: {words}." in explained
    assert "done: copy (not begun)." in said(capsys, "explain", "30", "-r", tmp_path)
    found = said(capsys, "doctor", "-r", tmp_path)
    assert "note: the job copy failed for 1 step, the last was step 10: exit status 1" in found
    assert "the job is tried again within an hour" in found
    assert "note: the job export was missed for 1 step, the last was step 5: its check" in found
    assert "note: the job copy holds 2 steps, from step 10 on" in found
    text = said(capsys, "export", "--prometheus", "-r", tmp_path)
    assert f'ckptfsm_held_checkpoints{{root="{tmp_path}",job="copy"}} 2.0' in text
    assert f'ckptfsm_held_oldest_seconds{{root="{tmp_path}",job="export"}} 0.0' in text
    (age,) = [each for each in text.splitlines() if "held_oldest" in each and '"copy"' in each]
    assert float(age.split()[-1]) > 0


def test_a_job_of_a_living_owner_runs(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    with_jobs(tmp_path, (AttemptId(10, 1, 1), "export", JobState.RUNNING, 1, ""))
    assert "export: running" in said(capsys, "ls", "-r", tmp_path)
    job.close()


def test_show_tells_states_times_and_files(tmp_path, capsys):
    real_root(tmp_path, 10)
    out = said(capsys, "show", "10", "-r", tmp_path)
    for word in ("requested", "forked", "shards_written", "finalized", "tracked (kept)"):
        assert word in out
    assert "at iter_0000010: " in out and "attempt 10.e1.a1" in out


def test_show_tells_that_nothing_is_at_the_name_any_more(tmp_path, capsys):
    real_root(tmp_path, 10, 20, retention=LatestN(1))
    assert said(capsys, "show", "10", "-r", tmp_path).endswith("at iter_0000010: nothing\n")


def test_show_tells_a_torn_manifest(tmp_path, capsys):
    real_root(tmp_path, 10)
    (tmp_path / "iter_0000010/.ckptfsm/manifest.json").write_text("{")
    assert "manifest" in said(capsys, "show", "10", "-r", tmp_path).splitlines()[-1]


def test_tree_names_the_meaning_of_each_directory(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".ckptfsm/inbox").mkdir()
    out = said(capsys, "tree", "-r", tmp_path)
    for line in (
        "inbox/  operator requests to the owner",
        "iter_0000020/  tracked",
        "says 20",
        "notes.txt  not of this library",
        "quarantine/  withdrawn, never deleted by itself (none)",
    ):
        assert line in out


def test_log_tells_each_transition_once_and_in_order(tmp_path, capsys):
    real_root(tmp_path, 10, 20, 30, retention=LatestN(2))
    lines = said(capsys, "log", "-r", tmp_path).splitlines()
    assert "epoch 1 begins" in lines[0] and "closed the root in order" in lines[-1]
    moves = [line.rpartition("[")[2] for line in lines if "step 10 " in line]
    assert moves == [
        "absent -> requested]",
        "requested -> forked]",
        "forked -> shards_written]",
        "shards_written -> finalized]",
        "finalized -> tracked]",
        "tracked -> prunable]",
        "prunable -> pruned]",
    ]
    only = said(capsys, "log", "--step", "20", "-r", tmp_path).splitlines()
    assert len(only) == 5 and all("step 20 " in line for line in only)


def test_a_log_that_follows_tells_new_records_alone(tmp_path, capsys, monkeypatch):
    """Catches: records that come twice, or not before the next start of the command."""
    job = real_job(tmp_path)
    job.save(10)
    told: list[str] = []

    def save_and_end(seconds):
        told.append(capsys.readouterr().out)
        if len(told) == 2:
            os.kill(os.getpid(), SIGINT)
        job.save(20)

    monkeypatch.setattr("ckptfsm.cli.reading.time.sleep", save_and_end)
    assert ran(capsys, "log", "--follow", "-r", tmp_path)[0] == 130
    assert ["step 10 " in each for each in told] == [True, False]
    assert ["step 20 " in each for each in told] == [False, True]
    assert told[1].count("shards_written -> finalized]") == 1
    job.close()


def test_explain_tells_the_reason_and_the_way_to_end_it(tmp_path, capsys):
    job = real_job(tmp_path)
    for step in (10, 20):
        job.save(step)
    job.coordinator.pin(10, "paper")
    job.close()
    pinned = said(capsys, "explain", "10", "-r", tmp_path)
    assert "kept by a pin (paper)" in pinned and "ckptfsm unpin 10" in pinned
    assert "The latest is step 20" in pinned
    latest = said(capsys, "explain", "20", "-r", tmp_path)
    assert "the tracker names it" in latest and "A newer step has to be tracked first" in latest
    assert "Recorded in epoch 1, record" in latest


@pytest.mark.parametrize("older", [0, 10])
def test_explain_tells_a_tracker_that_disagrees(older, tmp_path, capsys):
    real_root(tmp_path, older, 20)
    (tmp_path / TRACKER).write_text(str(older))
    assert f"the tracker says {older}" in said(capsys, "explain", "20", "-r", tmp_path)


def test_explain_does_not_promise_that_a_newer_tracker_is_repaired(tmp_path, capsys):
    """Catches: 'A start repairs the tracker' of a step that a stock trainer saved: it is adopted."""
    real_root(tmp_path, 10, 20)
    (tmp_path / "iter_0000050").mkdir()
    for name, data in newer_files().items():
        (tmp_path / "iter_0000050" / name).write_bytes(data)
    (tmp_path / TRACKER).write_text("50")
    out = said(capsys, "explain", "20", "-r", tmp_path)
    assert "the tracker says 50" in out and "repair" not in out
    assert "would resume from step 50" in said(capsys, "explain", "--resume", "-r", tmp_path)


def test_explain_tells_that_the_owner_of_a_save_in_flight_has_ended(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    job.fork(job.request(20))
    living = said(capsys, "explain", "20", "-r", tmp_path)
    assert "in flight" in living and "has ended" not in living
    crashed(job)
    dead = said(capsys, "explain", "20", "-r", tmp_path)
    assert "Its owner has ended: the next start decides about it." in dead


def test_explain_does_not_look_for_a_missing_directory_in_quarantine(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    (tmp_path / "iter_0000020").rename(tmp_path / "moved away")
    said(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)
    out = said(capsys, "explain", "20", "-r", tmp_path)
    assert "withdrawn: missing" in out and "quarantine" not in out


def test_explain_resume_tells_of_a_release(tmp_path, capsys):
    real_root(tmp_path)
    (tmp_path / "release").mkdir()
    for name, data in newer_files().items():
        (tmp_path / "release" / name).write_bytes(data)
    (tmp_path / TRACKER).write_text("release")
    out = said(capsys, "explain", "--resume", "-r", tmp_path)
    assert "would begin from the release" in out and "at zero" not in out


@pytest.mark.parametrize(("in_place", "words"), ((True, "at its name"), (False, "in staging")))
def test_explain_tells_where_the_files_of_a_save_in_flight_are(in_place, words):
    of = AttemptId(20, 1, 1)
    requested = SaveRequested(of, (PartSpec("state"),), 2, in_place)
    ledger, _, _ = Ledger().post(requested)
    facts = Surroundings(ledger, TrackerEvidence("missing"), {}, {}, owned=True)
    assert words in " ".join(explain(ledger.checkpoints[of], facts))


@pytest.mark.damages_journal("removes a sealed segment")
def test_a_log_goes_on_after_a_segment_that_is_gone(tmp_path, capsys):
    """Catches: a log that ends while an owner folds its journal, or as a purge took an old file."""
    for step in (10, 20, 30):
        real_root(tmp_path, step)
    (tmp_path / ".ckptfsm/journal/000002.ndjson").unlink()
    out = said(capsys, "log", "-r", tmp_path)
    assert "step 10" in out and "step 30" in out


def test_output_into_a_pipe_does_not_wait_in_a_buffer(tmp_path, monkeypatch):
    """Catches: a reader of 'ckptfsm lease' that waits for the path until the lease has ended."""
    real_root(tmp_path, 10)
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"))
    assert main(["lease", "10", "--ttl", "0", "-r", str(tmp_path)]) == 0
    assert raw.getvalue().decode() == f"{tmp_path}/iter_0000010\n"


def test_explain_tells_the_end_of_a_pruned_step(tmp_path, capsys):
    real_root(tmp_path, 10, 20, retention=LatestN(1))
    assert "ended as pruned" in said(capsys, "explain", "10", "-r", tmp_path)


def test_explain_resume_falls_back_as_a_start_does(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    assert "would resume from step 20" in said(capsys, "explain", "--resume", "-r", tmp_path)
    (tmp_path / "iter_0000020/.metadata").unlink()
    out = said(capsys, "explain", "--resume", "-r", tmp_path)
    assert "would resume from step 10" in out and "[rule damaged]" in out
    job = real_job(tmp_path)
    latest = job.coordinator.ledger.latest()
    assert latest is not None and latest.step == 10
    job.close()


@pytest.mark.parametrize("how", ["gone", "of another run", "cut"])
def test_F19_a_step_that_is_not_usable_is_not_told_as_complete(how, tmp_path, capsys):
    """Catches: a list and an explanation that trust the journal, and look at no directory."""
    root = real_root(tmp_path / "root", 10, 20)
    latest = root / "iter_0000020"
    if how == "cut":
        (latest / "__0_0.distcp").write_bytes(b"")
    else:
        shutil.rmtree(latest)
    if how == "of another run":
        real_root(tmp_path / "other", 10, 20)
        shutil.copytree(tmp_path / "other/iter_0000020", latest)
    told = said(capsys, "explain", "20", "-r", root)
    assert "Step 20 is tracked, and is not usable: " in told and "complete" not in told
    assert "NOT USABLE: " in said(capsys, "ls", "-r", root)
    (row,) = json.loads(said(capsys, "ls", "--json", "-r", root))["checkpoints"][1:]
    assert row["note"].startswith("NOT USABLE: ")
    assert "NOT USABLE" not in said(capsys, "explain", "10", "-r", root)


def test_explain_resume_says_that_contents_were_not_read(tmp_path, capsys):
    """Catches: a person who takes a start's plan for a proof of the contents."""
    real_root(tmp_path, 10)
    told = said(capsys, "explain", "--resume", "-r", tmp_path)
    assert "contents were not read" in told and "ckptfsm verify --all" in told


def test_explain_resume_tells_a_refusal(tmp_path, capsys):
    real_root(tmp_path, 10)
    (tmp_path / "iter_0000010/.metadata").unlink()
    status, told, _ = ran(capsys, "explain", "--resume", "-r", tmp_path)
    assert "A start would be refused" in told and "The way out: ckptfsm doctor" in told
    assert status == 1


def test_explain_resume_of_a_living_root_says_that_a_start_would_be_refused(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    status, out, _ = ran(capsys, "explain", "--resume", "-r", tmp_path)
    assert "refused: its owner lives" in out and "would resume from step 10" in out
    assert status == 3
    job.close()


def test_explain_resume_says_that_an_owner_on_another_host_may_live(tmp_path, capsys):
    """Catches: a start that is promised on a login node, while a job on another host goes on."""
    elsewhere = this_process()._replace(host="elsewhere")
    job = FakeJob(PosixStorage(tmp_path), identity=elsewhere, clock=SystemClock())
    job.open()
    job.save(10)
    crashed(job)
    first, *rest = said(capsys, "explain", "--resume", "-r", tmp_path).splitlines()
    assert first.startswith("This holds if the owner has ended: ") and "elsewhere" in first
    assert rest[0] == "A start would resume from step 10."


@pytest.mark.parametrize(
    "command",
    (
        ("ls",),
        ("show", "20"),
        ("tree",),
        ("log",),
        ("explain", "20"),
        ("explain", "--resume"),
        ("doctor",),
        ("verify", "20"),
        ("verify", "--all"),
        ("verify",),
        ("trace",),
        ("export", "--prometheus"),
        ("quarantine", "ls"),
    ),
)
def test_F32_reading_changes_nothing_and_the_root_may_be_the_last_argument(
    command, tmp_path, capsys, monkeypatch
):
    """Catches: a command that takes a lock, an epoch or a temporary file of a root that others own; one
    that takes the root of the environment, though another one is named."""
    root = real_root(tmp_path / "root", 10, 20, parts=TREE)
    before = files_of(root)
    monkeypatch.setenv("CKPTFSM_ROOT", str(real_root(tmp_path / "other", 1)))
    # Ages and rates change, and with them the widths of columns.
    numbers = re.compile(r"[\d.]+ (ms|[kMGT]?B|s)\b|_(free|latest_age|latest_state)\S* \S+")
    named, last = (
        numbers.sub("", said(capsys, *command, *place)).split() for place in (("-r", root), (root,))
    )
    assert named == last
    status, _, err = ran(capsys, *command, root, "-r", tmp_path / "other")
    assert status == 2 and "the root" in err
    assert files_of(root) == before


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    (
        (("ls", "-r", "{root}/none"), 2, "the root does not exist"),
        (("doctor", "-r", "{root}/iter_0000010"), 2, "is a checkpoint of the root"),
        (("show", "99", "-r", "{root}"), 2, "no step 99"),
        (("explain", "-r", "{root}"), 2, "give a step, or --resume"),
        (("explain", "x", "-r", "{root}"), 2, "x"),
        (("explain", "99", "-r", "{root}"), 2, "no step 99"),
        (("nothing",), 2, "nothing"),
    ),
)
def test_bad_calls_have_their_own_status_and_name_the_reason(
    arguments, status, words, tmp_path, capsys
):
    real_root(tmp_path, 10)
    got, out, err = ran(capsys, *(each.format(root=tmp_path) for each in arguments))
    assert (got, out) == (status, "") and words in err


@pytest.mark.damages_journal("flips a bit of a record")
def test_a_damaged_journal_is_told_with_its_file(tmp_path, capsys):
    real_root(tmp_path, 10)
    segment = tmp_path / ".ckptfsm/journal/000001.ndjson"
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    status, _, err = ran(capsys, "ls", "-r", tmp_path)
    assert status == 1 and "000001.ndjson" in err
    status, told, _ = ran(capsys, "explain", "--resume", "-r", tmp_path)
    assert status == 1
    assert told.startswith("A start would be refused: journal damaged") and "ckptfsm doctor" in told
