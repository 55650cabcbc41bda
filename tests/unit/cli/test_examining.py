"""``ckptfsm doctor``: every kind of damage has a name, a remedy and a page, and --fix repairs it."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from cli_runs import ran, said
from house.source import ROOT
from real_roots import crashed, real_job, real_root

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli import changing, examining
from ckptfsm.core import findings
from ckptfsm.core.documents import Holder
from ckptfsm.core.events import Failed
from ckptfsm.core.findings import BY_RULE, Severity
from ckptfsm.core.layout import LAYOUTS, TRACKER
from ckptfsm.core.recovery_rules import RULES
from ckptfsm.core.retention import LatestN
from ckptfsm.disk import inspection, overview, ownership, situation
from ckptfsm.disk.inspection import gather_evidence
from ckptfsm.disk.publishing import Publisher
from ckptfsm.disk.setting_aside import Mover
from ckptfsm.testing.harness import FakeJob

METADATA = "iter_0000020/.metadata"


def _save_interrupted(root: Path) -> None:
    job = real_job(root)
    job.save(10)
    job.fork(job.request(20))
    crashed(job)


def _prune_interrupted(root: Path) -> None:
    """The directory went to the trash, and the journal did not learn of it."""
    job = real_job(root, retention=LatestN(1))
    job.save(10)
    prune = Mover.prune

    def and_die(*given, **more):
        prune(*given, **more)
        raise OSError(errno.EIO, "the disk is gone")

    with patch.object(Mover, "prune", and_die):
        job.save(20)
    crashed(job)


def _tracker(text: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        real_root(root, 10, 20)
        (root / TRACKER).write_text(text)

    return damage


def _without(*names: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        real_root(root, 10, 20)
        for name in names:
            path = root / name
            path.unlink() if path.is_file() else path.rename(root.parent / "moved away")

    return damage


def _files_of_others(root: Path) -> None:
    real_root(root, 10, 20)
    for name in ("a", "b", "hf/config.json", "notes.txt"):
        (root / "iter_0000020" / name).parent.mkdir(exist_ok=True)
        (root / "iter_0000020" / name).write_text("mine")


def _link(root: Path) -> None:
    real_root(root, 10, 20)
    (root / "iter_0000030").symlink_to(root / "iter_0000020")


def _unknown(root: Path) -> None:
    real_root(root, 10, 20)
    (root / "iter_0000015").mkdir()
    (root / "iter_0000015/notes").write_text("x")


def _journal(root: Path) -> None:
    real_root(root, 10, 20)
    segment = root / ".ckptfsm/journal/000001.ndjson"
    data = bytearray(segment.read_bytes())
    data[300] ^= 1
    segment.write_bytes(data)


def _shortened(root: Path) -> None:
    for step in (10, 20):
        real_root(root, step)
    (root / ".ckptfsm/journal/000001.ndjson").unlink()


def _newer(root: Path) -> None:
    real_root(root, 10, 20)
    manifest = root / "iter_0000020/.ckptfsm/manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "schema_version": 99}))


def _withdrawn(root: Path) -> None:
    job = real_job(root)
    for step in (10, 20):
        job.save(step)
    job.coordinator.rollback(10)
    job.close()
    job.storage.close_root()


def _nothing_left(root: Path) -> None:
    real_root(root, 20)
    (root / METADATA).unlink()


def _no_steps_name(root: Path) -> None:
    (root / "ckpt_20").mkdir(parents=True)
    (root / "ckpt_20" / ".metadata").touch()


def _to_complete(root: Path) -> None:
    """Every shard was durable when the process died, and the checkpoint had no name yet."""
    job = real_job(root)
    job.save(10)
    died = patch.object(Publisher, "finalize", side_effect=KeyboardInterrupt)
    with died, pytest.raises(KeyboardInterrupt):
        job.save(20)
    crashed(job)


def _refused_rollback(root: Path) -> None:
    """A rollback died, and the tracker was put to another step since."""
    job = real_job(root)
    for step in (10, 20, 30):
        job.save(step)
    died = patch.object(Mover, "quarantine", side_effect=KeyboardInterrupt)
    with died, pytest.raises(KeyboardInterrupt):
        job.coordinator.rollback(10)
    crashed(job)
    shutil.copytree(root / "iter_0000010", root / "iter_0000040")
    (root / TRACKER).write_text("40")


def _cut(root: Path) -> None:
    real_root(root, 10, 20)
    real_root(root, 30, retention=LatestN(1))
    (root / ".ckptfsm/journal/000002.ndjson").unlink()


def _fetch_cut_short(root: Path) -> None:
    real_root(root, 10)
    (root / ".ckptfsm/fetching/20.e1.a2").mkdir(parents=True)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "F17": ("prune-interrupted", _prune_interrupted),
    "F18 torn": ("tracker-unreadable", _tracker("")),
    "F18 words": ("tracker-unreadable", _tracker("soon")),
    "F18 release": ("tracker-disagrees", _tracker("release")),
    "F18 older": ("tracker-disagrees", _tracker("10")),
    "F18 missing": ("tracker-missing", _without(TRACKER)),
    "F19 missing": ("checkpoint-missing", _without("iter_0000020")),
    "F19 gutted": ("checkpoint-damaged", _without(METADATA)),
    "F19 named": ("tracker-names-no-checkpoint", _tracker("17")),
    "F19 all": ("nothing-to-resume-from", _nothing_left),
    "I8 no step's name": ("nothing-to-resume-from", _no_steps_name),
    "F20": ("journal-damaged", _journal),
    "F20 purged": ("journal-shortened", _shortened),
    "F20 newest": ("journal-cut", _cut),
    "F34": ("written-by-newer-version", _newer),
    "F2": ("save-interrupted", _save_interrupted),
    "F2 owner": ("owner-ended", _save_interrupted),
    "F16": ("name-not-a-directory", _link),
    "F30": ("directory-unknown", _unknown),
    "withdrawn": ("quarantine-in-use", _withdrawn),
    "files of others": ("files-of-others", _files_of_others),
    "a fetch that was killed": ("fetch-cut-short", _fetch_cut_short),
    "F1 written": ("save-to-complete", _to_complete),
    "rollback": ("rollback-refused", _refused_rollback),
}
# Repaired, or only noted: the rest is for people.
LEFT_TO_PEOPLE = {
    "nothing-to-resume-from",
    "journal-damaged",
    "written-by-newer-version",
    "name-not-a-directory",
    "directory-unknown",
    "quarantine-in-use",
    "fetch-cut-short",
    "files-of-others",
    "save-to-complete",
    "rollback-refused",
}


def codes(capsys, root: Path) -> set[str]:
    status, out, err = ran(capsys, "doctor", "--json", "-r", root)
    found = json.loads(out)
    worst = any(each["severity"] == Severity.BROKEN.value for each in found)
    assert (status, err) == (1 if worst else 0, "")
    return {each["code"] for each in found}


def test_files_of_others_are_named_and_few_of_many(tmp_path, capsys):
    """Catches: files that are deleted with their step, and that nobody was told of."""
    _files_of_others(tmp_path)
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    said = "4 files in its directory, but not of this checkpoint: a, b, hf/config.json, ..."
    assert (status, out.splitlines()[0]) == (0, f"note: step 20: {said}")


@pytest.mark.damages_journal("damages roots in every way")
@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_recognised_and_a_fix_repairs_it_at_once(name, tmp_path, capsys):
    code, damage = DAMAGE[name]
    root = tmp_path / "root"
    damage(root)
    assert code in codes(capsys, root)
    if code in LEFT_TO_PEOPLE:
        return
    whole = {path.name for path in root.glob("iter_*") if (path / ".metadata").exists()}
    ran(capsys, "doctor", "--fix", "--yes", "-r", root)
    assert code not in codes(capsys, root)
    kept = {path.name for path in root.glob("iter_*")}
    assert whole - kept <= ({"iter_0000010"} if code == "prune-interrupted" else set())
    status, out, _ = ran(capsys, "doctor", "--fix", "--yes", "-r", root)
    assert (status, "repaired:" in out) == (0, False)


def test_a_link_is_told_of_once(tmp_path, capsys):
    _link(tmp_path)
    assert codes(capsys, tmp_path) == {"name-not-a-directory"}


def test_commands_are_told_for_the_root_if_it_is_elsewhere(tmp_path, capsys, monkeypatch):
    """Catches: a printed command that repairs the root where the person happens to be."""
    root = tmp_path / "the root"
    _tracker("soon")(root)
    told = ran(capsys, "doctor", "-r", root)[1].splitlines()[-1]
    assert told == f"all commands work as printed in the root: cd '{root}'"
    monkeypatch.chdir(root)
    assert "all commands" not in ran(capsys, "doctor")[1]
    assert "rebuilt from the journal as 20" in ran(capsys, "doctor", "--fix", "--yes")[1]


def test_fix_asks_first(tmp_path, capsys, monkeypatch):
    _tracker("soon")(tmp_path / "root")
    monkeypatch.setattr(examining.typer, "confirm", lambda question: False)
    assert "repaired:" not in ran(capsys, "doctor", "--fix", "-r", tmp_path / "root")[1]
    assert "tracker-unreadable" in codes(capsys, tmp_path / "root")


def test_the_doctor_says_beside_a_finding_that_contents_were_not_read(tmp_path, capsys):
    """Catches: a hint that another finding hides, so that nobody reads the contents."""
    _withdrawn(tmp_path)
    told = said(capsys, "doctor", "-r", tmp_path)
    assert "quarantine-in-use" in told and "to read the contents: ckptfsm verify --all" in told


def test_nothing_is_wrong_with_a_root_that_was_closed(tmp_path, capsys):
    real_root(tmp_path, 10, 20)
    assert said(capsys, "doctor", "-r", tmp_path).startswith("nothing is wrong (")


def test_a_save_in_flight_of_a_living_owner_is_no_damage(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    job.fork(job.request(20))
    assert said(capsys, "doctor", "-r", tmp_path).startswith("nothing is wrong (")
    job.close()


@pytest.mark.parametrize(
    ("saved", "words"),
    [((10,), "it has the only good copy"), ((10, 20), "its next save and start repair this")],
    ids=["the only step", "one of two"],
)
def test_F19_beside_a_living_job_nobody_is_sent_to_start_it(saved, words, tmp_path, capsys):
    """Catches: a person who ends the job that has the only copy, to begin again or to repair."""
    job = real_job(tmp_path)
    for step in saved:
        job.save(step)
    shutil.rmtree(tmp_path / f"iter_{saved[-1]:07d}")
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 1 and words in out
    assert not any(each in out for each in ("fresh", "start the job", "--fix"))
    job.close()


def test_saves_that_fail_again_and_again_are_told(tmp_path, capsys):
    """Catches: a job that warns of each failed save for hours, while the doctor sees no fault."""
    job = real_job(tmp_path)
    job.save(10)
    for step in (20, 30):
        job.fail(job.request(step))
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 1 and "broken: 2 saves failed since step 10, the latest" in out
    assert "the last was step 30: writer_died" in out and "runbook saves-failing" in out
    job.save(40)
    assert "saves-failing" not in codes(capsys, tmp_path)
    job.fail(job.request(50))
    assert ran(capsys, "doctor", "-r", tmp_path)[1].startswith("note: 1 save failed")
    job.close()


def test_F5_a_save_that_failed_before_its_job_ended_is_told_with_its_error(tmp_path, capsys):
    """Catches: a job that is said to have ended by itself, and is started against the same fault."""
    job = real_job(tmp_path)
    of = job.request(10)
    job.coordinator.report([Failed(of, "write_failed", "File too large")])
    crashed(job)
    assert (
        "it had failed: write_failed (File too large)" in ran(capsys, "doctor", "-r", tmp_path)[1]
    )


@pytest.mark.parametrize("room", [overview, ownership], ids=["doctor", "command"])
def test_an_owner_that_is_stopped_is_told_with_the_way_to_go_on(
    room, tmp_path, capsys, monkeypatch
):
    """Catches: a job that stands still for a night, and a start that is refused without a reason."""
    job = real_job(tmp_path)
    job.save(10)
    asked = []
    monkeypatch.setattr(room, "is_stopped", lambda pid: asked.append(pid) or True)
    if room is overview:
        out = ran(capsys, "doctor", "-r", tmp_path)[1]
        assert "is stopped" in out and f"kill -CONT {os.getpid()}" in out
    else:
        here = this_process()
        holder = Holder(epoch=1, host=here.host, pid=77, started="", nonce="n")
        busy = ownership._busy("root", holder, here)
        assert "which is stopped: kill -CONT 77 lets" in busy.message
    assert set(asked) == {os.getpid() if room is overview else 77}
    job.close()


def test_F5_a_disk_that_gets_fuller_between_the_two_looks_is_told(tmp_path, capsys, monkeypatch):
    free = iter((3, 2, 1))
    monkeypatch.setattr(PosixStorage, "free_bytes", lambda storage: next(free))
    with monkeypatch.context() as patch:
        patch.setattr(PosixStorage, "free_bytes", lambda storage: 1 << 40)
        job = real_job(tmp_path)
        job.save(10)
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 1 and "2 bytes are free" in out
    job.close()


def _owned_elsewhere(root: Path) -> FakeJob:
    elsewhere = this_process()._replace(host="elsewhere")
    job = FakeJob(PosixStorage(root), identity=elsewhere, clock=SystemClock())
    job.open()
    return job


def test_an_owner_in_another_container_of_the_pod_may_live(tmp_path, capsys, monkeypatch):
    """Catches: a doctor in a sidecar that calls the living trainer crashed, and a pin that is refused
    there, as both containers have the same host name."""
    there = this_process()._replace(namespace="1", pid=1)
    job = FakeJob(PosixStorage(tmp_path), identity=there, clock=SystemClock())
    job.open()
    job.save(10)
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 0 and "its owner is in another container (pid 1 on " in out
    assert "owner-elsewhere" in codes(capsys, tmp_path)
    serve = job.coordinator.serve_requests
    monkeypatch.setattr(changing.time, "sleep", lambda seconds: serve())
    assert said(capsys, "pin", "10", "-r", tmp_path)
    assert job.coordinator.ledger.pins == {10}
    job.close()


def test_a_prune_of_an_owner_on_another_host_is_no_damage(tmp_path, capsys, monkeypatch):
    """Catches: a monitor on a login node that reports a missing checkpoint while it is pruned."""
    job = _owned_elsewhere(tmp_path)
    for step in (10, 20):
        job.save(step)

    def after_a_prune(storage, layout, ledger):
        if job.coordinator.ledger.at(10) is not None:
            job.coordinator.delete(10)
        return gather_evidence(storage, layout, ledger)

    monkeypatch.setattr(situation, "gather_evidence", after_a_prune)
    status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert (status, "missing" in out) == (0, False)
    job.close()


@pytest.mark.parametrize("command", (("doctor",), ("explain", "--resume")))
def test_a_directory_that_leaves_during_the_look_is_no_error(
    command, tmp_path, capsys, monkeypatch
):
    real_root(tmp_path, 10, 20)
    inspect, gone = inspection.inspect_published, ["iter_0000010"]

    def and_leave(*given):
        if gone:
            raise FileNotFoundError(errno.ENOENT, "gone", gone.pop())
        return inspect(*given)

    monkeypatch.setattr(inspection, "inspect_published", and_leave)
    said(capsys, *command, "-r", tmp_path)
    assert not gone


def test_a_save_of_an_owner_on_another_host_is_not_called_dead(tmp_path, capsys):
    job = _owned_elsewhere(tmp_path)
    job.save(10)
    job.fork(job.request(20))
    out = said(capsys, "doctor", "-r", tmp_path)
    assert "the processes writing it are gone" not in out and "cannot see whether it lives" in out
    job.close()


def test_fix_of_a_root_with_a_living_owner_does_nothing(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    (tmp_path / TRACKER).write_text("soon")
    status, out, _ = ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)
    assert status == 3 and "nothing was done" in out and str(os.getpid()) in out
    job.close()


@contextmanager
def other_process_with(path: Path) -> Iterator[int]:
    """A process that has ``path`` open for writing; its pid."""
    code = f"f = open({str(path)!r}, 'a'); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield process.pid
        process.communicate("\n")


def test_F29_a_process_that_still_writes_into_a_dead_root_is_named(tmp_path, capsys):
    real_root(tmp_path, 10)
    with other_process_with(tmp_path / "iter_0000010/late") as late:
        status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 1 and f"{late} python" in out
    assert "processes-left" not in codes(capsys, tmp_path)


def test_F29_a_process_that_an_ended_trainer_forked_is_a_note(tmp_path, capsys):
    """Catches: workers of a data loader, with the trainer's lock, that are told as writers."""
    real_root(tmp_path, 10)
    with other_process_with(tmp_path / ".ckptfsm/lock") as worker:
        status, out, _ = ran(capsys, "doctor", "-r", tmp_path)
    assert status == 0 and "broken" not in out
    assert f"lock open: {worker} python" in out and f"kill {worker}" in out


