"""The catalogue of public reports: each is red on the old semantics and green on the library."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fieldbugs import huggingface, megatron, newest, torchtitan, verl
from fieldbugs.catalogue import BY_NAME, PAGE, REPORTS, page, side_by_side
from fieldbugs.dropins import DROPINS
from fieldbugs.model import Action, search
from fieldbugs.report import Checked, check
from fieldbugs.saveloop import SaveLoop
from fieldbugs.today import OTHER, TESTS, TODAY
from proof import fieldbugs
from proof.coverage import Coverage
from proof.fieldbugs import violations

ROOT = Path(__file__).resolve().parents[3]
NAMES = [report.name for report in REPORTS]
HARMLESS = SaveLoop()


@pytest.fixture(scope="module")
def checked() -> dict[str, Checked]:
    """The checks so far, so that the page need not check it again."""
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_red_on_the_old_semantics_and_green_here(checked, name):
    """Catches: the reported bug in this library, or a model that shows nothing."""
    checked[name] = check(BY_NAME[name], Coverage())
    assert not checked[name].problems, side_by_side(checked[name])


def test_the_page_is_up_to_date(checked):
    """Catches: a report, a history or a verdict that the documentation does not have."""
    found = [checked.get(report.name) or check(report, Coverage()) for report in REPORTS]
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == page(found), "run: PYTHONPATH=tests python -m proof.fieldbugs --write"


def test_names_and_aliases_are_distinct():
    """Catches: a report that no command reaches."""
    assert len(BY_NAME) == sum(1 + len(report.aliases) for report in REPORTS)


def test_every_report_says_how_it_is_in_the_newest_versions():
    """Catches: a report without a finding, a finding whose report was renamed, or one in other words."""
    assert list(TODAY) == NAMES
    known = re.compile(r"(still there|changed|gone) \((run|read)\): ")
    assert [text for text in TODAY.values() if text != OTHER and not known.match(text)] == []


def test_a_row_marked_run_has_a_test_that_runs_it():
    """Catches: "run" without a repeatable test, and a test whose row says "read"."""
    marked = set()
    for node in ast.walk(ast.parse((ROOT / TESTS).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.field_bug":
            marked |= {ast.literal_eval(argument) for argument in node.args}
    assert marked == {name for name, text in TODAY.items() if "(run)" in text}


def test_every_report_of_a_trainer_with_a_drop_in_runs_against_it():
    """Catches: a report that only the library's manager was tried on, a test that was renamed."""
    kinds = (verl, megatron, newest, torchtitan, huggingface)
    reports = [report for kind in kinds for report in kind.REPORTS]
    without = {"bridge-5778"}  # retention is the library's
    assert list(DROPINS) == [each.name for each in reports if each.name not in without]
    for path, _, function in (test.partition("::") for tests in DROPINS.values() for test in tests):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, f"{path} has no {function}"


def test_a_model_that_is_not_red_is_a_violation():
    """Catches: a catalogue that stays green whatever its models do."""
    found = check(replace(BY_NAME["verl-4873"], old=HARMLESS), Coverage())
    assert "the old semantics is not red" in violations(found)[0].what


def test_a_mended_model_that_is_red_is_a_violation():
    """Catches: a model that is red for another reason."""
    report = BY_NAME["verl-4638-tracker"]
    found = check(replace(report, mended=report.old), Coverage())
    assert [v.replay for v in violations(found)] == ["make repro-verl-4638-tracker"]


def test_an_expectation_that_does_not_hold_is_a_violation():
    """Catches: errors of the replay that are never told."""

    def never(trainer: object) -> None:
        raise AssertionError("not so")

    found = check(replace(BY_NAME["skyrl-2145"], expect=never), Coverage())
    assert "ckptfsm is not green: AssertionError: not so" in violations(found)[0].what
    assert "RED    ckptfsm" in side_by_side(found)


def test_the_shortest_history_comes_first():
    """Catches: a search that is not breadth first."""
    model = BY_NAME["verl-4638-tracker"].old
    assert search(model).history == (Action("save", 100), Action("kill"), Action("restart"))
    assert search(HARMLESS).history == ()


def test_the_command_line(capsys):
    """Catches: a name that is listed and not found, an exit status that says nothing."""
    assert fieldbugs.main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == NAMES
    assert fieldbugs.main(["rllm-899"]) == 2
    assert fieldbugs.main(["metaseq-53"]) == 0
    out = capsys.readouterr().out
    assert "disk full under the writers of 100" in out and "failed: ENOSPC" in out
