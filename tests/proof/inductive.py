"""Z3 shows that no number of checkpoints breaks I1, I2 or I7, and that the relation is ours.

``specs/inductive.py`` has the relation, by hand. Three things are shown, and each is red unless shown:

* Proof: the invariant holds initially, and for ever. Anything but ``unsat`` is a violation with
  z3's model.
* Sanity: the invariant has a model, every rule can fire in one, and every control (one condition of one
  rule left out) breaks the promise that it is there for. A proof that nothing can break proves nothing.
* Agreement: every row of ``lifecycle.TABLE`` is in the relation and nothing more, and on random
  ledgers the formulas, evaluated, agree with production ``Ledger`` and ``lifecycle.apply``: whether
  an event is legal and the state after it.

Rules: a model with few objects is looked for by writing the quantifiers out, so that z3 answers at once
where there is one; a proof never does that.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import z3
from ledgers import ledger_of

from ckptfsm.core import events as m
from ckptfsm.core.errors import IllegalTransition, SaveRefused
from ckptfsm.core.events import Event
from ckptfsm.core.ledger import Ledger, Rejected
from ckptfsm.core.lifecycle import (
    Checkpoint,
    State,
    has_finalizers,
)
from ckptfsm.core.parts import AttemptId, PartSpec
from proof.coverage import ALL_ROWS, Coverage
from proof.layer import Budget, LayerResult, Violation, timed

SPEC = Path(__file__).resolve().parents[2] / "specs" / "inductive.py"
REPLAY = "PYTHONPATH=tests python -m proof.inductive"
WORK_LIMIT = 40_000_000  # of z3's units, so that a slow machine decides nothing: seconds of work


@cache
def load_spec() -> ModuleType:
    """The relation. Its folder is no package: it is read, not installed."""
    found = importlib.util.spec_from_file_location("ckptfsm_spec_inductive", SPEC)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------- proof


def properties(spec: ModuleType, rule: Any, world: Any) -> dict[str, Any]:
    """The promises after ``rule``. A rule without a request has to keep the invariant only."""
    after = rule.then(world)
    held = {name: holds(after) for name, holds in spec.INVARIANT.items()}
    if rule in spec.WEATHER:
        return held
    return held | {name: holds(world, after) for name, holds in spec.STEPS.items()}


def refute(*formulas: Any) -> z3.Solver | None:
    """None if no world of any size satisfies ``formulas``; else the solver, whatever it answered."""
    solver = z3.Solver()
    solver.set("rlimit", WORK_LIMIT)
    solver.add(*formulas)
    return None if solver.check() == z3.unsat else solver


def prove(spec: ModuleType, rules: tuple[Any, ...] = ()) -> Iterator[tuple[str, str]]:
    """A failed proof: the obligation, and z3's counterexample or why there is none."""
    world = spec.World.symbolic()
    invariant = spec.invariant(world)
    for name, holds in spec.INVARIANT.items():
        if open_ := refute(spec.FIXED, spec.initial(world), z3.Not(holds(world))):
            yield f"initially: {name}", explain(open_)
    for rule in rules or spec.RULES:
        before = (spec.FIXED, invariant, rule.enabled(world))
        held = properties(spec, rule, world)
        if refute(*before, z3.Not(z3.And(*held.values()))) is None:
            continue
        small = {name: find(spec, *before, z3.Not(formula)) for name, formula in held.items()}
        for name, model in small.items():
            if model is not None:
                yield f"{rule.name}: {name}", show(spec, model)
        if not any(small.values()):  # only large ones, or z3 cannot tell
            yield rule.name, "not shown, and there is no counterexample of a few objects"


def explain(solver: z3.Solver) -> str:
    found = solver.check()
    return str(solver.model()) if found == z3.sat else f"{found}: {solver.reason_unknown()}"


# ---------------------------------------------------------------------------------- small models

SIZES = ((2, 2, 1, 1), (3, 4, 2, 2))  # checkpoints, steps, ranks, reports


