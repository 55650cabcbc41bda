"""Assembly of an attempt before it is published: its receipts, their files, the metadata, the manifest.

Every file is looked at on disk, by its size. The digests of the shards are taken from the receipts. A
file that no receipt claims, or that two claim, fails the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ckptfsm.core.backoff import pauses
from ckptfsm.core.documents import FileEntry, Manifest, part_records
from ckptfsm.core.errors import CkptFsmError, SaveFailed, ShardMissing, describe
from ckptfsm.core.layout import MANIFEST, RECEIPTS, Layout, join, planned_name
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import Clock, PartFinisher, Storage
from ckptfsm.disk.durable import (
    content_is,
    each_file,
    each_kind,
    fsync_existing,
    is_temporary,
    lookup,
    put,
    read_document,
    walk_files,
)
from ckptfsm.disk.inspection import check_sizes, dropped_parts
from ckptfsm.disk.receipts import CheckedReceipt, Receipts
from ckptfsm.disk.stock import MAX_METADATA_BYTES


@dataclass(slots=True)
class Assembly:
    """Puts one attempt together. Call ``read_receipts``, ``list_files``, ``finish`` for each part,
    ``left_over``, ``manifest``.

    - ``tag`` names our temporary files.
    - ``dropped``: the optional parts that some rank left out, with the reason.
    - ``files``: those that the manifest will list, relative to ``directory``.
    """

    storage: Storage
    clock: Clock
    tag: str
    finishers: Mapping[str, PartFinisher]
    provenance: Mapping[str, str]
    visibility_timeout_s: float
    layout: Layout
    checkpoint: Checkpoint
    directory: str
    receipts: Sequence[CheckedReceipt] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    files: list[FileEntry] = field(default_factory=list)

    def read_receipts(self) -> None:
        """Read all receipts of the attempt, and look at their files.

        Names are looked up again until a deadline: network file systems show them late (F9).
        """
        checkpoint, directory = self.checkpoint, self.directory
        deadline = self.clock.monotonic() + self.visibility_timeout_s
        mine = Receipts(self.storage, directory, checkpoint.id, checkpoint.world_size)
        arriving = mine.arriving(checkpoint.expected, self.clock, deadline)
        self.receipts = sorted(arriving, key=attrgetter("part", "rank"))
        self.dropped = dropped_parts(checkpoint, self.receipts)
        there = {
            name: stat.size
            for name, stat in each_file(self.storage, directory, besides=RECEIPTS)
            if stat.kind == "file"
        }
        for receipt in self.receipts:
            whole = all(there.get(entry.name) == entry.bytes for entry in receipt.files)
            if not whole and receipt.part not in self.dropped:
                self._await_files(receipt, deadline)

    def _await_files(self, receipt: CheckedReceipt, deadline: float) -> None:
        """Wait until all files of a receipt are whole. Raises ``ShardMissing`` at the deadline."""
        pause, of = pauses(), self.checkpoint.id
        while problem := check_sizes(self.storage, self.directory, receipt.files):
            if self.clock.monotonic() >= deadline:
                raise ShardMissing(
                    f"part {receipt.part!r} of rank {receipt.rank}: {problem}",
                    step=of.step,
                    attempt=str(of),
                    part=receipt.part,
                    ranks=(receipt.rank,),
                )
            self.clock.sleep(next(pause))

    def list_files(self) -> None:
        """Take the files of all receipts and the receipts themselves; a name may be claimed once."""
        names: set[str] = set()
        for receipt in self.receipts:
            own_files = receipt.files if receipt.part not in self.dropped else ()
            for entry in (*own_files, receipt.entry):
                if entry.name in names:
                    raise SaveFailed(
                        f"{entry.name} is claimed by two receipts",
                        file=entry.name,
                        step=self.checkpoint.step,
                        rank=receipt.rank,
                    )
                names.add(entry.name)
                self.files.append(entry)

    def finish(self, part: PartSpec) -> None:
        """Write the metadata of a part (``.metadata``, ``metadata.json``) from its receipts.

        Raises ``SaveFailed`` if other metadata is there, in place: another trainer saved the step then.
        """
        location = join(self.directory, part.directory)
        if part.format.foreign:
            self._refuse_changed_common(part)
            names = [*part.format.metadata, *self._beside(part)]
            self.files += [self._entry_of(location, part, name) for name in names]
            return
        for name, content in self._metadata_of(part).items():
            path = join(location, name)
            there = self.checkpoint.in_place and lookup(self.storage, path) is not None
            if there and not content_is(self.storage, path, content):
                raise SaveFailed(f"another trainer wrote {name} there", file=path)
            put(self.storage, path, content, tag=self.tag)
            digest = self.storage.digest(path)
            name = join(part.directory, name)
            self.files.append(FileEntry(name=name, bytes=len(content), digest=digest))

    def _refuse_changed_common(self, part: PartSpec) -> None:
        """Raise ``SaveFailed`` if the common state changed since its rank wrote it.

        A second request for the same directory overwrites it before any check.
        """
        name = join(part.directory, part.format.common)
        path = join(self.directory, name)
        for entry in (entry for receipt in self.receipts for entry in receipt.files):
            if entry.name == name:
                same = self.storage.stat(path).size == entry.bytes
                if not same or self.storage.digest(path) != entry.digest:
                    raise SaveFailed(f"{name} was changed after it was written", file=path)

    def _metadata_of(self, part: PartSpec) -> Mapping[str, bytes]:
        """The metadata files of a part. A finisher that raises fails its attempt, whatever it raises."""
        if not part.format.planned:
            return {}
        final = join(self.layout.published_name(self.checkpoint.step), part.directory)
        finisher = self.finishers.get(part.kind)
        if finisher is None:
            raise SaveFailed(
                f"no finisher here can complete part {part.name!r} ({part.kind})", file=final
            )
        planned = f"{self.directory}/{planned_name(part.name)}"
        data = b""
        if lookup(self.storage, planned) is not None:
            data = read_document(self.storage, planned, MAX_METADATA_BYTES)
        results = [r.results for r in self.receipts if r.part == part.name]
        try:
            return finisher(data, results, f"{self.storage.root}/{final}")
        except (CkptFsmError, OSError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is one
            raise SaveFailed(
                f"part {part.name!r} cannot be completed: {describe(error)}", file=final
            ) from error

    def _beside(self, part: PartSpec) -> list[str]:
        """Further files of the checkpoint that the finalizers of a foreign part left."""
        claimed = {entry.name for receipt in self.receipts for entry in receipt.files}
        found = walk_files(self.storage, join(self.directory, part.directory))
        return [
            name
            for name, stat in found
            if stat.kind == "file"
            and join(part.directory, name) not in claimed
            and part.format.is_beside(name)
            and not is_temporary(name)
        ]

    def _entry_of(self, location: str, part: PartSpec, name: str) -> FileEntry:
        """The manifest's entry of a file that a foreign finalizer left."""
        path = join(location, name)
        if lookup(self.storage, path) is None:
            raise SaveFailed(f"the finalizers of {part.name} left no {name}", file=path)
        # megatron-core does not fsync it: a power loss would empty it in a published checkpoint (I3).
        fsync_existing(self.storage, path)
        size = self.storage.stat(path).size
        if size == 0 and "/" not in name:  # some tokenizers have empty files
            raise SaveFailed(f"the finalizers of {part.name} left an empty {name}", file=path)
        digest = self.storage.digest(path)
        return FileEntry(name=join(part.directory, name), bytes=size, digest=digest)

    def manifest(self) -> Manifest:
        """The commit record: it lists ``files``."""
        checkpoint = self.checkpoint
        kept = tuple(part for part in checkpoint.parts if part.name not in self.dropped)
        return Manifest(
            step=checkpoint.id.step,
            epoch=checkpoint.id.epoch,
            attempt=checkpoint.id.attempt,
            world_size=checkpoint.world_size,
            parts=part_records(kept),
            files=tuple(sorted(self.files, key=attrgetter("name"))),
            metrics=dict(checkpoint.metrics),
            run_seconds=checkpoint.run_seconds,
            provenance=dict(self.provenance),
            dropped=dict(self.dropped),
            written_at=self.clock.wall(),
        )

    def left_over(self) -> list[str]:
        """The temporary files that a crash in a ``put`` left, once ``files`` has all others.

        Raises ``SaveFailed`` if other files are there than the listed ones, or one is listed twice. A
        file that no receipt claims may be a late writer's.
        """
        left: list[str] = []
        missing: set[str] = set()
        for entry in self.files:
            if entry.name in missing:  # the metadata of a part has the name of a file of a receipt
                raise SaveFailed(
                    f"{entry.name} is written twice", file=entry.name, step=self.checkpoint.step
                )
            missing.add(entry.name)
        for name, kind in each_kind(self.storage, self.directory):
            if kind == "file" and name in missing:
                missing.remove(name)
            elif kind == "file" and is_temporary(name):
                left.append(name)
            elif kind != "file" or name != MANIFEST:
                raise SaveFailed(f"{name} is in no receipt", file=f"{self.directory}/{name}")
        for name in sorted(missing):  # a network file system lists late: ask for it by name
            if lookup(self.storage, f"{self.directory}/{name}") is None:
                raise SaveFailed(f"{name} is gone", file=f"{self.directory}/{name}")
        return left
