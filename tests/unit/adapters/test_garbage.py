"""The garbage collector is paused, and comes back as the trainer had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckptfsm.adapters.garbage import collection_paused

PAUSED = (0, 11, 12)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was, thresholds = gc.isenabled(), gc.get_threshold()
    gc.set_threshold(10, 11, 12)
    yield
    gc.set_threshold(*thresholds)
    gc.enable() if was else gc.disable()


def test_collection_goes_on_after_the_block_and_after_an_error_in_it() -> None:
    """Catches: a trainer without a garbage collector from its first save on."""
    with collection_paused():
        assert gc.get_threshold() == PAUSED
    assert gc.get_threshold() == (10, 11, 12)
    with pytest.raises(OSError), collection_paused():
        raise OSError
    assert gc.get_threshold() == (10, 11, 12)


def test_nothing_is_collected_in_the_block() -> None:
    """Catches: a threshold that pauses nothing in this version of Python."""
    gc.enable()
    collected: list[str] = []
    note = lambda phase, info: collected.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        with collection_paused():
            made = [[] for _ in range(100)]
            assert collected == []
        made += [[] for _ in range(100)]
        assert collected
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("switch", [gc.enable, gc.disable])
def test_a_collector_that_the_trainer_switches_meanwhile_stays_so(switch: object) -> None:
    """Catches: a collector that is on again in a job that collects by hand."""
    enabled = switch is gc.enable
    (gc.disable if enabled else gc.enable)()
    with collection_paused():
        (gc.enable if enabled else gc.disable)()
    assert gc.isenabled() is enabled
    assert gc.get_threshold() == (10, 11, 12)


def test_thresholds_that_the_trainer_sets_meanwhile_stay() -> None:
    """Catches: the thresholds of the start put back over those of the trainer."""
    with collection_paused():
        gc.set_threshold(20, 21, 22)
    assert gc.get_threshold() == (20, 21, 22)


def test_two_pauses_at_once_leave_no_pause_behind() -> None:
    """Catches: the pause of one thread put back as the thresholds of the trainer by the other."""
    first, second = collection_paused(), collection_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (10, 11, 12)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (10, 11, 12)
