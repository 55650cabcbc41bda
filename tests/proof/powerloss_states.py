"""The states of a disk after the power failed, from the writes that it was sent. Pure.

Rules: a flush makes every earlier write durable. Any subset of the writes since the last flush may
have reached the medium, each of them whole or only some of its sectors. If two writes to one place
were kept, the later one wins. Nothing else is ever lost. A sector arrives whole or not at all; its
size is the one that the file system counts on (ext4: the 1,024 bytes of its superblock).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from proof.powerloss_disk import Image, Record

_DRAWS_PER_STATE = 8  # small windows have few subsets: drawing one again is normal


@dataclass(frozen=True, order=True)
class CrashState:
    """The power failed once ``end`` records were sent.

    ``lost``: of which writes since the last flush (by index) which sectors are missing, as a bit mask.
    """

    end: int
    lost: tuple[tuple[int, int], ...] = ()

    def explain(self, records: Sequence[Record]) -> str:
        begin = _last_flush(records, self.end)
        lost = []
        for index, mask in self.lost:
            record = records[index]
            assert record is not None
            size = len(record[1])
            lost.append(f"{index} ({size} bytes, sectors {mask:#x})")
        missing = f", lost writes: {', '.join(lost)}" if lost else ""
        return f"power failed after record {self.end} (last flush: {begin}){missing}"


@dataclass
class Recording:
    """A workload on a disk: the image it began on, the writes to the disk, and the promises at each
    time.

    ``promises``: (position in ``records``, least step that the tracker must name from there on).
    ``calls``: (position, storage call that began there), for people.
    """

    name: str
    filesystem: str
    sector: int
    base: Image
    records: list[Record] = field(default_factory=list)
    promises: list[tuple[int, int | None]] = field(default_factory=list)
    calls: list[tuple[int, str]] = field(default_factory=list)

    def promised(self, state: CrashState) -> int | None:
        """The steps acknowledged before the power failed."""
        made = [step for position, step in self.promises if position <= state.end]
        return made[-1] if made else None

    def explain(self, state: CrashState) -> str:
        begun = [call for position, call in self.calls if position <= state.end]
        during = f" during {begun[-1]}" if begun else ""
        where = f"{self.name} on {self.filesystem}"
        return f"{where}: {state.explain(self.records)}{during}"


class Builder:
    """Makes the images of crash states; quickest when they come in order of ``end``."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._rewind()

    def _rewind(self) -> None:
        self._image, self._done = self._recording.base.copy(), 0

    def build(self, state: CrashState) -> Image:
        records = self._recording.records
        begin = _last_flush(records, state.end)
        if begin < self._done:
            self._rewind()
        for record in records[self._done : begin]:
            if record is not None:
                self._image.write(*record)
        self._done = begin
        image, lost = self._image.copy(), dict(state.lost)
        for index in range(begin, state.end):
            record = records[index]
            if record is not None:
                for offset, data in _kept(record, lost.get(index, 0), self._recording.sector):
                    image.write(offset, data)
        return image


def prefix_states(recording: Recording) -> list[CrashState]:
    """Every write the last one that arrived, and none lost; also before the first."""
    return [CrashState(0)] + [
        CrashState(index + 1)
        for index, record in enumerate(recording.records)
        if record is not None
    ]


def drawn_states(recording: Recording, rng: random.Random, count: int) -> list[CrashState]:
    """Up to ``count`` different states in which something was lost, at the ends of windows.

    The end is the strongest place to judge: every subset of an earlier part is among its subsets, and
    all that was acknowledged within the window must hold.
    """
    windows = [window for window in _windows(recording.records) if window]
    weights = [len(window) for window in windows]
    found: dict[CrashState, None] = {}
    for _ in range(count * _DRAWS_PER_STATE if windows else 0):
        if len(found) >= count:
            break
        window = rng.choices(windows, weights)[0]
        lost = tuple(sorted(_draw_losses(recording, window, rng).items()))
        if lost:
            found[CrashState(window[-1] + 1, lost)] = None
    return list(found)


def _draw_losses(recording: Recording, window: list[int], rng: random.Random) -> dict[int, int]:
    """Which sectors of which writes are lost: one, all but one, some, or some torn."""
    whole = {}
    for index in window:
        record = recording.records[index]
        assert record is not None
        whole[index] = (1 << _sectors(record[1], recording.sector)) - 1
    kind = rng.choice(("one", "all_but_one", "some", "tear_one", "tear_all"))
    one = rng.choice(window)
    if kind == "one":
        return {one: whole[one]}
    if kind == "all_but_one":
        return {index: mask for index, mask in whole.items() if index != one}
    if kind == "some":
        return {index: mask for index, mask in whole.items() if rng.random() < 0.5}
    torn = {index: mask & rng.getrandbits(mask.bit_length()) for index, mask in whole.items()}
    if kind == "tear_one":
        torn = {one: torn[one]}
    return {index: mask for index, mask in torn.items() if mask}


def _windows(records: Sequence[Record]) -> Iterator[list[int]]:
    """The writes between two flushes, by index."""
    window: list[int] = []
    for index, record in enumerate(records):
        if record is None:
            yield window
            window = []
        else:
            window.append(index)
    yield window


def _last_flush(records: Sequence[Record], end: int) -> int:
    """How many of the first ``end`` records are durable for certain."""
    return next((index + 1 for index in range(end - 1, -1, -1) if records[index] is None), 0)


def _sectors(data: bytes, sector: int) -> int:
    return -(-len(data) // sector)


def _kept(record: tuple[int, bytes], lost: int, sector: int) -> Iterator[tuple[int, bytes]]:
    offset, data = record
    if not lost:
        yield record
        return
    for number in range(_sectors(data, sector)):
        if not lost >> number & 1:
            yield offset + number * sector, data[number * sector : (number + 1) * sector]
