"""Power loss below a real file system: every write recorded, cut, thinned and torn, then recovered from.

A job of production code runs on a kernel-mounted file system and its disk records all that it is
sent (``powerloss_disk``). Each crash state (``powerloss_states``) is mounted by the kernel, which
replays its journal, and then opened by the production recovery and judged (``powerloss_jobs``).

Rules:
* For maintainers: needs Linux, root, FUSE and loop devices; skipped with the reason where they are not.
* A recording is not repeatable (the kernel decides when it writes), so a violation is kept in a file
  that replays exactly.
* Nothing is left behind: every worker has a separate mount namespace, and dies with this process.

    PYTHONPATH=tests python -m proof.powerloss [--states N] [--seed S] [--filesystems ext4,xfs]
    PYTHONPATH=tests python -m proof.powerloss --replay FILE [--image disk.img]
    PYTHONPATH=tests python -m proof.powerloss --omissions     each fsync left out: who notices?
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from proof.catalogue import command_of
from proof.coverage import Coverage
from proof.layer import Budget, LayerResult, Violation, timed
from proof.powerloss_disk import RecordingDisk, make_image, mounted
from proof.powerloss_jobs import SCRIPTS, Judge, Script, Site, recover_and_save
from proof.powerloss_states import Builder, CrashState, Recording, drawn_states, prefix_states
from proof.powerloss_workers import Workers

LAYER = "powerloss"
_MODULE = "proof.powerloss"
_CHUNK = 40
_ENOUGH = 1000  # states below ext4 that a release judges at least
_SHOWN = 5


@dataclass(frozen=True)
class FileSystem:
    """How one is made and mounted. ``sector``: the bytes it counts on to arrive whole or not at all."""

    kind: str
    make: tuple[str, ...]
    size: int
    sector: int
    options: str = ""
    weight: int = 1


_EXT4 = FileSystem(
    "ext4",
    ("mkfs.ext4", "-q", "-F", "-b", "1024", "-J", "size=1", "-m", "0")
    + ("-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"),
    size=8 << 20,
    sector=1024,
    weight=4,
)
FILESYSTEMS: Mapping[str, FileSystem] = {
    "ext4": _EXT4,
    "ext4-noalloc": replace(_EXT4, options="noauto_da_alloc", weight=1),
    "ext4-writeback": replace(_EXT4, options="noauto_da_alloc,data=writeback", weight=1),
    "xfs": FileSystem("xfs", ("mkfs.xfs", "-q", "-f", "--unsupported"), 32 << 20, 512, "nouuid"),
    "btrfs": FileSystem("btrfs", ("mkfs.btrfs", "-q", "-f", "-K"), 128 << 20, 4096),
}
"""ext4 hides some missing fsyncs: one fsync commits everything, and replacing a file writes it out first
(``noauto_da_alloc`` turns that off). btrfs makes durable little more than it is asked to."""

OMISSIONS = (
    *("fsync:*", "fsync_dir:*", "fsync:*.distcp", "fsync:*/planned/*", "fsync:*/receipts/*"),
    *("fsync:*/.metadata*", "fsync:*manifest.json*", "fsync:latest*", "fsync:.ckptfsm/journal/*"),
    *("fsync:.ckptfsm/epochs/*", "fsync_dir:", "fsync_dir:.ckptfsm/staging"),
    *("fsync_dir:.ckptfsm/staging/*", "fsync_dir:.ckptfsm/journal", "fsync_dir:.ckptfsm/epochs"),
    *("fsync_dir:.ckptfsm/trash", "fsync_dir:.ckptfsm/quarantine", "fsync_dir:.ckptfsm/pins"),
)


@dataclass(frozen=True)
class Plan:
    """The order of an exploration. ``without``: calls that the recorded job leaves out (to see the
    layer fail).

    ``keep``: how many violations get a file that replays them.
    """

    states: int
    seed: int = 1
    filesystems: tuple[str, ...] = tuple(FILESYSTEMS)
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    without: tuple[str, ...] = ()
    processes: int = 2
    stop_at_first: bool = False
    keep: int = 5


def run(budget: Budget) -> LayerResult:
    """See ``proof.layer``. Not for the gate: it needs root."""
    if budget.profile in ("sample", "pr"):
        return LayerResult(LAYER, skipped="maintainer layer: run make proof")
    states = budget.pick(pr=0, nightly=400, release=1400)
    plan = Plan(states, processes=budget.processes, stop_at_first=budget.stop_at_first)
    result = explore(plan)
    if budget.profile == "release":
        result.violations += _too_few(result)
    return result


def _too_few(result: LayerResult) -> list[Violation]:
    """A run that judged less below ext4 than a release promises; one that was stopped may have."""
    below = sum(n for name, n in result.explored.items() if name.startswith("states on ext4"))
    if result.skipped or result.violations or below >= _ENOUGH:
        return []
    what = f"{below} states were judged below ext4, at least {_ENOUGH:,} are promised"
    return [Violation("F4", what, command_of(LAYER, "release"))]


def explore(plan: Plan) -> LayerResult:
    """Record the jobs, draw crash states, judge each. Skipped where the machine cannot."""
    result = LayerResult(LAYER, skipped=unavailable())
    usable = [name for name in plan.filesystems if shutil.which(FILESYSTEMS[name].make[0])]
    missing = [name for name in plan.filesystems if name not in usable]
    if not result.skipped and not usable:
        result.skipped = f"no program makes {', '.join(missing)}"
    if result.skipped:
        return result
    if missing:
        result.notes.append(f"not here: {', '.join(missing)}")
    with (
        tempfile.TemporaryDirectory(prefix="ckptfsm-powerloss-") as work,
        Workers(work, plan.processes) as workers,
    ):
        result.skipped = _refusal(workers, work)
        if not result.skipped:
            _explore(replace(plan, filesystems=tuple(usable)), work, workers, result)
    return result


def unavailable() -> str:
    """Why this machine cannot run the layer; "" if nothing obvious stands against it."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root (it mounts file systems)"
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            return f"needs {device}"
    return ""


