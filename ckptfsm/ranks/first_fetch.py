"""The fetch of ``fetch_from`` at rank 0, while the other ranks are told that it goes on.

Every wait of ranks for each other has a limit, and a large checkpoint takes longer to fetch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import RankInterrupted
from ckptfsm.core.ports import Transport
from ckptfsm.core.units import bytes_text
from ckptfsm.places.fetching import Progress
from ckptfsm.ranks.coordinator_client import Answer, share_answer

log = logging.getLogger("ckptfsm")
_TELL_S = 5.0


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
        self._bytes = 0
        self._given_up = False

    def run(self, fetch: Callable[[Progress], str], tell_s: float) -> str:
        """Run ``fetch`` on a thread, and return its result. Every ``tell_s`` seconds, at least every
        five, the other ranks are told. An interrupt ends it within the current piece of a file."""
        with ThreadPoolExecutor(1, "ckptfsm-fetch") as thread:
            running = thread.submit(fetch, self._told)
            try:
                while not wait([running], timeout=min(tell_s, _TELL_S)).done:
                    share_answer(self._transport, Answer(StillFetching()))
                    self._tell()
            except BaseException:
                self._given_up = True
                raise
            return running.result()

    def _tell(self) -> None:
        interruption = self._check_signals()
        if interruption is not None:
            raise interruption
        if self._bytes:
            say(log.info, "fetching", f"fetched {bytes_text(self._bytes)}", bytes=self._bytes)

    def _told(self, size: int) -> None:
        if self._given_up:
            raise RankInterrupted("the fetch was given up, as its caller was interrupted", rank=0)
        self._bytes += size  # of four threads: a lost addition is one line of the log
