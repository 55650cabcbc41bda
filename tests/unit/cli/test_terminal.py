"""Lines for a terminal of 80 columns: folded between words, and commands in one piece."""

from __future__ import annotations

import re

import pytest

from ckptfsm.cli.examining import lines_of
from ckptfsm.cli.terminal import folded
from ckptfsm.core import findings
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.evidence import Evidence, Owner, Ownership, TrackerEvidence
from ckptfsm.core.findings import BY_RULE, Situation, examine
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.rollback import Intent

WIDTH = 80


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
