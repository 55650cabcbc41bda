"""The memory that a job's images name, and copies of it. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptfsm.adapters.memory import OwnMemory
from ckptfsm.adapters.segments import Span, SpanReader
from ckptfsm.writers.image import FromImages, Memory


class Range(NamedTuple):
    """``size`` bytes of this process at ``address``."""

    address: int
    size: int


def ranges_of(parts: Iterable[FromImages]) -> list[Range]:
    """The memory of all images, each byte once, in the order of addresses."""
    pieces = sorted(
        Range(piece.address, piece.size)
        for part in parts
        for image in part.images
        for piece in image.pieces
        if isinstance(piece, Memory)
    )
    found: list[Range] = []
    end = 0
    for address, size in pieces:
        if found and address < end:  # tensors that share memory
            start = found.pop().address
            end = max(end, address + size)
            found.append(Range(start, end - start))
        else:
            found.append(Range(address, size))
            end = address + size
    return found


def frozen(ranges: Sequence[Range]) -> SpanReader:
    """A reader of this process's memory, with copies of ``ranges`` as they are now."""
    copies = [ctypes.string_at(address, size) for address, size in ranges]

    def take(number: int, offset: int, into: memoryview) -> None:
        into[:] = memoryview(copies[number])[offset : offset + len(into)]

    spans = [Span(address, size, number, 0) for number, (address, size) in enumerate(ranges)]
    return SpanReader(spans, take, OwnMemory())
