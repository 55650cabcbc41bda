"""``adopt`` and ``quarantine``: directories that come back into service, or go for good."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from unittest.mock import Mock

import pytest
from cli_runs import ran, said
from fakes import fake_ports
from managers import QUICK
from real_roots import TREE, crashed, real_job, real_root
from strangers import dcp_files, newer_files, stock_saves

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli import quarantine
from ckptfsm.coordinator.adopting import adopt_directory, require_intact
from ckptfsm.coordinator.applier import Applier
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import DamagedRoot, OutcomeUnknown, RecoveryWarning
from ckptfsm.core.layout import MEGATRON, TRACKER
from ckptfsm.disk.inspection import inspect_published, read_tracker
from ckptfsm.disk.ownership import RootOwnership
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.harness import FIRST, FakeJob
from ckptfsm.testing.simfs import SimDisk, SimStorage


@pytest.fixture
def rolled_back(tmp_path):
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step, TREE)
    job.coordinator.rollback(10)
    job.close()
    job.storage.close_root()
    return tmp_path


def latest(capsys, root) -> str:
    return said(capsys, "explain", "--resume", "-r", root).splitlines()[0]


def test_ls_tells_name_size_and_reason(rolled_back, capsys):
    found = json.loads(said(capsys, "quarantine", "ls", "--json", "-r", rolled_back))
    assert [row["name"] for row in found] == ["20.e1.a2", "30.e1.a3"]
    assert all(row["bytes"] > 0 and "rollback" in row["why"] for row in found)


def test_restore_brings_the_newest_back_and_a_start_resumes_from_it(rolled_back, capsys):
    out = said(capsys, "quarantine", "restore", "30.e1.a3", "-r", rolled_back)
    assert "step 30 is in service; the latest is step 30" in out
    assert latest(capsys, rolled_back) == "A start would resume from step 30."
    assert (rolled_back / "latest_checkpointed_iteration.txt").read_text().strip() == "30"
    assert "pin: adopted" in said(capsys, "ls", "-r", rolled_back)
    older = said(capsys, "quarantine", "restore", "20.e1.a2", "-r", rolled_back)
    assert "the latest is step 30" in older


def test_another_runs_directory_that_is_put_back_leaves_with_a_word_on_how_to_use_it(
    tmp_path, capsys
):
    """Catches: a copy that goes to quarantine at every start, as often as a person puts it back, and
    nothing that tells what to do."""
    mine, other = (real_root(tmp_path / name, 10, 20, parts=TREE) for name in ("mine", "other"))
    aside = mine / ".ckptfsm/quarantine/20.e1.a2"
    shutil.rmtree(mine / "iter_0000020")
    (other / "iter_0000020").rename(mine / "iter_0000020")
    crashed(real_job(mine))
    for _ in range(2):
        aside.rename(mine / "iter_0000020")
        with Manager(fake_ports(mine), make_config(QUICK)) as again:
            with pytest.warns(RecoveryWarning, match="another run's.*ckptfsm adopt .ckptfsm/"):
                again.poll()
            assert again.all_steps() == [10] and aside.is_dir()
    assert ran(capsys, "quarantine", "restore", "20.e1.a2", "-r", mine)[0] == 1
    said(capsys, "adopt", ".ckptfsm/quarantine/20.e1.a2", "--step", "20", "-r", mine)
    crashed(real_job(mine))
    assert latest(capsys, mine) == "A start would resume from step 20."


def test_restore_of_a_repaired_last_checkpoint_brings_the_root_back(tmp_path, capsys):
    """Catches: a person who repaired the only checkpoint, and finds no way to use it."""
    job = real_job(tmp_path)
    job.save(10)
    job.coordinator.rollback(10)
    job.close()
    job.storage.close_root()
    metadata = tmp_path / "iter_0000010/.metadata"
    content = metadata.read_bytes()
    metadata.unlink()
    assert ran(capsys, "doctor", "--fix", "--yes", "-r", tmp_path)[0] == 1
    metadata.write_bytes(content)
    assert latest(capsys, tmp_path) == "A start would resume from step 10."


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "no loader would take it: "),
        ("content", "another content"),
        ("another run", "is not the one that the journal recorded"),
    ],
)
def test_I2_restore_refuses_what_is_not_the_checkpoint_that_was_saved(how, words, tmp_path, capsys):
    """Catches: a directory withdrawn as another run's, or damaged, that comes back as the latest."""
    root = real_root(tmp_path / "root", 10, 20, parts=TREE)
    directory = root / "iter_0000020"
    if how != "another run":
        shard = directory / "__0_0.distcp"
        content = bytes(reversed(shard.read_bytes()))
        shard.unlink() if how == "missing" else shard.write_bytes(content)
        said(capsys, "rollback", "10", "--yes", "-r", root)
    else:
        shutil.rmtree(directory)
        shutil.copytree(
            real_root(tmp_path / "other", 10, 20, parts=TREE) / directory.name, directory
        )
        ran(capsys, "doctor", "--fix", "--yes", "-r", root)
    status, _, err = ran(capsys, "quarantine", "restore", "20.e1.a2", "-r", root)
    assert status == 1 and words in err
    assert latest(capsys, root) == "A start would resume from step 10."


