"""Reports about other trainers, and about one store."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks
from greenlet import getcurrent, greenlet

from ckptfsm.core.config import make_config
from ckptfsm.core.errors import DamagedRoot, Fenced, StepExistsError
from ckptfsm.core.layout import MEGATRON, TRACKER, TRASH
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.disk.durable import put
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import SimDisk, SimStorage
from fieldbugs.model import Action
from fieldbugs.player import Player, SimTrainer
from fieldbugs.report import Report
from fieldbugs.saveloop import Believing, Job, SaveLoop
from fieldbugs.verl import DeletesAtRequest, resumed_from_100, sim

# -------------------------------------------------------------------- published before it is durable


class PublishesAtRequest(Believing):
    """``latest`` is moved and the older ones deleted when the save is dispatched.

    An operator would take any complete one by hand: only when none is left is the harm done.
    """

    def saved(self, job: Job, step: int) -> Job:
        job = self.tracked(super().saved(job, step), step)
        return job.drop(*(older for older in job.complete() if older < step))

    def resumed(self, job: Job, step: int | None) -> Job:
        job = super().resumed(job, step)
        if job.best is None or job.complete():
            return replace(job, wrong="", tracker=max(job.complete(), default=None))
        return replace(job, wrong=f"{job.wrong}, and nothing complete is left")


class OneLast(Believing):
    """There is one "last" checkpoint; an unfinished one is skipped without a word."""

    def saved(self, job: Job, step: int) -> Job:
        return super().saved(job.drop(*job.complete()), step)

    def found(self, job: Job) -> int | None:
        return max(job.complete(), default=None)


def never_from_scratch(trainer: SimTrainer) -> None:
    """The last good one is resumed from; if that is damaged too, the job ends with an error."""
    resumed_from_100(trainer)
    shard = f"{MEGATRON.published_name(300)}/__0_0.distcp"
    trainer.kill()
    SimStorage(trainer.disk, "somebody").unlink(shard)
    before = trainer.disk.snapshot()
    try:
        trainer.restart()
    except DamagedRoot as error:
        assert shard.rpartition("/")[2] in str(error), error
    else:
        raise AssertionError(f"the restart resumed from {trainer.resumed}")
    after = trainer.disk.snapshot()
    assert all(after.get(path) == data for path, data in before.items() if "iter_" in path)


# ------------------------------------------------------------------------------------------ the quota


class QuotaEndsTheJob(Believing):
    """The pointer cannot be written: the job ends; the next one replays up to the same step.

    There rank 0 finds the directory and raises; the other ranks wait in a collective.
    """

    def finalized(self, job: Job, step: int) -> Job:
        job = super().finalized(job, step)
        return job.lost() if job.no_quota else job

    def found(self, job: Job) -> int | None:
        return job.tracker if job.tracker is not None else max(job.complete(), default=None)

    def may_save(self, job: Job, step: int) -> bool:
        return not job.pending and step > (job.tracker or 0)

    def saved(self, job: Job, step: int) -> Job:
        if job.status(step) == "complete":
            return replace(
                job, wrong=f"I10: rank 0 raises that {step} exists, rank 1 waits 30 minutes"
            )
        return super().saved(job, step)


def rolled_forward(trainer: SimTrainer) -> None:
    """200 was resumed from, so nothing is replayed; and a refusal reaches every rank."""
    assert trainer.resumed == trainer.tracker() == 200
    assert trainer.acknowledged == [100, 200] and trainer.steps() == [100, 200]
    again = SimTrainer()
    again.no_quota()
    again.save(100)
    again.written(100)
    again.poll()
    assert again.tracker() is None and again.job.coordinator.busy
    again.no_tracker = False
    again.poll()
    assert again.tracker() == 100 and again.acknowledged == [100], "tried again when there is quota"
    with tempfile.TemporaryDirectory(prefix="ckptfsm-fieldbug-") as directory:
        refused = run_ranks(2, _SavesTwice(Path(directory) / "two"))
    assert [type(e) for e in refused] == [StepExistsError] * 2, refused


@dataclass
class _SavesTwice:
    """A rank of two, which saves a step that is there."""

    root: Path

    def __call__(self, transport: ThreadTransport) -> None:
        ports = fake_ports(self.root, driver=FakeDriver(transport.rank), transport=transport)
        manager = Manager(ports, make_config({"exit_timeout_s": 1.0, "busy_timeout_s": 20.0}))
        try:
            manager.save(100, {"weights": b"w"}).wait()
            manager.save(100, {"weights": b"w"})
        finally:
            manager.abandon()


# --------------------------------------------------------------------------------------- the clean-up


class CleanUpEndsTheJob(Believing):
    """The error of a directory that cannot be removed comes out of the training loop."""

    def retired(self, job: Job) -> Job:
        after = super().retired(job)
        if job.held is not None and len(after.complete()) > self.keep:
            return replace(job, wrong="F17: a clean-up error ends the training")
        return after


def cleans_up_later(trainer: SimTrainer) -> None:
    """Nothing was raised; what could not be removed waits in the trash until it can."""
    assert trainer.tracker() == 200 and trainer.steps() == [200]
    assert trainer.reader().listdir(TRASH) == ["gone-100.e1.a1"]
    trainer.held = None
    trainer.poll()
    assert trainer.reader().listdir(TRASH) == []
    storage = trainer.job.storage
    assert isinstance(storage, FaultStorage)
    plain, storage.before = storage.before, _no_move_to_trash
    for action in (trainer.save, trainer.written):
        action(300)
    trainer.poll()
    assert trainer.tracker() == 300 and trainer.steps() == [200, 300]
    storage.before = plain
    trainer.poll()
    assert trainer.steps() == [300], "tried again when it can be moved"


def _no_move_to_trash(index: int, method: str, path: str) -> None:
    if method == "rename" and f"-> {TRASH}/" in path:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


# ----------------------------------------------------------------------------------------- a full disk


class IgnoresFullDisk(Believing):
    """Files are made and cannot be filled; the written files are not looked at."""

    def no_space(self, job: Job, step: int) -> Job:
        return job.mark(step, "no bytes")

    def polled(self, job: Job) -> Job:
        for step, how in job.pending:
            if how == "no bytes":
                job = self.tracked(job.forget(step).put(step, "without bytes"), step)
        return super().polled(job)

    def resumed(self, job: Job, step: int | None) -> Job:
        if job.status(step) == "without bytes":
            return replace(job, wrong=f"I3: resumes from step {step}, whose shards have no bytes")
        return super().resumed(job, step)


def no_empty_shard(trainer: SimTrainer) -> None:
    """The save failed with ENOSPC and left nothing; a shard that is emptied later is found at the
    start."""
    assert trainer.resumed is None and trainer.tracker() is None
    assert trainer.steps() == [] and trainer.acknowledged == []
    for step in (200, 300):
        trainer.save(step)
        trainer.written(step)
        trainer.poll()
    shard = f"{MEGATRON.published_name(300)}/__1_0.distcp"
    trainer.job.close()
    SimStorage(trainer.disk, "somebody").unlink(shard)
    trainer.disk.plant_file(shard, b"")
    try:
        trainer.open()
    except DamagedRoot as error:
        assert "__1_0.distcp" in str(error), error
    else:
        raise AssertionError(f"the empty shard was not found: resumes from {trainer.resumed}")


# ------------------------------------------------------------------------------ one temporary name


@dataclass(frozen=True)
class Files:
    """``inodes`` are contents; the temporary name, the target and each writer's handle refer to one."""

    inodes: tuple[str, ...] = ()
    temporary: tuple[tuple[str, int], ...] = ()
    target: int | None = None
    handles: tuple[tuple[str, int], ...] = ()
    at: tuple[tuple[str, str], ...] = ()
    wrong: str = ""


