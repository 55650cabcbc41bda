"""SIGKILL and errors at every storage call of real processes on a real disk.

A job is forked from this warm process, struck at one call, and judged; then it is restarted,
judged, restarted once more, and must save again. The sweeps:

* ``kill``: SIGKILL before each changing call of a life (save, track, prune, fail, roll back, pin, lease,
  delete), on the coordinator, and on the manager with forked writers: trainer and writer each.
* ``torn``: SIGKILL half way through each write, of all of these.
* each changing call of the recovery after a kill, for one kill per distinct decision of recovery:
  SIGKILL before it, and errors as below. A recovery that an error hits opens the root, or refuses
  it typed. Then the next start resumes from the step that it named. That is the step of an unstruck
  recovery, or the one tracked before a save that it was rolling forward.
* errors at each changing call, before it (it did not happen) and after it (it did, and said otherwise),
  and writes that take a part or nothing.
* EIO and ESTALE of each read (``stat``, ``listdir``, ``read``, ``digest``, ``free_bytes``; and
  ``try_lock``) of the same lives and recoveries. The other kinds cannot happen there: a read takes no
  space (``try_lock``, which may make its file, gets ENOSPC and EDQUOT too); Python makes a call that was
  interrupted again; and the storage reads on after a short read. A kill needs no place at a read: the
  next changing call is one.

Rules: every call of an unstruck life or recovery must have been struck in its turn, or the sweep itself
is a violation. The manager polls as often as timing asks, so its reads are struck by their number alone,
up to the last that a life makes. SIGKILL leaves the page cache alone, so no sweep here can show a
missing fsync: the ``pr`` profile counts and strikes those calls, but does not carry them out.

The gate (``pr``) takes every kill and every torn write. At each changing call it takes one kind of
error, in turn, on one side of it, in turn (on both in the main script); and both cuts of each
write, or one in turn in recoveries. Where two recoveries begin alike, the beginning is taken once.
The first of several reads that are alike is taken, with one kind in turn. The other profiles sync,
and take every kind on both sides of every call; they are skipped where there is no real disk.

    PYTHONPATH=tests python -m proof.processes
    PYTHONPATH=tests python -m proof.processes --script roll_back --kind kill --site 17
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

from ckptfsm.core.lifecycle import State
from proof.coverage import Coverage
from proof.layer import SMALL, Budget, LayerResult, Violation, timed
from proof.real_jobs import MANAGER, SCRIPTS, live, recover
from proof.real_judge import Broken, broken, judge_with_restart
from proof.real_site import (
    CUTS,
    ERRNOS,
    KILLS,
    LOCK_ERRNOS,
    READ_ERRNOS,
    ROLES,
    Ended,
    Role,
    Site,
    adopt_orphans,
    run_child,
)

MAIN_SCRIPT = "save_track_prune"
PATIENCE_S = 180.0  # for one site; its child has a separate alarm
TRIES = 3  # a life on the manager makes its calls in an order that timing decides
NEVER = 1_000_000
DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
Call = tuple[str, str]
Alike = tuple[Call, ...]
Lives = dict[str, Ended]  # the unstruck ones
Recoveries = dict[Site, Ended]  # the unstruck ones, by the kill that each follows


@dataclass
class Finding:
    """The result of striking one site. ``ended``: of a recovery, or of a life that was not struck."""

    site: Site
    struck: Call | None = None
    recovery_struck: Call | None = None
    fatal: bool = False
    decisions: tuple[str, ...] = ()
    tracked: int | None = None
    ended: Ended | None = None
    coverage: Coverage = field(default_factory=Coverage)
    violation: Violation | None = None

    @property
    def hit(self) -> Call | None:
        """The call that the site is about, if it was struck."""
        return self.recovery_struck if 0 <= self.site.recovery < NEVER else self.struck


class Enough(Exception):
    """The first violation is enough."""


# --------------------------------------------------------------------------------------- one site


def strike(site: Site, *, synced: bool, place: str | None = None) -> Finding:
    """Live, be struck, be judged, restart. Runs in a process that adopts orphans."""
    finding = Finding(site)
    root = tempfile.mkdtemp(prefix="ckptfsm-proof-", dir=place)
    try:
        _strike(site, root, synced, finding)
    except Broken as error:
        promise, what = error.args
        where = " ".join(finding.hit) if finding.hit else "nothing struck"
        finding.violation = Violation(promise, f"{where}: {what}", site.replay())
    finally:
        shutil.rmtree(root)
    return finding


def _strike(site: Site, root: str, synced: bool, finding: Finding) -> None:
    ended = run_child(partial(live, site.life(), root, synced))
    finding.struck, finding.fatal = ended.struck, bool(ended.told.get("fatal"))
    if ended.struck is None:
        finding.ended = ended
    _count(finding, site.life(), ended)
    _check_life(site.life(), ended)
    acknowledged = ended.acknowledged
    if site.recovery >= 0:
        index = site.recovery if site.recovery != NEVER else -1
        ended = run_child(
            partial(recover, replace(site, index=index, role="trainer"), root, synced)
        )
        finding.recovery_struck, finding.ended = ended.struck, ended
        _count(finding, replace(site, role="trainer"), ended)
        _check_recovery(site, ended)
    verdict = judge_with_restart(
        root,
        acknowledged,
        synced=synced,
        twice=site.kind in KILLS,
        lost=ended.told.get("lost"),
    )
    if "latest" in ended.told and verdict.tracked != ended.told["latest"]:
        told = f"recovery said {ended.told['latest']}, the next start {verdict.tracked}"
        raise broken("I8", told)
    finding.decisions = verdict.decisions
    finding.tracked = verdict.tracked
    finding.coverage.add(verdict.coverage)


def _check_recovery(site: Site, ended: Ended) -> None:
    """A killed recovery is dead; any other opened the root, or refused it with a typed error."""
    told = ended.told
    if ended.killed != (ended.struck is not None and site.kind in KILLS) or "crashed" in told:
        raise broken("I8", f"recovery ended with {ended.code}: {told.get('crashed')}")
    if ended.killed:
        return
    if ended.code != 0:
        raise broken("I10", f"recovery hung or died: {ended.code}")
    if told["fsynced_again"]:
        raise broken("F6", "the file was fsynced again after its fsync had failed")
    if "refused" in told and (ended.struck is None or site.kind == "short"):
        raise broken("F7", told["refused"])


def _check_life(site: Site, ended: Ended) -> None:
    """A killed process is dead; any other ended by itself, with typed errors, and went on."""
    if ended.struck is not None and site.kind in KILLS and site.role == "trainer":
        if not ended.killed:
            raise broken("F2", f"the killed process ended with {ended.code}")
        return
    told = ended.told
    if ended.code != 0:
        raise broken("I10", f"the job hung or died: {ended.code}")
    if "crashed" in told:
        raise broken("F5", f"an error that is not typed: {told['crashed']}")
    if any(error.startswith("IllegalTransition") for error in told["errors"]):
        raise broken("I11", f"{told['errors']}")
    if told["fsynced_again"]:
        raise broken("F6", "the file was fsynced again after its fsync had failed")
    if not told["fatal"] and not told["went_on"]:
        raise broken("F5", f"training did not go on: {told['errors']}")
    if site.kind in ("", "short") and told["errors"]:
        raise broken("F7", f"{told['errors']}")


def decided_otherwise(finding: Finding, unstruck: Ended) -> str:
    """A start after a struck recovery resumes from the same step as without the strike.

    But an opening may end an attempt whose roll forward an error hit: no trainer was told of it.
    """
    told, expected = finding.ended.told if finding.ended else {}, unstruck.told.get("latest")
    ended = "latest" in told and unstruck.told.get("rolled_forward")
    if finding.violation is not None or finding.tracked == expected or ended:
        return ""
    said = f"refused with {told['refused']}" if "refused" in told else "struck"
    return f"{said}; then {finding.tracked} was resumed from, not {expected}"


def _count(finding: Finding, site: Site, ended: Ended) -> None:
    if ended.told.get("coverage"):
        finding.coverage.add(Coverage.from_json(ended.told["coverage"]))
    if ended.struck is not None:
        for number in _faults(site, ended.struck, ended.state):
            finding.coverage.fault(number, ended.state)


def _faults(site: Site, struck: Call, state: State | None) -> Iterator[str]:
    """The rows of the catalogue that this strike is an instance of."""
    method, path = struck
    if site.kind in KILLS:
        yield "F1" if site.role == "writer" else "F2"
        publishing = state is State.SHARDS_WRITTEN and method == "rename" and " -> iter_" in path
        if state is State.FINALIZED or publishing:
            yield "F3"
        if state is State.PRUNABLE:
            yield "F17"
    if site.kind in ("ENOSPC", "EDQUOT"):
        yield "F5"
    if site.kind == "EIO" and method in ("fsync", "fsync_dir"):
        yield "F6"
    if site.kind in ("EINTR", "short", "nothing"):
        yield "F7"
    if site.kind == "ESTALE" or (method == "rename" and site.after):
        yield "F8"


# ----------------------------------------------------------------------------------------- sweeps


@dataclass
class Sweep:
    """All sites of one layer run, struck by a pool of processes.

    ``whole``: every kind of error at every call, and each fsync carried out.
    """

    pool: Pool
    place: str
    result: LayerResult
    stop_at_first: bool
    whole: bool
    fatal: Counter[str] = field(default_factory=Counter)

    def strike_all(self, name: str, sites: Iterable[Site]) -> list[Finding]:
        """Strike every site. Counts them, their coverage and the broken promises."""
        findings: list[Finding] = []
        todo = list(sites)
        arriving = self.pool.imap_unordered(
            partial(strike, synced=self.whole, place=self.place), todo
        )
        for _ in todo:
            finding: Finding = arriving.next(PATIENCE_S)
            findings.append(finding)
            self.result.coverage.add(finding.coverage)
            if finding.violation is not None:
                self.add(finding.violation)
            if finding.fatal:
                self.fatal[name] += 1
        struck = sum(f.hit is not None for f in findings)
        if struck:  # not the lives that show what there is to strike
            self.result.explored[name] = self.result.explored.get(name, 0) + struck
        return sorted(findings, key=_by_index)

    def expect(self, finding: Finding, unstruck: Ended) -> None:
        """The call that was struck is the one that the unstruck life makes there."""
        expected = unstruck.calls[finding.site.role][finding.site.at]
        if finding.hit != expected:
            self.gap(f"{finding.hit} was struck instead of {expected}", finding.site)

    def strike_recoveries(self, name: str, sites: list[Site], recoveries: Recoveries) -> None:
        """Strike each, and compare with the unstruck one of the same state."""
        for finding in self.strike_all(name, sites):
            unstruck = recoveries[finding.site.life()]
            self.expect(finding, unstruck)
            changed = decided_otherwise(finding, unstruck)
            if changed:
                self.add(Violation("I8", changed, finding.site.replay()))

    def gap(self, what: str, site: Site) -> None:
        """The sweep itself missed something."""
        self.add(Violation("sweep", what, site.replay()))

    def add(self, violation: Violation) -> None:
        self.result.violations.append(violation)
        if self.stop_at_first:
            raise Enough


def _by_index(finding: Finding) -> tuple[str, int, int]:
    return (finding.site.script, finding.site.index, finding.site.recovery)


def run(budget: Budget) -> LayerResult:
    """Sweep everything that the profile asks for."""
    result = LayerResult("processes")
    whole = budget.profile not in SMALL  # it waits for its fsyncs half of the time
    directory = real_disk() if whole else tempfile.gettempdir()
    if not directory:
        kind = file_system_of(tempfile.gettempdir())
        result.skipped = f"no real disk: {tempfile.gettempdir()} is {kind}; set TMPDIR"
        return result
    place = tempfile.TemporaryDirectory(
        prefix="ckptfsm-proof-", dir=directory, ignore_cleanup_errors=True
    )
    with place, _pool(budget.processes * (2 if whole else 1)) as pool:
        sweep = Sweep(pool, place.name, result, budget.stop_at_first, whole)
        try:
            _sweep(sweep, budget)
        except Enough:
            result.notes.append("stopped at the first violation")
    fatal = ", ".join(f"{name} {count}" for name, count in sorted(sweep.fatal.items()))
    result.notes.append(f"sites that only a restart decides: {fatal or 'none'}")
    if not whole:
        kinds = "one kind of error per call, in turn, alike reads once, and no fsync is carried out"
    else:
        kinds = "every kind of error at every call, and each fsync is carried out"
    result.notes.append(f"profile {budget.profile}: {kinds}")
    result.notes.append(f"{directory} is {file_system_of(directory)}")
    return result


def _sweep(sweep: Sweep, budget: Budget) -> None:
    names = (*SCRIPTS, MANAGER)
    lives = {f.site.script: f.ended for f in sweep.strike_all("lives", map(Site, names))}
    killed = _sweep_kills(sweep, lives, budget.some(_own_sites(lives)))
    if budget.profile == "sample":
        return
    recoveries = _kinds_of_recovery(killed)
    _sweep_recoveries(sweep, recoveries)
    _sweep_errors(sweep, lives)
    _sweep_manager(sweep, lives[MANAGER])
    _sweep_reads(sweep, names, recoveries)


def _own_sites(lives: Lives) -> list[Site]:
    """Every call on the coordinator. Where two lives begin alike, the beginning is one life's."""
    sites: list[Site] = []
    earlier: list[list[Call]] = []
    for name in SCRIPTS:
        calls = lives[name].calls["trainer"]
        common = max((_common(calls, other) for other in earlier), default=0)
        sites += [Site(name, i) for i in range(common, len(calls))]
        earlier.append(calls)
    return sites