def _refusal(workers: Workers, work: str) -> str:
    """Why nothing can be recorded here, tried out; "" if it works."""
    order = _Order("try", "ext4", work)
    try:
        for _ in workers.map(_try_out, [order]):
            pass
    except OSError as error:
        return f"cannot record a disk here: {error}"
    return ""


def _try_out(order: _Order) -> None:
    _record(order, lambda site: None)


# ------------------------------------------------------------------------------------- the recordings


@dataclass(frozen=True)
class _Order:
    """A recording to be made: of ``script``, or of a recovery from ``state`` of another recording."""

    script: str
    filesystem: str
    work: str
    without: tuple[str, ...] = ()
    state: CrashState | None = None
    of: Recording | None = None


@dataclass
class _Made:
    """The result of an order. ``problem``: the job itself failed, on a disk that lost nothing more."""

    order: _Order
    recording: Recording | None = None
    problem: str = ""


def record(order: _Order) -> _Made:
    """Make one recording, in a worker; none where the file system did not survive the state."""
    if order.of is None or order.state is None:
        return _record(order, SCRIPTS[order.script])
    with _state_mounted(order.of, order.state, order.work) as where:
        if where is None:
            return _Made(order)
    return _record(order, recover_and_save)


def _record(order: _Order, script: Script) -> _Made:
    filesystem = FILESYSTEMS[order.filesystem]
    promised, problem = None, ""
    if order.of is not None and order.state is not None:
        base = Builder(order.of).build(order.state)
        promised = order.of.promised(order.state)
    else:
        base = make_image(filesystem.make, filesystem.size, order.work)
    disk = RecordingDisk(base, order.work)
    with disk.mounted(filesystem.kind, filesystem.options) as where:
        site = Site(order.script, os.path.join(where, "store"), disk.position, order.without)
        try:
            script(site)
        except Exception as error:  # whatever it is, the job has failed
            problem = f"I8: {order.script} failed: {type(error).__name__}: {error}"
        finally:
            site.close()
    recording = Recording(
        order.script,
        order.filesystem,
        filesystem.sector,
        base,
        disk.records(),
        [(0, promised), *site.promises],
        site.calls,
    )
    return _Made(order, recording, problem)


# ------------------------------------------------------------------------------------------ the states


@dataclass
class Verdicts:
    """The results for one chunk of states of recording ``index``. ``refused``: how many the kernel
    did not mount."""

    index: int
    judged: int = 0
    refused: int = 0
    broken: list[tuple[CrashState, str]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)


