"""A copy comes back into a root: whole and proved, or not at all; and it is the root's own then."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_runs import ran, said
from copying import Counted, Killed, carry, contents, every_kind, new_place, root_with
from real_roots import TREE, crashed, real_job

from ckptfsm.coordinator import bringing_back
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.layout import FETCHING, MANIFEST, RUN, TRACKER
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import LatestN
from ckptfsm.places.fetching import choose, copies_in
from ckptfsm.places.place import place_at


@pytest.fixture
def copied(tmp_path: Path, place):
    """The directory of a root whose steps 10 and 20 were copied."""
    storage = root_with(tmp_path / "root", 10, 20)
    carry(place, storage, 10)
    carry(place, storage, 20)
    storage.close_root()
    return tmp_path / "root"


@every_kind
def test_a_fetched_checkpoint_is_resumed_from_and_not_pinned(copied, url, tmp_path, capsys):
    """Catches: another content, a pin for ever, a tracker that says nothing, a run that is refused."""
    back = tmp_path / "back"
    assert "the latest is step 20" in said(capsys, "fetch", url, back)
    assert contents(back / "iter_0000020") == contents(copied / "iter_0000020")
    assert (back / TRACKER).read_text() == "20\n"
    assert (back / RUN).read_bytes() == (copied / RUN).read_bytes()
    assert not (back / FETCHING).exists()
    job = real_job(back, retention=LatestN(1))
    assert job.coordinator.ledger.latest().step == 20
    held = job.coordinator.locate(None)
    job.coordinator.release(held.lease, 20)
    of = job.save(30, TREE)
    assert [c.step for c in job.coordinator.ledger.in_state(State.TRACKED)] == [30]
    assert of.epoch > 1, "no attempt has the name of one in the place"
    carry(place_at(url), job.storage, 30)
    crashed(job)


def test_what_is_there_is_not_fetched_again_and_another_attempt_is_refused(
    copied, url, tmp_path, capsys
):
    """Catches: a second fetch that damages, or takes another attempt for this one."""
    back = tmp_path / "back"
    said(capsys, "fetch", url, back, "--step", 10)
    assert "fetched" not in said(capsys, "fetch", url, back, "--step", 10)
    assert "pin" not in said(capsys, "explain", 10, back)
    said(capsys, "pin", 10, back, "--reason", "for the paper")
    said(capsys, "fetch", url, back, "--step", 10)
    assert "for the paper" in said(capsys, "explain", 10, back)
    assert "latest is step 20" in said(capsys, "fetch", url, back)
    other = tmp_path / "other"
    root_with(other, 20).close_root()
    status, _, err = ran(capsys, "fetch", url, other)
    assert (status, "taken by another checkpoint" in err) == (3, True)


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_what_the_root_has_damaged_is_fetched_again(
    damage, copied, url, tmp_path, capsys, monkeypatch
):
    """Catches: a fetch that says all is well by the name alone; a crash that leaves neither."""
    file = copied / "iter_0000020/__0_0.distcp"
    before = contents(copied / "iter_0000020")
    file.write_bytes(b"?" * file.stat().st_size)
    if damage == "gone":
        shutil.rmtree(copied / "iter_0000010")
        file.unlink()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(bringing_back, "adopt_directory", Mock(side_effect=Killed))
        ran(capsys, "fetch", url, copied)
    with pytest.raises(DamagedRoot) if damage == "gone" else nullcontext():
        crashed(real_job(copied))
    assert "fetched" in said(capsys, "fetch", url, copied)
    assert contents(copied / "iter_0000020") == before
    aside = said(capsys, "quarantine", "ls", copied)
    assert "20.e1.a2" in aside
    assert not (copied / FETCHING).exists()
    job = real_job(copied)
    assert job.coordinator.ledger.latest().step == 20
    crashed(job)


def test_a_killed_fetch_publishes_nothing_and_the_next_one_goes_on(copied, url, place, tmp_path):
    """Catches: a half directory under a step's name, a file that is fetched twice."""
    back = tmp_path / "back"
    script = (
        "import os, signal, sys\n"
        "from ckptfsm.cli import main\n"
        "from ckptfsm.places import fetching\n"
        "real, seen = fetching.Fetch._stream, []\n"
        "fetching._AT_ONCE = 1\n"
        "def stream(self, *arguments):\n"
        "    if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    seen.append(real(self, *arguments))\n"
        "    return seen[-1]\n"
        "fetching.Fetch._stream = stream\n"
        "main(sys.argv[1:])\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, "fetch", url, str(back)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not list(back.glob("iter_*"))
    (stage,) = (back / FETCHING).iterdir()
    with pytest.raises(DamagedRoot, match="fetch it again"):
        real_job(back)  # a start at zero would pass it over
    before = {path: path.stat().st_ino for path in stage.rglob("*") if path.is_file()}
    assert len(before) == 3
    ended = subprocess.run(
        [sys.executable, "-m", "ckptfsm.cli", "fetch", url, str(back)], timeout=60
    )
    assert ended.returncode == 0
    now = {path.stat().st_ino for path in (back / "iter_0000020").rglob("*")}
    assert set(before.values()) <= now


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "manifest"])
def test_a_damaged_copy_is_told_and_nothing_is_published(
    damage, copied, url, place, tmp_path, capsys
):
    """Catches: a digest that is not compared, an object that someone deleted."""
    name = "iter_0000020/__0_0.distcp"
    data = place.read(name)
    if damage == "gone":
        place.remove(name)
    elif damage == "manifest":
        name = f"iter_0000020/{MANIFEST}"
        data = place.read(name)
        place.replace(name, data[:-9] + b"x" + data[-8:], data)
    else:
        bad = data[:-1] + b"?" if damage == "flipped" else data[:-1]
        place.put(name, iter([bad]), len(bad), place.digest(name))
    back = tmp_path / "back"
    status, _, err = ran(capsys, "fetch", url, back)
    assert status == 1
    assert name in err
    assert "10" in err, "the next older copy is named"
    assert not list(back.glob("iter_*"))
    if damage != "manifest":
        with pytest.raises(DamagedRoot, match="fetch it again"):
            real_job(back)
    assert ran(capsys, "fetch", url, back, "--step", 20)[0] == 1
    said(capsys, "fetch", url, back, "--step", 10)
    assert contents(back / "iter_0000010") == contents(copied / "iter_0000010")
    job = real_job(back)
    crashed(job)


