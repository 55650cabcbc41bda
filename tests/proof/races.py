"""Spin tries every interleaving of two trainers and a reader on one root.

``specs/races.pml`` has the model and its assertions. Each build of it either holds in every state,
or finds a counterexample that it must find. That is a control (a look, a check or an order left
out), or a race that is accepted because POSIX has no compare-and-swap. Accepted races are replayed
here on production code in simulation, with one side stopped between its check and its act, and
their damage is bounded. So is the race that the sweep of temporary files closes.

Rules: spin and gcc run in a separate folder; where they are missing the layer says so and is
skipped. The replays need neither, and always run.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptfsm.core.errors import CkptFsmError, Fenced
from ckptfsm.core.layout import TRACKER, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.conformance import assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, check_root
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from proof.layer import Budget, LayerResult, Violation, timed

SPEC = Path(__file__).resolve().parents[2] / "specs" / "races.pml"
REPLAY = "PYTHONPATH=tests python -m proof.races"
NO_SPIN = "spin is not installed (apt-get install spin)"
NO_GCC = "gcc is not installed (apt-get install gcc)"
TIMEOUT_S = 600
MEMORY_MB = 3000
ONE = "iter_0000001"


# ----------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Build:
    """The model with some switches. ``finds``: the assertion that its counterexample violates; ""
    if there may be none."""

    switches: tuple[str, ...]
    finds: str = ""

    def __str__(self) -> str:
        return " ".join(f"-D{switch}" for switch in self.switches) or "as it is"


HOLDS = (Build(()), Build(("TAKING",)))
CONTROLS = (
    Build(("NO_SECOND_LOOK",), "held"),
    Build(("LOOK_BEFORE_LEASE",), "held"),
    Build(("EMPTY_UNDECIDED",), "held"),
    Build(("FORGETFUL_RECOVERY",), "held"),
    Build(("NO_SWEEP",), "tracker"),
    Build(("NO_EPOCH_CHECK",), "landed"),
    Build(("TAKING", "NO_EPOCH_CHECK"), "landed"),
    Build(("TAKING", "NO_LINK"), "holds"),
)
ACCEPTED = (
    Build(("STRICT_AWAY",), "held"),
    Build(("STRICT_READER",), "held"),
)


@dataclass(frozen=True)
class Search:
    """The result of an exhaustive search of one build. ``violated`` is the assertion, "" if none."""

    states: int
    violated: str
    trail: str = ""


def search(build: Build, folder: Path, spec: Path = SPEC) -> Search:
    """Search all states of one build. Raises ``RuntimeError`` if it was not exhaustive."""
    defines = [f"-D{switch}" for switch in build.switches]
    _call(["spin", "-a", *defines, str(spec)], folder)
    flags = ["-O0" if build.finds else "-O1", "-w", "-DSAFETY", f"-DMEMLIM={MEMORY_MB}"]
    _call(["gcc", *flags, "-o", "pan", "pan.c"], folder)
    said = _call(["./pan", "-m100000", "-E"], folder)  # -E: a process may stop anywhere
    states = next((line.split()[0] for line in said.splitlines() if "states, stored" in line), "")
    broken = next((line for line in said.splitlines() if "assertion violated" in line), "")
    incomplete = [w for w in ("max search depth", "out of memory", "not completed") if w in said]
    if not states or (incomplete and not broken):
        raise RuntimeError(f"{build}: the search did not end: {said[-2000:]}")
    trail = ""
    if broken:
        trail = _call(["spin", "-t", "-p", "-k", f"{spec.name}.trail", *defines, str(spec)], folder)
    return Search(int(states), broken.partition("violated ")[2], trail)


def _call(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def judge_build(build: Build, found: Search) -> str:
    """The fault of a build's result; "" if there is none."""
    if not build.finds and found.violated:
        return f"{build}: {found.violated}\n{found.trail}"
    if build.finds and build.finds not in found.violated:
        return f"{build}: should break {build.finds!r}, found {found.violated or 'nothing'}"
    return ""


# ------------------------------------------------------------------------- the accepted, on production


def trainer(disk: SimDisk, name: str, *, retention: Policy | None = None, **more: bool) -> FakeJob:
    """A job in another process; ``takeover`` where the other still lives."""
    storage = FaultStorage(SimStorage(disk, name))
    identity = Identity("sim", sum(name.encode()), name, name)
    job = FakeJob(storage, identity=identity, retention=retention or KeepAll(), **more)
    job.open()
    return job


def faults_of(job: FakeJob) -> FaultStorage:
    assert isinstance(job.storage, FaultStorage)
    return job.storage


def between_check_and_rename(
    job: FakeJob, src: str, dst: str, meanwhile: Callable[[], None]
) -> None:
    """Stop ``job`` right before its rename of ``src`` to ``dst``, once, and let the others go on."""
    waiting = [meanwhile]

    def before(index: int, method: str, path: str) -> None:
        source, _, target = path.partition(" -> ")
        if waiting and method == "rename" and source.startswith(src) and target.startswith(dst):
            waiting.pop()()

    faults_of(job).before = before


def dies_after_rename(job: FakeJob, src: str) -> None:
    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{src} ->"):
            raise ProcessDead(path)

    faults_of(job).after = after


def there(disk: SimDisk, path: str) -> bool:
    return path in disk.snapshot()


