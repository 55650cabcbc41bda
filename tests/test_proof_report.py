"""The table of a proof run: what was skipped, violated or not exercised is never hidden."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from proof import determinism, exhaustive
from proof.catalogue import LAYERS, hours_of, layers_of
from proof.exhaustive import Found, _too_small
from proof.faults import APPLICABLE
from proof.layer import Budget, LayerResult, Violation
from proof.report import document, rows, table, unexercised
from proof.running import run_one

from ckptfsm.testing.coverage import ALL_PAIRS, ALL_ROWS, Coverage


def everything(layer: str) -> LayerResult:
    expected = [f"{fault} x {state}" for fault, states in APPLICABLE.items() for state in states]
    coverage = Coverage.from_json(
        {
            "rows": dict.fromkeys(ALL_ROWS, 1),
            "pairs": dict.fromkeys(ALL_PAIRS, 1),
            "faults": dict.fromkeys(expected, 1),
        }
    )
    return LayerResult(layer, {"runs": 3}, coverage=coverage)


def test_every_fault_of_the_list_has_its_states():
    """Catches: a fault that nobody has to exercise."""
    assert list(APPLICABLE) == [f"F{number}" for number in range(1, 35)]
    assert all(APPLICABLE.values())


def test_what_nobody_exercised_is_named():
    assert unexercised([everything("simulation")]) == []
    lacking = everything("simulation")
    del lacking.coverage.rows[ALL_ROWS[0]], lacking.coverage.pairs[ALL_PAIRS[0]]
    del lacking.coverage.faults["F3 x finalized"]
    assert unexercised([lacking]) == [
        f"row {ALL_ROWS[0]}",
        f"state x event {ALL_PAIRS[0]}",
        "fault F3 x finalized",
    ]


def test_a_search_that_offers_everything_does_not_count_for_rows_and_faults():
    """Catches: a coverage check that cannot fail."""
    found = unexercised([everything("exhaustive")])
    assert len(found) == len(ALL_ROWS) + sum(map(len, APPLICABLE.values()))


def test_skipped_and_violated_are_both_shown():
    bad = LayerResult("races", skipped="no spin")
    assert rows([bad])[0][1:4] == ("skipped: no spin", "0", "-")
    bad.violations.append(Violation("I9", "two owners", "again"))
    assert rows([bad])[0][3] == "1"
    mutants = LayerResult("mutants", {"mutants": 2}, kills={"suites": 2})
    text = document([LayerResult("suites"), mutants], "pr")
    assert "| suites | " in text and " | 2 | `PYTHONPATH" in text and "races" in table([bad])
    mutants.kills["tests"] = 3
    assert rows([mutants])[0][4] == "3 by unit tests"


def test_a_search_that_shrank_is_red():
    """Catches: bounds that were made smaller, and a search that is cut off before its end."""
    whole = Found("whole", states=exhaustive.STATES, closed=True)
    assert list(_too_small([whole])) == []
    for less in (replace(whole, states=exhaustive.STATES - 1), replace(whole, closed=False)):
        assert len(list(_too_small([less]))) == 1


def test_another_trace_is_red(monkeypatch):
    """Catches: a check of determinism that finds every run equal."""
    monkeypatch.setattr(determinism, "_elsewhere", lambda number: {"a": "x", "b": str(number == 7)})
    found = determinism.run(Budget(processes=1)).violations
    assert [v.what for v in found] == ["b: 20 runs gave 2 different traces"]


def test_the_hours_of_a_soak_are_shared():
    """Catches: a soak that takes a multiple of the hours that a person gave it."""
    assert sum(hours_of(name, 8.0, layers_of("soak")) for name in layers_of("soak")) == 8.0
    assert hours_of("simulation", 8.0, ["simulation"]) == 8.0


def test_a_layer_that_breaks_is_a_violation(monkeypatch):
    import proof.traces

    monkeypatch.setattr(proof.traces, "run", lambda budget: 1 / 0)
    result = run_one("traces", Budget())
    assert "ZeroDivisionError" in result.violations[0].what
    assert LayerResult.from_json(json.loads(json.dumps(result.as_json()))) == result


@pytest.mark.parametrize("profile", ["pr", "nightly", "release", "soak"])
def test_every_profile_has_layers(profile):
    assert set(layers_of(profile)) <= set(LAYERS) and "simulation" in layers_of(profile)
