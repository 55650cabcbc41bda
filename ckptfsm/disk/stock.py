"""Decides whether a stock loader would accept a directory, from its files alone. No torch.

The directory is Megatron's (``torch_dist``) if it has a ``metadata.json`` or a ``common.pt``, else in
the own format of ``torch.distributed.checkpoint`` (``dcp``): shards and their ``.metadata`` alone.

Up to megatron-core 0.18 the state common to all ranks is a file ``common.pt``. From 0.19 on it is
one object inside a shard, ``common_state/shard_0_1``; a ``common.pt`` beside that would be read
instead.
"""

from __future__ import annotations

import errno
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.formats import TORCH_DIST, Format, stock_format
from ckptfsm.core.layout import join
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import is_about_content
from ckptfsm.disk.pickle_stubs import MAX_INTEGER, METADATA, Stub, damaged_file, load_metadata_stub

CONFIG = "metadata.json"
COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
CONTENTS = "ckpt_contents.json"
UNFINISHED = f"{METADATA}.tmp"
# For all ranks together: with some 500 bytes an entry, 2 million pieces of tensors.
MAX_METADATA_BYTES = 1 << 30
MAX_COMMON_BYTES = 1 << 30  # usually some 100 KB; a trainer may put its whole data loader into it
MAX_CONFIG_BYTES = 64 << 10  # one line
MAX_DIMENSIONS = 64
_TREE_DEPTH = 3  # role/part/tree
_SHARDED_OBJECT = re.compile(r".*/shard_[0-9.]+_[0-9.]+\Z", re.DOTALL)
_PLAIN_PATH = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}){0,8}\Z"
)


@dataclass(frozen=True, slots=True)
class StockVerdict:
    """The verdict on a directory: acceptable for a stock loader or not, and its content.

    - ``reason``: "" if acceptable, else the file and its fault.
    - ``files``: the files that a loader needs, relative to the directory, each with its least size
      in bytes.
    - ``object_keys``: the values that are no tensors; of Megatron its ShardedObjects, such as
      ``rng_state/shard_0.1_1.2`` (key, offset, global shape).
    """

    acceptable: bool
    reason: str
    files: tuple[tuple[str, int], ...] = ()
    object_keys: frozenset[str] = frozenset()


def inspect_stock(
    storage: Storage, directory: str, tree: str = "", known: Format | None = None
) -> StockVerdict:
    """Decide whether a stock loader of Megatron-core or of DCP would accept ``directory``.

    ``tree`` is the name of the torch_dist directories inside ``directory``, at most three levels
    down. At least one must exist, unless ``directory`` itself has a ``.metadata``; each of them must
    be acceptable. With "", only ``directory`` itself is looked at. ``known`` is its format if a
    manifest tells it. An entry of the wrong kind (file, directory, link) is a reason against
    acceptance.

    Never raises because of the content; an ``OSError`` about the disk's health passes.
    """
    try:
        if tree:
            return _inspect_trees(storage, directory, tree)
        return _inspect(storage, directory, known)
    except DamagedRoot as error:
        file = error.facts.get("file")
        return StockVerdict(False, f"{file}: {error.message}"[:500].replace("\n", " "))


def _inspect(storage: Storage, directory: str, known: Format | None = None) -> StockVerdict:
    if _stat(storage, directory, "").kind != "dir":
        raise damaged_file(directory or ".", "not a directory")
    kind = known or stock_format(_names(storage, directory))
    small: list[tuple[str, int]] = []
    if CONFIG in kind.metadata:
        config = _read(storage, directory, CONFIG, MAX_CONFIG_BYTES)
        _check_config(config)
        small.append((CONFIG, len(config)))
    data = _read(storage, directory, METADATA, MAX_METADATA_BYTES)
    small.append((METADATA, len(data)))
    top = load_metadata_stub(data)
    stored, needed = _storage_entries(top)
    objects = _check_coverage(top, stored)
    if known is None and not kind.common:
        _refuse_rest_of_another(storage, directory, top, objects)
    for name, size in needed.items():
        _check_shard(storage, directory, name, size)
    if kind.common and COMMON_KEY in objects:
        _check_common_object(storage, directory, stored[COMMON_KEY, None])
    elif kind.common:
        common = _read(storage, directory, COMMON, MAX_COMMON_BYTES)
        _check_archive(common, COMMON)
        small.append((COMMON, len(common)))
    return StockVerdict(True, "", (*sorted(needed.items()), *small), objects)


