"""Reads back what a save would write of plain values and objects, before the save is accepted (I12).

Torch's loader takes fewer types than ``torch.save``. So the values are pickled, without the data of
tensors, and loaded again by the loader itself. If the quick look at everything fails, each value is
saved and loaded as in a restore, and only that may refuse.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import errno
import fractions
import io
import os
import pickle
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_nonpersistent
from megatron.core.fp8_utils import is_float8tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckptfsm.adapters.notices import warn_caller
from ckptfsm.core.errors import (
    ClassNotKeptWarning,
    SaveRefused,
    StorageError,
    name_ranks,
    one_line,
    shorten,
)
from ckptfsm.dcp.blobs import Holes
from ckptfsm.disk.stock import COMMON

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


class ReadBack:
    """Judges whether a restore could load the values of this rank's parts.

    ``common_in_shard``: the common state is written as an object, not as ``common.pt``.
    """

    def __init__(self, common_in_shard: bool) -> None:
        self._common_in_shard = common_in_shard
        self._accepted: dict[tuple[str, Reader], tuple[str, list[Any]] | None] = {}
        self._takes_anything: bool | None = None
        self._told: set[str] = set()  # places of values whose class is not kept

    def check(self, part: str, state: Any, common: Any) -> None:
        """Refuse a state with values that could not be loaded, or tensors that are not whole (local).

        ``common`` is what megatron-core writes of the plain values of ``state``. Raises
        ``SaveRefused``, which names the values as they stand in ``state``.
        """
        walk = _Walk(part)
        walk.take(None, state)
        written = [(place, value) for place, value in walk.sharded if _is_written(value)]
        for place, value in written:
            said = misfit_of(value)
            if said:
                where = f"{_words_of(place)} (key {value.key!r})"
                raise _refusal(part, [Found(where, value.data, Misfit(said))])
        objects = [
            (_PathInState(place, value.key, " (object {!r})"), value.data)
            for place, value in written
            if isinstance(value, ShardedObject)
        ]
        common_reader = load_object if self._common_in_shard else self._load_common
        self._check(part, walk.plain, common, common_reader)
        self._check(part, objects, [value for _, value in objects], load_object)
        for place, kind in walk.altered:
            self._tell(f"part {part!r}: {_shown(_words_of(place))}", kind)

    def _tell(self, where: str, kind: type) -> None:
        """Warn, once for each place, that a value comes back as a plain dict or list."""
        if where in self._told:
            return
        self._told.add(where)
        base = "dict" if issubclass(kind, dict) else "list"
        warn_caller(
            ClassNotKeptWarning(
                f"{where} is a {_name_of(kind)}, and a restore gives a plain {base}: make the "
                f"{kind.__name__} again from it"
            )
        )

    def _check(
        self,
        part: str,
        leaves: Iterable[tuple[_PathInState | None, Any]],
        whole: Any,
        reader: Reader,
    ) -> None:
        """Raise unless ``reader`` could load ``whole``, which consists of ``leaves``."""
        seen = None
        try:
            pickled = pickle_of(whole)
            seen = (pickled.digest(), torch.serialization.get_safe_globals())
            if self._accepted.get((part, reader)) == seen:
                return
            _load_without_data(pickled, reader)
        except Exception:  # whatever a class raises when it is pickled or loaded
            if reader == self._load_common:
                self._know_loader()
            found = [each for leaf in leaves if (each := _look(*leaf, reader)) is not None]
            if found:
                raise _refusal(part, found) from found[0].error
            torch.save(whole, io.BytesIO(), pickle_module=_Pickling)  # nested too deeply, for one
        self._accepted[part, reader] = seen

    def check_made(
        self, part: str, objects: Iterable[tuple[str, io.BytesIO]], common: Iterable[Path]
    ) -> None:
        """Refuse what the maker of a request has pickled, if it could not be loaded (local).

        ``objects`` are by key, ``common`` are files. The values inside cannot be named: they are loaded
        by the loader's rule only. Raises ``SaveRefused``.
        """
        for key, value in objects:
            self._check_made(part, key, io.BytesIO(value.getvalue()), load_object)
        for path in common:
            with (
                contextlib.suppress(FileNotFoundError),
                path.open("rb") as file,
            ):  # the writer tells
                self._check_made(part, COMMON, file, self._load_common)

    def _check_made(self, part: str, key: str, file: IO[bytes], reader: Reader) -> None:
        try:
            try:
                _load_without_data(file, reader)
            except pickle.UnpicklingError:
                if reader != self._load_common:
                    raise
                self._know_loader()
                _load_without_data(file, reader)
        except StorageError:
            raise
        except Exception as error:  # whatever a class raises when it is loaded
            raise SaveRefused(
                f"part {part!r}: {key} of the request could not be loaded again, as "
                f"{reason_of(error)}: put plain numbers, text, lists or tensors into the state, or call "
                "torch.serialization.add_safe_globals wherever you save and restore",
                part=part,
                key=key,
            ) from error

    def _load_common(self, file: IO[bytes]) -> Any:
        """Load as the installed megatron-core loads ``common.pt``, as far as that is known."""
        try:
            return torch.load(file, map_location="cpu")
        except pickle.UnpicklingError:
            if not self._takes_anything:
                raise
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)

    def _know_loader(self) -> None:
        """Ask megatron-core once whether it takes any class.

        Raises ``StorageError`` if the temporary directory is full, which is no value's fault.
        """
        if self._takes_anything is None:
            self._takes_anything = _common_takes_anything()


# --------------------------------------------------------------------------------------- loaders


def load_object(file: IO[bytes]) -> Any:
    """Load as torch's planner loads an object of a shard."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.state_dict = {}
    index, nothing = MetadataIndex(_KEY), torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    planner.load_bytes(item, cast(io.BytesIO, file))
    return planner.state_dict[_KEY]


