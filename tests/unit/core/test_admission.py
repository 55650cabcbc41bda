"""Decisions about room for a save, enumerated without a disk."""

from __future__ import annotations

from itertools import product

import pytest

from ckptfsm.core.admission import Admission, Space, decide_admission, predict_bytes

SIZES = range(4)


def all_spaces() -> list[Space]:
    return [Space(*facts) for facts in product(SIZES, SIZES, SIZES, (False, True))]


def test_a_save_is_admitted_exactly_if_its_bytes_are_free():
    """Catches: a save that fills the disk, or the refusal of one that just fits."""
    admitted = {s for s in all_spaces() if decide_admission(s) is Admission.ADMIT}
    assert admitted == {s for s in all_spaces() if s.needed <= s.free}


def test_I7_pruning_comes_first_only_where_it_lets_the_save_begin():
    """Catches: checkpoints that go although the save is refused all the same, or although the newest
    one was never read."""
    for space in all_spaces():
        enough = space.free < space.needed <= space.free + space.to_prune
        pruned = decide_admission(space) is Admission.PRUNE_FIRST
        assert pruned == (enough and space.to_prune > 0 and space.proven), space


def test_nothing_is_decided_again_once_nothing_is_given_up():
    """Catches: a second prune for the same save."""
    left = [s for s in all_spaces() if s.to_prune == 0]
    assert {decide_admission(s) for s in left} == {Admission.ADMIT, Admission.REFUSE}


@pytest.mark.parametrize(
    ("expected", "earlier", "size"),
    [
        (0, [], 0),
        (700, [], 700),
        (0, [100], 105),
        (0, [200, 400, 100], 420),
        (0, [300, 200, 100, 400], 315),
        (0, [0, 0, 0, 400], 0),
        (700, [100], 700),
        (700, [1000], 1050),
    ],
    ids=str,
)
def test_a_size_is_predicted_from_the_state_and_the_last_three(expected, earlier, size):
    """Catches: a foreign request of unknown size taken for an empty one, and a state that has grown
    taken for the earlier one."""
    assert predict_bytes(expected, earlier) == size
