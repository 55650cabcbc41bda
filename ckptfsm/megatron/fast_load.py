"""Loads the tensors of a torch_dist checkpoint of ours straight from its files, and verifies these.

Stock's load opens each item with ``torch.load``, one after the other, and copies it twice. Where a
rank wants a tensor exactly as it is stored, its bytes lie in a file as they do in memory. Then the
file is read whole, past the page cache, with several reads in flight (``disk.pieces``). Stock's load
does the rest: objects, other shardings or dtypes, files of which less than half is wanted.

The place of the data in a blob is never taken from the disk. Torch makes the head for the wanted
structure, as for a save, and the stored head has to be the same. Metadata is read only after its digest
was compared. A tensor whose place is odd in any way is left to stock's load.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import DamagedRoot, RestoreFailed
from ckptfsm.core.layout import join
from ckptfsm.core.parts import PerRank
from ckptfsm.core.ports import Storage
from ckptfsm.dcp.blobs import make_template
from ckptfsm.disk.pieces import Piece, ToRead, first_bad_file
from ckptfsm.megatron.compat import cpu_devices, process_group
from ckptfsm.megatron.per_rank import WHOLE, with_objects
from ckptfsm.megatron.read_back import reason_of
from ckptfsm.megatron.torch_dist import read_planned
from ckptfsm.writers.plain_files import file_spec, load_file

_WORTH_IT = 0.5  # of a file's bytes are wanted, or stock's load reads less
_METADATA = ".metadata"


class Filled(NamedTuple):
    """Names a shard and its memory. A ``FastLoad`` keeps its tensors, so no address is used again."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int


def filled_of(shard: ShardedTensor) -> Filled | None:
    """The name of a shard; None if it has no memory."""
    data = shard.data
    if data is None:
        return None
    offset, shape = tuple(shard.global_offset), tuple(data.shape)
    return Filled(shard.key, offset, shape, data.dtype, data.device, data.data_ptr())


class Blob(NamedTuple):
    """The form of the blob of a contiguous tensor: its first bytes, and its size."""

    head: bytes
    size: int


@dataclass(slots=True)
class Target:
    """A tensor to be filled: its bytes in memory, and the place of its blob in a file.

    ``filled`` counts the bytes so far. ``same`` turns False at a byte of the head that differs.
    """

    shard: Filled | None
    bytes: torch.Tensor
    blob: Blob
    start: int
    filled: int = 0
    same: bool = True

    @property
    def end(self) -> int:
        """The end of the blob in its file."""
        return self.start + self.blob.size

    @property
    def is_full(self) -> bool:
        return self.same and self.filled == len(self.bytes)

    def take(self, offset: int, view: memoryview, data: torch.Tensor) -> None:
        """Compare or copy the part of a piece that is this tensor's. Pieces come in order."""
        head, at = self.blob.head, self.start - offset  # places count from the piece's start
        low, high = max(at, 0), min(at + len(head), len(view))
        if low < high and view[low:high] != head[low - at : high - at]:
            self.same = False
        at += len(head)
        low, high = max(at, 0), min(at + len(self.bytes), len(view))
        if self.same and low < high:
            self.bytes[low - at : high - at].copy_(data[low:high])
            self.filled += high - low


class FastLoad:
    """The files that a rank reads whole, see ``ports.VerifiedReading``. ``targets`` are by file."""

    def __init__(
        self, storage: Storage, location: str, targets: Mapping[FileEntry, Sequence[Target]]
    ) -> None:
        self._storage, self._location = storage, location
        self._entries = list(targets)
        self._targets = [sorted(targets[e], key=attrgetter("start")) for e in self._entries]
        self._stopped = threading.Event()
        self._waiting: list[list[Target]] = []
        self.files = frozenset(entry.name for entry in self._entries)

    def run(self, alone: Collection[str]) -> str:
        """See ``ports.VerifiedReading``. A file that several ranks read comes through the page cache."""
        files = [
            ToRead(join(self._location, e.name), e.bytes, e.digest or "", e.name in alone)
            for e in self._entries
        ]
        self._waiting = [list(reversed(targets)) for targets in self._targets]
        self._await_devices()
        bad = first_bad_file(self._storage, files, self._take, self._stopped.is_set)
        self._await_devices()
        if bad is None:
            return ""
        return f"{self._entries[bad].name} has another content than was written"

    def stop(self) -> None:
        self._stopped.set()

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        return load_parts(parts, directories, drop, self.full())

    def full(self) -> frozenset[Filled | None]:
        """The shards that are filled."""
        return frozenset(t.shard for targets in self._targets for t in targets if t.is_full)

    def _take(self, piece: Piece) -> None:
        """Give a piece to the targets that it overlaps. Those before it need nothing more."""
        waiting, end = self._waiting[piece.file], piece.offset + len(piece.view)
        data = torch.frombuffer(piece.view, dtype=torch.uint8) if piece.view else _NO_BYTES
        while waiting and waiting[-1].end <= piece.offset:
            waiting.pop()
        for target in reversed(waiting):
            if target.start >= end:
                break
            target.take(piece.offset, piece.view, data)

    def _await_devices(self) -> None:
        """Wait for accelerators: this thread's copies are not in order with the trainer's work."""
        devices = {t.bytes.device for targets in self._targets for t in targets}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_NOWHERE = ""

