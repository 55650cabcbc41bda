"""Every reader of the library is fed with hostile and damaged input (F30, F34).

Readers: journal, manifest, receipt, tracker, holder, pin, stock metadata, the judge of journals,
and a whole root. Inputs are documents of production code, changed: JSON by its structure (types,
huge numbers, deep nesting, names with ``..``, NULs, newer versions; journal records with right
checksums), pickles and texts by their bytes and opcodes. Each input is one seed.

For each: errors are typed, nothing takes long or much memory, accepted input reads back the same,
and nothing beside the root is touched. The readers run in a child with a limited address space: a
crash of the interpreter is a finding like any other.

    PYTHONPATH=tests python -m proof.fuzz [--target NAME --seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import resource
import shlex
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import Holder, Pin, Receipt, decode, encode
from ckptfsm.core.errors import CkptFsmError, DamagedRoot, NewerSchema
from ckptfsm.core.layout import (
    EPOCHS,
    JOURNAL,
    MANIFEST,
    MEGATRON,
    PINS,
    QUARANTINE,
    STAGING,
    TRACKER,
    TRASH,
    epoch_name,
    receipt_name,
    segment_name,
)
from ckptfsm.core.parts import MAX_STEP
from ckptfsm.core.ports import Storage
from ckptfsm.disk.inspection import (
    check_digests,
    check_extra_shards,
    check_sizes,
    inspect_published,
    read_manifest,
    read_tracker,
)
from ckptfsm.disk.journal import encode_line, parse_segment_bytes, read_history
from ckptfsm.disk.ownership import read_holder
from ckptfsm.disk.pickle_stubs import METADATA, load_metadata_stub
from ckptfsm.disk.stock import COMMON, COMMON_KEY, CONFIG, StockVerdict, inspect_stock
from ckptfsm.testing.conformance import JournalViolation, check_segments
from ckptfsm.testing.simfs import SimDisk, SimStorage
from proof.corruption import examine, make_template
from proof.layer import Budget, LayerResult, Violation, in_memory

SECONDS_EACH = 2.0
PATIENCE_S = 120.0  # for one input, on a busy machine; then its child is killed
_REPLAY = "PYTHONPATH=tests python -m proof.fuzz"
BYTES_MORE = 1 << 30
_STEP = MEGATRON.published_name(30)
_COMMON_SHARD = "__0_1.distcp"
Common = Literal["file", "shard", "none"]
_WAYS = "planner_data"  # to each key in a state: only DCP itself lists them
_CONFIG = b'{"sharded_backend":"torch_dist","sharded_backend_version":1}'
_FIRST_SEGMENT = f"{JOURNAL}/{segment_name(1)}"  # the one that seals no other


class Misread(AssertionError):
    """A reader accepted something, and makes of it what it does not say."""


# ---------------------------------------------------------------------------------- what is written


@cache
def written() -> dict[str, Any]:
    """A root that production code wrote: path -> content."""
    return make_template("killed").tree


def _written(path: str) -> bytes:
    data = written()[path]
    assert isinstance(data, bytes)
    return data


@cache
def written_metadata(common: Common = "file") -> bytes:
    """The shape of a stock ``.metadata``, pickled without torch: only the names of its classes.

    ``common``: the place of the common state. From megatron-core 0.19 on that is a shard; DCP's own
    format has none.
    """
    dcp = "torch.distributed.checkpoint"
    size = _call("torch", "Size", _tuple(_int(4), _int(2)))
    origin = _call("torch", "Size", _tuple(_int(0), _int(0)))
    chunk = _built(f"{dcp}.metadata", "ChunkStorageMetadata", {"offsets": origin, "sizes": size})
    tensor = _built(
        f"{dcp}.metadata", "TensorStorageMetadata", {"size": size, "chunks": b"]" + chunk + b"a"}
    )
    blob = _built(f"{dcp}.metadata", "BytesStorageMetadata", {})
    keys = {"w": tensor, "rng/shard_0_1": blob}
    declared = _dict({**keys, COMMON_KEY: blob} if common == "shard" else keys)
    one = _built(f"{dcp}.metadata", "MetadataIndex", {"fqn": _text("w"), "offset": origin})
    two = _built(
        f"{dcp}.metadata", "MetadataIndex", {"fqn": _text("rng/shard_0_1"), "offset": b"N"}
    )
    place = {"relative_path": _text("__0_0.distcp"), "offset": _int(0), "length": _int(100)}
    info = _built(f"{dcp}.filesystem", "_StorageInfo", place)
    stored = one + info + two + info
    if common == "shard":
        index = {"fqn": _text(COMMON_KEY), "offset": b"N"}
        at = {**place, "relative_path": _text(_COMMON_SHARD), "length": _int(len(common_archive()))}
        stored += _built(f"{dcp}.metadata", "MetadataIndex", index)
        stored += _built(f"{dcp}.filesystem", "_StorageInfo", at)
    stored = b"}(" + stored + b"u"
    top = {"state_dict_metadata": declared, "storage_data": stored}
    if common == "none":
        top[_WAYS] = _dict({key: _tuple(_text(key), _int(0)) for key in keys})
    return b"\x80\x02" + _built(f"{dcp}.metadata", "Metadata", top) + b"."


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _int(number: int) -> bytes:
    return b"J" + number.to_bytes(4, "little")


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _dict(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(_text(key) + value for key, value in items.items()) + b"u"


def _call(module: str, name: str, argument: bytes) -> bytes:
    return b"c%b\n%b\n" % (module.encode(), name.encode()) + _tuple(argument) + b"R"


def _built(module: str, name: str, state: dict[str, bytes]) -> bytes:
    made = b"c%b\n%b\n)\x81" % (module.encode(), name.encode())
    return made + _dict(state) + b"b"


# ------------------------------------------------------------------------------------- hostile input

_NAMES = (
    "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "", ".", "a//b", "nul\0name", "x" * 5000,
    "\udcff", "é\u202egnp", "a\nb", ".ckptfsm/manifest.json", "C:\\x", "__0_0.distcp/", "%s%n", "-rf",
)  # fmt: skip
_NUMBERS = (
    -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**18, 10**400, -(10**30), 1.5, float("nan"),
    float("inf"), 1e308, True,
)  # fmt: skip


def hostile_value(rng: random.Random) -> Any:
    """Something that does not belong there."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(_NAMES)
    if kind == 1:
        return rng.choice(_NUMBERS)
    if kind == 2:
        return rng.choice([None, [], {}, [None], {"": {}}, [[]], {"step": 1}])
    if kind == 3:
        return _nested(rng.choice([5, 200, 5000]), rng.choice(["[]", "{}"]))
    if kind == 4:
        return [rng.choice(_NUMBERS)] * rng.choice([1, 3, 2000])
    if kind == 5:
        return {str(i): i for i in range(rng.choice([1, 500]))}
    return rng.choice(
        ["prunable", "tracked", "absent", "transition", "segment_opened", "a" * 70_000]
    )


