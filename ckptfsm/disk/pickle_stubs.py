"""Reads a ``.metadata`` file, which is a pickle, without making its objects: they become stubs.

Nothing that the file names is imported or called. The unpickler is the one that Python has in Python.
The other one, in C, takes gigabytes for one damaged opcode, and a nested key overflows its stack.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ckptfsm.core.errors import DamagedRoot

METADATA = ".metadata"
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
# The names and opcodes come from files of megatron-core 0.13.1 to 0.16.1 with torch 2.13, and of
# 0.17.1 to 0.19.2 with torch 2.14. A file with others is reported, and not adopted.
METADATA_GLOBALS = frozenset(
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
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),  # 0.15
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),  # DCP's own writer notes where it wrote
        ("pathlib._local", "PosixPath"),  # the same, Python 3.13
    ]
)
# A stock save of Megatron-core leaves its plans besides.
ALLOWED_GLOBALS = METADATA_GLOBALS | {
    (f"{_DCP}.filesystem", "_StoragePrefix"),  # in a local plan that was cached and reused
    (f"{_DCP}.planner", "SavePlan"),
    (f"{_DCP}.planner", "WriteItem"),
    (f"{_DCP}.planner", "WriteItemType"),
    (f"{_DCP}.planner", "TensorWriteData"),
    (f"{_DCP}.planner", "BytesIOWriteData"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),  # up to 0.15
    *(("torch", name) for name in _DTYPES),
}
# Early releases of Python 3.11 pickle a member of an enumeration as a call of ``getattr``.
GETATTR = frozenset([("builtins", "getattr"), ("__builtin__", "getattr")])
_ENUMS = frozenset(["_MEM_FORMAT_ENCODING", "WriteItemType"])
_MEMBER = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")  # never a method, never a dunder
_OPCODES = b"\x80\x95(N\x88\x89KMJ\x8aX\x8c)\x85\x86\x87t]ae}suqr\x94hjc\x93R\x81b."


class Stub:
    """A stand-in for an object in ``.metadata``; each class in the file has a subclass of its name.

    Compared and hashed by identity, so that a file's content cannot make that slow.
    """

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Stub:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self).__name__

    def get(self, attribute: str) -> Any:
        """The attribute of the real object, or None."""
        return self.state.get(attribute) if isinstance(self.state, dict) else None


class _Member(Stub):
    """``getattr``, but for a member of an enumeration only."""

    def __new__(cls, *args: Any) -> Any:
        enumeration, name = args
        allowed = isinstance(enumeration, type) and enumeration.__name__ in _ENUMS
        if not (allowed and isinstance(name, str) and _MEMBER.match(name)):
            raise _damaged("a call of the global builtins.getattr does not belong there")
        return Stub.__new__(enumeration, name)


_STUBS: Mapping[tuple[str, str], type[Stub]] = MappingProxyType(
    {each: type(each[1], (Stub,), {"__slots__": ()}) for each in ALLOWED_GLOBALS}
    | dict.fromkeys(GETATTR, _Member)
)


class _Items(dict[Any, Any]):
    """A dict of the file. A key that is a nested tuple is refused: hashing it has no bound."""

    __slots__ = ()  # no state of the file hides a method

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, (str, Stub)):
            raise TypeError("a dict key of another kind")
        super().__setitem__(key, value)


def damaged_file(file: str, message: str) -> DamagedRoot:
    return DamagedRoot(message, file=file)


def _damaged(message: str) -> DamagedRoot:
    return damaged_file(METADATA, message)


class _Handlers(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise _damaged(f"pickle opcode 0x{opcode:02x} does not belong there")


def _load_empty_dict(unpickler: Any) -> None:
    unpickler.append(_Items())


class _StubUnpickler(pickle._Unpickler):
    dispatch = _Handlers({opcode: pickle._Unpickler.dispatch[opcode] for opcode in _OPCODES})
    dispatch[ord("}")] = _load_empty_dict

    def find_class(self, module: str, name: str) -> type[Stub]:
        found = _STUBS.get((module, name))
        if found is None:
            raise _damaged(f"global {module[:100]}.{name[:100]} does not belong there")
        return found


def load_metadata_stub(data: bytes) -> Stub:
    """The content of a ``.metadata`` file as stubs. Raises ``DamagedRoot`` (``file``)."""
    try:
        top = _StubUnpickler(io.BytesIO(data)).load()
    except DamagedRoot:
        raise
    except Exception as error:  # damaged input makes almost any error
        raise _damaged(f"truncated or malformed pickle ({type(error).__name__})") from None
    if not isinstance(top, Stub) or top.name not in ("Metadata", "MCoreMetadata"):
        raise _damaged("holds no Metadata object")
    return top
