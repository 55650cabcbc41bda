"""Rank 0 as a driver of all ranks: threads in the place of processes, no verl and no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptfsm.errors import CkptFsmError, ConfigError, RankInterrupted, SaveFailed
from ckptfsm.integrations.verl.ranks import Ranks
from ckptfsm.testing.fakes import ThreadGroup


def together(work: Callable[[Ranks], Any], size: int = 3) -> list[Any]:
    """Every rank's result, or error, of rank 0's ``work``. A rank's worker is a list with its number."""
    group = ThreadGroup(size)
    ends: list[Any] = [None] * size

    def one(rank: int) -> None:
        ranks = Ranks(group.transport(rank), [rank])
        try:
            ends[rank] = ranks.together(lambda: work(ranks))
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "a rank hangs"
    return ends


def add(worker: list[int], number: int) -> int:
    worker.append(number)
    return sum(worker)


def fail(worker: list[int]) -> None:
    if worker[0] == 1:
        raise OSError(28, "No space left on device")


def test_every_rank_is_called_and_gets_the_result() -> None:
    """Catches: a rank that is left out, called twice, or gets another one's call or answer."""

    def work(ranks: Ranks) -> Any:
        first = ranks.everywhere(add, 10)
        call = ranks.submit(2, add, 5)
        assert ranks.done([call], 0.0) == [call]
        return first, ranks.result(call), ranks.done([], 0.0)

    assert together(work) == [([10, 11, 12], 17, [])] * 3


def test_a_rank_that_fails_tells_rank_0_and_no_other_waits() -> None:
    """Catches: an error in one rank that leaves the others in an exchange, or is lost."""

    def work(ranks: Ranks) -> Any:
        with pytest.raises(SaveFailed, match="No space left on device") as raised:
            ranks.everywhere(fail)
        assert raised.value.rank == 1
        return ranks.everywhere(add, 1)

    assert together(work) == [[1, 2, 3]] * 3


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ConfigError("made up"), ConfigError),
        (ZeroDivisionError("made up"), CkptFsmError),
        (KeyboardInterrupt("made up"), RankInterrupted),
    ],
)
def test_an_error_of_rank_0_is_everyone_s(raised: BaseException, told: type) -> None:
    """Catches: ranks that go on, or wait, after the driver has failed; a Ctrl-C at rank 0 alone."""

    def work(ranks: Ranks) -> Any:
        ranks.everywhere(add, 1)
        raise raised

    ends = together(work)
    assert ends[0] is raised
    assert [type(end) for end in ends[1:]] == [told, told]
    assert all("made up" in str(end) for end in ends)
