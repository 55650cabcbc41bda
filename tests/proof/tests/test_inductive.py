"""The unbounded proof: it holds, it can fail, and its relation is the table's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from proof import inductive as layer
from proof.coverage import ALL_ROWS, Coverage

from ckptfsm.core import ledger as ledger_module
from ckptfsm.core import lifecycle
from ckptfsm.core.lifecycle import State


@pytest.fixture(scope="module")
def spec():
    return layer.load_spec()


def test_every_promise_of_I1_I2_and_I7_has_a_control(spec):
    """Catches: a promise in the proof that nothing was ever seen to break."""
    promises = {name for name in (*spec.INVARIANT, *spec.STEPS) if name[:2] in ("I1", "I2", "I7")}
    assert promises <= {control.breaks for control in layer.CONTROLS}


def test_the_relation_has_every_row_of_the_table_and_nothing_more(spec):
    """Catches: a row added to, taken from or renamed in the table alone, or in the relation alone."""
    assert list(layer.rows_differ(spec)) == []
    assert len(spec.ROWS) == len(ALL_ROWS)


def test_a_broken_rule_is_red_and_shown(spec, monkeypatch):
    """Catches: a proof that passes over a counterexample, or cannot print it."""
    properties = layer.properties
    told = "I7 what a reader was told is there, is there"

    def one(spec, rule, world):
        return {told: properties(spec, rule, world)[told]}

    monkeypatch.setattr(layer, "properties", one)
    rule = next(r for r in spec.EFFECTS if r.name == "trash emptied")
    kept = {n: c for n, c in rule.conditions.items() if n != "no prune is undecided"}
    found = dict(layer.prove(spec, (replace(rule, conditions=kept),)))
    shown = found[f"trash emptied: {told}"]
    assert "held: checkpoint" in shown and "trash" in shown


def changed_row(event: str, **fields) -> tuple[lifecycle.Row, ...]:
    changed = [r for r in lifecycle.TABLE if r.event.name == event]
    return tuple(replace(r, **fields) if r is changed[0] else r for r in lifecycle.TABLE)


def test_an_unknown_of_z3_is_red(spec, monkeypatch):
    """Catches: a solver that gave up, taken for a proof."""
    monkeypatch.setattr(layer, "WORK_LIMIT", 10)
    assert next(layer.prove(spec), None) is not None


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("superseded", {"guard": None}),
        ("cleaned", {"guard": None}),
        ("removed", {"source": State.TRACKED}),
        ("tracker_written", {"dest": State.PRUNABLE}),
        ("shard_reported", {"guard": lambda c, e: True}),
    ],
    ids=("superseded", "cleaned", "removed", "tracker_written", "shard_reported"),
)
def test_a_changed_table_disagrees(spec, monkeypatch, event, fields):
    """Catches: an agreement that would agree with anything."""
    monkeypatch.setattr(lifecycle, "TABLE", changed_row(event, **fields))
    monkeypatch.setattr(ledger_module, "apply", lifecycle.apply_row)
    found = [what for _, what in layer.agree(spec, 3000, Coverage()) if "random cases" not in what]
    assert found


def test_a_ledger_that_offers_the_latest_disagrees(spec, monkeypatch):
    """Catches: an agreement that looks at the table and not at what the ledger adds (I7)."""
    original = ledger_module.Ledger._offer

    def offer(self, checkpoint, latest, preserved):
        return replace(original(self, checkpoint, latest, preserved), kept_by=())

    monkeypatch.setattr(ledger_module.Ledger, "_offer", offer)
    assert any("to_prune" in what for _, what in layer.agree(spec, 3000, Coverage()))


def test_random_cases_are_the_same_every_time():
    """Catches: a failing case that cannot be shown again by its number."""
    drawn = [layer.random_ledger(random.Random(7)) for _ in range(2)]
    assert drawn[0].checkpoints == drawn[1].checkpoints and drawn[0].pins == drawn[1].pins
