"""``fetch_from``: a root without a checkpoint begins from the latest copy, and never at zero unasked."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from copying import Killed, carry, new_place, root_with
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from managers import QUICK, weights
from real_roots import crashed, real_job

from ckptfsm.coordinator import bringing_back
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    ConfigError,
    CopyDamaged,
    DamagedRoot,
    PlaceFailed,
    RankInterrupted,
    RecoveryWarning,
)
from ckptfsm.core.layout import FETCHING, MANIFEST, RUN, TRACKER
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.overview import look
from ckptfsm.places.directory import DirectoryPlace
from ckptfsm.places.place import place_at
from ckptfsm.ranks import first_fetch
from ckptfsm.ranks.manager import Manager


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place with the copies of steps 10 and 20 of a root that is lost."""
    storage = root_with(tmp_path / "lost", 10, 20)
    place = new_place(tmp_path / "place")
    for step in (10, 20):
        carry(place, storage, step)
    storage.close_root()
    return str(tmp_path / "place")


def started(root: Path, url: str | None, transport: Any = None, **settings: Any) -> Manager:
    ports = fake_ports(root, driver=FakeDriver(), transport=transport)
    return Manager(ports, make_config({**QUICK, "fetch_from": url, **settings}))


def latest(root: Path, url: str | None, **settings: Any) -> int | None:
    manager = started(root, url, **settings)
    try:
        return manager.latest_step()
    finally:
        manager.close()


def test_an_empty_root_begins_from_the_latest_copy_and_keeps_it_as_its_own(url, tmp_path):
    """Catches: a start at zero, a pin for ever, a step that is fetched again and again."""
    root = tmp_path / "root"
    assert latest(root, url, retention=LatestN(1)) == 20
    shutil.move(url, tmp_path / "away")
    manager = started(root, url, retention=LatestN(1))  # the place is not asked
    manager.save(30, weights(30)).wait()
    manager.close()
    assert [path.name for path in root.glob("iter_*")] == ["iter_0000030"]
    assert not (root / FETCHING).exists()


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_death_at_the_rename_leaves_what_the_next_start_takes_as_its_own(
    ends, url, tmp_path, monkeypatch
):
    """Catches: a fetched checkpoint that is pinned because its start was killed."""
    real = bringing_back.adopt_directory

    def adopt(*arguments: Any) -> None:
        if ends == "after":
            real(*arguments)
        raise Killed

    monkeypatch.setattr(bringing_back, "adopt_directory", adopt)
    with pytest.raises(Killed):
        started(tmp_path / "root", url)
    monkeypatch.undo()
    if ends == "before":
        with pytest.raises(DamagedRoot, match="fetch it again"):
            started(tmp_path / "root", None)
    assert latest(tmp_path / "root", url if ends == "before" else None) == 20
    job = real_job(tmp_path / "root")
    assert look(job.storage).pins == {}
    crashed(job)
    assert not (tmp_path / "root" / FETCHING).exists()


def test_a_place_that_cannot_be_reached_is_no_start_at_zero(url, tmp_path):
    """Catches: a job that begins again because a network was down (I8)."""
    shutil.move(url, tmp_path / "away")
    for _ in range(2):
        found = run_ranks(2, lambda transport: latest_of(tmp_path / "root", url, transport))
        assert "mounted" in str(found[0])
        assert isinstance(found[0], PlaceFailed) and isinstance(found[1], PlaceFailed)
    shutil.move(tmp_path / "away", url)
    assert latest(tmp_path / "root", url) == 20


def latest_of(root: Path, url: str, transport: ThreadTransport) -> int | None:
    manager = started(root, url, transport)
    found = manager.latest_step()
    manager.close()
    return found


def test_a_place_without_a_copy_is_told_and_its_run_goes_on_there(url, tmp_path):
    """Catches: a prefix with a typing error, an own copy that is refused as another run's."""
    for step in (10, 20):
        (tmp_path / "place" / f"iter_{step:07d}" / MANIFEST).unlink()
    with pytest.raises(CopyDamaged, match="names step 20, which has no whole copy"):
        started(tmp_path / "root", url)
    (tmp_path / "place" / TRACKER).unlink()
    manager = started(tmp_path / "root", url)
    with pytest.warns(RecoveryWarning, match="2 are not committed. The job begins at zero"):
        manager.save(10, weights(10)).wait()
    manager.close()
    assert (tmp_path / "root" / RUN).read_bytes() == (tmp_path / "place" / RUN).read_bytes()
    job = real_job(tmp_path / "root")
    carry(place_at(url), job.storage, 10)
    crashed(job)


def test_who_asks_for_a_fresh_start_gets_one(url, tmp_path):
    """Catches: a copy that comes back although a person has put it aside."""
    assert latest(tmp_path / "root", url) == 20
    for resume in ("fresh", "fallback"):
        assert latest(tmp_path / "root", url, resume=resume) is None


def test_a_damaged_copy_or_root_is_told(url, tmp_path):
    """Catches: an older checkpoint that is taken in silence."""
    with pytest.raises(ConfigError, match="set layout="):
        started(tmp_path / "verl", url, layout="verl")
    (tmp_path / "place" / "iter_0000020" / MANIFEST).write_text("{}")
    with pytest.raises(CopyDamaged, match="fetch .* --step 10"):
        started(tmp_path / "root", url)
    (tmp_path / "lost" / "iter_0000020").rename(tmp_path / "lost" / "other")
    shutil.rmtree(tmp_path / "lost" / "iter_0000010")
    with pytest.raises(DamagedRoot, match="none to resume from"):
        started(tmp_path / "lost", url)


def test_other_ranks_wait_for_a_fetch_as_long_as_it_takes(url, tmp_path, monkeypatch):
    """Catches: a large checkpoint whose fetch is longer than ranks wait for each other."""
    told, real = threading.Event(), DirectoryPlace.stream
    turns = iter((False, False, True, *(True,) * 1000))

    def share(transport: Any, answer: Any) -> Any:
        if transport.rank == 0 and next(turns):
            told.set()
        return share_answer(transport, answer)

    def stream(self: DirectoryPlace, name: str) -> Any:
        assert told.wait(30)
        return real(self, name)

    share_answer = first_fetch.share_answer
    monkeypatch.setattr(first_fetch, "_TELL_S", 0.01)
    monkeypatch.setattr(first_fetch, "share_answer", share)
    monkeypatch.setattr(DirectoryPlace, "stream", stream)
    assert run_ranks(2, lambda each: latest_of(tmp_path / "root", url, each)) == [20, 20]


def test_an_interrupt_ends_a_fetch_on_every_rank_and_it_goes_on_later(url, tmp_path, monkeypatch):
    """Catches: a job that can only be killed while it fetches."""
    interrupted = threading.Event()
    real = DirectoryPlace.stream

    def tell(self: first_fetch.FirstFetch, turn: int) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def stream(self: DirectoryPlace, name: str) -> Any:
        assert interrupted.wait(30)
        return real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(first_fetch, "_TELL_S", 0.01)
        patch.setattr(first_fetch.FirstFetch, "_tell", tell)
        patch.setattr(DirectoryPlace, "stream", stream)
        found = run_ranks(2, lambda each: latest_of(tmp_path / "root", url, each))
    assert [type(each) for each in found] == [KeyboardInterrupt, RankInterrupted]
    assert latest(tmp_path / "root", url) == 20
