"""Decides whether a stock loader would accept a torch_dist directory, from its files alone.

Rules:
* No torch, no megatron, no ``pickle``. ``.metadata`` is a pickle, but a standard unpickler is not
  safe on a hostile one even with an allow-list: hashing a deeply nested tuple overflows the C stack
  and kills the process, one memo opcode can ask for gigabytes. So the few opcodes that real files
  use are interpreted here. Nothing is imported or called; a global outside ``ALLOWED_GLOBALS``, an
  opcode outside the table, and a dict key that is not a string or a stub are refused.
* The verdict is a value: ``inspect_stock`` does not raise for anything that can be on a disk.
* Every read is bounded, and every file is looked at once, without following links.

The globals and opcodes were taken from files written by megatron-core 0.13.1, 0.14.0, 0.15.0 and
0.16.1 with torch 2.13 (``all_local_plans`` included), and 0.17.1, 0.18.2 and 0.19.2 with torch 2.14.

What is common to all ranks is a file ``common.pt`` up to megatron-core 0.18. From 0.19 on it is one
object, ``common_state/shard_0_1``, inside a shard; a ``common.pt`` beside it would be read in its place.
"""

from __future__ import annotations

import errno
import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.layout import join
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import says_what_is_there

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
CONTENTS = "ckpt_contents.json"
MAX_METADATA_BYTES = (
    1 << 30
)  # of all ranks: at some 500 bytes an entry, 2 million pieces of tensors
MAX_COMMON_BYTES = 1 << 30  # usually some 100 KB; a trainer may put its whole data loader into it
MAX_CONFIG_BYTES = 64 << 10  # one line
MAX_DIMENSIONS = 64
_TREE_DEPTH = 3  # role/part/tree
_PLAIN_PATH = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}){0,8}\Z"
)
MAX_INTEGER = (1 << 63) - 1

_DCP = "torch.distributed.checkpoint"
# fmt: off
_DTYPES = (
    "bfloat16", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bool", "complex128",
    "complex32", "complex64", "float16", "float32", "float4_e2m1fn_x2", "float64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int1", "int16", "int2",
    "int3", "int32", "int4", "int5", "int6", "int64", "int7", "int8", "qint32", "qint8", "quint2x4",
    "quint4x2", "quint8", "uint1", "uint16", "uint2", "uint3", "uint32", "uint4", "uint5", "uint6",
    "uint64", "uint7", "uint8",
)
# fmt: on
ALLOWED_GLOBALS: frozenset[tuple[str, str]] = frozenset(
    [
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.filesystem", "_StoragePrefix"),  # in a local plan that was cached and reused
        (f"{_DCP}.planner", "SavePlan"),
        (f"{_DCP}.planner", "WriteItem"),
        (f"{_DCP}.planner", "WriteItemType"),
        (f"{_DCP}.planner", "TensorWriteData"),
        (f"{_DCP}.planner", "BytesIOWriteData"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),  # 0.15
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),  # up to 0.15
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),  # StorageMeta.checkpoint_id
        ("pathlib._local", "PosixPath"),  # the same, Python 3.13
        *(("torch", name) for name in _DTYPES),
    ]
)