def _is_written(value: Any) -> bool:
    """True for a sharded value that this rank writes, or has to have; others' objects may be empty."""
    if isinstance(value, ShardedObject):
        return bool(is_main_replica(value.replica_id))
    return isinstance(value, ShardedBase)


class _Unsafe:
    """A class that no safe global names."""


def _common_takes_anything() -> bool:
    """True if the installed megatron-core unpickles any class from ``common.pt``; 0.13 and 0.17 do."""
    probe = io.BytesIO()
    torch.save(_Unsafe(), probe)  # into a file, torch would hide the error of a full disk
    try:
        with tempfile.TemporaryDirectory(prefix="ckptfsm-") as place:
            save_config(CheckpointingConfig("torch_dist", 1), place)
            Path(place, COMMON).write_bytes(probe.getvalue())
            dist_checkpointing.load_common_state_dict(place)
    except pickle.UnpicklingError:
        return False
    except OSError as error:
        raise StorageError(
            f"values have to be tried in a temporary directory, which cannot be used ({error}): mend "
            "it, or set TMPDIR to another one",
            file=error.filename or os.environ.get("TMPDIR"),
            errno_name=errno.errorcode.get(error.errno or 0),
            call="write",
        ) from error
    return True


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

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (ShardedBase, LocalNonpersistentObject)):
            raise Misfit(
                "megatron-core finds it in dicts and lists only, and would save rank 0's for all: take "
                "it out of the tuple or object"
            )
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        said = misfit(value)
        if said:
            raise Misfit(said)
        special = type(value) not in (torch.Tensor, torch.nn.Parameter)
        more = special or value.__dict__ or value._backward_hooks or value.is_mkldnn
        return NotImplemented if more else (torch.Size, ((),))


class _Pickling:
    """Stands for the module ``pickle`` in ``torch.save``."""

    Pickler = _Pickler


def pickle_of(value: Any) -> Pickled:
    """The pickle of a value, without the data of its tensors. Raises what its classes raise."""
    file = Pickled()
    with torch.serialization.skip_data():
        torch.save(value, cast(IO[bytes], file), pickle_module=_Pickling)
    return file


def _load_without_data(file: Pickled | IO[bytes], reader: Reader) -> None:
    file.seek(0)
    with torch.serialization.skip_data():
        reader(cast(IO[bytes], file))


def _problem(value: Any, reader: Reader) -> Exception | None:
    """The error of saving or loading one value; None if a restore could load it."""
    try:
        _load_without_data(pickle_of(value), reader)
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


# --------------------------------------------------------------------------------------- tensors