def _refuse_rest_of_another(
    storage: Storage, directory: str, top: Stub, objects: frozenset[str]
) -> None:
    """Refuse what a save over this one left, and torch_dist without ``metadata.json``.

    Megatron's ShardedObjects tell: DCP lists the way to each key of a state (``planner_data``), and
    Megatron does not have it do so.
    """
    if UNFINISHED in _names(storage, directory):
        raise damaged_file(UNFINISHED, f"beside {METADATA}: a save over this one was cut off")
    listed = top.get("planner_data")
    for key in sorted(objects):
        if _SHARDED_OBJECT.match(key) and not (isinstance(listed, dict) and key in listed):
            raise damaged_file(CONFIG, f"missing, and {key[:120]!r} is an object of Megatron-core")


def _inspect_trees(storage: Storage, directory: str, tree: str) -> StockVerdict:
    """The combined verdict of all trees; files and keys are named from the directory's top."""
    files: list[tuple[str, int]] = []
    objects: set[str] = set()
    found: list[tuple[str, Format | None]] = []
    if METADATA in _names(storage, directory):
        found.append(("", None))
    found += [(inner, TORCH_DIST) for inner in _trees_in_use(storage, directory, tree)]
    for inner, known in found:
        try:
            verdict = _inspect(storage, join(directory, inner), known)
        except DamagedRoot as error:
            raise damaged_file(join(inner, str(error.facts.get("file"))), error.message) from None
        files += [(join(inner, name), size) for name, size in verdict.files]
        objects |= {join(inner, key) for key in verdict.object_keys}
    if not files:
        raise damaged_file(directory, f"no {tree} inside, and no {METADATA}")
    return StockVerdict(True, "", tuple(files), frozenset(objects))


def _trees_in_use(storage: Storage, directory: str, tree: str) -> list[str]:
    """The trees that a loader reads: verl 0.9 makes empty ones too, and lists those in use."""
    found = _find_trees(storage, directory, tree, _TREE_DEPTH)
    split = [path for path in found if path.count("/") == _TREE_DEPTH - 1]
    listed: set[str] = set()
    for role in sorted({path.split("/")[0] for path in split}):
        paths = _contents_of(storage, directory, role)
        trees = {path for path in paths if path.rpartition("/")[2] == tree}
        if not paths or trees - set(found):
            raise damaged_file(join(role, CONTENTS), "does not list what is there")
        listed |= trees
    for path in split:
        if path not in listed and _names(storage, join(directory, path)):
            raise damaged_file(path, "is not listed, and not empty")
    return [path for path in found if path not in split or path in listed]


