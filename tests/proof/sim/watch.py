"""The judge of every change of a simulated disk, also in the durable view: the states that a power loss
right now could leave. No decision of the library's is used to judge it.

Names on disk and the shape of documents come from the specification, and are repeated here. Imported
are the names of a part's planned metadata and the reasons that withdraw a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.core.events import UNUSABLE
from ckptfsm.core.layout import planned_name
from ckptfsm.testing.invariants import (
    LIMIT,
    MANIFEST,
    TRACKER,
    Attempt,
    RootBroken,
    check_directory,
    has_manifest,
    is_step_of,
    name_of,
)
from ckptfsm.testing.simfs import SimDisk, SimStorage

PRIVATE = ".ckptfsm/"
STAGING = ".ckptfsm/staging/"
TRASH = ".ckptfsm/trash/"
QUARANTINE = ".ckptfsm/quarantine/"
_EPOCH = ".ckptfsm/epochs/epoch-"
_JOURNAL = ".ckptfsm/journal/"
_RECEIPTS = "/.ckptfsm/receipts/"
_ATTEMPT = re.compile(r"(\d+)\.e(\d+)\.a(\d+)")
_GONE = f"{TRASH}gone-"
_TEMPORARY = re.compile(r"\.tmp-(\d+)-")  # the epoch of the writer


def _is_segment(path: str) -> bool:
    """True for a segment of the journal, but not for the temporary copy that is to replace one."""
    return path.startswith(_JOURNAL) and path.endswith(".ndjson")


@dataclass
class JournalModel:
    """The durable content of an epoch's segment: state by attempt, and a rollback under way.

    ``required``: the names of the parts that an attempt cannot do without. ``loose``: the
    directories of the optional parts, which may be unwritten.
    """

    states: dict[Attempt, str] = field(default_factory=dict)
    in_place: set[Attempt] = field(default_factory=set)
    required: dict[Attempt, set[str]] = field(default_factory=dict)
    loose: dict[Attempt, tuple[str, ...]] = field(default_factory=dict)
    rolling_back: bool = False
    target: int | None = None

    def declare(self, of: Attempt, entry: Mapping[str, Any]) -> None:
        """Remember the parts that a checkpoint declared."""
        self.required[of] = {part["name"] for part in entry["parts"] if not part["optional"]}
        optional = [part for part in entry["parts"] if part["optional"]]
        self.loose[of] = tuple(
            path for part in optional for path in (part["directory"], planned_name(part["name"]))
        )
        if entry["in_place"]:
            self.in_place.add(of)

    def of_states(self, *states: str) -> set[Attempt]:
        return {of for of, state in self.states.items() if state in states}

    def steps(self, *states: str) -> set[int]:
        return {of[0] for of in self.of_states(*states)}

    def reached(self) -> int | None:
        """Where a rollback leaves the tracker: at the target, or the next one below if it is lost."""
        below = {s for s in self.steps("tracked") if self.target is not None and s <= self.target}
        return max(below, default=None)

    def of_step(self, step: int, *states: str) -> list[Attempt]:
        return [of for of, state in self.states.items() if of[0] == step and state in states]


@dataclass
class Confirmed:
    """A granted reader's lease: the step is not to be deleted before ``until``."""

    step: int
    files: frozenset[object]
    until: float