class TwoWriters:
    """Two writers of a file, each: open the temporary, write, rename. ``shared``: one name for both."""

    DOCUMENTS = (("the first", "1000000"), ("the second", "20"))
    NEXT = (("", "opens"), ("opens", "writes"), ("writes", "renames"))

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared

    def key(self) -> tuple[object, ...]:
        return (type(self), self.shared)

    def initial(self) -> Files:
        return Files()

    def actions(self, files: Files) -> Iterator[tuple[Action, Files]]:
        for who, document in self.DOCUMENTS:
            verb = dict(self.NEXT).get(dict(files.at).get(who, ""))
            if verb is not None:
                after = self._act(files, who, document, verb)
                at = tuple(sorted({**dict(files.at), who: verb}.items()))
                yield Action(verb, who=who), replace(after, at=at)

    def _act(self, files: Files, who: str, document: str, verb: str) -> Files:
        name = "" if self.shared else who
        temporary, handles = dict(files.temporary), dict(files.handles)
        inodes = list(files.inodes)
        if verb == "opens":
            if name in temporary:
                inodes[temporary[name]] = ""
            else:
                temporary[name] = len(inodes)
                inodes.append("")
            handles[who] = temporary[name]
        elif verb == "writes":
            old = inodes[handles[who]]
            inodes[handles[who]] = document + old[len(document) :]
        elif name not in temporary:
            return replace(files, wrong=f"I6: the save of {who} fails: its temporary file is gone")
        else:
            files = replace(files, target=temporary.pop(name))
        return replace(
            files,
            inodes=tuple(inodes),
            temporary=tuple(sorted(temporary.items())),
            handles=tuple(sorted(handles.items())),
        )

    def broken(self, files: Files) -> str:
        seen = "" if files.target is None else files.inodes[files.target]
        if files.target is not None and seen not in dict(self.DOCUMENTS).values():
            return f"I2: the file says {seen!r}, which nobody wrote"
        return files.wrong

    def show(self, files: Files) -> str:
        return (
            f"the file says {files.inodes[files.target]!r}"
            if files.target is not None
            else "no file"
        )


