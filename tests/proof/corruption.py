"""Real checkpoints are corrupted, and nothing wrong is ever restored (F15-F21, F30, F34).

Roots that production code wrote (settled, interrupted, or just one checkpoint; in a third of the
trials written by real Megatron writers of two ranks) get one corruption each. That is a bit, a
length, two files changed for each other, something missing, something too many, or another kind of
file. Then production code opens the root and restores, and is judged:

* a file of a checkpoint (shards, metadata, receipts, manifest): that step is never restored again;
  the next valid one is, or the error is typed. Also if the step is asked for by its number;
* the journal: refused as corrupt with nothing changed on disk, or the latest step is restored, exactly;
* the tracker: names the latest again; markers, epochs, locks, trash: the latest step is restored;
* always: the content of a step is bit for bit the state saved at that step, errors are typed, files
  beside the root are untouched, and the journal goes on being a legal trace;
* nothing is reported, refused or withdrawn where nothing, or nothing that counts, was changed.

    PYTHONPATH=tests python -m proof.corruption [--seed N] [--profile pr|nightly|release]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fakes import FakeDriver, fake_ports
from inline import InlineExecutor

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import (
    CkptFsmError,
    DeadlineExceeded,
    JournalCorrupt,
    NewerSchema,
    StepExistsError,
    StorageError,
)
from ckptfsm.core.layout import (
    EPOCHS,
    JOURNAL,
    LOCK,
    MANIFEST,
    MEGATRON,
    PINS,
    PRIVATE,
    QUARANTINE,
    READERS,
    STAGING,
    TRACKER,
    TRASH,
    parse_segment,
    parse_tracker,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Identity, Storage, Survey
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms
from ckptfsm.testing.faults import FaultStorage, crash_at
from ckptfsm.testing.harness import FakeJob, SimClock
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from proof.coverage import watch_moves
from proof.layer import Budget, LayerResult, Violation, in_memory

Content = dict[str, bytes]
Tree = dict[str, bytes | str | None]
PARTS = (PartSpec("state"), PartSpec("ema", "dcp", "ema"))
OUTSIDE = "-> outside"  # on a real disk: to the directory beside the root
REAL_SHARE = 5  # every fifth trial is on a real disk, where there are FIFOs too
HUGE_BYTES = 20 << 30  # of a sparse file
MEGATRON_SHARE = 3  # every third is by real Megatron writers

# ------------------------------------------------------------------------------ what is corrupted


@dataclass(frozen=True)
class Template:
    """A root as production code left it, and the content that an uncorrupted one restores:
    ``truth`` by step."""

    name: str
    tree: Tree
    truth: Mapping[int, Content]
    parts: tuple[str, ...] = tuple(part.name for part in PARTS)

    @property
    def latest(self) -> int:
        return max(self.truth)

    @cached_property
    def acknowledged(self) -> int:
        """The step that the tracker names: it may never be lost."""
        return int(_bytes(self, TRACKER))

    @cached_property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(path for path, value in self.tree.items() if isinstance(value, bytes)))


def _job(disk: SimDisk, number: int, **settings: Any) -> FakeJob:
    name = f"p{number}"
    storage = FaultStorage(SimStorage(disk, name))
    return FakeJob(storage, identity=Identity("sim", number, name, name), **settings)


def _long_life(disk: SimDisk, last: Callable[[FakeJob], None]) -> None:
    """Three runs: pruned, failed, rolled back, pinned, leased; ``last`` ends the third."""
    first = _job(disk, 1, retention=LatestN(1))
    first.open()
    first.save(1, PARTS)
    first.save(2, PARTS)
    first.close()
    second = _job(disk, 2)
    second.open()
    second.coordinator.pin(2, "kept")
    second.fail(second.request(5))
    second.save(10, PARTS)
    second.save(40, PARTS)
    second.coordinator.rollback(10)
    disk.kill("p2")
    third = _job(disk, 3)
    third.open()
    third.save(20, PARTS)
    ReaderLease("/unused", 10, storage=SimStorage(disk, "reader"), nonce="reader").renew()
    last(third)


def _settled(job: FakeJob) -> None:
    job.save(30, PARTS)
    job.close()


def _killed(job: FakeJob) -> None:
    job.save(30, PARTS)


def _cut_short(method: str, at: str) -> Callable[[FakeJob], None]:
    """The process dies just before ``method`` is called on ``at``, during the save of step 30."""

    def last(job: FakeJob) -> None:
        storage = job.storage
        assert isinstance(storage, FaultStorage)

        def before(index: int, called: str, path: str) -> None:
            if called == method and at in path:
                crash_at(index)(index, called, path)

        storage.before = before
        try:
            job.save(30, PARTS)
        except ProcessDead:
            return
        raise AssertionError(f"{method} {at} was never called")

    return last


def _only_one(disk: SimDisk) -> None:
    job = _job(disk, 1)
    job.open()
    job.save(30, PARTS)
    job.close()


def _pruning(disk: SimDisk) -> None:
    """Retention has journaled that step 1 may go, and dies before it is moved (F17)."""
    job = _job(disk, 1)
    job.open()
    job.save(1, PARTS)
    job.save(20, PARTS)
    job.close()
    disk.kill("p1")
    job = _job(disk, 2, retention=LatestN(2))
    job.open()
    _cut_short("rename", f"{TRASH}/1.")(job)


LIVES: Mapping[str, Callable[[SimDisk], None]] = {
    "settled": lambda disk: _long_life(disk, _settled),
    "killed": lambda disk: _long_life(disk, _killed),
    "written": lambda disk: _long_life(disk, _cut_short("rename", MANIFEST)),
    "published": lambda disk: _long_life(disk, _cut_short("open_exclusive", TRACKER)),
    "only one": _only_one,
    "pruning": _pruning,
}


def make_template(name: str) -> Template:
    disk = SimDisk()
    LIVES[name](disk)
    disk.crash("all_kept")
    for path in _temporaries(disk):
        SimStorage(disk, "person").unlink(path)  # swept at the next start: not worth corrupting
    tree = disk.snapshot()
    outcome = examine(SimStorage(disk.fork(), "control"))
    assert outcome.error is None, outcome.error
    return Template(name, tree, outcome.restored)


def make_megatron_template() -> Template:
    """Two steps that real Megatron writers of two ranks wrote to a real disk."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "megatron"))
    from cluster import Cluster, ForkServer

    server = ForkServer()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        try:
            with Cluster(server, Path(name) / "jobs") as cluster:
                cluster.run("save_steps", root=str(root), steps=[10, 30])
        finally:
            server.close()
        read = _tree_of(root)
    outcome = examine(SimStorage(_disk_of(read), "control"), ("state",))
    assert sorted(outcome.restored) == [10, 30], outcome
    return Template("megatron", read, outcome.restored, ("state",))