def test_restore_refuses_a_name_that_is_taken(rolled_back, capsys):
    shutil.copytree(rolled_back / "iter_0000010", rolled_back / "iter_0000030")
    status, _, err = ran(capsys, "quarantine", "restore", "30.e1.a3", "-r", rolled_back)
    assert status != 0 and "no loader would take it" not in err
    assert latest(capsys, rolled_back) == "A start would resume from step 10."


def test_restore_and_adopt_refuse_a_root_with_a_living_owner(rolled_back, capsys):
    job = real_job(rolled_back)
    status, _, err = ran(capsys, "quarantine", "restore", "30.e1.a3", "-r", rolled_back)
    assert status == 3 and "root_busy" in err
    job.close()


def test_ls_tells_of_a_tracker_that_a_fresh_start_put_aside(tmp_path, capsys):
    real_root(tmp_path, 10)
    real_root(tmp_path, resume="fresh")
    out = said(capsys, "quarantine", "ls", "-r", tmp_path)
    assert "tracker." in out and "10.e1.a1" in out


@pytest.mark.parametrize(
    "command",
    (
        ("adopt", "iter_0000040"),
        ("quarantine", "restore", "20.e1.a2"),
        ("doctor", "--fix", "--yes"),
    ),
)
def test_F12_a_root_of_another_host_is_opened_only_on_a_person_s_word(command, tmp_path, capsys):
    """Catches: a command on a login node that fences a living job, where the disk has no locks."""
    elsewhere = this_process()._replace(host="elsewhere")
    job = FakeJob(PosixStorage(tmp_path), identity=elsewhere, clock=SystemClock())
    job.open()
    for step in (10, 20):
        job.save(step, TREE)
    job.coordinator.rollback(10)
    crashed(job)
    stock(tmp_path / "iter_0000040")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    _, out, err = ran(capsys, *command, "-r", tmp_path)
    assert "another host" in out + err and "--owner-ended" in out + err
    assert [p.name for p in (tmp_path / ".ckptfsm/epochs").iterdir()] == ["epoch-000001"]
    ran(capsys, *command, "--owner-ended", "-r", tmp_path)
    assert [p.name for p in (tmp_path / ".ckptfsm/epochs").iterdir()] != ["epoch-000001"]


def test_drop_asks_and_deletes_for_good(rolled_back, capsys, monkeypatch):
    monkeypatch.setattr("typer.confirm", lambda question: False)
    assert ran(capsys, "quarantine", "drop", "20.e1.a2", "-r", rolled_back)[0] == 3
    assert (rolled_back / ".ckptfsm/quarantine/20.e1.a2").exists()
    said(capsys, "quarantine", "drop", "20.e1.a2", "--yes", "-r", rolled_back)
    assert [p.name for p in (rolled_back / ".ckptfsm/quarantine").iterdir()] == ["30.e1.a3"]
    assert not list((rolled_back / ".ckptfsm/trash").iterdir())
    assert latest(capsys, rolled_back) == "A start would resume from step 10."


