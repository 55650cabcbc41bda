"""Decides whether the directory of a trainer with files in several formats is whole. No torch.

Accelerate and transformers' Trainer write a model, an optimizer and random states under names of their
own, see ``Layout.last``. Each file is judged by itself, so nobody can tell which files are missing
beside those that every checkpoint has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.formats import DCP, is_shard
from ckptfsm.core.layout import PRIVATE, Layout, join
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import lookup, walk_files
from ckptfsm.disk.pickle_stubs import METADATA, damaged_file
from ckptfsm.disk.stock import UNFINISHED, StockVerdict, inspect_stock, reading

_END = b"PK\x05\x06"  # begins the last 22 bytes of a zip archive, which is what torch.save writes
_END_BYTES = 22
_MAX_JSON_BYTES = 1 << 28  # a tokenizer has some 10 MB
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_INDEX = ".safetensors.index.json"
_WEIGHTS = ("model", "pytorch_model", "adapter_model")  # begin the names of their files


def inspect_unlisted(storage: Storage, layout: Layout, directory: str) -> StockVerdict:
    """The verdict on a directory that no manifest lists, as a trainer of this layout wrote it.

    See ``inspect_stock``. Never raises because of the content; an ``OSError`` about the disk's health
    passes.
    """
    if not layout.last:
        return inspect_stock(storage, directory, layout.tree)
    try:
        return _inspect_files(storage, directory, layout.last)
    except DamagedRoot as error:
        file = error.facts.get("file")
        return StockVerdict(False, f"{file}: {error.message}"[:500].replace("\n", " "))


def _inspect_files(storage: Storage, directory: str, last: str) -> StockVerdict:
    with reading(directory):
        found = walk_files(storage, directory)
    files = {name: stat for name, stat in found if not name.startswith(f"{PRIVATE}/")}
    for name in files:
        inner, _, file = name.rpartition("/")
        if is_shard(file) and join(inner, METADATA) not in files:
            raise damaged_file(join(inner, METADATA), "missing")
        if file == UNFINISHED:
            raise damaged_file(name, "a save was cut off here")
    for name, stat in files.items():
        if stat.kind != "file":
            raise damaged_file(name, f"not a regular file but a {stat.kind}")
        _check(storage, directory, name, stat)
    if last not in files:
        raise damaged_file(last, "missing, and it is written late: the save was cut off")
    if not any(_has_weights(name) for name in files):
        raise damaged_file(directory, "no weights of a model inside")
    return StockVerdict(True, "", tuple((name, stat.size) for name, stat in files.items()))


def _has_weights(name: str) -> bool:
    file = name.rpartition("/")[2]
    return is_shard(file) or (file.startswith(_WEIGHTS) and file.endswith((".safetensors", ".bin")))


def _check(storage: Storage, directory: str, name: str, stat: FileStat) -> None:
    """Raise ``DamagedRoot`` for a file that is not whole by itself, as far as its name tells."""
    inner, _, last = name.rpartition("/")
    if last == METADATA:
        verdict = inspect_stock(storage, join(directory, inner), known=DCP)
        if not verdict.acceptable:
            raise damaged_file(inner, verdict.reason)
        return
    check = _CHECKS.get(f".{last.rpartition('.')[2]}")
    if check is not None and not inner:
        with reading(name):
            check(storage, directory, name, stat.size)


def _check_safetensors(storage: Storage, directory: str, name: str, size: int) -> None:
    path = join(directory, name)
    length = int.from_bytes(storage.read(path, 8), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise damaged_file(name, f"cut off in its header: {size} bytes")
    try:
        entries = json.loads(storage.read(path, length, 8))
        ends = [each["data_offsets"][1] for key, each in entries.items() if key != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        raise damaged_file(name, "its header is none of safetensors") from None
    if size != needed:
        raise damaged_file(name, f"{size} bytes, {needed} needed")


def _check_archive_end(storage: Storage, directory: str, name: str, size: int) -> None:
    path = join(directory, name)
    if size < _END_BYTES or not storage.read(path, _END_BYTES, size - _END_BYTES).startswith(_END):
        raise damaged_file(name, f"not a whole file of torch.save: {size} bytes, without its end")


def _check_json(storage: Storage, directory: str, name: str, size: int) -> None:
    if size > _MAX_JSON_BYTES:
        raise damaged_file(name, f"{size} bytes, more than {_MAX_JSON_BYTES}")
    try:
        found = json.loads(storage.read(join(directory, name), _MAX_JSON_BYTES))
        shards = set(found["weight_map"].values()) if name.endswith(_INDEX) else set()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise damaged_file(name, "not whole: it is no JSON") from None
    for shard in sorted(map(str, shards)):
        if "/" in shard or lookup(storage, join(directory, shard)) is None:
            raise damaged_file(shard, f"no file of this directory, and {name} names it")


_CHECKS: Mapping[str, Callable[[Storage, str, str, int], None]] = MappingProxyType(
    {
        ".safetensors": _check_safetensors,
        ".bin": _check_archive_end,
        ".pt": _check_archive_end,
        ".pth": _check_archive_end,
        ".pkl": _check_archive_end,
        ".json": _check_json,
    }
)