def judge_states(task: tuple[int, Recording, Sequence[CrashState], str]) -> Verdicts:
    """Mount, recover and judge each state, in a worker."""
    index, recording, states, work = task
    verdicts, builder = Verdicts(index), Builder(recording)
    judge = Judge(verdicts.coverage)
    for state in sorted(states):
        with _state_mounted(recording, state, work, builder) as where:
            if where is None:
                verdicts.refused += 1
                continue
            problem = judge.judge(os.path.join(where, "store"), recording.promised(state))
            verdicts.judged += 1
            if problem:
                verdicts.broken.append((state, problem))
    return verdicts


@contextmanager
def _state_mounted(
    recording: Recording, state: CrashState, work: str, builder: Builder | None = None
) -> Iterator[str | None]:
    """The state as a mounted file system; None where the kernel refuses to mount it."""
    filesystem = FILESYSTEMS[recording.filesystem]
    with ExitStack() as stack:
        fd = os.memfd_create(work)  # the name shows whose loop device it is
        stack.callback(os.close, fd)
        (builder or Builder(recording)).build(state).dump(fd)
        mount = mounted(fd, work, filesystem.kind, filesystem.options)
        where: str | None = None
        try:
            where = stack.enter_context(mount)
        except OSError:
            pass  # nothing of ours ran yet
        yield where


def _explore(plan: Plan, work: str, workers: Workers, result: LayerResult) -> None:
    rng = random.Random(plan.seed)
    orders = [
        _Order(script, filesystem, work, plan.without)
        for filesystem in plan.filesystems
        for script in plan.scripts
    ]
    first = _recordings(workers.map(record, orders), result)
    again = [
        _Order(f"recovery of {r.name}", r.filesystem, work, plan.without, _draw(r, rng), r)
        for r in first
    ]
    recordings = first + _recordings(workers.map(record, again), result)
    tasks = [
        (index, recordings[index], chunk, work)
        for index, states in enumerate(_share(plan, recordings, rng))
        for chunk in _chunks(states)
    ]
    counts = {"recordings": len(recordings), "writes": sum(_writes(r) for r in recordings)}
    result.explored = {**counts, "states": 0, "refused by the kernel": 0}
    for verdicts in workers.map(judge_states, tasks):
        on = f"states on {recordings[verdicts.index].filesystem}"
        result.explored["states"] += verdicts.judged
        result.explored[on] = result.explored.get(on, 0) + verdicts.judged
        result.explored["refused by the kernel"] += verdicts.refused
        result.coverage.add(verdicts.coverage)
        for state, problem in verdicts.broken:
            kept = len(result.violations) < plan.keep
            result.violations.append(_violation(recordings[verdicts.index], state, problem, kept))
        if plan.stop_at_first and result.violations:
            return
    if not result.explored["states"]:
        what = f"no state was judged, {result.explored['refused by the kernel']} were refused"
        command = f"PYTHONPATH=tests python -m {_MODULE} --states {plan.states} --seed {plan.seed}"
        result.violations.append(Violation("I8", what, command))


def _recordings(made: Iterator[_Made], result: LayerResult) -> list[Recording]:
    """Those that went well; a job that failed is a violation."""
    good = []
    for one in made:
        if one.problem and one.order.of is not None and one.order.state is not None:
            broken = _violation(one.order.of, one.order.state, one.problem, True)
            result.violations.append(broken)
        elif one.problem:
            order = one.order
            again = f"--scripts {order.script} --filesystems {order.filesystem}"
            command = f"PYTHONPATH=tests python -m {_MODULE} {again}"
            result.violations.append(Violation("I8", f"{one.problem}; nothing was lost", command))
        elif one.recording is not None:
            good.append(one.recording)
    return sorted(good, key=lambda r: (r.filesystem, r.name))


def _draw(recording: Recording, rng: random.Random) -> CrashState:
    """A state to record a recovery from: torn if there is one."""
    return rng.choice(drawn_states(recording, rng, 20) or prefix_states(recording))


