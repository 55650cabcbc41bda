"""Reports over a socket: each arrives once, in order, and from a rank of this job only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from fakes import run_ranks

from ckptfsm.core.events import Event, Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import OneRank
from ckptfsm.dcp import mailbox
from ckptfsm.dcp.mailbox import Outbox, ReportServer, encoded, mailbox_of, sealed, unsealed

WAIT_S = 15.0
OF = AttemptId(5, 1, 2)
REPORTS: list[Event] = [
    WriterForked(OF, 1, 2),
    ShardReported(OF, "state", 1, 2, 7),
    Failed(OF, "writer_hung", "rank 1: its writer missed its deadline", 1),
]
SECRET = b"s" * 32


@pytest.fixture
def inbox() -> Iterator[ReportServer]:
    made = ReportServer(["127.0.0.1"], 3)
    yield made
    made.close()


def outbox_of(inbox: ReportServer, rank: int = 1) -> Outbox:
    return Outbox(rank, inbox.address)


def stranger(inbox: ReportServer, message: bytes = b"") -> socket.socket:
    """A connection of a stranger, who has said something."""
    link = socket.create_connection((inbox.address.host, inbox.address.port))
    link.sendall(message)
    return link


def collected(inbox: ReportServer, number: int) -> list[Event]:
    found: list[Event] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < number and time.monotonic() < deadline:
        found += inbox.collect()
    return found


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_the_same_on_the_other_side(report):
    """Catches: a field that is left out, or that comes back as a list."""
    assert unsealed(SECRET, sealed(SECRET, 1, [report]), 2) == (1, [report])


def test_a_long_report_is_short_enough_for_a_message():
    """Catches: a writer's traceback that ends its agent."""
    text = "\udc80\U0001f642" + "x" * 100_000
    for each in (text, "\U0001f642" * 100_000):
        [found] = unsealed(SECRET, sealed(SECRET, 1, [replace(REPORTS[2], detail=each)]), 2)[1]
        assert found.rank == 1


SHARD = encoded(REPORTS[1])
FORKED = encoded(REPORTS[0])
FAILED = encoded(REPORTS[2])
NO_REPORTS = [
    {**SHARD, "rank": [1]},
    {**SHARD, "rank": True},
    {**SHARD, "rank": 2},
    {**SHARD, "shard_bytes": "many"},
    {**SHARD, "shard_bytes": -1},
    {**SHARD, "shard_bytes": 1 << 63},
    {**SHARD, "part": 5},
    {**SHARD, "part": "../state"},
    {**SHARD, "world_size": 2.0},
    {**SHARD, "of": {**SHARD["of"], "step": "5"}},
    {**SHARD, "of": {**SHARD["of"], "epoch": [1]}},
    {**SHARD, "of": {**SHARD["of"], "attempt": -1}},
    {**SHARD, "of": [5, 1, 2]},
    {**SHARD, "of": {}},
    {**SHARD, "more": 1},
    {**FORKED, "world_size": ["2"]},
    {**FAILED, "rank": "zero"},
    {**FAILED, "rank": None},
    {**FAILED, "reason": "No Word"},
    {**FAILED, "detail": 5},
    {**FORKED, "name": WriterGone.name},
    {**FORKED, "name": ["writer_forked"]},
    {"name": "writer_forked"},
    {},
    5,
    None,
]


@pytest.mark.parametrize("bad", NO_REPORTS, ids=repr)
def test_a_report_that_cannot_be_is_dropped_with_a_word(monkeypatch, inbox, caplog, bad):
    """Catches: one bad message that stops the coordinator for good, or ends the agent."""
    monkeypatch.setattr(mailbox, "encoded", lambda event: bad)
    outbox_of(inbox).post([REPORTS[0]])
    monkeypatch.undo()
    outbox_of(inbox, 2).post([WriterForked(OF, 2, 3)])
    assert collected(inbox, 1) == [WriterForked(OF, 2, 3)]
    assert "a message from 127.0.0.1 is dropped" in caplog.text


@pytest.mark.parametrize("rank", [0, 3, -1, "1", True, None])
def test_a_rank_that_cannot_be_says_nothing(rank):
    """Catches: a sender that counts as heard, and is none of the job."""
    with pytest.raises(ValueError, match="no rank"):
        unsealed(SECRET, sealed(SECRET, rank, []), 3)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"rank": 1}', b"[" * 50_000, b"1" * 5_000])
def test_what_is_no_message_is_refused(monkeypatch, body):
    """Catches: an error that nobody expects of a message, and that ends the agent."""
    monkeypatch.setattr(json, "dumps", lambda found: body.decode())
    with pytest.raises(ValueError, match="."):
        unsealed(SECRET, sealed(SECRET, 1, []), 3)


def test_a_message_without_the_secret_is_dropped_with_a_word(inbox, caplog):
    """Catches: a stranger who reports; a log that a stranger fills."""
    body = sealed(b"guessed", 1, REPORTS)
    for message in [b"", b"x" * 40, body] * 10:
        stranger(inbox, message).close()
    outbox_of(inbox).post(REPORTS[:1])
    assert collected(inbox, 1) == REPORTS[:1]
    assert caplog.text.count("not signed with the secret of this job") == 20
    assert "no more of these are logged" in caplog.text
    assert str(inbox.address.secret) not in repr(inbox.address)


