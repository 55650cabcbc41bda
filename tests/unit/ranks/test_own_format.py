"""A format and its driver that the library does not have, as the recipe in CONTRIBUTING.md adds them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from fakes import ThreadTransport, fake_ports, run_ranks
from managers import QUICK
from snapshots import files_of

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core import formats
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import ConfigError, NewerSchema, RestoreFailed
from ckptfsm.core.formats import FORMATS, Format
from ckptfsm.core.layout import MEGATRON, PLANNED, join, planned_name
from ckptfsm.core.parts import PartSpec, Planned, check_parts
from ckptfsm.core.ports import PartJob, Storage, Survey, Written
from ckptfsm.disk.durable import make_dirs
from ckptfsm.disk.verification import verify_step
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.checks import assert_writer_sound
from ckptfsm.writers.plain_files import FilesDraft, FilesDriver
from ckptfsm.writers.shard_file import ShardFile

COLUMNS = Format("columns", planned=True, shards=".columns", metadata=("index.json",))


@dataclass(frozen=True, slots=True)
class ColumnsPart(PartJob):
    """The columns of one rank, in one file. The first rank writes the plan too."""

    name: str
    directory: str
    rank: int
    data: bytes
    keys: tuple[str, ...]
    planned: bytes | None
    portable = True

    def write(self, storage: Storage, location: str) -> Written:
        file = f"{self.rank}.columns"
        contents = {join(self.directory, file): self.data}
        if self.planned is not None:
            make_dirs(storage, PLANNED, base=location)
            contents[planned_name(self.name)] = self.planned
        entries = []
        for name, data in contents.items():
            shard = ShardFile(storage, join(location, name))
            shard.write(data)
            entries.append(shard.close_durably(name))
        storage.fsync_dir(join(location, PLANNED) if self.planned is not None else location)
        return Written(tuple(entries), tuple((key, file) for key in self.keys))


@dataclass(slots=True)
class ColumnsDraft(FilesDraft):
    rank: int = 0

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        jobs = []
        for spec in specs:
            own = self.values[spec.name]
            plan = planned[spec.name].metadata if self.rank == spec.first_rank else None
            data = json.dumps(own).encode()  # a copy: the trainer may change its lists now
            jobs.append(ColumnsPart(spec.name, spec.directory, self.rank, data, tuple(own), plan))
        return tuple(jobs)


def finish(planned: bytes, results: Sequence[Sequence[Any]], location: str) -> Mapping[str, bytes]:
    rows = sorted(tuple(row) for rank in results for row in rank)
    return {"index.json": json.dumps({"plan": planned.decode(), "files": dict(rows)}).encode()}


class ColumnsDriver(FilesDriver):
    """Dicts of lists. ``load`` returns new lists."""

    finishers = MappingProxyType({COLUMNS.name: finish})

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def draft(self, parts: Mapping[str, Any]) -> ColumnsDraft:
        specs = tuple(PartSpec(name, COLUMNS.name, name) for name in parts)
        summary = {name: sorted(own) for name, own in parts.items()}
        return ColumnsDraft(specs, parts, 100, summary=summary, rank=self.rank)

    def merge(self, summaries: Sequence[Any]) -> Mapping[str, Planned]:
        return {name: Planned(f"{len(summaries)} ranks".encode()) for name in summaries[0]}

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        stored = {name: frozenset(_index(directories[name])) for name in parts}
        missing = {
            key for name, wanted in parts.items() for key in wanted if key not in stored[name]
        }
        if odd := missing - set(droppable):
            raise RestoreFailed(f"the checkpoint has no column {min(odd)!r}")
        asked = {name: frozenset(wanted) for name, wanted in parts.items()}
        return Survey(missing, asked, stored)

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        asked = {key for survey in surveys for keys in survey.shardings.values() for key in keys}
        return {key for keys in surveys[0].stored.values() for key in keys} - asked

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        loaded = {}
        for name, wanted in parts.items():
            place, files = Path(directories[name]), _index(directories[name])
            own = [key for key in wanted if key not in drop]
            loaded[name] = {key: json.loads((place / files[key]).read_text())[key] for key in own}
        return loaded


def _index(directory: str) -> dict[str, str]:
    files: dict[str, str] = json.loads((Path(directory) / "index.json").read_text())["files"]
    return files


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", MappingProxyType({**FORMATS, COLUMNS.name: COLUMNS}))


def manager(root: Path, transport: ThreadTransport, **settings: Any) -> Manager:
    ports = fake_ports(root, driver=ColumnsDriver(transport.rank), transport=transport)
    return Manager(ports, make_config({**QUICK, **settings}))


def saved(root: Path) -> None:
    """Two steps of two ranks, each of which has a column."""

    def work(transport: ThreadTransport) -> None:
        with manager(root, transport) as ckpts:
            for step in (1, 2):
                table = {f"c{transport.rank}": [step, transport.rank]}
                ckpts.save(step, parts={"table": table}).wait()
                table.clear()

    run_ranks(2, work)


@pytest.mark.filterwarnings("ignore::ckptfsm.core.errors.ReshardWarning")
def test_a_format_of_ones_own_is_saved_and_restored(tmp_path: Path):
    """Catches: a rule about a format that the library has outside of ``Format``, so that the next one
    is lost on the way: its metadata, its results, its sharded load, what is droppable."""
    root = tmp_path / "root"
    saved(root)

    def work(transport: ThreadTransport) -> Any:
        with manager(root, transport, reshard_drops=("gone",)) as ckpts:
            wanted = {"c1" if transport.rank == 0 else "c0": None}  # the other's: a new sharding
            whole = ckpts.restore(parts={"table": wanted})
            part = ckpts.restore(parts={"table": {"c0": None, "gone": None}}, partial=True)
            with pytest.raises(RestoreFailed, match="no column 'else'"):
                ckpts.restore(parts={"table": {"else": None}})
            assert (whole.unused, part.unused, part.dropped) == ((), ("c1",), ("gone",))
            return whole.parts["table"], part.parts["table"]

    some = {"c0": [2, 0]}
    assert run_ranks(2, work) == [({"c1": [2, 1]}, some), ({"c0": [2, 0]}, some)]
    index = json.loads((root / "iter_0000002/table/index.json").read_text())
    assert index == {"plan": "2 ranks", "files": {"c0": "0.columns", "c1": "1.columns"}}


@pytest.mark.parametrize("planned", [None, b"2 ranks"])
def test_its_writer_is_sound(planned: bytes | None):
    """Catches: a recipe for a writer that loses files at a power loss."""
    assert_writer_sound(ColumnsPart("table", "table", 0, b'{"c": 1}', ("c",), planned))


def test_a_process_without_the_driver_judges_the_format(tmp_path: Path):
    """Catches: a part that only its driver can verify, or that is judged as a torch_dist one."""
    root = tmp_path / "root"
    saved(root)
    storage = PosixStorage(root, create=False)
    assert verify_step(storage, MEGATRON, 2).good
    extra = root / "iter_0000002/table/9.columns"
    extra.write_text("{}")
    assert "9.columns is not of this checkpoint" in verify_step(storage, MEGATRON, 2).problems[0]
    extra.unlink()
    shard = root / "iter_0000001/table/1.columns"
    shard.write_text(shard.read_text().replace("1", "7"))
    assert "another content" in verify_step(storage, MEGATRON, 1).problems[0]
    storage.close_root()
    for name in ("x.columns", "index.json"):
        with pytest.raises(ConfigError, match=name):
            check_parts((PartSpec("table", COLUMNS.name), PartSpec(name, "file", ranks=(0,))), 1)


def test_F34_a_version_without_the_format_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a root that an older version opens, and whose checkpoints it puts aside as damaged."""
    root = tmp_path / "root"
    saved(root)
    before = files_of(root)
    with monkeypatch.context() as older:
        older.setattr(formats, "FORMATS", FORMATS)
        with pytest.raises(NewerSchema, match="does not know: 'columns'"):
            Manager(fake_ports(root), make_config(QUICK))
    assert files_of(root) == before
