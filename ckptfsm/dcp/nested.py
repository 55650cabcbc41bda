"""A nested state as DCP names its values: the names on the way to a value, with dots between them.

Torch's own ``flatten_state_dict`` gives the same keys. But it turns the names on the way into text: a
value under a number would be put back beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.parts import PerRank

WHOLE = "per_rank"
"""The key of a part that is one ``PerRank``. No name of the part is in it: in a group, that name counts
the trees.
"""

Path = tuple[Any, ...]
_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
# Types that are certainly not Stateful, which is slow to ask.
_PLAIN = (
    *_TENSORS,
    int,
    float,
    bool,
    str,
    bytes,
    type(None),
    PerRank,
)


class _InList(int):
    """A step to a place in a list. Any other number on the way is the key of a dict, and not equal."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return type(other) is _InList and int(self) == int(other)


@dataclass(frozen=True, slots=True)
class Flat:
    """A state by DCP's keys. ``paths`` leads to the place of each value in ``state``, which is nested.

    ``per_rank``: the keys of the ``PerRank`` values, without the rank.
    """

    state: dict[Any, Any]
    values: dict[str, Any]
    paths: dict[str, Path]
    per_rank: dict[str, str]

    def is_tensor(self, key: str) -> bool:
        """False for what is pickled whole."""
        return isinstance(self.values[key], torch.Tensor)

    def holder(self, key: str) -> Any:
        """The dict or list in the nested state that has the place of a value."""
        holder: Any = self.state
        for step in self.paths[key][:-1]:
            holder = holder[step]
        return holder

    def put(self, key: str, value: Any) -> None:
        """Put a value in its place in the nested state."""
        self.holder(key)[self.paths[key][-1]] = value

    def remove(self, key: str) -> None:
        del self.holder(key)[self.paths[key][-1]]

    def mappings(self) -> dict[str, Path]:
        """The places as DCP records them: of a ``PerRank``, one for each rank."""
        found = {}
        for key, path in self.paths.items():
            words = tuple(int(each) if type(each) is _InList else str(each) for each in path)
            name = self.per_rank.get(key)
            found[key] = (*words, key[len(name) + 1 :]) if name is not None else words
        return found


def flat(part: str, state: Any, rank: int, error: type[CkptFsmError]) -> Flat:
    """Take a state apart: a dict, perhaps with objects that have a ``state_dict``, or a ``PerRank``.

    A ``PerRank`` at ``loader`` has the key ``loader.rank_<rank>``. Raises ``error`` if two values have
    one key.
    """
    nested = {WHOLE: state} if isinstance(state, PerRank) else dict(state)
    for key, value in nested.items():
        if type(value) not in _PLAIN and isinstance(value, Stateful):
            nested[key] = value.state_dict()
    made = Flat(nested, {}, {}, {})
    leaves: list[tuple[Path, Any]] = []
    try:
        _collect((), nested, leaves)
    except RecursionError as found:
        said = f"part {part!r}: its dicts and lists are nested too deeply, or one contains itself"
        raise error(said, part=part) from found
    for path, value in leaves:
        key = ".".join(map(str, path))
        if type(value) not in _TENSORS:
            _require_no_stateful(part, key, value, error)
            if isinstance(value, PerRank):
                name, key = key, f"{key}.rank_{rank}"
                made.per_rank[key] = name
        if key in made.values:
            raise error(
                f"part {part!r}: two values have the key {key!r}, as names are put together with dots: "
                "rename one of them",
                part=part,
                key=key,
            )
        made.values[key], made.paths[key] = value, path
    return made


def _require_no_stateful(part: str, key: str, value: Any, error: type[CkptFsmError]) -> None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if type(first) not in _PLAIN and isinstance(first, Stateful):
        raise error(
            f"part {part!r}: {key!r} has a {type(first).__name__}, which would be pickled whole: "
            "give its state_dict(), or give it at the top of the state",
            part=part,
            key=key,
        )


def fits_its_mesh(value: Any, sizes: torch.Size) -> bool:
    """True if this rank's part of a DTensor has the sizes that DCP takes it to have.

    A local tensor that says itself what its items are may have others.
    """
    if not isinstance(value, DTensor) or hasattr(value._local_tensor, "__create_chunk_list__"):
        return True
    return value._local_tensor.shape == sizes


def _collect(path: Path, value: Any, leaves: list[tuple[Path, Any]]) -> None:
    """Add each value below ``value`` to ``leaves``, with the way to it."""
    if type(value) in _TENSORS:  # of which there may be many
        leaves.append((path, value))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _collect((*path, key), each, leaves)
    elif isinstance(value, list) and _is_taken_apart(value):
        for number, each in enumerate(value):
            _collect((*path, _InList(number)), each, leaves)
    else:
        leaves.append((path, value))


def _is_taken_apart(values: Collection[Any]) -> bool:
    """True for a list that DCP takes apart: with a tensor or a dict in it, at any depth."""
    return any(
        isinstance(each, (torch.Tensor, Mapping))
        or (isinstance(each, list) and _is_taken_apart(each))
        for each in values
    )
