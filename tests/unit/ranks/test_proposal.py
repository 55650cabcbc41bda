"""The proposal of each rank, and the agreement of all: no process is forked here, nothing is
written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from ckptfsm.core.errors import ConfigError, SaveRefused
from ckptfsm.core.parts import AttemptId, OptionalPart, PartSpec, Planned, content_of
from ckptfsm.core.requests import Accepted, SaveRequest
from ckptfsm.ranks.proposal import Proposal, ProposedCall, agree, name_parts, propose

STATE = PartSpec("state")
ACTOR = PartSpec("actor", directory="actor")
CRITIC = PartSpec("critic", directory="critic")


@dataclass
class Drafted:
    specs: tuple[PartSpec, ...] = (STATE,)
    in_place: bool = False
    summary: Any = "sizes"
    expected_bytes: int = 7


class Trainer:
    """A driver that drafts what it is told to, or raises it."""

    def __init__(self, drafted: Drafted | BaseException) -> None:
        self.drafted = drafted
        self.asked: dict[str, Any] = {}

    def draft(self, parts: dict[str, Any]) -> Drafted:
        self.asked = parts
        if isinstance(self.drafted, BaseException):
            raise self.drafted
        return self.drafted


def of(*specs: PartSpec, **fields: Any) -> Proposal:
    return Proposal(**{"step": 5, "world_size": 2, "specs": specs, **fields})


def refused(*proposals: Proposal) -> SaveRefused:
    with pytest.raises(SaveRefused) as caught:
        agree(proposals)
    assert caught.value.step == 5
    return caught.value


# ------------------------------------------------------------------------------------- proposing


def test_a_state_alone_is_the_part_named_state():
    """Catches: a part's name that differs from the name that a restore looks for."""
    assert name_parts({"w": 1}, None) == {"state": {"w": 1}}
    assert name_parts(None, {"actor": 1, "critic": None}) == {"actor": 1, "critic": None}
    for both in (({}, {}), (None, None)):
        with pytest.raises(ConfigError, match="either a state or named parts"):
            name_parts(*both)


class Module:
    """As of torch: it is called to compute, and has its state elsewhere."""

    def __call__(self, x):
        raise AssertionError("the model was called")

    def state_dict(self):
        return {}


def test_a_model_in_the_place_of_its_state_is_refused():
    """Catches: a module that is called for a state, and fails for want of its arguments."""
    for given in ((Module(), None), (None, {"model": Module()})):
        with pytest.raises(ConfigError, match="Module.* give a state dict"):
            name_parts(*given)
    named = type("State", (dict,), {"state_dict": None})(w=1)
    assert name_parts(named, None) == {"state": {"w": 1}}


def test_functions_are_called_when_the_save_begins():
    """Catches: a state that is built before it is asked for, or never; an optional one forgotten."""
    found = name_parts(None, {"a": dict, "b": OptionalPart(list), "c": OptionalPart(3)})
    assert found["a"] == {} and found["b"] == OptionalPart([]) and found["c"] == OptionalPart(3)
    assert content_of(found["b"]) == [] and content_of(4) == 4


def test_a_proposal_says_all_that_the_draft_says():
    """Catches: a field of the draft that never reaches the coordinator."""
    trainer = Trainer(Drafted((ACTOR,), True, "sizes", 9))
    call = ProposedCall(parts={"actor": 1, "critic": None})
    draft, proposal = propose(trainer, 2, 5, call, {"loss": 1})
    assert draft is trainer.drafted and trainer.asked == {"actor": 1, "critic": None}
    elsewhere = frozenset({"critic"})
    assert proposal == Proposal(5, 2, (ACTOR,), elsewhere, True, "sizes", 9, (("loss", 1.0),))


@pytest.mark.parametrize(
    ("drafted", "metrics", "text"),
    [
        (MemoryError("no room"), None, "MemoryError: no room"),
        (GeneratorExit("odd"), None, "GeneratorExit: odd"),
        (Drafted(), {"loss": "low"}, "the metric 'loss'"),
    ],
)
def test_I10_an_error_on_one_rank_is_part_of_its_proposal(drafted, metrics, text, caplog):
    """Catches: a rank that raises before the exchange, and leaves the others waiting in it."""
    draft, proposal = propose(Trainer(drafted), 2, 5, ProposedCall({}), metrics)
    assert draft is None and text in proposal.error
    assert proposal == Proposal(5, 2, error=proposal.error)
    (record,) = caplog.records
    assert record.event == "draft_failed" and record.step == 5 and record.exc_info


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_proposal(error):
    """Catches: a Ctrl-C that becomes a refused save."""
    with pytest.raises(error):
        propose(Trainer(error()), 1, 5, ProposedCall({}), None)


# -------------------------------------------------------------------------------------- agreeing


