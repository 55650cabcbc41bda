"""Exhaustive search: every state that production can reach in a few small worlds, shortest first.

Breadth first, so that the first state in which a promise does not hold has the shortest history.
States are in ``exhaustive_world``, transitions in ``exhaustive_moves``, promises in
``exhaustive_promises``. A world is bounded by how often each thing may happen (``Left``) and is
explored to its end, or to a number of states that the report names.

    PYTHONPATH=tests python -m proof.exhaustive [--profile pr] [--scope keep] [--limit 20000]
    PYTHONPATH=tests python -m proof.exhaustive --replay keep:0.3.1
"""

from __future__ import annotations

import argparse
import hashlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from ckptfsm.core import layout
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.retention import LatestN
from proof.coverage import ALL_RULES, Coverage, watch_rules
from proof.exhaustive_disk import Dir
from proof.exhaustive_moves import Moves
from proof.exhaustive_promises import Table, check_world, is_settled, judge
from proof.exhaustive_world import Broken, Left, Scope, World, first_world, production
from proof.layer import Budget, LayerResult, Violation
from proof.sharing import WorkerDied, share_out

STATES = 100_000  # in the gate
_TWO = (PartSpec("state", "file"), PartSpec("data", "file", ranks=(0,)))

SCOPES: tuple[Scope, ...] = (
    Scope("keep", Left(requests=3, crashes=1, readers=1), steps=3, retention=LatestN(0)),
    Scope(
        "people",
        Left(requests=3, crashes=2, pins=1, deletes=1, rollbacks=1),
        steps=3,
        retention=LatestN(2),
    ),
    Scope(
        "ranks",
        Left(requests=2, crashes=1, deaths=1),
        steps=1,
        world_size=2,
        parts=_TWO,
    ),
    Scope(
        "errors",
        Left(requests=2, crashes=1, errors=1, deaths=1, deletes=1),
        retention=LatestN(2),
    ),
    Scope(
        "stock",
        Left(requests=1, crashes=1, rollbacks=1, damages=1),
        steps=3,
        retention=LatestN(1),
        stock=(1, 2, 4),
        tracker=b"2\n",
    ),
    Scope("epochs", Left(requests=3, crashes=1, takeovers=1), steps=3, retention=LatestN(1)),
    Scope(
        "damage",
        Left(requests=3, crashes=2, damages=2, rollbacks=1),
        retention=LatestN(1),
    ),
    Scope(
        "jobs",
        Left(requests=3, crashes=1, jobs=2),
        steps=3,
        retention=LatestN(0),
        holds={"copy": 1},
    ),
    Scope("failing", Left(requests=2, errors=2), retention=LatestN(1)),
    Scope("landing", Left(requests=2, crashes=2, takeovers=1), retention=LatestN(1)),
    Scope("outsiders", Left(requests=2, crashes=2, rollbacks=1, outsiders=1)),
)

SAMPLE = tuple(scope for scope in SCOPES if scope.name in ("failing", "outsiders"))  # the quickest

WIDER: tuple[Scope, ...] = (
    Scope("wide keep", Left(requests=3, crashes=2, readers=1), steps=3, retention=LatestN(0)),
    Scope(
        "wide ranks",
        Left(requests=2, crashes=1, deaths=1),
        world_size=2,
        parts=_TWO,
        retention=LatestN(1),
    ),
    Scope(
        "wide people",
        Left(requests=3, crashes=1, readers=1, pins=1, deletes=1, rollbacks=1),
        steps=3,
        retention=LatestN(2),
    ),
    Scope(
        "wide epochs",
        Left(requests=3, crashes=1, takeovers=2, deaths=1, readers=1, rollbacks=1),
        steps=3,
        retention=LatestN(1),
    ),
    Scope(
        "wide errors",
        Left(requests=3, crashes=2, errors=2, deaths=1, deletes=1),
        steps=3,
        retention=LatestN(1),
    ),
    Scope(
        "wide stock",
        Left(requests=2, crashes=2, damages=1, rollbacks=1, pins=1, readers=1),
        steps=4,
        retention=LatestN(1),
        stock=(1, 2, 4),
        tracker=b"2\n",
    ),
)


# ---------------------------------------------------------------------------------------- search


@dataclass
class Found:
    """The result of a search. ``path``: the successor to take at each state, from the first on."""

    scope: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    closed: bool = False
    seconds: float = 0.0  # of CPU
    broken: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    offered: int = 0


