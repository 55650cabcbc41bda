"""Commands of a script for readers, stock trainers, persons and the disk, and questions to it."""

from __future__ import annotations

import errno
import re
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roots import PRECIOUS, older_format, saved_by_another
from script_words import expanded
from strangers import stock_saves

from ckptfsm.core import layout
from ckptfsm.core.documents import JobState, Pin, encode, encode_sealed
from ckptfsm.core.jobs import first_record
from ckptfsm.core.layout import MEGATRON
from ckptfsm.core.lifecycle import State
from ckptfsm.disk.durable import lookup, make_dirs, put
from ckptfsm.disk.inspection import check_digests, read_manifest
from ckptfsm.disk.journal import decode_line, read_history
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.harness import check_root, fake_content
from ckptfsm.testing.simfs import SimStorage

if TYPE_CHECKING:
    from script_story import Story


def do_lease(story: Story, step: str) -> None:
    """A reader, which looks whether the step is there."""
    lease = ReaderLease("/sim", int(step), storage=SimStorage(story.disk, "reader"), nonce="r")
    story.leases.append(lease.__enter__())


def do_mark(story: Story, step: str) -> None:
    """The mark of a reader that has not looked yet."""
    mark = Pin(step=int(step), reason="reader", nonce="r-1")
    _person(story, lambda s: put(s, f"{layout.READERS}/{step}.r.json", encode(mark), tag="r"))


def do_unmark(story: Story, step: str) -> None:
    do_remove(story, f"READERS/{step}.r.json")


def do_renew(story: Story) -> None:
    story.leases[-1].renew()


def do_unlease(story: Story) -> None:
    story.leases.pop().__exit__(None, None, None)


def do_copied(story: Story, step: str, *damaged: str) -> None:
    """``copied STEP [torn]``: the job ``copy`` is done with a tracked step; its owner is not told."""
    storage = SimStorage(story.disk, "jobs")
    tracked = [c.id for c in read_history(storage).ledger.in_state(State.TRACKED)]
    of = next(each for each in tracked if each.step == int(step))
    record = first_record(of, "copy").model_copy(update={"state": JobState.DONE})
    make_dirs(storage, layout.JOBS)
    text = encode(record)[: -len(damaged) or None]
    put(storage, layout.job_name(of, "copy"), text, tag="jobs")


def do_told(story: Story) -> None:
    """The owner is told that a job is done."""
    story.job.coordinator.job_ended()


def do_stock_saves(story: Story, *words: str) -> None:
    """``stock saves STEP... [untracked] [synced] [precious] [dcp]``."""
    for step in (w for w in words if w.isdigit()):
        shard = PRECIOUS if "precious" in words else step.encode().ljust(100, b"\0")
        stock_saves(
            story.disk,
            int(step),
            shard,
            tracked="untracked" not in words,
            synced="synced" in words,
            dcp="dcp" in words,
        )


def do_stock_saves_over(story: Story, step: str) -> None:
    """A stock trainer saves a step over ours, with a shard as long as ours."""
    size = len(_bytes(story, f"@{step}/SHARD"))
    do_remove(story, f"@{step}/SHARD")
    stock_saves(story.disk, int(step), PRECIOUS.ljust(size), synced=True)


def do_trainer_begins(story: Story, step: str) -> None:
    """The trainer makes its directory, and a first file."""
    do_make(story, f"@{step}")
    do_put(story, f"@{step}/common.pt", "first")


def do_older_format(story: Story, step: str) -> None:
    older_format(story.disk, int(step))


def do_another_run_saves(story: Story, step: str) -> None:
    """A whole checkpoint of another run stands at the name of step 2."""
    assert step == "2"
    saved_by_another(story.disk)