def universe(spec: ModuleType, sizes: tuple[int, ...]) -> dict[str, list[Any]]:
    sorts = (spec.Checkpoint, spec.Step, spec.Rank, spec.Report)
    return {
        sort.name(): [z3.Const(f"{sort.name().lower()}{i}", sort) for i in range(size)]
        for sort, size in zip(sorts, sizes, strict=True)
    }


def written_out(term: Any, objects: Mapping[str, list[Any]]) -> Any:
    """``term`` with every quantifier written out over ``objects``."""
    if z3.is_quantifier(term):
        domains = [objects[term.var_sort(i).name()] for i in range(term.num_vars())]
        cases = [
            written_out(z3.substitute_vars(term.body(), *reversed(point)), objects)
            for point in itertools.product(*domains)
        ]
        return z3.And(*cases) if term.is_forall() else z3.Or(*cases)
    if not z3.is_bool(term) or not term.num_args() or is_symbol(term):
        return term
    inner = [written_out(child, objects) for child in term.children()]
    if z3.is_and(term) or z3.is_or(term):
        return z3.And(*inner) if z3.is_and(term) else z3.Or(*inner)
    return term.decl()(*inner)


def is_symbol(term: Any) -> bool:
    return bool(term.decl().kind() == z3.Z3_OP_UNINTERPRETED)


def find(spec: ModuleType, *formulas: Any) -> z3.ModelRef | None:
    """A world of a few objects that satisfies ``formulas``, or None."""
    for sizes in SIZES:
        objects = universe(spec, sizes)
        solver = z3.Solver()
        solver.set("rlimit", WORK_LIMIT)
        solver.add(*_closed(spec, objects), *(written_out(f, objects) for f in formulas))
        if solver.check() == z3.sat:
            return solver.model()
    return None


def _closed(spec: ModuleType, objects: Mapping[str, list[Any]]) -> list[Any]:
    """The objects are different, there are no others, and no function leads out of them."""
    world = spec.World.symbolic()
    terms = [spec.P, spec.R, spec.Q, spec.S, spec.NEWER, spec.FRESH, spec.SHOWN_OWNER]
    terms += [world.owner(), world.target(), world.misread(), world.top()]
    terms += [spec.step(c) for c in objects["Checkpoint"]]
    terms += [spec.rank_of(q) for q in objects["Report"]]
    one_of = [z3.Or(*(t == o for o in objects[t.sort().name()])) for t in terms]
    return [*(z3.Distinct(*each) for each in objects.values() if len(each) > 1), *one_of]


def show(spec: ModuleType, model: z3.ModelRef) -> str:
    """A small model as a person reads it: only what is said of each object."""
    objects = universe(spec, SIZES[-1])
    world = spec.World.symbolic()
    lines = [f"p = {model.eval(spec.P)}"]
    for name, sorts in spec.VARIABLES.items():
        domains = [objects.get(sort.name(), []) for sort in sorts[:-1]]
        if name == "maybe":
            domains[1] = spec.PLACES
        values = []
        for point in itertools.product(*domains):
            value = model.eval(getattr(world, name)(*point), model_completion=True)
            said = ", ".join(str(o) for o in point)
            if not z3.is_false(value):
                values.append(said if z3.is_true(value) else f"{said} {value}".strip())
        lines.append(f"{name}: {'; '.join(v or 'yes' for v in values) or 'no'}")
    order = [(a, b) for a, b in itertools.permutations(objects["Step"], 2)]
    said = [f"{a} < {b}" for a, b in order if z3.is_true(model.eval(spec.older(a, b)))]
    lines.append("steps: " + ", ".join([*said, *(f"{c} is {model.eval(spec.step(c))}"
                                                 for c in objects["Checkpoint"])]))  # fmt: skip
    return "\n    ".join(lines)


# ----------------------------------------------------------------------------------------- sanity


@dataclass(frozen=True)
class Control:
    """Conditions of one rule (``|`` between them) left out; ``breaks`` is then false somewhere."""

    rule: str
    without: str
    breaks: str

    @property
    def left_out(self) -> set[str]:
        return set(self.without.split("|"))