def test_the_request_stands_for_all_proposals():
    """Catches: a rank's bytes, ranks, metrics or path that the request forgets."""
    one = of(ACTOR, STATE, in_place=True, expected_bytes=3, metrics=(("loss", 1.0),))
    two = of(STATE, elsewhere=frozenset({"actor"}), in_place=True, expected_bytes=4)
    assert agree([one, two]) == SaveRequest(
        5, (replace(ACTOR, ranks=(0,)), STATE), 2, True, (("loss", 1.0),), 7
    )


def test_parts_come_in_the_order_in_which_the_ranks_give_them():
    """Catches: an order that differs from rank to rank, or from run to run."""
    one = of(CRITIC, elsewhere=frozenset({"actor", "state"}))
    two = of(STATE, ACTOR, elsewhere=frozenset({"critic"}))
    request = agree([one, two])
    assert [p.name for p in request.parts] == ["critic", "state", "actor"]
    assert [p.ranks for p in request.parts] == [(0,), (1,), (1,)] and not request.in_place


@pytest.mark.parametrize("kind", ["file", "tree"])
def test_plain_files_are_written_by_the_first_of_their_ranks(kind):
    """Catches: two ranks that write one file."""
    note = PartSpec("note", kind, "note")
    mine = of(note, STATE)
    assert agree([mine, mine]).parts[0].ranks == (0,)
    away = of(STATE, elsewhere=frozenset({"note"}))
    assert {p.name: p.ranks for p in agree([away, mine]).parts} == {"state": None, "note": (1,)}


def test_F10_every_rank_that_cannot_prepare_is_named():
    """Catches: an error of one rank that is told as the error of another rank, or hides the next."""
    fine, broken = of(STATE, world_size=3), of(error="disk on fire", world_size=3)
    found = refused(fine, broken, replace(broken, error="other"))
    assert "rank 1, 2 cannot prepare the save: disk on fire" in found.message.replace(" and ", ", ")
    assert found.rank == 1 and found.ranks == (1, 2)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (of(STATE, world_size=3), "rank 1 reports a world size of 3, not 2"),
        (of(STATE, step=6), "rank 1 asks for step 6 or parts that rank 0 does not ask for"),
        (of(ACTOR), "parts that rank 0 does not ask for"),
        (of(STATE, elsewhere=frozenset({"actor"})), "parts that rank 0 does not ask for"),
        (of(replace(STATE, kind="foreign")), "describes part 'state' otherwise than rank 0"),
        (of(replace(STATE, optional=True)), "describes part 'state' otherwise than rank 0"),
    ],
)
def test_F13_ranks_that_ask_for_different_things_are_refused(second, text):
    """Catches: a checkpoint made of two different saves."""
    found = refused(of(STATE), second)
    assert text in found.message and found.rank == 1
    assert "describes" not in text or found.part == "state"


def test_a_part_that_no_rank_writes_is_refused():
    """Catches: a declared part that is silently not in the checkpoint."""
    away = of(STATE, elsewhere=frozenset({"critic", "actor"}))
    found = refused(away, away)
    assert "no rank writes part 'actor'" in found.message and found.part == "actor"


def test_a_foreign_request_is_every_ranks():
    """Catches: a collective in a finalizer that some ranks never enter."""
    foreign = PartSpec("state", "foreign")
    found = refused(of(foreign), of(elsewhere=frozenset({"state"})))
    assert "every rank must have one" in found.message and found.part == "state"
    assert agree([of(foreign), of(foreign)]).parts == (foreign,)


def test_all_ranks_that_write_agree_on_the_path():
    """Catches: half a checkpoint in place and half in staging."""
    found = refused(of(STATE, in_place=True), of(STATE))
    assert "some ranks write in place, others do not" in found.message
    nothing = of(elsewhere=frozenset({"state"}))
    assert agree([of(STATE, in_place=True), nothing]).in_place


# -------------------------------------------------------------------------------------- accepted


def test_each_rank_gets_its_parts_and_each_first_rank_its_plan():
    """Catches: a plan that is sent to everybody, or not to the one rank that needs it."""
    optional = PartSpec("export", "tree", "export", (0, 2), optional=True)
    parts = (optional, STATE, replace(CRITIC, ranks=(1, 2)))
    plans = {"state": Planned(b"s", b"of all"), "critic": Planned(b"c")}
    accepted = Accepted(AttemptId(5, 1, 1), False, parts, plans)
    assert accepted.for_others() == replace(
        accepted, planned={"state": Planned(b"", b"of all"), "critic": Planned(b"c")}
    )
    assert [p.name for p in accepted.of_rank(0)] == ["state", "export"]
    assert [p.name for p in accepted.of_rank(1)] == ["state", "critic"]
    assert [p.name for p in accepted.of_rank(2)] == ["state", "critic", "export"]