class Search:
    """Breadth first over one scope."""

    def __init__(self, scope: Scope, limit: int) -> None:
        self.scope = scope
        self.limit = limit
        self.found = Found(scope.name)
        self._table = Table(self.found.coverage)
        self._moves = Moves(scope)
        self._worlds: list[World] = []
        self._known: dict[World, int] = {}
        self._parents = array("q")
        self._choices = array("q")
        self._sources = array("q")
        self._targets = array("q")

    def run(self) -> Found:
        began = time.process_time()
        with production(), watch_rules(self.found.coverage):
            self._add(first_world(self.scope), -1, -1)
            index, level_end = 0, 1
            while index < len(self._worlds) and len(self._worlds) < self.limit:
                if self.found.broken:
                    break
                self._expand(index)
                index += 1
                if index == level_end:
                    level_end = len(self._worlds)
                    self.found.depth += 1
            self.found.closed = index == len(self._worlds)
            if not self.found.broken:
                self._check_ends(expanded=index)
        self.found.states = len(self._worlds)
        self.found.transitions = len(self._sources)
        self.found.offered = self._table.offered
        self.found.seconds = time.process_time() - began
        return self.found

    def fingerprint(self) -> str:
        """A hash over the states as they were found, and every way between them, in order."""
        seen = hashlib.blake2b(digest_size=16)
        for part in (self._parents, self._choices, self._sources, self._targets):
            seen.update(part.tobytes())
        for world in self._worlds:
            seen.update(picture(world, self.scope).encode())
        seen.update(repr(self.found.coverage.as_json()).encode())
        return seen.hexdigest()

    def _expand(self, index: int) -> None:
        for choice, found in enumerate(self._moves.after(self._worlds[index])):
            if found.world is None:
                assert found.broken is not None
                self._note(found.broken, index, choice)
                return
            target = self._add(found.world, index, choice)
            self._sources.append(index)
            self._targets.append(target)

    def _add(self, world: World, parent: int, choice: int) -> int:
        known = self._known.get(world)
        if known is not None:
            return known
        index = self._known[world] = len(self._worlds)
        self._worlds.append(world)
        self._parents.append(parent)
        self._choices.append(choice)
        try:
            check_world(world, self.scope)
            self._table.check(world)
        except Broken as broken:
            self._note(broken, parent, choice)
        return index

    def _note(self, broken: Broken, parent: int, choice: int) -> None:
        path = (*self._path_to(parent), choice)
        self.found.broken.append((broken.promise, broken.what, path))

    def _path_to(self, index: int) -> tuple[int, ...]:
        path: list[int] = []
        while index > 0:
            path.append(self._choices[index])
            index = self._parents[index]
        return tuple(reversed(path))

    def _check_ends(self, expanded: int) -> None:
        """I10: from every state there is a way to one where nothing is left to do."""
        count = len(self._worlds)
        first = array("q", [0]) * (count + 1)
        for target in self._targets:
            first[target + 1] += 1
        for i in range(count):
            first[i + 1] += first[i]
        into, place = array("q", [0]) * len(self._sources), array("q", first)
        for source, target in zip(self._sources, self._targets, strict=True):
            into[place[target]] = source
            place[target] += 1
        ends = [i for i in range(count) if i >= expanded or is_settled(self._worlds[i])]
        reached = bytearray(count)
        for i in ends:
            reached[i] = 1
        while ends:
            target = ends.pop()
            for source in into[first[target] : first[target + 1]]:
                if not reached[source]:
                    reached[source] = 1
                    ends.append(source)
        stuck = reached.find(0)
        if stuck >= 0:
            what = "from here nothing ever settles"
            self.found.broken.append(("I10", what, self._path_to(stuck)))


def history(scope: Scope, path: tuple[int, ...]) -> list[str]:
    """The states on the way, for people: numbered actions with their results."""
    lines = [f"scope {scope.name}: {scope.world_size} rank(s), retention {scope.retention}"]
    moves = Moves(scope)
    with production():
        world = first_world(scope)
        lines.append(f"   0. at first: {picture(world, scope)}")
        for number, choice in enumerate(path, start=1):
            for index, found in enumerate(moves.after(world)):
                if index == choice:
                    break
            else:
                return [*lines, f"  {number:2}. (there is no such transition any more)"]
            lines.append(f"  {number:2}. {found.text}")
            if found.world is None:
                return [*lines, f"      BROKEN {found.broken}"]
            world = found.world
            lines.append(f"      {picture(world, scope)}")
            try:
                check_world(world, scope)
                Table(Coverage()).check(world)
            except Broken as broken:
                return [*lines, f"      BROKEN {broken}"]
    return lines


def picture(world: World, scope: Scope) -> str:
    """A state in one line."""
    names = []
    for name, node in sorted(world.disk.names.items()):
        if layout.MEGATRON.parse_published(name) is not None:
            names.append(name if judge(node, scope).complete else f"{name}(damaged)")
    for directory in (layout.STAGING, layout.TRASH, layout.QUARANTINE, layout.PINS, layout.READERS):
        inner = world.disk.get(directory)
        if isinstance(inner, Dir) and inner.names:
            names.append(f"{directory.rpartition('/')[2]}:{','.join(sorted(inner.names))}")
    tracker = world.disk.names.get(layout.TRACKER)
    said = repr(tracker)[1:] if isinstance(tracker, bytes) else "-"
    told = ", ".join(f"{c.id} {c.state.value}" for c in world.journal.checkpoints)
    who = "refused" if world.refused else "stopped" if world.live is None else "running"
    intent = world.journal.intent
    more = f" rolling back to {intent.target}" if intent.rolling_back else ""
    waits = (
        f" pending {world.live.pending}" if world.live is not None and world.live.pending else ""
    )
    return f"[epoch {world.epoch} {who}{waits}] tracker {said} | {' '.join(names)} | {told}{more}"


