"""A reader's lease: which path it hands out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from managers import files_manager, link_to_one_of_two_runs, tree

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import NotPermitted, StorageError
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.faults import FaultStorage


@pytest.mark.parametrize("when", ["before it is entered", "before it is renewed"])
def test_I7_a_lease_does_not_hand_out_another_runs_path(when: str, tmp_path: Path):
    """Found by review. Catches: an evaluator that reads what no lease keeps, in another run's root."""
    current = link_to_one_of_two_runs(tmp_path)
    lease = ReaderLease(current / "gpt", 1)
    if when == "before it is renewed":
        with lease:
            assert Path(lease.path, "t/tokenizer.json").read_text() == "of run a"
            current.unlink()
            current.symlink_to(tmp_path / "b")
            with pytest.raises(StorageError, match="is not the directory that was opened any more"):
                lease.renew()
        return
    current.unlink()
    current.symlink_to(tmp_path / "b")
    with pytest.raises(StorageError, match="is not the directory that was opened any more"), lease:
        pytest.fail("entered")
    assert [p.name for p in (tmp_path / "a/gpt/.ckptfsm/readers").rglob("*.json")] == []


def test_a_lease_tells_the_metrics_as_they_are_now(tmp_path: Path):
    """Catches: an evaluator that reads the metrics of the save alone, or changes the root for them."""
    run = files_manager(tmp_path)
    run.save(1, parts={"t": tree("x")}, metrics={"loss": 2.0, "acc": 0.5}).wait()
    with ReaderLease(tmp_path, 1) as lease:
        assert lease.metrics() == {"loss": 2.0, "acc": 0.5}
        run.record_metrics(1, {"acc": 0.75})
        assert lease.metrics() == {"loss": 2.0, "acc": 0.75}
    run.close()


def test_a_lease_on_a_directory_that_no_journal_explains_has_no_metrics(tmp_path: Path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / ".ckptfsm/readers").mkdir(parents=True)
    with ReaderLease(tmp_path, 1) as lease:
        assert lease.metrics() == {}


def read_only(index: int, method: str, path: str) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def test_a_lease_on_a_read_only_mount_is_refused_by_type(tmp_path: Path):
    """Catches: a bare OSError without a way out, on a host that may only read the root."""
    run = files_manager(tmp_path)
    run.save(1, parts={"t": tree("of the run")}).wait()
    run.close()
    storage = FaultStorage(PosixStorage(tmp_path, create=False), before=read_only)
    with pytest.raises(NotPermitted, match="Read-only file system.*no lease is needed") as refused:
        ReaderLease(tmp_path, 1, storage=storage).__enter__()
    assert refused.value.errno_name == "EROFS"
    run = files_manager(tmp_path)
    run.close()
