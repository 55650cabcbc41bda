"""The demo's root: that of a living job is left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fakes import fake_ports
from managers import QUICK, weights

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import RootBusy
from ckptfsm.demo.run import DemoOptions, _fresh_root
from ckptfsm.ranks.manager import Manager


def test_I1_the_demo_leaves_a_living_jobs_root_alone(tmp_path: Path, monkeypatch):
    """Catches: `ckptfsm demo`, started in a directory where a job writes to ``runs/demo``, deleting
    that job's checkpoints."""
    monkeypatch.chdir(tmp_path)
    options = DemoOptions()
    root = _fresh_root(options)
    manager = Manager(fake_ports(root), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    with pytest.raises(RootBusy):
        _fresh_root(options)
    manager.save(2, weights(2)).wait()
    manager.close()
    assert _fresh_root(options) == root and not root.exists()


def test_I1_no_job_begins_in_a_directory_while_the_demo_empties_it(tmp_path: Path, monkeypatch):
    """Catches: a directory without a journal that is deleted while a job makes its root there."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs/demo"
    root.mkdir(parents=True)
    (root / "something").write_text("of an earlier demo that did not get far")
    rmtree = shutil.rmtree

    def with_a_job(place: Path) -> None:
        with pytest.raises(RootBusy):
            Manager(fake_ports(place), make_config(QUICK))
        rmtree(place)

    monkeypatch.setattr(shutil, "rmtree", with_a_job)
    assert _fresh_root(DemoOptions()) == root and not root.exists()