# ----------------------------------------------------------------------------------------- layer


def scope_named(name: str) -> Scope:
    return next(scope for scope in (*SCOPES, *WIDER) if scope.name == name)


def explore(name: str, limit: int) -> Found:
    """Search one scope: the work of a worker process."""
    return Search(scope_named(name), limit).run()


def run(budget: Budget) -> LayerResult:
    """Every scope, to its end or to the profile's number of states.

    To stop at the first violation, every scope is first searched a little: most bugs are near.
    """
    result = LayerResult("exhaustive search")
    limit = budget.pick(pr=65_000, nightly=150_000, release=150_000)
    scopes = {"sample": SAMPLE, "pr": SCOPES}.get(budget.profile, (*SCOPES, *WIDER))
    names = [scope.name for scope in scopes]
    found: list[Found] = []
    for part in (limit // 20, limit) if budget.stop_at_first else (limit,):
        found.clear()
        try:
            for each in share_out(partial(explore, limit=part), names, budget.processes):
                found.append(each)
                if budget.stop_at_first and each.broken:
                    break
        except WorkerDied as died:
            result.violations.append(_violation_of(died))
        if budget.stop_at_first and (result.violations or any(each.broken for each in found)):
            break
    for each in sorted(found, key=lambda f: f.scope):
        _report(each, result)
    used = {name: result.coverage.rules[name] for name in ALL_RULES if result.coverage.rules[name]}
    result.explored["rules of recovery"] = len(used)
    result.notes.append("rules of recovery: " + ", ".join(f"{n} {c:,}" for n, c in used.items()))
    hurried = budget.stop_at_first or budget.profile == "sample"
    if not hurried and not result.violations:
        result.violations += _unexercised_rules(result.coverage)
        if budget.profile == "pr":
            result.violations += _too_small(found)
    return result


def look(scope: str) -> LayerResult:
    """A little of one scope, which shows a planted bug sooner than all of them."""
    result = LayerResult("exhaustive search")
    _report(explore(scope, STATES // 100), result)
    return result


def _unexercised_rules(coverage: Coverage) -> Iterator[Violation]:
    """Every rule of recovery decides somewhere: one that never does is dead, or is not looked at."""
    for name in ALL_RULES:
        if not coverage.rules[name]:
            command = "PYTHONPATH=tests python -m proof.exhaustive --profile pr"
            yield Violation("", f"rule {name} of recovery was not exercised", command)


def _too_small(found: list[Found]) -> Iterator[Violation]:
    """The gate's worlds are explored to their ends, and are not allowed to shrink."""
    states = sum(each.states for each in found)
    cut = [each.scope for each in found if not each.closed]
    if states < STATES or cut:
        what = f"{states} states of {STATES}, not to their ends: {cut}"
        yield Violation("", what, "PYTHONPATH=tests python -m proof.exhaustive --profile pr")


def _violation_of(died: WorkerDied[str]) -> Violation:
    again = [f"--scope '{name}'" for name in died.lost[:1]]
    command = " ".join(["PYTHONPATH=tests python -m proof.exhaustive", *again])
    return Violation("", f"{died}: scopes {', '.join(died.lost)}", command)


def _report(found: Found, result: LayerResult) -> None:
    result.coverage.add(found.coverage)
    for key, count in (
        ("states", found.states),
        ("transitions", found.transitions),
        ("events offered", found.offered),
    ):
        result.explored[key] = result.explored.get(key, 0) + count
    end = "to its end" if found.closed else f"{found.depth} actions deep"
    result.notes.append(
        f"{found.scope}: {found.states} states, {found.transitions} transitions, {end}, "
        f"{found.seconds:.1f} CPU-s"
    )
    for promise, what, path in found.broken[:3]:
        replay = f"{found.scope}:{'.'.join(map(str, path))}"
        command = f"PYTHONPATH=tests python -m proof.exhaustive --replay {replay}"
        story = "\n".join(history(scope_named(found.scope), path))
        result.violations.append(Violation(promise, f"{what}\n{story}", command))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="pr", choices=("pr", "nightly", "release"))
    parser.add_argument("--scope", choices=[scope.name for scope in (*SCOPES, *WIDER)])
    parser.add_argument("--limit", type=int, default=50_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", metavar="SCOPE:PATH")
    options = parser.parse_args()
    if options.replay:
        name, _, path = options.replay.partition(":")
        steps = tuple(int(step) for step in path.split(".")) if path else ()
        lines = history(scope_named(name), steps)
        print("\n".join(lines))
        return 1 if "BROKEN" in lines[-1] else 0
    if options.scope:
        result = LayerResult("exhaustive search")
        _report(explore(options.scope, options.limit), result)
    else:
        result = run(Budget(profile=options.profile, processes=options.processes))
    print(result.explored, *result.notes, sep="\n")
    for violation in result.violations:
        print(f"\nVIOLATION {violation.promise}: {violation.what}\n  {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
