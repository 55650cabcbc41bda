"""The pieces of the benchmarks of the engines: states, times and processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import limits, one_save, real_ranks, two_ranks
from benchmarks.measure import Options
from benchmarks.state import TrainingState


def test_a_mixed_state_has_the_bytes_of_a_large_one() -> None:
    """Catches: a size or a value that no seed gives, and bytes that are lost in the sharing out."""
    large, mixed = TrainingState(1 << 20), TrainingState(1 << 20, "mixed")
    sizes = [tensor.numel() * tensor.itemsize for tensor in mixed.tensors]
    assert [tensor.numel() for tensor in large.tensors] == [16384] * 16
    assert len(sizes) == 2_000
    assert sum(sizes) == 1 << 20
    assert min(sizes) * 100 < max(sizes)
    assert len({tensor.dtype for tensor in mixed.tensors}) == 3
    for state, kind in ((large, "large"), (mixed, "mixed")):
        again = TrainingState(1 << 20, kind)
        assert all(map(torch.equal, state.tensors, again.tensors))
    assert sum(tensor.numel() > 0 for tensor in TrainingState(1, "mixed").tensors) == 2_000


def test_a_rank_has_a_place_of_its_tensors_in_those_of_all_ranks() -> None:
    shards = TrainingState(1 << 10, offsets=((0, 1, 2),)).sharded(3)
    assert shards["layer.0.weight"].global_shape == (32,)
    assert shards["layer.0.weight"].global_offset == (16,)


def test_the_times_of_two_ranks_are_the_larger_ones() -> None:
    """Catches: the times of rank 0 alone, or those of a rank that is the slower one in one of them."""
    assert two_ranks.larger([(1.0, 9.0), (2.0, 3.0)], [(4.0, 5.0), (0.0, 7.0)]) == [
        (4.0, 9.0),
        (2.0, 7.0),
    ]


def test_the_usual_time_is_the_median_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(one_save, "timed", lambda work: next(times))
    assert one_save._usual(str) == 2.0


def test_a_copy_of_memory_uses_the_threads_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a copy by as many threads as torch had before; it has as many again afterwards."""
    seen: list[int] = []

    def timed(work: Callable[[], object]) -> float:
        seen.append(torch.get_num_threads())
        work()
        return 1.0

    monkeypatch.setattr(limits, "timed", timed)
    before = torch.get_num_threads()
    figures = limits._copies(Options(Path(), state_bytes=64, pairs=2))
    assert seen == [1, 1, 2, 2]
    assert [figure.name for figure in figures] == [
        "copy of memory, 1 thread",
        "copy of memory, 2 threads",
    ]
    assert torch.get_num_threads() == before


FAILING = """
import os, sys, time
time.sleep(0 if os.environ["RANK"] == "1" else 3600)
sys.exit(1)
"""


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a wait for a rank that waits for the failed one."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="a rank of the benchmark failed"):
        real_ranks.run_ranks("failing", tmp_path)
