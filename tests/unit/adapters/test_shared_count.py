"""A count in shared memory: who adds, who reads, and which memory is given back."""

from __future__ import annotations

import os
import threading

import pytest

from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.segments import SharedSegment
from ckptfsm.adapters.shared_count import COUNT_BYTES, SharedCount


def test_the_threads_of_a_child_add_to_one_count():
    """Catches: a child's bytes that its trainer does not see, and those of threads that get lost."""
    count = SharedCount.for_children()

    def add() -> None:
        for _ in range(500):
            count.add(3)

    def work() -> None:
        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    child = fork_child(work, keep=(), count=count)
    assert child.wait(20.0).succeeded
    assert child.written_bytes() == count.value == 4 * 500 * 3


def test_a_descriptor_leads_to_the_same_count():
    """Catches: a process of the engine that counts where nobody reads; a descriptor that is kept."""
    segment = SharedSegment(COUNT_BYTES)
    ours = SharedCount(segment.view(0, COUNT_BYTES))
    fd = os.dup(segment.fileno())
    theirs = SharedCount.of_descriptor(fd)
    theirs.add(8)
    segment.close()
    assert ours.value == 8
    with pytest.raises(OSError):
        os.fstat(fd)
    before = len(os.listdir("/proc/self/fd"))
    theirs.close()
    assert len(os.listdir("/proc/self/fd")) < before
    assert ours.value == 8


def test_a_count_begins_again():
    """Catches: the bytes of a dead process that are counted twice."""
    count = SharedCount.for_children()
    count.add(5)
    count.reset()
    assert count.value == 0
