"""The life of all checkpoints of a root as a transition relation for z3, whatever their number.

The relation is written by hand, beside the table and not generated from it, so that the two check
each other. A test compares names, sources and destinations, and evaluates the formulas below on
random states against ``lifecycle.apply`` and ``Ledger``. The proof (``tests/proof/inductive.py``)
shows that ``INVARIANT`` holds initially, that every rule keeps it, and that no rule breaks a
promise of ``STEPS``. The number of checkpoints, steps, ranks and parts is unbounded in it.

How to read the relation:

* A ``World`` is one state: for each variable of ``VARIABLES`` a function from objects to a z3 term.
* A ``Rule`` is a guarded assignment. Rules of ``ROWS`` are the rows of the table, by ``row_key``.
  Rules of ``EFFECTS`` are the effects of commands on the disk, one system effect each, so that a
  crash can come between any two. Rules of ``WEATHER`` are events from outside: crashes, power loss,
  damage, readers, people.
* A condition is named after the code that establishes it: ``table``, ``ledger...`` (both compared
  with production). Other names say in words which fact on disk applier, effects or recovery have
  established before they post the event.
* Journal and ledger are one variable, ``state``. Production appends the record before the ledger
  moves, so a crash finds either both or neither. The record of an effect comes after the effect.
* ``place`` is the place where a reader sees a directory; ``maybe`` holds for every place where a
  power loss may show the directory. The tracker has the same pair: ``named`` and ``owner`` are its
  present state, ``maybe_owner`` and ``maybe_other`` its states after a power loss.
* Every formula is in the effectively propositional fragment, where z3 decides. No function leads
  back to a sort it came from, and no formula says "for every checkpoint there is a checkpoint".

Not modelled: epochs and the races of check and act (``races.pml``), time, sizes, retention policies
(any set of steps may be preserved), the trash's suffixes, devices and symbolic links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from z3 import (
    And,
    Bool,
    BoolSort,
    BoolVal,
    Const,
    DeclareSort,
    EnumSort,
    Exists,
    ForAll,
    Function,
    If,
    Implies,
    Not,
    Or,
)

StateSort, STATES = EnumSort(
    "State",
    (
        "absent",
        "requested",
        "forked",
        "shards_written",
        "finalized",
        "tracked",
        "prunable",
        "pruned",
        "failed",
        "discarded",
        "quarantined",
    ),
)
(ABSENT, REQUESTED, FORKED, SHARDS_WRITTEN, FINALIZED, TRACKED) = STATES[:6]
(PRUNABLE, PRUNED, FAILED, DISCARDED, QUARANTINED) = STATES[6:]
PlaceSort, PLACES = EnumSort("Place", ("nowhere", "staging", "published", "trash", "aside", "gone"))
NOWHERE, STAGING, PUBLISHED, TRASH, ASIDE, GONE = PLACES

Checkpoint = DeclareSort("Checkpoint")  # one attempt
Step, Rank, Report = (DeclareSort(name) for name in ("Step", "Rank", "Report"))
BOOL = BoolSort()

# These functions never change. A report is one declared (part, rank); steps are in order.
step = Function("step", Checkpoint, Step)
older = Function("older", Step, Step, BOOL)
writing = Function("writing", Checkpoint, Rank, BOOL)
expected = Function("expected", Checkpoint, Report, BOOL)
rank_of = Function("rank_of", Report, Rank)
foreign = Function("foreign", Checkpoint, BOOL)  # has finalizers, which every rank runs

VARIABLES: dict[str, tuple[Any, ...]] = {
    # The ledger, as journaled.
    "state": (Checkpoint, StateSort),
    "declared": (Checkpoint, BOOL),  # its parts are known: requested here, not adopted
    "rolling": (BOOL,),  # a rollback was begun and is not finished
    "afresh": (BOOL,),  # ... to nothing: a fresh start
    "target": (Checkpoint,),  # ... to this one
    # The ledger, in memory only.
    "forked": (Checkpoint, Rank, BOOL),
    "reported": (Checkpoint, Report, BOOL),
    "gone": (Checkpoint, Rank, BOOL),
    "finalizers_ran": (Checkpoint, Rank, BOOL),
    "published": (Checkpoint, BOOL),  # has its published name; the journal may not say so yet
    "seen_pin": (Step, BOOL),
    "seen_lease": (Step, BOOL),
    "seen_job": (Step, BOOL),
    "cleared": (Checkpoint, BOOL),  # the second look of its prune found no pin and no lease
    # The disk.
    "place": (Checkpoint, PlaceSort),
    "maybe": (Checkpoint, PlaceSort, BOOL),
    "whole": (Checkpoint, BOOL),  # manifest and every file of it are there
    "receipt": (Checkpoint, Report, BOOL),
    "pin": (Step, BOOL),
    "lease": (Step, BOOL),
    "job": (Step, BOOL),  # one holds it, whose record does not say that it is done
    "named": (BOOL,),  # the tracker is as we wrote it, for ``owner``
    "owner": (Checkpoint,),
    "misread": (Step,),  # the step in a tracker that others wrote
    "maybe_owner": (Checkpoint, BOOL),
    "maybe_other": (BOOL,),  # no tracker, or one that others wrote
    # Seen by the proof only.
    "held": (Checkpoint, BOOL),  # a reader was told that it is there, and still reads
    "damaged": (Checkpoint, BOOL),  # from outside
    "meddled": (BOOL,),  # others wrote or removed the tracker since our last write
    "fell_back": (
        BOOL,
    ),  # a checkpoint was withdrawn as damaged, and the root has not settled since
    "has_top": (BOOL,),
    "top": (Step,),  # the newest acknowledged step
}


class World:
    """A state: ``world.state(c)`` and so on, one function per variable, returning z3 terms."""

    def __init__(self, read: Mapping[str, Callable[..., Any]]) -> None:
        self._read = dict(read)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self._read[name]
        except KeyError:
            raise AttributeError(name) from None

    def having(self, **changes: Callable[..., Any]) -> World:
        """The same world with some variables changed."""
        unknown = set(changes) - set(self._read)
        if unknown:
            raise KeyError(f"no variable {unknown}")
        return World({**self._read, **changes})

    def at(self, name: str, *point: Any, to: Any) -> World:
        """The same world with one variable changed at one point."""
        before = self._read[name]

        def read(*where: Any) -> Any:
            here = [a == b for a, b in zip(where, point, strict=True)]
            return If(And(*here), to, before(*where)) if here else to

        return self.having(**{name: read})

    @classmethod
    def symbolic(cls) -> World:
        """A world of variables that z3 chooses freely."""
        made = {name: Function(name, *sorts) for name, sorts in VARIABLES.items()}
        return cls(made)


Condition = Callable[[World], Any]


@dataclass(frozen=True)
class Rule:
    """A guarded assignment. ``conditions`` are by name; see the module."""

    name: str
    then: Callable[[World], World]
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    def enabled(self, world: World, without: Collection[str] = ()) -> Any:
        """All conditions but those named in ``without``."""
        kept = (holds for name, holds in self.conditions.items() if name not in without)
        return And(*(holds(world) for holds in kept))


# The objects that rules are about, chosen freely by z3 (or by a test), and bound variables.
P, T = Const("p", Checkpoint), Const("t", Checkpoint)
R, Q = Const("r", Rank), Const("q", Report)
S, NEWER = Const("s", Step), Const("newer_step", Step)
FITS, HAS_NEWER, KEPT = (Bool(n) for n in ("fits", "has_newer", "kept"))
SHOWN = Function("shown", Checkpoint, PlaceSort)  # where a power loss shows each directory
SHOWN_OWNER, SHOWN_OTHER = Const("shown_owner", Checkpoint), Bool("shown_other")
RECALLED = Function("recalled", Checkpoint, Rank, BOOL)  # forks that a snapshot remembers
FRESH = Const("fresh_misread", Step)
_c, _d = Const("c", Checkpoint), Const("d", Checkpoint)
_r, _q = Const("r1", Rank), Const("q1", Report)
_a, _b, _e = (Const(f"s{i}", Step) for i in range(3))
_x = Const("x", PlaceSort)

ORDER = And(
    ForAll([_a], Not(older(_a, _a))),
    ForAll([_a, _b, _e], Implies(And(older(_a, _b), older(_b, _e)), older(_a, _e))),
    ForAll([_a, _b], Or(older(_a, _b), older(_b, _a), _a == _b)),
)
FIXED = And(ORDER, ForAll([_c, _q], Implies(expected(_c, _q), writing(_c, rank_of(_q)))))


# ------------------------------------------------------------------------------------- vocabulary


def is_in(term: Any, *values: Any) -> Any:
    return Or(*(term == value for value in values))


def in_flight(w: World, c: Any) -> Any:
    return is_in(w.state(c), REQUESTED, FORKED, SHARDS_WRITTEN, FINALIZED)


def nothing_in_flight(w: World) -> Any:
    return ForAll([_c], Not(in_flight(w, _c)))


def newest_tracked(w: World, c: Any) -> Any:
    higher = And(w.state(_d) == TRACKED, older(step(c), step(_d)))
    return And(w.state(c) == TRACKED, Not(Exists([_d], higher)))


def some_tracked(w: World) -> Any:
    return Exists([_d], w.state(_d) == TRACKED)


def surely(w: World, c: Any, *places: Any) -> Any:
    """Whether ``c`` is at one of these places whatever a power loss does."""
    return And(*(Not(w.maybe(c, x)) for x in PLACES if not any(x.eq(y) for y in places)))


def reads_newer_than(w: World, c: Any) -> Any:
    """The tracker on disk says a step after that of ``c``."""
    mine, other = older(step(c), step(w.owner())), older(step(c), w.misread())
    return If(w.named(), mine, other)


def reads(w: World, s: Any) -> Any:
    return If(w.named(), step(w.owner()) == s, w.misread() == s)


def surely_named(w: World, c: Any) -> Any:
    """The tracker names ``c``, durably."""
    others = Exists([_d], And(w.maybe_owner(_d), _d != c))
    return And(w.named(), w.owner() == c, Not(w.maybe_other()), Not(others))


def goes(w: World, dest: Any) -> World:
    return w.at("state", P, to=dest)


def moved_to(w: World, place: Any) -> World:
    """``P`` is renamed; its old name may come back until both directories are durable."""
    return w.at("place", P, to=place).at("maybe", P, place, to=BoolVal(True))


def name_is_free(w: World) -> Any:
    taken = And(w.place(_d) == PUBLISHED, step(_d) == step(P))
    return Not(Exists([_d], taken))


# ----------------------------------------------------------------------------------- rows of the table


def _row(
    source: Any,
    event: str,
    dest: Any,
    guard: str = "",
    when: Condition | None = None,
    then: Callable[[World], World] | None = None,
    **more: Condition,
) -> Rule:
    key = f"{source} {event}{f'[{guard}]' if guard else ''} -> {dest}"
    conditions: dict[str, Condition] = {"source": lambda w: w.state(P) == source}
    if when is not None:
        conditions["table"] = when
    conditions |= {name.replace("__", ".").replace("_", " "): c for name, c in more.items()}
    absorb = then or (lambda w: w)
    return Rule(key, lambda w: goes(absorb(w), dest), conditions)


def _others_forked(w: World) -> Any:
    return ForAll([_r], Implies(And(writing(P, _r), _r != R), w.forked(P, _r)))


def _others_reported(w: World) -> Any:
    return ForAll([_q], Implies(And(expected(P, _q), _q != Q), w.reported(P, _q)))


def _others_finalizers_ran(w: World) -> Any:
    return ForAll([_r], Implies(And(writing(P, _r), _r != R), w.finalizers_ran(P, _r)))


def _news_of_finalizers(w: World) -> Any:
    awaited = And(foreign(P), Not(w.published(P)))
    return And(awaited, writing(P, R), Not(w.finalizers_ran(P, R)))


def _finalizers(w: World) -> World:
    return w.at("finalizers_ran", P, R, to=BoolVal(True))


def _published_durably(w: World) -> Any:
    return And(w.place(P) == PUBLISHED, surely(w, P, PUBLISHED))


def _others_gone(w: World) -> Any:
    return ForAll([_r], Implies(And(writing(P, _r), _r != R), w.gone(P, _r)))


def _news_of_fork(w: World) -> Any:
    return And(FITS, writing(P, R), Not(w.forked(P, R)))


def _news_of_shard(w: World) -> Any:
    fresh = And(FITS, expected(P, Q), Not(w.reported(P, Q)))
    return And(fresh, w.forked(P, rank_of(Q)))


def _news_of_end(w: World) -> Any:
    return And(writing(P, R), Not(w.gone(P, R)))


def _all_gone(w: World) -> Any:
    return ForAll([_r], Implies(writing(P, _r), w.gone(P, _r)))


def _is_new(w: World) -> Any:
    return Not(w.declared(P))


def _may_go(w: World) -> Any:
    return And(HAS_NEWER, older(step(P), NEWER), Not(KEPT))


def _offered(w: World) -> Any:
    """``Ledger._offer``: the newest tracked step, and everything that keeps this one."""
    newest = Exists([_c], And(newest_tracked(w, _c), step(_c) == NEWER))
    kept = Or(w.seen_pin(step(P)), w.seen_lease(step(P)), w.seen_job(step(P)))
    return And(HAS_NEWER, newest, Implies(kept, KEPT))


def _grows(w: World) -> Any:
    return ForAll([_c], Implies(w.state(_c) == TRACKED, older(step(_c), step(P))))


def _every_receipt(w: World) -> Any:
    return ForAll([_q], Implies(expected(P, _q), w.receipt(P, _q)))


def _found_whole(w: World) -> Any:
    return And(surely(w, P, PUBLISHED), w.whole(P), _every_receipt(w))


def _tracker_is_damage(w: World) -> Any:
    return ForAll([_c], Implies(w.maybe_owner(_c), w.damaged(_c)))


def _withdrawn(w: World) -> Any:
    """``P`` is damaged, or is newer than a rollback's target, or is given up by a fresh start.

    Damage counts if another checkpoint is tracked, or if the tracker can name damaged ones only.
    """
    another = Exists([_d], And(w.state(_d) == TRACKED, _d != P))
    damaged = And(w.damaged(P), Or(another, _tracker_is_damage(w)))
    back = And(w.rolling(), Not(w.afresh()), older(step(w.target()), step(P)))
    back = And(back, w.state(w.target()) == TRACKED, surely_named(w, w.target()))
    fresh = And(w.rolling(), w.afresh(), Not(Exists([_d], w.maybe_owner(_d))), Not(w.named()))
    return Or(damaged, back, fresh)


def tops(w: World, c: Any) -> World:
    """``c`` is acknowledged: the newest acknowledged step is its step, if that is newer."""
    newer = Or(Not(w.has_top()), older(w.top(), step(c)))
    return w.having(top=lambda: If(newer, step(c), w.top()), has_top=lambda: BoolVal(True))


def _acknowledge(w: World) -> World:
    return tops(w, P)


def _top_again(w: World) -> World:
    """The newest tracked checkpoint, ``P`` if there is any, becomes the newest acknowledged one."""
    return w.having(top=lambda: step(P), has_top=lambda: some_tracked(w))


def _withdraw(w: World) -> World:
    return w.having(fell_back=lambda: Or(w.fell_back(), w.damaged(P)))


def _not_newer(w: World) -> Any:
    return Exists([_d], And(w.state(_d) == TRACKED, older(step(P), step(_d))))


def _fork(w: World) -> World:
    return w.at("forked", P, R, to=BoolVal(True))


def _report(w: World) -> World:
    return w.at("reported", P, Q, to=BoolVal(True))


def _end(w: World) -> World:
    return w.at("gone", P, R, to=BoolVal(True))


def _end_all(w: World) -> World:
    return w.having(gone=lambda c, r: If(c == P, writing(c, r), w.gone(c, r)))


def _requested(w: World) -> World:
    return w.at("declared", P, to=BoolVal(True))


def _receipt(w: World) -> Any:
    return w.receipt(P, Q)


ROWS = (
    _row(
        ABSENT,
        "save_requested",
        REQUESTED,
        "the_attempt_is_new",
        _is_new,
        _requested,
        ledger__nothing_in_flight=nothing_in_flight,
        ledger__the_step_grows=_grows,
        no_rollback_is_unfinished=lambda w: Not(w.rolling()),
        nothing_complete_has_its_name=name_is_free,
        never_on_disk=lambda w: And(w.place(P) == NOWHERE, surely(w, P, NOWHERE)),
    ),
    _row(
        REQUESTED,
        "writer_forked",
        REQUESTED,
        "others_are_awaited",
        lambda w: And(_news_of_fork(w), Not(_others_forked(w))),
        _fork,
    ),
    _row(
        REQUESTED,
        "writer_forked",
        FORKED,
        "it_was_the_last",
        lambda w: And(_news_of_fork(w), _others_forked(w)),
        _fork,
    ),
    *(
        _row(
            source,
            "shard_reported",
            source,
            "others_are_awaited",
            lambda w: And(_news_of_shard(w), Not(_others_reported(w))),
            _report,
            its_receipt_is_durable=_receipt,
        )
        for source in (REQUESTED, FORKED)
    ),
    _row(
        FORKED,
        "shard_reported",
        SHARDS_WRITTEN,
        "every_shard_is_durable",
        lambda w: And(_news_of_shard(w), _others_reported(w), Not(foreign(P))),
        _report,
        its_receipt_is_durable=_receipt,
    ),
    _row(
        FORKED,
        "shard_reported",
        SHARDS_WRITTEN,
        "every_shard_is_durable_and_finalizers_are_due",
        lambda w: And(_news_of_shard(w), _others_reported(w), foreign(P)),
        _report,
        its_receipt_is_durable=_receipt,
    ),
    _row(
        SHARDS_WRITTEN,
        "finalizers_ran",
        SHARDS_WRITTEN,
        "others_are_awaited",
        lambda w: And(_news_of_finalizers(w), Not(_others_finalizers_ran(w))),
        _finalizers,
    ),
    _row(
        SHARDS_WRITTEN,
        "finalizers_ran",
        SHARDS_WRITTEN,
        "it_was_the_last",
        lambda w: And(_news_of_finalizers(w), _others_finalizers_ran(w)),
        _finalizers,
    ),
    _row(
        SHARDS_WRITTEN,
        "published_on_disk",
        SHARDS_WRITTEN,
        "it_is_not_published",
        lambda w: Not(w.published(P)),
        lambda w: w.at("published", P, to=BoolVal(True)),
        published_durably=_published_durably,
    ),
    _row(
        SHARDS_WRITTEN,
        "published",
        FINALIZED,
        "it_is_published",
        lambda w: w.published(P),
        published_durably=_published_durably,
    ),
    _row(
        FINALIZED,
        "tracker_written",
        TRACKED,
        then=_acknowledge,
        the_tracker_names_it_durably=lambda w: And(surely_named(w, P), Not(w.meddled())),
    ),
    _row(
        TRACKED,
        "superseded",
        PRUNABLE,
        "a_newer_one_is_tracked_and_nothing_keeps_it",
        _may_go,
        ledger__offered=_offered,
    ),
    _row(
        PRUNABLE,
        "reprieved",
        TRACKED,
        then=lambda w: w.at("cleared", P, to=BoolVal(False)),
        its_own_directory_has_its_name=lambda w: Or(
            And(w.place(P) == PUBLISHED, surely(w, P, PUBLISHED)), w.damaged(P)
        ),
    ),
    _row(
        PRUNABLE,
        "removed",
        PRUNED,
        left_its_name_durably=lambda w: Or(surely(w, P, TRASH, GONE), w.damaged(P)),
        second_look=lambda w: w.cleared(P),
    ),
    *(_row(source, "failed", FAILED) for source in (REQUESTED, FORKED)),
    _row(
        SHARDS_WRITTEN,
        "failed",
        FAILED,
        "it_is_not_published",
        lambda w: Not(w.published(P)),
    ),
    _row(
        FAILED,
        "writer_gone",
        FAILED,
        "others_are_awaited",
        lambda w: And(_news_of_end(w), Not(_others_gone(w))),
        _end,
    ),
    _row(
        FAILED,
        "writer_gone",
        FAILED,
        "it_was_the_last",
        lambda w: And(_news_of_end(w), _others_gone(w)),
        _end,
    ),
    _row(
        FAILED,
        "writers_lost",
        FAILED,
        "writers_may_live",
        lambda w: Not(_all_gone(w)),
        _end_all,
    ),
    _row(
        FAILED,
        "cleaned",
        DISCARDED,
        "every_writer_is_gone",
        _all_gone,
        left_its_name=lambda w: w.place(P) != PUBLISHED,
    ),
    *(
        _row(source, "found_published", FINALIZED, found_whole_when_opening=_found_whole)
        for source in (REQUESTED, FORKED, SHARDS_WRITTEN)
    ),
    _row(
        ABSENT,
        "adopted",
        TRACKED,
        "the_attempt_is_new",
        _is_new,
        _acknowledge,
        found_complete=lambda w: And(surely(w, P, PUBLISHED), w.place(P) == PUBLISHED, w.whole(P)),
        not_newer_than_the_tracker=lambda w: Implies(
            w.named(), Or(Not(older(step(w.owner()), step(P))), w.rolling())
        ),
        the_journal_was_settled_first=nothing_in_flight,
        opening_made_names_durable=lambda w: Implies(w.named(), Not(w.maybe_other())),
        pinned_first=lambda w: w.pin(step(P)),
    ),
    _row(TRACKED, "withdrawn", QUARANTINED, "", None, _withdraw, allowed=_withdrawn),
    _row(
        FINALIZED,
        "withdrawn",
        QUARANTINED,
        "",
        None,
        _withdraw,
        allowed=lambda w: Or(_withdrawn(w), _not_newer(w)),
    ),
    _row(
        PRUNABLE,
        "withdrawn",
        QUARANTINED,
        "",
        None,
        lambda w: _withdraw(w).at("cleared", P, to=BoolVal(False)),
        found_damaged=lambda w: w.damaged(P),
    ),
)


# --------------------------------------------------------------------------- effects of commands


def _writes_tracker(w: World, c: Any) -> World:
    written = w.having(named=lambda: BoolVal(True), owner=lambda: c)
    return written.at("maybe_owner", c, to=BoolVal(True))


def _prune_allowed(w: World) -> Any:
    newer = And(w.state(_d) == TRACKED, w.place(_d) == PUBLISHED, older(step(P), step(_d)))
    return And(reads_newer_than(w, P), Exists([_d], newer))


def _stays(w: World) -> Any:
    """``P`` is tracked under its name, or becomes so in its place: reprieved, or adopted."""
    there = And(surely(w, P, PUBLISHED), w.place(P) == PUBLISHED, Or(w.whole(P), w.damaged(P)))
    return And(is_in(w.state(P), ABSENT, TRACKED, PRUNABLE), there)  # its content is not read


def _newer_are_to_be_withdrawn(w: World) -> Any:
    newer = And(w.state(_d) == TRACKED, older(step(P), step(_d)))
    return ForAll([_d], Implies(newer, w.damaged(_d)))


def _tells_nothing_of_use(w: World) -> Any:
    """The tracker is torn, or others wrote it, or the checkpoint that it names is to leave its name."""
    newer = And(w.state(_d) == TRACKED, Not(older(step(_d), step(w.owner()))))
    overtaken = And(w.state(w.owner()) == FINALIZED, Exists([_d], newer))
    leaving = Or(w.damaged(w.owner()), w.state(w.owner()) == QUARANTINED, overtaken)
    return Implies(w.named(), leaving)


def _protected(w: World) -> Any:
    return Or(w.pin(step(P)), w.lease(step(P)))


def _nothing_open(w: World) -> Any:
    return ForAll([_c], Not(Or(in_flight(w, _c), w.state(_c) == PRUNABLE)))


def _tracker_is_elsewhere(w: World) -> Any:
    """No power loss makes the tracker name an undamaged checkpoint at the step of ``P``."""
    return Not(Exists([_d], And(w.maybe_owner(_d), step(_d) == step(P), Not(w.damaged(_d)))))


def _quarantine_allowed(w: World) -> Any:
    """No later attempt has the name of ``P``, and the tracker was moved away if any is tracked."""
    living = is_in(w.state(_d), FINALIZED, TRACKED, PRUNABLE)
    taken = Exists([_d], And(living, _d != P, step(_d) == step(P)))
    return And(Not(taken), Or(Not(reads(w, step(P))), Not(some_tracked(w))))


EFFECTS = (
    Rule(
        "staging made",
        lambda w: moved_to(w, STAGING),
        {"state": lambda w: w.state(P) == REQUESTED, "once": lambda w: w.place(P) == NOWHERE},
    ),
    Rule(
        "receipt put",
        lambda w: w.at("receipt", P, Q, to=BoolVal(True)),
        {"declared": lambda w: And(w.declared(P), expected(P, Q))},
    ),
    Rule(
        "published",
        lambda w: moved_to(w, PUBLISHED).at(
            "whole", P, to=And(Not(w.damaged(P)), _every_receipt(w))
        ),
        {
            "state": lambda w: w.state(P) == SHARDS_WRITTEN,
            "every receipt": _every_receipt,
            "from staging": lambda w: w.place(P) == STAGING,
            "the name is free": name_is_free,
        },
    ),
    Rule(
        "tracker written",
        lambda w: _writes_tracker(w, P),
        {
            "state": lambda w: w.state(P) == FINALIZED,
            "no rollback is unfinished": lambda w: Not(w.rolling()),
        },
    ),
    Rule(
        "tracker repaired",
        lambda w: _writes_tracker(w, P),
        {"newest": lambda w: newest_tracked(w, P)},
    ),
    Rule(
        "tracker put to what stays",  # at an opening, before anything is withdrawn
        lambda w: _writes_tracker(w, P),
        {
            "stays": _stays,
            "newer ones are to be withdrawn": _newer_are_to_be_withdrawn,
            "the tracker tells nothing of use": _tells_nothing_of_use,
            "no rollback is unfinished": lambda w: Not(w.rolling()),
        },
    ),
    Rule(
        "tracker synced",
        lambda w: w.having(
            maybe_owner=lambda c: c == w.owner(),
            maybe_other=lambda: BoolVal(False),
            meddled=lambda: BoolVal(False),
        ),
        {"written": lambda w: w.named()},
    ),
    Rule(
        "pruned from its name",
        lambda w: moved_to(w, TRASH),
        {
            "state": lambda w: w.state(P) == PRUNABLE,
            "its own": lambda w: w.place(P) == PUBLISHED,
            "tracker and newer one": _prune_allowed,
            "the tracker is durable": _tracker_is_elsewhere,
        },
    ),
    Rule(
        "second look",
        lambda w: w.at("cleared", P, to=BoolVal(True)),
        {
            "moved": lambda w: And(w.state(P) == PRUNABLE, is_in(w.place(P), TRASH, GONE)),
            "nobody keeps it": lambda w: Not(_protected(w)),
        },
    ),
    Rule(
        "brought back",
        lambda w: moved_to(w, PUBLISHED).at("cleared", P, to=BoolVal(False)),
        {
            "moved": lambda w: And(w.state(P) == PRUNABLE, w.place(P) == TRASH),
            "the name is free": name_is_free,
        },
    ),
    Rule(
        "failed one moved to the trash",
        lambda w: moved_to(w, TRASH),
        {
            "state": lambda w: w.state(P) == FAILED,
            "not published": lambda w: w.place(P) == STAGING,
        },
    ),
    Rule(
        "failed one found published moved to quarantine",
        lambda w: moved_to(w, ASIDE),
        {
            "state": lambda w: w.state(P) == FAILED,
            "its own": lambda w: w.place(P) == PUBLISHED,
        },
    ),
    Rule(
        "trash emptied",
        lambda w: moved_to(w, GONE).at("whole", P, to=BoolVal(False)),
        {
            "only the trash": lambda w: w.place(P) == TRASH,
            "no prune is undecided": lambda w: Not(Exists([_d], w.state(_d) == PRUNABLE)),
        },
    ),
    Rule(
        "quarantined",
        lambda w: moved_to(w, ASIDE),
        {
            "state": lambda w: And(w.state(P) == QUARANTINED, w.place(P) == PUBLISHED),
            "the tracker does not name it": _quarantine_allowed,
            "the tracker is durable": _tracker_is_elsewhere,
        },
    ),
    Rule(
        "rollback begun",
        lambda w: w.having(
            rolling=lambda: BoolVal(True), afresh=lambda: BoolVal(False), target=lambda: P
        ),
        {"settled": nothing_in_flight, "target": lambda w: w.state(P) == TRACKED},
    ),
    Rule(
        "fresh start begun",
        lambda w: w.having(rolling=lambda: BoolVal(True), afresh=lambda: BoolVal(True)),
        {"settled": nothing_in_flight},
    ),
    Rule(
        "rollback goes on to another",
        lambda w: w.having(target=lambda: P),
        {
            "interrupted": lambda w: And(w.rolling(), Not(w.afresh())),
            "below": lambda w: Not(older(step(w.target()), step(P))),
            "tracked": lambda w: w.state(P) == TRACKED,
        },
    ),
    Rule(
        "rollback writes the tracker",
        lambda w: _writes_tracker(w, w.target()),
        {
            "begun": lambda w: And(w.rolling(), Not(w.afresh())),
            "tracked": lambda w: w.state(w.target()) == TRACKED,
        },
    ),
    Rule(
        "fresh start puts the tracker aside",
        lambda w: w.having(
            named=lambda: BoolVal(False),
            maybe_other=lambda: BoolVal(True),
            maybe_owner=lambda c: BoolVal(False),
            meddled=lambda: BoolVal(True),  # a person gave it up
        ),
        {"begun": lambda w: And(w.rolling(), w.afresh())},
    ),
    Rule(
        "rollback finished",
        lambda w: _top_again(w).having(rolling=lambda: BoolVal(False)),
        {
            "begun": lambda w: w.rolling(),
            "settled": _nothing_open,
            "all withdrawn": lambda w: If(w.afresh(), Not(some_tracked(w)), newest_tracked(w, P)),
        },
    ),
    Rule(
        "rollback given up",
        lambda w: w.having(rolling=lambda: BoolVal(False), fell_back=lambda: BoolVal(True)),
        {
            "its target is damaged": lambda w: And(w.rolling(), Not(w.afresh())),
        },
    ),
    Rule(
        "protection read",
        lambda w: w.having(seen_pin=w.pin, seen_lease=w.lease, seen_job=w.job),
    ),
    Rule(
        "pin put",
        lambda w: w.at("pin", step(P), to=BoolVal(True)).having(cleared=lambda c: BoolVal(False)),
    ),
    Rule("pin removed", lambda w: w.at("pin", S, to=BoolVal(False))),
    Rule(
        "settled after a fallback",
        lambda w: _top_again(w).having(fell_back=lambda: BoolVal(False)),
        {
            "settled": _nothing_open,
            "newest": lambda w: Or(newest_tracked(w, P), Not(some_tracked(w))),
            "no rollback is unfinished": lambda w: Not(w.rolling()),
        },
    ),
)


# --------------------------------------------------------------------------------- events from outside


def _power_loss(w: World) -> World:
    """Each directory lands at one of its ``maybe`` places, and the tracker is one of those it may be."""
    return _crash(w).having(
        place=SHOWN,
        maybe=lambda c, x: SHOWN(c) == x,
        named=lambda: Not(SHOWN_OTHER),
        owner=lambda: SHOWN_OWNER,
        maybe_owner=lambda c: And(Not(SHOWN_OTHER), c == SHOWN_OWNER),
        maybe_other=lambda: SHOWN_OTHER,
        misread=lambda: FRESH,
        held=lambda c: BoolVal(False),
    )


def _crash(w: World) -> World:
    """A crash loses all that only the process knew; a snapshot may remember forks."""
    return w.having(
        forked=RECALLED,
        finalizers_ran=lambda c, r: BoolVal(False),
        published=lambda c: BoolVal(False),
        reported=lambda c, q: BoolVal(False),
        gone=lambda c, r: BoolVal(False),
        seen_pin=lambda s: BoolVal(False),
        seen_lease=lambda s: BoolVal(False),
        seen_job=lambda s: BoolVal(False),
        cleared=lambda c: BoolVal(False),
    )


def _one_name_shows_one(w: World) -> Any:
    both = And(SHOWN(_c) == PUBLISHED, SHOWN(_d) == PUBLISHED, step(_c) == step(_d))
    return ForAll([_c, _d], Implies(both, _c == _d))


WEATHER = (
    Rule("crash", _crash),
    Rule(
        "power loss",
        _power_loss,
        {
            "a place it may be at": lambda w: ForAll([_c], w.maybe(_c, SHOWN(_c))),
            "one name shows one directory": _one_name_shows_one,
            "a tracker it may be": lambda w: If(
                SHOWN_OTHER, w.maybe_other(), w.maybe_owner(SHOWN_OWNER)
            ),
        },
    ),
    Rule(
        "written back",
        lambda w: w.having(maybe=lambda c, x: If(c == P, x == w.place(c), w.maybe(c, x))),
    ),
    Rule(
        "damaged",
        lambda w: w.at("whole", P, to=BoolVal(False)).at("damaged", P, to=BoolVal(True)),
    ),
    Rule(
        "taken away by somebody",
        lambda w: w.having(
            place=lambda c: If(c == P, GONE, w.place(c)),
            maybe=lambda c, x: If(c == P, x == GONE, w.maybe(c, x)),
            whole=lambda c: And(c != P, w.whole(c)),
            damaged=lambda c: Or(c == P, w.damaged(c)),
        ),
    ),
    Rule(
        "brought by somebody",
        lambda w: w.having(
            place=lambda c: If(c == P, PUBLISHED, w.place(c)),
            maybe=lambda c, x: If(c == P, x == PUBLISHED, w.maybe(c, x)),
            whole=lambda c: Or(c == P, w.whole(c)),
            meddled=lambda: Or(w.meddled(), w.maybe_other()),
        ),
        {
            "unknown": lambda w: And(w.state(P) == ABSENT, w.place(P) == NOWHERE),
            "the name is free": name_is_free,
            "no older one may come back there": lambda w: Not(
                Exists([_d], And(w.maybe(_d, PUBLISHED), step(_d) == step(P)))
            ),
        },
    ),
    Rule(
        "tracker meddled with",
        lambda w: w.having(
            named=lambda: BoolVal(False),
            misread=lambda: FRESH,
            maybe_other=lambda: BoolVal(True),
            meddled=lambda: BoolVal(True),
        ),
    ),
    Rule("a job is done", lambda w: w.at("job", S, to=BoolVal(False))),
    Rule("another owner has a job that holds", lambda w: w.at("job", S, to=BoolVal(True))),
    Rule("reader puts its lease", lambda w: w.at("lease", S, to=BoolVal(True))),
    Rule(
        "reader is told that it is there",
        lambda w: w.at("held", P, to=BoolVal(True)),
        {
            "its lease comes first": lambda w: w.lease(step(P)),
            "there": lambda w: w.place(P) == PUBLISHED,
        },
    ),
    Rule(
        "reader lets go",
        lambda w: w.at("lease", S, to=BoolVal(False)).having(
            held=lambda c: And(w.held(c), step(c) != S)
        ),
    ),
)


# ----------------------------------------------------------------------------- promises and invariant


def _all(holds: Callable[[World, Any], Any]) -> Condition:
    return lambda w: ForAll([_c], holds(w, _c))


def _there(w: World, c: Any) -> Any:
    """``c`` is complete under its published name whatever a power loss does, or damaged from outside."""
    return Or(w.damaged(c), And(w.place(c) == PUBLISHED, surely(w, c, PUBLISHED), w.whole(c)))


def _quiet(w: World) -> Any:
    return And(Not(w.fell_back()), Not(w.rolling()))


# Each must always hold. Those named after a promise state that promise for one moment; the proof
# needs the others besides.
INVARIANT: Mapping[str, Condition] = MappingProxyType(
    {
        "I1 what is in the trash was prunable or failed": _all(
            lambda w, c: Implies(
                Or(w.maybe(c, TRASH), w.maybe(c, GONE)),
                Or(is_in(w.state(c), PRUNABLE, PRUNED, FAILED, DISCARDED), w.damaged(c)),
            )
        ),
        "I1 what was pruned does not come back": _all(
            lambda w, c: Implies(w.state(c) == PRUNED, Or(surely(w, c, TRASH, GONE), w.damaged(c)))
        ),
        "I2 what the tracker names is complete": _all(
            lambda w, c: Implies(w.maybe_owner(c), _there(w, c))
        ),
        "I2 once one is tracked there is a tracker": _all(
            lambda w, c: Implies(
                Or(
                    is_in(w.state(c), TRACKED, PRUNABLE),
                    And(w.state(c) == ABSENT, w.maybe(c, PUBLISHED)),
                ),
                Or(And(w.named(), Not(w.maybe_other())), w.meddled()),
            )
        ),
        "I2 what is finalized or tracked is complete": _all(
            lambda w, c: Implies(is_in(w.state(c), FINALIZED, TRACKED), _there(w, c))
        ),
        "I3 what was written has every receipt": _all(
            lambda w, c: Implies(
                And(w.declared(c), is_in(w.state(c), SHARDS_WRITTEN, FINALIZED, TRACKED, PRUNABLE)),
                ForAll([_q], Implies(expected(c, _q), w.receipt(c, _q))),
            )
        ),
        "I4 what has its published name is complete": _all(
            lambda w, c: Implies(w.maybe(c, PUBLISHED), Or(w.whole(c), w.damaged(c)))
        ),
        "I7 what a reader was told is there, is there": _all(
            lambda w, c: Implies(
                w.held(c),
                And(
                    w.lease(step(c)),
                    Or(
                        is_in(w.place(c), PUBLISHED, ASIDE),
                        And(w.place(c) == TRASH, w.state(c) == PRUNABLE, Not(w.cleared(c))),
                        w.damaged(c),
                    ),
                ),
            )
        ),
        "I7 what is about to be removed is not pinned": _all(
            lambda w, c: Implies(And(w.cleared(c), w.state(c) == PRUNABLE), Not(w.pin(step(c))))
        ),
        "one in flight": lambda w: ForAll(
            [_c, _d], Implies(And(in_flight(w, _c), in_flight(w, _d)), _c == _d)
        ),
        "one directory per name": lambda w: ForAll(
            [_c, _d],
            Implies(
                And(w.place(_c) == PUBLISHED, w.place(_d) == PUBLISHED, step(_c) == step(_d)),
                _c == _d,
            ),
        ),
        "it may be where it is": _all(lambda w, c: w.maybe(c, w.place(c))),
        "the tracker may be what it is": lambda w: If(
            w.named(), w.maybe_owner(w.owner()), w.maybe_other()
        ),
        "the tracker names what was published": _all(
            lambda w, c: Implies(
                w.maybe_owner(c),
                Or(
                    is_in(w.state(c), FINALIZED, TRACKED, PRUNABLE, PRUNED, QUARANTINED),
                    And(w.state(c) == ABSENT, surely(w, c, PUBLISHED, GONE)),  # being adopted
                ),
            )
        ),
        "prunable": _all(
            lambda w, c: Implies(
                w.state(c) == PRUNABLE,
                Or(w.damaged(c), And(w.whole(c), surely(w, c, PUBLISHED, TRASH))),
            )
        ),
        "absent": _all(
            lambda w, c: Implies(
                w.state(c) == ABSENT,
                Or(surely(w, c, NOWHERE), surely(w, c, PUBLISHED), w.damaged(c)),
            )
        ),
        "nowhere": _all(lambda w, c: Implies(w.place(c) == NOWHERE, surely(w, c, NOWHERE))),
        "staging": _all(
            lambda w, c: Implies(w.place(c) == STAGING, surely(w, c, NOWHERE, STAGING))
        ),
        "trash": _all(
            lambda w, c: Implies(
                And(is_in(w.place(c), TRASH, GONE), w.maybe(c, PUBLISHED)),
                Or(w.state(c) == PRUNABLE, w.damaged(c)),
            )
        ),
        "receipts before reports": lambda w: ForAll(
            [_c, _q], Implies(w.reported(_c, _q), w.receipt(_c, _q))
        ),
        "removed after the second look": _all(
            lambda w, c: Implies(
                w.cleared(c),
                And(
                    is_in(w.state(c), PRUNABLE, PRUNED),
                    is_in(w.place(c), TRASH, GONE),
                    Not(w.held(c)),
                ),
            )
        ),
        "a pending quarantine has where to go": lambda w: Implies(
            Exists([_c], And(w.maybe_owner(_c), w.state(_c) == QUARANTINED, Not(w.damaged(_c)))),
            some_tracked(w),
        ),
        "order of steps": lambda w: Implies(
            _quiet(w),
            ForAll(
                [_c],
                And(
                    Implies(
                        w.state(_c) == TRACKED, And(w.has_top(), Not(older(w.top(), step(_c))))
                    ),
                    Implies(w.state(_c) == PRUNABLE, And(w.has_top(), older(step(_c), w.top()))),
                    Implies(And(in_flight(w, _c), w.has_top()), older(w.top(), step(_c))),
                ),
            ),
        ),
        "the newest acknowledged one is tracked": lambda w: Implies(
            And(_quiet(w), w.has_top()),
            Exists([_c], And(w.state(_c) == TRACKED, step(_c) == w.top())),
        ),
    }
)

Change = Callable[[World, World], Any]


def _each(holds: Callable[[World, World, Any], Any]) -> Change:
    return lambda w, v: ForAll([_c], holds(w, v, _c))


def _becomes(w: World, v: World, c: Any, state: Any) -> Any:
    return And(w.state(c) != state, v.state(c) == state)


def _leaves_its_name(w: World, v: World, c: Any) -> Any:
    return And(w.place(c) == PUBLISHED, v.place(c) == TRASH)


def _never_back(w: World, v: World) -> Any:
    """From an undamaged tracked one the tracker goes to newer steps only, unless people or damage
    intervene.
    """
    leaves = And(w.named(), w.state(w.owner()) == TRACKED, Not(w.damaged(w.owner())))
    back = And(v.named(), older(step(v.owner()), step(w.owner())))
    lost = And(w.named(), Not(v.named()), Not(v.meddled()))
    return Implies(leaves, And(Implies(back, Not(_quiet(w))), Not(lost)))


# Each must hold from one state to the next, by whatever rule of ``ROWS`` or ``EFFECTS``.
STEPS: Mapping[str, Change] = MappingProxyType(
    {
        "I1 prunable comes from tracked": _each(
            lambda w, v, c: Implies(_becomes(w, v, c, PRUNABLE), w.state(c) == TRACKED)
        ),
        "I1 pruned comes from prunable": _each(
            lambda w, v, c: Implies(_becomes(w, v, c, PRUNED), w.state(c) == PRUNABLE)
        ),
        "I1 only a prunable one leaves its name for the trash": _each(
            lambda w, v, c: Implies(_leaves_its_name(w, v, c), w.state(c) == PRUNABLE)
        ),
        "I1 an unpublished one is removed from failed": _each(
            lambda w, v, c: And(
                Implies(And(w.place(c) == STAGING, v.place(c) == TRASH), w.state(c) == FAILED),
                Implies(_becomes(w, v, c, DISCARDED), w.state(c) == FAILED),
            )
        ),
        "I1 only what was pruned or failed is deleted": _each(
            lambda w, v, c: Implies(
                And(w.place(c) != GONE, v.place(c) == GONE),
                Or(is_in(w.state(c), PRUNED, FAILED, DISCARDED), v.damaged(c)),
            )
        ),
        "I2 what is acknowledged stays, or goes by retention or withdrawal": _each(
            lambda w, v, c: Implies(
                w.state(c) == TRACKED, is_in(v.state(c), TRACKED, PRUNABLE, QUARANTINED)
            )
        ),
        "I2 the tracker never goes back": _never_back,
        "I7 the newest tracked one is never taken": _each(
            lambda w, v, c: Implies(_becomes(w, v, c, PRUNABLE), Not(newest_tracked(w, c)))
        ),
        "I7 one pinned, leased or held by a job is never taken": _each(
            lambda w, v, c: Implies(
                _becomes(w, v, c, PRUNABLE),
                Not(Or(w.seen_pin(step(c)), w.seen_lease(step(c)), w.seen_job(step(c)))),
            )
        ),
        "I7 one in flight is never taken": _each(
            lambda w, v, c: Implies(
                in_flight(w, c), Not(Or(v.state(c) == PRUNABLE, _leaves_its_name(w, v, c)))
            )
        ),
        "I7 what the tracker names stays": _each(
            lambda w, v, c: Implies(
                And(_leaves_its_name(w, v, c), w.named(), Not(w.damaged(c))), w.owner() != c
            )
        ),
        "I7 the store is never emptied": _each(
            lambda w, v, c: Implies(
                _leaves_its_name(w, v, c),
                Exists([_d], And(w.state(_d) == TRACKED, older(step(c), step(_d)))),
            )
        ),
    }
)


def initial(w: World) -> Any:
    """An empty root, or one that a stock run left: complete directories, and a tracker not of ours."""
    untouched = And(
        w.state(_c) == ABSENT,
        Not(w.declared(_c)),
        Or(surely(w, _c, NOWHERE), And(surely(w, _c, PUBLISHED), w.whole(_c))),
        w.maybe(_c, w.place(_c)),
        Not(Or(w.cleared(_c), w.held(_c), w.damaged(_c), w.maybe_owner(_c))),
        ForAll([_q], Not(w.reported(_c, _q))),
    )
    stock = Exists([_d], w.place(_d) == PUBLISHED)
    return And(
        ForAll([_c], untouched),
        INVARIANT["one directory per name"](w),
        w.meddled() == stock,
        w.maybe_other(),
        Not(Or(w.named(), w.rolling(), w.fell_back(), w.has_top())),
    )


def invariant(w: World) -> Any:
    return And(*(holds(w) for holds in INVARIANT.values()))


RULES = (*ROWS, *EFFECTS, *WEATHER)
