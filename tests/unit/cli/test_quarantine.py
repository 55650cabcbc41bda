"""``adopt`` and ``quarantine``: directories that come back into service, or go for good."""

from __future__ import annotations

import json
import shutil

import pytest
from cli_runs import ran, said
from real_roots import real_job, real_root
from strangers import newer_files


@pytest.fixture
def rolled_back(tmp_path):
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
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


def test_restore_of_an_older_one_leaves_the_latest(rolled_back, capsys):
    said(capsys, "quarantine", "restore", "30.e1.a3", "-r", rolled_back)
    assert "the latest is step 30" in said(
        capsys, "quarantine", "restore", "20.e1.a2", "-r", rolled_back
    )
    assert latest(capsys, rolled_back) == "A start would resume from step 30."


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


def test_I2_restore_refuses_a_damaged_one(rolled_back, capsys):
    (rolled_back / ".ckptfsm/quarantine/30.e1.a3/.metadata").unlink()
    status, _, err = ran(capsys, "quarantine", "restore", "30.e1.a3", "-r", rolled_back)
    assert status == 1 and "no loader would take it" in err
    assert latest(capsys, rolled_back) == "A start would resume from step 10."


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


def stock(directory) -> None:
    directory.mkdir()
    for name, data in newer_files().items():
        (directory / name).write_bytes(data)


def test_adopt_takes_a_directory_that_is_newer_than_the_tracker(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    stock(root / "iter_0000040")
    assert latest(capsys, root) == "A start would resume from step 10."
    out = said(capsys, "adopt", "iter_0000040", "-r", root)
    assert "step 40 is in service; the latest is step 40" in out
    assert latest(capsys, root) == "A start would resume from step 40."


def test_adopt_moves_a_directory_from_outside_into_the_root(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    stock(tmp_path / "old run")
    status, _, err = ran(capsys, "adopt", tmp_path / "old run", "-r", root)
    assert status == 2 and "give --step" in err
    said(capsys, "adopt", tmp_path / "old run", "--step", "5", "-r", root)
    assert (root / "iter_0000005/.metadata").exists() and not (tmp_path / "old run").exists()
    assert latest(capsys, root) == "A start would resume from step 10."


def test_adopt_refuses_what_no_loader_takes(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    (root / "iter_0000040").mkdir()
    status, _, err = ran(capsys, "adopt", "iter_0000040", "-r", root)
    assert status == 1 and "no loader would take it" in err


def test_adopt_leaves_a_directory_from_outside_in_its_place_if_it_is_refused(tmp_path, capsys):
    """Found by attack. Catches: a move into the root before the look, of any file that is named."""
    job = real_job(root := tmp_path / "root")
    job.save(10)
    precious, good = tmp_path / "precious", tmp_path / "good"
    precious.write_text("of the system")
    stock(good)
    refused = ran(capsys, "adopt", precious, "--step", "40", "-r", root)
    assert refused[0] == 1 and "no loader would take it" in refused[2]
    busy = ran(capsys, "adopt", good, "--step", "40", "-r", root)
    assert busy[0] == 3 and "root_busy" in busy[2]
    job.close()
    taken = ran(capsys, "adopt", good, "--step", "10", "-r", root)
    assert taken[0] == 3 and "is taken" in taken[2]
    assert precious.read_text() == "of the system" and (good / ".metadata").exists()
    assert not list(root.glob("adopt-*"))
