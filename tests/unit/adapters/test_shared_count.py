"""A count in shared memory: who adds, who reads, and which memory is given back."""

from __future__ import annotations

import os
import threading

import pytest

from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.segments import SharedSegment
from ckptfsm.adapters.shared_count import CELLS, COUNT_BYTES, SharedCount


def test_processes_and_their_threads_add_to_one_count():
    """Catches: a child's bytes that its trainer does not see, and those of threads that get lost."""
    count = SharedCount.for_children()

    def work(number: int) -> None:
        add = count.adder(number)
        threads = [threading.Thread(target=lambda: [add(3) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for number in (0, 1):
        child = fork_child(lambda number=number: work(number), keep=(), group=True, count=count)
        assert child.wait(20.0).succeeded
        assert child.written_bytes() == count.value == (number + 1) * 4 * 500 * 3


def test_a_descriptor_leads_to_the_same_count():
    """Catches: a process of the engine that counts where nobody reads; a descriptor that is kept."""
    segment = SharedSegment(COUNT_BYTES)
    ours = SharedCount.of_segment(segment)
    fd = os.dup(segment.fileno())
    theirs = SharedCount.of_descriptor(fd)
    theirs.adder()(7)
    theirs.adder(CELLS + 5)(1)
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
    count.adder(2)(5)
    count.adder()(6)
    count.reset()
    assert count.value == 0
