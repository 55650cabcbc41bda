"""Reads back what a save would write, before the save is accepted (I12).

Torch's loader takes fewer types than ``torch.save``. So the values are pickled, without the data of
tensors, and loaded again by the loader itself. If the quick look at everything fails, each value is
saved and loaded as in a restore, and only that may refuse. Tensors are looked at, not loaded.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pickle
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from pathlib import PurePath
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from ckptfsm.core.errors import SaveRefused, one_line, shorten
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.blobs import Holes

_NAMED = 4  # values that a refusal names, of those with one way out
_WAYS_NAMED = 4  # ways out that a refusal names, beside the first
_WORDS = 160  # characters of a loader's reason
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")
_KEY = "x"

Reader = Callable[[IO[bytes]], Any]


class Misfit(Exception):
    """A tensor whose values are not, or not all, in this rank's memory."""


class Found(NamedTuple):
    """A value that cannot be loaded: its place in the state, and the error of saving or loading it."""

    place: str
    value: Any
    error: Exception


# --------------------------------------------------------------------------------------- tensors

PLAIN_KINDS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = "give a torch.Tensor with them"
_TUPLE = "a tuple (x,), which is pickled whole"
WAYS: Mapping[str, str] = {
    "DTensor": "each rank has a part: give x.full_tensor(), or have x in dicts and lists only",
    "ShardedTensor": "each rank has a part: have x in dicts and lists only",
    "AsyncCollectiveTensor": "a collective is still running: give x.wait()",
    "FakeTensor": "it has no values: materialize it first",
    "FlatParameter": (
        "it has one rank's part of an FSDP module: give what "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict returns"
    ),
}
_PARTIAL = (
    "its placement is Partial, so each rank has a summand: give x.full_tensor(), or x.redistribute() to "
    "Shard or Replicate"
)
_RUNNING = (
    "a collective is still running: give DTensor.from_local(x.to_local().wait(), x.device_mesh, "
    "x.placements)"
)


def misfit(value: Any, ways: Mapping[str, str] = WAYS) -> str:
    """Why a value cannot be saved in a pickle of this rank's memory, and the way out, or "".

    ``ways`` are the ways out of tensors, by the names of their classes.
    """
    if type(value) not in PLAIN_KINDS:
        if isinstance(value, PerRank):
            return (
                "a PerRank has its place in dicts, or is a part: make all of the list or object one"
            )
        if not isinstance(value, torch.Tensor):
            return ""
        if torch.nn.parameter.is_lazy(value):
            return "it is not initialized: run the module once"
        # a parameter of another class has its values in a plain tensor all the same
        plain = value.detach() if isinstance(value, torch.nn.Parameter) else value
        if type(plain) not in PLAIN_KINDS:
            return f"its values are not in a plain tensor: {ways.get(type(value).__name__, _PLAIN)}"
    if value.is_meta:
        return "it is on the meta device and has no values: materialize it first"
    if getattr(value, "_is_flat_param", False):
        return ways["FlatParameter"]
    if torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "it exists inside a transformed function only: save outside of that"
    return ""


def misfit_of_tensor(value: torch.Tensor) -> str:
    """Why DCP could not save a tensor of a state, or not load it again, and the way out, or "".

    That of a distributed tensor is asked of what this rank has of it.
    """
    if type(value) not in PLAIN_KINDS:
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                return _PARTIAL
            local = value._local_tensor  # ``to_local`` would make a node of autograd
            running = isinstance(local, AsyncCollectiveTensor)
            return _RUNNING if running else misfit_of_tensor(local)
        if hasattr(value, "local_shards"):  # torch's ShardedTensor or LocalShardsWrapper
            shards = [getattr(each, "tensor", each) for each in value.local_shards()]
            return next(filter(None, map(misfit_of_tensor, shards)), "")
    said = misfit(value)
    if said:
        return said
    if value.layout is not torch.strided:
        return f"its layout is {value.layout}: give x.to_dense(), or {_TUPLE}"
    if value.is_quantized:  # its numbers would be copied into a tensor of another scale
        return f"it is quantized: give x.int_repr() and its scales, or {_TUPLE}"
    return f"it is nested: give x.unbind(), or {_TUPLE}" if value.is_nested else ""


# --------------------------------------------------------------------------------------- values


class PathInState(NamedTuple):
    """A place in a state: a step from another place. Put into words only if it is told."""

    before: PathInState | None
    step: Any
    form: str = "[{!r}]"


Leaf = tuple[PathInState | None, Any]


