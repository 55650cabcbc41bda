"""A mailbox over a TCPStore of torch: reports reach rank 0 without a collective.

Rules: making one is collective; if a rank cannot reach rank 0's store, no rank has a mailbox. Reports
travel as JSON, so that a message runs no code. A message that is announced and does not come is
left out: its rank sends it through the rounds as well.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe
from ckptfsm.core.events import Event, Failed, ShardReported, WriterForked
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Mailbox, OneRank, Transport

log = logging.getLogger("ckptfsm")
_CONNECT_S = 10.0
_ANSWER_S = 5.0
_KINDS = {kind.name: kind for kind in (WriterForked, ShardReported, Failed)}
_COUNT = "count"


class StoreMailbox:
    """See ``ports.Mailbox``."""

    def __init__(self, store: TCPStore) -> None:
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        self._store = store
        self._taken = 0
        self._awaited: list[str] = []

    def post(self, events: Sequence[Event]) -> None:
        number = self._store.add(_COUNT, 1)
        self._store.set(str(number), json.dumps([encoded(event) for event in events]))

    def collect(self) -> list[Event]:
        count = self._store.add(_COUNT, 0)
        names = [*self._awaited, *map(str, range(self._taken + 1, count + 1))]
        self._taken = count
        here = [name for name in names if self._store.check([name])]
        self._awaited = [name for name in names if name not in here]
        found = []
        for name in here:
            found += [decoded(each) for each in json.loads(self._store.get(name))]
            self._store.delete_key(name)
        return found


def encoded(event: Event) -> dict[str, Any]:
    """A report as plain values."""
    return {"name": event.name, **asdict(event)}


def decoded(found: dict[str, Any]) -> Event:
    """A report from plain values. Raises ``ValueError`` or ``TypeError`` for anything else."""
    values = dict(found)
    kind = _KINDS.get(values.pop("name"))
    if kind is None:
        raise ValueError(f"no report: {found!r:.80}")
    made: Event = kind(**{**values, "of": AttemptId(**values["of"])})
    return made


def mailbox_of(transport: Transport) -> Mailbox | None:
    """The mailbox of a job (collective). None if a rank cannot reach rank 0's store."""
    if transport.world_size == 1:
        return OneRank()
    store, problem = None, ""
    try:
        if transport.rank == 0:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    except Exception as error:  # the others wait for the broadcast
        problem = describe(error)
    hosts, port = transport.broadcast((_hosts(), store.port if store is not None else 0))
    if port and store is None:
        store, problem = _connected(hosts, port)
    failed = transport.any_flags([store is None])[0]
    if problem:
        said = f"reports of saves wait for poll(): no connection to rank 0: {problem}"
        say(log.warning, "no_mailbox", said, reason=problem)
    return None if failed or store is None else StoreMailbox(store)


def _hosts() -> list[str]:
    """Names under which this host may be reached by others."""
    return [*filter(None, [os.environ.get("MASTER_ADDR")]), socket.gethostname()]


def _connected(hosts: Sequence[str], port: int) -> tuple[TCPStore | None, str]:
    """The store of rank 0, and the problems with its names."""
    problems = []
    timeout = timedelta(seconds=_CONNECT_S)
    for host in hosts:
        try:
            return TCPStore(host, port, is_master=False, timeout=timeout), ""
        except Exception as error:
            problems.append(f"{host}: {describe(error)}")
    return None, "; ".join(problems)