class _Nested:
    """Deep nesting, which no encoder of Python writes."""

    def __init__(self, text: str) -> None:
        self.text = text


def _nested(depth: int, pair: str) -> _Nested:
    if pair == "[]":
        return _Nested("[" * depth + "]" * depth)
    return _Nested('{"a":' * depth + "1" + "}" * depth)


def to_text(value: Any) -> str:
    """JSON with whatever is in it, deep nesting included."""
    if isinstance(value, _Nested):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{to_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_text, value)) + "]"
    return json.dumps(value)


def mutate_json(document: Any, rng: random.Random) -> bytes:
    """Make one to three changes by structure, sometimes one more by bytes."""
    changed = json.loads(json.dumps(document))
    for _ in range(rng.randrange(1, 4)):
        _change_somewhere(changed, rng)
    data = to_text(changed).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng) if rng.randrange(6) == 0 else data


def _change_somewhere(root: Any, rng: random.Random) -> None:
    places = list(_places(root))
    if not places:
        return
    holder, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0 and isinstance(holder, dict):
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice(["extra", "schema_version", *_NAMES[:4]])] = hostile_value(rng)
    elif how == 2 and isinstance(holder, list):
        holder.append(rng.choice([copy.deepcopy(holder[key]), hostile_value(rng)]))
    elif how == 3:
        other, another = rng.choice(places)
        holder[key] = copy.deepcopy(other[another])  # a copy: nothing may contain itself
    else:
        holder[key] = hostile_value(rng)


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    if depth > 6 or not isinstance(value, (dict, list)):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key], depth + 1)