@pytest.mark.parametrize("name", ("none", "../iter_0000010", "20.e9.a9", "/etc"))
@pytest.mark.parametrize("command", (("drop", "--yes"), ("restore",)))
def test_F30_a_name_that_is_not_in_quarantine_is_refused(command, name, rolled_back, capsys):
    status, _, err = ran(capsys, "quarantine", command[0], name, *command[1:], "-r", rolled_back)
    assert status == 2 and "in quarantine" in err
    assert (rolled_back / "iter_0000010").exists()


def stock(directory, files=newer_files) -> None:
    directory.mkdir()
    for name, data in files().items():
        (directory / name).write_bytes(data)


@pytest.mark.parametrize("files", (newer_files, dcp_files))
def test_adopt_takes_a_directory_that_is_newer_than_the_tracker(files, tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    stock(root / "iter_0000040", files)
    assert latest(capsys, root) == "A start would resume from step 10."
    out = said(capsys, "adopt", "iter_0000040", "-r", root)
    assert "step 40 is in service; the latest is step 40" in out
    assert latest(capsys, root) == "A start would resume from step 40."
    assert said(capsys, "verify", "-r", root).startswith("step 40: good in form")
    (root / "iter_0000040/__0_0.distcp").write_bytes(b"torn")
    status, out, _ = ran(capsys, "verify", "-r", root)
    assert status == 1 and "iter_0000040: __0_0.distcp: truncated" in out


def test_what_is_saved_after_an_adoption_is_of_a_later_attempt(tmp_path, capsys):
    """Catches: a checkpoint of another run that stays the latest copy in a place, as its epoch is
    higher than all of this root."""
    for _ in range(6):
        real_root(tmp_path / "old")
    real_root(tmp_path / "old", 20, parts=TREE)
    (tmp_path / "old/iter_0000020").rename(tmp_path / "iter_0000020")
    root = real_root(tmp_path / "root", 10, parts=TREE)
    said(capsys, "adopt", tmp_path / "iter_0000020", "-r", root)
    job = real_job(root)
    theirs = job.coordinator.ledger.at(20).id
    assert theirs.epoch == 7 and job.save(30, TREE).epoch > 7
    crashed(job)


@pytest.mark.parametrize("name", ("iter_0000040", "global_step_40"))
def test_a_root_of_dcp_alone_is_read_adopted_and_verified(name, tmp_path, capsys):
    """Catches: a run of FSDP2 whose root no command can read, or that cannot be taken into service."""
    (tmp_path / "root").mkdir()
    stock(tmp_path / "root" / name, dcp_files)
    assert "40  unknown" in said(capsys, "ls", "-r", tmp_path / "root")
    assert said(capsys, "verify", tmp_path / "root" / name).startswith(f"{name}: good in form")
    said(capsys, "adopt", name, "-r", tmp_path / "root")
    assert "pin: adopted" in said(capsys, "ls", "-r", tmp_path / "root")
    assert said(capsys, "verify", "-r", tmp_path / "root").startswith("step 40: good in form")


def test_adopt_moves_a_directory_from_outside_into_the_root(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    stock(tmp_path / "old run")
    status, _, err = ran(capsys, "adopt", tmp_path / "old run", "-r", root)
    assert status == 2 and "give --step" in err
    said(capsys, "adopt", tmp_path / "old run", "--step", "5", "-r", root)
    assert (root / "iter_0000005/.metadata").exists() and not (tmp_path / "old run").exists()
    assert latest(capsys, root) == "A start would resume from step 10."


def test_I4_a_directory_from_outside_is_moved_durably(tmp_path, capsys, monkeypatch):
    """Catches: a rename that a power loss shows at both of its names, or at the old one alone."""
    root, old = real_root(tmp_path / "root", 10), tmp_path / "copies"
    old.mkdir()
    stock(old / "iter_0000005")
    synced: list[str] = []
    fsync_dir = PosixStorage.fsync_dir

    def noted(storage: PosixStorage, path: str) -> None:
        if not (old / "iter_0000005").exists():
            synced.append(storage.absolute(path).rstrip("/"))
        fsync_dir(storage, path)

    monkeypatch.setattr(PosixStorage, "fsync_dir", noted)
    said(capsys, "adopt", old / "iter_0000005", "-r", root)
    assert synced[:2] == [str(root), str(old)]


def test_F5_a_directory_whose_move_may_not_be_durable_goes_back(tmp_path, capsys, monkeypatch):
    """Catches: a directory of another place that is left in a root under a name of no step."""
    root, given = real_root(tmp_path / "root", 10), tmp_path / "iter_0000005"
    stock(given)
    fsync_dir = PosixStorage.fsync_dir

    def failing(storage: PosixStorage, path: str) -> None:
        if not given.exists():
            raise OSError(errno.EIO, "I/O error", path)
        fsync_dir(storage, path)

    monkeypatch.setattr(PosixStorage, "fsync_dir", failing)
    status, _, _ = ran(capsys, "adopt", given, "-r", root)
    assert status != 0 and (given / ".metadata").exists() and not list(root.glob("adopt-*"))


@pytest.mark.parametrize("there", ("missing", "empty", "inside of a missing one"))
@pytest.mark.parametrize("name", ("iter_0000040", "global_step_40", "the good one"))
def test_adopt_makes_a_root(name, there, tmp_path, capsys):
    """Catches: a checkpoint that was copied away, and no way to begin a root with it."""
    root = tmp_path / ("a/root" if there.startswith("inside") else "root")
    if there == "empty":
        root.mkdir()
    given = tmp_path / "copies" / name
    given.parent.mkdir()
    real_root(tmp_path / "other", 40, parts=TREE)
    (tmp_path / "other/iter_0000040").rename(given)
    step = () if name[-1].isdigit() else ("--step", "40")
    out = said(capsys, "adopt", given, *step, "-r", root)
    assert "a new root" in out and "the latest is step 40" in out and not given.exists()
    assert latest(capsys, root) == "A start would resume from step 40."
    place = root / ("global_step_40" if name.startswith("global") else "iter_0000040")
    assert place.is_dir() and said(capsys, "verify", root).startswith("step 40: good")


def test_I8_a_checkpoint_without_a_steps_name_is_adopted_where_it_stands(tmp_path, capsys):
    """Catches: a start that begins at zero beside it, or refuses and leaves no way to use it."""
    stock(tmp_path / "ckpt_40")
    with pytest.raises(
        DamagedRoot, match="ckpt_40 has a .metadata and no step's name: give it that"
    ):
        real_root(tmp_path)
    assert "move the steps to quarantine" in ran(capsys, "doctor", "-r", tmp_path)[1]
    out = said(capsys, "adopt", "ckpt_40", "--step", "40", "-r", tmp_path)
    assert "no checkpoint is in service" in out and "the latest is step 40" in out
    real_root(tmp_path, 50)


def test_adopt_makes_no_root_for_what_it_refuses(tmp_path, capsys):
    """Catches: an empty root that is left behind, which a job would begin at zero in."""
    (tmp_path / "iter_0000040").mkdir()
    assert ran(capsys, "adopt", tmp_path / "iter_0000040", "-r", tmp_path / "root")[0] == 1
    (tmp_path / "home").mkdir()
    (tmp_path / "home/mine.txt").write_text("x")
    stock(tmp_path / "iter_0000050")
    status, _, err = ran(capsys, "adopt", tmp_path / "iter_0000050", "-r", tmp_path / "home")
    assert status == 2 and "no root" in err
    assert not (tmp_path / "root").exists() and (tmp_path / "iter_0000050").is_dir()


class Earlier(SystemClock):
    """A clock that went wrong, or a run of last winter."""

    def wall(self) -> str:
        return "2026-01-01T00:00:00.000+00:00"


def test_an_adopted_checkpoint_has_its_size_its_parts_and_its_age(tmp_path, capsys):
    """Catches: '-' and 0 bytes for the checkpoint that a run begins with, or an age of seconds."""
    root = real_root(tmp_path / "root", 10)
    stock(root / "iter_0000030")
    said(capsys, "adopt", "iter_0000030", "-r", root)
    job = FakeJob(PosixStorage(tmp_path / "other"), identity=this_process(), clock=Earlier())
    job.open()
    job.save(40, TREE)
    job.close()
    given = tmp_path / "iter_0000040"
    (tmp_path / "other/iter_0000040").rename(given)
    manifest = json.loads((given / ".ckptfsm/manifest.json").read_text())
    said(capsys, "adopt", given, "-r", root)
    before = said(capsys, "export", "--prometheus", root)
    for _ in range(2):
        rows = json.loads(said(capsys, "ls", "--json", root))["checkpoints"][1:]
        assert [row["parts"] for row in rows] == [["state"], ["state"]]
        assert rows[0]["bytes"] == sum(len(data) for data in newer_files().values())
        assert rows[1]["bytes"] == sum(file["bytes"] for file in manifest["files"])
        assert rows[0]["age_s"] < 600 < 86400 < rows[1]["age_s"]
        said(capsys, "record-metrics", "40", "val=1", "-r", root)  # a later epoch
    age = re.search(r"^ckptfsm_latest_age_seconds\S* (.*)$", before, re.M)
    size = re.search(r"^ckptfsm_latest_bytes\S* (.*)$", before, re.M)
    assert float(age[1]) > 86400 and float(size[1]) == rows[1]["bytes"]


@pytest.mark.parametrize("root", ("there", "missing"))
def test_adopt_of_a_directory_that_is_not_there_says_so(root, tmp_path, capsys):
    """Catches: words about the root, where the checkpoint is misspelt."""
    real_root(tmp_path / "there", 10)
    status, _, err = ran(capsys, "adopt", "gone", "--step", "4", "-r", tmp_path / root)
    assert status == 2 and "there is no directory gone" in err
    assert not (tmp_path / "missing").exists()


def test_F2_adopt_that_was_killed_is_made_again(tmp_path, capsys):
    """Catches: "there is no directory", from a command that has moved it before it was killed."""
    root, given = real_root(tmp_path / "root", 10), tmp_path / "iter_0000040"
    stock(root / "adopt-iter_0000040")
    status, _, err = ran(capsys, "adopt", given, "-r", root)
    assert status == 2 and "left it at adopt-iter_0000040" in err
    said(capsys, "adopt", "adopt-iter_0000040", "--step", "40", "-r", root)
    assert latest(capsys, root) == "A start would resume from step 40."


def test_adopt_refuses_what_no_loader_takes(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    (root / "iter_0000040").mkdir()
    status, _, err = ran(capsys, "adopt", "iter_0000040", "-r", root)
    assert status == 1 and "no loader would take it" in err


@pytest.mark.parametrize("place", ("root", "elsewhere", "quarantine"))
def test_I2_nothing_comes_into_service_that_its_own_manifest_calls_damaged(place, tmp_path, capsys):
    """Catches: a copy with a flipped bit, of the right size, that a start would resume from."""
    root = real_root(tmp_path / "root", 10, 40, parts=TREE)
    given = {
        "root": root / "iter_0000040",
        "elsewhere": tmp_path / "iter_0000040",
        "quarantine": root / ".ckptfsm/quarantine/40.e1.a2",
    }[place]
    if place == "quarantine":
        said(capsys, "rollback", "10", "--yes", "-r", root)
    else:
        (root / "iter_0000040").rename(tmp_path / "kept")
        said(capsys, "doctor", "--fix", "--yes", "-r", root)
        (tmp_path / "kept").rename(given)
    manifest = json.loads((given / ".ckptfsm/manifest.json").read_text())
    file = given / next(each["name"] for each in manifest["files"] if each["bytes"])
    good = file.read_bytes()
    file.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    command = ("quarantine", "restore", given.name) if place == "quarantine" else ("adopt", given)
    status, out, err = ran(capsys, *command, "-r", root)
    assert status == 1 and "its own manifest calls it damaged" in err and file.name in err
    assert "to compare the digests" in out and given.is_dir()
    assert latest(capsys, root) == "A start would resume from step 10."
    file.write_bytes(good)
    assert "the latest is step 40" in said(capsys, *command, "-r", root)


def test_adopt_leaves_a_directory_from_outside_in_its_place_if_it_is_refused(tmp_path, capsys):
    """Catches: a move into the root before the look, of any file that is named."""
    job = real_job(root := tmp_path / "root")
    job.save(10)
    precious, good = tmp_path / "precious", tmp_path / "good"
    precious.write_text("of the system")
    stock(good)
    busy = ran(capsys, "adopt", good, "--step", "40", "-r", root)
    assert busy[0] == 3 and "root_busy" in busy[2]
    job.close()
    refused = ran(capsys, "adopt", precious, "--step", "40", "-r", root)
    assert refused[0] == 1 and "no loader would take it" in refused[2]
    taken = ran(capsys, "adopt", good, "--step", "10", "-r", root)
    assert taken[0] == 3 and "is taken" in taken[2]
    assert precious.read_text() == "of the system" and (good / ".metadata").exists()
    assert not list(root.glob("adopt-*"))


def test_adopt_gives_a_directory_back_if_a_job_starts_meanwhile(tmp_path, capsys, monkeypatch):
    """Catches: a directory of another place that is left in a root under a name of no step."""
    root = real_root(tmp_path / "root", 10)
    stock(tmp_path / "iter_0000040")
    began: list[FakeJob] = []

    def and_begin(*given):
        require_intact(*given)
        began.append(real_job(root))

    monkeypatch.setattr(quarantine, "require_intact", and_begin)
    status, _, err = ran(capsys, "adopt", tmp_path / "iter_0000040", "-r", root)
    assert status == 3 and "root_busy" in err
    assert (tmp_path / "iter_0000040/.metadata").exists()
    assert not list(root.glob("adopt-*"))
    began[0].close()


def test_adopt_puts_nothing_over_what_stands_at_its_place_in_the_root(tmp_path, capsys):
    """Catches: a rename over an empty directory, or an error of the system without a way out."""
    root = real_root(tmp_path / "root", 10)
    stock(tmp_path / "iter_0000040")
    (root / "adopt-iter_0000040").mkdir()
    status, _, err = ran(capsys, "adopt", tmp_path / "iter_0000040", "-r", root)
    assert status == 2 and "copy it to" in err
    assert (tmp_path / "iter_0000040/.metadata").exists()


def test_adopt_helps_a_root_that_has_nothing_to_resume_from(tmp_path, capsys):
    """Catches: a person with a good copy, whom the damage of the last checkpoint keeps out."""
    root = real_root(tmp_path / "root", 10)
    (root / "iter_0000010/.metadata").unlink()
    stock(tmp_path / "iter_0000040")
    out = said(capsys, "adopt", tmp_path / "iter_0000040", "-r", root)
    assert out.startswith("no checkpoint is in service: ")
    assert "step 40 is in service; the latest is step 40" in out
    assert latest(capsys, root) == "A start would resume from step 40."


def test_I1_adopt_takes_no_checkpoint_away_from_another_root(tmp_path, capsys):
    """Catches: the latest checkpoint of a job that is moved to another job's root."""
    root = real_root(tmp_path / "root", 10)
    other = real_root(tmp_path / "other", 40)
    status, _, err = ran(capsys, "adopt", other / "iter_0000040", "-r", root)
    assert status == 2 and "copy it" in err
    assert latest(capsys, other) == "A start would resume from step 40."


@pytest.mark.parametrize("source", ("iter_0000010", "iter_0000010/inner"))
def test_I1_adopt_gives_no_other_step_to_a_checkpoint_or_a_part_of_it(source, tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    stock(root / "iter_0000010")
    stock(root / "iter_0000010/inner")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    real_root(root, 20)
    status, _, err = ran(capsys, "adopt", root / source, "--step", "50", "-r", root)
    assert status == 2 and "not a place to adopt from" in err
    assert (root / source).exists() and not (root / "iter_0000050").exists()


def half_rolled_back(root, monkeypatch) -> None:
    """Leave a root whose rollback to step 10 was interrupted."""
    job = real_job(root)
    for step in (10, 20):
        job.save(step)
    with monkeypatch.context() as patch:
        patch.setattr(Applier, "forget", Mock(side_effect=OSError(5, "the disk is gone")))
        with pytest.raises(OutcomeUnknown):
            job.coordinator.rollback(10)
    crashed(job)


def test_adopt_refuses_a_step_that_was_saved_in_the_midst_of_a_rollback(
    tmp_path, capsys, monkeypatch
):
    """Catches: a refused start that is taken for a root without a checkpoint, and gone over."""
    root = tmp_path / "root"
    half_rolled_back(root, monkeypatch)
    stock(root / "iter_0000040")
    (root / TRACKER).write_text("40")
    status, out, err = ran(capsys, "adopt", "iter_0000040", "-r", root)
    assert (status, out) == (1, "") and "a rollback was interrupted" in err
    assert (root / "iter_0000040/.metadata").exists() and (root / TRACKER).read_text() == "40"


def test_adopt_completes_an_interrupted_rollback_first(tmp_path, capsys, monkeypatch):
    """Catches: a root that no job can open, because the tracker was moved in the midst of a rollback."""
    root = tmp_path / "root"
    half_rolled_back(root, monkeypatch)
    stock(root / "iter_0000040")
    said(capsys, "adopt", "iter_0000040", "-r", root)
    assert latest(capsys, root) == "A start would resume from step 40."
    assert [p.name for p in (root / ".ckptfsm/quarantine").iterdir()] == ["20.e1.a2"]


def test_I2_the_tracker_names_an_adopted_step_once_it_is_durable(tmp_path, monkeypatch):
    """Catches: a power loss that leaves a tracker at a torn checkpoint of a stock trainer."""
    disk = SimDisk()
    job = FakeJob(SimStorage(disk, "first"))
    job.open()
    job.save(10)
    job.close()
    stock_saves(disk, 40, tracked=False)
    storage = SimStorage(disk, "person")
    monkeypatch.setattr(RootOwnership, "release", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        adopt_directory(storage, FIRST, MEGATRON, "iter_0000040", 40)
    disk.crash("all_lost")
    after = SimStorage(disk, "after")
    assert read_tracker(after).step == 40
    assert inspect_published(after, MEGATRON, 40).found == "stock"


def test_ls_lists_files_links_and_any_name(rolled_back, capsys):
    """Catches: a list that ends at a tracker that was put aside, or at a name."""
    place = rolled_back / ".ckptfsm/quarantine"
    (place / "tracker.1-2-3").write_text("30\n")
    (place / "link").symlink_to("/nowhere")
    (place / os.fsdecode(b"\xff")).mkdir()
    found = json.loads(said(capsys, "quarantine", "ls", "--json", "-r", rolled_back))
    sizes = {each["name"]: each["bytes"] for each in found}
    assert sizes["tracker.1-2-3"] == 3 and sizes[os.fsdecode(b"\xff")] == 0
    assert sorted(sizes)[:4] == ["20.e1.a2", "30.e1.a3", "link", "tracker.1-2-3"]
    assert "tracker.1-2-3  3 B" in said(capsys, "quarantine", "ls", "-r", rolled_back)
    said(capsys, "quarantine", "drop", "tracker.1-2-3", "--yes", "-r", rolled_back)
    assert not (place / "tracker.1-2-3").exists()


def test_ls_passes_over_a_directory_that_leaves_meanwhile(rolled_back, capsys, monkeypatch):
    names = ["20.e1.a2", "21.e1.a9"]
    monkeypatch.setattr(quarantine, "list_names", lambda storage, path: names)
    told = said(capsys, "quarantine", "ls", "-r", rolled_back)
    assert "20.e1.a2" in told and "21.e1.a9" not in told