_SUPERSEDED = "tracked superseded[a_newer_one_is_tracked_and_nothing_keeps_it] -> prunable"
_PRUNE, _EMPTY = "pruned from its name", "trash emptied"
CONTROLS = (
    Control(_PRUNE, "state", "I1 what is in the trash was prunable or failed"),
    Control(
        "prunable removed -> pruned",
        "left its name durably",
        "I1 what was pruned does not come back",
    ),
    Control(_SUPERSEDED, "source", "I1 prunable comes from tracked"),
    Control("prunable removed -> pruned", "source|second look", "I1 pruned comes from prunable"),
    Control(_PRUNE, "state", "I1 only a prunable one leaves its name for the trash"),
    Control(
        "failed one moved to the trash", "state", "I1 an unpublished one is removed from failed"
    ),
    Control(_EMPTY, "only the trash", "I1 only what was pruned or failed is deleted"),
    Control("quarantined", "the tracker is durable", "I2 what the tracker names is complete"),
    Control(_PRUNE, "the tracker is durable", "I2 what the tracker names is complete"),
    Control("tracker written", "state", "I2 what the tracker names is complete"),
    Control(
        "finalized tracker_written -> tracked",
        "the tracker names it durably",
        "I2 once one is tracked there is a tracker",
    ),
    Control(
        "shards_written published[it_is_published] -> finalized",
        "published durably",
        "I2 what is finalized or tracked is complete",
    ),
    Control(
        "prunable reprieved -> tracked",
        "its own directory has its name",
        "I2 what is finalized or tracked is complete",
    ),
    Control(
        "requested failed -> failed",
        "source",
        "I2 what is acknowledged stays, or goes by retention or withdrawal",
    ),
    Control("tracker repaired", "newest", "I2 the tracker never goes back"),
    Control(
        "tracker put to what stays",
        "newer ones are to be withdrawn|the tracker tells nothing of use",
        "I2 the tracker never goes back",
    ),
    Control("tracker put to what stays", "stays", "I2 what the tracker names is complete"),
    Control(
        "absent save_requested[the_attempt_is_new] -> requested",
        "ledger.the step grows",
        "order of steps",
    ),
    Control(
        "absent save_requested[the_attempt_is_new] -> requested",
        "ledger.nothing in flight",
        "one in flight",
    ),
    Control(
        "forked shard_reported[every_shard_is_durable] -> shards_written",
        "table",
        "I3 what was written has every receipt",
    ),
    Control("published", "every receipt", "I4 what has its published name is complete"),
    Control(_EMPTY, "no prune is undecided", "I4 what has its published name is complete"),
    Control(_EMPTY, "no prune is undecided", "I7 what a reader was told is there, is there"),
    Control(
        "reader is told that it is there",
        "its lease comes first",
        "I7 what a reader was told is there, is there",
    ),
    Control(
        "prunable removed -> pruned",
        "second look",
        "I7 what a reader was told is there, is there",
    ),
    Control("second look", "nobody keeps it", "I7 what is about to be removed is not pinned"),
    Control(_SUPERSEDED, "ledger.offered", "I7 the newest tracked one is never taken"),
    Control(_SUPERSEDED, "table", "I7 one pinned, leased or held by a job is never taken"),
    Control(_SUPERSEDED, "source", "I7 one in flight is never taken"),
    Control(
        _PRUNE,
        "tracker and newer one|the tracker is durable",
        "I7 what the tracker names stays",
    ),
    Control(_PRUNE, "tracker and newer one", "I7 the store is never emptied"),
)


