"""Whatever can happen to a root, by subject: each ``.txt`` here holds histories as golden text.

``script`` says how they are written. ``CKPTFSM_UPDATE_GOLDEN=1`` (and not ``-n``) rewrites them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from script import History, golden, read

FILES = sorted(Path(__file__).parent.glob("*.txt"))
UPDATE = os.environ.get("CKPTFSM_UPDATE_GOLDEN") == "1"


def _parameters():
    for file in FILES:
        for history in read(file):
            reason = history.damages_journal
            marks = [pytest.mark.damages_journal(reason)] * bool(reason)
            yield pytest.param(file, history, id=f"{file.stem}/{history.name}", marks=marks)


@pytest.mark.parametrize(("file", "history"), _parameters())
def test_history(file: Path, history: History):
    """Catches: any change of the fate of a root, as a diff that a person can read."""
    stands = golden(file)[history.name]
    rendered = history.render()
    if UPDATE:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(stands, rendered), encoding="utf-8")
    else:
        assert rendered == stands


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_history_names_the_bug_it_catches(file: Path):
    """Catches: a script without a purpose, or one that was never played; two of one name."""
    histories = read(file)
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert len({history.name for history in histories}) == len(histories)
    for history in histories:
        assert "Catches: " in " ".join(history.comments), history.name
        told = golden(file)[history.name]
        assert history.lines and "\n    " in told, history.name
        meant = "never called" in " ".join(history.comments)
        assert ("    never called" in told) == meant, f"{history.name}: a fault that never struck"


SHORT = """== short
> open
    = tracked nothing; no tracker; no steps
> save 1
    = tracked 1; tracker 1; @1=a
"""


def test_a_wrong_golden_line_is_noticed(tmp_path: Path):
    """Catches: a runner that compares a file with itself."""
    file = tmp_path / "short.txt"
    file.write_text(SHORT)
    (short,) = read(file)
    assert short.render() == golden(file)["short"]
    file.write_text(SHORT.replace("tracked 1", "tracked 2"))
    assert short.render() != golden(file)["short"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no such thing 1", "no such command: no such thing 1"),
        ("save 1", "no job lives"),
        ("sweep die: nothing", "0 calls were swept"),
    ],
)
def test_a_line_that_does_nothing_is_an_error(line: str, said: str):
    """Catches: a command that is misspelt, or a sweep of nothing, and a history that is green for it."""
    with pytest.raises(AssertionError, match=said):
        History("wrong", [], [line]).render()


def test_a_fault_that_never_struck_is_told():
    """Catches: a history whose fault waits for a call that is no longer made."""
    story = History("waits", [], ["open", "when rename nowhere: die", "save 1"])
    assert "    never called: rename nowhere" in story.render().splitlines()