def test_F29_a_process_is_seen_also_where_a_link_leads_to_the_root(tmp_path, capsys):
    real_root(tmp_path / "root", 10)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    with (tmp_path / "root/iter_0000010/late").open("w"):
        seen = situation.processes_in(tmp_path / "link", besides=())
    assert [each.split()[0] for each in seen.writing] == [str(os.getpid())]


def test_F29_the_writers_of_a_living_job_are_no_damage(tmp_path, capsys, monkeypatch):
    """Catches: a doctor that tells a person at night to end the writers of a healthy job."""
    monkeypatch.setattr(
        situation, "processes_in", lambda root, besides: situation.Processes(("4711 writer",))
    )
    job = real_job(tmp_path)
    job.save(10)
    assert said(capsys, "doctor", "-r", tmp_path).startswith("nothing is wrong (")
    job.close()
    assert codes(capsys, tmp_path) == {"processes-left"}


def test_processes_of_an_owner_on_another_host_may_be_its_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        situation, "processes_in", lambda root, besides: situation.Processes(("4711 rank",))
    )
    job = _owned_elsewhere(tmp_path)
    job.save(10)
    crashed(job)
    out = said(capsys, "doctor", "-r", tmp_path)
    assert "note: processes have files" in out and "leave them alone if the owner lives" in out


