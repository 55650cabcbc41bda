"""The work of ``ckptfsm ls`` on a large root, counted: it grows with the checkpoints, no faster."""

from __future__ import annotations

from collections import Counter

import pytest
from cli_runs import said
from real_roots import crashed, real_job, real_root

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.ledger import Ledger
from ckptfsm.disk import journal

FEW, MANY = range(10, 40, 10), range(10, 130, 10)
_CALLS = ("listdir", "read", "stat", "entries", "digest")


@pytest.fixture
def calls(monkeypatch):
    """The calls of the storage, of the ledger's searches, and of the parser of records."""
    counted: Counter[str] = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **named):
            counted[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    for name in _CALLS:
        count(PosixStorage, name)
    for name in ("in_state", "latest"):
        count(Ledger, name)
    count(journal, "_decode_record")
    return counted


def listed(calls, capsys, root) -> tuple[Counter[str], int]:
    """The calls of a list, without those for records, and the number of records that were parsed."""
    calls.clear()
    said(capsys, "ls", "-r", root)
    found = Counter(calls)
    return found, found.pop("_decode_record")


def test_ls_reads_no_file_and_searches_no_ledger_once_for_each_checkpoint(tmp_path, calls, capsys):
    """Catches: a walk through the directories for sizes, and a search for the latest in each row."""
    (few, _), (many, _) = (
        listed(calls, capsys, real_root(tmp_path / str(len(steps)), *steps))
        for steps in (FEW, MANY)
    )
    assert few == many and sum(few.values()) < 40


def test_ls_parses_each_record_of_the_newest_segment_once(tmp_path, calls, capsys):
    """Catches: a second pass over the journal, for the times of a list."""
    for steps in (FEW, MANY):
        root = tmp_path / str(len(steps))
        real_root(root, *steps)
        _, parsed = listed(calls, capsys, root)
        assert parsed == 1 + 5 * len(steps) + 1  # the opening, five moves of each save, the closing


def test_ls_of_a_root_that_was_opened_again_knows_the_times_of_earlier_segments(tmp_path, capsys):
    """Catches: ages that begin anew with each start of the job, or are lost."""
    real_root(tmp_path, 10, 20)
    job = real_job(tmp_path)
    job.save(30)
    crashed(job)
    rows = [line.split() for line in said(capsys, "ls", "-r", tmp_path).splitlines()[3:]]
    assert [(step, state) for step, state, *_ in rows] == [
        ("10", "tracked"),
        ("20", "tracked"),
        ("30", "tracked"),
    ]
    assert all(age != "-" and unit in ("ms", "s") for _, _, age, unit, *_ in rows)