def vacuous(spec: ModuleType) -> Iterator[tuple[str, str]]:
    """Rules that can never fire, and controls that break nothing."""
    world = spec.World.symbolic()
    base = (spec.FIXED, spec.invariant(world))
    if find(spec, *base) is None:
        yield "the invariant", "has no model"
    rules = {rule.name: rule for rule in spec.RULES}
    for rule in spec.RULES:
        if find(spec, *base, rule.enabled(world)) is None:
            yield rule.name, "can never fire"
    for control in CONTROLS:
        rule = rules[control.rule]
        if not control.left_out <= set(rule.conditions):
            yield str(control), "there is no such condition"
            continue
        broken = z3.Not(properties(spec, rule, world)[control.breaks])
        if find(spec, *base, rule.enabled(world, control.left_out), broken) is None:
            yield str(control), "breaks nothing"


# -------------------------------------------------------------------------------------- agreement

Scope = dict[str, Any]
"""The values for the evaluation of a formula: a function or value per symbol, a list of objects per
sort."""

_CONNECTIVES: dict[int, Callable[[list[Any]], Any]] = {
    z3.Z3_OP_TRUE: lambda _: True,
    z3.Z3_OP_FALSE: lambda _: False,
    z3.Z3_OP_AND: all,
    z3.Z3_OP_OR: any,
    z3.Z3_OP_NOT: lambda a: not a[0],
    z3.Z3_OP_IMPLIES: lambda a: not a[0] or a[1],
    z3.Z3_OP_EQ: lambda a: a[0] == a[1],
    z3.Z3_OP_DISTINCT: lambda a: len(set(a)) == len(a),
    z3.Z3_OP_ITE: lambda a: a[1] if a[0] else a[2],
}

Compiled = Callable[[Scope, tuple[Any, ...]], Any]


def compiled(term: Any) -> Compiled:
    """``term`` as a Python function of a scope and the bound variables, innermost last."""
    if z3.is_var(term):
        index = -1 - z3.get_var_index(term)
        return lambda scope, bound: bound[index]
    if z3.is_quantifier(term):
        sorts = [term.var_sort(i).name() for i in range(term.num_vars())]
        body, every = compiled(term.body()), all if term.is_forall() else any
        return lambda scope, bound: every(
            body(scope, (*bound, *point))
            for point in itertools.product(*(scope[sort] for sort in sorts))
        )
    kind, name = term.decl().kind(), term.decl().name()
    inner = [compiled(child) for child in term.children()]
    if kind == z3.Z3_OP_DT_CONSTRUCTOR:
        return lambda scope, bound: name
    if kind != z3.Z3_OP_UNINTERPRETED:
        connect = _CONNECTIVES[kind]
        return lambda scope, bound: connect([f(scope, bound) for f in inner])
    if not inner:
        return lambda scope, bound: scope[name]
    return lambda scope, bound: scope[name](*(f(scope, bound) for f in inner))


class Evaluated:
    """A row of the relation: its conditions, and the ledger after it, as Python functions."""

    REMEMBERS = ("state", "declared", "forked", "reported", "gone", "finalizers_ran", "published")

    def __init__(self, spec: ModuleType, rule: Any) -> None:
        world = spec.World.symbolic()
        after = rule.then(world)
        self.key: str = rule.name
        self.event: str = rule.name.split()[1].partition("[")[0]
        made = {name: compiled(holds(world)) for name, holds in rule.conditions.items()}
        self.table = [made[name] for name in ("source", "table") if name in made]
        self.ledger = [f for name, f in made.items() if name.startswith("ledger.")]
        bound = {"Checkpoint": z3.Const("c", spec.Checkpoint), "Rank": z3.Const("r1", spec.Rank)}
        bound["Report"] = z3.Const("q1", spec.Report)
        self.after: dict[str, Compiled] = {}
        for name in self.REMEMBERS:
            arguments = [bound[sort.name()] for sort in spec.VARIABLES[name][:-1]]
            self.after[name] = compiled(getattr(after, name)(*arguments))

    def fires(self, scope: Scope) -> bool:
        return all(holds(scope, ()) for holds in self.table)

    def allowed(self, scope: Scope) -> bool:
        """The conditions that the ledger adds to the table for an event that it makes."""
        return all(holds(scope, ()) for holds in self.ledger)


