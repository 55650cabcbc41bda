"""The formats of a part: how its files come to be complete.

A driver turns the trainer's values into parts of a format, and back (``ports.Driver``); it also brings
the finisher of a ``planned`` one. Everything else that the library needs to know of a format stands
here. So a process without torch can list, verify, publish and delete what a driver wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Format:
    """A format, under the ``name`` that journals and manifests record.

    - ``planned``: ranks write shards, and the coordinator completes the part with metadata, which the
      driver's finisher makes from their results. Loading may be collective.
    - ``foreign``: the trainer's code writes shards, and its finalizers complete the part on every
      rank. Loading is collective.
    - ``by_path``: the trainer writes by path, not through a storage.
    - ``by_one``: the first of the ranks that give the part writes it for all, unless a ``FileTree``
      says ``every_rank``.
    - ``inside``: the part is a file of its own name, which may lie in the directory of another part.
    - ``grouped``: the ranks of a worker group write the part and complete it themselves.
    - ``own_keys``: a rank may have keys that others lack.
    - ``stock``: stock loaders read the part, so its metadata are verified as they would judge them.

    Names of files, relative to the part's directory:

    - ``shards``: the ending that only files of ranks have, "" if there is none.
    - ``common``: the file with the values that all ranks share, "" if there is none.
    - ``metadata``: the files that complete the part.
    - ``beside``: patterns of further files that finalizers may leave.
    """

    name: str
    planned: bool = False
    foreign: bool = False
    by_path: bool = False
    by_one: bool = False
    inside: bool = False
    grouped: bool = False
    own_keys: bool = False
    stock: bool = False
    shards: str = ""
    common: str = ""
    metadata: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """True if each rank has a share, and takes part in loading it: that may be collective."""
        return self.planned or self.foreign

    def is_share(self, file: str) -> bool:
        """True for the last component of a name under which ranks write, before the part is complete."""
        return file == self.common or bool(self.shards and file.endswith(self.shards))

    def is_early(self, path: str, part: str, directory: str) -> bool:
        """True if the part of this name and directory may leave ``path`` before it is complete."""
        if self.inside:
            return path == (f"{directory}/{part}" if directory else part)
        if self.shards:
            return self.is_share(path.rpartition("/")[2])
        return bool(directory) and path.startswith(f"{directory}/")

    def is_beside(self, file: str) -> bool:
        return any(fnmatchcase(file, pattern) for pattern in self.beside)


_SHARDS, _COMMON, _METADATA = ".distcp", "common.pt", (".metadata", "metadata.json")

TORCH_DIST = Format(
    "torch_dist", planned=True, stock=True, shards=_SHARDS, common=_COMMON, metadata=_METADATA
)
DCP = Format(
    "dcp", planned=True, own_keys=True, stock=True, shards=_SHARDS, metadata=(".metadata",)
)
FOREIGN = Format(
    "foreign",
    foreign=True,
    by_path=True,
    shards=_SHARDS,
    common=_COMMON,
    metadata=_METADATA,
    beside=("integrity.json", "tokenizer/*"),  # of newer trainers
)
FILE = Format("file", by_one=True, inside=True)
TREE = Format("tree", by_path=True, by_one=True)
GROUP = Format("report", grouped=True, shards=_SHARDS, common=_COMMON)
FORMATS = MappingProxyType(
    {each.name: each for each in (TORCH_DIST, DCP, FOREIGN, FILE, TREE, GROUP)}
)


def format_of(name: str) -> Format | None:
    """The format of this name; None for one that this version does not have."""
    return FORMATS.get(name)


def stock_format(names: Iterable[str]) -> Format:
    """The format in which stock code wrote a directory with these files: Megatron's has more of them."""
    own = {TORCH_DIST.common, *TORCH_DIST.metadata} - set(DCP.metadata)
    return DCP if own.isdisjoint(names) else TORCH_DIST


def is_reserved(file: str) -> bool:
    """True for the last component of a name that some format keeps for its own files."""
    return any(
        each.is_share(file) or file in (*each.metadata, *each.beside) for each in FORMATS.values()
    )


def is_shard(file: str) -> bool:
    """True for a name with an ending that only shards of some format have."""
    return any(each.shards and file.endswith(each.shards) for each in FORMATS.values())
