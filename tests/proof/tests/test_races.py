"""The races of check and act: the model is searched, its accepted races replayed, its order compared."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from proof import races
from proof.layer import Budget
from roots import in_place

from ckptfsm.core.layout import EPOCHS, MANIFEST, PINS, READERS, STAGING, TRACKER, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.simfs import SimDisk, SimStorage

CHECK = [f"listdir {EPOCHS}", f"read {EPOCHS}/epoch-000001"]
needs_spin = pytest.mark.skipif(bool(races.missing()), reason=races.missing() or "-")


class Watched(FaultStorage):
    """Also notes looks: listings, lookups and reads of ``seen``, between the changes."""

    def __init__(self, inner: SimStorage) -> None:
        super().__init__(inner)
        self.order: list[str] = []
        self.after = lambda index, method, path: self.order.append(f"{method} {path}")

    def listdir(self, path: str) -> list[str]:
        self.order.append(f"listdir {path}")
        return super().listdir(path)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        self.order.append(f"read {path}")
        return super().read(path, limit, offset)

    def stat(self, path: str):
        self.order.append(f"stat {path}")
        return super().stat(path)


def in_order(order: list[str], *expected: str) -> bool:
    """The expected calls are there, in this order, with any others between them."""
    rest = iter(order)
    return all(any(call.startswith(each) for call in rest) for each in expected)


def watched_job(disk: SimDisk) -> tuple[races.FakeJob, Watched]:
    storage = Watched(SimStorage(disk, "watched"))
    identity = races.Identity("sim", 7, "watched", "watched")
    job = races.FakeJob(storage, identity=identity, retention=LatestN(1))
    job.open()
    return job, storage


@needs_spin
def test_a_model_with_a_hole_is_red(tmp_path: Path):
    """Catches: a layer that calls a counterexample of the model as it is a success."""
    hole = races.Build(("NO_SECOND_LOOK",))  # said to hold
    assert "held" in races.judge_build(hole, races.search(hole, tmp_path))
    nothing = races.Build(("TAKING",), "holds")  # said to break
    assert "should break" in races.judge_build(nothing, races.search(nothing, tmp_path))


@pytest.mark.parametrize("replay", [r for _, r in races.REPLAYS], ids=lambda r: r.__name__)
def test_I9_the_accepted_races_do_bounded_damage_on_production(replay):
    """Catches: production that does worse than the model, where one side stops before its act."""
    assert replay() == ""


def test_where_spin_is_missing_the_layer_says_so(monkeypatch):
    """Catches: a layer that is silently not run."""
    monkeypatch.setattr(races.shutil, "which", lambda name: None)
    result = races.run(Budget())
    assert result.skipped == races.NO_SPIN
    assert result.explored["replays on production"] == len(races.REPLAYS) and not result.violations


def test_F27_the_order_of_a_prune_is_the_models():
    """Catches: a look or a check of ``Mover.prune`` moved or left out, and the model unaware."""
    disk = SimDisk()
    job, storage = watched_job(disk)
    job.save(1)
    storage.order.clear()
    job.save(2)
    assert in_order(
        storage.order,
        f"listdir {EPOCHS}",
        f"listdir {PINS}",
        f"listdir {READERS}",
        f"read {TRACKER}",
        f"rename {races.ONE} -> {TRASH}",
        "fsync_dir",
        f"listdir {PINS}",
        f"listdir {READERS}",
        "pwrite .ckptfsm/journal",
    ), storage.order


def test_I9_the_order_of_a_tracker_write_is_the_models():
    """Catches: the tracker renamed without a check right before it, or not read back."""
    disk = SimDisk()
    job, storage = watched_job(disk)
    storage.order.clear()
    job.save(1)
    temporary = f"{TRACKER}.tmp-"
    assert in_order(
        storage.order,
        f"listdir {EPOCHS}",
        f"open_exclusive {temporary}",
        f"listdir {EPOCHS}",
        f"rename {temporary}",
        f"read {TRACKER}",
        "pwrite .ckptfsm/journal",
    )
    at = next(i for i, c in enumerate(storage.order) if c.startswith(f"rename {temporary}"))
    assert storage.order[at - 2 : at] == CHECK, "nothing between check and rename"


def test_I9_a_check_comes_directly_before_a_checkpoint_gets_its_name():
    """Catches: a publishing rename, or in place the manifest's, by a process that was fenced
    meanwhile."""
    job, storage = watched_job(SimDisk())
    job.save(1)
    check_before(storage, f"rename {STAGING}/1.e1.a1 -> ")
    job, storage = watched_job(SimDisk())
    of = in_place(job, 2)
    for rank in (0, 1):
        job.write(of, rank)
    check_before(storage, f"rename iter_0000002/{MANIFEST}.tmp-")


def check_before(storage: Watched, call: str) -> None:
    """The epoch is looked at, and nothing is done between that and the one call that begins so."""
    (at,) = (i for i, c in enumerate(storage.order) if c.startswith(call))
    assert storage.order[at - 2 : at] == CHECK, "nothing between check and rename"


def test_F27_a_reader_puts_its_lease_before_it_looks():
    """Catches: the order of ``disk/reader_lease.py`` turned round, while the model still has it."""
    disk = SimDisk()
    job, _ = watched_job(disk)
    job.save(1)
    storage = Watched(SimStorage(disk, "reader"))
    with ReaderLease("/sim", 1, storage=storage):
        assert in_order(
            storage.order, f"rename {READERS}", f"fsync_dir {READERS}", f"stat {races.ONE}"
        )
        assert not in_order(storage.order, f"stat {races.ONE}", f"rename {READERS}")


def test_F12_an_opening_sweeps_after_it_took_its_epoch_and_before_it_writes():
    """Catches: a sweep before the epoch, which leaves a zombie a tracker to rename later."""
    disk = SimDisk()
    job, _ = watched_job(disk)
    job.save(1)
    job.close()
    disk.kill("watched")
    disk.plant_file(f"{TRACKER}.tmp-zombie.0", b"7")
    again = Watched(SimStorage(disk, "again"))
    races.FakeJob(again, identity=races.Identity("sim", 8, "again", "again")).open()
    assert in_order(
        again.order,
        f"link {EPOCHS}/take-",
        f"fsync_dir {EPOCHS}",
        f"unlink {TRACKER}.tmp-",
        f"read {TRACKER}",
    )


def test_F27_the_trash_is_emptied_after_a_check_and_never_while_a_prune_is_undecided():
    """Catches: ``give_space_back`` without its check, or of undecided attempts."""
    disk = SimDisk()
    job, storage = watched_job(disk)
    job.save(1)
    job.save(2)
    applier = job.coordinator._applier

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TRASH}/2.e1.a2"):
            storage.before = None
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    storage.before = before
    job.save(3)
    assert applier.ledger.in_state(State.PRUNABLE) and applier.give_space_back(99) > 0
    assert "iter_0000002" in disk.listed("") and disk.listed(TRASH) == [], (
        "1 was given up, 2 is not"
    )
    applier.retry_pending()
    storage.order.clear()
    assert applier.give_space_back(99) > 0
    assert in_order(
        storage.order,
        f"listdir {EPOCHS}",
        f"listdir {TRASH}",
        f"unlink {TRASH}/",
        f"rmdir {TRASH}/",
    )
