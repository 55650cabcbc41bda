"""Reads back what a save of Megatron's would write, before the save is accepted (I12).

How values and tensors are judged is in ``dcp.read_back``. Here are the loader of ``common.pt``, and
what megatron-core makes of the places in a state.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import io
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
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

from ckptfsm.adapters.notices import warn_caller
from ckptfsm.core.errors import ClassNotKeptWarning, SaveRefused, StorageError, name_ranks
from ckptfsm.dcp.read_back import (
    WAYS,
    Found,
    Misfit,
    PathInState,
    Reader,
    StateReadBack,
    load_object,
    load_without_data,
    name_of,
    reason_of,
    refusal,
    shown,
    words_of,
)
from ckptfsm.dcp.read_back import misfit as misfit_anywhere
from ckptfsm.disk.stock import COMMON


class ReadBack(StateReadBack):
    """Judges whether a restore could load the values of this rank's parts.

    ``common_in_shard``: the common state is written as an object, not as ``common.pt``.
    """

    def __init__(self, common_in_shard: bool) -> None:
        super().__init__(misfit)
        self._common_in_shard = common_in_shard
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
                where = f"{words_of(place)} (key {value.key!r})"
                raise refusal(part, [Found(where, value.data, Misfit(said))])
        objects = [
            (PathInState(place, value.key, " (object {!r})"), value.data)
            for place, value in written
            if isinstance(value, ShardedObject)
        ]
        common_reader = load_object if self._common_in_shard else self._load_common
        self.check_leaves(part, walk.plain, common, common_reader)
        self.check_leaves(part, objects, [value for _, value in objects], load_object)
        for place, kind in walk.altered:
            self._tell(f"part {part!r}: {shown(words_of(place))}", kind)

    def _tell(self, where: str, kind: type) -> None:
        """Warn, once for each place, that a value comes back as a plain dict or list."""
        if where in self._told:
            return
        self._told.add(where)
        base = "dict" if issubclass(kind, dict) else "list"
        warn_caller(
            ClassNotKeptWarning(
                f"{where} is a {name_of(kind)}, and a restore gives a plain {base}: make the "
                f"{kind.__name__} again from it"
            )
        )

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
                load_without_data(file, reader)
            except pickle.UnpicklingError:
                if reader != self._load_common:
                    raise
                self.know_loader(reader)
                load_without_data(file, reader)
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

    def know_loader(self, reader: Reader) -> None:
        """Ask megatron-core once whether its ``common.pt`` may have any class.

        Raises ``StorageError`` if the temporary directory is full, which is no value's fault.
        """
        if reader == self._load_common and self._takes_anything is None:
            self._takes_anything = _common_takes_anything()


# --------------------------------------------------------------------------------------- loaders


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


# --------------------------------------------------------------------------------------- tensors

_WAYS: Mapping[str, str] = {
    **WAYS,
    "DTensor": (
        "each rank has a part: give x.full_tensor(), or a ShardedTensor of x.to_local() with the "
        "offsets of that part"
    ),
    "ShardedTensor": "each rank has a part: give a ShardedTensor of megatron-core for it",
    "FlatParameter": "it has one rank's part of an FSDP module: save FSDP's full state dict",
}


def misfit(value: Any) -> str:
    """Why a value cannot be saved in a pickle, see ``dcp.read_back``."""
    if isinstance(value, (ShardedBase, LocalNonpersistentObject)):
        return (
            "megatron-core finds it in dicts and lists only, and would save rank 0's for all: take it "
            "out of the tuple or object"
        )
    return "" if is_float8tensor(value) else misfit_anywhere(value, _WAYS)


def misfit_of(shard: ShardedBase) -> str:
    """The same for the data of a sharded value."""
    said = misfit(shard.data)
    if said or isinstance(shard, ShardedObject) or not isinstance(shard.data, torch.Tensor):
        return said
    layout = shard.data.layout
    if layout is not torch.strided:
        return f"its layout is {layout}: give x.to_dense(), or a ShardedObject or plain value of x"
    return ""


# ---------------------------------------------------------------------------------------- places

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_KEPT = frozenset({dict, list, collections.OrderedDict})  # or nearly: a dict serves for the last
_PLAIN_KIND, _SHARDED_KIND, _LEFT_OUT = 1, 2, 4  # bits


@dataclasses.dataclass(slots=True)
class _Walk:
    """Takes a nested state apart. A list of scalars stays whole: it may have a million places.

    ``altered`` are dicts and lists of other classes, which megatron-core makes anew.
    """

    part: str
    plain: list[tuple[PathInState | None, Any]] = dataclasses.field(default_factory=list)
    sharded: list[tuple[PathInState | None, ShardedBase]] = dataclasses.field(default_factory=list)
    altered: list[tuple[PathInState | None, type]] = dataclasses.field(default_factory=list)

    def take(self, place: PathInState | None, value: Any) -> int:
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

    def _take_dict(self, place: PathInState | None, value: dict[Any, Any]) -> int:
        kinds = 0
        for key, child in value.items():
            if isinstance(child, (dict, list)) and not child:
                if type(child) not in _KEPT:
                    self.altered.append((PathInState(place, key), type(child)))
                child = {} if isinstance(child, dict) else []  # whatever class it has
            kinds |= self.take(PathInState(place, key), child)
            if type(key) not in (str, int):
                self.plain.append((PathInState(place, key, " key {!r}"), key))
        return kinds

    def _take_list(self, place: PathInState | None, value: list[Any]) -> int:
        # megatron-core loads each kind of values as a list of its own, and merges these by position
        kinds = {self.take(PathInState(place, number), child) for number, child in enumerate(value)}
        if len(kinds) > 1:
            where = words_of(place)
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
            f"part {part!r}: at {shown(where)} is {other} on rank {name_ranks(ranks)} and {one} on "
            f"rank {first}, whose plain values are kept for all ranks. So it could not be loaded: give "
            "every rank the same kind of value there, or another name; in the place of a list, a dict",
            part=part,
            key=shown(where),
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