LAYOUTS = (
    (PartSpec("state"),),
    (PartSpec("state"), PartSpec("data", "file", ranks=(0,))),
    (PartSpec("actor", directory="actor"), PartSpec("critic", directory="critic", ranks=(1,))),
    (PartSpec("state", "foreign"),),
    (PartSpec("state", "foreign"), PartSpec("data", "file", ranks=(0,))),
)
WORLD_SIZE = 2


def random_ledger(rng: random.Random) -> Ledger:
    """Any few checkpoints in any states: most are unreachable, and the table must be right there too."""
    ledger = Ledger()
    likely = (*[State.REQUESTED] * 5, *[State.FORKED] * 4, State.FAILED)
    likely = (*likely, *[State.SHARDS_WRITTEN] * 3, *[State.TRACKED] * 8)
    for attempt in range(1, rng.randrange(5) + 1):
        of = AttemptId(rng.randrange(5), 1, attempt)
        state = rng.choice((*State, *likely))
        base = Checkpoint(of, state, rng.choice(LAYOUTS), WORLD_SIZE)
        ranks, reports = base.writers, base.expected
        ledger = ledger_of(
            Checkpoint(
                of,
                base.state,
                base.parts,
                WORLD_SIZE,
                forked=frozenset(r for r in sorted(ranks) if rng.random() < 0.7),
                reported=frozenset(q for q in sorted(reports) if rng.random() < 0.7),
                gone=frozenset(r for r in sorted(ranks) if rng.random() < 0.6),
                finalizers_ran=frozenset(r for r in sorted(ranks) if rng.random() < 0.3),
                published=rng.random() < 0.3,
            ),
            base=ledger,
        )
    steps = range(5)
    pins = {s for s in steps if rng.random() < 0.2}
    leased = {s for s in steps if rng.random() < 0.2}
    return ledger.protected(pins, leased, {(s + 2) % 5 for s in leased ^ pins})


def random_event(rng: random.Random, ledger: Ledger) -> Event:
    """Any event of an attempt that is there, or of a new one; half of the reports fit their attempt."""
    there = sorted(ledger.checkpoints, key=attrgetter("attempt"))  # as they were drawn
    of = rng.choice([*there, AttemptId(rng.randrange(6), 1, 9)])
    rank, size = rng.randrange(-1, 3), rng.choice((1, 2, 3))
    part = rng.choice(("state", "data", "actor", "critic", "ghost"))
    offered = ledger.checkpoints.get(of)
    if offered is not None and rng.random() < 0.7:
        (part, rank), size = rng.choice(sorted(offered.expected)), WORLD_SIZE
    honest = ledger.superseded(offered, ()) if offered is not None else m.Superseded(of, None)
    forged = m.Superseded(of, rng.choice((None, *range(6))), rng.choice(((), ("pin",))))
    return rng.choice(
        (
            m.SaveRequested(of, rng.choice(LAYOUTS), WORLD_SIZE),
            m.WriterForked(of, rank, size),
            m.ShardReported(of, part, rank, size, 5),
            m.FinalizersRan(of, rank),
            m.FinalizersRan(of, rank),
            m.PublishedOnDisk(of),
            m.Published(of),
            m.FoundPublished(of),
            m.TrackerWritten(of),
            rng.choice((honest, forged)),
            m.Reprieved(of, "pin"),
            m.Removed(of),
            m.Failed(of, "writer_died"),
            m.WriterGone(of, rank),
            m.WritersLost(of),
            m.Cleaned(of),
            m.Withdrawn(of, "damaged"),
            m.Adopted(of),
        )
    )