def test_reports_arrive_once_and_in_order(inbox):
    """Catches: reports that are lost between ranks, or that come again with each look."""
    assert inbox.collect() == []
    outbox_of(inbox).post(REPORTS[:2])
    assert collected(inbox, 2) == REPORTS[:2]
    outbox_of(inbox).post(REPORTS[2:])
    assert collected(inbox, 1) == REPORTS[2:]
    assert inbox.collect() == []


def test_silent_senders_hold_up_no_other(inbox, caplog):
    """Catches: a stranger who connects and says nothing, and keeps reports or descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    half = sealed(inbox.address.secret, 1, REPORTS)[:50]
    links = [stranger(inbox, said) for said in [b"", half] * 100]
    outbox_of(inbox).post(REPORTS)
    assert collected(inbox, 3) == REPORTS
    assert len(os.listdir("/proc/self/fd")) - before - len(links) < 100
    assert "many connections say nothing" in caplog.text
    for link in links:
        link.close()


def test_an_endless_message_takes_no_memory(inbox, caplog):
    """Catches: a stranger who sends until rank 0 has no memory left."""
    with stranger(inbox) as link:
        link.setblocking(False)
        deadline = time.monotonic() + WAIT_S
        while "a message of more than" not in caplog.text:
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                link.send(b"x" * 10_000)
            inbox.collect()


def test_nothing_listens_after_the_end(inbox):
    """Catches: a port that stays open with a child that was forked meanwhile."""
    child = os.dup(inbox._listener.fileno())
    inbox.close()
    with pytest.raises(ConnectionRefusedError):
        outbox_of(inbox).post(REPORTS)
    inbox.close()
    os.close(child)


def test_rank_0_listens_at_one_address_of_its_host():
    """Catches: a port on all interfaces; an address of another host that ends the search."""
    with mailbox._listening(["192.0.2.1", "127.0.0.1"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    for host in ("127.0.1.1", "::1", "fe80::1%lo", "0.0.0.0", "::"):
        assert not mailbox._is_distant(host)
    assert mailbox._is_distant("10.0.0.5")


def test_all_ranks_have_a_mailbox_on_loopback():
    """Catches: a job on a single host that needs a name of it, or that strangers can reach."""
    boxes = run_ranks(3, partial(mailbox_of, exchange_timeout_s=60.0))
    assert [type(box) for box in boxes] == [ReportServer, Outbox, Outbox]
    assert boxes[0].address.host == "127.0.0.1"
    boxes[2].post([WriterForked(OF, 2, 3)])
    assert collected(boxes[0], 1) == [WriterForked(OF, 2, 3)]
    boxes[0].close()


def apart(monkeypatch, *names: str) -> None:
    """Put each rank on a host of its own; rank 0 has these names."""
    networks = itertools.count()
    monkeypatch.setattr(mailbox, "_network", lambda: str(next(networks)))
    monkeypatch.setattr(mailbox, "_hosts", lambda: list(names))


def test_ranks_of_several_hosts_use_an_address_that_others_know(monkeypatch):
    """Catches: a name that means another host, or loopback, and hides the one that leads here."""
    apart(monkeypatch, "no name", "192.0.2.1", "127.0.1.1", "127.0.0.1")
    monkeypatch.setattr(mailbox, "_is_distant", lambda address: address != "127.0.1.1")
    boxes = run_ranks(2, partial(mailbox_of, exchange_timeout_s=60.0))
    assert boxes[0].address.host == "127.0.0.1"
    boxes[0].close()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def unreachable(monkeypatch, released) -> None:
    apart(monkeypatch, "192.0.2.1", "localhost")


def unresolved(monkeypatch, released) -> None:
    """A name service that does not answer."""
    apart(monkeypatch, "unanswered")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait() and [])


def refused(monkeypatch, released) -> None:
    """A rank whose connections are refused."""
    send = Outbox.post

    def refuse(self: Outbox, *said) -> None:
        if self._rank == 2:
            raise ConnectionRefusedError("refused")
        send(self, *said)

    monkeypatch.setattr(Outbox, "post", refuse)


def lost(monkeypatch, released) -> None:
    """Another process that takes the first words."""
    monkeypatch.setattr(Outbox, "post", lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (unreachable, "set MASTER_ADDR"),
        (unresolved, "set MASTER_ADDR"),
        (refused, "between rank 0 and rank 2: ConnectionRefusedError"),
        (lost, "no word from rank 1, 2"),
    ],
)
def test_all_ranks_have_a_mailbox_or_none(monkeypatch, caplog, released, fault, said):
    """Catches: a rank that waits in a collective which another rank left out; a start that waits
    longer than the ranks for each other."""
    fault(monkeypatch, released)
    before = len(os.listdir("/proc/self/fd"))
    found = run_ranks(3, partial(mailbox_of, exchange_timeout_s=1.0), timeout_s=8.0)
    assert found == [None, None, None]
    assert "reports of saves wait for poll()" in caplog.text
    assert said in caplog.text
    assert len(os.listdir("/proc/self/fd")) <= before, "the port is open"


def test_one_rank_needs_no_connection():
    """Catches: a port that is opened for nothing."""
    [box] = run_ranks(1, partial(mailbox_of, exchange_timeout_s=60.0))
    assert isinstance(box, OneRank)
    assert box.collect() == []
