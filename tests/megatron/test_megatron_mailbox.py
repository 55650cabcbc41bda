"""Reports over a store of torch: each arrives once, in order, and runs no code."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from ckptfsm.core.events import Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import OneRank
from ckptfsm.megatron import mailbox
from ckptfsm.megatron.mailbox import StoreMailbox, decoded, encoded, mailbox_of
from ckptfsm.testing.fakes import run_ranks

pytestmark = pytest.mark.megatron

OF = AttemptId(5, 1, 2)
REPORTS = [
    WriterForked(OF, 1, 2),
    ShardReported(OF, "state", 1, 2, 7),
    Failed(OF, "writer_hung", "rank 1: its writer missed its deadline", 1),
]


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_the_same_on_the_other_side(report):
    """Catches: a field that is left out, or that comes back as a list."""
    assert decoded(encoded(report)) == report


@pytest.mark.parametrize("bad", [{"name": "pickle"}, {"name": "failed", "of": {}}])
def test_other_messages_are_refused(bad):
    """Catches: a message from elsewhere that is taken for a report."""
    with pytest.raises((ValueError, TypeError)):
        decoded({"of": {"step": 1, "epoch": 1, "attempt": 1}, **bad})
    assert WriterGone.name not in mailbox._KINDS


def test_reports_arrive_once_and_in_order():
    """Catches: reports that are lost between ranks, or that come again with each look."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rank_0, rank_1 = (
        StoreMailbox(server),
        StoreMailbox(TCPStore("localhost", server.port, is_master=False)),
    )
    assert rank_0.collect() == []
    rank_1.post(REPORTS[:2])
    rank_1.post(REPORTS[2:])
    assert rank_0.collect() == REPORTS
    assert rank_0.collect() == []


def test_a_message_that_does_not_come_holds_up_no_other():
    """Catches: rank 0 that waits for a rank which died between two calls."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    box = StoreMailbox(server)
    server.add("count", 1)
    box.post(REPORTS[:1])
    assert box.collect() == REPORTS[:1]
    server.set("1", "[]")
    assert box.collect() == []
    assert box._awaited == []


def test_all_ranks_have_a_mailbox_or_none(monkeypatch, caplog):
    """Catches: a rank that waits in a collective which another rank left out."""
    monkeypatch.setattr(mailbox, "_hosts", lambda: ["localhost"])
    assert all(isinstance(box, StoreMailbox) for box in run_ranks(3, mailbox_of))
    monkeypatch.setattr(mailbox, "_connected", lambda hosts, port: (None, "no route"))
    assert run_ranks(2, mailbox_of) == [None, None]
    assert "reports of saves wait for poll()" in caplog.text


def test_one_rank_needs_no_connection():
    """Catches: a port that is opened for nothing."""
    [box] = run_ranks(1, mailbox_of)
    assert isinstance(box, OneRank)
    assert box.collect() == []