def test_a_refused_start_is_never_called_repairable(tmp_path, capsys):
    """Catches: a remedy that sends a person into a start that is refused."""
    for damage in (_nothing_left, _refused_rollback):
        root = tmp_path / damage.__name__
        damage(root)
        assert not {c for c in codes(capsys, root) if c.startswith("tracker-")}
        assert "doctor --fix" not in ran(capsys, "doctor", "-r", root)[1]


def test_an_interrupted_rollback_without_a_whole_step_has_nothing_to_resume_from(tmp_path, capsys):
    """Catches: advice to follow a message that offers a fresh start, and words that nothing is lost."""
    _refused_rollback(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000040")
    (tmp_path / TRACKER).write_text("10")
    target = tmp_path / "iter_0000010/.metadata"
    good = target.read_bytes()
    for step in (10, 20, 30):
        (tmp_path / f"iter_00000{step}/.metadata").unlink()
    found = codes(capsys, tmp_path)
    assert "nothing-to-resume-from" in found and "rollback-refused" not in found
    target.write_bytes(good)  # the way out, as the page has it
    assert "latest: 10" in ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)[1]


@pytest.mark.parametrize("command", (("doctor", "--fix", "--yes"), ("pin", "10")))
def test_F12_a_refused_opening_leaves_the_sign_of_the_crash(command, tmp_path, capsys):
    """Catches: a crash that nobody hears of, because a command that did nothing gave the root back."""
    _to_complete(tmp_path)
    before = said(capsys, "ls", tmp_path).splitlines()[0]
    assert "has ended without giving it back" in before
    for epoch in (2, 3):
        assert ran(capsys, *command, "-r", tmp_path)[0] != 0
        after = said(capsys, "ls", tmp_path).splitlines()[0]
        assert after == before.replace("epoch 1", f"epoch {epoch}")
    job = real_job(tmp_path)
    job.save(30)
    job.close()
    assert "gave it back" in said(capsys, "ls", tmp_path)