def scope_of(ledger: Ledger, event: Event) -> Scope:
    """A ledger and an event as a world of the relation."""
    there = dict(ledger.checkpoints)
    subject = there.get(event.of) or Checkpoint(event.of, State.ABSENT)
    there[event.of] = subject
    newer = getattr(event, "newer_step", None)
    rank, part = getattr(event, "rank", 0), getattr(event, "part", "")
    size = getattr(event, "world_size", subject.world_size)
    reports = {q for c in there.values() for q in c.expected} | {(part, rank)}
    return {
        "Checkpoint": list(there),
        "Step": sorted({of.step for of in there} | {0 if newer is None else newer}),
        "Rank": sorted({-1, 0, 1, 2}),
        "Report": sorted(reports),
        "step": lambda of: of.step,
        "older": lambda a, b: a < b,
        "rank_of": lambda q: q[1],
        "writing": lambda of, r: r in there[of].writers,
        "expected": lambda of, q: q in there[of].expected,
        "state": lambda of: there[of].state.value,
        "declared": lambda of: bool(there[of].parts),
        "forked": lambda of, r: r in there[of].forked,
        "reported": lambda of, q: q in there[of].reported,
        "gone": lambda of, r: r in there[of].gone,
        "foreign": lambda of: has_finalizers(there[of]),
        "finalizers_ran": lambda of, r: r in there[of].finalizers_ran,
        "published": lambda of: there[of].published,
        "seen_pin": lambda step: step in ledger.pins,
        "seen_lease": lambda step: step in ledger.readers,
        "seen_job": lambda step: step in ledger.held,
        "p": event.of,
        "r": rank,
        "q": (part, rank),
        "fits": size == subject.world_size,
        "has_newer": newer is not None,
        "newer_step": 0 if newer is None else newer,
        "kept": bool(getattr(event, "kept_by", ())),
    }


@dataclass
class Agreement:
    """Compares the relation with production, one event at a time; says where they differ."""

    rows: tuple[Evaluated, ...]

    def differs(self, ledger: Ledger, event: Event) -> str:
        scope = scope_of(ledger, event)
        firing = [row for row in self.rows if row.event == event.name and row.fires(scope)]
        if len(firing) > 1:
            return f"{len(firing)} rows of the relation take {event} at once"
        row = firing[0] if firing else None
        return (
            self._moves(ledger, event, scope, row)
            or self._reports(ledger, event, row)
            or self._begins(ledger, event, scope, row)
            or self._offers(ledger)
        )

    def _moves(self, ledger: Ledger, event: Event, scope: Scope, row: Evaluated | None) -> str:
        try:
            _, moved, _ = ledger.post(event)
        except IllegalTransition:
            return f"{row.key} takes {event}, the table does not" if row is not None else ""
        if row is None:
            return f"the table takes {event}, the relation does not"
        real = {**ledger.checkpoints, event.of: moved.checkpoint}
        for of in scope["Checkpoint"]:
            said = self._after(row, scope, of)
            known = real[of]
            seen = {
                "state": known.state.value,
                "declared": bool(known.parts),
                "forked": frozenset(known.forked),
                "reported": frozenset(known.reported),
                "gone": frozenset(known.gone),
                "finalizers_ran": frozenset(known.finalizers_ran),
                "published": known.published,
            }
            if said != seen:
                return f"{row.key} leaves {of} as {said}, production as {seen}"
        return ""

    def _after(self, row: Evaluated, scope: Scope, of: AttemptId) -> dict[str, Any]:
        def members(name: str, bound: str, sort: str) -> frozenset[Any]:
            inside = ((x, {**scope, "c": of, bound: x}) for x in scope[sort])
            return frozenset(x for x, where in inside if row.after[name](where, ()))

        here = {**scope, "c": of}
        return {
            "state": row.after["state"](here, ()),
            "declared": row.after["declared"](here, ()),
            "forked": members("forked", "r1", "Rank"),
            "reported": members("reported", "q1", "Report"),
            "gone": members("gone", "r1", "Rank"),
            "finalizers_ran": members("finalizers_ran", "r1", "Rank"),
            "published": row.after["published"](here, ()),
        }

    def _reports(self, ledger: Ledger, event: Event, row: Evaluated | None) -> str:
        """``Ledger.report`` takes exactly what the table takes of a living attempt (I5)."""
        if event.of not in ledger.checkpoints:
            return ""
        taken = not isinstance(ledger.report(event), Rejected)
        return "" if taken == (row is not None) else f"Ledger.report: {event} taken: {taken}"

    def _begins(self, ledger: Ledger, event: Event, scope: Scope, row: Evaluated | None) -> str:
        """Whether a save may begin."""
        if not isinstance(event, m.SaveRequested) or row is None:
            return ""
        try:
            ledger.refuse(event)
        except SaveRefused:
            return f"Ledger.refuse: {event} is refused" if row.allowed(scope) else ""
        return "" if row.allowed(scope) else f"Ledger.refuse: {event} may begin"

    def _offers(self, ledger: Ledger) -> str:
        """The checkpoints that retention may take, if no policy keeps anything (I7)."""
        taker = next(row for row in self.rows if row.event == "superseded")
        offered = {offer.of for offer in ledger.to_prune(())}
        for checkpoint in ledger.checkpoints.values():
            offer = ledger.superseded(checkpoint, ())
            scope = scope_of(ledger, offer)
            if (taker.fires(scope) and taker.allowed(scope)) != (checkpoint.id in offered):
                return f"Ledger.to_prune: {offer} is offered: {checkpoint.id in offered}"
        return ""