class StateReadBack:
    """Judges whether a restore could load the values of this rank's parts.

    ``misfit`` says why a value of a format cannot be saved in a pickle, see the function.
    """

    def __init__(self, misfit: Callable[[Any], str] = misfit) -> None:
        self._pickling = _pickling_with(misfit)
        self._accepted: dict[tuple[str, Reader], tuple[str, list[Any]] | None] = {}

    def check_state(self, part: str, values: Mapping[str, Any]) -> None:
        """Refuse a state with values that DCP could not load again (local).

        ``values`` are by their keys in DCP. A ``PerRank`` stands for its value.
        Raises ``SaveRefused``, which names the values by their keys.
        """
        leaves: list[Leaf] = []
        misfits: list[Found] = []
        for key, value in values.items():
            if type(key) is not str or not key or not key.isascii():
                _check_key(part, key)
            if isinstance(value, torch.Tensor):
                said = misfit_of_tensor(value)
                if said:
                    misfits.append(Found(key, value, Misfit(said)))
            else:
                inner = value.value if isinstance(value, PerRank) else value
                leaves.append((PathInState(None, key, "{}"), inner))
        if misfits:
            raise refusal(part, misfits)
        self.check_leaves(part, leaves, [value for _, value in leaves], load_object)

    def check_leaves(self, part: str, leaves: Iterable[Leaf], whole: Any, reader: Reader) -> None:
        """Raise ``SaveRefused`` unless ``reader`` could load ``whole``, which consists of ``leaves``.

        Values that were accepted the last time, for this part and reader, are not loaded again.
        """
        seen = None
        try:
            pickled = self.pickle_of(whole)
            seen = (pickled.digest(), torch.serialization.get_safe_globals())
            if self._accepted.get((part, reader)) == seen:
                return
            load_without_data(pickled, reader)
        except Exception:  # whatever a class raises when it is pickled or loaded
            self.know_loader(reader)
            found = [each for leaf in leaves if (each := self._look(*leaf, reader)) is not None]
            if found:
                raise refusal(part, found) from found[0].error
            # nested too deeply, for one
            torch.save(whole, io.BytesIO(), pickle_module=self._pickling)
        self._accepted[part, reader] = seen

    def know_loader(self, reader: Reader) -> None:
        """Called before values are tried one by one, for a reader that has to find out what it takes."""

    def pickle_of(self, value: Any) -> Pickled:
        """The pickle of a value, without the data of its tensors. Raises what its classes raise."""
        file = Pickled()
        with torch.serialization.skip_data():
            torch.save(value, cast(IO[bytes], file), pickle_module=self._pickling)
        return file

    def _problem(self, value: Any, reader: Reader) -> Exception | None:
        """The error of saving or loading one value; None if a restore could load it."""
        try:
            load_without_data(self.pickle_of(value), reader)
        except Misfit as error:
            return error
        except Exception:  # perhaps of a class that needs the data of its tensor
            file = io.BytesIO()
            try:
                torch.save(value, file)
                file.seek(0)
                reader(file)
            except Exception as error:
                return error
        return None

    def _look(self, start: PathInState | None, value: Any, reader: Reader) -> Found | None:
        """The innermost value here that cannot be loaded; None if all can."""
        error = self._problem(value, reader)
        if error is None:
            return None
        place = words_of(start)
        seen: set[int] = set()
        while True:
            seen.add(id(value))
            if _is_refused_itself(value, error):
                break
            for step, child in _children(value):
                inner = None if id(child) in seen else self._problem(child, reader)
                if inner is not None:
                    place, value, error = place + step, child, inner
                    break
            else:
                break
        return Found(place, value, error)


# ------------------------------------------------------------------------------------------ keys


def _check_key(part: str, key: Any) -> None:
    """Raise ``SaveRefused`` unless a key is text that can be written."""
    if not isinstance(key, str):
        said = f"is a {name_of(type(key))}: flatten the state, or name the value by text"
    elif not key:
        said = "is empty: give the value a name"
    else:
        try:
            key.encode()
            return
        except UnicodeEncodeError:
            said = "is not valid Unicode: give the value another name"
    raise SaveRefused(f"part {part!r}: the key {shown(repr(key))} {said}", part=part, key=repr(key))


# --------------------------------------------------------------------------------------- loaders


