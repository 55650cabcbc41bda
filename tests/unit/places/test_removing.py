"""``Copy(keep=N)``: the N latest copies stay, and no crash of a removal leaves anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import ran, said
from copying import (
    Counted,
    Killed,
    carry,
    contents,
    copied,
    every_kind,
    is_committed,
    root_with,
    saved_again,
)

from ckptfsm.core.config import load_config
from ckptfsm.core.errors import ConfigError, NewerSchema, PlaceInUse
from ckptfsm.core.jobs import COPY, Copy
from ckptfsm.core.layout import CLAIM, MANIFEST, RUN, TRACKER
from ckptfsm.places.carry import carry as entry
from ckptfsm.places.place import place_at

STEPS = (10, 20, 30)


@pytest.fixture
def root(tmp_path: Path):
    storage = root_with(tmp_path / "root", *STEPS)
    yield storage
    storage.close_root()


def directory(root, step: int) -> Path:
    return Path(root.root, f"iter_{step:07d}")


def steps_in(place) -> list[int]:
    """The steps with any object: nothing of another is left."""
    named = sorted(name for name in place.names() if place.listed(name))
    return [int(name.removeprefix("iter_")) for name in named if name != ".ckptfsm"]


@every_kind
def test_the_latest_copies_stay_and_nothing_is_left_of_the_others(root, place):
    """Catches: a place that grows for ever, files or empty directories that are left."""
    carry(place, root, 10)
    for step in (20, 30):
        carry(place, root, step, keep=2)
    assert steps_in(place) == [20, 30]
    assert "iter_0000010" not in place.names(), "nor an empty directory"
    for step in (20, 30):
        assert copied(place, step) == contents(directory(root, step))
    carry(place, root, 30, keep=1)  # a smaller number, later
    assert steps_in(place) == [30]
    assert carry(place, root, 30).sent == 0


def test_killed_at_any_call_a_removed_copy_is_whole_or_none_and_the_next_carry_ends_it(root, place):
    """Catches: files removed before the manifest, a claim removed before the files, remains."""
    for step in STEPS[:2]:
        carry(place, root, step)
    spy = Counted(place)
    carry(spy, root, 30, keep=2)
    first = spy.calls.index("remove")
    assert spy.calls[first - 2 : first] == ["create", "replace"], "the copy is committed and named"
    removals = len(spy.calls) - first
    assert removals == len(contents(directory(root, 10))) + 2, "manifest, files, claim, directory"
    for number in range(removals):
        carry(place, root, 10)
        with pytest.raises(Killed):
            carry(Counted(place, number), root, 30, keep=2)
        assert not is_committed(place, 10)
        last = number >= removals - 2
        assert (place.read(f"iter_0000010/{CLAIM}") is None) == last, "the claim goes last"
        assert carry(place, root, 30, keep=2).sent == 0
        assert steps_in(place) == [20, 30]
        assert copied(place, 30) == contents(directory(root, 30))


def test_an_earlier_copy_is_not_sent_and_what_was_begun_of_it_goes(root, place):
    """Catches: a carrier that waits for its retry, and never comes to an end; a tracker that names
    nothing."""
    with pytest.raises(Killed):
        carry(Counted(place, 5), root, 10)
    assert place.listed("iter_0000010")
    carry(place, root, 20, keep=2)
    assert 10 in steps_in(place), "it is one of two"
    carry(place, root, 30, keep=2)
    assert steps_in(place) == [20, 30], "a copy that was begun, and is earlier than both"
    place.remove(TRACKER)
    assert carry(Counted(place), root, 10, keep=2).sent == 0
    assert steps_in(place) == [20, 30]
    assert place.read(TRACKER) is None


def test_the_latest_are_those_of_the_latest_attempts(root, place):
    """Catches: the branch that was given up kept for its higher steps, or counted while it is there."""
    for step in STEPS:
        carry(place, root, step)
    saved_again(Path(root.root), 15)
    carry(place, root, 15, keep=3)
    assert steps_in(place) == [10, 15, 20, 30], "no three are there without it"
    carry(place, root, 15, keep=2)
    assert steps_in(place) == [10, 15]
    assert carry(place, root, 15, keep=1).files > 3
    assert steps_in(place) == [15]


def test_the_copy_that_the_tracker_names_stays(root, place):
    """Catches: a tracker without its copy."""
    for step in STEPS:
        carry(place, root, step)
    assert place.replace(TRACKER, b"10\n", b"30\n")

    class Named(Counted):
        def replace(self, name, data, expected):
            return name == TRACKER or self._place.replace(name, data, expected)

    carry(Named(place), root, 30, keep=1)
    assert steps_in(place) == [10, 30]


@pytest.fixture
def adopted(root):
    """The root, whose step 10 is another run's, of a later attempt."""
    manifest = json.loads((directory(root, 10) / MANIFEST).read_bytes())
    del manifest["crc"]
    (directory(root, 10) / MANIFEST).write_text(json.dumps({**manifest, "attempt": 50}))
    return root


def test_the_step_in_use_is_copied_and_stays_whatever_its_attempt(adopted, place):
    """Catches: the newest checkpoint without a copy, for one of another run that was pruned since."""
    carry(place, adopted, 10)
    shutil.rmtree(directory(adopted, 10))
    assert carry(place, adopted, 20, keep=1).sent == 0
    assert carry(place, adopted, 30, keep=1).sent > 0
    assert steps_in(place) == [10, 30]


@pytest.mark.parametrize("order", [(10, 30), (30, 10)])
def test_what_was_adopted_beside_newer_ones_is_not_named(order, adopted, place):
    """Catches: a tracker that names an old checkpoint of another run."""
    for step in order:
        carry(place, adopted, step)
    assert place.read(TRACKER) == b"30\n"