def test_a_place_that_cannot_be_reached_or_has_nothing_is_told_apart(tmp_path, capsys):
    """Catches: "nothing there" of a place that was not asked."""
    back = tmp_path / "back"
    status, _, err = ran(capsys, "fetch", tmp_path / "missing", back)
    assert (status, "is it mounted" in err or "mounted on this host" in err) == (1, True)
    (tmp_path / "empty").mkdir()
    status, _, err = ran(capsys, "fetch", tmp_path / "empty", back)
    assert (status, "has no copy" in err) == (2, True)
    assert not back.exists()
    status, _, err = ran(capsys, "fetch", "gopher://x", back)
    assert (status, "no place for copies is known" in err) == (2, True)


def test_a_root_of_another_run_is_refused(copied, url, tmp_path, capsys):
    """Catches: a root whose copies would go to the place of another run."""
    other = root_with(tmp_path / "other", 10)
    carry(new_place(tmp_path / "elsewhere"), other, 10)
    other.close_root()
    status, _, err = ran(capsys, "fetch", url, tmp_path / "other", "--step", 20)
    assert (status, "another run" in err) == (2, True)


def test_a_living_owner_is_refused(copied, url, capsys):
    """Catches: a checkpoint that appears under a job."""
    job = real_job(copied)
    assert ran(capsys, "fetch", url, copied)[0] == 3
    crashed(job)


def test_the_latest_is_that_of_the_latest_attempt(copied, place):
    """Catches: a restart from an abandoned branch, because its steps are higher."""
    job = real_job(copied)
    job.coordinator.rollback(10)
    job.save(15, TREE)
    carry(place, job.storage, 15)
    crashed(job)
    assert choose(place, copies_in(place), None).step == 15


def test_a_copy_that_was_begun_is_none(copied, url, place, tmp_path, capsys):
    """Catches: a claim that counts as a copy, or that keeps the new machine's attempt out."""
    for _ in range(6):
        crashed(real_job(copied))
    job = real_job(copied)
    begun = job.save(30, TREE)
    with pytest.raises(Killed):
        carry(Counted(place, 6), job.storage, 30)
    crashed(job)
    back = tmp_path / "back"
    assert "step 20 is in service" in said(capsys, "fetch", url, back)
    again = real_job(back)
    assert again.save(30, TREE).epoch > begun.epoch
    carry(place, again.storage, 30)
    crashed(again)
    status, _, err = ran(capsys, "fetch", url, tmp_path / "third", "--step", 31)
    assert (status, "available=(10, 20, 30)" in err) == (2, True)


def test_a_half_fetch_of_another_copy_makes_room(copied, url, place, tmp_path, capsys):
    """Catches: halves that fill the disk, and cannot be given up twice."""
    back = tmp_path / "back"
    name = "iter_0000010/__0_0.distcp"
    data = place.read(name)
    for _ in range(2):
        place.remove(name)
        assert ran(capsys, "fetch", url, back, "--step", 10)[0] == 1
        assert len(list((back / FETCHING).iterdir())) == 1
        place.put(name, iter([data]), len(data), place.digest("iter_0000010/__1_0.distcp"))
        place.remove("iter_0000020/__0_0.distcp")
        assert ran(capsys, "fetch", url, back)[0] == 1
        assert [each.name[:3] for each in (back / FETCHING).iterdir()] == ["20."]
    assert not any((back / ".ckptfsm/trash").iterdir())


@pytest.mark.parametrize("damage", ["empty", "gone", "link"])
def test_an_older_copy_is_never_taken_in_silence(damage, copied, url, place, tmp_path, capsys):
    """Catches: a manifest of no bytes that counts as none, a tracker that is no evidence, a directory
    that nobody sees."""
    name = f"iter_0000020/{MANIFEST}"
    if damage == "empty":
        assert place.replace(name, b"", place.read(name))
    elif damage == "gone":
        place.remove(name)
    elif "://" in url:
        pytest.skip("there are no links")
    else:
        (tmp_path / "place/iter_0000020").rename(tmp_path / "elsewhere")
        (tmp_path / "place/iter_0000020").symlink_to(tmp_path / "elsewhere")
    back = tmp_path / "back"
    status, _, err = ran(capsys, "fetch", url, back)
    assert (status, "20" in err) == (1, True), err
    if damage == "empty":
        shown = url if "://" in url else f"file://{url}"
        assert "step 20: DAMAGED" in ran(capsys, "verify", shown, "--all")[1]
    if damage != "link":
        said(capsys, "fetch", url, back, "--step", 10)