# -------------------------------------------------------------------------------------- planning


def plan_fast_load(
    storage: Storage,
    location: str,
    parts: Mapping[str, tuple[str, Any]],
    files: Sequence[FileEntry],
) -> FastLoad | None:
    """See ``ports.Driver.plan_reading``."""
    entries = {entry.name: entry for entry in files}
    form = cache(form_of)
    targets: dict[FileEntry, list[Target]] = defaultdict(list)
    for directory, state in parts.values():
        index = join(directory, _METADATA)
        metadata = _metadata_of(storage, location, entries.get(index))
        if metadata is None:
            continue
        for shard in _plain_shards(state):
            found = _place_of(metadata, shard)
            entry = entries.get(join(directory, found[0])) if found else None
            if found is None or entry is None or entry.digest is None:
                continue
            _, start, length = found
            blob = form(shard.data.dtype, _stored_shape(shard))
            if blob is None or blob.size != length or not 0 <= start <= entry.bytes - length:
                continue
            targets[entry].append(_target_of(shard, blob, start))
    worth = {}
    for entry, found_in in targets.items():
        wanted = {target.start: len(target.bytes) for target in found_in}
        if sum(wanted.values()) >= _WORTH_IT * entry.bytes:
            worth[entry] = found_in
    return FastLoad(storage, location, worth) if worth else None


def _metadata_of(storage: Storage, location: str, entry: FileEntry | None) -> Metadata | None:
    """The metadata of a part; None if it is not ours, or damaged: those who verify it will tell."""
    if entry is None or entry.digest is None:
        return None
    try:
        data = storage.read(join(location, entry.name), entry.bytes + 1)
    except FileNotFoundError:
        return None
    if DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(data) != entry.digest:
        return None
    try:
        return read_planned(data)
    except DamagedRoot:  # a class of a later torch or megatron-core
        return None


def _plain_shards(state: Any) -> Iterator[ShardedTensor]:
    """The shards of a state with data that can be filled byte by byte, and share no memory."""
    prepared, _, _ = load_preprocess(state)
    shards = [v for v in nested_values(prepared) if isinstance(v, ShardedTensor) and _is_plain(v)]
    shards.sort(key=_place_in_memory)
    groups: list[list[ShardedTensor]] = []
    end = (_NOWHERE, 0)
    for shard in shards:
        device, address = _place_in_memory(shard)
        if (device, address) < end:
            groups[-1].append(shard)
        else:
            groups.append([shard])
        end = max(end, (device, address + shard.data.numel() * shard.data.itemsize))
    return (group[0] for group in groups if len(group) == 1)


def _place_in_memory(shard: ShardedTensor) -> tuple[str, int]:
    return str(shard.data.device), shard.data.data_ptr()


def _is_plain(shard: ShardedTensor) -> bool:
    """True for a contiguous tensor whose values are its bytes, and which stock fills in place."""
    data = shard.data
    return (
        type(data) in (torch.Tensor, torch.nn.Parameter)
        and data.layout is torch.strided
        and data.device.type in ("cpu", "cuda")
        and data.numel() > 0
        and data.is_contiguous()
        and not data.is_quantized
        and not data.is_conj()
        and not data.is_neg()
        and not data.is_inference()
        and not shard.allow_shape_mismatch
        and getattr(shard, "flattened_range", None) is None
    )


def _stored_shape(shard: ShardedTensor) -> tuple[int, ...]:
    return (1,) * shard.prepend_axis_num + tuple(shard.local_shape)