def _common(one: list[Call], other: list[Call]) -> int:
    """How many calls two lives have in common before they part."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _sweep_kills(sweep: Sweep, lives: Lives, own_sites: Sequence[Site]) -> list[Finding]:
    """SIGKILL before each call, and in the middle of each write, in their order."""
    sites = [replace(site, kind="kill") for site in own_sites]
    killed = sweep.strike_all("kills", sites)
    for finding in killed:
        sweep.expect(finding, lives[finding.site.script])
    torn = [replace(site, kind="torn") for site in sites if _writes(lives[site.script], site)]
    for finding in sweep.strike_all("torn writes", torn):
        sweep.expect(finding, lives[finding.site.script])
    return killed


def _writes(life: Ended, site: Site) -> bool:
    return life.calls[site.role][site.at][0] in ("write", "pwrite")


def _kinds_of_recovery(killed: list[Finding]) -> list[Site]:
    """An unstruck recovery after a kill of each kind, by the decisions of recovery there."""
    kinds: dict[tuple[str, ...], Site] = {}
    for finding in killed:
        kinds.setdefault(finding.decisions, finding.site)
    return [replace(site, recovery=NEVER) for site in kinds.values()]


def _sweep_recoveries(sweep: Sweep, unstruck: list[Site]) -> None:
    """Each changing call of the recovery, for one kill of each kind."""
    recoveries = _recoveries(sweep.strike_all("kinds of state to recover", unstruck))
    sites = _recovery_sites(recoveries, whole=sweep.whole)
    sweep.strike_recoveries("kills of recovery", sites, recoveries)
    errors: list[Site] = []
    for site in sites:
        errors += _failures_at(site, recoveries[site.life()], whole=sweep.whole)
    sweep.strike_recoveries("errors of recovery", errors, recoveries)


def _recoveries(unstruck: list[Finding]) -> Recoveries:
    return {f.site.life(): f.ended for f in unstruck if f.ended is not None}


def _recovery_sites(recoveries: Recoveries, *, whole: bool) -> list[Site]:
    """Every call of each; where two begin alike, the beginning is one's, unless all is asked for."""
    sites: list[Site] = []
    earlier: list[list[Call]] = []
    for site, recovery in recoveries.items():
        calls = recovery.calls["trainer"]
        common = 0 if whole else max((_common(calls, other) for other in earlier), default=0)
        sites += [replace(site, recovery=i) for i in range(common, len(calls))]
        earlier.append(calls)
    return sites


