"""A rank's link to the coordinator: errors in the background do not end a job."""

from __future__ import annotations

import errno

from inline import InlineExecutor, NoDeferredSignals
from roots import (
    LATER,
    fails_to_look,
    judge,
    saved,
)

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.layout import EPOCHS
from ckptfsm.ranks.coordinator_client import CoordinatorClient
from ckptfsm.testing.simfs import SimDisk


def test_F9_a_stale_listing_in_the_background_stops_no_rank():
    """Catches: one error of the file system in housekeeping that is told to every rank as the end
    of the coordinator. An error after which nothing is done in the background any more."""
    disk = SimDisk()
    job = saved(disk, 1)
    link = CoordinatorClient(LocalTransport(), 60.0, NoDeferredSignals().hear)
    link.start(job.coordinator, InlineExecutor())
    failed = fails_to_look(job, "listdir", lambda p: p == EPOCHS, errno.ESTALE)
    job.clock.sleep(LATER)
    link.work_in_background()
    assert failed and not link.has_news
    assert link.exchange(()).fatal is None and job.coordinator.fatal is None
    job.save(2)
    job.clock.sleep(LATER)
    assert job.coordinator.wants_tick()
    link.work_in_background()
    assert not job.coordinator.wants_tick(), "the next tick was made"
    assert job.acknowledged == [1, 2] and judge(disk, 2) == 2
