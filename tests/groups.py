"""A job of one controller and groups of workers, as threads of one process with forked writers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fakes import FakeDriver, ThreadGroup, fake_ports

from ckptfsm.core.events import Event
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Ports
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.tickets import GroupPart, GroupSave, Ticket
from ckptfsm.writers.plain_files import FilesDriver

SETTINGS: Mapping[str, Any] = {
    "exit_timeout_s": 0.5,
    "close_timeout_s": 20.0,
    "busy_timeout_s": 20.0,
    "writer_timeout_s": 20.0,
}


class Group:
    """Workers that share a transport. ``dead`` ones answer no call."""

    def __init__(self, name: str, size: int, root: Path) -> None:
        self.name, self.size = name, size
        transports = ThreadGroup(size, timeout_s=5.0)
        self.drivers = [FakeDriver(rank) for rank in range(size)]
        self.workers = [
            BaseGroupWorker(
                fake_ports(root, transport=transports.transport(r), driver=self.drivers[r])
            )
            for r in range(size)
        ]
        self.dead: set[int] = set()

    def write(self, ticket: Ticket, states: Iterable[Any], **keywords: Any) -> list[Event]:
        """Every rank writes at the same time; their reports."""
        reports: list[list[Event]] = [[] for _ in range(self.size)]

        def one(rank: int, state: Any) -> None:
            reports[rank] = self.workers[rank].write(ticket, state, **keywords)

        threads = [
            threading.Thread(target=one, args=(rank, state)) for rank, state in enumerate(states)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive(), "a worker hangs"
        return [event for some in reports for event in some]

    def poll(self, failed: tuple[AttemptId, ...]) -> list[Event]:
        living = [w for rank, w in enumerate(self.workers) if rank not in self.dead]
        return [event for worker in living for event in worker.poll(failed)]


class GroupJob:
    """A controller and its groups. ``deaf``: nothing is reported; ``said``: everything that was."""

    def __init__(
        self, root: Path, sizes: Mapping[str, int], ports: Ports | None = None, **settings: Any
    ) -> None:
        self.groups = {name: Group(name, size, root) for name, size in sizes.items()}
        self.said: list[Event] = []
        self.deaf = False
        self.records: list[Any] = []
        if ports is None:
            ports = fake_ports(root, driver=FilesDriver())
        self.controller = Controller(
            root,
            sizes,
            self.ask,
            ports=ports,
            hooks=[self.records.append],
            **{**SETTINGS, **settings},
        )

    def ask(self, failed: tuple[AttemptId, ...]) -> list[Event]:
        if self.deaf:
            return []
        events = [event for group in self.groups.values() for event in group.poll(failed)]
        self.said += events
        return events

    def begin(self, step: int, **extra: Any) -> GroupSave:
        """A save of every group and a plain file of the controller's."""
        parts = {name: GroupPart(name) for name in self.groups}
        return self.controller.begin(step, {**parts, "data.pt": b"position %d" % step, **extra})

    def write(self, save: GroupSave, *names: str) -> None:
        """The groups write their shares: all of them, or those named."""
        for name, ticket in save.tickets.items():
            if not names or name in names:
                group = self.groups[name]
                states = [{"w": f"{name}{rank}@{ticket.of.step}"} for rank in range(group.size)]
                events = group.write(ticket, states)
                self.said += events
                self.controller.feed(events)

    def save(self, step: int) -> GroupSave:
        save = self.begin(step)
        self.write(save)
        return save

    def events(self) -> list[str]:
        return [f"{r.source.value}>{r.dest.value}" for r in self.records]
