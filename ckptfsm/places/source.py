"""What is copied: the published directory of a step, and the manifest that lists its files.

Another program's directory, which a start adopted, has no manifest. One is made then from the files, for
the place alone: their names, sizes and digests. It names no parts, as nobody declared any, and the
attempt under which the journal has the checkpoint. The same files give the same bytes, so a copy that
was cut short goes on. Once all is sent the files are looked at again, because nothing says that they are
left alone.

In a place the latest attempt is resumed from. A checkpoint that was adopted after a newer one was there
has a later attempt than that, so its manifest names the first attempt of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from ckptfsm.core.documents import (
    MAX_DOCUMENT_BYTES,
    FileEntry,
    Manifest,
    decode,
    encode_sealed,
    first_problem,
)
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.jobs import turn
from ckptfsm.core.layout import MANIFEST, PRIVATE
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage, Unfit
from ckptfsm.disk.durable import lookup, read_document, walk_files
from ckptfsm.disk.inspection import inspect_published
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.overview import layout_of_names


@dataclass(frozen=True, slots=True)
class CopySource:
    """A published directory. ``data`` are the bytes of its manifest; each of ``files`` has a digest.

    ``made``: the manifest is not in the directory.
    """

    name: str
    of: AttemptId
    data: bytes
    files: tuple[FileEntry, ...]
    made: bool = False

    def require_unchanged(self, storage: Storage) -> None:
        """Raise ``DamagedRoot`` if the files are others than those of the manifest that was made."""
        if self.made and source_of(storage, self.name) != self:
            raise DamagedRoot(
                f"{self.name} was changed while it was copied: no program may write to an adopted "
                "checkpoint",
                file=self.name,
                step=self.of.step,
            )


def source_of(storage: Storage, name: str) -> CopySource:
    """The directory ``name`` of a root. Reads all files that have no digest in a manifest.

    Raises ``DamagedRoot``, ``Unfit`` for an adopted directory that no manifest can describe.
    """
    path = f"{name}/{MANIFEST}"
    if lookup(storage, path) is None:
        manifest = _manifest_of_adopted(storage, name)
        return CopySource(name, manifest.of, encode_sealed(manifest), manifest.files, made=True)
    data = read_document(storage, path, MAX_DOCUMENT_BYTES)
    manifest = decode(Manifest, data, path)
    files = tuple(
        entry
        if entry.digest is not None
        else replace(entry, digest=storage.digest(f"{name}/{entry.name}"))
        for entry in manifest.files
    )
    return CopySource(name, manifest.of, data, files)


def _manifest_of_adopted(storage: Storage, name: str) -> Manifest:
    layout = layout_of_names([name])
    step = layout.parse_published(name)
    history = read_history(storage)
    checkpoint = history.ledger.at(step) if step is not None else None
    if checkpoint is None or checkpoint.provenance != "adopted":
        raise DamagedRoot(f"{name} has no manifest, and was not adopted without one", file=name)
    there = inspect_published(storage, layout, checkpoint.step)
    if there.found != "stock":
        raise DamagedRoot(f"no loader would take it: {there.detail}", file=name, step=step)
    of = checkpoint.id
    if any(known.step > of.step and turn(known) < turn(of) for known in history.known):
        of = AttemptId(of.step, 1, 1)
    return Manifest(
        step=of.step,
        epoch=of.epoch,
        attempt=of.attempt,
        world_size=checkpoint.world_size,
        parts=(),
        files=tuple(_entries(storage, name)),
    )


def _entries(storage: Storage, name: str) -> Iterator[FileEntry]:
    for file, stat in walk_files(storage, name):
        path = f"{name}/{file}"
        if file.startswith(f"{PRIVATE}/"):
            continue
        if stat.kind != "file":
            raise Unfit(f"{path} is a {stat.kind}, and a copy has only files: put a file there")
        try:
            yield FileEntry(name=file, bytes=stat.size, digest=storage.digest(path))
        except ValidationError as error:
            raise Unfit(f"{path!a}: no manifest can list it: {first_problem(error)}") from error