def misfit(value: Any) -> str:
    """Why the values of a tensor cannot be saved from this rank's memory, and the way out, or ""."""
    if not isinstance(value, torch.Tensor) or is_float8tensor(value):
        return ""
    if torch.nn.parameter.is_lazy(value):
        return "it is not initialized: run the module once"
    # a parameter of another class has its values in a plain tensor all the same
    plain = value.detach() if isinstance(value, torch.nn.Parameter) else value
    if type(plain) not in (torch.Tensor, torch.nn.Parameter):
        return f"its values are not in a plain tensor: {_WAYS.get(type(value).__name__, _PLAIN)}"
    if value.is_meta:
        return "it is on the meta device and has no values: materialize it first"
    if getattr(value, "_is_flat_param", False):
        return "it has one rank's part of an FSDP module: save FSDP's full state dict"
    if torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "it exists inside a transformed function only: save outside of that"
    return ""


def misfit_of(shard: ShardedBase) -> str:
    """The same for the data of a sharded value."""
    said = misfit(shard.data)
    if said or isinstance(shard, ShardedObject) or not isinstance(shard.data, torch.Tensor):
        return said
    layout = shard.data.layout
    if layout is not torch.strided:
        return f"its layout is {layout}: give x.to_dense(), or a ShardedObject or plain value of x"
    return ""


_PLAIN = "give a torch.Tensor with them"
_WAYS: Mapping[str, str] = {
    "DTensor": (
        "each rank has a part: give x.full_tensor(), or a ShardedTensor of x.to_local() with the "
        "offsets of that part"
    ),
    "AsyncCollectiveTensor": "a collective is still running: give x.wait()",
    "ShardedTensor": "each rank has a part: give a ShardedTensor of megatron-core for it",
    "FakeTensor": "it has no values: materialize it first",
}


# ---------------------------------------------------------------------------------------- words


class _PathInState(NamedTuple):
    """A place in a state: a step from another place. Put into words only if it is told."""

    before: _PathInState | None
    step: Any
    form: str = "[{!r}]"


def _words_of(place: _PathInState | None) -> str:
    steps = []
    while place is not None:
        steps.append(place.form.format(place.step))
        place = place.before
    return "".join(reversed(steps))


_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_KEPT = frozenset({dict, list, collections.OrderedDict})  # or nearly: a dict serves for the last
_PLAIN_KIND, _SHARDED_KIND, _LEFT_OUT = 1, 2, 4  # bits


@dataclasses.dataclass(slots=True)
class _Walk:
    """Takes a nested state apart. A list of scalars stays whole: it may have a million places.

    ``altered`` are dicts and lists of other classes, which megatron-core makes anew.
    """

    part: str
    plain: list[tuple[_PathInState | None, Any]] = dataclasses.field(default_factory=list)
    sharded: list[tuple[_PathInState | None, ShardedBase]] = dataclasses.field(default_factory=list)
    altered: list[tuple[_PathInState | None, type]] = dataclasses.field(default_factory=list)

    def take(self, place: _PathInState | None, value: Any) -> int:
        """Take a value apart. Returns the kinds of the values in it, as bits."""
        if isinstance(value, ShardedBase):
            self.sharded.append((place, value))
            return _SHARDED_KIND
        if isinstance(value, LocalNonpersistentObject):
            return _LEFT_OUT
        if isinstance(value, (dict, list)) and type(value) not in _KEPT:
            self.altered.append((place, type(value)))
        if isinstance(value, dict) and value:
            return self._take_dict(place, value)
        if isinstance(value, list) and not _SCALARS.issuperset(map(type, value)):
            return self._take_list(place, value)
        self.plain.append((place, value))
        return _PLAIN_KIND

    def _take_dict(self, place: _PathInState | None, value: dict[Any, Any]) -> int:
        kinds = 0
        for key, child in value.items():
            if isinstance(child, (dict, list)) and not child:
                if type(child) not in _KEPT:
                    self.altered.append((_PathInState(place, key), type(child)))
                child = {} if isinstance(child, dict) else []  # whatever class it has
            kinds |= self.take(_PathInState(place, key), child)
            if type(key) not in (str, int):
                self.plain.append((_PathInState(place, key, " key {!r}"), key))
        return kinds

    def _take_list(self, place: _PathInState | None, value: list[Any]) -> int:
        # megatron-core loads each kind of values as a list of its own, and merges these by position
        kinds = {
            self.take(_PathInState(place, number), child) for number, child in enumerate(value)
        }
        if len(kinds) > 1:
            where = _words_of(place)
            raise SaveRefused(
                f"part {self.part!r}: the list at {where} has sharded values at some of its places "
                "only, and would not be loaded as it is: give a dict in its place",
                part=self.part,
                key=where,
            )
        (kind,) = kinds
        return kind


