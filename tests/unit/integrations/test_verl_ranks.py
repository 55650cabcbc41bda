"""Rank 0 as a driver of all ranks: threads in the place of processes, no verl and no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from fakes import ThreadGroup

from ckptfsm.adapters.signals import OneCall
from ckptfsm.core.errors import CkptFsmError, ConfigError, RankInterrupted, SaveFailed
from ckptfsm.integrations.verl.ranks import InsideCall, Ranks


def together(
    work: Callable[[Ranks], Any],
    size: int = 3,
    main: int | None = None,
    made: Callable[[Any], Any] = lambda transport: transport,
) -> list[Any]:
    """Every rank's result, or error, of rank 0's ``work``. A rank's worker is a list with its number.

    Each rank is a thread; ``main`` is the main one, over the transport that ``made`` returns.
    """
    group = ThreadGroup(size)
    ends: list[Any] = [None] * size

    def one(rank: int) -> None:
        transport = group.transport(rank)
        ranks = Ranks(made(transport) if rank == main else transport, [rank])
        try:
            ends[rank] = ranks.together(lambda: work(ranks))
        except BaseException as error:
            ends[rank] = error

    others = [rank for rank in range(size) if rank != main]
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in others]
    for thread in threads:
        thread.start()
    if main is not None:
        one(main)
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


class CheckpointException(BaseException):
    """As torch's, which is no ``Exception`` either."""


def leave(worker: list[int], rank: int, kind: type[BaseException]) -> None:
    if worker[0] == rank:
        raise kind("made up")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, CheckpointException])
def test_no_rank_waits_for_one_whose_call_raised_no_exception(
    rank: int, kind: type[BaseException]
) -> None:
    """Catches: a Ctrl-C, a handler's SystemExit, or torch's error inside a call that is then not
    answered: the other ranks wait in an exchange until its timeout."""
    ends = together(lambda ranks: ranks.everywhere(leave, rank, kind))
    if kind is CheckpointException:
        assert [type(end) for end in ends] == [SaveFailed] * 3
        assert [end.rank for end in ends] == [rank] * 3
    else:
        others = [end for number, end in enumerate(ends) if number != rank]
        assert type(ends[rank]) is kind
        assert [type(end) for end in others] == [RankInterrupted] * 2
        assert [end.rank for end in others] == [rank] * 2
    assert all("made up" in str(end) for end in ends)


def test_answers_of_others_count_beside_an_interrupt() -> None:
    """Catches: answers that are lost with an exchange in which one rank was interrupted: a worker that
    is never asked again."""

    def work(ranks: Ranks) -> Any:
        begun = [ranks.submit(0, add, 0), ranks.submit(1, leave, 1, KeyboardInterrupt)]
        with pytest.raises(RankInterrupted):
            ranks.done(begun, 0.0)
        assert ranks.done(begun, 0.0) == begun
        return ranks.result(begun[0])

    ends = together(work, size=2)
    assert ends[0] == 0 and type(ends[1]) is KeyboardInterrupt


class Interrupted:
    """A transport that gets a Ctrl-C before or after its call number ``at``."""

    def __init__(self, transport: Any, at: int, when: str) -> None:
        self._transport, self._at, self._when, self._count = transport, at, when, 0
        self.rank, self.world_size = transport.rank, transport.world_size

    def gather(self, item: Any) -> Any:
        return self._call(self._transport.gather, item)

    def broadcast(self, item: Any) -> Any:
        return self._call(self._transport.broadcast, item)

    def _call(self, exchange: Callable[[Any], Any], item: Any) -> Any:
        number, self._count = self._count, self._count + 1
        if (number, self._when) == (self._at, "before"):
            signal.raise_signal(signal.SIGINT)
        got = exchange(item)
        if (number, self._when) == (self._at, "after"):
            signal.raise_signal(signal.SIGINT)
        return got


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The usual handler, whatever the tests were started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(5))
def test_a_signal_anywhere_in_an_exchange_leaves_no_rank_waiting(
    rank: int, when: str, at: int
) -> None:
    """Catches: a Ctrl-C between two lines of an exchange: the ranks would wait in different ones."""

    def work(ranks: Ranks) -> Any:
        ranks.everywhere(add, 1)
        return ranks.everywhere(add, 1)

    ends = together(work, 2, rank, lambda transport: Interrupted(transport, at, when))
    assert type(ends[rank]) is KeyboardInterrupt
    heard_by_all = at * 2 + (when == "after") < 6  # before the last answers were made
    expected = RankInterrupted if heard_by_all else list
    assert type(ends[1 - rank]) is expected


@pytest.mark.usefixtures("ctrl_c")
def test_a_wait_inside_a_call_hears_the_interrupt_of_rank_0() -> None:
    """Catches: a Ctrl-C at rank 0 that is put off for as long as its controller waits."""

    def work(ranks: Ranks) -> Any:
        inside = OneCall(partial(InsideCall, ranks.calls))
        with inside.running():
            signal.raise_signal(signal.SIGINT)
            heard = inside.hear()
            assert type(heard) is KeyboardInterrupt
            raise heard

    ends = together(work, 2, 0)
    assert [type(end) for end in ends] == [KeyboardInterrupt, RankInterrupted]