_TOKENS = (
    b"\0", b"\n", b'"', b"{", b"}", b"[" * 300, b'{"crc":"', b"\xff\xfe", b"\x80\x04",
    b"\x95" + b"\xff" * 8,
    b"c__builtin__\neval\n", b"cos\nsystem\n", b"r\xff\xff\xff\x7f", b"\x8a\xff", b"(" * 300,
    b"\x85" * 300,
    b"\x8e" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"R", b"b", b"s", b"u", b".", b"0", b"2", b"q\0",
    b"h\0",
    b"99999999999999999999", b" ", b"\x81", b"j\0\0\0\0", b"\x93", b"i", b"o", b"P0\n", b"Q",
)  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Make one to four changes without understanding."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[at:at] = rng.choice(_TOKENS)
        elif how == 2:
            del changed[at : at + 1 + rng.randrange(40)]
        elif how == 3:
            changed[at:at] = changed[at : at + 1 + rng.randrange(200)]
        elif how == 4:
            changed[at : at + 4] = rng.randbytes(4)
        else:
            del changed[at:]
    return bytes(changed)


# ------------------------------------------------------------------------------------------ targets


def _plant_at(path: str, data: bytes) -> SimStorage:
    disk = SimDisk()
    storage = SimStorage(disk, "reader")
    _make_parents(storage, path)
    disk.plant_file(path, data)
    return storage


def _make_parents(storage: Storage, path: str) -> None:
    pieces = path.split("/")[:-1]
    for end in range(1, len(pieces) + 1):
        with contextlib.suppress(FileExistsError):
            storage.mkdir("/".join(pieces[:end]))


def _fuzz_journal(rng: random.Random) -> bytes:
    """Records changed by structure and signed again; sometimes a damaged line or two."""
    lines = _written(_FIRST_SEGMENT).rstrip(b"\n").split(b"\n")
    at = rng.randrange(len(lines))
    body = mutate_json(json.loads(lines[at])["record"], rng).replace(b"\n", b" ")
    lines[at] = b'{"crc":"%08x","record":%b}' % (zlib.crc32(body), body)
    if rng.randrange(4) == 0:
        at = rng.randrange(len(lines))
        lines[at] = mutate_bytes(lines[at], rng)
    return b"\n".join(lines) + b"\n" * rng.randrange(100)


def read_journal(data: bytes) -> None:
    segment = parse_segment_bytes(1, data, "fuzz")
    again = b"".join(map(encode_line, segment.records))
    if repr(parse_segment_bytes(1, again, "again").records) != repr(segment.records):
        raise Misread("records do not read back the same")
    read_history(_plant_at(_FIRST_SEGMENT, data))


def judge_journal(data: bytes) -> None:
    with contextlib.suppress(JournalViolation):
        check_segments({1: data, 2: b""})


def _fuzz_manifest(rng: random.Random) -> bytes:
    return _fuzz_document(f"{_STEP}/{MANIFEST}", rng)


def _fuzz_document(path: str, rng: random.Random) -> bytes:
    data = _written(path)
    if rng.randrange(4) == 0:
        return mutate_bytes(data, rng)
    document = json.loads(data)
    document.pop("crc", None)
    return mutate_json(document, rng)


def read_a_manifest(data: bytes) -> None:
    storage = _plant_at(f"{_STEP}/{MANIFEST}", data)
    inspect_published(storage, MEGATRON, 30)
    manifest = read_manifest(storage, _STEP)
    assert manifest is not None
    check_sizes(storage, _STEP, manifest.files)
    check_extra_shards(storage, _STEP, manifest.files)
    with contextlib.suppress(OSError):  # none of the files is there
        check_digests(storage, _STEP, manifest.files)
    _reads_back(manifest)


def _reads_back(document: Any) -> None:
    if decode(type(document), encode(document), "again") != document and "nan" not in repr(
        document
    ):
        raise Misread("a document does not read back the same")


def _fuzz_receipt(rng: random.Random) -> bytes:
    return _fuzz_document(f"{_STEP}/{receipt_name('state', rng.randrange(2))}", rng)


def read_a_receipt(data: bytes) -> None:
    receipt = decode(Receipt, data, "fuzz")
    storage = _plant_at(f"{_STEP}/{receipt_name('state', 0)}", data)
    check_sizes(storage, _STEP, receipt.files)
    _reads_back(receipt)


def _fuzz_tracker(rng: random.Random) -> bytes:
    words = [
        b"30",
        b"release",
        b"",
        b"9" * 5000,
        b"-1",
        b"+3",
        b"1_0",
        "٣".encode(),
        b"0x1",
        b" 7\n",
    ]
    data = rng.choice(words)
    return mutate_bytes(data, rng) if rng.randrange(3) else data