class Watch:
    """Judges every change of a disk as it happens, told by ``changed``. Raises ``RootBroken``.

    - ``damaged``: steps with directories that a test has damaged, which may be withdrawn.
    - ``strays``: names of steps at which a test planted a directory that is no checkpoint.
    - ``unwritten``: attempts with a part that was never written, even if it was reported.
    - ``touched``: steps that the one checked effect of a fenced process has hit (I9 allows that
      one).
    """

    def __init__(self, disk: SimDisk, *, in_place: bool = False) -> None:
        self.disk = disk
        self.in_place = in_place
        self.acknowledged: set[int] = set()
        self.ever_acknowledged: list[int] = []
        self.damaged: set[int] = set()
        self.strays: set[int] = set()
        self.unwritten: set[Attempt] = set()
        self.touched: set[int] = set()
        self.models: dict[int, JournalModel] = {}
        self.newest_epoch = 0
        self.meddled = False  # another program wrote the tracker
        self.readers: dict[str, Confirmed] = {}
        self.late_effects: dict[tuple[str, int], int] = {}
        self.effects = 0
        self._epochs: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._complete: dict[object, Attempt] = {}
        self._files: set[object] = set()
        self._parsed: dict[str, int] = {}
        self._aside: dict[Attempt, str] = {}
        self._looked: set[str] = set()
        self._passed_over: set[int] = set()
        self._judge = SimStorage(disk, "judge")

    # ------------------------------------------------------------------------ reports from outside

    def floor(self) -> int | None:
        """The least step that the tracker may name: acknowledged, and not taken back since."""
        model = self.models.get(self.newest_epoch)
        safe = self.acknowledged - self.damaged - self.touched
        if model is not None and model.rolling_back:
            safe = {step for step in safe if model.target is not None and step <= model.target}
        return max(safe, default=None)

    def outside(self) -> set[int]:
        """The steps with names that were changed from outside the library."""
        return self.damaged | self.touched | self.strays

    def hopeless(self) -> bool:
        """True if no whole checkpoint in use is left on disk: only then may a root be given up.

        A checkpoint is in use if the newest journal says tracked. If the journal was removed, every
        step that the tracker does not call too new is in use.
        """
        model = self.models.get(max(self.models, default=0))
        newest = self._tracker_states()[-1]
        for name in self.disk.listed(""):
            step = int(name[5:]) if name.startswith("iter_") and name[5:].isdigit() else -1
            if step < 0 or step in self.outside():
                continue
            try:
                of = check_directory(self._judge, name)
            except RootBroken:
                continue
            if model is not None:
                used = model.states.get(of) == "tracked"
            else:
                used = newest is None or step <= newest
            if used:
                return False
        return True

    def epoch_of(self, process: str) -> int:
        """The epoch that a process has taken; 0 if none."""
        return self._epochs.get(process, 0)

    def acknowledge(self, process: str, step: int) -> None:
        """Note that a trainer was told that ``step`` is tracked."""
        model = self._model(process)
        if self._epochs.get(process, 0) != self.newest_epoch or model is None:
            return  # a fenced process hears late of its earlier saves
        if model.rolling_back or not model.of_step(step, "tracked"):
            return  # the news may be late: pruned or taken back since
        self.acknowledged.add(step)
        self.ever_acknowledged.append(step)
        for said in self._tracker_states():
            if (said is None or said < step) and step not in self.touched:
                raise RootBroken(f"I2: step {step} is acknowledged, a power loss leaves {said}")

    def looked(self, process: str) -> None:
        """Note that a process has listed the epochs."""
        self._looked.add(process)

    def granted(self, reader: str, step: int, until: float) -> None:
        """Note that a reader was told that ``step`` exists and is leased."""
        name = name_of(step)
        complete = self._complete_at(name)
        if not complete and self.disk.find(name) is not None:
            return  # in place and still being written: a lease has nothing to keep
        model = self.models.get(self.newest_epoch)
        if model is not None and model.of_step(step, "pruned"):
            living = model.of_step(step, "finalized", "tracked", "prunable")
            if not living and step not in self.touched:
                raise RootBroken(f"I7: {reader} is told that step {step} is there: it is pruned")
        if not complete:
            return
        files = frozenset(self.disk.files_below(name))
        self.readers[reader] = Confirmed(step, files, until)

    def returned(self, reader: str) -> None:
        self.readers.pop(reader, None)

    def began_anew(self) -> None:
        """Start over after the private directory was removed: epochs, journals and leases begin
        again.
        """
        self.readers.clear()
        self.unwritten.clear()
        self.models, self._epochs, self._parsed, self._aside = {}, {}, {}, {}
        self._owners = {}
        self.newest_epoch = 0

    def powered_up(self) -> None:
        """Take stock after a power loss: tokens and parsed records are outdated."""
        self._judge = SimStorage(self.disk, "judge")
        self._complete = {}
        self._files = set()
        self._parsed = {p: at for p, at in self._parsed.items() if self.disk.find(p) is not None}
        outside = self.outside()
        for name in self.disk.root.entries:
            if name.startswith("iter_") and not is_step_of(name, outside):
                if self.in_place and not has_manifest(self._judge, name):
                    continue
                self._remember(name, check_directory(self._judge, name))
        for reader in self.readers.values():
            reader.files = frozenset(self.disk.files_below(name_of(reader.step)))

    def state_in_flight(self) -> str:
        """The state of the checkpoint that the newest journal has in flight; ``absent`` if none."""
        model = self.models.get(self.newest_epoch)
        for state in reversed(list(model.states.values())) if model is not None else ():
            if state not in ("quarantined", "pruned", "discarded"):
                return state
        return "absent"

    def _remember(self, name: str, of: Attempt) -> None:
        token = self.disk.find(name)
        if token is not None:
            self._complete[token] = of
            self._files.update(self.disk.files_below(name))

    # --------------------------------------------------------------------------- every change

    def changed(self, process: str, now: float, method: str, path: str, other: str = "") -> None:
        """Judge a call of ``process`` that took effect."""
        match method:
            case "write" | "pwrite" | "allocate" | "truncate":
                self._written(process, path)
            case "fsync":
                if _is_segment(path) and self._segment(path) == self._epochs.get(process):
                    self._journaled(now, path)
            case "rename":
                self._renamed(process, path, other)
            case "link":
                if other.startswith(_EPOCH):
                    epoch = int(other[len(_EPOCH) :])
                    self._epochs[process] = epoch
                    self._owners[epoch] = process
                    self.newest_epoch = max(self.newest_epoch, epoch)
            case "unlink" | "rmdir":
                self._removed(now, method, path)
                if (
                    path.startswith(_EPOCH) and path[len(_EPOCH) :].isdigit()
                ):  # not a temporary name
                    self._epoch_removed(process, int(path[len(_EPOCH) :]))
            case "mkdir" | "open_exclusive":
                if path.startswith(STAGING) and path.count("/") == 2:
                    self._require(process, path[len(STAGING) :], "requested", "make staging")
                    self._effect(process, path)
                elif path.startswith("iter_") and self._complete_at(path):
                    raise RootBroken(f"I1: {path} is made in a published checkpoint")

    def _epoch_removed(self, process: str, epoch: int) -> None:
        """I9: an older epoch may be removed, or one that its owner releases: its number is free."""
        if epoch < self.newest_epoch:
            return
        owner = self._owners.get(epoch)
        if owner != process:
            raise RootBroken(f"I9: {process} removes epoch {epoch}, which is {owner}'s")
        left = self.disk.listed(_EPOCH.rpartition("/")[0])
        epochs = [name[len("epoch-") :] for name in left if name.startswith("epoch-")]
        self.newest_epoch = max((int(e) for e in epochs if e.isdigit()), default=0)

    def _written(self, process: str, path: str) -> None:
        if _is_segment(path):
            if self._segment(path) != self._epochs.get(process):
                raise RootBroken(f"I9: {process} writes {path}, the journal of another epoch")
        elif self._files and self.disk.find(path) in self._files:
            raise RootBroken(f"I1: {path} of a published checkpoint is written")

    def written_token(self, token: object, path: str) -> None:
        """Judge a write to a file that may have been renamed since it was opened."""
        if token in self._files and not self._is_late(path):
            raise RootBroken(f"I1: a late write into a published checkpoint (opened as {path})")

    def _renamed(self, process: str, src: str, dst: str) -> None:
        if dst == TRACKER:
            self._effect(process, dst)
            self._tracked(process)
        elif src == TRACKER:
            self._effect(process, src)
            model = self._model(process)
            if model is None or not (model.rolling_back and model.target is None):
                raise RootBroken(f"I2: the tracker is moved to {dst} without a fresh start")
        elif dst.startswith("iter_"):
            if "/" not in dst:
                self._published(process, src, dst)
            elif dst.endswith(MANIFEST):
                self._effect(process, dst)
                self._judge_complete(dst.partition("/")[0])
            elif self._complete_at(dst):
                raise RootBroken(f"I1: {dst} is renamed inside a published checkpoint")
        elif src.startswith("iter_") and "/" not in src:
            self._moved_away(process, src, dst)
        elif src.startswith(STAGING) and dst.startswith(TRASH):
            attempt, _, inner = src[len(STAGING) :].partition("/")
            if inner:  # an optional part that not every rank wrote
                self._require(process, attempt, "shards_written", "leave a part out")
            else:
                self._require(process, attempt, "failed", "clean up")
            self._effect(process, src)
        elif src.startswith(TRASH) and dst.startswith(_GONE) and ".tmp-" not in src:
            self._given_up(process, src)
        if _RECEIPTS in dst and dst.endswith(".json") and ".tmp-" not in dst:
            self._received(dst)

    def _effect(self, process: str, path: str) -> None:
        """I9: after a newer epoch exists, at most the one effect already checked may land."""
        epoch = self._epochs.get(process, 0)
        if epoch == 0:
            return
        self.effects += 1
        if process not in self._looked:
            raise RootBroken(
                f"I9: {process} acts on {path}, its epoch unchecked since the last act"
            )
        self._looked.discard(process)
        if epoch == self.newest_epoch:
            return
        key = (process, epoch)
        self.late_effects[key] = self.late_effects.get(key, 0) + 1
        found = re.search(r"\d+", path.removeprefix(PRIVATE))
        step = int(found[0]) if found else None
        if path == TRACKER:
            step = self._tracker_states()[-1]
        if step is not None:
            self.touched.add(step)
        if self.late_effects[key] > 1:
            raise RootBroken(
                f"I9: {process} of epoch {epoch} acts again on {path} after its fencing"
            )

    def _model(self, process: str) -> JournalModel | None:
        return self.models.get(self._epochs.get(process, 0))

    def _require(self, process: str, name: str, state: str, what: str) -> None:
        """Raise unless the journal has the transition that asks for this command."""
        of = _attempt_of(name)
        model = self._model(process)
        if of is None or model is None:
            raise RootBroken(f"I1: {process} does {what!r} of {name} without a journal")
        actual = model.states.get(of)
        if actual != state:
            raise RootBroken(f"I1: {what!r} of {name} while the journal says {actual}")

    def _given_up(self, process: str, src: str) -> None:
        """Judge a rename to a deletable name: the journal must say that the attempt is gone (I1)."""
        model, of = self._model(process), _attempt_of(src[len(TRASH) :])
        state = model.states.get(of) if model is not None and of is not None else None
        if model is None or state not in ("pruned", "discarded", None):  # None: in an older segment
            raise RootBroken(f"I1: {src} is given up while the journal says {state}")
        self._effect(process, src)

    def _received(self, path: str) -> None:
        """Judge a receipt, which promises that all its files are durable (I3)."""
        base = path.partition(_RECEIPTS)[0]
        data = self.disk.content(self.disk.find(path))
        for entry in json.loads(data or b"{}").get("files", []):
            file = f"{base}/{entry['name']}"
            token = self.disk.find(file)
            if token is None or self.disk.unsettled(file) or self.disk.possible(file) != [token]:
                raise RootBroken(f"I3: {path} is there, {file} is not durable")

    # ------------------------------------------------------------------------------- published

    def _published(self, process: str, src: str, dst: str) -> None:
        if src.startswith(STAGING):
            self._effect(process, src)
            self._require(process, src[len(STAGING) :], "shards_written", "publish")
        elif src.startswith(TRASH):  # brought back, because a reader was told that it exists
            self._effect(process, src)
            model = self._model(process)
            name = src[len(TRASH) :]
            of = _attempt_of(name)
            if model is None or of is None or model.states.get(of) != "prunable":
                raise RootBroken(f"I1: {name} comes back from the trash, not from prunable")
            if of[0] in self.damaged:
                return  # recovery looks at names and sizes, and may bring back what was flipped
        else:
            raise RootBroken(f"I4: {src} is published as {dst}")
        self._judge_complete(dst)

    def _judge_complete(self, name: str) -> None:
        of = check_directory(self._judge, name)
        self._remember(name, of)
        self._judge_parts(name, of)
        volatile = self.disk.unsettled(name)
        if self.in_place:  # in place, the rename of the manifest commits; its fsync follows
            volatile = [v for v in volatile if not v.startswith(f"{name}{MANIFEST}")]
        volatile = [v for v in volatile if not self._is_late(v)]
        if volatile:
            raise RootBroken(f"I4: {name} is published, {volatile[0]} is not durable")

    def _is_late(self, path: str) -> bool:
        """True for a temporary file that a fenced process makes with its one checked effect (I9).

        No manifest lists such a file, and it never gets its final name.
        """
        made = _TEMPORARY.search(path)
        return made is not None and int(made[1]) < self.newest_epoch

    def _judge_parts(self, name: str, of: Attempt) -> None:
        """I3: no part that was declared as required is missing."""
        manifest = json.loads(self._judge.read(f"{name}{MANIFEST}", LIMIT))
        there = {part["name"] for part in manifest["parts"]}
        for model in self.models.values():
            missing = model.required.get(of, set()) - there
            if missing:
                raise RootBroken(f"I3: {name} is published without {sorted(missing)[0]}")

    def _complete_at(self, path: str) -> bool:
        return self.disk.find(path.partition("/")[0]) in self._complete

    # --------------------------------------------------------------------------------- tracker

    def _tracker_states(self) -> list[int | None]:
        """Every step that the tracker may name after a power loss; the present one is the last."""
        contents = [self.disk.content(token) for token in self.disk.possible(TRACKER)]
        return [int(c) if c is not None and c.strip().isdigit() else None for c in contents]

    def _tracked(self, process: str) -> None:
        if self.disk.unsettled(TRACKER):
            raise RootBroken("I2: the tracker's content is not durable under its name")
        self.meddled = False
        step = self._tracker_states()[-1]
        if step is None:
            raise RootBroken("I2: the tracker is no number")
        if step in self.touched:
            return
        token = self.disk.find(name_of(step))
        if token is None:
            raise RootBroken(f"I2: the tracker names {step}, which is not there")
        if token not in self._complete and step not in self.damaged:  # touched at the last look
            self._judge_complete(name_of(step))
        if self.disk.possible(name_of(step)) != [token]:
            raise RootBroken(f"I2: the tracker names {step}, whose name is not durable")
        model = self._model(process)
        newest = max(model.steps("finalized", "tracked"), default=None) if model else None
        self._promise_again(step)
        if model is not None and self._fell_back(model, step):
            self._fall_back_to(step)
            return  # a step back from a damaged one; the finalized one is next
        if model is not None and model.rolling_back and model.reached() == step:
            return
        if step != newest:
            raise RootBroken(f"I2: the tracker goes to {step}, the journal's newest is {newest}")

    def _fall_back_to(self, step: int) -> None:
        """Note that no step above ``step`` is whole; one restored from the trash counts again."""
        above = {each for each in self.acknowledged if each > step}
        self.acknowledged -= above
        self._passed_over |= above

    def _promise_again(self, step: int) -> None:
        if step in self._passed_over:
            self._passed_over.discard(step)
            self.acknowledged.add(step)

    def _fell_back(self, model: JournalModel, step: int) -> bool:
        """True if the tracker named no whole checkpoint, and now names the newest acknowledged
        whole one.

        Also true if it names a whole one, in between, that no journal knows: this start adopts it.
        """
        known = model.of_states("finalized", "tracked", "prunable")
        whole = {of for of in known if of[0] == step or self._is_whole(of)}
        acknowledged = {of[0] for of in whole if model.states[of] != "finalized"}
        named, newest = self._tracker_states()[0], max(acknowledged, default=None)
        if named in {of[0] for of in whole}:
            return False
        below = named is not None and (newest is None or newest < step) and step < named
        adopted = step not in {of[0] for of in known} and self._complete_at(name_of(step))
        return step == newest or (below and adopted)

    def _is_whole(self, of: Attempt) -> bool:
        token = self.disk.find(name_of(of[0]))
        return of[0] not in self.damaged | self.touched and self._complete.get(token) == of

    # --------------------------------------------------------------------------------- removal

    def _moved_away(self, process: str, src: str, dst: str) -> None:
        """I1, I7: a checkpoint may leave its name only for the trash if prunable, or for quarantine
        if withdrawn.
        """
        step = int(src[len("iter_") :])
        self._effect(process, src)
        if step in self.touched and self._epochs.get(process) != self.newest_epoch:
            return
        token = self.disk.find(dst)
        of = self._complete.get(token)
        model = self._model(process)
        state = model.states.get(of) if model is not None and of is not None else None
        if of is None or step in self.damaged or step in self.touched:
            return  # never complete, or damaged: recovery decides
        if dst.startswith(TRASH):
            if state != "prunable":
                raise RootBroken(f"I1: {src} goes to the trash, the journal says {state}")
            self._aside[of] = dst
            if self.disk.find(_pin_of(step)) is not None:
                raise RootBroken(f"I7: {src} is pinned and goes to the trash")
        elif state not in ("quarantined", "failed"):  # failed: a fenced process published it late
            raise RootBroken(f"I1: {src} goes to {dst}, the journal says {state}")
        self._check_named(src, step)

    def _check_named(self, what: str, step: int) -> None:
        """Raise if the tracker, after a power loss, may name the step that is being moved away (I2,
        I7).
        """
        said = self._tracker_states()
        model = self.models.get(self.newest_epoch)
        afresh = model is not None and model.rolling_back and model.target is None
        if step in said or (None in said and self.acknowledged and not (afresh or self.meddled)):
            raise RootBroken(f"I7: {what} is moved away while the tracker may name {said}")

    def _removed(self, now: float, method: str, path: str) -> None:
        if path.startswith(TRASH):
            self._deleted(path, now)
        elif path.startswith("iter_") and self._complete_at(path):
            raise RootBroken(f"I1: {path} is deleted in a published checkpoint")
        elif path == TRACKER:
            raise RootBroken("I2: the tracker is deleted")

    def deleting(self, token: object, path: str, now: float) -> None:
        """Judge a file that is about to be deleted: no reader may hold a lease on it (F27)."""
        for name, lease in self.readers.items():
            if token in lease.files and now < lease.until and path.startswith(TRASH):
                raise RootBroken(f"I7: {path} is deleted while {name} reads step {lease.step}")

    def _deleted(self, path: str, now: float) -> None:
        """Judge a deletion: the published name must be gone durably, or a power loss restores a
        gutted one.
        """
        top = path[len(TRASH) :].partition("/")[0]
        token = self.disk.find(TRASH + top)
        of = _attempt_of(top.removeprefix("gone-"))
        if of is not None and token is not None and not path.startswith(_GONE):
            raise RootBroken(f"I1: {path} is deleted, and was not given up")
        if token is not None and of is not None:
            name = name_of(of[0])
            if token in self.disk.possible(name):
                raise RootBroken(f"I4: {path} is deleted, a power loss brings back a gutted {name}")

    # --------------------------------------------------------------------------------- journal

    def _segment(self, path: str) -> int:
        return int(path[len(_JOURNAL) : -len(".ndjson")])

    def _journaled(self, now: float, path: str) -> None:
        """Take in the records that became durable, and judge each of them."""
        data = self.disk.content(self.disk.find(path)) or b""
        offset = self._parsed.get(path, 0)
        epoch = self._segment(path)
        while (end := data.find(b"\n", offset)) > offset:
            try:
                line = json.loads(data[offset:end])["record"]
            except ValueError:
                break  # left by a failed write, to be overwritten
            offset = end + 1
            self._take_record(epoch, now, line)
        self._parsed[path] = offset

    def _take_record(self, epoch: int, now: float, record: Mapping[str, Any]) -> None:
        kind = record["type"]
        if kind == "segment_opened":
            model = self.models[epoch] = JournalModel()
            model.rolling_back = record["rolling_back"]
            model.target = record["rolling_back_to"]
            for entry in record["checkpoints"]:
                of = (entry["step"], entry["epoch"], entry["attempt"])
                model.states[of] = entry["state"]
                model.declare(of, entry)
            return
        model = self.models.setdefault(epoch, JournalModel())
        if kind == "rollback_started":
            model.rolling_back, model.target = True, record["to_step"]
            safe = {s for s in self.acknowledged if model.target is not None and s <= model.target}
            self.acknowledged = safe
        elif kind == "rollback_finished":
            model.rolling_back = False
        elif kind == "transition":
            self._take_transition(model, now, record, newest=epoch == self.newest_epoch)

    def _take_transition(
        self, model: JournalModel, now: float, record: Mapping[str, Any], *, newest: bool
    ) -> None:
        of = (record["step"], record["epoch"], record["attempt"])
        state = record["dest"]
        model.states.pop(of, None)  # the latest move comes last
        model.states[of] = state
        if record["created"] is not None:
            model.declare(of, record["created"])
        if of in self.unwritten and state in ("shards_written", "finalized", "tracked"):
            raise RootBroken(f"I3: {of} is {state}, something of it was never written")
        if not newest or of[0] in self.touched:
            return
        step, name = of[0], name_of(of[0])
        token = self.disk.find(name)
        if state == "shards_written":
            where = name if of in model.in_place else STAGING + _attempt_name(of)
            loose = tuple(f"{where}/{path}" for path in model.loose.get(of, ()))
            volatile = [v for v in self.disk.unsettled(where) if not v.startswith(loose)]
            if of in model.in_place:  # files of finalizers come later, a rival's too
                volatile = [v for v in volatile if "metadata" not in v]
            if volatile:
                raise RootBroken(f"I3: {of} is shards_written, {volatile[0]} is not durable")
        elif state == "finalized":
            volatile = [v for v in self.disk.unsettled(name) if not self._is_late(v)]
            if volatile:
                raise RootBroken(
                    f"I4: {of} is journaled as finalized, {volatile[0]} is not durable"
                )
            if self.disk.possible(name) != [token]:
                raise RootBroken(f"I4: {of} is journaled as finalized, its name is not durable")
            if token in self.disk.possible(STAGING + _attempt_name(of)):
                raise RootBroken(f"I4: {of} is journaled as finalized, and may be back in staging")
        elif state == "tracked" and record["source"] == "finalized":
            if set(self._tracker_states()) != {step}:
                raise RootBroken(f"I2: {of} is journaled as tracked, the tracker may be another")
        elif state == "tracked" and record["created"] is not None:
            self._judge_adopted(step)
        elif state == "pruned":
            self.acknowledged.discard(step)  # a newer one is tracked, which is judged at its move
            self._judge_pruned(of, now)
        elif state == "quarantined":
            self._judge_withdrawn(step, record["reason"])

    def _judge_adopted(self, step: int) -> None:
        """Raise unless an adopted step has a durable pin, which only a person releases (I8)."""
        if None in self.disk.possible(_pin_of(step)):
            raise RootBroken(f"I8: step {step} is adopted, and may be without its pin")

    def _judge_pruned(self, of: Attempt, now: float) -> None:
        for token in self.disk.possible(name_of(of[0])):
            if token is not None and self._complete.get(token) == of:
                raise RootBroken(f"I4: {of} is journaled as pruned, a power loss brings it back")
        aside = self._aside.pop(of, None)
        if aside is not None and self.disk.possible(aside) != [self.disk.find(aside)]:
            raise RootBroken(f"I4: {of} is journaled as pruned, {aside} is not durable")
        for name, lease in self.readers.items():
            if lease.step == of[0] and now < lease.until:
                raise RootBroken(f"I7: step {of[0]} is pruned while {name} reads it")

    def _judge_withdrawn(self, step: int, reason: str) -> None:
        """Judge a withdrawal: only a rollback or real damage takes a checkpoint out of service
        (I2).
        """
        self.acknowledged.discard(step)
        if reason in UNUSABLE and step not in self.damaged and step not in self.touched:
            raise RootBroken(f"I2: step {step} is withdrawn as damaged, and nobody damaged it")


def _attempt_of(name: str) -> Attempt | None:
    found = _ATTEMPT.match(name)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _pin_of(step: int) -> str:
    return f".ckptfsm/pins/{step}.json"


def _attempt_name(of: Attempt) -> str:
    return f"{of[0]}.e{of[1]}.a{of[2]}"