def _share(
    plan: Plan, recordings: Sequence[Recording], rng: random.Random
) -> Iterator[list[CrashState]]:
    """Every recording's states: half of them cut after a write, half of them with losses."""
    weights = [FILESYSTEMS[r.filesystem].weight for r in recordings]
    for recording, weight in zip(recordings, weights, strict=True):
        count = -(-plan.states * weight // sum(weights))
        prefixes = prefix_states(recording)
        cut = rng.sample(prefixes, min(len(prefixes), count // 2))
        yield cut + drawn_states(recording, rng, count - len(cut))


def _chunks(states: list[CrashState]) -> Iterator[list[CrashState]]:
    ordered = sorted(states)
    return (ordered[at : at + _CHUNK] for at in range(0, len(ordered), _CHUNK))


def _writes(recording: Recording) -> int:
    return sum(record is not None for record in recording.records)


# ------------------------------------------------------------------------------------------ violations


def _violation(recording: Recording, state: CrashState, problem: str, keep: bool) -> Violation:
    promise = problem.partition(":")[0] if problem[:1] == "I" else "I8"
    replay = "the first violations replay; this one was not kept"
    if keep:
        fd, path = tempfile.mkstemp(prefix="powerloss-", suffix=".replay")
        with os.fdopen(fd, "wb") as file:
            pickle.dump((recording, state), file)
        replay = f"PYTHONPATH=tests python -m {_MODULE} --replay {path}"
    return Violation(promise, f"{problem}; {recording.explain(state)}", replay)


def replay(path: str, image: str | None) -> LayerResult:
    """Judge one kept state again; with ``image``, also leave its disk there, to be looked at."""
    with open(path, "rb") as file:
        recording, state = pickle.load(file)  # only ever one that this module wrote
    if image is not None:
        with open(image, "w+b") as file:
            Builder(recording).build(state).dump(file.fileno())
    result = LayerResult(LAYER, skipped=unavailable())
    if result.skipped:
        return result
    with (
        tempfile.TemporaryDirectory(prefix="ckptfsm-powerloss-") as work,
        Workers(work, 1) as workers,
    ):
        (verdicts,) = workers.map(judge_states, [(0, recording, [state], work)])
    result.explored = {"states": verdicts.judged, "refused by the kernel": verdicts.refused}
    command = f"PYTHONPATH=tests python -m {_MODULE} --replay {path}"
    for _, problem in verdicts.broken:
        what = f"{problem}; {recording.explain(state)}"
        result.violations.append(Violation(problem.partition(":")[0], what, command))
    return result


def omissions(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """For each call left out: by file system, the promise that broke, or "" if it went unnoticed."""
    for pattern in OMISSIONS:
        found = {}
        for name in plan.filesystems:
            one = replace(plan, filesystems=(name,), without=(pattern,), stop_at_first=True, keep=0)
            result = explore(one)
            found[name] = result.violations[0].promise if result.violations else result.skipped
        yield pattern, found


# -------------------------------------------------------------------------------------------- the line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--filesystems", default=",".join(FILESYSTEMS), help="comma-separated")
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="comma-separated")
    parser.add_argument("--without", action="append", default=[], metavar="fsync:PATTERN")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stop-at-first", action="store_true")
    parser.add_argument("--replay", metavar="FILE")
    parser.add_argument("--image", metavar="FILE", help="with --replay: leave the disk there")
    parser.add_argument("--omissions", action="store_true")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave in order, as for a Ctrl-C
    plan = Plan(
        asked.states,
        asked.seed,
        tuple(asked.filesystems.split(",")),
        tuple(asked.scripts.split(",")),
        tuple(asked.without),
        asked.processes,
        asked.stop_at_first,
    )
    if asked.omissions:
        for pattern, found in omissions(plan):
            print(f"{pattern:34}", *(f"{name}: {what or '-':5}" for name, what in found.items()))
        return 0
    budget = Budget("release")
    if asked.replay:
        result = timed(lambda _: replay(asked.replay, asked.image), budget)
    else:
        result = timed(lambda _: explore(plan), budget)
    _print(result)
    return 1 if result.violations else 0


def _print(result: LayerResult) -> None:
    if result.skipped:
        print(f"skipped: {result.skipped}")
        return
    print(", ".join(f"{count} {name}" for name, count in result.explored.items()))
    print(f"{len(result.violations)} violations, {result.seconds:.1f} s")
    for note in result.notes:
        print(note)
    for violation in result.violations[:_SHOWN]:
        print(f"{violation.what}\n  {violation.replay}")


if __name__ == "__main__":
    raise SystemExit(main())
