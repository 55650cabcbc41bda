"""Roots that are moved, and links above them or in them, on a real disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import fake_ports
from managers import QUICK, files_manager, link_to_one_of_two_runs, tree, weights

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    SaveFailed,
    StorageError,
)
from ckptfsm.core.layout import QUARANTINE, TRASH
from ckptfsm.ranks.manager import Manager
from ckptfsm.writers.plain_files import FileTree


def test_F16_a_link_in_the_trash_is_put_aside(tmp_path: Path):
    """Catches: a link under an attempt's name, which every opening stumbles over, and never sorts."""
    root = tmp_path / "root"
    with Manager(fake_ports(lambda create: PosixStorage(root)), make_config(QUICK)) as manager:
        manager.save(1, weights(1)).wait()
    (tmp_path / "outside").mkdir()
    (root / TRASH / "7.e1.a9").symlink_to(tmp_path / "outside")
    Manager(fake_ports(lambda create: PosixStorage(root)), make_config(QUICK)).close()
    assert (root / QUARANTINE / "7.e1.a9").is_symlink() and (tmp_path / "outside").is_dir()


@pytest.mark.parametrize("when", ["before the save", "while its files are made"])
def test_I3_files_never_land_in_the_root_of_another_run(when: str, tmp_path: Path):
    """Catches: a link above the root that is put to the root of another run while
    the job goes on (``current`` of a deployment). Files of one run land in the other's checkpoint,
    which is acknowledged."""
    current = tmp_path / "current"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    current.symlink_to(tmp_path / "a")

    def moves() -> None:
        current.unlink()
        current.symlink_to(tmp_path / "b")

    def make(where: str) -> None:
        moves()
        Path(where).mkdir(parents=True)  # the other run's attempt has the same number
        Path(where, "tokenizer.json").write_text("of run a")

    ours = files_manager(current / "gpt")
    ours.save(1, parts={"t": tree("of run a")}).wait()
    wanted = FileTree(make) if when != "before the save" else tree("of run a")
    if when == "before the save":
        moves()
        theirs = files_manager(current / "gpt")
        theirs.save(1, parts={"t": tree("of run b")}).wait()
        theirs.close()
    with pytest.raises(SaveFailed, match="gpt is not the directory that was opened any more"):
        ours.save(2, parts={"t": wanted}).wait()
    assert (ours.latest_step(), ours.all_steps()) == (1, [1])
    ours.close()


def test_a_job_goes_on_in_the_directory_that_it_opened(tmp_path: Path):
    """Catches: saves that hand out no path, refused or written elsewhere as their root was moved."""
    ours = files_manager(tmp_path / "gpt")
    (tmp_path / "gpt").rename(tmp_path / "old")
    ours.save(1, parts={"x": b"data"}).wait()
    assert (tmp_path / "old/iter_0000001/x").read_bytes() == b"data"
    assert not (tmp_path / "gpt").exists()
    with pytest.raises(SaveFailed, match=r"any more \(FileNotFoundError"):
        ours.save(2, parts={"t": tree("made by path")}).wait()
    ours.close()


@pytest.mark.parametrize("how", ["link", "rename"])
def test_I2_a_restore_does_not_read_another_runs_checkpoint(how: str, tmp_path: Path):
    """Catches: files that are verified in the root that was opened, and loaded
    from the directory that has its path by now."""
    current = link_to_one_of_two_runs(tmp_path)
    ours = files_manager(current / "gpt")
    assert Path(ours.restore(parts={"t": tree("")}).parts["t"], "tokenizer.json").read_text() == (
        "of run a"
    )
    if how == "link":
        current.unlink()
        current.symlink_to(tmp_path / "b")
    else:
        (tmp_path / "a/gpt").rename(tmp_path / "a/gpt.old")
        (tmp_path / "b/gpt").rename(tmp_path / "a/gpt")
    with pytest.raises(StorageError, match="is not the directory that was opened any more"):
        ours.restore(parts={"t": tree("")})
    ours.close()