def load_object(file: IO[bytes]) -> Any:
    """Load as torch's planner loads an object of a shard."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.state_dict = {}
    index, nothing = MetadataIndex(_KEY), torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    planner.load_bytes(item, cast(io.BytesIO, file))
    return planner.state_dict[_KEY]


def load_without_data(file: Pickled | IO[bytes], reader: Reader) -> None:
    """Load a file, without the data of its tensors. Raises what the loader raises."""
    file.seek(0)
    with torch.serialization.skip_data():
        reader(cast(IO[bytes], file))


# --------------------------------------------------------------------------------------- pickles


class Pickled(Holes):
    """The file of ``torch.save`` in memory, without the data of tensors."""

    def digest(self) -> str:
        hasher = xxhash.xxh3_128()
        for _, piece in self.pieces:
            hasher.update(piece)
        return hasher.hexdigest()


class _Pickler(pickle.Pickler):
    """Leaves plain tensors out, for every loader takes them. Raises ``Misfit`` for a misfit."""

    misfit: Callable[[Any], str]

    def reducer_override(self, value: Any) -> Any:
        said = self.misfit(value)
        if said:
            raise Misfit(said)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        special = type(value) not in PLAIN_KINDS
        more = special or value.__dict__ or value._backward_hooks or value.is_mkldnn
        return NotImplemented if more else (torch.Size, ((),))


def _pickling_with(misfit: Callable[[Any], str]) -> type:
    """What stands for the module ``pickle`` in ``torch.save``."""
    pickler = type("Pickler", (_Pickler,), {"misfit": staticmethod(misfit)})
    return type("Pickling", (), {"Pickler": pickler})


# ---------------------------------------------------------------------------------------- words


def words_of(place: PathInState | None) -> str:
    steps = []
    while place is not None:
        steps.append(place.form.format(place.step))
        place = place.before
    return "".join(reversed(steps))


def _is_refused_itself(value: Any, error: Exception) -> bool:
    refused = _REFUSED.search(str(error))
    return refused is not None and refused[1] == name_of(type(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield f"[{key!r}]", child
            yield f" key {key!r}", key
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for number, child in enumerate(value):
            yield f"[{number}]", child
    elif not isinstance(value, (type, torch.Tensor)) and not callable(value):
        for name, child in getattr(value, "__dict__", {}).items():
            yield f".{name}", child


def name_of(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def refusal(part: str, found: list[Found]) -> SaveRefused:
    first, *others = found
    groups: dict[str, list[Found]] = {_remedy(first): []}
    for each in others:
        groups.setdefault(_remedy(each), []).append(each)
    (way, same), *rest = groups.items()
    more = f"; the same goes for {_list(same)}" if same else ""
    more += "".join(f"; for {_list(each)}: {remedy}" for remedy, each in rest[:_WAYS_NAMED])
    left = sum(len(each) for _, each in rest[_WAYS_NAMED:])
    more += f"; and {left} more values" if left else ""
    misfits = isinstance(first.error, Misfit)
    said = "" if misfits else f"could not be loaded again, as {reason_of(first.error)}: "
    place = shown(first.place)
    return SaveRefused(
        f"part {part!r}: the value at {place}, of type {name_of(type(first.value))}, "
        f"{said}{way}{more}",
        part=part,
        key=place,
    )


def _remedy(found: Found) -> str:
    if isinstance(found.error, Misfit):
        return f"cannot be saved: {found.error}"
    return way_out(found.value, found.error)


def _list(found: Sequence[Found]) -> str:
    """The first places of some values, with their types."""
    first = [f"{shown(each.place)} ({name_of(type(each.value))})" for each in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{', '.join(first)}{more}"


def shown(place: str) -> str:
    return shorten(one_line(place), _WORDS)


def reason_of(error: Exception) -> str:
    """The reason of a loader in a few words, without the advice and the colours of torch."""
    refused = _REFUSED.search(str(error))
    if refused:
        return f"torch.load does not allow {refused[1]}"
    lines = [line for line in str(error).splitlines() if line.strip() and "docs/stable" not in line]
    words = lines[-1].strip() if lines else ""
    return shorten(one_line(f"{type(error).__name__}: {words}"), _WORDS)


_REGISTER = "call torch.serialization.add_safe_globals([{kind}]) wherever you save and restore"
_WAY_OF: Sequence[tuple[Any, str]] = (
    (enum.Enum, f"save x.value, or {_REGISTER}"),
    (np.number, "save x.item()"),
    (np.bool_, "save x.item()"),
    ((np.generic, str), "save str(x)"),
    (np.ndarray, "save torch.from_numpy(x), or x.tolist()"),
    ((datetime.date, datetime.time), "save x.isoformat()"),
    (datetime.timedelta, "save x.total_seconds()"),
    ((decimal.Decimal, fractions.Fraction, uuid.UUID, PurePath), "save str(x)"),
    (torch.Generator, "save x.get_state()"),
    (float, "save float(x)"),
    (int, "save str(x)"),  # one of a thousand digits
    (Mapping, "save dict(x)"),
    (collections.deque, "save list(x), and x.maxlen if it has one"),
    ((Sequence, Set, MappingView), "save list(x)"),
)


def way_out(value: Any, error: Exception) -> str:
    """Advice: the value to save in the place of one that cannot be loaded."""
    kind = name_of(type(value)).rpartition(".")[2]
    for kinds, way in _WAY_OF:
        if isinstance(value, kinds):
            return way.format(kind=kind)
    if not isinstance(error, pickle.UnpicklingError):
        return "leave it out, or save what it can be made from"
    register = _REGISTER.format(kind=kind)
    if dataclasses.is_dataclass(value):
        return f"save dataclasses.asdict(x), or {register}"
    if hasattr(value, "state_dict"):
        return f"save x.state_dict(), or {register}"
    made = "save what it can be made from: numbers, text, lists, dicts and tensors"
    return f"{made}; or {register}" if _is_refused_itself(value, error) else made
