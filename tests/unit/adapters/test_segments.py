"""Memory that another process reads through a descriptor."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from functools import partial

import pytest

from ckptfsm.adapters.memory import OwnMemory
from ckptfsm.adapters.segments import SharedSegment, Span, SpanReader, is_in_segment, read_segment

SIZE = 3 * 4096 + 7


@pytest.fixture
def segment():
    made = SharedSegment(SIZE)
    made.view(0, SIZE)[:] = bytes(i % 251 for i in range(SIZE))
    yield made
    made.close()


def reader_of(segment: SharedSegment) -> SpanReader:
    spans = [Span(segment.address, segment.size, 0, 0)]
    return SpanReader(spans, partial(read_segment, [segment.fileno()]), OwnMemory())


def test_a_segment_is_read_through_its_descriptor(segment):
    """Catches: bytes at another place of the segment; a read that is short."""
    found = bytearray(5000)
    reader_of(segment).read(segment.address + 4000, memoryview(found))
    assert found == segment.view(4000, 5000)


def test_other_memory_is_read_the_usual_way(segment):
    """Catches: memory beside a segment that is taken from the segment."""
    outside = ctypes.create_string_buffer(b"outside", 7)
    found = bytearray(7)
    for spans in ([Span(segment.address, segment.size, 0, 0)], []):
        reader = SpanReader(spans, partial(read_segment, [segment.fileno()]), OwnMemory())
        reader.read(ctypes.addressof(outside), memoryview(found))
        assert found == b"outside"


def test_a_read_that_leaves_its_segment_is_an_error(segment):
    """Catches: bytes behind a segment in a file."""
    with pytest.raises(OSError, match="leave their segment") as raised:
        reader_of(segment).read(segment.address + SIZE - 5, memoryview(bytearray(6)))
    assert raised.value.errno == errno.EFAULT


def test_a_segment_that_ends_early_is_an_error(segment):
    """Catches: a file with zeros in place of the state, or a wait for bytes that never come."""
    spans = [Span(segment.address, 2 * SIZE, 0, 0)]
    reader = SpanReader(spans, partial(read_segment, [segment.fileno()]), OwnMemory())
    with pytest.raises(OSError, match="segment 0 ends before") as raised:
        reader.read(segment.address + SIZE - 5, memoryview(bytearray(6)))
    assert raised.value.errno == errno.EFAULT


def test_a_closed_segment_says_so(segment):
    """Catches: a descriptor of something else that is sent in its place."""
    fd = segment.fileno()
    segment.close()
    segment.close()
    for use in (segment.fileno, lambda: segment.view(0, 1)):
        with pytest.raises(OSError, match="was closed") as raised:
            use()
        assert raised.value.errno == errno.EBADF
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_memory_goes_with_the_last_view(segment):
    """Catches: a tensor in memory that was given back; a fork that does not know of the tensor's."""
    address, view = segment.address, segment.view(0, SIZE)
    wanted = bytes(view)
    segment.close()
    assert is_in_segment(address + SIZE - 1)
    assert not is_in_segment(address + SIZE)
    assert bytes(view) == wanted
    del view
    assert not is_in_segment(address)


def test_a_segment_keeps_its_size(segment):
    """Catches: a mapping whose reads end the process; a descriptor that leaks into children."""
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fileno(), 1)
    assert fcntl.fcntl(segment.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_segment_that_is_forgotten_leaves_no_descriptor():
    """Catches: a job that runs out of descriptors, an arena at a time."""
    fd = SharedSegment(SIZE).fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
