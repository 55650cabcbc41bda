"""The arithmetic of a save's progress, and its text."""

from __future__ import annotations

import pytest

from ckptfsm.core.progress import (
    Progress,
    WritingRanks,
    ended_text,
    line_of,
    progress_of,
    progress_text,
    seconds_text,
    tracked_text,
)
from ckptfsm.core.units import bytes_text

GB = 10**9


def test_half_of_a_share():
    """Catches: a rate or a rest of the time from the wrong bytes."""
    found = progress_of(3 * GB, 6 * GB, 2.0)
    assert found == Progress(3 * GB, 6 * GB, 2.0, 1.5 * GB, 2.0, False)
    assert found.fraction == 0.5


@pytest.mark.parametrize("total", [None, 100])
def test_nothing_is_written_yet(total):
    """Catches: a division by no time or by no bytes; an end that is told from no rate."""
    for elapsed in (0.0, 5.0):
        found = progress_of(0, total, elapsed)
        assert (found.bytes_per_s, found.eta_s) == (0.0, None)


def test_bytes_in_no_time_have_no_rate():
    """Catches: a division by zero, and time that runs backwards."""
    for elapsed in (0.0, -1.0):
        found = progress_of(5, 10, elapsed)
        assert (found.elapsed_s, found.bytes_per_s, found.eta_s) == (0.0, 0.0, None)


@pytest.mark.parametrize("total", [None, 0])
def test_an_unknown_total_has_no_fraction_and_no_end(total):
    """Catches: 0% of nothing, or an end of a save whose size only the writer knows."""
    found = progress_of(5, total, 1.0)
    assert (found.total_bytes, found.fraction, found.eta_s) == (None, None, None)
    assert found.bytes_per_s == 5.0


def test_more_than_expected_is_the_total():
    """Catches: 104% of an expected size."""
    found = progress_of(104, 100, 1.0)
    assert (found.written_bytes, found.fraction, found.eta_s) == (100, 1.0, 0.0)


def test_a_durable_share_is_whole():
    """Catches: a save that ends at 98% of an expected size."""
    found = progress_of(98, 100, 2.0, durable=True)
    assert found == Progress(98, 98, 2.0, 49.0, 0.0, True)
    assert progress_of(0, None, 0.0, durable=True) == Progress(0, 0, 0.0, 0.0, 0.0, True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2.0 h"),
    ],
)
def test_durations(seconds, text):
    assert seconds_text(seconds) == text


def test_a_line_has_bar_percent_bytes_rate_rest_and_ranks():
    found = line_of(100, progress_of(2 * GB, 8 * GB, 2.0), WritingRanks(8, 3), 100)
    assert found == (
        "saving step 100  #####...............  25%  2.0 GB of 8.0 GB  1.0 GB/s  6.0 s left  3/8 ranks"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_line_fits_its_terminal(width):
    """Catches: a line that wraps, of which each picture leaves a copy on the terminal."""
    most = progress_of(999 * GB, 1998 * GB, 3000.0)
    for progress in (most, progress_of(5, None, 1.0), None):
        found = line_of(12_345_678, progress, WritingRanks(4096, 4000), width)
        assert len(found) < width
        assert found.startswith("saving step 12345"[: width - 1])


def test_at_80_columns_the_bar_shrinks_and_all_figures_stay():
    """Catches: figures that are cut off for the sake of the bar."""
    found = line_of(100, progress_of(GB, 2 * GB, 1.0), WritingRanks(8, 3), 80)
    assert "#" in found
    assert found.endswith("3/8 ranks")


def test_a_line_without_a_total_or_a_share():
    assert line_of(5, progress_of(5 * 10**6, None, 1.0), WritingRanks(1), 80) == (
        "saving step 5  5.0 MB  5.0 MB/s"
    )
    assert line_of(5, None, WritingRanks(2, 1), 80) == "saving step 5  1/2 ranks"


def test_the_last_lines():
    """Catches: a slowest rank of one, and a rate of no time."""
    ranks = WritingRanks(8, 8, 16 * GB, 3, 2.0)
    assert tracked_text(7, ranks) == (
        "step 7 saved: 16.0 GB in 2.0 s (8.0 GB/s), rank 3 was the last of 8"
    )
    assert tracked_text(7, WritingRanks(1, 1, 5 * 10**6, 0, 0.0)) == "step 7 saved: 5.0 MB in 0.0 s"
    assert ended_text(7, "failed", progress_of(GB, 2 * GB, 2.0), WritingRanks(2, 1)) == (
        "step 7 failed after 2.0 s, 1.0 GB of rank 0 were written, 1 of 2 ranks were durable"
    )
    assert ended_text(7, "failed", None, WritingRanks(1)) == "step 7 failed"


def test_words_for_the_line_of_a_trainer():
    """Catches: 100% of a share that is not written whole."""
    assert progress_text(progress_of(999, 1000, 1.0)) == "99% at 999 B/s"
    assert progress_text(progress_of(5 * GB, None, 2.0)) == "5.0 GB at 2.5 GB/s"


def test_sizes_are_in_units_people_read():
    """Catches: a unit that is off by a thousand, or a size such as ``1000.0 MB``."""
    sizes = (0, 999, 1500, 999_960_000, 5 * 10**12)
    assert [bytes_text(size) for size in sizes] == ["0 B", "999 B", "1.5 kB", "1.0 GB", "5.0 TB"]