def do_another_run_replaces(story: Story, step: str) -> None:
    """A person copies another run's step to its name, with an attempt of the same name."""
    directory, storage = expanded(f"@{step}"), SimStorage(story.disk, "judge")
    size = len(_bytes(story, f"@{step}/SHARD"))
    story.disk.overwrite(expanded(f"@{step}/SHARD"), PRECIOUS.ljust(size))
    manifest = read_manifest(storage, directory)
    assert manifest is not None
    files = [
        replace(entry, digest=storage.digest(f"{directory}/{entry.name}"))
        for entry in manifest.files
    ]
    theirs = encode_sealed(manifest.model_copy(update={"files": tuple(files)}))
    story.disk.overwrite(f"{directory}/{layout.MANIFEST}", theirs)


def do_forget_checksums(story: Story) -> None:
    """The journal is one of an earlier version, which recorded no checksums of manifests."""
    [name] = story.listed(layout.JOURNAL)
    lines = (story.disk.snapshot()[f"{layout.JOURNAL}/{name}"]).rstrip(b"\n").split(b"\n")
    records = [re.sub(rb'"manifest_crc":"[0-9a-f]*",', b"", decode_line(each)) for each in lines]
    earlier = [b'{"crc":"%08x","record":%s}\n' % (zlib.crc32(each), each) for each in records]
    story.disk.overwrite(f"{layout.JOURNAL}/{name}", b"".join(earlier))


def do_remove(story: Story, *paths: str) -> None:
    for path in paths:
        story.disk.uproot(expanded(path))


def do_empty_out(story: Story, path: str) -> None:
    """All files but the private ones leave a directory, if it is there."""
    for name in story.listed(expanded(path)):
        if name != layout.PRIVATE:
            story.disk.uproot(f"{expanded(path)}/{name}")


def do_replace_by_link(story: Story, path: str) -> None:
    do_remove(story, path)
    do_link(story, path)


def do_copy(story: Story, source: str, target: str) -> None:
    """A person removes a file or a directory."""
    old, new = expanded(source), expanded(target)
    for path, data in sorted(story.disk.snapshot().items()):
        if path == old or path.startswith(f"{old}/"):
            copied = new + path.removeprefix(old)
            if isinstance(data, bytes):
                story.disk.overwrite(copied, data)
            else:
                do_make(story, copied)


def do_tear_plan(story: Story) -> None:
    """The planned metadata of the staged attempt is torn."""
    for path, data in story.disk.snapshot().items():
        if "/planned/" in path and isinstance(data, bytes):
            story.disk.overwrite(path, b"?" * len(data))


def do_plant_hostile_name(story: Story, path: str) -> None:
    story.disk.plant_file(f"{expanded(path)}/stray-\udcff.distcp", b"")


def do_forget_everything(story: Story) -> None:
    """A person deletes the private directory of the root; the checkpoints stay."""
    story.disk.uproot(layout.PRIVATE)


def do_remove_if_there(story: Story, path: str) -> None:
    if story.disk.find(expanded(path)) is not None:
        story.disk.uproot(expanded(path))


def do_put(story: Story, path: str, *text: str) -> None:
    """A file of this text, whatever was there."""
    story.disk.overwrite(expanded(path), " ".join(text).encode().decode("unicode_escape").encode())


def do_precious(story: Story, path: str, like: str = "") -> None:
    """A file with foreign content, as long as another one if that is named."""
    size = len(_bytes(story, like)) if like else 0
    story.disk.overwrite(expanded(path), PRECIOUS.ljust(size))


def _bytes(story: Story, path: str) -> bytes:
    found = story.disk.snapshot()[expanded(path)]
    assert isinstance(found, bytes)
    return found


def do_make(story: Story, path: str) -> None:
    _person(story, lambda storage: storage.mkdir(expanded(path)))


def do_move(story: Story, source: str, target: str) -> None:
    _person(story, lambda storage: storage.rename(expanded(source), expanded(target)))