@dataclass(frozen=True, slots=True)
class StockVerdict:
    """Whether a stock loader would accept a directory, and what is in it.

    ``reason`` is "" when acceptable, else names the file and what is wrong. ``files`` are the files
    a loader needs, relative to the directory, each with the bytes it must at least have;
    ``total_bytes`` is their sum. ``object_keys`` are Megatron's ShardedObjects, such as
    ``rng_state/shard_0.1_1.2`` (key, offset, global shape); ``tensor_keys`` its ShardedTensors.
    """

    acceptable: bool
    reason: str
    files: tuple[tuple[str, int], ...] = ()
    total_bytes: int = 0
    object_keys: frozenset[str] = frozenset()
    tensor_keys: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class Stub:
    """Stands for an object in ``.metadata``: the name of its class, and what it was built from.

    Compared and hashed by identity, so that no content of a file decides how long that takes.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def get(self, attribute: str) -> Any:
        """The attribute of the real object, or None."""
        return self.state.get(attribute) if type(self.state) is dict else None


@dataclass(eq=False, frozen=True, slots=True)
class _Global:
    """An allowed global before it is called; also what a dtype stays."""

    name: str


def inspect_stock(storage: Storage, directory: str, tree: str = "") -> StockVerdict:
    """Whether a stock Megatron-core loader would accept ``directory``; never raises for content.

    ``tree`` is the name of the torch_dist directories inside it, at most three levels down: there must
    be one, and each must be acceptable. "" says that ``directory`` is one itself. What is no file or
    directory where one must be is a reason too; an error that does not tell what is there is raised.
    """
    try:
        return _inspect_trees(storage, directory, tree) if tree else _inspect(storage, directory)
    except DamagedRoot as error:
        file = error.facts.get("file")
        return StockVerdict(False, f"{file}: {error.message}"[:500].replace("\n", " "))


def load_metadata_stub(data: bytes) -> Stub:
    """The content of a ``.metadata`` file as stubs. Raises ``DamagedRoot`` (``file``)."""
    try:
        top = _Machine(data).run()
    except IndexError:
        raise _damaged(METADATA, "truncated or malformed pickle") from None
    except (ValueError, TypeError) as error:
        raise _damaged(METADATA, f"malformed pickle ({type(error).__name__})") from None
    if type(top) is not Stub or top.name not in ("Metadata", "MCoreMetadata"):
        raise _damaged(METADATA, "holds no Metadata object")
    return top


def _damaged(file: str, message: str) -> DamagedRoot:
    return DamagedRoot(message, file=file)


def _inspect(storage: Storage, directory: str) -> StockVerdict:
    if _stat(storage, directory, "").kind != "dir":
        raise _damaged(directory or ".", "not a directory")
    config = _read(storage, directory, CONFIG, MAX_CONFIG_BYTES)
    _check_config(config)
    data = _read(storage, directory, METADATA, MAX_METADATA_BYTES)
    top = load_metadata_stub(data)
    stored, needed = _storage_entries(top)
    tensors, objects = _check_coverage(top, stored)
    for name, size in needed.items():
        _check_shard(storage, directory, name, size)
    small = [(CONFIG, len(config)), (METADATA, len(data))]
    if COMMON_KEY in objects:
        _check_common_object(storage, directory, stored[COMMON_KEY, None])
    else:
        common = _read(storage, directory, COMMON, MAX_COMMON_BYTES)
        _check_archive(common, COMMON)
        small.append((COMMON, len(common)))
    files = (*sorted(needed.items()), *small)
    total = sum(size for _, size in files)
    return StockVerdict(True, "", files, total, objects, tensors)


def _inspect_trees(storage: Storage, directory: str, tree: str) -> StockVerdict:
    """The verdicts of all trees as one; files and keys are named from the directory's top."""
    files: list[tuple[str, int]] = []
    objects: set[str] = set()
    tensors: set[str] = set()
    for inner in _trees_in_use(storage, directory, tree):
        try:
            found = _inspect(storage, join(directory, inner))
        except DamagedRoot as error:
            raise _damaged(join(inner, str(error.facts.get("file"))), error.message) from None
        files += [(join(inner, name), size) for name, size in found.files]
        objects |= {join(inner, key) for key in found.object_keys}
        tensors |= {join(inner, key) for key in found.tensor_keys}
    if not files:
        raise _damaged(directory, f"no {tree} inside")
    total = sum(size for _, size in files)
    return StockVerdict(True, "", tuple(files), total, frozenset(objects), frozenset(tensors))


def _trees_in_use(storage: Storage, directory: str, tree: str) -> list[str]:
    """The trees that a loader reads: verl 0.9 makes empty ones too, and lists what is in use."""
    found = _find_trees(storage, directory, tree, _TREE_DEPTH)
    split = [path for path in found if path.count("/") == _TREE_DEPTH - 1]
    listed: set[str] = set()
    for role in sorted({path.split("/")[0] for path in split}):
        paths = _contents_of(storage, directory, role)
        trees = {path for path in paths if path.rpartition("/")[2] == tree}
        if not paths or trees - set(found):
            raise _damaged(join(role, CONTENTS), "does not list what is there")
        listed |= trees
    for path in split:
        if path not in listed and _names(storage, join(directory, path)):
            raise _damaged(path, "is not listed, and not empty")
    return [path for path in found if path not in split or path in listed]


