"""Metrics that come after a save: which ones are taken, and how a ledger takes them."""

from __future__ import annotations

from fractions import Fraction
from types import MappingProxyType

import pytest
from ledgers import ledger_of

from ckptfsm.core.errors import ConfigError, IllegalTransition
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.recorded_metrics import MOST, MOST_LETTERS, check_metrics, measured

OF = AttemptId(5, 1, 1)


class Scalar:
    """Converts to a float as a tensor of one element does."""

    def __float__(self) -> float:
        return 0.5


class Vector:
    """Refuses as a tensor of several elements does."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        return "Vector"  # the name of a test: each process has to find the same


def test_numbers_of_any_type_become_floats():
    """Catches: a value in the journal that is not JSON."""
    given = MappingProxyType({"loss": 1, "val acc": Fraction(1, 4), "x": Scalar()})
    found = check_metrics(given)
    assert found == {"loss": 1.0, "val acc": 0.25, "x": 0.5}
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), True, "1.0", b"1", None, [1.0], 10**400, Vector()],
    ids=lambda value: repr(value)[:8],
)
def test_a_value_that_is_no_finite_number_is_refused(value):
    """Catches: NaN among the best, or a step that is kept for a metric that is no number."""
    with pytest.raises(ConfigError, match="has to be a (finite )?number") as caught:
        check_metrics({"loss": value})
    assert caught.value.metric == "loss"


def test_the_metrics_of_a_save_are_sorted_and_may_be_nan():
    """Catches: metrics in another order on another rank, which would be another request; a save that
    is lost for its metrics."""
    assert measured({"loss": 1, "acc": 0.5}) == (("acc", 0.5), ("loss", 1.0))
    assert measured(None) == measured({}) == ()
    assert repr(measured({"loss": float("nan")})) == "(('loss', nan),)"
    with pytest.raises(ConfigError, match="the metric 'loss' has to be a number, not 'low'"):
        measured({"loss": "low"})
    assert measured({3: True}) == (("3", 1.0),)
    with pytest.raises(ConfigError, match="a mapping of names to numbers"):
        measured(3.0)


@pytest.mark.parametrize("metrics", [None, [], {}, "loss", {f"m{i}": 1.0 for i in range(MOST + 1)}])
def test_no_mapping_of_a_few_metrics_is_refused(metrics):
    """Catches: a record that no reader takes."""
    with pytest.raises(ConfigError, match="mapping"):
        check_metrics(metrics)


@pytest.mark.parametrize("name", ["", 5, "a\nb", "\ud800", "x" * (MOST_LETTERS + 1)], ids=repr)
def test_F30_a_hostile_name_is_refused(name):
    """Catches: a name that cannot be journaled, or that moves a cursor."""
    with pytest.raises(ConfigError, match="name of a metric"):
        check_metrics({name: 1.0})


def test_a_metric_replaces_only_that_of_its_name():
    """Catches: the training loss lost for an evaluation."""
    checkpoint = Checkpoint(OF, State.TRACKED, metrics=(("loss", 3.0), ("lr", 0.1)))
    before = ledger_of(checkpoint)
    after = before.measured(OF, {"val": 2.0, "loss": 2.5})
    assert after.at(5).metrics == (("loss", 2.5), ("lr", 0.1), ("val", 2.0))
    assert before.at(5).metrics == (("loss", 3.0), ("lr", 0.1))


@pytest.mark.parametrize("state", [s for s in State if s is not State.TRACKED])
def test_I11_only_a_tracked_checkpoint_is_measured(state):
    """Catches: metrics in the journal for a checkpoint that no reader could have read."""
    ledger = Ledger() if state is State.ABSENT else ledger_of(Checkpoint(OF, state))
    with pytest.raises(IllegalTransition, match=state.value):
        ledger.measured(OF, {"val": 2.0})