class PutTwice(Player):
    """The production ``put`` of one path by two processes, on greenlets that stop at each verb."""

    VERBS = ("open_exclusive", "fsync", "rename")  # the call that ends a verb of the model

    def __init__(self, tags: tuple[str, str] = ("1-1-aa", "2-2-bb")) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.hub = getcurrent()
        self.writers = {
            who: greenlet(_Put(self._storage(who), document.encode(), tag))
            for (who, document), tag in zip(TwoWriters.DOCUMENTS, tags, strict=True)
        }

    def _storage(self, who: str) -> FaultStorage:
        return FaultStorage(SimStorage(self.disk, who), after=self._stop)

    def _stop(self, index: int, method: str, path: str) -> None:
        if method in self.VERBS:
            self.hub.switch()

    def opens(self, who: str) -> None:
        self.writers[who].switch()

    writes = opens
    renames = opens

    def reader(self) -> Storage:
        return SimStorage(self.disk, "reader")

    def content(self) -> str | None:
        """The content for a reader of the file; None where there is no file."""
        try:
            return self.reader().read(TRACKER, 100).decode()
        except FileNotFoundError:
            return None

    def show(self) -> str:
        seen = self.content()
        return "no file" if seen is None else f"the file says {seen!r}"

    def judge(self) -> None:
        if self.content() not in {None, *dict(TwoWriters.DOCUMENTS).values()}:
            raise AssertionError(f"I2: the file says {self.content()!r}, which nobody wrote")

    def finish(self) -> None:
        for writer in self.writers.values():
            while not writer.dead:
                writer.switch()
                self.judge()


@dataclass
class _Put:
    storage: FaultStorage
    document: bytes
    tag: str

    def __call__(self) -> None:
        put(self.storage, TRACKER, self.document, tag=self.tag)


def both_are_whole(player: PutTwice) -> None:
    """Both puts succeed, whatever the order; a second trainer fences the first before its rename."""
    player.finish()
    assert player.content() in dict(TwoWriters.DOCUMENTS).values()
    same = PutTwice(tags=("1-1-aa", "1-1-aa"))
    for verb in TwoWriters.NEXT:
        for who, _ in TwoWriters.DOCUMENTS:
            getattr(same, verb[1])(who)
            same.judge()
    same.finish()
    assert len([p for p in same.disk.snapshot() if TRACKER in p]) == 1, "a temporary file is left"
    fenced_before_its_rename()


