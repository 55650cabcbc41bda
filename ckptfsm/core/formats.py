"""The formats of a part: how its files come to be complete.

A driver turns the trainer's values into parts of a format, and back (``ports.Driver``); it also brings
the finisher of a ``planned`` one. Everything else that the library needs to know of a format stands
here. So a process without torch can list, verify, publish and delete what a driver wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Format:
    """A format, under the ``name`` that journals and manifests record.

    - ``planned``: ranks write shards, and the coordinator completes the part with metadata, which the
      driver's finisher makes from their results. Loading is collective.
    - ``foreign``: the trainer's code writes shards, and its finalizers complete the part on every
      rank. Loading is collective.
    - ``by_path``: the trainer writes by path, not through a storage.
    - ``inside``: the files may lie in the directory of another part.
    - ``grouped``: the ranks of a worker group write the part and complete it themselves.
    """

    name: str
    planned: bool = False
    foreign: bool = False
    by_path: bool = False
    inside: bool = False
    grouped: bool = False

    @property
    def sharded(self) -> bool:
        """True if ranks load the part together, each its share."""
        return self.planned or self.foreign


TORCH_DIST = Format("torch_dist", planned=True)
FOREIGN = Format("foreign", foreign=True, by_path=True)
FILE = Format("file", inside=True)
TREE = Format("tree", by_path=True)
REPORT = Format("report", grouped=True)
FORMATS = MappingProxyType({each.name: each for each in (TORCH_DIST, FOREIGN, FILE, TREE, REPORT)})