def _contents_of(storage: Storage, directory: str, role: str) -> set[str]:
    """The paths in verl's list for a role. verl writes the list last: without it the save was cut
    off.
    """
    name = join(role, CONTENTS)
    try:
        contents = json.loads(_read(storage, directory, name, MAX_CONFIG_BYTES))["contents"]
        entries = [(entry["path"], entry.get("format")) for entry in contents.values()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise damaged_file(name, "not a list of contents") from None
    for path, kind in entries:
        if type(path) is not str or not _PLAIN_PATH.match(path):
            raise damaged_file(name, "names something outside of its role")
        found = _stat(storage, directory, join(role, path))
        if kind == "megatron_dist_checkpoint" and found.kind != "dir":
            raise damaged_file(join(role, path), f"not a directory but a {found.kind}")
    return {join(role, path) for path, _ in entries}


def _find_trees(storage: Storage, directory: str, tree: str, depth: int) -> list[str]:
    """Directories named ``tree`` inside ``directory``, sorted by name."""
    found: list[str] = []
    for name in _names(storage, directory):
        path = join(directory, name)
        kind = _stat(storage, path, "").kind
        if kind == "symlink":
            raise damaged_file(name, "a link")
        if name.startswith(".") or kind != "dir":
            continue
        if name == tree:
            found.append(name)
        elif depth > 1:
            found += [join(name, inner) for inner in _find_trees(storage, path, tree, depth - 1)]
    return found


# ------------------------------------------------------------------------------------- files


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise ``DamagedRoot`` for an error about the content; one about the disk's health passes."""
    try:
        yield
    except OSError as error:
        if not is_about_content(error):
            raise
        code = errno.errorcode.get(error.errno or 0, type(error).__name__)
        missing = isinstance(error, FileNotFoundError)
        raise damaged_file(name, "missing" if missing else f"cannot be read ({code})") from None


def _names(storage: Storage, directory: str) -> list[str]:
    with reading(directory):
        return storage.listdir(directory)


def _stat(storage: Storage, directory: str, name: str) -> FileStat:
    with reading(name or directory or "."):
        return storage.stat(join(directory, name))


def _size_of(storage: Storage, directory: str, name: str) -> int:
    found = _stat(storage, directory, name)
    if found.kind != "file":
        raise damaged_file(name, f"not a regular file but a {found.kind}")
    return found.size


def _read(storage: Storage, directory: str, name: str, limit: int) -> bytes:
    size = _size_of(storage, directory, name)
    if size == 0:
        raise damaged_file(name, "empty")
    if size > limit:
        raise damaged_file(name, f"{size} bytes, more than {limit}")
    data = _bytes_of(storage, directory, _Piece(name, 0, limit))
    if len(data) != size:
        raise damaged_file(name, f"{len(data)} bytes read of {size}")
    return data


def _bytes_of(storage: Storage, directory: str, piece: _Piece) -> bytes:
    with reading(piece.file):
        return storage.read(join(directory, piece.file), piece.length, piece.offset)


def _check_shard(storage: Storage, directory: str, name: str, needed: int) -> None:
    size = _size_of(storage, directory, name)
    if size < needed:
        raise damaged_file(name, f"truncated: {size} bytes, {needed} needed")


def _check_config(data: bytes) -> None:
    """Refuse a value that ``CheckpointingConfig(**...)`` or the choice of a strategy would refuse."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise damaged_file(CONFIG, "not JSON") from None
    if not isinstance(config, dict):
        raise damaged_file(CONFIG, "not a JSON object")
    expected: Mapping[str, object] = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    if "sharded_backend" not in config:
        raise damaged_file(CONFIG, "names no sharded_backend")
    for key, value in config.items():
        if key not in expected:
            raise damaged_file(CONFIG, f"unknown entry {key[:60]!r}")
        if type(value) is not type(expected[key]) or value != expected[key]:
            shown = value[:60] if isinstance(value, str) else type(value).__name__
            raise damaged_file(CONFIG, f"{key} is {shown!r}, not {expected[key]!r}")


def _check_common_object(storage: Storage, directory: str, piece: _Piece) -> None:
    """Check the common state of megatron-core 0.19, which lies inside a shard."""
    if COMMON in _names(storage, directory):
        raise damaged_file(
            COMMON, f"beside {COMMON_KEY} in {piece.file}: a loader would take the older of the two"
        )
    if piece.length > MAX_COMMON_BYTES:
        raise damaged_file(piece.file, f"{COMMON_KEY} of {piece.length} bytes, more than allowed")
    data = _bytes_of(storage, directory, piece)
    _check_archive(data, piece.file, f"{COMMON_KEY} is ")


def _check_archive(data: bytes, file: str, what: str = "") -> None:
    """Check a file of ``torch.save``, a zip archive: a file cut off has lost the directory at its
    end.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except Exception as error:
        said = f"{what}not an intact zip archive ({type(error).__name__})"
        raise damaged_file(file, said) from None
    if not any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        raise damaged_file(file, f"{what}a zip archive, but not one of torch.save")


# ---------------------------------------------------------------------------------- metadata

_Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The place of a piece of a tensor, or of an object: file, offset and length in bytes."""

    file: str
    offset: int
    length: int


def _storage_entries(top: Stub) -> tuple[dict[_Place, _Piece], dict[str, int]]:
    """The places of all pieces, and the size in bytes that each file must have for them."""
    entries = top.get("storage_data")
    if not isinstance(entries, dict):
        raise damaged_file(METADATA, "no storage_data")
    stored: dict[_Place, _Piece] = {}
    needed: dict[str, int] = {}
    for index, info in entries.items():
        key, offset = _attribute(index, "MetadataIndex", "fqn"), index.get("offset")
        if type(key) is not str:
            raise damaged_file(METADATA, "storage_data with a key that is not text")
        name = _attribute(info, "_StorageInfo", "relative_path")
        begin, length = _number(info.get("offset")), _number(info.get("length"))
        if not _is_plain_name(name):
            raise damaged_file(
                METADATA, f"names the file {str(name)[:80]!r}, not inside its directory"
            )
        if not _are_names(info.get("transform_descriptors")):
            raise damaged_file(METADATA, f"{key[:120]!r} is transformed, and nothing says how")
        stored[key, None if offset is None else _numbers(offset)] = _Piece(name, begin, length)
        needed[name] = max(needed.get(name, 0), begin + length)
    return stored, needed


def _check_coverage(top: Stub, stored: Mapping[_Place, _Piece]) -> frozenset[str]:
    """The keys of the objects. Raises ``DamagedRoot`` unless ``stored`` has every piece."""
    declared = top.get("state_dict_metadata")
    if not isinstance(declared, dict):
        raise damaged_file(METADATA, "no state_dict_metadata")
    objects: set[str] = set()
    for key, value in declared.items():
        if not isinstance(key, str) or not isinstance(value, Stub):
            raise damaged_file(METADATA, "state_dict_metadata with an entry of another kind")
        if value.name == "BytesStorageMetadata":
            objects.add(key)
            if (key, None) not in stored:
                raise damaged_file(METADATA, f"object {key[:120]!r} is stored in no file")
            continue
        for offsets in _chunk_offsets(key, value):
            if (key, offsets) not in stored:
                raise damaged_file(
                    METADATA, f"tensor {key[:120]!r}: {offsets} is stored in no file"
                )
    return frozenset(objects)


def _chunk_offsets(key: str, value: Stub) -> tuple[tuple[int, ...], ...]:
    """The offsets of a tensor's chunks, which together must fill the tensor."""
    size = _numbers(_attribute(value, "TensorStorageMetadata", "size"))
    chunks = value.get("chunks")
    if type(chunks) is not list:
        raise damaged_file(METADATA, f"tensor {key[:120]!r} without chunks")
    volumes: dict[tuple[int, ...], int] = {}
    for chunk in chunks:
        offsets = _numbers(_attribute(chunk, "ChunkStorageMetadata", "offsets"))
        sizes = _numbers(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(size):
            raise damaged_file(METADATA, f"tensor {key[:120]!r}: chunk of another dimension")
        if any(o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)):
            raise damaged_file(METADATA, f"tensor {key[:120]!r}: chunk outside of it")
        volumes[offsets] = math.prod(sizes)
    if sum(volumes.values()) < math.prod(size):
        raise damaged_file(METADATA, f"tensor {key[:120]!r}: chunks do not fill it")
    return tuple(volumes)


def _attribute(value: Any, name: str, attribute: str) -> Any:
    if not isinstance(value, Stub) or value.name != name:
        raise damaged_file(METADATA, f"another object where a {name} belongs")
    return value.get(attribute)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise damaged_file(METADATA, "an offset or size that is not a number")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """The content of a ``torch.Size``."""
    if not isinstance(value, Stub) or value.name != "Size" or len(value.args) != 1:
        raise damaged_file(METADATA, "another object where a torch.Size belongs")
    numbers = value.args[0]
    if type(numbers) is not tuple or len(numbers) > MAX_DIMENSIONS:
        raise damaged_file(METADATA, "a torch.Size that is no tuple of dimensions")
    return tuple([_number(n) for n in numbers])


def _are_names(value: Any) -> bool:
    """True for the names of what DCP did to the bytes (compressed, say); None if it did nothing.

    Which of them a loader knows, the files cannot tell.
    """
    return value is None or (type(value) is list and all(type(each) is str for each in value))


def _is_plain_name(name: Any) -> bool:
    if type(name) is not str or "\0" in name or len(name) > 4096:
        return False
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return False  # no file has such a name that a manifest could list
    return all(piece not in ("", ".", "..") for piece in name.split("/"))
