"""The progress of a save: its arithmetic, and its text for a terminal and a log. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfsm.core.units import bytes_text

_BAR = 20
_LEAST_BAR = 6


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank's share of a save is on its way to the disk.

    - ``written_bytes``: bytes that the writer gave to the disk, at most ``total_bytes``. Files that
      other code writes, as a foreign request's, count when all are durable.
    - ``total_bytes``: the size of the share: planned, or expected where a fork writes. None if it is
      not known.
    - ``elapsed_s``: seconds since the save began, at most until the share was durable.
    - ``bytes_per_s``: the mean so far. ``eta_s``: seconds until all bytes are written at that rate;
      None while that cannot be told.
    - ``durable``: all shards of this rank are durable, and have their receipts.
    """

    written_bytes: int
    total_bytes: int | None
    elapsed_s: float
    bytes_per_s: float
    eta_s: float | None
    durable: bool = False

    @property
    def fraction(self) -> float | None:
        """The written share of the total, from 0 to 1; None if the total is not known."""
        return self.written_bytes / self.total_bytes if self.total_bytes else None


def progress_of(
    written: int, total: int | None, elapsed_s: float, *, durable: bool = False
) -> Progress:
    """The progress of a share. A durable share has been written whole, of whatever size it was."""
    elapsed = max(0.0, elapsed_s)
    total = written if durable else (total or None)
    if total is not None:
        written = min(written, total)
    rate = written / elapsed if elapsed > 0 else 0.0
    left = None if total is None else total - written
    eta = 0.0 if left == 0 else None if left is None or rate == 0 else left / rate
    return Progress(written, total, elapsed, rate, eta, durable)


def seconds_text(seconds: float) -> str:
    """A duration in one unit, as ``0.4 s`` or ``12 min``."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def progress_text(progress: Progress) -> str:
    """Percent and rate, for a line that a trainer draws itself: ``45% at 210.0 MB/s``."""
    rate = f"{bytes_text(progress.bytes_per_s)}/s"
    if progress.fraction is None:
        return f"{bytes_text(progress.written_bytes)} at {rate}"
    return f"{_percent(progress.fraction)} at {rate}"


def _percent(fraction: float) -> str:
    return f"{int(fraction * 100)}%"  # rounded down: 100% is all of it


@dataclass(frozen=True, slots=True)
class WritingRanks:
    """The ranks that write a save, as far as they have reported.

    ``done`` of ``count`` ranks are durable, with ``durable_bytes``. ``last`` was the last of these,
    ``last_s`` seconds after the save began.
    """

    count: int
    done: int = 0
    durable_bytes: int = 0
    last: int | None = None
    last_s: float = 0.0


def line_of(step: int, progress: Progress | None, ranks: WritingRanks, width: int) -> str:
    """The line of a save in flight, shorter than ``width`` columns. The bar shrinks where it must."""
    begin, parts = f"saving step {step}", []
    fraction = None if progress is None else progress.fraction
    if progress is not None:
        if fraction is None:
            parts.append(bytes_text(progress.written_bytes))
        else:
            assert progress.total_bytes is not None
            total = bytes_text(progress.total_bytes)
            parts += [_percent(fraction), f"{bytes_text(progress.written_bytes)} of {total}"]
        parts.append(f"{bytes_text(progress.bytes_per_s)}/s")
        if progress.eta_s:
            parts.append(f"{seconds_text(progress.eta_s)} left")
    if ranks.count > 1:
        parts.append(f"{ranks.done}/{ranks.count} ranks")
    rest = "  ".join(parts)
    room = min(_BAR, width - 1 - len(begin) - len(rest) - 4)
    if fraction is not None and room >= _LEAST_BAR:
        filled = int(fraction * room)
        rest = f"{'#' * filled}{'.' * (room - filled)}  {rest}"
    return f"{begin}  {rest}"[: width - 1].rstrip()


def tracked_text(step: int, ranks: WritingRanks) -> str:
    """The last line of a save that was tracked."""
    rate = f" ({bytes_text(ranks.durable_bytes / ranks.last_s)}/s)" if ranks.last_s > 0 else ""
    size, seconds = bytes_text(ranks.durable_bytes), seconds_text(ranks.last_s)
    text = f"step {step} saved: {size} in {seconds}{rate}"
    if ranks.count > 1 and ranks.last is not None:
        text += f", rank {ranks.last} was the last of {ranks.count}"
    return text


def ended_text(step: int, how: str, progress: Progress | None, ranks: WritingRanks) -> str:
    """The last line of a save that was not tracked; ``how`` says the way in which it ended."""
    text = f"step {step} {how}"
    if progress is not None:
        text += f" after {seconds_text(progress.elapsed_s)}"
        text += f", {bytes_text(progress.written_bytes)} of rank 0 were written"
    if ranks.count > 1:
        text += f", {ranks.done} of {ranks.count} ranks were durable"
    return text