def _sweep_errors(sweep: Sweep, lives: Lives) -> None:
    """Errors before and after each call, and writes that take a part or nothing."""
    sites: list[Site] = []
    for site in _own_sites(lives):
        sites += _failures_at(site, lives[site.script], whole=sweep.whole)
    for finding in sweep.strike_all("errors", sites):
        sweep.expect(finding, lives[finding.site.script])


def _failures_at(site: Site, life: Ended, *, whole: bool) -> list[Site]:
    """The errors of one call; a write also takes a part, and nothing (one of them in turn)."""
    cuts = CUTS[1:] if _writes(life, site) else ()
    if cuts and not whole and site.recovery >= 0:
        cuts = (cuts[site.at % 2],)
    return [*_errors_at(site, life, whole=whole), *(replace(site, kind=kind) for kind in cuts)]


def _errors_at(site: Site, life: Ended, *, whole: bool) -> list[Site]:
    """The errors of one call: all kinds before and after it, or one kind of each, in turn.

    A call that fails by itself cannot happen and then report an error.
    """
    sides = [False, True]
    if not whole and (site.script != MAIN_SCRIPT or site.recovery >= 0):
        sides = [bool(site.at % 2)]
    if site.at not in life.succeeded[site.role]:
        sides = [False]
    turn = site.at + site.at // len(ERRNOS)
    kinds = {after: ERRNOS if whole else (ERRNOS[(turn + 2 * after) % 5],) for after in sides}
    return [replace(site, kind=kind, after=after) for after in sides for kind in kinds[after]]