def test_fix_does_not_fail_a_save_that_only_a_start_can_complete(tmp_path, capsys):
    _to_complete(tmp_path)
    status, out, err = ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)
    assert (status, err) == (3, "") and "nothing was done: ConfigError: step 20" in out
    assert ".CheckpointManager(sys.argv[1]" in out and f" {tmp_path} megatron" in out
    job = real_job(tmp_path)
    latest = job.coordinator.ledger.latest()
    assert latest is not None and latest.step == 20
    job.close()


def test_fix_keeps_to_the_layout_of_the_root(tmp_path, capsys):
    storage = PosixStorage(tmp_path)
    job = FakeJob(storage, identity=this_process(), clock=SystemClock(), layout=LAYOUTS["verl"])
    job.open()
    job.save(10)
    job.close()
    (tmp_path / TRACKER).write_text("")
    out = ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)[1]
    assert "\nlatest: 10\nnothing is wrong (" in out
    assert (tmp_path / "global_step_10").is_dir()


def test_every_rule_of_recovery_has_a_finding():
    assert {rule.name for rule in RULES} <= set(BY_RULE)


def codes_in(path: Path) -> set[str]:
    """The codes of the findings that a module makes, as its source has them."""
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    made = [c.args[0] for c in calls if isinstance(c.func, ast.Name) and c.func.id == "Finding"]
    return {str(code.value) for code in made if isinstance(code, ast.Constant)}


def test_each_finding_has_a_section_in_the_runbook_and_each_section_a_finding():
    """Catches: a finding that nothing explains; one that stands with those of a lesser severity."""
    told = codes_in(Path(findings.__file__)) | codes_in(Path(examining.__file__))
    told |= {code for code, _, _ in BY_RULE.values()}
    assert told >= {"nothing-to-resume-from", "journal-damaged", "save-interrupted", "disk-full"}
    worst = {
        code: min((s for c, s, _ in BY_RULE.values() if c == code), key=list(Severity).index)
        for code, _, _ in BY_RULE.values()
    }
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/runbook").glob("*.md")}
    del pages["README"]
    assert set(pages) == {severity.name.lower() for severity in Severity}
    # A section begins with its finding, as the doctor prints it.
    sections = [
        (code, severity)
        for severity in Severity
        for code in re.findall(
            rf"^## (.*)\n\n```\n{severity.value}: ", pages[severity.name.lower()], re.M
        )
    ]
    assert sum(page.count("\n## ") for page in pages.values()) == len(sections) == len(told)
    assert set(dict(sections)) == told
    assert {code: dict(sections)[code] for code in worst} == worst
