"""The begin of the last save, enumerated without a clock."""

from __future__ import annotations

import math
from itertools import product

import pytest

from ckptfsm.core.errors import ConfigError
from ckptfsm.core.preemption import UNMEASURED_S, lead_s, percentile_95, unix_time


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([7.0], 7.0),
        ([1.0, 9.0], 9.0),
        ([9.0, 1.0, 5.0], 9.0),
        ([float(n) for n in range(1, 20)], 19.0),
        ([float(n) for n in range(1, 21)], 19.0),
        ([float(n) for n in range(1, 101)], 95.0),
    ],
    ids=str,
)
def test_95_in_100_do_not_take_longer(values, found):
    """Catches: a mean in its place, an index that is off by one, values that are not sorted."""
    assert percentile_95(values) == found
    assert sum(v <= found for v in values) >= 0.95 * len(values)


def test_the_last_save_ends_in_time_although_another_one_has_just_begun():
    """Catches: a last save that waits for another one and is cut off by the end."""
    for save_s, look_s, left_s in product((1, 2, 5), (0, 1, 3), range(40)):
        if left_s <= lead_s(1000.0, [float(save_s)], [look_s]):
            continue
        at_next_look = left_s - look_s
        begins = at_next_look - look_s  # a step later
        assert begins - 2 * save_s > 0, (save_s, look_s, left_s)


def test_the_last_save_does_not_begin_much_too_early():
    """Catches: hours of training that are given away."""
    assert lead_s(86_400.0, [10.0] * 19 + [11.0], [3.0] * 19 + [900.0]) == 26.0


@pytest.mark.parametrize(("run", "lead"), [(86_400.0, 2 * UNMEASURED_S), (600.0, 300.0)])
def test_a_duration_that_was_not_measured_is_assumed(run: float, lead: float):
    """Catches: a first save that is cut off, and a short job that ends before it begins."""
    assert lead_s(run, (), ()) == lead < run


@pytest.mark.parametrize(
    "value", [3600, 0, -1.0, math.nan, math.inf, True, "1.7e9", None], ids=repr
)
def test_a_duration_is_no_time(value):
    """Catches: an hour taken for a time in 1970, so that the job ends at once."""
    with pytest.raises(ConfigError, match="Unix time"):
        unix_time(value)


def test_a_time_is_taken_as_it_is():
    assert unix_time(1_700_000_000) == 1.7e9