def _place_of(metadata: Metadata, shard: ShardedTensor) -> tuple[str, int, int] | None:
    """File, offset and length of the item that is exactly this shard; None if there is none."""
    about = metadata.state_dict_metadata.get(shard.key)
    offset = tuple(shard.global_offset)
    if (
        not isinstance(about, TensorStorageMetadata)
        or (getattr(metadata, "mcore_data", None) or {}).get(shard.key)
        or about.properties.dtype != shard.data.dtype
        or tuple(about.size) != tuple(shard.global_shape)
        or not any(
            tuple(chunk.offsets) == offset and tuple(chunk.sizes) == _stored_shape(shard)
            for chunk in about.chunks
        )
    ):
        return None
    info = (metadata.storage_data or {}).get(MetadataIndex(shard.key, torch.Size(offset)))
    if info is None or getattr(info, "transform_descriptors", None):
        return None
    return info.relative_path, info.offset, info.length


def form_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Blob | None:
    """The blob of such a tensor as torch writes it now; None if that is in an unknown way."""
    try:
        made = make_template(torch.empty(shape, dtype=dtype))  # untouched, so it costs nothing
        return Blob(made.head, len(made.head) + made.data_bytes + len(made.tail))
    except Exception:  # any surprise in the format of a new torch
        return None


def _target_of(shard: ShardedTensor, blob: Blob, start: int) -> Target:
    with torch.inference_mode(False):  # the thread that fills it is not in the caller's mode
        flat = shard.data.detach().reshape(-1).view(torch.uint8)
    return Target(filled_of(shard), flat, blob, start)


# --------------------------------------------------------------------------------- stock's load


def load_parts(
    parts: Mapping[str, Any],
    directories: Mapping[str, str],
    drop: set[str],
    full: Collection[Filled | None] = (),
) -> Mapping[str, Any]:
    """See ``ports.Driver.load``. Tensors whose memory is in ``full`` are filled already."""
    with cpu_devices(), process_group():
        return {
            name: _load_part(name, state, directories[name], drop, full)
            for name, state in parts.items()
        }


def _load_part(
    name: str, state: Any, directory: str, drop: set[str], full: Collection[Filled | None]
) -> Any:
    """Load a part. Overlaps were ruled out before, see ``ports.Driver.check``."""
    if file_spec(name, state) is not None:
        return load_file(name, state, directory)
    if isinstance(state, PerRank):
        return _load_part(name, with_objects(state), directory, drop, full).get(WHOLE)
    state = with_objects(state)
    strategy = LoadTheRest(get_default_load_sharded_strategy(directory), full) if full else None
    try:
        return dist_checkpointing.load(
            _without(state, drop),
            directory,
            sharded_strategy=strategy,
            validate_access_integrity=False,
        )
    except pickle.UnpicklingError as error:  # of a save before such values were refused
        raise RestoreFailed(
            f"part {name!r} has plain values that torch's loader refuses: {reason_of(error)}. If you "
            "trust who wrote it, start once with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the "
            "environment, and put plain numbers, text, lists or tensors in their place",
            part=name,
            file=directory,
        ) from error


def _without(state: Any, drop: set[str]) -> Any:
    """A copy of a nested state dict without the sharded objects of these keys."""
    if isinstance(state, dict):
        return {
            key: _without(value, drop)
            for key, value in state.items()
            if not (isinstance(value, ShardedObject) and value.key in drop)
        }
    if isinstance(state, list):
        kept = [v for v in state if not (isinstance(v, ShardedObject) and v.key in drop)]
        return [_without(value, drop) for value in kept]
    return state


class LoadTheRest:
    """Megatron-core's ``LoadShardedStrategy`` for the values that are not filled yet.

    Everything but ``load`` is the strategy ``base``'s. The state is loaded as a flat dict, so that
    no place in a list moves, and put together again.
    """

    def __init__(self, base: Any, full: Collection[Filled | None]) -> None:
        self._base, self._full = base, full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *more: Any) -> Any:
        """Load the rest (collective, as ``base.load`` is)."""
        rest: dict[str, Any] = {}
        state = self._split(sharded_state_dict, rest)
        return _put_together(state, self._base.load(rest, checkpoint_dir, *more))

    def _split(self, value: Any, rest: dict[str, Any]) -> Any:
        """The value with filled tensors, and with a name in ``rest`` for everything else."""
        if isinstance(value, dict):
            return {key: self._split(each, rest) for key, each in value.items()}
        if isinstance(value, list):
            return [self._split(each, rest) for each in value]
        if isinstance(value, ShardedTensor) and filled_of(value) in self._full:
            return value.data.detach()
        name = str(len(rest))
        rest[name] = value
        return _Later(name)


class _Later(NamedTuple):
    """Stands for the value with this name in the flat dict."""

    name: str


def _put_together(value: Any, loaded: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _put_together(each, loaded) for key, each in value.items()}
    if isinstance(value, list):
        return [_put_together(each, loaded) for each in value]
    return loaded[value.name] if isinstance(value, _Later) else value