def judged(disk: SimDisk, acknowledged: int) -> int | None:
    storage = SimStorage(disk, "judge")
    assert_journal_conforms(storage)
    return check_root(storage, acknowledged)


def replay_away() -> str:
    """STRICT_AWAY: a reader that was told "there" while a prune was about to move it. The directory
    comes back."""
    disk = SimDisk()
    job = trainer(disk, "first", retention=LatestN(1))
    job.save(1)
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))
    between_check_and_rename(job, ONE, TRASH, lambda: (lease.__enter__(), None)[1])
    away: list[bool] = []
    faults_of(job).after = lambda index, method, path: (
        away.append(there(disk, ONE)) if path.startswith(f"{ONE} ->") else None
    )
    job.save(2)
    if away != [False]:
        return f"the directory was not away between the looks: {away}"
    if not there(disk, f"{ONE}/__0_0.distcp") or judged(disk, 2) != 2:
        return "it did not come back whole"
    job.coordinator.tick()
    kept = [c.step for c in job.coordinator.ledger.in_state(State.TRACKED)]
    return "" if kept == [1, 2] else f"tracked are {kept}"


def replay_tracker() -> str:
    """NO_SWEEP: a fenced trainer's tracker, checked before and renamed after. The sweep took it away."""
    disk = SimDisk()
    old = trainer(disk, "first")
    old.save(1)
    heirs: list[FakeJob] = []

    def taken_over() -> None:
        heirs.append(trainer(disk, "second", takeover=True))
        heirs[0].save(4)

    between_check_and_rename(old, TRACKER, TRACKER, taken_over)
    with suppress(Fenced):
        old.save(3)
    if not heirs or disk.snapshot()[TRACKER] != b"4\n":
        return f"the late rename landed: {disk.snapshot()[TRACKER]!r}"
    if stops := _stops(old):
        return stops
    return "" if judged(disk, 4) == 4 else "the newest one was touched"


def replay_reader() -> str:
    """STRICT_READER: a fenced trainer moves a step aside and dies; its heir empties the trash.

    The reader loses its files and is told so; what the heir tracked last is whole.
    """
    disk = SimDisk()
    old = trainer(disk, "first", retention=LatestN(1))
    old.save(1)
    heirs: list[FakeJob] = []
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))

    def taken_over() -> None:
        heirs.append(trainer(disk, "second", takeover=True))
        lease.__enter__()

    between_check_and_rename(old, ONE, TRASH, taken_over)
    dies_after_rename(old, ONE)
    with suppress(ProcessDead):
        old.save(2)
    heir = heirs[0]
    heir.coordinator.tick()
    if there(disk, ONE):
        return "the late rename did not land"
    try:
        lease.renew()
    except CkptFsmError:
        pass  # StepNotFoundError: the reader is told
    else:
        return "the reader was not told that it is gone"
    heir.save(4)
    if judged(disk, 4) != 4:
        return "the newest one was touched"
    for name in ("first", "second"):
        disk.kill(name)
    again = trainer(disk, "third")
    latest = again.coordinator.ledger.latest()
    return "" if latest is not None and latest.step == judged(disk, 4) == 4 else f"resumes {latest}"


def _stops(fenced: FakeJob) -> str:
    """A fenced trainer changes nothing more."""
    faults = faults_of(fenced)
    faults.before = None
    done = len(faults.calls)
    try:
        fenced.save(9)
    except Fenced:
        return "" if len(faults.calls) == done else f"it went on with {faults.calls[done:]}"
    return "the fenced trainer saved"


REPLAYS: tuple[tuple[Build, Callable[[], str]], ...] = (
    (ACCEPTED[0], replay_away),
    (ACCEPTED[1], replay_reader),
    (Build(("NO_SWEEP",)), replay_tracker),
)


# ------------------------------------------------------------------------------------------- layer


def missing() -> str:
    """Why the model cannot be searched here; "" if it can."""
    if shutil.which("spin") is None:
        return NO_SPIN
    return "" if shutil.which("gcc") is not None else NO_GCC


def searched(builds: tuple[Build, ...], result: LayerResult) -> Iterator[str]:
    for build in builds:
        with tempfile.TemporaryDirectory(prefix="ckptfsm-spin-") as folder:
            found = search(build, Path(folder))
        kind = "states" if not build.finds else "states to a counterexample"
        result.explored[kind] = result.explored.get(kind, 0) + found.states
        if wrong := judge_build(build, found):
            yield wrong


def run(budget: Budget) -> LayerResult:
    """The replays, then the model as it is and with every switch."""
    result = LayerResult("races", explored={"replays on production": 0})
    for build, replay in REPLAYS:
        result.explored["replays on production"] += 1
        if what := replay():
            result.violations.append(Violation("I9", f"replay of {build}: {what}", REPLAY))
    result.skipped = missing()
    if result.skipped:
        return result
    for wrong in searched((*HOLDS, *CONTROLS, *ACCEPTED), result):
        result.violations.append(Violation("I9 F27", wrong, REPLAY))
        if budget.stop_at_first:
            return result
    result.explored["builds that hold"] = len(HOLDS)
    result.explored["controls"] = len(CONTROLS)
    result.explored["accepted counterexamples"] = len(ACCEPTED)
    return result


def main() -> int:
    result = timed(run, Budget())
    print(f"{result.layer}: {result.explored} in {result.seconds:.1f} s {result.skipped}")
    for violation in result.violations:
        print(f"{violation.promise}: {violation.what}\n  {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