def do_late(story: Story, *paths: str) -> None:
    """A fenced trainer's rename takes effect, if it still can: the one at which a job died last."""
    source, target = map(expanded, paths[:2]) if paths else story.died_at.split(" -> ")
    try:
        SimStorage(story.disk, "late").rename(source, target)
    except OSError as error:
        story.said.append(f"too late: {errno.errorcode[error.errno or 0]}")
    if "durably" in paths:
        for directory in (layout.TRASH, ""):
            SimStorage(story.disk, "late").fsync_dir(directory)
    story.disk.kill("late")


def _person(story: Story, act: Any) -> None:
    act(SimStorage(story.disk, "person"))
    story.disk.kill("person")


def do_link(story: Story, path: str, target: str = "elsewhere") -> None:
    story.disk.plant_symlink(expanded(path), target)


def do_mount(story: Story, path: str) -> None:
    story.disk.plant_mount(expanded(path))


def do_cut(story: Story, path: str) -> None:
    """A file loses its last byte."""
    story.disk.overwrite(expanded(path), _bytes(story, path)[:-1])


def do_flip(story: Story, path: str) -> None:
    """The last byte of a file is another."""
    story.disk.overwrite(expanded(path), _bytes(story, path)[:-1] + b"?")


def do_rescue(story: Story, step: str) -> None:
    """A person moves a step back from the trash."""
    for name in story.listed(layout.TRASH):
        if name.startswith(f"{step}."):
            do_move(story, f"TRASH/{name}", f"@{step}")


def do_space(story: Story) -> None:
    full = story.disk.capacity is not None and story.disk.used >= story.disk.capacity
    story.said.append(f"in all: {'no room' if full else 'room'}")


def do_digests(story: Story, path: str) -> None:
    """Whether the files of a step are those that its manifest lists."""
    storage = SimStorage(story.disk, "judge")
    manifest = read_manifest(storage, expanded(path))
    assert manifest is not None
    problem = check_digests(storage, expanded(path), manifest.files)
    story.said.append(f"in {path}: {problem or 'every digest holds'}")


def do_find_its_own(story: Story, part: str) -> None:
    """Where the newest attempt's part of rank 0 is."""
    kept = [p for p, data in story.disk.snapshot().items() if data == fake_content(story.run.of, 0)]
    story.said.append(f"in all: {' '.join(p for p in kept if f'/{part}/' in p)}")


def do_possible(story: Story, path: str) -> None:
    """The contents that a power loss could leave at a name."""
    kept = {story.disk.content(node) or node for node in story.disk.possible(expanded(path))}
    story.said.append(f"in {path}, after a power loss: {' or '.join(map(repr, kept))}")


def do_journaled_as_published(story: Story) -> None:
    """The steps that the journal calls published, and whether each has its manifest."""
    storage = SimStorage(story.disk, "judge")
    for c in read_history(storage).ledger.in_state(State.FINALIZED, State.TRACKED):
        name = f"{MEGATRON.published_name(c.step)}/{layout.MANIFEST}"
        there = lookup(storage, name) is not None
        story.said.append(f"in @{c.step}: {'a' if there else 'NO'} manifest")


def do_show(story: Story) -> None:
    story.said.append(f"here: {story.describe()}")


def do_cat(story: Story, path: str) -> None:
    story.said.append(f"in {path}: {story.disk.snapshot().get(expanded(path))!r}")


def do_list(story: Story, path: str) -> None:
    story.said.append(f"in {path}: {' '.join(story.listed(expanded(path)))}")


def do_power_loss(story: Story, how: str = "all_lost") -> None:
    story.disk.crash(how)  # type: ignore[arg-type]
    story.runs.clear()


def do_room(story: Story, size: str) -> None:
    story.disk.capacity = story.disk.used + int(size)


def do_judge(story: Story, step: str) -> None:
    found = check_root(SimStorage(story.disk, "judge"), int(step))
    story.said.append(f"judged sound: step {found} is the latest")


def do_nothing(story: Story) -> None:
    pass


def do_twice(story: Story, *words: str) -> None:
    for _ in range(2):
        story.attempt(" ".join(words))
