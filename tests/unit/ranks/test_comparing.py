"""Ranks compare their values before a save: keys, bytes, and trees of files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import RanksDisagreeWarning, SaveRefused
from ckptfsm.core.formats import DCP, TORCH_DIST
from ckptfsm.core.parts import PartSpec
from ckptfsm.ranks.comparing import Comparison, Difference
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.proposal import Proposal
from ckptfsm.writers.plain_files import FileTree

QUICK = {"exit_timeout_s": 0.5, "close_timeout_s": 20.0, "busy_timeout_s": 20.0}
STATE = {"w": 1}


def together(root: Path, work: Callable[[Manager], Any], ranks: int = 2, **settings: Any) -> list:
    """Run ``work`` with one manager per rank; what each returned or raised."""

    def one(transport: ThreadTransport) -> Any:
        driver = FakeDriver(transport.rank)
        ports = fake_ports(root, transport=transport, driver=driver)
        with Manager(ports, make_config({**QUICK, **settings}), ()) as manager:
            return work(manager)

    return run_ranks(ranks, one)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "ranks_disagree"]


# ------------------------------------------------------------------------------------- the keys


@dataclass
class Drafted:
    digests: Mapping[str, Mapping[str, int]]
    kind: str = TORCH_DIST.name
    specs: tuple[PartSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = tuple(PartSpec(name, self.kind, name) for name in self.digests)


def compare(
    *saves: list[Mapping[str, Mapping[str, int]]],
    mode: Any = "warn",
    kind: str = TORCH_DIST.name,
) -> list[Any]:
    """The differences that rank 0 finds at each save; a save has the digests of each rank."""
    ranks = len(saves[0])

    def one(transport: ThreadTransport) -> list[tuple[Difference, ...]]:
        comparison, heard = Comparison(transport, mode), []
        for save in saves:
            draft: Any = Drafted(save[transport.rank], kind)
            proposal = replace(
                Proposal(1, ranks, draft.specs), digests=comparison.digests_of(draft)
            )
            heard.append(comparison.differences(transport.gather(proposal), draft))
        return heard

    first, *others = run_ranks(ranks, one)
    assert all(each == first for each in others), "every rank knows the same keys"
    return first


def test_a_key_that_differs_is_named_once_with_its_ranks():
    """Catches: a key that is kept in silence; a warning at every save; a digest that still counts a
    named key, so that every save asks for all keys again."""
    one = {"state": {"step": 5, "loader.position": 100}}
    two = {"state": {"step": 5, "loader.position": 101}}
    late = {"state": {"step": 6, "loader.position": 102}}
    heard = compare([one, two, one], [one, two, two], [one, one, late])
    assert heard[0] == (Difference("state", "loader.position", 0, (1,)),)
    assert heard[1] == ()
    assert heard[2] == (Difference("state", "step", 0, (2,)),)
    assert "key 'loader.position' of rank 1 is not that of rank 0" in str(heard[0][0])
    assert "PerRank(value)" in str(heard[0][0])


def test_a_refused_key_is_named_at_every_save():
    """Catches: ``ranks_disagree="refuse"`` that lets the second try pass."""
    one, two = {"state": {"a": 1}}, {"state": {"a": 2}}
    assert [len(found) for found in compare([one, two], [one, two], mode="refuse")] == [1, 1]


def test_a_key_that_a_rank_does_not_have_differs():
    """Catches: a value of one rank alone, which is lost or given to all."""
    (found,) = compare([{"state": {"a": 1}}, {"state": {"a": 1, "b": 2}}])
    assert [each.key for each in found] == ["b"]


def test_a_key_of_its_own_is_no_difference_where_ranks_may_have_them():
    """Catches: a warning of each rank's own keys; two exchanges at every save because of them; a
    difference that is not told beside them."""
    one, two = {"state": {"a": 1, "x": 1}}, {"state": {"a": 1, "y": 1}}
    late = {"state": {"a": 2, "y": 2}}
    for mode in ("warn", "refuse"):
        heard = compare([one, two], [one, two], [one, late], mode=mode, kind=DCP.name)
        assert [[each.key for each in found] for found in heard] == [[], [], ["a"]]


def test_ranks_that_have_a_key_are_compared_without_the_first():
    """Catches: replicas of a later stage that disagree, because the first rank lacks the key."""
    one, two, three = ({"state": each} for each in ({"x": 1}, {"y": 1}, {"y": 2}))
    (found,) = compare([one, two, three], kind=DCP.name)
    assert found == (Difference("state", "y", 1, (2,)),)


def test_a_part_is_compared_with_the_first_of_its_ranks():
    """Catches: a comparison with rank 0, which does not have the part."""
    (found,) = compare([{}, {"critic": {"a": 1}}, {"critic": {"a": 2}}, {"critic": {"a": 1}}])
    assert found == (Difference("critic", "a", 1, (2,)),)


def test_few_of_many_ranks_send_their_keys():
    """Catches: the keys of 100,000 ranks in the memory of one."""
    saves = [{"state": {"a": rank}} for rank in range(13)]
    (found,) = compare(saves)
    assert found == (Difference("state", "a", 0, tuple(range(1, 9)), more=4),)
    assert "perhaps 4 more" in str(found[0])


def test_many_keys_that_differ_are_told_in_few_lines(caplog):
    """Catches: a line of log for each parameter of an optimizer, in a job or in a group."""
    found = [Difference("state", f"key{number}", 0, (1,)) for number in range(100)]
    with caplog.at_level(logging.WARNING):
        lines = Comparison(LocalTransport(), "warn").warn_of(7, found)
    assert said(caplog) == lines and len(lines) < 12
    assert "92 more keys" in lines[-1] and "state: key8," in lines[-1] and len(lines[-1]) < 600


# ------------------------------------------------------------------------------------- a manager


def test_bytes_that_differ_are_warned_of_at_rank_0(tmp_path, caplog):
    """Catches: bytes of one rank that are kept for all, without a word."""

    def work(manager: Manager) -> Any:
        parts = {"state": STATE, "loader.pt": b"%d" % manager.rank, "same.pt": b"1"}
        for step in (1, 2):
            manager.save(step, parts=parts).wait()
        return manager.latest_step()

    with caplog.at_level(logging.WARNING), pytest.warns(RanksDisagreeWarning) as warned:
        assert together(tmp_path, work) == [2, 2]
    (line,) = said(caplog)
    assert "step 1: part 'loader.pt': its bytes of rank 1" in line
    shown = [w for w in warned if w.category is RanksDisagreeWarning]
    assert [str(w.message) for w in shown] == [line]


def test_what_is_the_same_is_not_mentioned(tmp_path, caplog):
    """Catches: a false warning: equal bytes, a tree of one rank, a tree that says what it is."""

    def work(manager: Manager) -> Any:
        tree = FileTree(make_files) if manager.rank else None
        stated = FileTree(make_files, every_rank=False)
        parts = {"state": STATE, "note": b"1", "mine": tree, "stated": stated}
        return manager.save(1, parts=parts).wait()

    with caplog.at_level(logging.WARNING):
        together(tmp_path, work)
    assert said(caplog) == []


def make_files(directory: str) -> None:
    Path(directory, "file").write_text("a")


@pytest.mark.parametrize("second", [b"1", FileTree(make_files)])
def test_refused_on_every_rank_if_that_was_asked_for(tmp_path, second):
    """Catches: a rank that goes on with a save that the others refuse; a second try that passes."""

    def work(manager: Manager) -> Any:
        part = b"0" if isinstance(second, bytes) and manager.rank == 0 else second
        for step in (1, 2):
            with pytest.raises(SaveRefused, match="part 'note'") as caught:
                manager.save(step, parts={"state": STATE, "note": part})
            assert caught.value.facts["ranks"] == (1,)
        manager.save(3, parts={"state": STATE, "note": b"0"}).wait()
        return manager.all_steps()

    assert together(tmp_path, work, ranks_disagree="refuse") == [[3], [3]]


def test_a_tree_that_several_ranks_give_is_warned_of(tmp_path, caplog):
    """Catches: files of the other ranks that nobody writes, without a word."""

    def work(manager: Manager) -> None:
        for step in (1, 2):
            manager.save(step, parts={"state": STATE, "loader": FileTree(make_files)}).wait()

    with caplog.at_level(logging.WARNING):
        together(tmp_path, work, 3)
    (line,) = said(caplog)
    assert "part 'loader': rank 1, 2 gives a FileTree too" in line and "every_rank=True" in line