def _contents_of(storage: Storage, directory: str, role: str) -> set[str]:
    """What verl lists of a role, last of all: without that list the save was cut off."""
    name = join(role, CONTENTS)
    try:
        contents = json.loads(_read(storage, directory, name, MAX_CONFIG_BYTES))["contents"]
        entries = [(entry["path"], entry.get("format")) for entry in contents.values()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise _damaged(name, "not a list of contents") from None
    for path, kind in entries:
        if type(path) is not str or not _PLAIN_PATH.match(path):
            raise _damaged(name, "names something outside of its role")
        found = _stat(storage, directory, join(role, path))
        if kind == "megatron_dist_checkpoint" and found.kind != "dir":
            raise _damaged(join(role, path), f"not a directory but a {found.kind}")
    return {join(role, path) for path, _ in entries}


def _find_trees(storage: Storage, directory: str, tree: str, depth: int) -> list[str]:
    """Directories called ``tree`` inside ``directory``, in the order of their names."""
    found: list[str] = []
    for name in _names(storage, directory):
        path = join(directory, name)
        kind = _stat(storage, path, "").kind
        if kind == "symlink":
            raise _damaged(name, "a link")
        if name.startswith(".") or kind != "dir":
            continue
        if name == tree:
            found.append(name)
        elif depth > 1:
            found += [join(name, inner) for inner in _find_trees(storage, path, tree, depth - 1)]
    return found


# ------------------------------------------------------------------------------------- files


def _names(storage: Storage, directory: str) -> list[str]:
    try:
        return storage.listdir(directory)
    except OSError as error:
        if not says_what_is_there(error):
            raise
        raise _damaged(directory, _os_reason(error)) from None


def _os_reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"cannot be read ({code})"


def _stat(storage: Storage, directory: str, name: str) -> FileStat:
    try:
        return storage.stat(join(directory, name))
    except OSError as error:
        if not says_what_is_there(error):
            raise
        raise _damaged(name or directory or ".", _os_reason(error)) from None


def _read(storage: Storage, directory: str, name: str, limit: int) -> bytes:
    found = _stat(storage, directory, name)
    if found.kind != "file":
        raise _damaged(name, f"not a regular file but a {found.kind}")
    if found.size == 0:
        raise _damaged(name, "empty")
    if found.size > limit:
        raise _damaged(name, f"{found.size} bytes, more than {limit}")
    data = _bytes_of(storage, directory, _Piece(name, 0, limit))
    if len(data) != found.size:
        raise _damaged(name, f"{len(data)} bytes read of {found.size}")
    return data


def _bytes_of(storage: Storage, directory: str, piece: _Piece) -> bytes:
    try:
        return storage.read(join(directory, piece.file), piece.length, piece.offset)
    except OSError as error:
        if not says_what_is_there(error):
            raise
        raise _damaged(piece.file, _os_reason(error)) from None


def _check_shard(storage: Storage, directory: str, name: str, needed: int) -> None:
    found = _stat(storage, directory, name)
    if found.kind != "file":
        raise _damaged(name, f"not a regular file but a {found.kind}")
    if found.size < needed:
        raise _damaged(name, f"truncated: {found.size} bytes, {needed} needed")


def _check_config(data: bytes) -> None:
    """Refuses what ``CheckpointingConfig(**...)`` or the choice of a strategy would refuse."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(CONFIG, "not JSON") from None
    if not isinstance(config, dict):
        raise _damaged(CONFIG, "not a JSON object")
    expected: Mapping[str, object] = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    if "sharded_backend" not in config:
        raise _damaged(CONFIG, "names no sharded_backend")
    for key, value in config.items():
        if key not in expected:
            raise _damaged(CONFIG, f"unknown entry {key[:60]!r}")
        if type(value) is not type(expected[key]) or value != expected[key]:
            shown = value[:60] if isinstance(value, str) else type(value).__name__
            raise _damaged(CONFIG, f"{key} is {shown!r}, not {expected[key]!r}")


def _check_common_object(storage: Storage, directory: str, piece: _Piece) -> None:
    """The common state of megatron-core 0.19, which lies inside a shard."""
    if COMMON in _names(storage, directory):
        raise _damaged(
            COMMON, f"beside {COMMON_KEY} in {piece.file}: a loader would take the older of the two"
        )
    if piece.length > MAX_COMMON_BYTES:
        raise _damaged(piece.file, f"{COMMON_KEY} of {piece.length} bytes, more than allowed")
    data = _bytes_of(storage, directory, piece)
    _check_archive(data, piece.file, f"{COMMON_KEY} is ")


def _check_archive(data: bytes, file: str, what: str = "") -> None:
    """``torch.save`` writes a zip archive; its directory, at the end, goes when it is cut off."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except Exception as error:
        said = f"{what}not an intact zip archive ({type(error).__name__})"
        raise _damaged(file, said) from None
    if not any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        raise _damaged(file, f"{what}a zip archive, but not one of torch.save")


# ---------------------------------------------------------------------------------- metadata

_Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a piece of a tensor, or an object, is stored."""

    file: str
    offset: int
    length: int


def _storage_entries(top: Stub) -> tuple[dict[_Place, _Piece], dict[str, int]]:
    """Where the pieces are stored, and how many bytes each file must have for that."""
    entries = top.get("storage_data")
    if type(entries) is not dict:
        raise _damaged(METADATA, "no storage_data")
    stored: dict[_Place, _Piece] = {}
    needed: dict[str, int] = {}
    for index, info in entries.items():
        key, offset = _attribute(index, "MetadataIndex", "fqn"), index.get("offset")
        if type(key) is not str:
            raise _damaged(METADATA, "storage_data with a key that is not text")
        name = _attribute(info, "_StorageInfo", "relative_path")
        begin, length = _number(info.get("offset")), _number(info.get("length"))
        if not _is_plain_name(name):
            raise _damaged(METADATA, f"names the file {str(name)[:80]!r}, not inside its directory")
        stored[key, None if offset is None else _numbers(offset)] = _Piece(name, begin, length)
        needed[name] = max(needed.get(name, 0), begin + length)
    return stored, needed


def _check_coverage(
    top: Stub, stored: Mapping[_Place, _Piece]
) -> tuple[frozenset[str], frozenset[str]]:
    """The keys of tensors and of objects, every piece of each being in ``stored``."""
    declared = top.get("state_dict_metadata")
    if type(declared) is not dict:
        raise _damaged(METADATA, "no state_dict_metadata")
    tensors: set[str] = set()
    objects: set[str] = set()
    for key, value in declared.items():
        if type(key) is not str or type(value) is not Stub:
            raise _damaged(METADATA, "state_dict_metadata with an entry of another kind")
        if value.name == "BytesStorageMetadata":
            objects.add(key)
            if (key, None) not in stored:
                raise _damaged(METADATA, f"object {key[:120]!r} is stored in no file")
            continue
        tensors.add(key)
        for offsets in _chunk_offsets(key, value):
            if (key, offsets) not in stored:
                raise _damaged(METADATA, f"tensor {key[:120]!r}: {offsets} is stored in no file")
    return frozenset(tensors), frozenset(objects)


def _chunk_offsets(key: str, value: Stub) -> tuple[tuple[int, ...], ...]:
    """Where the chunks of a tensor are; together they must fill it."""
    size = _numbers(_attribute(value, "TensorStorageMetadata", "size"))
    chunks = value.get("chunks")
    if type(chunks) is not list:
        raise _damaged(METADATA, f"tensor {key[:120]!r} without chunks")
    volumes: dict[tuple[int, ...], int] = {}
    for chunk in chunks:
        offsets = _numbers(_attribute(chunk, "ChunkStorageMetadata", "offsets"))
        sizes = _numbers(chunk.get("sizes"))
        if not len(offsets) == len(sizes) == len(size):
            raise _damaged(METADATA, f"tensor {key[:120]!r}: chunk of another dimension")
        if any(o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)):
            raise _damaged(METADATA, f"tensor {key[:120]!r}: chunk outside of it")
        volumes[offsets] = math.prod(sizes)
    if sum(volumes.values()) < math.prod(size):
        raise _damaged(METADATA, f"tensor {key[:120]!r}: chunks do not fill it")
    return tuple(volumes)


def _attribute(value: Any, name: str, attribute: str) -> Any:
    if type(value) is not Stub or value.name != name:
        raise _damaged(METADATA, f"another object where a {name} belongs")
    return value.get(attribute)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise _damaged(METADATA, "an offset or size that is not a number")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """The content of a ``torch.Size``."""
    if type(value) is not Stub or value.name != "Size" or len(value.args) != 1:
        raise _damaged(METADATA, "another object where a torch.Size belongs")
    numbers = value.args[0]
    if type(numbers) is not tuple or len(numbers) > MAX_DIMENSIONS:
        raise _damaged(METADATA, "a torch.Size that is no tuple of dimensions")
    return tuple([_number(n) for n in numbers])


def _is_plain_name(name: Any) -> bool:
    if type(name) is not str or "\0" in name or len(name) > 4096:
        return False
    return all(piece not in ("", ".", "..") for piece in name.split("/"))


# ------------------------------------------------------------------------------------ pickle


@dataclass(eq=False, slots=True)
class _Machine:
    """The pickle stack machine, for the opcodes real files use. One file, then thrown away."""

    data: bytes
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)

    def run(self) -> Any:
        """The object in the file. Raises IndexError, ValueError, TypeError, or our own."""
        data, memo, handlers = self.data, self.memo, _HANDLERS
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == _MEMOIZE:  # with the next two, half of a real file
                memo.append(self.stack[-1])
            elif opcode == _LONG_BINGET:
                self.stack.append(memo[int.from_bytes(data[self.at : self.at + 4], "little")])
                self.at += 4
            elif opcode == _BINGET:
                self.stack.append(memo[data[self.at]])
                self.at += 1
            elif opcode == _STOP:
                break
            else:
                handlers[opcode](self)
        if len(self.stack) != 1 or self.marks or self.at != len(data):
            raise ValueError("objects or bytes are left over")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """The next bytes; fewer in a file that is cut off, whose next opcode then does not exist."""
        begin = self.at
        self.at += count
        return self.data[begin : self.at]

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items


def _resolve(module: Any, name: Any) -> _Global:
    """The counterpart of ``find_class``: a name, never an object of that name."""
    if type(module) is not str or type(name) is not str:
        raise TypeError("global without a name")
    if (module, name) not in ALLOWED_GLOBALS:
        raise _damaged(METADATA, f"global {module[:100]}.{name[:100]} does not belong there")
    return _Global(name)


def _op_refused(m: _Machine) -> None:
    raise _damaged(METADATA, f"pickle opcode 0x{m.data[m.at - 1]:02x} does not belong there")


def _op_proto(m: _Machine) -> None:
    if m.take(1)[0] > 5:
        raise ValueError("unknown protocol")


def _op_frame(m: _Machine) -> None:
    m.take(8)  # its length only helps to read ahead


def _op_mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _op_none(m: _Machine) -> None:
    m.stack.append(None)


def _op_true(m: _Machine) -> None:
    m.stack.append(True)


def _op_false(m: _Machine) -> None:
    m.stack.append(False)


def _op_int1(m: _Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _op_int2(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(2), "little"))


def _op_int4(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _op_long(m: _Machine) -> None:
    count = m.take(1)[0]
    if count > 9:
        raise ValueError("number beyond 64 bits")
    m.stack.append(int.from_bytes(m.take(count), "little", signed=True))


def _op_text1(m: _Machine) -> None:
    begin = m.at + 1
    end = m.at = begin + m.data[m.at]
    m.stack.append(str(m.data[begin:end], "utf-8"))


def _op_text4(m: _Machine) -> None:
    count = int.from_bytes(m.take(4), "little")
    m.stack.append(str(m.take(count), "utf-8"))


def _op_empty_tuple(m: _Machine) -> None:
    m.stack.append(())


def _op_tuple1(m: _Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


def _op_tuple2(m: _Machine) -> None:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)


def _op_tuple3(m: _Machine) -> None:
    last = m.stack.pop()
    middle = m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)


def _op_tuple(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(tuple(items))


def _op_empty_list(m: _Machine) -> None:
    m.stack.append([])


def _op_append(m: _Machine) -> None:
    value = m.stack.pop()
    _top(m, list).append(value)


def _op_appends(m: _Machine) -> None:
    items = m.pop_mark()
    _top(m, list).extend(items)


def _op_empty_dict(m: _Machine) -> None:
    m.stack.append({})


def _op_setitem(m: _Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    _set(_top(m, dict), key, value)


def _op_setitems(m: _Machine) -> None:
    items = m.pop_mark()
    if len(items) % 2:
        raise ValueError("key without a value")
    target = _top(m, dict)
    for at in range(0, len(items), 2):
        _set(target, items[at], items[at + 1])


def _top(m: _Machine, kind: type) -> Any:
    target = m.stack[-1]
    if type(target) is not kind:
        raise TypeError("item for something that has none")
    return target


def _set(target: dict[Any, Any], key: Any, value: Any) -> None:
    if type(key) is not str and type(key) is not Stub:
        raise TypeError("dict key of another kind")  # hashing a nested tuple is unbounded
    target[key] = value


def _op_put1(m: _Machine) -> None:
    _put(m, m.take(1)[0])


def _op_put4(m: _Machine) -> None:
    _put(m, int.from_bytes(m.take(4), "little"))


def _put(m: _Machine, at: int) -> None:
    if at != len(m.memo):
        raise ValueError("memo out of order")  # a free index would let 5 bytes ask for gigabytes
    m.memo.append(m.stack[-1])


def _op_global(m: _Machine) -> None:
    """Module and name as two lines: older protocols, and hand-made files."""
    lines = m.data[m.at : m.at + 1024].split(b"\n", 2)
    if len(lines) != 3:
        raise ValueError("global without an end")
    m.at += len(lines[0]) + len(lines[1]) + 2
    m.stack.append(_resolve(str(lines[0], "utf-8"), str(lines[1], "utf-8")))


def _op_stack_global(m: _Machine) -> None:
    name = m.stack.pop()
    m.stack[-1] = _resolve(m.stack[-1], name)


def _op_make(m: _Machine) -> None:
    """REDUCE and NEWOBJ: a stub that remembers its arguments; nothing is called."""
    args = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not _Global or type(args) is not tuple:
        raise TypeError("call of something that is no class")
    m.stack[-1] = Stub(target.name, args)


def _op_build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Stub or target.state is not None:
        raise TypeError("state for something that takes none")
    target.state = state


_MEMOIZE = 0x94
_BINGET = ord("h")
_LONG_BINGET = ord("j")
_STOP = ord(".")
_OPCODES: Mapping[int, Callable[[_Machine], None]] = MappingProxyType(
    {
        0x80: _op_proto,
        0x95: _op_frame,
        ord("("): _op_mark,
        ord("N"): _op_none,
        0x88: _op_true,
        0x89: _op_false,
        ord("K"): _op_int1,
        ord("M"): _op_int2,
        ord("J"): _op_int4,
        0x8A: _op_long,
        0x8C: _op_text1,
        ord("X"): _op_text4,
        ord(")"): _op_empty_tuple,
        0x85: _op_tuple1,
        0x86: _op_tuple2,
        0x87: _op_tuple3,
        ord("t"): _op_tuple,
        ord("]"): _op_empty_list,
        ord("a"): _op_append,
        ord("e"): _op_appends,
        ord("}"): _op_empty_dict,
        ord("s"): _op_setitem,
        ord("u"): _op_setitems,
        ord("q"): _op_put1,
        ord("r"): _op_put4,
        ord("c"): _op_global,
        0x93: _op_stack_global,
        ord("R"): _op_make,
        0x81: _op_make,
        ord("b"): _op_build,
    }
)
_HANDLERS = tuple(_OPCODES.get(opcode, _op_refused) for opcode in range(256))