def read_a_tracker(data: bytes) -> None:
    seen = read_tracker(_plant_at(TRACKER, data))
    if seen.step is not None and not (
        0 <= seen.step <= MAX_STEP and data.strip().lstrip(b"0") in (b"%d" % seen.step, b"")
    ):
        raise Misread(f"{data[:40]!r} is read as {seen.step}")


def _fuzz_holder(rng: random.Random) -> bytes:
    return _fuzz_document(next(p for p in written() if p.startswith(f"{EPOCHS}/epoch-")), rng)


def read_a_holder(data: bytes) -> None:
    holder = read_holder(_plant_at(f"{EPOCHS}/{epoch_name(3)}", data), 3)
    assert isinstance(holder, Holder)
    _reads_back(holder)


def _fuzz_pin(rng: random.Random) -> bytes:
    return _fuzz_document(next(p for p in written() if p.startswith(f"{PINS}/")), rng)


def read_a_pin(data: bytes) -> None:
    _reads_back(decode(Pin, data, "fuzz"))


_DEEP = b"N" + b"\x85" * 200_000  # a tuple in a tuple in a tuple: to hash it overflows the C stack
_CRAFTED = (
    b"\x80\x02}" + _DEEP + b"Ns.",
    b"\x80\x02}(" + _DEEP + b"Nu.",
    b"\x80\x02]r\xff\xff\xff\x7f.",
    b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0f.",
)


def _fuzz_stock(rng: random.Random) -> bytes:
    if rng.randrange(100) == 0:
        return rng.choice(_CRAFTED)
    return mutate_bytes(written_metadata(rng.choice(get_args(Common))), rng)


def _stock_verdict(data: bytes, config: bytes = _CONFIG) -> StockVerdict:
    disk = SimDisk()
    storage = SimStorage(disk, "reader")
    storage.mkdir("d")
    common = _COMMON_SHARD if COMMON_KEY.encode() in data else COMMON
    files = {METADATA: data, CONFIG: config, common: common_archive()}
    for name, content in list(files.items())[: 1 if _WAYS.encode() in data else None]:
        disk.plant_file(f"d/{name}", content)
    disk.plant_file("d/__0_0.distcp", bytes(100))
    return inspect_stock(storage, "d")


def read_stock(data: bytes) -> None:
    for name, _ in _stock_verdict(data).files:
        if name.startswith("/") or ".." in name.split("/"):
            raise Misread(f"a stock checkpoint names {name!r}")
    load_metadata_stub(data)


def _fuzz_stock_config(rng: random.Random) -> bytes:
    return mutate_json(json.loads(_CONFIG), rng)


def read_stock_config(data: bytes) -> None:
    _stock_verdict(written_metadata(), data)


