"""The memory of a job's images: each byte once, and copies of it."""

from __future__ import annotations

import ctypes

import pytest

from ckptfsm.core.images import Memory
from ckptfsm.writers.trainers_memory import (
    Arena,
    Range,
    arena_bytes,
    frozen,
    ranges_of,
)


def test_memory_that_several_tensors_share_counts_once():
    """Catches: tied weights that are copied twice; a tensor that lies in no range as a whole."""
    ranges = ((5000, 100), (1000, 50), (1000, 80), (1040, 70), (1110, 10))
    found = ranges_of(Memory(*each) for each in ranges)
    assert found == [Range(1000, 110), Range(1110, 10), Range(5000, 100)]
    assert ranges_of([]) == []


def test_frozen_memory_is_read_as_it_was():
    """Catches: a later change in a checkpoint; bytes of another place."""
    memory = ctypes.create_string_buffer(b"0123456789", 10)
    address, found = ctypes.addressof(memory), bytearray(3)
    reader = frozen([Range(address + 2, 5)])
    ctypes.memset(memory, ord("x"), 10)
    reader.read(address + 3, memoryview(found))
    assert found == b"345"
    reader.read(address + 7, memoryview(found))
    assert found == b"xxx"


def test_an_arena_has_the_bytes_of_its_ranges():
    """Catches: a copy at another place than its span says; a piece that is left out."""
    sizes = (1, 100, 9 << 20, 70)
    memory = [
        ctypes.create_string_buffer(bytes([65 + i]) * size, size) for i, size in enumerate(sizes)
    ]
    ranges = [Range(ctypes.addressof(each), len(each)) for each in memory]
    arena = Arena(arena_bytes(ranges))
    spans = arena.take(ranges)
    assert [(s.address, s.size, s.number) for s in spans] == [(*each, 0) for each in ranges]
    for each, span in zip(memory, spans, strict=True):
        assert arena.segment.view(span.offset, span.size) == each.raw
    with pytest.raises(ValueError, match="do not fit"):
        arena.take([*ranges, ranges[0]])


def test_a_copy_lets_other_threads_run():
    """Catches: two copying threads that take turns, and a trainer whose threads wait for them."""
    assert not ctypes.memmove._flags_ & ctypes._FUNCFLAG_PYTHONAPI
