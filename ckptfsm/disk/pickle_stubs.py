"""Read a ``.metadata`` file, which is a pickle, without unpickling it: objects become stubs.

A standard unpickler is not safe on a hostile file even with an allow-list. Hashing a deeply nested
tuple overflows the C stack and kills the process, and one memo opcode can ask for gigabytes. So
this module interprets the few opcodes that real files use, and imports or calls nothing. Refused
are a global outside ``ALLOWED_GLOBALS``, an opcode outside the table, and a dict key that is not a
string or a stub. ``getattr`` may only name a member of one of ``ENUMS``: early releases of Python
3.11 pickle an enumeration so.

The globals and opcodes come from files of megatron-core 0.13.1, 0.14.0, 0.15.0 and 0.16.1 with
torch 2.13, ``all_local_plans`` included. Files of 0.17.1, 0.18.2 and 0.19.2 with torch 2.14 were
added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

ENUMS: frozenset[str] = frozenset(["_MEM_FORMAT_ENCODING", "WriteItemType"])
_GETATTR = frozenset([("builtins", "getattr"), ("__builtin__", "getattr")])  # up to protocol 2
_MEMBER = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")  # never a method, never a dunder


@dataclass(eq=False, slots=True)
class Stub:
    """A stand-in for an object in ``.metadata``: the name of its class, and its arguments.

    Compared and hashed by identity, so that a file's content cannot make that slow.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def get(self, attribute: str) -> Any:
        """The attribute of the real object, or None."""
        return self.state.get(attribute) if type(self.state) is dict else None


@dataclass(eq=False, frozen=True, slots=True)
class _Global:
    """An allowed global before it is called; a dtype stays one."""

    name: str


class _Getattr:
    """The global ``getattr``: of no use but to name a member of an enumeration."""


def load_metadata_stub(data: bytes) -> Stub:
    """The content of a ``.metadata`` file as stubs. Raises ``DamagedRoot`` (``file``)."""
    try:
        top = _Machine(data).run()
    except IndexError:
        raise damaged_file(METADATA, "truncated or malformed pickle") from None
    except (ValueError, TypeError) as error:
        raise damaged_file(METADATA, f"malformed pickle ({type(error).__name__})") from None
    if type(top) is not Stub or top.name not in ("Metadata", "MCoreMetadata"):
        raise damaged_file(METADATA, "holds no Metadata object")
    return top


def damaged_file(file: str, message: str) -> DamagedRoot:
    return DamagedRoot(message, file=file)


@dataclass(eq=False, slots=True)
class _Machine:
    """The pickle stack machine, for the opcodes that real files use. Used for a single file."""

    data: bytes
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)

    def run(self) -> Any:
        """The object in the file. Raises IndexError, ValueError, TypeError, or ``DamagedRoot``."""
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
        """The next ``count`` bytes, or fewer if the file is cut off: the next opcode is then
        missing.
        """
        begin = self.at
        self.at += count
        return self.data[begin : self.at]

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items


def _resolve(module: Any, name: Any) -> _Global | _Getattr:
    """The counterpart of ``find_class``: a name, never an object of that name."""
    if type(module) is not str or type(name) is not str:
        raise TypeError("global without a name")
    if (module, name) in _GETATTR:
        return _Getattr()
    if (module, name) not in ALLOWED_GLOBALS:
        raise damaged_file(METADATA, f"global {module[:100]}.{name[:100]} does not belong there")
    return _Global(name)


def _op_refused(m: _Machine) -> None:
    raise damaged_file(METADATA, f"pickle opcode 0x{m.data[m.at - 1]:02x} does not belong there")


def _op_proto(m: _Machine) -> None:
    if m.take(1)[0] > 5:
        raise ValueError("unknown protocol")


def _op_frame(m: _Machine) -> None:
    m.take(8)  # the frame's length only helps to read ahead


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
    m.stack.append(_text(m.data[begin:end]))


def _op_text4(m: _Machine) -> None:
    count = int.from_bytes(m.take(4), "little")
    m.stack.append(_text(m.take(count)))


def _text(data: bytes) -> str:
    """As pickle reads text: a path that is not UTF-8 has lone surrogates."""
    return str(data, "utf-8", "surrogatepass")


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
    """NEWOBJ, and most of REDUCE: a stub that remembers its arguments; nothing is called."""
    args = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not _Global or type(args) is not tuple:
        raise TypeError("call of something that is no class")
    m.stack[-1] = Stub(target.name, args)


def _op_reduce(m: _Machine) -> None:
    """REDUCE: as above, or a member of an enumeration by its name."""
    if type(m.stack[-2]) is not _Getattr:
        _op_make(m)
        return
    args = m.stack.pop()
    if not _names_a_member(args):
        raise damaged_file(METADATA, "a call of the global builtins.getattr does not belong there")
    m.stack[-1] = Stub(args[0].name, args[1:])


def _names_a_member(args: Any) -> bool:
    if type(args) is not tuple or len(args) != 2 or type(args[0]) is not _Global:
        return False
    name = args[1]
    return args[0].name in ENUMS and type(name) is str and _MEMBER.match(name) is not None


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
        ord("R"): _op_reduce,
        0x81: _op_make,
        ord("b"): _op_build,
    }
)
_HANDLERS = tuple(_OPCODES.get(opcode, _op_refused) for opcode in range(256))