@cache
def common_archive() -> bytes:
    """The common state of all ranks, as far as it is looked at without torch."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return made.getvalue()


@dataclass(frozen=True)
class Target:
    """A reader, its inputs, and the errors that it may raise."""

    name: str
    make: Callable[[random.Random], bytes]
    read: Callable[[bytes], None]
    errors: tuple[type[Exception], ...] = (DamagedRoot,)


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("journal", _fuzz_journal, read_journal),
        Target("judge", _fuzz_journal, judge_journal, ()),
        Target("manifest", _fuzz_manifest, read_a_manifest),
        Target("receipt", _fuzz_receipt, read_a_receipt),
        Target("tracker", _fuzz_tracker, read_a_tracker, ()),
        Target("holder", _fuzz_holder, read_a_holder),
        Target("pin", _fuzz_pin, read_a_pin),
        Target("stock", _fuzz_stock, read_stock),
        Target("stock config", _fuzz_stock_config, read_stock_config, ()),
    )
}


def attempt(target: Target, seed: int) -> str:
    """Feed one input. Returns what is wrong, or "accepted" / "refused"."""
    data = target.make(random.Random(f"{target.name} {seed}"))
    began = time.process_time()
    try:
        target.read(data)
        verdict = "accepted"
    except target.errors:
        verdict = "refused"
    except Exception as error:  # whatever it is, it is a finding
        verdict = f"{type(error).__name__}: {str(error)[:200]}"
    took = time.process_time() - began
    return f"took {took:.1f} s for {len(data)} bytes" if took > SECONDS_EACH else verdict


# --------------------------------------------------------------------------------------- whole roots

_STRANGE = (
    "iter_99999999999999999", "iter_-000001", "iter_0000031", "iter_+000003", "iter_0000030.tmp-x",
    f"{STAGING}/..30.e1.a1", f"{STAGING}/30.e999999999.a1", f"{STAGING}/9999999999999999.e1.a1",
    f"{TRASH}/30.e3.a2", f"{TRASH}/x", f"{EPOCHS}/epoch-999999999", f"{EPOCHS}/epoch-0000009",
    f"{EPOCHS}/take-x", f"{JOURNAL}/000000.ndjson", f"{JOURNAL}/999999999.ndjson", f"{PINS}/-1.json",
    f"{PINS}/99999999999999999999.json", f"{PINS}/20.json.tmp-1",
    f"{TRACKER}.tmp-1",
    f"{_STEP}/.ckptfsm/receipts/state/7.json", f"{_STEP}/__9_0.distcp",
)  # fmt: skip


def hostile_root(seed: int) -> dict[str, Any]:
    """A tree with one to three documents and names changed: path -> content, None, or a link."""
    rng = random.Random(f"root {seed}")
    tree = dict(written())
    for _ in range(rng.randrange(1, 4)):
        how = rng.randrange(4)
        if how == 0:
            name = rng.choice(_STRANGE)
            tree[name] = rng.choice([b"", b"{}", None, "-> outside", rng.randbytes(50)])
        elif how == 1:
            step = MEGATRON.published_name(rng.choice([2, 10, 20, 30]))
            tree[f"{step}/{MANIFEST}"] = _fuzz_manifest(rng)
        elif how == 2:
            tree[TRACKER] = _fuzz_tracker(rng)
        else:
            documents = [p for p in tree if p.startswith(".ckptfsm/") and p.count("/") == 2]
            path = rng.choice([p for p in documents if isinstance(tree[p], bytes)])
            tree[path] = (
                _fuzz_journal(rng) if path.startswith(JOURNAL) else mutate_bytes(tree[path], rng)
            )
    return tree


def attempt_root(seed: int) -> str:
    """Open and restore a hostile root on a real disk, beside something that must not be touched."""
    tree = hostile_root(seed)
    with tempfile.TemporaryDirectory(dir=in_memory()) as name:
        place = Path(name)
        beside, root = place / "beside", place / "root"
        beside.mkdir()
        (beside / "canary").write_bytes(b"canary")
        newer = _lay_out(root, tree, beside)
        os.utime(beside, (1, 1))
        storage = PosixStorage(root)
        began = time.process_time()
        try:
            outcome = examine(storage)
        finally:
            storage.close_root()
        lost = [
            step for step, files in intact_steps(tree).items() if not _is_kept(root, step, files)
        ]
        if lost:
            return f"{lost} were whole, and are neither there nor in quarantine"
        if time.process_time() - began > 5 * SECONDS_EACH:
            return "took too long"
        if [p.name for p in beside.iterdir()] != ["canary"] or beside.stat().st_mtime != 1:
            return "what lies beside the root was touched"
        if sorted(p.name for p in place.iterdir()) != ["beside", "root"]:
            return "something was made beside the root"
        if isinstance(outcome.error, NewerSchema):
            path = root / str(outcome.error.facts["file"])
            if path.read_bytes() != newer.get(str(path)):
                return f"a newer document was rewritten: {path.name}"
    if outcome.error is not None:
        typed = isinstance(outcome.error, CkptFsmError)
        return "refused" if typed else f"{type(outcome.error).__name__}: {outcome.error}"
    return "accepted"


def intact_steps(tree: Mapping[str, Any]) -> dict[str, dict[str, bytes]]:
    """The published steps that nobody changed: directory -> name of a file in it -> content."""
    steps: dict[str, dict[str, bytes]] = {}
    for name in (path for path in written() if MEGATRON.parse_published(path) is not None):
        inside, once = _inside(tree, name), _inside(written(), name)
        if inside == once:
            steps[name] = {path: data for path, data in inside.items() if isinstance(data, bytes)}
    return steps


def _inside(tree: Mapping[str, Any], directory: str) -> dict[str, Any]:
    start = f"{directory}/"
    return {path[len(start) :]: v for path, v in tree.items() if path.startswith(start)}


def _is_kept(root: Path, step: str, files: Mapping[str, bytes]) -> bool:
    """At its name or anywhere in quarantine."""
    places = [root / step, *(root / QUARANTINE).glob("*")]
    return any(
        all((p / name).is_file() and (p / name).read_bytes() == files[name] for name in files)
        for p in places
    )


def _lay_out(root: Path, tree: dict[str, Any], beside: Path) -> dict[str, bytes]:
    """Put a tree on disk. Returns the content of its files by their path."""
    content: dict[str, bytes] = {}
    root.mkdir()
    for path, value in sorted(tree.items()):
        place = root / path
        if place.parent.is_symlink() or (place.parent.exists() and not place.parent.is_dir()):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if value is None:
            place.mkdir(exist_ok=True)
        elif isinstance(value, bytes) and not place.is_dir():
            place.write_bytes(value)
            content[str(place)] = value
        elif isinstance(value, str) and not place.exists():
            place.symlink_to(beside)
    return content


# --------------------------------------------------------------------------------------------- run


def _run_seeds(name: str, seeds: range, report: Any) -> None:
    """In the child: all seeds of one target; says which one it is at before it begins it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES_MORE, used + BYTES_MORE))
    counts: Counter[str] = Counter()
    problems: list[tuple[int, str]] = []
    for seed in seeds:
        report.send(seed)
        verdict = attempt_root(seed) if name == "root" else attempt(TARGETS[name], seed)
        counts[verdict if verdict in ("accepted", "refused") else "wrong"] += 1
        if verdict not in ("accepted", "refused"):
            problems.append((seed, verdict))
    report.send((counts, problems[:20]))