def _sweep_manager(sweep: Sweep, life: Ended) -> None:
    """The same on the manager, trainer and forked writer each."""
    for role in ROLES:
        for what, sites in _manager_sites(life, role, whole=sweep.whole).items():
            _strike_until_hit(sweep, f"{what} of the manager's {role}", sites)


def _manager_sites(life: Ended, role: Role, *, whole: bool) -> dict[str, list[Site]]:
    """Where the manager's trainer or its writer is killed, torn in a write, and failed."""
    sites = [Site(MANAGER, i, role=role) for i in range(len(life.calls[role]))]
    return {
        "kills": [replace(site, kind="kill") for site in sites],
        "torn writes": [replace(site, kind="torn") for site in sites if _writes(life, site)],
        "errors": [e for site in sites for e in _failures_at(site, life, whole=whole)],
    }


def _strike_until_hit(sweep: Sweep, name: str, sites: list[Site]) -> None:
    missed: list[Finding] = []
    for _ in range(TRIES):
        missed = [f for f in sweep.strike_all(name, sites) if f.struck is None]
        sites = [f.site for f in missed]
        if not sites:
            return
    for finding in missed:
        if not _polled_less(finding):
            sweep.gap("was never struck", finding.site)


def _polled_less(finding: Finding) -> bool:
    """The life made fewer reads than the unstruck one, and so had none to strike at this site."""
    site, told = finding.site, finding.ended.told if finding.ended else {}
    return site.reads and "counts" in told and site.index >= told["counts"][site.role]


