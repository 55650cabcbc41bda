"""The table of a proof run: skipped, violated or unexercised rows are never hidden."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mutants.catalogue import MUTANTS
from proof import determinism, exhaustive, mutants, running
from proof.__main__ import judge_coverage
from proof.catalogue import LAYERS, layers_of
from proof.coverage import ALL_PAIRS, ALL_ROWS, ALL_RULES, Coverage
from proof.exhaustive import Found, _too_small, _unexercised_rules
from proof.faults import STATES, TABLE, applicable, cannot_happen, mark_of
from proof.layer import Budget, LayerResult, Violation
from proof.report import document, rows, table, unexercised
from proof.running import Running, run_one

from ckptfsm.core.lifecycle import State

EVERYWHERE = ("pruned", "discarded", "quarantined", "any")  # their meaning is said for all faults


def everything(layer: str) -> LayerResult:
    coverage = Coverage.from_json(
        {
            "rows": dict.fromkeys(ALL_ROWS, 1),
            "pairs": dict.fromkeys(ALL_PAIRS, 1),
            "faults": dict.fromkeys(applicable("release"), 1),
            "rules": dict.fromkeys(ALL_RULES, 1),
        }
    )
    return LayerResult(layer, {"runs": 3}, coverage=coverage)


def test_every_fault_is_classified_in_every_state():
    """Catches: a fault that no layer has to exercise, a pair without a mark, and a mark without
    reason."""
    assert list(TABLE) == [f"F{number}" for number in range(1, 35)]
    assert [*sorted(STATES)] == sorted([*(state.value for state in State), "any"])
    for fault, line in TABLE.items():
        marks = {state: mark_of(fault, state) for state in STATES}  # raises if one has no mark
        assert set(marks.values()) <= set("xn=.") and "x" in marks.values(), fault
        own = {mark for state, mark in marks.items() if state not in EVERYWHERE}
        assert line.same or "=" not in own, f"{fault}: what means the same has no reason"
        assert line.never or "." not in marks.values(), f"{fault}: what cannot happen has no reason"


def test_a_required_pair_that_is_left_out_is_named():
    """Catches: a pair that is demanded of no profile, or of one that does not reach it."""
    assert "F6 x finalized" in applicable("pr") and not applicable("soak")
    assert set(applicable("pr")) <= set(applicable("nightly")) == set(applicable("release"))
    for pair in applicable("pr"):
        lacking = everything("simulation")
        del lacking.coverage.faults[pair]
        assert unexercised([lacking], "pr") == [f"fault {pair}"]


def test_a_strike_that_cannot_happen_is_red(capsys):
    """Catches: a table that says less than the truth, whatever part of the proof found it out."""
    struck = everything("simulation")
    struck.coverage.faults["F1 x tracked"] = 3  # means the same as another
    assert judge_coverage([struck], "release", whole=True)
    assert not any(map(cannot_happen, struck.coverage.faults))
    for pair in ("F3 x tracked", "F35 x tracked", "F3 x nowhere"):
        struck = everything("simulation")
        struck.coverage.faults[pair] = 2
        assert not judge_coverage([struck], "soak", whole=False)
        assert f"CANNOT HAPPEN, AND DID: {pair}, 2 times in simulation" in capsys.readouterr().out


def test_the_report_says_how_many_applicable_pairs_were_exercised():
    """Catches: a count that takes in strikes which are not asked for."""
    result, count = everything("simulation"), len(applicable("pr"))
    result.coverage.faults["F1 x tracked"] = 1
    assert f" {count} of {count} applicable fault x state" in document([result], "pr")
    del result.coverage.faults["F2 x tracked"]
    assert f" {count - 1} of {count} applicable fault x state" in document([result], "pr")


def test_unexercised_pairs_are_named():
    assert unexercised([everything("simulation")], "pr") == []
    lacking = everything("simulation")
    del lacking.coverage.rows[ALL_ROWS[0]], lacking.coverage.pairs[ALL_PAIRS[0]]
    del lacking.coverage.faults["F3 x finalized"]
    assert unexercised([lacking], "pr") == [
        f"row {ALL_ROWS[0]}",
        f"state x event {ALL_PAIRS[0]}",
        "fault F3 x finalized",
    ]


def test_a_search_that_offers_everything_does_not_count_for_rows_and_faults():
    """Catches: a coverage check that cannot fail."""
    found = unexercised([everything("exhaustive")], "pr")
    assert len(found) == len(ALL_ROWS) + len(applicable("pr"))


def test_skipped_and_violated_are_both_shown():
    bad = LayerResult("races", skipped="no spin")
    assert rows([bad])[0][1:5] == ("skipped: no spin", "0", "0", "-")
    bad.violations.append(Violation("I9", "two owners", "again"))
    assert rows([bad])[0][4] == "1"
    mutants = LayerResult("mutants", {"mutants": 2}, kills={"suites": 2})
    text = document([LayerResult("suites"), mutants], "pr")
    assert "| suites | " in text and " | 2 | `PYTHONPATH" in text and "races" in table([bad])
    mutants.kills["tests"] = 3
    assert rows([mutants])[0][5] == "3 by unit tests"


def test_a_sample_has_something_of_every_layer_of_the_gate():
    """Catches: a layer that `make test` leaves out, and a sample in which nothing is tried."""
    assert layers_of("sample") == layers_of("pr")
    sample = Budget("sample")
    assert (
        sample.pick(pr=7, nightly=9, release=9) == 1
        and sample.pick(pr=400, nightly=0, release=0) == 20
    )
    assert [*sample.some(range(5))] == [0] and len(Budget("pr").some(range(50))) == 50
    assert applicable("sample") == ()


def test_a_sample_of_mutants_breaks_every_promise():
    """Catches: a promise of which `make test` plants no bug."""
    chosen = mutants.sample_of(MUTANTS)
    assert {planted.breaks for planted in chosen} == {planted.breaks for planted in MUTANTS}
    assert len(chosen) < len(MUTANTS) / 5


def test_a_sample_runs_twice_for_determinism(monkeypatch):
    """Catches: a run that is compared with no other."""
    monkeypatch.setattr(determinism, "_elsewhere", lambda number: {"a": str(number)})
    assert len(determinism.run(Budget("sample", processes=1)).violations) == 1


def test_a_search_that_shrank_is_red():
    """Catches: bounds that were made smaller, and a search that is cut off before its end."""
    whole = Found("whole", states=exhaustive.STATES, closed=True)
    assert list(_too_small([whole])) == []
    for less in (replace(whole, states=exhaustive.STATES - 1), replace(whole, closed=False)):
        assert len(list(_too_small([less]))) == 1


def test_a_rule_of_recovery_that_is_not_exercised_is_red():
    """Catches: a rule that no state of the search asks for, and a check that lets it pass."""
    assert list(_unexercised_rules(everything("exhaustive").coverage)) == []
    lacking = everything("exhaustive").coverage
    del lacking.rules["put_back"]
    assert [v.what for v in _unexercised_rules(lacking)] == [
        "rule put_back of recovery was not exercised"
    ]


def test_another_trace_is_red(monkeypatch):
    """Catches: a check of determinism that finds every run equal."""
    monkeypatch.setattr(determinism, "_elsewhere", lambda number: {"a": "x", "b": str(number == 3)})
    found = determinism.run(Budget(processes=1)).violations
    assert [v.what for v in found] == ["b: 4 runs gave 2 different traces"]


@dataclass
class Elapsing:
    """Stands in for ``time``, and for a layer's process: only waiting makes the time pass."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def layer(self, name: str, budget: Budget, scratch: Path) -> Running:
        """A layer that goes on takes its hours, any other half an hour."""
        seconds = budget.hours * 3600 if LAYERS[name].goes_on else 1800.0
        file, ends = scratch / name, self.now + seconds

        def wait(timeout: float) -> None:
            self.now += 60.0
            if self.now < ends:
                raise subprocess.TimeoutExpired(name, timeout)

        done = LayerResult(name, seconds=seconds, notes=[f"{self.now}"])
        file.write_text(json.dumps(done.as_json()))
        cpus = min(LAYERS[name].cpus, budget.processes)
        return Running(name, cpus, SimpleNamespace(wait=wait, pid=0), file, self.now)