def run_in_child(
    name: str, count: int, first: int = 0
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run a target in a separate process; if it dies or hangs, that is a problem of its seed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_seeds, args=(name, range(first, first + count), sender))
    child.start()
    sender.close()
    reached = first
    try:
        while receiver.poll(PATIENCE_S):
            said = receiver.recv()
            if isinstance(said, tuple):
                return said
            reached = said
        what = f"it does not end within {PATIENCE_S:.0f} s"
    except EOFError:
        child.join(PATIENCE_S)
        what = f"the interpreter died with {child.exitcode}"
    finally:
        child.join(1.0)
        child.kill()  # nothing happens to one that has ended
        child.join()
    return Counter({"wrong": 1}), [(reached, what)]


def run(budget: Budget) -> LayerResult:
    """See the module."""
    result = LayerResult("fuzz")
    began = time.monotonic()
    each = budget.pick(pr=1_200, nightly=20_000, release=20_000)
    written(), *map(written_metadata, get_args(Common))  # made once, for all children
    problem = legal_input_problem()
    if problem:
        result.violations.append(Violation("F30", problem, _REPLAY))
    for name in (*TARGETS, "root"):
        counts, problems = run_in_child(name, each // 4 if name == "root" else each)
        result.explored[f"{name.replace(' ', '_')}_inputs"] = counts.total()
        result.notes.append(f"{name}: {dict(counts)}")
        result.coverage.faults["F30 x any"] += counts["refused"]
        for seed, what in problems:
            replay = f"{_REPLAY} --target {shlex.quote(name)} --seed {seed}"
            result.violations.append(Violation("F30", f"{name}: {what}", replay))
        if problems and budget.stop_at_first:
            break
    result.seconds = time.monotonic() - began
    return result


def legal_input_problem() -> str:
    """Documents of production code are accepted: refusing everything would be noticed. "" if it is."""
    legal = {
        "journal": _written(_FIRST_SEGMENT), "manifest": _written(f"{_STEP}/{MANIFEST}"),
        "receipt": _written(f"{_STEP}/{receipt_name('state', 0)}"), "tracker": _written(TRACKER),
        "holder": _written(f"{EPOCHS}/{epoch_name(3)}"), "pin": _written(f"{PINS}/2.json"),
        "stock": written_metadata(),
    }  # fmt: skip
    for name, data in legal.items():
        try:
            TARGETS[name].read(data)
        except Exception as error:  # nothing may be raised
            return f"{name}: what was written is refused: {error}"
    for common in get_args(Common):
        verdict = _stock_verdict(written_metadata(common))
        if not verdict.acceptable:
            return f"stock: {verdict.reason}"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.fuzz")
    parser.add_argument("--target", choices=[*TARGETS, "root"])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--profile", default="pr")
    options = parser.parse_args(arguments)
    if options.target and options.seed is not None:
        root = options.target == "root"
        if not root:
            print(
                TARGETS[options.target].make(random.Random(f"{options.target} {options.seed}"))[
                    :2000
                ]
            )
        written()
        counts, problems = run_in_child(options.target, 1, options.seed)
        print(*(what for _, what in problems) if problems else counts)
        return 1 if problems else 0
    result = run(Budget(profile=options.profile))
    print(result.explored, *result.notes, sep="\n")
    print(*result.violations, sep="\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
