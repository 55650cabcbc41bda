"""The garbage collector is paused, and comes back as the trainer had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckptfsm.adapters.garbage import collection_paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was = gc.isenabled()
    yield
    gc.enable() if was else gc.disable()


def test_collection_goes_on_after_the_block_and_after_an_error_in_it() -> None:
    """Catches: a trainer without a garbage collector from its first save on."""
    gc.enable()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError), collection_paused():
        raise OSError
    assert gc.isenabled()


def test_a_collector_that_the_trainer_switched_off_stays_off() -> None:
    """Catches: pauses of the collector in a job that collects by hand."""
    gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
