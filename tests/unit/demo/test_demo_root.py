"""The demo's root: that of a living job is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import fake_ports
from managers import QUICK, weights

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    RootBusy,
)
from ckptfsm.demo.run import DemoOptions, _fresh_root
from ckptfsm.ranks.manager import Manager


def test_I1_the_demo_leaves_a_living_jobs_root_alone(tmp_path: Path, monkeypatch):
    """Found by attack. Catches: `ckptfsm demo`, started in a directory where a job writes to
    ``runs/demo``, deleting that job's checkpoints."""
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
    root.mkdir()
    (root / "something").write_text("of an earlier demo that did not get far")
    assert _fresh_root(options) == root and not root.exists()
