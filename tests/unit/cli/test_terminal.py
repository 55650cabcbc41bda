"""Lines for a terminal of 80 columns: folded between words, and commands in one piece."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
from cli_runs import ran
from real_roots import real_root

from ckptfsm.cli.examining import lines_of
from ckptfsm.cli.terminal import folded, put
from ckptfsm.core import findings
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.evidence import Evidence, Owner, Ownership, TrackerEvidence
from ckptfsm.core.findings import BY_RULE, Situation, examine
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.rollback import Intent

WIDTH = 80
CLEAR = "\x1b[H\x1b[2J"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("short", ["short"]),
        ("x" * WIDTH, ["x" * WIDTH]),
        (f"{'a ' * 39}ab cd", [f"{'a ' * 39}ab", "    cd"]),
        (f"  - {'ab ' * 30}", [f"  - {'ab ' * 25}".rstrip(), f"      {'ab ' * 5}".rstrip()]),
        (f"at /{'x' * WIDTH} now", ["at", f"    /{'x' * WIDTH}", "    now"]),
        (f"a  b {'x' * WIDTH}", ["a  b", f"    {'x' * WIDTH}"]),
    ],
    ids=["short", "exactly", "words", "indented", "a path", "columns"],
)
def test_a_long_line_is_folded_between_words(line, lines):
    """Catches: a path that cannot be copied, a word in two pieces, columns that are lost."""
    assert folded(line, WIDTH) == lines


def test_a_way_out_fits_in_a_line():
    """Catches: a command that the terminal breaks, so that a person cannot copy it."""
    remedies = [remedy for _, _, remedy in BY_RULE.values()]
    remedies += [text for name, text in vars(findings).items() if re.match("_[A-Z_]+$", name)]
    remedies = [each for each in remedies if isinstance(each, str)]
    assert len(remedies) > len(BY_RULE)
    filled = [each.format(name="1234567.e123.a123") for each in remedies]
    assert [each for each in filled if len(f"    do: {each}") > WIDTH] == []


def test_the_newest_of_the_quarantine_is_offered_where_nothing_else_is_left():
    """Catches: the ninth step offered before the tenth, a name that no command takes."""
    refused = DamagedRoot("nothing is whole", evidence=("step 10",))
    aside = ("100.e1.a2", "9.e1.a1", "notes")
    facts = Situation(
        Ledger(),
        Evidence(TrackerEvidence("missing")),
        Intent(),
        Owner(Ownership.ENDED, 1),
        refused,
        quarantined=aside,
    )
    assert "    do: put a good copy back, or: ckptfsm quarantine restore 100.e1.a2" in lines_of(
        examine(facts)
    )


@pytest.fixture
def forced(monkeypatch):
    """A terminal of 40 columns with colour, as other programs are told of it, too."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "40"), ("LINES", "24")):
        monkeypatch.setenv(name, value)


def test_a_terminal_shows_states_in_colour_and_folds_long_lines(forced, capsys, monkeypatch):
    """Catches: colour in the midst of a word, folds that count the letters of a colour."""
    put(["10 tracked", f"{'failed ' * 5}again and untracked"])
    green, red, end = "\x1b[32m", "\x1b[31m", "\x1b[0m"
    failed = " ".join([f"{red}failed{end}"] * 5)
    shown = [f"10 {green}tracked{end}", f"{failed} again", "    and untracked"]
    assert capsys.readouterr().out.splitlines() == shown
    monkeypatch.setenv("NO_COLOR", "1")
    put(["10 tracked"])
    assert capsys.readouterr().out == "10 tracked\n"


def test_a_list_that_is_watched_begins_a_new_screen(forced, tmp_path, capsys, monkeypatch):
    """Catches: lists below each other, or a screen of letters where output goes into a file."""
    real_root(tmp_path, 10)
    ended = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr("ckptfsm.cli.reading.time.sleep", ended)
    status, out, _ = ran(capsys, "ls", "--watch", "1", "-r", tmp_path)
    assert status == 130 and out.startswith(CLEAR) and out.count(CLEAR) == 2
    monkeypatch.delenv("FORCE_COLOR")
    ended.side_effect = KeyboardInterrupt
    assert "\x1b" not in ran(capsys, "ls", "--watch", "1", "-r", tmp_path)[1]