def _sweep_reads(sweep: Sweep, names: Iterable[str], unstruck: list[Site]) -> None:
    """Errors of each call that changes nothing: of each life, of the recoveries, of the manager."""
    reading = [Site(name, reads=True) for name in names]
    lives = {f.site.script: f.ended for f in sweep.strike_all("lives", reading) if f.ended}
    sites = [replace(site, reads=True) for site in _own_sites(lives)]
    chosen: set[Alike] = set()
    errors = _read_errors(chosen, ((s, lives[s.script]) for s in sites), whole=sweep.whole)
    for finding in sweep.strike_all("errors of reads", errors):
        sweep.expect(finding, lives[finding.site.script])
    reading = [replace(site, reads=True) for site in unstruck]
    recoveries = _recoveries(sweep.strike_all("recoveries whose reads fail", reading))
    sites = [replace(s, reads=True) for s in _recovery_sites(recoveries, whole=sweep.whole)]
    errors = _read_errors(chosen, ((s, recoveries[s.life()]) for s in sites), whole=sweep.whole)
    sweep.strike_recoveries("errors of recovery's reads", errors, recoveries)
    life = lives[MANAGER]
    for role in ROLES:
        sites = [Site(MANAGER, i, role=role, reads=True) for i in range(len(life.calls[role]))]
        errors = _read_errors(chosen, ((s, life) for s in sites), whole=sweep.whole)
        _strike_until_hit(sweep, f"errors of the manager's {role}'s reads", errors)


