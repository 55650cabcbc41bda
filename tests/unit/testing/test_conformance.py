"""The judge of journals: accepts what the library writes, refuses each illegal trace by its rule (I11).

The forgeries are records of production code, changed one way at a time, with right checksums.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from forged_journals import FORGERIES, Forgery, damaged_lines, forged, refused_by

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.layout import JOURNAL, segment_name
from ckptfsm.testing.conformance import (
    RULES,
    Conformance,
    JournalViolation,
    assert_journal_conforms,
    check_segments,
)
from ckptfsm.testing.simfs import SimDisk, SimStorage

LEGAL = Forgery("", "", lambda segments: None)


def lay_out(root: Path, segments: dict[int, bytes]) -> Path:
    directory = root / JOURNAL
    directory.mkdir(parents=True)
    for epoch, data in segments.items():
        (directory / segment_name(epoch)).write_bytes(data)
    return root


def test_I11_journals_of_the_library_conform(tmp_path: Path):
    """Catches: a judge that refuses what is legal; a directory and a storage judged differently."""
    root = lay_out(tmp_path / "root", forged(LEGAL))
    found = assert_journal_conforms(root)
    assert found.segments == 3
    assert found.transitions > 20
    assert found.records > found.transitions
    assert assert_journal_conforms(str(root)) == found
    assert assert_journal_conforms(PosixStorage(root)) == found


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_I11_an_illegal_journal_is_refused_by_its_rule(forgery: Forgery):
    """Catches: a rule that is not enforced, or another one that refuses by accident."""
    assert refused_by(forged(forgery)) == forgery.rule


def test_every_rule_is_broken_by_some_forgery():
    """Catches: a rule that is only written down."""
    elsewhere = {"file", "line"}  # the two tests below
    assert {forgery.rule for forgery in FORGERIES} | elsewhere == set(RULES)


def test_F20_damage_before_an_intact_record_is_refused_and_named():
    """Catches: a flipped bit that hides a record; an error that does not say where."""
    with pytest.raises(JournalViolation) as caught:
        check_segments(damaged_lines())
    assert (caught.value.rule, caught.value.record) == ("line", 1)
    assert caught.value.file.endswith("000003.ndjson")
    assert RULES["line"] in str(caught.value)


@pytest.mark.damages_journal("puts a FIFO in the place of a segment")
def test_a_segment_that_is_no_file_is_refused_at_once(tmp_path: Path):
    """Catches: a judge that waits for ever for a writer of a FIFO."""
    root = lay_out(tmp_path / "root", forged(LEGAL))
    os.mkfifo(root / JOURNAL / segment_name(4))
    for place in (root, PosixStorage(root)):
        with pytest.raises(JournalViolation) as caught:
            assert_journal_conforms(place)
        assert caught.value.rule == "file"


@pytest.mark.parametrize("left", [b"\0" * 700, b'{"crc":"00', b"\xff\n\nxx\n"])
def test_F4_F13_journals_after_a_crash_or_a_zombie_conform(left: bytes):
    """Catches: an alarm at a torn tail, bytes after a seal, a segment without a beginning or a
    seal."""
    legal = forged(LEGAL)
    found = check_segments(legal)
    crashed = {epoch: data + left for epoch, data in legal.items()}
    assert check_segments(crashed) == found
    assert check_segments({**legal, 4: b"\n" * 16384, 5: b""}).ignored == 2
    alone = {epoch: data for epoch, data in legal.items() if epoch > 1} | {1: b""}
    assert refused_by(alone) == "seal"


def test_F20_a_segment_that_somebody_else_removed_is_a_gap_if_the_judge_is_told_so():
    """Catches: an alarm for each file that a purge took; a judge that is blind behind the gap."""
    legal = forged(LEGAL)
    for gone in sorted(legal)[:-1]:
        left = {epoch: data for epoch, data in legal.items() if epoch != gone}
        assert refused_by(left) == "seal"
        assert check_segments(left, lost=(gone,)).segments == len(left)
        assert check_segments(legal, lost=(gone,)) == check_segments(legal)
        with pytest.raises(JournalViolation):
            check_segments({**left, max(left): damaged_lines()[max(left)]}, lost=(gone,))


def test_a_root_without_a_journal_conforms(tmp_path: Path):
    """Catches: an error where there is nothing to judge."""
    assert assert_journal_conforms(tmp_path) == Conformance()
    assert assert_journal_conforms(tmp_path / "missing") == Conformance()
    assert assert_journal_conforms(SimStorage(SimDisk(), "judge")) == Conformance()


@pytest.mark.damages_journal("it is the watch itself that is tried")
def test_the_watch_over_all_tests_sees_an_illegal_journal(request, tmp_path: Path):
    """Catches: a suite with journals that are no longer judged."""
    watch = request.config.pluginmanager.get_plugin("journal-watch")
    illegal = forged(next(f for f in FORGERIES if f.rule == "steps-grow"))
    watch.judge_place(lay_out(tmp_path / "root", illegal))
    assert "steps-grow" in watch.problems.pop()
    watch.judging = True
    disk = SimDisk()
    watch.judging = False
    storage = SimStorage(disk, "forger")
    for directory in (".ckptfsm", JOURNAL):
        storage.mkdir(directory)
    disk.plant_file(f"{JOURNAL}/{segment_name(3)}", illegal[3] + b"\n")
    disk.plant_file(f"{JOURNAL}/{segment_name(1)}", illegal[1])
    del storage, disk
    gc.collect()
    assert "a SimDisk" in watch.problems.pop()
