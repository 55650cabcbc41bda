"""Reports reach rank 0 over a TCP socket, without a collective and without torch.

Each message has a connection of its own, and is signed with a secret of the job (HMAC-SHA256). It is
JSON, which runs no code, and may be lost: its rank sends the reports through the rounds as well.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe, name_ranks, shorten
from ckptfsm.core.events import Event, Failed, Report, ShardReported, WriterForked, is_plausible
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Mailbox, OneRank, Transport

log = logging.getLogger("ckptfsm")
T = TypeVar("T")
_LONGEST_STEP_S = 10.0  # of making a mailbox
_SHARE = 0.25  # of the deadline of the other ranks, for a step
_PAUSE_S = 0.005  # between two looks of rank 0, which waits for the first words of all
_ANSWER_S = 5.0
_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096  # the kernel may have a lower limit; a rank without a place tries again
_MOST_BYTES = 1 << 16  # of a message
_DETAIL = 4000  # characters
_MOST_ACCEPTED = 128  # connections in a look
_MOST_WAITING = 64  # connections with half a message, or none
_MOST_WARNINGS = 20
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_KINDS = {kind.name: kind for kind in (WriterForked, ShardReported, Failed)}


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 listens, and the secret that signs each message."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class Outbox:
    """The mailbox of each rank but 0. See ``ports.Mailbox``."""

    def __init__(self, rank: int, address: Address) -> None:
        self._rank, self._address = rank, address

    def post(self, events: Sequence[Event], timeout_s: float = _ANSWER_S) -> None:
        """Send reports. Raises ``OSError``, and ``ValueError`` for a message that is too long."""
        to = self._address
        message = sealed(to.secret, self._rank, events)
        with socket.create_connection((to.host, to.port), timeout_s) as link:
            link.sendall(message)

    def collect(self) -> list[Event]:
        return []

    def close(self) -> None:
        """Nothing is open between two messages."""


class _Link:
    """A connection to rank 0, and the bytes that came so far."""

    def __init__(self, link: socket.socket, sender: str) -> None:
        link.setblocking(False)
        self._socket, self.sender = link, sender
        self.data = bytearray()

    def is_whole(self) -> bool:
        """True once the sender has ended its message. Raises ``OSError`` or ``ValueError``."""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._socket.recv(_MOST_BYTES):
                self.data += chunk
                if len(self.data) > _MOST_BYTES:
                    raise ValueError(f"a message of more than {_MOST_BYTES} bytes")
            return True
        return False

    def close(self) -> None:
        self._socket.close()


class ReportServer:
    """The mailbox of rank 0. See ``ports.Mailbox``.

    Raises ``OSError`` unless an address of ``hosts`` belongs to this host.
    """

    def __init__(self, hosts: Iterable[str], world_size: int) -> None:
        self._world_size = world_size
        self._listener = _listening(hosts)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.address = Address(host, port, secrets.token_bytes(_DIGEST_BYTES))
        self._connected: set[int] = set()
        self._waiting: list[_Link] = []
        self._warnings = 0

    def hear_all(self, timeout_s: float) -> str:
        """Wait for the first words of all other ranks. Returns the problem, or ""."""
        deadline = time.monotonic() + timeout_s
        others = set(range(1, self._world_size))
        while not others <= self._connected:
            self.collect()
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_S)
        missing = sorted(others - self._connected)
        return f"no word from rank {name_ranks(missing)}" if missing else ""

    def post(self, events: Sequence[Event]) -> None:
        raise AssertionError("rank 0 reports to itself")

    def collect(self) -> list[Event]:
        """The reports that arrived. A message that is no message of this job is logged and dropped."""
        found: list[Event] = []
        waiting: list[_Link] = []
        for link in chain(self._waiting, self._accepted()):
            try:
                if not link.is_whole():
                    waiting.append(link)
                    continue
                secret = self.address.secret
                rank, reports = unsealed(secret, bytes(link.data), self._world_size)
                self._connected.add(rank)
                found += reports
                link.close()
            except (OSError, ValueError) as error:
                self._refuse(link, describe(error))
        while len(waiting) > _MOST_WAITING:  # the oldest first: a rank sends all at once
            self._refuse(waiting.pop(0), "many connections say nothing")
        self._waiting = waiting
        return found

    def close(self) -> None:
        """Listen no more. A forked child may still have the socket, so it is shut down first."""
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._waiting:
            link.close()
        self._waiting = []

    def _accepted(self) -> Iterator[_Link]:
        """New connections, a bounded number. Raises ``OSError`` if this process can take none."""
        for _ in range(_MOST_ACCEPTED):
            try:
                link, sender = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it is gone again
                continue
            yield _Link(link, str(sender[0]))

    def _refuse(self, link: _Link, why: str) -> None:
        """Log it; not for ever, as there is no end to what a stranger may send."""
        link.close()
        self._warnings += 1
        if self._warnings > _MOST_WARNINGS:
            return
        last = "; no more of these are logged" if self._warnings == _MOST_WARNINGS else ""
        said = f"a message from {link.sender} is dropped: {why}{last}"
        say(log.warning, "report_dropped", said, sender=link.sender, reason=why)


def sealed(secret: bytes, rank: int, events: Sequence[Event]) -> bytes:
    """A message: its signature, then JSON. Raises ``ValueError`` if it is too long."""
    body = json.dumps({"rank": rank, "reports": [encoded(event) for event in events]}).encode()
    if len(body) > _MOST_BYTES - _DIGEST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long")
    return hmac.digest(secret, body, _DIGEST) + body


def unsealed(secret: bytes, message: bytes, world_size: int) -> tuple[int, list[Report]]:
    """The sender and the reports of a message. ``ValueError`` if no rank of the job can have sent it."""
    signature, body = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, body, _DIGEST)):
        raise ValueError("it is not signed with the secret of this job")
    try:
        found = json.loads(body)
        rank = found["rank"]
        reports = [decoded(each) for each in found["reports"]]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no message: {describe(error)}") from error
    if type(rank) is not int or not 0 < rank < world_size:
        raise ValueError(f"there is no rank {rank!r:.80}")
    if any(report.rank != rank for report in reports):
        raise ValueError(f"rank {rank} reports for another rank")
    return rank, reports


def encoded(event: Event) -> dict[str, Any]:
    """A report as plain values."""
    if isinstance(event, Failed):
        event = replace(event, detail=shorten(event.detail, _DETAIL))
    return {"name": event.name, **asdict(event), "of": event.of._asdict()}


def decoded(found: dict[str, Any]) -> Report:
    """A report from plain values. Raises the error of any surprise in them."""
    values = dict(found)
    kind = _KINDS.get(values.pop("name"))
    if kind is None:
        raise ValueError(f"no report: {found!r:.80}")
    made: Report = kind(**{**values, "of": AttemptId(**values["of"])})
    if not is_plausible(made):
        raise ValueError(f"an implausible report: {found!r:.200}")
    return made


def mailbox_of(transport: Transport, exchange_timeout_s: float) -> Mailbox | None:
    """The mailbox of a job (collective). None if rank 0 does not get a message of all other ranks."""
    if transport.world_size == 1:
        return OneRank()
    step_s = min(_LONGEST_STEP_S, exchange_timeout_s * _SHARE)
    inbox, problem = _made(_seen(transport, step_s), transport.world_size)
    address: Address | None = transport.broadcast(None if inbox is None else inbox.address)
    made: Mailbox | None = inbox
    try:
        if inbox is not None:
            problem = inbox.hear_all(step_s)
        elif address is not None:
            made = outbox = Outbox(transport.rank, address)
            outbox.post([], step_s)  # the first words
    except Exception as error:  # the others wait for the flags
        problem = f"no connection between rank 0 and rank {transport.rank}: {describe(error)}"
    failed = transport.any_flags([made is None or bool(problem)])[0]
    if problem:
        said = f"reports of saves wait for poll(): {problem}"
        say(log.warning, "no_mailbox", said, reason=problem)
    if failed and made is not None:
        made.close()
    return None if failed else made


def _seen(transport: Transport, step_s: float) -> list[str] | None:
    """At rank 0: the addresses under which the ranks see it, those of distant ranks first.

    The loopback interface is an address only for ranks that all share it.
    """
    networks = transport.gather(_network())
    near = networks is not None and len({*networks}) == 1 and networks[0] != ""
    hosts = transport.broadcast([_LOOPBACK] if near else _hosts())
    views = transport.gather(_within(partial(_addresses, hosts), step_s) or [])
    if views is None:
        return None
    found = dict.fromkeys(chain.from_iterable(reversed(views)))
    return [address for address in found if near or _is_distant(address)]


def _made(hosts: list[str] | None, world_size: int) -> tuple[ReportServer | None, str]:
    """The mailbox of rank 0, or the problem. Neither on the other ranks."""
    if hosts is None:
        return None, ""
    try:
        return ReportServer(hosts, world_size), ""
    except Exception as error:  # the others wait for the broadcast
        return None, describe(error)


def _network() -> str:
    """Equal for processes that share the loopback interface; "" if the kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


def _hosts() -> list[str]:
    """Names under which other hosts may reach this one."""
    return [*filter(None, [os.environ.get("MASTER_ADDR")]), socket.gethostname()]


def _addresses(hosts: Sequence[str]) -> list[str]:
    """The addresses of these names as this rank sees them. A name service may take long."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError, UnicodeError):  # another name may be known
            found += (
                str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            )
    return found


def _is_distant(address: str) -> bool:
    """True if another host may reach this address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # of a name service: the other ranks wait in an exchange, so no error
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def _listening(hosts: Iterable[str]) -> socket.socket:
    """A socket at the first of these addresses that this host has. Raises ``OSError``."""
    tried = []
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            tried.append(f"{host}: {error.strerror}")
    why = f" ({'; '.join(tried)})" if tried else ""
    raise OSError(f"the other hosts know no address of rank 0{why}: set MASTER_ADDR")


def _within(work: Callable[[], T], seconds: float) -> T | None:
    """The result of ``work``; None if there is none in time: a thread is then left behind."""
    try:
        executor = ThreadExecutor()
        pending = executor.submit(work)
        executor.shutdown()
        return pending.result(seconds)
    except (FutureTimeout, RuntimeError, OSError):  # also without a thread: the other ranks wait
        return None
