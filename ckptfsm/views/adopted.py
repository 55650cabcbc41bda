"""The size, the parts and the age of adopted checkpoints, read from their directories.

The journal does not have them: it begins with the adoption. Every other checkpoint has them there, and a
list reads no directory for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptfsm.core.errors import DamagedRoot, NewerSchema
from ckptfsm.core.layout import MEGATRON
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import each_file
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.disk.overview import Overview

_STOCK_PART = ("state",)


@dataclass(frozen=True, slots=True)
class AdoptedContents:
    """``bytes`` of all files; the names of the parts; when it was written, "" if nothing tells."""

    bytes: int
    parts: tuple[str, ...]
    written_at: str = ""


def adopted_contents(storage: Storage, overview: Overview) -> Mapping[AttemptId, AdoptedContents]:
    """The contents of the adopted checkpoints; without those whose directory cannot be read."""
    found = {}
    for of, checkpoint in overview.ledger.checkpoints.items():
        if checkpoint.provenance == "adopted" and checkpoint.state is State.TRACKED:
            contents = _contents_of(storage, overview, checkpoint)
            if contents is not None:
                found[of] = contents
    return found


def _contents_of(
    storage: Storage, overview: Overview, checkpoint: Checkpoint
) -> AdoptedContents | None:
    name = overview.layout.published_name(checkpoint.step)
    try:
        manifest = read_manifest(storage, name)
        if manifest is not None:
            parts = tuple(part.name for part in manifest.parts)
            return AdoptedContents(sum(f.bytes for f in manifest.files), parts, manifest.written_at)
        size = sum(stat.size for _, stat in each_file(storage, name))
    except NewerSchema:
        raise
    except (DamagedRoot, FileNotFoundError):  # for the doctor to judge, or pruned meanwhile
        return None
    return AdoptedContents(size, _STOCK_PART if overview.layout is MEGATRON else ())