class Places(NamedTuple):
    """Where a rank has values of which kind: trees of dicts and lists, with None for each value.

    ``plain`` are values of which the first rank's are kept for all ranks. Megatron-core merges the
    others with them as it loads: each rank's sharded values, and those that are not saved.
    """

    plain: Any
    sharded: Any
    left_out: Any


def places_of(state: Any, sharded: Any, common: Any) -> Places:
    left_out, _ = extract_nonpersistent(state)
    return Places(_tree_of(common), _tree_of(sharded), _tree_of(left_out))


def _tree_of(value: Any) -> Any:
    if isinstance(value, dict):
        # rank 0 need not know the classes of the keys
        return {k if type(k) in _SCALARS else repr(k): _tree_of(each) for k, each in value.items()}
    if isinstance(value, list) and not _SCALARS.issuperset(map(type, value)):
        return [_tree_of(each) for each in value]
    return None


def check_places(part: str, places: Mapping[int, Places]) -> None:
    """At rank 0: refuse values that megatron-core could not merge as it loads.

    ``places`` are those of each rank of the part. Raises ``SaveRefused``.
    """
    first = min(places)
    kept = places[first].plain
    clashes = [
        (*clash, rank)
        for rank, found in places.items()
        for clash in (
            *_clashes(kept, found.sharded, "", "a sharded value"),
            *_clashes(kept, found.left_out, "", "a value that is not saved"),
        )
    ]
    if clashes:
        where, one, other, _ = clashes[0]
        ranks = tuple(rank for place, _, _, rank in clashes if place == where)
        raise SaveRefused(
            f"part {part!r}: at {_shown(where)} is {other} on rank {name_ranks(ranks)} and {one} on "
            f"rank {first}, whose plain values are kept for all ranks. So it could not be loaded: give "
            "every rank the same kind of value there, or another name; in the place of a list, a dict",
            part=part,
            key=_shown(where),
            ranks=ranks,
        )


def _clashes(plain: Any, own: Any, place: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """The places at which both trees have something that cannot be merged, with both in words."""
    if isinstance(plain, dict) and isinstance(own, dict):
        for key in own.keys() & plain.keys():
            yield from _clashes(plain[key], own[key], f"{place}[{key!r}]", kind)
    elif isinstance(plain, list) and isinstance(own, list) and len(plain) == len(own):
        for number, (one, other) in enumerate(zip(plain, own, strict=True)):
            yield from _clashes(one, other, f"{place}[{number}]", kind)
    else:
        yield place, _kind_of(plain, "a plain value"), _kind_of(own, kind)


def _kind_of(tree: Any, kind: str) -> str:
    if isinstance(tree, list):
        return f"a list of {len(tree)} places"
    return kind if tree is None else "a dict"


def _look(start: _PathInState | None, value: Any, reader: Reader) -> Found | None:
    """The innermost value here that cannot be loaded; None if all can."""
    error = _problem(value, reader)
    if error is None:
        return None
    place = _words_of(start)
    seen: set[int] = set()
    while True:
        seen.add(id(value))
        if _is_refused_itself(value, error):
            break
        for step, child in _children(value):
            inner = None if id(child) in seen else _problem(child, reader)
            if inner is not None:
                place, value, error = place + step, child, inner
                break
        else:
            break
    return Found(place, value, error)


def _is_refused_itself(value: Any, error: Exception) -> bool:
    refused = _REFUSED.search(str(error))
    return refused is not None and refused[1] == _name_of(type(value))


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


def _name_of(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _refusal(part: str, found: list[Found]) -> SaveRefused:
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
    place = _shown(first.place)
    return SaveRefused(
        f"part {part!r}: the value at {place}, of type {_name_of(type(first.value))}, "
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
    shown = [f"{_shown(each.place)} ({_name_of(type(each.value))})" for each in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{', '.join(shown)}{more}"


def _shown(place: str) -> str:
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
    kind = _name_of(type(value)).rpartition(".")[2]
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