def _read_errors(
    chosen: set[Alike], sites: Iterable[tuple[Site, Ended]], *, whole: bool
) -> list[Site]:
    """The errors of each read: all kinds, or one in turn, of reads that are alike only the first."""
    errors: list[Site] = []
    for site, unstruck in sites:
        calls = unstruck.calls[site.role][max(0, site.at - 1) : site.at + 1]
        alike = tuple((method, re.sub(r"\d+", "#", path)) for method, path in calls)
        possible = LOCK_ERRNOS if calls[-1][0] == "try_lock" else READ_ERRNOS
        kinds = possible if whole else (possible[site.at % len(possible)],)
        if whole or alike not in chosen:
            errors += [replace(site, kind=kind) for kind in kinds]
        chosen.add(alike)
    return errors


@contextmanager
def _pool(processes: int) -> Iterator[Pool]:
    with get_context("fork").Pool(processes, initializer=adopt_orphans) as pool:
        yield pool


def file_system_of(directory: str) -> str:
    """The type of the file system that holds ``directory``, as the kernel says (``ext4``)."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return mounted_as(number, Path(directory).resolve(), mounts)


def mounted_as(number: str, place: Path, mounts: Iterable[str]) -> str:
    """By the device's number; a btrfs subvolume's is in no list, so then by where it is mounted."""
    found, deepest = "of an unknown type", ""
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        _, _, device, _, where, *_ = mount.split()
        if device == number:
            return rest.split()[0]
        if place.is_relative_to(where) and len(where) >= len(deepest):
            found, deepest = rest.split()[0], where
    return found


def real_disk() -> str:
    """A directory on a disk's file system: the temporary one, /var/tmp or the current one; or ""."""
    places = (tempfile.gettempdir(), "/var/tmp", os.getcwd())
    return next((p for p in places if os.path.isdir(p) and file_system_of(p) in DISKS), "")


# -------------------------------------------------------------------------------------------- CLI


def replay(site: Site) -> int:
    """Strike one site. Exit code 1 if anything was broken."""
    with _pool(1) as pool:
        finding = pool.apply(strike, (site,), {"synced": True})
        violation = finding.violation
        if site.recovery >= 0:
            unstruck = replace(site.life(), recovery=NEVER)
            recovery = pool.apply(strike, (unstruck,), {"synced": True}).ended
            violation = violation or (recovery and decided_otherwise(finding, recovery))
    print(
        f"struck: {finding.hit}\nrecovery decided: {finding.decisions}\nviolation: {violation or None}"
    )
    return int(bool(violation))


def main() -> int:
    """Run the layer, or replay one site. Exit code 1 if anything was broken."""
    parser = argparse.ArgumentParser(prog="python -m proof.processes")
    parser.add_argument("--profile", default="pr", choices=["pr", "nightly", "release", "soak"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-at-first", action="store_true")
    parser.add_argument("--script", default=MAIN_SCRIPT, choices=[*SCRIPTS, MANAGER])
    parser.add_argument("--site", type=int)
    parser.add_argument("--kind", default="kill", choices=["kill", *CUTS, *ERRNOS])
    parser.add_argument("--after", action="store_true")
    parser.add_argument("--role", default="trainer", choices=["trainer", "writer"])
    parser.add_argument("--recovery", type=int, default=-1)
    parser.add_argument("--reads", action="store_true")
    asked = parser.parse_args()
    if asked.site is not None:
        words = (asked.script, asked.site, asked.kind, asked.after, asked.role, asked.recovery)
        return replay(Site(*words, asked.reads))
    budget = Budget(asked.profile, asked.processes, asked.stop_at_first)
    result = timed(run, budget)
    print(f"{result.layer}: {result.seconds:.1f} s, {result.explored}")
    print(*result.notes, sep="\n")
    for violation in result.violations[:20]:
        print(f"VIOLATION {violation.promise}: {violation.what}\n  {violation.replay}")
    print(
        f"{len(result.violations)} violations; faults: {dict(sorted(result.coverage.faults.items()))}"
    )
    return int(bool(result.violations))


if __name__ == "__main__":
    raise SystemExit(main())
