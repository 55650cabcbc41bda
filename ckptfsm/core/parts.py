"""Identifiers of saved data: the attempt at a step, and the parts of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from ckptfsm.core.errors import ConfigError
from ckptfsm.core.formats import FORMATS, TORCH_DIST, Format, format_of, is_reserved

MAX_STEP = 10**15
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


class Sent:
    """Base of small frozen dataclasses that ranks send: pickled as a call with their values.

    The generated way sets one field after the other, which takes three times as long to read.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        kind: Any = type(self)
        return kind, _values_of(kind)(self)


@cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    values = attrgetter(*names)
    return values if len(names) > 1 else lambda sent: (values(sent),)


class Planned(NamedTuple):
    """What the first rank made of all ranks' plans of a part.

    ``metadata`` is for the part's first rank alone, which puts it into its planned file, see
    ``ports.Written``. ``shares`` is for every rank, in a form of the driver's own.
    """

    metadata: bytes
    shares: bytes = b""


class AttemptId(NamedTuple):
    """An attempt at a step: ``epoch`` is the run generation that asked for it.

    A tuple, because a start looks attempts up ten times for each checkpoint.
    """

    step: int
    epoch: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step}.e{self.epoch}.a{self.attempt}"


@dataclass(frozen=True, slots=True)
class PartSpec(Sent):
    """A declared part of a checkpoint.

    ``kind`` is the name of its format. ``directory`` is relative to the step's directory ("" is its
    root). ``ranks`` are the ranks that write the part; None means every rank of the job. If a rank
    cannot write an ``optional`` part, the checkpoint is completed without the part.
    """

    name: str
    kind: str = TORCH_DIST.name
    directory: str = ""
    ranks: tuple[int, ...] | None = None
    optional: bool = False

    def __hash__(self) -> int:
        """Hash without ``ranks``: every report looks the part up, and a group has many ranks."""
        return hash((self.name, self.kind, self.directory))

    @property
    def format(self) -> Format:
        """Raises ``ConfigError`` for the name of a format that this version does not have."""
        found = format_of(self.kind)
        if found is None:
            raise ConfigError(
                f"part {self.name!r} has the format {self.kind!r}, and this ckptfsm knows "
                f"{', '.join(FORMATS)}: install the version of ckptfsm that wrote it",
                part=self.name,
            )
        return found

    @property
    def first_rank(self) -> int:
        """The rank that writes the files common to all ranks of the part."""
        return 0 if self.ranks is None else self.ranks[0]


def is_part_name(text: str) -> bool:
    """True if a part may have this name."""
    return bool(_PART_NAME.match(text))


def check_parts(parts: tuple[PartSpec, ...], world_size: int) -> None:
    """Raise ``ConfigError`` unless the declared parts can live together in one checkpoint."""
    if not parts:
        raise ConfigError("a checkpoint needs at least one part")
    names: set[str] = set()
    owners: dict[str, str] = {}
    for part in parts:
        if not is_part_name(part.name):
            raise ConfigError(f"part name {part.name!r} is not a plain name", part=part.name)
        if part.name in names:
            raise ConfigError(f"part {part.name!r} is declared twice", part=part.name)
        names.add(part.name)
        if ".tmp-" in part.name or ".tmp-" in part.directory:
            raise ConfigError("'.tmp-' marks our temporary files", part=part.name)
        pieces = part.directory.split("/") if part.directory else []
        if any(p in ("", ".", "..") or p.startswith(".ckptfsm") for p in pieces):
            raise ConfigError(f"part directory {part.directory!r} is not allowed", part=part.name)
        taken = [name for name in (part.name, *pieces) if is_reserved(name)]
        if taken:
            raise ConfigError(
                f"a part cannot be named {taken[0]!r}: a loader writes or reads such a file itself",
                part=part.name,
            )
        if part.ranks is not None and not part.ranks:
            raise ConfigError(f"part {part.name!r} is written by no rank", part=part.name)
        if part.ranks is not None and not all(0 <= r < world_size for r in part.ranks):
            raise ConfigError("a part names ranks outside the job", part=part.name)
        beside = part.format.inside or (part.format.grouped and not part.directory)
        if not beside:
            other = owners.setdefault(part.directory, part.name)
            if other != part.name:
                raise ConfigError(
                    f"parts {other!r} and {part.name!r} share directory {part.directory!r}, and would "
                    "overwrite each other's files",
                    part=part.name,
                )
    for part in parts:
        if part.optional:
            _check_optional(part, parts)


def _check_optional(part: PartSpec, parts: tuple[PartSpec, ...]) -> None:
    """Raise ``ConfigError`` if leaving ``part`` out would remove files of another part.

    Leaving a part out removes its whole directory.
    """
    if not part.directory or part.format.foreign or part.format.inside:
        raise ConfigError(
            f"part {part.name!r} cannot be optional: it needs a directory of its own, and a plain file "
            "or a foreign request has none",
            part=part.name,
        )
    for other in parts:
        shared = f"{other.directory}/".startswith(f"{part.directory}/")
        if other is not part and shared:
            raise ConfigError(
                f"part {other.name!r} lies in the directory of the optional part {part.name!r}",
                part=part.name,
            )


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """A part that the checkpoint can do without.

    ``content`` is the value that a required part would have. If a rank cannot write the part, the
    checkpoint is completed without it, and the manifest says why. A writer that dies fails the
    checkpoint all the same.
    """

    content: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value of which a checkpoint keeps one for each rank: the position of a loader, a generator.

    Anywhere in the dicts of a state, or as a part. ``restore`` takes a ``PerRank`` of
    anything in its place, and returns each rank's value there. A job with another number of ranks
    raises ``RestoreFailed``, because nobody can divide such values anew. If the setting
    ``reshard_drops`` has the key, the value is left out with a ``ReshardWarning``. The key is the
    names on the way to the value, with dots between them. That of a whole part is ``per_rank``.

    ``value`` is anything that can be pickled. Every rank of the job has to give one.
    """

    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError("a PerRank has its place in the dicts of a state, or is a part")


def content_of(value: Any) -> Any:
    """The content of a part's value, required or optional."""
    return value.content if isinstance(value, OptionalPart) else value
