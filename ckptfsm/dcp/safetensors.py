"""Writes tensors as safetensors files, as https://github.com/huggingface/safetensors#format says.

A file is its header's length, the header in JSON, and the values. So the header can be written before
any value is read, and no more than one tensor is in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import write_all, write_new

_ALIGNED = 8
_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor to be written as ``name``. ``key`` is for who reads its values."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Read = Callable[[NamedTensor], torch.Tensor]


def has_name(dtype: torch.dtype) -> bool:
    """True if safetensors files can have values of this type."""
    return dtype in _NAMES


def write_model(
    storage: Storage, directory: str, tensors: Iterable[NamedTensor], read: Read, limit: float
) -> None:
    """Write durable files of at most ``limit`` bytes of values, and the index if there are several.

    ``read`` gives the values of one tensor, of any type. A tensor of more than ``limit`` bytes has a
    file of its own. The names are those that transformers looks for.
    """
    files = _divided(sorted(tensors, key=lambda each: each.name), limit)
    if len(files) == 1:
        _write_file(storage, f"{directory}/model.safetensors", files[0], read)
        return
    placed: dict[str, str] = {}
    for number, some in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(storage, f"{directory}/{name}", some, read)
        placed |= {each.name: name for each in some}
    size = sum(each.bytes for some in files for each in some)
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    text = json.dumps(index, indent=2).encode()
    write_new(storage, f"{directory}/model.safetensors.index.json", text)


def _divided(tensors: Sequence[NamedTensor], limit: float) -> list[list[NamedTensor]]:
    files: list[list[NamedTensor]] = [[]]
    size = 0
    for each in tensors:
        if files[-1] and size + each.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.bytes
    return files


def _write_file(storage: Storage, path: str, tensors: Sequence[NamedTensor], read: Read) -> None:
    # Large elements first: readers map the file, and need each tensor aligned to its element.
    ordered = sorted(tensors, key=lambda each: -each.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        begin, end = end, end + each.bytes
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    handle = storage.open_exclusive(path)
    try:
        write_all(storage, handle, struct.pack("<Q", len(text)) + text)
        for each in ordered:
            write_all(storage, handle, _in_memory(read(each), each.dtype))  # and it is gone again
        storage.fsync(handle)
    finally:
        storage.close(handle)


def _in_memory(value: torch.Tensor, dtype: torch.dtype) -> memoryview:
    return value.to(dtype).reshape(-1).view(torch.uint8).numpy().data