def test_what_is_not_this_run_s_to_judge_stays(root, place, tmp_path):
    """Catches: another run's copy removed, one beside which a person put something, one that cannot be
    read, one of a later epoch than any of this root."""
    carry(place, root, 10)
    other = root_with(tmp_path / "other", 40)
    with pytest.raises(PlaceInUse, match="another run"):
        carry(place, other, 40, keep=1)
    other.close_root()
    place.put("iter_0000010/notes.txt", iter([b"ours"]), 4, "")
    carry(place, root, 20, keep=1)
    assert steps_in(place) == [10, 20]
    place.remove("iter_0000010/notes.txt")
    name = f"iter_0000020/{MANIFEST}"
    damaged = b"{" + place.read(name)
    place.put(name, iter([damaged]), len(damaged), "")
    carry(place, root, 30, keep=1)
    assert steps_in(place) == [20, 30]
    assert place.read(TRACKER) == b"30\n", "a damaged copy does not stop the later ones"
    newer = b'{"schema_version":2}'
    place.put(name, iter([newer]), len(newer), "")
    with pytest.raises(NewerSchema):
        carry(place, root, 30, keep=1)
    assert steps_in(place) == [20, 30]
    place.remove(name)
    assert place.replace(RUN, b'{"schema_version":1,"run":"' + 32 * b"0" + b'"}', place.read(RUN))
    with pytest.raises(PlaceInUse, match="another run"):
        carry(place, root, 30, keep=1)
    assert steps_in(place) == [20, 30]


def test_a_copy_of_a_later_epoch_neither_counts_nor_goes(root, place):
    """Catches: a save that counts as copied, and is pruned, because of a checkpoint that was adopted
    from another run."""
    manifest = json.loads((directory(root, 10) / MANIFEST).read_bytes())
    del manifest["crc"]
    (directory(root, 10) / MANIFEST).write_text(json.dumps({**manifest, "epoch": 50}))
    carry(place, root, 10)
    assert carry(place, root, 20, keep=1).sent > 0
    assert steps_in(place) == [10, 20]
    carry(place, root, 30, keep=1)
    assert steps_in(place) == [10, 30]


def test_a_directory_that_is_claimed_anew_while_it_goes_stays(root, place):
    """Catches: the files of a later attempt removed with the earlier copy's."""
    for step in STEPS[:2]:
        carry(place, root, step)
    path = f"iter_0000010/{CLAIM}"
    old = place.read(path)
    later = json.dumps({**json.loads(old), "epoch": 9}).encode()

    class Claimed(Counted):
        def remove(self, name):
            self._place.remove(name)
            if name.endswith(MANIFEST):
                assert self._place.replace(path, later, old)

    carry(Claimed(place), root, 30, keep=2)
    assert place.read(path) == later
    assert {"__0_0.distcp", "__1_0.distcp"} <= place.listed("iter_0000010").keys()


@pytest.mark.parametrize("keep", [2, None])
def test_a_commit_that_comes_after_its_removal_goes_too(keep, root, place):
    """Catches: another machine's carrier, late in an earlier copy, that commits it without files."""
    carry(place, root, 20)

    class Late(Counted):
        def create(self, name, data):
            if name == f"iter_0000010/{MANIFEST}":
                carry(place, root, 30, keep=2)
            return self._place.create(name, data)

    carry(Late(place), root, 10, keep=keep)
    assert is_committed(place, 10) == (keep is None), "its own carrier removes it"
    carry(place, root, 30, keep=2)
    assert steps_in(place) == [20, 30]


def test_the_job_takes_the_number_from_its_settings(root, tmp_path, monkeypatch):
    """Catches: a setting that is passed over, a number that leaves no copy."""
    for keep in (0, -1, "all"):
        with pytest.raises(ConfigError, match="keep"):
            Copy("x", keep=keep)
    (tmp_path / "job.toml").write_text('[[ckptfsm.copies]]\nto = "x"\nkeep = 2\n')
    assert load_config(tmp_path / "job.toml").copies[0].keep == 2
    (tmp_path / "p").mkdir()
    for step in STEPS:
        monkeypatch.setenv(COPY, Copy(f"{tmp_path}/p", keep=2).job.environment[COPY])
        entry(str(directory(root, step)), step, {})
    assert steps_in(place_at(f"{tmp_path}/p")) == [20, 30]


def test_a_copy_that_goes_while_it_is_read_is_told_and_nothing_is_published(
    root, url, place, tmp_path, capsys, monkeypatch
):
    """Catches: half a checkpoint, "damaged" of a copy that was removed as asked."""
    for step in STEPS:
        carry(place, root, step)
    real = type(place).stream
    steps = iter(("20", "30"))

    def stream(self, name):
        if name.endswith("__0_0.distcp") and next(steps, None):
            for each in (MANIFEST, "__0_0.distcp", CLAIM):
                place.remove(f"{name.partition('/')[0]}/{each}")
        return real(self, name)

    monkeypatch.setattr(type(place), "stream", stream)
    back = tmp_path / "back"
    status, _, err = ran(capsys, "fetch", url, back, "--step", 20)
    assert (status, "removed or replaced meanwhile" in err, "call again" in err) == (
        1,
        True,
        True,
    ), err
    assert not list(back.glob("iter_*"))
    shown = url if "://" in url else f"file://{url}"
    status, out, _ = ran(capsys, "verify", shown)
    assert (status, out.splitlines()[1:]) == (1, ["  the copy was removed or replaced meanwhile"])
    status, _, err = ran(capsys, "fetch", url, back)
    assert (status, "names step 30" in err) == (1, True), "an older one is not taken unasked"
    said(capsys, "fetch", url, back, "--step", 10)
    assert contents(back / "iter_0000010") == contents(directory(root, 10))