def rows_differ(spec: ModuleType) -> Iterator[tuple[str, str]]:
    """The table and the relation: same rows, same states, nothing twice."""
    ours = [rule.name for rule in spec.ROWS]
    for key in sorted(set(ALL_ROWS) ^ set(ours)):
        yield key, "in the table and not in the relation" if key in ALL_ROWS else "not in the table"
    if len(ours) != len(set(ours)):
        yield "rows", "one is there twice"
    if [str(state) for state in spec.STATES] != [state.value for state in State]:
        yield "states", "are not those of the library"


def agree(spec: ModuleType, cases: int, coverage: Coverage) -> Iterator[tuple[str, str]]:
    """Random ledgers and events, from one seed: where relation and production differ."""
    agreement = Agreement(tuple(Evaluated(spec, rule) for rule in spec.ROWS))
    for seed in range(cases):
        rng = random.Random(seed)
        ledger = random_ledger(rng)
        event = random_event(rng, ledger)
        coverage.move(ledger.checkpoints.get(event.of) or Checkpoint(event.of, State.ABSENT), event)
        if what := agreement.differs(ledger, event):
            yield f"case {seed}", what
    for key in sorted(set(ALL_ROWS) - set(coverage.rows)):
        yield key, f"no row of {cases} random cases took it"


# ------------------------------------------------------------------------------------------- layer


def run(budget: Budget) -> LayerResult:
    """The proof, its sanity, and its agreement with production."""
    spec = load_spec()
    result = LayerResult("inductive")
    # a sample also needs so many that each row is taken
    cases = 6_000 if budget.profile in ("sample", "pr") else 60_000
    checks: tuple[tuple[str, Iterator[tuple[str, str]]], ...] = (
        ("I1 I2 I7", prove(spec)),
        ("sanity", vacuous(spec)),
        ("agreement", rows_differ(spec)),
        ("agreement", agree(spec, cases, result.coverage)),
    )
    for promise, found in checks:
        for subject, what in found:
            result.violations.append(Violation(promise, f"{subject}\n    {what}", REPLAY))
            if budget.stop_at_first:
                return result
    ours = len(spec.INVARIANT) + len(spec.STEPS)
    world = spec.World.symbolic()
    result.explored = {
        "relations": len(spec.RULES),
        "promises": ours,
        "obligations": len(spec.INVARIANT)
        + sum(len(properties(spec, rule, world)) for rule in spec.RULES),
        "controls": len(CONTROLS),
        "agreements": cases,
    }
    return result


def main() -> int:
    result = timed(run, Budget())
    print(f"{result.layer}: {result.explored} in {result.seconds:.1f} s")
    for violation in result.violations:
        print(f"{violation.promise}: {violation.what}\n  {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
