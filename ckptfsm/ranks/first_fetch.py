"""The fetch of ``fetch_from`` at rank 0, while the other ranks are told that it goes on.

Every wait of ranks for each other has a limit, and a large checkpoint takes longer to fetch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import RankInterrupted
from ckptfsm.core.ports import Transport
from ckptfsm.core.units import bytes_text
from ckptfsm.places.fetching import Progress
from ckptfsm.ranks.coordinator_client import Answer, share_answer

log = logging.getLogger("ckptfsm")
_TELL_S = 5.0
_SAID_EVERY = 6  # turns


@dataclass(frozen=True, slots=True)
class StillFetching:
    """The answer of rank 0 while it fetches: the other ranks wait for the next one."""


class FirstFetch:
    """See the module. ``check_signals`` returns the exception of a signal's handler."""

    def __init__(
        self, transport: Transport, check_signals: Callable[[], BaseException | None]
    ) -> None:
        self._transport = transport
        self._check_signals = check_signals
        self._outcome: SimpleQueue[str | BaseException] = SimpleQueue()
        self._bytes = 0
        self._given_up = False

    def run(self, fetch: Callable[[Progress], str], tell_s: float) -> str:
        """Run ``fetch`` on a thread, and return its result. Every ``tell_s`` seconds, at least every
        five, the other ranks are told. After an interrupt the thread ends with its current piece."""
        # A daemon: no interrupt waits for a server that does not answer.
        thread = Thread(target=self._fetch, args=(fetch,), name="ckptfsm-fetch", daemon=True)
        thread.start()
        found, turns = self._ended(tell_s), count(1)
        while found is None:
            try:
                share_answer(self._transport, Answer(StillFetching()))
                self._tell(next(turns))
            except BaseException:
                self._given_up = True
                raise
            found = self._ended(tell_s)
        if isinstance(found, BaseException):
            raise found
        return found

    def _ended(self, tell_s: float) -> str | BaseException | None:
        """The result or the error of the thread; None while it runs, after a wait."""
        try:
            return self._outcome.get(timeout=min(tell_s, _TELL_S))
        except Empty:
            return None

    def _fetch(self, fetch: Callable[[Progress], str]) -> None:
        try:
            self._outcome.put(fetch(self._told))
        except BaseException as error:  # raised in the caller's thread
            self._outcome.put(error)

    def _tell(self, turn: int) -> None:
        interruption = self._check_signals()
        if interruption is not None:
            raise interruption
        if turn % _SAID_EVERY == 0:
            said = f"fetches: {bytes_text(self._bytes)} so far"
            say(log.info, "fetching", said, bytes=self._bytes)

    def _told(self, size: int) -> None:
        if self._given_up:
            raise RankInterrupted("the fetch was given up, as its caller was interrupted", rank=0)
        self._bytes += size  # of four threads: a lost addition is one line of the log
