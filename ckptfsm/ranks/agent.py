"""A thread of each rank that carries reports to the coordinator while the trainer computes.

It only brings them earlier: the rounds of all ranks send them again, and the coordinator takes each
once. So it may die, and a report may be lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe
from ckptfsm.core.events import Event
from ckptfsm.core.ports import Clock, Mailbox
from ckptfsm.writers.rank_writer import RankWriter

log = logging.getLogger("ckptfsm")
_PAUSE_S = 0.01  # between two looks at the writer, and at rank 0 into the mailbox


class Agent:
    """The agent of one rank. At rank 0, ``report`` takes the reports of all ranks.

    ``watch`` wakes it for a save, ``pause`` lets it sleep, ``end`` ends it: from the training thread.
    ``draw`` is called after each look at the reports, to draw the progress of the save.
    """

    def __init__(
        self,
        clock: Clock,
        mailbox: Mailbox,
        report: Callable[[Sequence[Event]], Any] | None,
        draw: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._report, self._draw = report, draw
        self._writer: RankWriter | None = None
        self._posted: set[Event] = set()
        self._busy = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptfsm-agent", daemon=True)

    @property
    def alive(self) -> bool:
        """True while reports need no ``poll``."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def watch(self, writer: RankWriter | None) -> None:
        """Report on this writer; None at a rank without one, which may be rank 0."""
        self._posted = set()
        self._writer = writer
        self._busy.set()

    def pause(self) -> None:
        """Sleep until the next save: this one is over for this rank."""
        self._busy.clear()
        self._writer = None

    def end(self) -> None:
        """End the thread; it may still be in a look at a disk that does not answer."""
        self._over.set()
        self._busy.set()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._busy.wait()
                self._look()
                self._draw()
                self._over.wait(_PAUSE_S)
        except Exception as error:  # the rounds go on without the agent
            why = describe(error)
            said = f"reports of saves now wait for poll(): {why}"
            say(log.warning, "agent_ended", said, error=why)
        finally:
            self._mailbox.close()  # at rank 0, the other ranks then learn that nothing is taken

    def _look(self) -> None:
        """Carry the reports that are new."""
        writer, posted = self._writer, self._posted
        found = writer.poll(self._clock.monotonic()) if writer is not None else []
        events = [event for event in found if event not in posted]
        if self._report is not None:
            events += self._mailbox.collect()
            if events and not self._over.is_set():
                self._report(events)
        elif events and not self._over.is_set():  # rank 0 may have closed the mailbox by then
            self._mailbox.post(events)
        posted.update(events)