def fenced_before_its_rename() -> None:
    """The tracker's temporary is written, then another trainer takes over: the first must not rename."""
    first = SimTrainer()
    first.save(100)
    first.written(100)
    storage = first.job.storage
    assert isinstance(storage, FaultStorage)
    takeover = _TakeOver(first.disk)
    storage.after = takeover
    try:
        first.poll()
    except Fenced:
        assert takeover.second is not None
    else:
        raise AssertionError("the first trainer was not fenced")
    assert takeover.latest == 100, "the second one finishes what the first had published"
    assert first.tracker() == 200, "the first one renamed after it was fenced"


class _TakeOver:
    """A hook: once the first has written its tracker's temporary, another takes over and saves."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.second: FakeJob | None = None
        self.latest: int | None = None

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.second is None and method == "close" and path.startswith(TRACKER):
            self.second = FakeJob(
                SimStorage(self.disk, "second"),
                takeover=True,
                identity=Identity("other", 2, "boot:2", "nonce-2"),
            )
            self.latest = self.second.open().latest_step
            self.second.save(200)


def only_small_fits(directory: Path) -> SimTrainer:
    return SimTrainer(only_shards_do_not_fit=True)


def put_twice(directory: Path) -> PutTwice:
    return PutTwice()


REPORTS = (
    Report(
        "skyrl-2145",
        "latest is advanced and the old one pruned while the new save is pending",
        ("https://github.com/NovaSky-AI/SkyRL/pull/2145",),
        PublishesAtRequest(),
        SaveLoop(),
        sim,
        resumed_from_100,
        "published, then tracked, then pruned: each only after the one before is in the journal",
    ),
    Report(
        "kempner-102",
        "the symlink is moved and clean-up runs before the save is durable",
        (
            "https://github.com/KempnerInstitute/KempnerForge/issues/102",
            "https://github.com/KempnerInstitute/KempnerForge/pull/103",
        ),
        PublishesAtRequest(crash="power"),
        SaveLoop(crash="power"),
        sim,
        resumed_from_100,
        "as above, and each of them is durable before the next: a power failure loses 200 alone",
    ),
    Report(
        "nemo-10228",
        "the last checkpoint is unfinished: silent restart from scratch",
        ("https://github.com/NVIDIA-NeMo/Speech/pull/10228",),
        OneLast(),
        SaveLoop(),
        sim,
        never_from_scratch,
        "the one before is kept and resumed from; evidence without a good one raises `DamagedRoot`",
    ),
    Report(
        "automodel-3390",
        "the quota is exceeded while LATEST is written: replay, then a 30-minute collective timeout",
        ("https://github.com/NVIDIA-NeMo/Automodel/pull/3390",),
        QuotaEndsTheJob("no_quota", crash=""),
        SaveLoop("no_quota"),
        sim,
        rolled_forward,
        "published and not tracked is tried again, and rolled forward by a restart; refusals reach all",
    ),
    Report(
        "prime-rl-1763",
        "a clean-up error kills the job",
        ("https://github.com/PrimeIntellect-ai/prime-rl/pull/1763",),
        CleanUpEndsTheJob("held_open", crash=""),
        SaveLoop("held_open"),
        sim,
        cleans_up_later,
        "what cannot be deleted stays in the trash and is tried again; training hears nothing of it",
    ),
    Report(
        "metaseq-53",
        "zero-byte shards after a full disk",
        ("https://github.com/facebookresearch/metaseq/issues/53",),
        IgnoresFullDisk("no_space", steps=(100,)),
        SaveLoop("no_space"),
        only_small_fits,
        no_empty_shard,
        "a receipt has each file's size and digest; without it the save failed and leaves nothing",
    ),
    Report(
        "ferrosa-399",
        "one temporary file name for two writers: a torn document, or a failed save",
        ("https://github.com/ferrosadb/ferrosa/pull/399",),
        TwoWriters(shared=True),
        TwoWriters(shared=False),
        put_twice,
        both_are_whole,
        "a temporary name is its process's own and created exclusively",
    ),
    Report(
        "lightning-1150",
        "the new file is left to a thread, and the previous one deleted at once: a kill leaves nothing",
        (
            "https://github.com/Lightning-AI/pytorch-lightning/issues/1150",
            "https://github.com/Lightning-AI/pytorch-lightning/pull/13658",
        ),
        DeletesAtRequest(),
        SaveLoop(),
        sim,
        resumed_from_100,
        "nothing is deleted before a newer one is tracked",
        aliases=("lightning-async",),
    ),
)
