"""Publishing: a staging directory, its manifest, one rename to its name, and the tracker that names it.

A change is made after a check of the epoch (I9), and is durable when the method returns. Finalizing and
writing the tracker may be tried again after any error but ``OutcomeUnknown``. After that one a restart
decides, from what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import checksum_of, encode_sealed
from ckptfsm.core.errors import DamagedRoot, OutcomeUnknown, SaveFailed, StorageError
from ckptfsm.core.evidence import is_published_as
from ckptfsm.core.layout import (
    MANIFEST,
    PLANNED,
    QUARANTINE,
    STAGING,
    TRACKER,
    TRASH,
    Layout,
    begun_name,
    join,
    left_out_name,
    tracker_text,
)
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Storage
from ckptfsm.disk.assembly import Assembly
from ckptfsm.disk.durable import (
    content_is,
    fsync_dirs_of,
    fsync_private,
    fsync_tree_dirs,
    fsync_tree_files,
    in_directory,
    list_names,
    lookup,
    make_dirs,
    parent_of,
    put,
)
from ckptfsm.disk.inspection import Commit, read_commit, read_tracker
from ckptfsm.disk.setting_aside import move_aside
from ckptfsm.disk.trash import sweep_attempt

log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class Publisher:
    """Publishes the attempts of one epoch.

    ``check_epoch`` raises ``Fenced``; ``tag`` names our temporary files.
    """

    storage: Storage
    tag: str
    check_epoch: Callable[[], None]
    assembly_of: Callable[[Checkpoint, str], Assembly]
    layout: Layout

    def create_staging(self, checkpoint: Checkpoint) -> None:
        """Make the attempt's directory; in place, a stock trainer may have made it already.

        A directory in place gets a mark, because its name does not tell which attempt began there. A
        clean-up deletes nothing that has no mark.
        """
        self.check_epoch()
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        if not (checkpoint.in_place and lookup(self.storage, directory) is not None):
            make = partial(self.storage.mkdir, directory)
            in_directory(self.storage, parent_of(directory), make)
        # Shards are durable only below a durable name; a stock trainer's mkdir may not be that yet.
        self.storage.fsync_dir(parent_of(directory))
        if checkpoint.in_place:
            make_dirs(self.storage, begun_name(checkpoint.id), base=directory)

    def finalize(self, checkpoint: Checkpoint) -> str:
        """Check every receipt, write metadata and manifest, publish by one rename (I3, I4).

        Returns the checksum that the manifest begins with.
        """
        self.check_epoch()
        target = self.layout.published_name(checkpoint.step)
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        if checkpoint.in_place:
            there = self._committed(checkpoint, directory)
        else:
            there = self._published(checkpoint, target)
        if there is not None:
            return there.crc
        assembly = self.assembly_of(checkpoint, directory)
        assembly.read_receipts()
        assembly.list_files()
        for part in checkpoint.parts:
            if part.name not in assembly.dropped:
                assembly.finish(part)
            else:
                why, step = assembly.dropped[part.name], checkpoint.step
                said = f"step {step}: part {part.name!r} is left out: {why}"
                say(log.warning, "part_left_out", said, step=step, part=part.name, why=why)
                self._leave_out(checkpoint, part, directory)
        sweep_attempt(self.storage, directory, assembly.left_over())
        manifest = encode_sealed(assembly.manifest())
        # A manifest must not survive a power loss that takes names which it lists (I3).
        fsync_dirs_of(self.storage, directory, assembly.files)
        self.check_epoch()
        if checkpoint.in_place:
            self._commit_in_place(checkpoint, directory, manifest)
        else:
            put(self.storage, f"{directory}/{MANIFEST}", manifest, tag=self.tag)
            self._publish(checkpoint, directory, target, manifest)
        return checksum_of(manifest)

    def _commit_in_place(self, checkpoint: Checkpoint, directory: str, manifest: bytes) -> None:
        """Put the manifest, which is the commit in place. Once it may be seen, no error undoes it."""
        path = f"{directory}/{MANIFEST}"
        try:
            put(self.storage, path, manifest, tag=self.tag, check=self.check_epoch)
        except OSError as error:
            if lookup(self.storage, path) is None:
                raise  # the commit certainly did not happen
            raise OutcomeUnknown(
                f"the manifest is there but not known to be durable: {error}",
                file=path,
                step=checkpoint.step,
            ) from error

    def _committed(self, checkpoint: Checkpoint, directory: str) -> Commit | None:
        """This attempt's manifest, if it is there already, in place. Makes its name durable again."""
        found = self._own_commit(checkpoint, directory)
        if found is not None:
            # A manifest from before an error, or a crash, may not have a durable name.
            self.storage.fsync_dir(parent_of(f"{directory}/{MANIFEST}"))
        return found

    def _own_commit(self, checkpoint: Checkpoint, directory: str) -> Commit | None:
        """The manifest in a directory, if it is this attempt's."""
        found = read_commit(self.storage, directory)
        own = found is not None and is_published_as(checkpoint, found.manifest.of, found.crc)
        return found if own else None

    def _published(self, checkpoint: Checkpoint, target: str) -> Commit | None:
        """The manifest at the published name, if this attempt has it. Makes the name durable again.

        Raises ``SaveFailed`` if another one has it.
        """
        found = lookup(self.storage, target)
        if found is None:
            return None
        own = self._own_commit(checkpoint, target) if found.kind == "dir" else None
        if own is None:
            said = f"{target} is taken by something else"
            raise SaveFailed(said, file=target, step=checkpoint.step)
        # An error came after the rename, or the journal could not take it: publish no second time.
        self._fsync_names(checkpoint, target)
        return own

    def _publish(
        self, checkpoint: Checkpoint, directory: str, target: str, manifest: bytes
    ) -> None:
        """Rename staging to the published name. An error is decided by a look, never by assuming."""
        self.check_epoch()
        try:
            self.storage.rename(directory, target)
        except OSError:
            if lookup(self.storage, directory) is not None:
                raise  # the rename certainly did not happen; something else may stand at the name
        self._fsync_names(checkpoint, target, manifest)

    def _fsync_names(
        self, checkpoint: Checkpoint, target: str, manifest: bytes | None = None
    ) -> None:
        """Make a rename durable, and read it back. After an error only a restart decides.

        ``manifest`` is the one that was put. Where an earlier try put it, its attempt is read.
        """
        try:
            # Both ends: else a power loss may show the attempt in staging too, or in staging only (I4).
            self.storage.fsync_dir("")
            fsync_private(self.storage, STAGING)
            if manifest is None:
                ours = self._own_commit(checkpoint, target) is not None
            else:
                ours = content_is(self.storage, f"{target}/{MANIFEST}", manifest)
            if not ours:
                raise StorageError("the published name is not this attempt's", file=target)
        except (OSError, DamagedRoot) as error:
            raise OutcomeUnknown(
                f"{target} was renamed but is not known to be durable: {error}",
                file=target,
                step=checkpoint.step,
            ) from error

    def make_published_durable(self, step: int) -> None:
        """Make the names of a checkpoint durable that a process published before it was killed."""
        fsync_tree_dirs(self.storage, self.layout.published_name(step))
        self.storage.fsync_dir("")
        # A fenced trainer's rename may have come after the opening made staging durable.
        fsync_private(self.storage, STAGING)

    def make_adopted_durable(self, step: int) -> None:
        """Make the files of an adopted checkpoint durable, before older ones may be pruned for it.

        A stock trainer leaves them in the page cache.
        """
        fsync_tree_files(self.storage, self.layout.published_name(step))
        self.make_published_durable(step)

    def _leave_out(self, checkpoint: Checkpoint, part: PartSpec, directory: str) -> None:
        """Take an optional part that some rank left out away from the unpublished attempt."""
        planned = list_names(self.storage, f"{directory}/{PLANNED}")
        own = [f"{PLANNED}/{name}" for name in planned if _plans(name, part)]
        for path in (join(directory, part.directory), *(f"{directory}/{name}" for name in own)):
            if lookup(self.storage, path) is not None:
                self.check_epoch()
                # In place it is kept: a fenced manager's late rename may take a later save's part (I1).
                place = QUARANTINE if checkpoint.in_place else TRASH
                aside = f"{place}/{left_out_name(checkpoint.id)}-{path.rpartition('/')[2]}"
                move_aside(self.storage, path, aside)

    def write_tracker(self, step: int) -> None:
        """Make the tracker name ``step``, durably, and read it back (I2)."""
        self.check_epoch()
        # The second check comes between the write and the rename: other programs read the tracker
        # (I9).
        put(self.storage, TRACKER, tracker_text(step), tag=self.tag, check=self.check_epoch)
        seen = read_tracker(self.storage)
        if seen.step != step:
            raise OutcomeUnknown(
                f"the tracker was written as {step} but reads as {seen.step}", file=TRACKER
            )


def _plans(name: str, part: PartSpec) -> bool:
    """True if a file of planned metadata belongs to a part. A group's part has one for each share."""
    if not part.format.grouped:
        return name == f"{part.name}.bin"
    share = name.removeprefix(f"{part.name}.").removesuffix(".bin")
    return share.isdigit() and name == f"{part.name}.{share}.bin"