@pytest.mark.parametrize("hours", [0.25, 8.0])
@pytest.mark.parametrize("cpus", [1, 2, 8])
def test_a_soak_simulates_for_its_hours(monkeypatch, tmp_path, cpus, hours):
    """Catches: hours that are over before the simulation begins, a share for each of those side by
    side, and all the hours for one after another."""
    elapsing = Elapsing()
    monkeypatch.setattr(running, "time", elapsing)
    monkeypatch.setattr(running, "_start", elapsing.layer)
    results = running.run_all(layers_of("soak"), Budget("soak", cpus, hours=hours), tmp_path)
    going_on = [result for result in results if LAYERS[result.layer].goes_on]
    assert {result.layer for result in going_on} == {"simulation", "megatron_kills"}
    assert {result.seconds for result in going_on} == {hours * 3600}
    began = [float(result.notes[0]) for result in going_on]
    assert max(began) < 2400, "they run side by side, once the others make room"
    assert elapsing.now == pytest.approx(max(began) + hours * 3600, abs=2100)


@pytest.mark.parametrize(("name", "hours"), [("fuzz", 2.0), ("processes", 4.0)])
def test_a_layer_that_hangs_is_ended_at_its_limit(monkeypatch, tmp_path, name, hours):
    """Catches: one limit that a slow disk meets, and a run that waits for a hung layer for ever."""
    elapsing, ended = Elapsing(), []
    monkeypatch.setattr(running, "time", elapsing)
    monkeypatch.setattr(running, "_end", lambda layer: ended.append(elapsing.now))

    def hung(name: str, budget: Budget, scratch: Path) -> Running:
        started = elapsing.layer(name, budget, scratch)
        started.file.unlink()

        def wait(timeout: float) -> None:
            elapsing.now += 60.0
            raise subprocess.TimeoutExpired(name, timeout)

        process = SimpleNamespace(wait=wait, pid=0, returncode=-9)
        return replace(started, process=process)

    monkeypatch.setattr(running, "_start", hung)
    (result,) = running.run_all([name], Budget("release", hours=1.0), tmp_path)
    assert ended == [hours * 3600]
    assert "left no result" in result.violations[0].what


def test_only_the_gate_does_without_a_disk(monkeypatch, tmp_path):
    """Catches: a release that is proved in memory; a gate that waits for a disk."""
    started = []
    monkeypatch.setattr(running.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    monkeypatch.setenv("TMPDIR", "/the/disk")
    for profile in ("sample", "pr", "nightly", "release", "soak"):
        running._start("fuzz", Budget(profile), tmp_path)
    assert [e["TMPDIR"] for e in started] == [str(tmp_path)] * 2 + ["/the/disk"] * 3


def test_a_layer_that_breaks_is_a_violation(monkeypatch):
    import proof.fuzz

    monkeypatch.setattr(proof.fuzz, "run", lambda budget: 1 / 0)
    result = run_one("fuzz", Budget())
    assert "ZeroDivisionError" in result.violations[0].what
    assert LayerResult.from_json(json.loads(json.dumps(result.as_json()))) == result


@pytest.mark.parametrize("profile", ["sample", "pr", "nightly", "release", "soak"])
def test_every_profile_has_layers(profile):
    assert set(layers_of(profile)) <= set(LAYERS) and "simulation" in layers_of(profile)