def _disk_of(tree: Mapping[str, Any]) -> SimDisk:
    disk = SimDisk()
    person = SimStorage(disk, "person")
    for path, value in sorted(tree.items()):
        if value is None:
            person.mkdir(path)
        elif isinstance(value, bytes):
            disk.plant_file(path, value)
        else:  # a FIFO too: neither is a regular file
            disk.plant_symlink(path, "/outside")
    return disk


def _temporaries(disk: SimDisk) -> list[str]:
    return [path for path, value in disk.snapshot().items() if ".tmp-" in path and value]


# ---------------------------------------------------------------------------------------- examine


def trusting_finisher(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """A driver that believes all files: the library has to find out whether those were written."""
    return {**trusting_dcp_finisher(planned, results, location), "metadata.json": b"{}"}


def trusting_dcp_finisher(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """The same for a part in DCP's own format."""
    rows = [[list(row) for row in rows] for rows in results]
    return {".metadata": planned + json.dumps(rows).encode()}


class _ReadsAll(FakeDriver):
    """Loads every byte of a part's directory, through the storage port."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(finishers={"torch_dist": trusting_finisher, "dcp": trusting_dcp_finisher})
        self.storage = storage

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        return Survey(set(), {}, {})

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        """Bytes fit everywhere, and have no keys."""
        return set()

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        content: Content = {}
        for directory in directories.values():
            place = directory.removeprefix(f"{self.storage.root}/")
            for name in self.storage.listdir(place):
                if self.storage.stat(f"{place}/{name}").kind == "file":
                    content[f"{place}/{name}"] = self.storage.read(f"{place}/{name}", 1 << 24)
        return dict.fromkeys(parts, content)


@dataclass
class Outcome:
    """The findings of a run. ``error`` ended it; ``refused`` are the steps that restore said no to."""

    error: BaseException | None = None
    first: int | None = None
    restored: dict[int, Content] = field(default_factory=dict)
    refused: dict[int, CkptFsmError] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    tracker: int | None = None


def examine(storage: Storage, parts: Sequence[str] = ("state", "ema")) -> Outcome:
    """Open, restore what comes unasked, then every step by its number, newest first; close."""
    outcome = Outcome()
    ports = fake_ports(
        lambda create: storage,
        driver=_ReadsAll(storage),
        clock=SimClock(),
        executor=InlineExecutor,
        identity=lambda: Identity("sim", 99, "examiner", "examiner"),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Manager(ports, CheckpointConfig()) as manager:
                assert manager.recovery is not None
                outcome.said = [*manager.recovery.warnings]
                outcome.said += [
                    d.subject for d in manager.recovery.decisions if d.result == "reported"
                ]
                _restore_all(manager, outcome, parts)
                outcome.tracker = read_tracker(storage).step
    except Exception as error:  # whatever it is: the judge looks at its type
        outcome.error = error
    return outcome


def _restore_all(manager: Manager, outcome: Outcome, parts: Sequence[str]) -> None:
    wanted: dict[str, dict[str, object]] = {part: {} for part in parts}
    before = manager.all_steps()
    found = manager.restore(parts=wanted)
    outcome.first = found.step if found is not None else None
    outcome.steps = manager.all_steps()
    for step in sorted(before, reverse=True):
        try:
            loaded = manager.restore(parts=wanted, step=step)
        except CkptFsmError as error:
            outcome.refused[step] = error
        else:
            assert loaded is not None and loaded.step == step
            outcome.restored[step] = loaded.parts["state"]


# ------------------------------------------------------------------------------------- corruption


@dataclass(frozen=True)
class Corruption:
    """A change of one tree. ``area`` names the struck files, ``steps`` the steps that they belong
    to, if any."""

    how: str
    path: str
    area: str
    steps: frozenset[int]
    tree: Mapping[str, Any]
    matters: bool = True

    def __str__(self) -> str:
        return f"{self.how} {self.path} ({self.area})"


class Fifo:
    """A named pipe in a tree (real disk only)."""


@dataclass(frozen=True)
class Huge:
    """A sparse file in a tree (real disk only): ``data``, then zeros without a block on the disk."""

    data: bytes


def _area(template: Template, path: str) -> tuple[str, int | None]:
    top = path.split("/")[0]
    step = MEGATRON.parse_published(top)
    if step is not None:
        kind = "manifest" if path.endswith(MANIFEST) else "checkpoint"
        return kind, step
    if path == TRACKER:
        return "tracker", None
    for name, prefix in (
        ("journal", JOURNAL), ("staging", STAGING), ("marker", PINS), ("marker", READERS),
        ("epoch", EPOCHS), ("trash", TRASH), ("quarantine", QUARANTINE), ("lock", LOCK),
    ):  # fmt: skip
        if path == prefix or path.startswith(prefix + "/"):
            return name, 30 if name == "staging" else None
    return "stranger", None


_WEIGHTS = {
    "checkpoint": 9, "manifest": 4, "journal": 6, "staging": 20, "tracker": 3, "marker": 1,
    "epoch": 1, "trash": 1, "quarantine": 1, "lock": 1,
}  # fmt: skip


def choose(template: Template, rng: random.Random, *, real: bool) -> Corruption:
    """A corruption drawn at random: first the target, then the change."""
    areas: dict[str, list[str]] = {}
    for path in template.files:
        areas.setdefault(_area(template, path)[0], []).append(path)
    names = sorted(areas)
    area = rng.choices(names, [_WEIGHTS[name] for name in names])[0]
    path = rng.choice(areas[area])
    ways = [flip, flip, flip, truncate, extend, swap, remove, replace_by_directory]
    ways += [replace_by_link, add_file, zero_block, gut_directory, newer_schema, spoil_padding]
    if real:
        ways += [replace_by_fifo] * 3 + [blow_up] * 3
    return rng.choice(ways)(template, path, rng)


def _made(
    template: Template, how: str, path: str, changes: Mapping[str, Any], *, matters: bool = True
) -> Corruption:
    """The tree with ``changes``: path -> content, None removed, or another kind of thing."""
    tree: dict[str, Any] = dict(template.tree)
    for name, value in changes.items():
        for below in [p for p in tree if p == name or p.startswith(name + "/")]:
            del tree[below]
        if value is not _GONE:
            tree[name] = value
    hit = {step for name in (path, *changes) if (step := _area(template, name)[1]) is not None}
    return Corruption(how, path, _area(template, path)[0], frozenset(hit), tree, matters)


_GONE: Any = object()


def _bytes(template: Template, path: str) -> bytes:
    value = template.tree[path]
    assert isinstance(value, bytes)
    return value


def flip(template: Template, path: str, rng: random.Random) -> Corruption:
    """A flipped bit. In a journal's padding it may not matter."""
    data = bytearray(_bytes(template, path))
    if not data:
        return extend(template, path, rng)
    used = len(bytes(data).rstrip(b"\n")) + 1 if path.startswith(JOURNAL) else len(data)
    at = rng.randrange(min(used, len(data)))
    data[at] ^= 1 << rng.randrange(8)
    return _made(template, f"flip byte {at} of", path, {path: bytes(data)})


def truncate(template: Template, path: str, rng: random.Random) -> Corruption:
    data = _bytes(template, path)
    used = len(data.rstrip(b"\n")) if path.startswith(JOURNAL) else len(data)
    if not data:
        return remove(template, path, rng)
    keep = rng.randrange(max(used, 1))
    return _made(template, f"cut to {keep} bytes", path, {path: data[:keep]})


def extend(template: Template, path: str, rng: random.Random) -> Corruption:
    """More bytes at the end. A journal ends in padding: later bytes are no record."""
    more = rng.randbytes(1 + rng.randrange(40))
    how, matters = f"{len(more)} bytes more at", not path.startswith(JOURNAL)
    return _made(template, how, path, {path: _bytes(template, path) + more}, matters=matters)


def zero_block(template: Template, path: str, rng: random.Random) -> Corruption:
    """At most 512 bytes, which read back as zeros."""
    data = _bytes(template, path)
    if not data:
        return extend(template, path, rng)
    used = len(data.rstrip(b"\n")) or 1
    at = rng.randrange(-(-used // 512)) * 512
    piece = data[at : at + 512]
    changed = data[:at] + bytes(len(piece)) + data[at + 512 :]
    return _made(template, f"zeros from {at} in", path, {path: changed})


def swap(template: Template, path: str, rng: random.Random) -> Corruption:
    """The contents of two files of the same area: two ranks' shards, two steps', two segments."""
    area = _area(template, path)[0]
    others = [
        other
        for other in template.files
        if _area(template, other)[0] == area and template.tree[other] != template.tree[path]
    ]
    if not others:
        return flip(template, path, rng)
    other = rng.choice(others)
    changes = {path: _bytes(template, other), other: _bytes(template, path)}
    return _made(template, f"contents of {other} and", path, changes)


def remove(template: Template, path: str, rng: random.Random) -> Corruption:
    return _made(template, "remove", path, {path: _GONE})


def replace_by_directory(template: Template, path: str, rng: random.Random) -> Corruption:
    return _made(template, "a directory for", path, {path: None})


def replace_by_link(template: Template, path: str, rng: random.Random) -> Corruption:
    """A link to somewhere outside the root."""
    return _made(template, "a link for", path, {path: OUTSIDE})


def replace_by_fifo(template: Template, path: str, rng: random.Random) -> Corruption:
    return _made(template, "a FIFO for", path, {path: Fifo()})


def blow_up(template: Template, path: str, rng: random.Random) -> Corruption:
    """The same content in 20 GB. Bytes after the end of a sealed segment do not count."""
    newest = path == max(p for p in template.files if p.startswith(JOURNAL))
    matters = newest or not path.startswith(JOURNAL)
    return _made(template, "20 GB at", path, {path: Huge(_bytes(template, path))}, matters=matters)


def add_file(template: Template, path: str, rng: random.Random) -> Corruption:
    """Another shard among those of a checkpoint counts; elsewhere a stranger's file does not."""
    directory = path.rpartition("/")[0]
    shard = path.startswith("iter_") and PRIVATE not in directory
    name = "__7_0.distcp" if shard else f"stranger-{rng.randrange(100)}"
    extra = f"{directory}/{name}" if directory else name
    matters = shard or path.startswith(STAGING)
    changes = {extra: _bytes(template, path)}
    return _made(template, f"{name} added beside", path, changes, matters=matters)


def spoil_padding(template: Template, path: str, rng: random.Random) -> Corruption:
    """A byte behind a journal's last record: there is nothing to lose."""
    data = bytearray(_bytes(template, path))
    used = len(bytes(data).rstrip(b"\n")) + 1
    if not path.startswith(JOURNAL) or used >= len(data):
        return flip(template, path, rng)
    at = rng.randrange(used, len(data))
    data[at] ^= 1 << rng.randrange(8)
    return _made(template, f"flip padding {at} of", path, {path: bytes(data)}, matters=False)


def gut_directory(template: Template, path: str, rng: random.Random) -> Corruption:
    """The whole directory of a step: gone, emptied, a link, or changed for another step's (F19)."""
    step = _area(template, path)[1]
    if step is None or not path.startswith("iter_"):
        return remove(template, path, rng)
    name = MEGATRON.published_name(step)
    how = rng.choice(["gone", "empty", "link", "file", "other"])
    others = sorted(
        s for s in template.truth if s != step and MEGATRON.published_name(s) in template.tree
    )
    if how == "other" and others:
        other = MEGATRON.published_name(rng.choice(others))
        changes: dict[str, Any] = {}
        for one, two in ((name, other), (other, name)):
            changes |= {
                one + inner.removeprefix(two): value
                for inner, value in template.tree.items()
                if inner == two or inner.startswith(two + "/")
            }
        tree = {p: v for p, v in template.tree.items() if not p.startswith((name, other))}
        hit = frozenset({step, MEGATRON.parse_published(other) or 0})
        return Corruption(f"change for {other}", name, "checkpoint", hit, {**tree, **changes})
    value = {"gone": _GONE, "empty": None, "link": OUTSIDE, "file": b"x"}.get(how, _GONE)
    return _made(template, f"{how}: all of", f"{name}/{MANIFEST}", {name: value})


def newer_schema(template: Template, path: str, rng: random.Random) -> Corruption:
    """A document as a newer version of the library would write it (F34)."""
    data = _bytes(template, path)
    try:
        document = json.loads(data)
    except ValueError:
        return flip(template, path, rng)
    if not isinstance(document, dict) or "schema_version" not in document:
        return flip(template, path, rng)
    changed = json.dumps({**document, "schema_version": 2, "news": [1]}).encode()
    return _made(template, "newer schema in", path, {path: changed})


# ------------------------------------------------------------------------------------------ judge


def judge(template: Template, corruption: Corruption, outcome: Outcome, changed: bool) -> str:
    """The fault of ``outcome``; "" if there is none. ``changed``: the root is not as it was."""
    if outcome.error is not None:
        return _judge_refusal(template, corruption, outcome.error, changed)
    for step, content in outcome.restored.items():
        if content != template.truth.get(step):
            return f"step {step} is restored with another content than was saved"
    if outcome.first is None or outcome.first not in outcome.restored:
        return f"unasked comes step {outcome.first}, and it cannot be restored by its number"
    if outcome.tracker != outcome.first and not _has_no_tracker(corruption):
        return f"the tracker says {outcome.tracker}, restored was {outcome.first}"
    if not corruption.matters:
        return _judge_harmless(template, outcome)
    if corruption.area in ("checkpoint", "manifest"):
        return _judge_step(template, corruption, outcome)
    if corruption.area == "journal" and (broken := _broken_rule(corruption)):
        return f"opened, although its journal is no legal trace ({broken})"
    if corruption.area in ("staging", "journal"):
        lost = outcome.first < template.acknowledged
        return f"only step {outcome.first} is restored" if lost else ""
    if outcome.restored != template.truth:
        return f"restored are {sorted(outcome.restored)}, intact are {sorted(template.truth)}"
    if corruption.area == "tracker":
        return _judge_tracker(template, corruption, outcome)
    return ""


def _judge_refusal(
    template: Template, corruption: Corruption, error: BaseException, changed: bool
) -> str:
    """Refused: only where there is nothing else to do, by name, and with everything left as it was."""
    if not isinstance(error, CkptFsmError):
        return f"an error without a type of ours: {type(error).__name__}: {error}"
    if not corruption.matters:
        return f"refused although nothing that counts was changed: {error}"
    newer = isinstance(error, NewerSchema) and corruption.how == "newer schema in"
    if newer or (isinstance(error, JournalCorrupt) and corruption.area == "journal"):
        return f"refused as {error.kind}, but the root was changed" if changed else ""
    given_up = isinstance(error, (DeadlineExceeded, StorageError))
    if given_up and _cannot_be_tracked(template, corruption):
        return ""
    kind = corruption.tree.get(corruption.path, b"")
    own = corruption.area in ("journal", "lock", "epoch") and not isinstance(kind, bytes)
    hopeless = not set(template.truth) - corruption.steps
    return "" if own or hopeless else f"refused: {error}"


def _broken_rule(corruption: Corruption) -> str:
    """The verdict of the judge of journals, which shares no code with the reader; "" for a torn
    tail."""
    try:
        # a segment that is gone took no decision with it: the newest has the whole ledger
        epoch = parse_segment(corruption.path.rpartition("/")[2]) or 0
        assert_journal_conforms(SimStorage(_disk_of(corruption.tree), "judge"), lost=(epoch,))
    except JournalViolation as error:
        return error.rule
    except OSError as error:
        return str(error)
    return ""


def _has_no_tracker(corruption: Corruption) -> bool:
    """A directory at the tracker's name cannot be replaced by a rename: a person must move it."""
    return corruption.area == "tracker" and corruption.tree.get(TRACKER, b"") is None


def _cannot_be_tracked(template: Template, corruption: Corruption) -> bool:
    """A finalized attempt cannot be acknowledged then, and closing in order says so."""
    return _has_no_tracker(corruption) and template.latest != template.acknowledged


def _judge_harmless(template: Template, outcome: Outcome) -> str:
    said = [text for text in outcome.said if "stranger" not in text]
    if outcome.restored != template.truth or outcome.refused or said:
        return f"a false alarm: {said or sorted(outcome.refused) or sorted(outcome.restored)}"
    return ""


def _judge_step(template: Template, corruption: Corruption, outcome: Outcome) -> str:
    wrong = corruption.steps & set(outcome.restored)
    if wrong:
        return f"corrupt, and restored: {sorted(wrong)}"
    intact = set(template.truth) - corruption.steps
    if sorted(outcome.restored) != sorted(intact):
        return f"restored are {sorted(outcome.restored)}, intact are {sorted(intact)}"
    if outcome.first != max(intact):
        return f"step {outcome.first} is restored, {max(intact)} is intact"
    return ""


def _judge_tracker(template: Template, corruption: Corruption, outcome: Outcome) -> str:
    """A tracker that says something else is rewritten, and a person hears of it (F18)."""
    left = corruption.tree.get(TRACKER, _GONE)
    same = left is _GONE or (isinstance(left, bytes) and parse_tracker(left) == template.latest)
    lagging = template.acknowledged != template.latest
    return "" if same or lagging or outcome.said else "the tracker was rewritten without a word"


# ------------------------------------------------------------------------------------------ trials


@dataclass
class Bench:
    """The templates, and the findings of the trials. ``megatron``: the one of every third trial.

    ``saved_again``: in the last trial, a step that was corrupt was to be saved once more.
    """

    templates: list[Template]
    megatron: Template | None = None
    counts: Counter[str] = field(default_factory=Counter)
    saved_again: bool = False

    @property
    def all(self) -> list[Template]:
        return [*self.templates, *([self.megatron] if self.megatron is not None else [])]

    def trial(self, seed: int) -> tuple[Corruption, str]:
        """A corruption and the fault of its outcome."""
        rng = random.Random(seed)
        template = rng.choice(self.templates)
        if self.megatron is not None and is_megatrons(seed):
            template = self.megatron
        real = seed % REAL_SHARE == 0
        corruption = choose(template, rng, real=real)
        return corruption, self.judged(template, corruption, real=real)

    def judged(self, template: Template, corruption: Corruption, *, real: bool = False) -> str:
        """The fault of the outcome of a corruption; "" if there is none."""
        run = _on_real_disk if real else _on_sim_disk
        outcome, changed, problem = run(template, corruption)
        problem = problem or judge(template, corruption, outcome, changed)
        self.saved_again = not real and bool(_to_save_again(corruption, outcome))
        self.counts[corruption.area] += 1
        self.counts["of Megatron's"] += template is self.megatron
        self.counts["harmless" if not corruption.matters else _result(template, outcome)] += 1
        return f"{template.name}: {corruption}: {problem}" if problem else ""

    def control(self, template: Template) -> str:
        """Nothing is changed: everything is restored, without a word."""
        nothing = Corruption(
            "nothing", TRACKER, "control", frozenset(), template.tree, matters=False
        )
        for run in (_on_sim_disk, _on_real_disk):
            outcome, changed, problem = run(template, nothing)
            problem = problem or judge(template, nothing, outcome, changed)
            if problem:
                return f"{template.name}, uncorrupted: {problem}"
        return ""


def is_megatrons(seed: int) -> bool:
    return seed % MEGATRON_SHARE == 1


def _result(template: Template, outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"refused: {getattr(outcome.error, 'kind', '?')}"
    return "fell back" if outcome.restored != template.truth else "mended or untouched"


def _on_sim_disk(template: Template, corruption: Corruption) -> tuple[Outcome, bool, str]:
    disk = _disk_of(corruption.tree)
    before = disk.snapshot()
    outcome = examine(SimStorage(disk, "examiner"), template.parts)
    changed = _without_owner(disk.snapshot()) != _without_owner(before)
    problem = _journal_problem(corruption, outcome, SimStorage(disk, "judge"))
    if not problem and outcome.error is None:
        problem = _goes_on(disk, corruption, outcome)
    return outcome, changed, problem


def _goes_on(disk: SimDisk, corruption: Corruption, outcome: Outcome) -> str:
    """The next run saves what comes next, also the very step that was corrupt (F15)."""
    if _has_no_tracker(corruption):
        return ""
    assert outcome.first is not None
    job = _job(disk, 77)
    report = job.open()
    if report.latest_step != outcome.first:
        return f"the next run begins with {report.latest_step}, not {outcome.first}"
    for step in (*_to_save_again(corruption, outcome), outcome.first + 50):
        try:
            job.save(step, PARTS)
        except StepExistsError:
            continue  # something of value still stands at its name: never overwritten
        if step not in job.acknowledged:
            return f"step {step} cannot be saved afterwards"
    return ""


def _to_save_again(corruption: Corruption, outcome: Outcome) -> list[int]:
    """The steps that were corrupt and are to be saved once more, if the root is in use again."""
    if outcome.error is not None or outcome.first is None or _has_no_tracker(corruption):
        return []
    return sorted(step for step in corruption.steps if step > outcome.first)


def _without_owner(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without what opening a root changes before it is known whether it can be opened."""
    return {p: v for p, v in tree.items() if not p.startswith((EPOCHS, LOCK))}


def _journal_problem(corruption: Corruption, outcome: Outcome, storage: Storage) -> str:
    if corruption.area in ("journal", "control") or outcome.error is not None:
        return ""
    try:
        assert_journal_conforms(storage)
    except JournalViolation as error:
        return str(error)
    return ""


def _on_real_disk(template: Template, corruption: Corruption) -> tuple[Outcome, bool, str]:
    with tempfile.TemporaryDirectory(dir=in_memory()) as name:
        place = Path(name)
        beside, root = place / "beside", place / "root"
        beside.mkdir()
        (beside / "canary").write_bytes(b"canary")
        _lay_out(root, corruption.tree, beside)
        os.utime(beside, (1, 1))
        before = _tree_of(root)
        storage = PosixStorage(root)
        try:
            outcome = examine(storage, template.parts)
        finally:
            storage.close_root()
        changed = _without_owner(_tree_of(root)) != _without_owner(before)
        look = PosixStorage(root)
        try:
            problem = _journal_problem(corruption, outcome, look)
        finally:
            look.close_root()
        found = [(p.name, p.read_bytes()) for p in beside.iterdir()]
        if found != [("canary", b"canary")] or beside.stat().st_mtime != 1:
            problem = f"outside the root there is {found}"
        return outcome, changed, problem


def _lay_out(root: Path, tree: Mapping[str, Any], beside: Path) -> None:
    root.mkdir()
    for path, value in sorted(tree.items()):
        if value is None:
            (root / path).mkdir()
        elif isinstance(value, bytes):
            (root / path).write_bytes(value)
        elif isinstance(value, Fifo):
            os.mkfifo(root / path)
        elif isinstance(value, Huge):
            (root / path).write_bytes(value.data)
            os.truncate(root / path, HUGE_BYTES)
        else:
            (root / path).symlink_to(beside)


def _tree_of(root: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for directory, inner, files in os.walk(root):
        base = Path(directory)
        for name in (*inner, *files):
            path = base / name
            value: bytes | str | None = None
            if path.is_symlink():
                value = f"-> {path.readlink()}"
            elif not path.is_dir():
                huge = path.stat().st_size == HUGE_BYTES
                value = "huge" if huge else path.read_bytes() if path.is_file() else "a FIFO"
            tree[str(path.relative_to(root))] = value
    return tree


# --------------------------------------------------------------------------------------------- run


def make_bench(*, megatron: bool) -> Bench:
    """A root of Megatron's, beside the made ones."""
    return Bench(
        [make_template(name) for name in LIVES], make_megatron_template() if megatron else None
    )


_FAULTS = {
    "checkpoint": ("F21", State.TRACKED), "manifest": ("F21", State.TRACKED),
    "staging": ("F30", State.SHARDS_WRITTEN),
    "journal": ("F20", None), "tracker": ("F18", None), "marker": ("F30", None),
    "epoch": ("F30", None), "trash": ("F30", None), "quarantine": ("F30", State.QUARANTINED),
    "lock": ("F30", None),
}  # fmt: skip


def _count_faults(result: LayerResult, corruption: Corruption, *, saved_again: bool) -> None:
    number, state = _FAULTS[corruption.area]
    if corruption.matters or number != "F21":
        result.coverage.fault(number, state)
    if corruption.how.startswith(("a link", "link")):
        result.coverage.fault("F16", state)
    if corruption.how.startswith("newer schema"):
        result.coverage.fault("F34", state)
    if corruption.how.startswith(("gone", "empty", "file")):
        result.coverage.fault("F19", state)
    if corruption.area == "checkpoint" and saved_again:
        result.coverage.fault("F15", state)


def run(budget: Budget) -> LayerResult:
    """See the module. A hurried run does without Megatron, and leaves its seeds out."""
    result = LayerResult("corruption")
    began = time.monotonic()
    with watch_moves(result.coverage):
        bench = make_bench(megatron=not budget.stop_at_first)
        alarms = [problem for t in bench.all if (problem := bench.control(t))]
        again = "PYTHONPATH=tests python -m proof.corruption"
        for problem in alarms:
            command = f"{again} --profile {budget.profile}"
            result.violations.append(Violation("I3", problem, command))
        trials = range(budget.pick(pr=1200, nightly=12_000, release=12_000))
        seeds = [s for s in trials if bench.megatron is not None or not is_megatrons(s)]
        tried = 0
        for seed in seeds:
            corruption, problem = bench.trial(seed)
            tried += 1
            _count_faults(result, corruption, saved_again=bench.saved_again)
            if problem:
                result.violations.append(Violation("I3", problem, f"{again} --seed {seed}"))
                if budget.stop_at_first:
                    break
    result.explored = {
        "corruptions": tried - bench.counts["harmless"],
        "harmless_changes": bench.counts["harmless"],
        "changes of Megatron's": bench.counts["of Megatron's"],
        "controls": 2 * len(bench.all),
        "undetected": len(result.violations) - len(alarms),
    }
    result.notes.append(", ".join(f"{name}: {n}" for name, n in sorted(bench.counts.items())))
    result.seconds = time.monotonic() - began
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.corruption")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--profile", default="pr")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        bench = make_bench(megatron=is_megatrons(options.seed))
        corruption, problem = bench.trial(options.seed)
        print(corruption, problem or "as it should be", sep="\n")
        return 1 if problem else 0
    result = run(Budget(profile=options.profile))
    print(result.explored, *result.notes, sep="\n")
    print(*result.violations, sep="\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
