"""Composite checkpoints in an SPMD job: parts on different ranks, optional ones, files, layouts."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDriver, FakeRequest, ThreadGroup, ThreadTransport, fake_ports, run_ranks
from groups import GroupJob

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import ConfigError, RankFailed, SaveFailed, SaveRefused
from ckptfsm.core.events import Failed
from ckptfsm.core.layout import VERL
from ckptfsm.core.parts import OptionalPart, PartSpec
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.assembly import Assembly
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.writers.plain_files import FileTree, TreePart, without_inner_parts

TEMPLATE = {"w": None}
QUICK = {"exit_timeout_s": 0.5, "close_timeout_s": 20.0, "busy_timeout_s": 20.0}


def together(
    root: Path, work: Callable[[Manager], Any], ranks: int = 2, **settings: Any
) -> list[Any]:
    """Run ``work`` with one manager per rank; what each returned or raised."""

    def one(transport: ThreadTransport) -> Any:
        driver = FakeDriver(transport.rank)
        with Manager(
            fake_ports(root, transport=transport, driver=driver), make(settings), ()
        ) as manager:
            return work(manager)

    return run_ranks(ranks, one)


def make(settings: dict[str, Any]) -> Any:
    from ckptfsm.core.config import make_config

    return make_config({**QUICK, **settings})


def manifest_of(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / name / ".ckptfsm/manifest.json").read_text())
    return found


def test_parts_that_live_on_different_ranks(tmp_path):
    """Catches: a part awaited from a rank that does not have it, or not awaited from one that has."""

    def work(manager: Manager) -> Any:
        mine, other = ("actor", "critic") if manager.rank == 0 else ("critic", "actor")
        parts = {"actor": None, "critic": None, "both": {"w": manager.rank}, mine: {"w": mine}}
        manager.save(1, parts=parts).wait()
        wanted = {"actor": None, "critic": None, "both": TEMPLATE, mine: TEMPLATE}
        found = manager.restore(parts=wanted)
        assert found is not None
        return found.parts[mine], found.parts["both"]

    assert together(tmp_path, work) == [({"w": "actor"}, {"w": 0}), ({"w": "critic"}, {"w": 1})]
    parts = {p["name"]: p["ranks"] for p in manifest_of(tmp_path, "iter_0000001")["parts"]}
    assert parts == {"actor": [0], "both": None, "critic": [1]}


def test_a_rank_that_writes_nothing_has_no_writer(tmp_path):
    """Catches: a rank without a share that is awaited, or that condemns others by its failure
    report."""

    def work(manager: Manager) -> Any:
        part = {"w": 1} if manager.rank == 1 else None
        manager.save(1, parts={"critic": part, "more": None if part is None else {"w": 2}}).wait()
        manager._ports.driver.failures["stage"] = OSError(28, "full")
        with pytest.raises(SaveFailed, match="rank 1"):
            manager.save(2, parts={"critic": part}).wait()
        manager._ports.driver.failures.clear()
        manager.wait_until_finished()
        return manager.all_steps()

    assert together(tmp_path, work)[1] == [1]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"a": {"w": 1}, "b": None}, {"a": {"w": 1}, "b": None}, "no rank writes part 'b'"),
        ({"a": {"w": 1}}, {"a": {"w": 1}, "b": None}, "rank 1 asks for step 1 or parts"),
        (
            {"a": {"w": 1}, "b": None},
            {"a": b"bytes", "b": {"w": 1}},
            "describes part 'a' otherwise",
        ),
        ({"a": FakeRequest(b"x"), "b": {"w": 1}}, {"a": None, "b": {"w": 1}}, "every rank must"),
    ],
)
def test_ranks_must_agree_on_the_parts(tmp_path, first, second, why):
    """Catches: a part that every rank leaves to the others; a mistake of one rank saved as a whole."""

    def work(manager: Manager) -> None:
        with pytest.raises(SaveRefused, match=why):
            manager.save(1, parts=second if manager.rank else first)

    assert together(tmp_path, work) == [None, None]


def test_an_optional_part_that_fails_on_one_rank_is_left_out(tmp_path):
    """Catches: an optional part that fails the checkpoint, or that stays in it in half."""

    def work(manager: Manager) -> Any:
        driver = manager._ports.driver
        driver.before_write = fail_export if manager.rank == 1 else None
        parts = {"state": {"w": 1}, "export": OptionalPart({"w": 2})}
        manager.save(1, parts=parts).wait()
        driver.before_write = None
        manager.save(2, parts=parts).wait()
        return manager.latest_step()

    assert together(tmp_path, work) == [2, 2]
    assert not (tmp_path / "iter_0000001/export").exists()
    assert not (tmp_path / "iter_0000001/.ckptfsm/planned/export.bin").exists()
    left_out = manifest_of(tmp_path, "iter_0000001")
    assert [p["name"] for p in left_out["parts"]] == ["state"]
    assert left_out["dropped"] == {"export": "rank 1: OSError: [Errno 5] no export"}
    assert [p["name"] for p in manifest_of(tmp_path, "iter_0000002")["parts"]] == [
        "state",
        "export",
    ]
    assert (tmp_path / "iter_0000002/export").exists()


def fail_export(part: str, rank: int) -> None:
    if part == "export":
        raise OSError(5, "no export")


def test_a_required_part_that_fails_fails_the_checkpoint(tmp_path):
    """Catches: every part treated as an optional one."""

    def work(manager: Manager) -> None:
        manager._ports.driver.before_write = fail_export
        with pytest.raises(SaveFailed, match="no export"):
            manager.save(1, parts={"state": {"w": 1}, "export": {"w": 2}}).wait()

    assert together(tmp_path, work) == [None, None]


def test_a_tree_of_files_is_made_durable_and_listed(tmp_path):
    """Catches: files beside the shards that no receipt lists and no call fsynced."""

    def make_files(directory: str) -> None:
        inner = Path(directory, "tokenizer")
        inner.mkdir()
        (inner / "vocab.txt").write_text("a b c")
        Path(directory, "config.json").write_text("{}")

    def work(manager: Manager) -> Any:
        tree = FileTree(make_files) if manager.rank == 1 else None
        manager.save(1, parts={"state": {"w": 1}, "huggingface": tree}).wait()
        if manager.rank == 0:
            names = {f["name"] for f in manifest_of(tmp_path, "iter_0000001")["files"]}
            assert {"huggingface/config.json", "huggingface/tokenizer/vocab.txt"} <= names
        found = manager.restore(parts={"state": TEMPLATE, "huggingface": tree})
        assert found is not None
        return found.parts.get("huggingface")

    found = together(tmp_path, work)
    assert found == [None, str(tmp_path / "iter_0000001/huggingface")]


def test_every_file_of_a_tree_is_fsynced(tmp_path):
    """Catches: files that a power loss takes out of a tracked checkpoint."""
    (tmp_path / "step/files/inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (tmp_path / "step/files" / name).write_text(name)
    calls: list[tuple[str, str]] = []
    disk = PosixStorage(str(tmp_path), create=False)
    storage = FaultStorage(disk, before=lambda index, method, path: calls.append((method, path)))
    written = TreePart("files", "files").write(storage, "step")
    assert [f.name for f in written.files] == ["files/a", "files/inner/b"]
    synced = [path for method, path in calls if method == "fsync"]
    assert synced == ["step/files/a", "step/files/inner/b"]
    disk.close_root()


def test_F16_a_tree_with_a_link_is_refused(tmp_path):
    """Catches: a checkpoint that depends on something outside of it."""

    def link(directory: str) -> None:
        os.symlink("/etc/passwd", Path(directory, "link"))

    def work(manager: Manager) -> None:
        with pytest.raises(SaveFailed, match="is a symlink"):
            manager.save(1, parts={"state": {"w": 1}, "files": FileTree(link)}).wait()

    assert together(tmp_path, work, ranks=1) == [None]


def test_an_optional_tree_that_cannot_be_made_is_left_out(tmp_path):
    """Catches: an export that raises on the training thread and ends the save."""

    def raising(directory: str) -> None:
        Path(directory, "half").write_text("x")
        raise RuntimeError("no bridge")

    def work(manager: Manager) -> None:
        tree = OptionalPart(FileTree(raising))
        manager.save(1, parts={"state": {"w": 1}, "export": tree}).wait()

    assert together(tmp_path, work, ranks=1) == [None]
    assert "RuntimeError: no bridge" in manifest_of(tmp_path, "iter_0000001")["dropped"]["export"]
    assert not (tmp_path / "iter_0000001/export").exists()


def test_steps_are_named_as_verl_names_them(tmp_path):
    """Catches: one place that still says iter_: recovery, retention, readers, in that order."""

    def work(manager: Manager) -> list[int]:
        for step in (1, 2, 3):
            manager.save((manager.latest_step() or 0) + 1, {"w": step}).wait()
        return manager.all_steps()

    settings = {"layout": "verl", "retention": LatestN(2)}
    assert together(tmp_path, work, ranks=1, **settings) == [[2, 3]]
    assert together(tmp_path, work, ranks=1, **settings) == [[5, 6]]
    names = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert names == {"global_step_5", "global_step_6", "latest_checkpointed_iteration.txt"}
    with ReaderLease(tmp_path, 5, layout="verl") as lease:
        assert lease.path == str(tmp_path / VERL.published_name(5))


def test_a_root_is_not_opened_under_other_names(tmp_path):
    """Catches: every checkpoint taken for missing, and withdrawn, because of one word in a config."""
    together(tmp_path, lambda manager: manager.save(1, {"w": 1}).wait() and None, ranks=1)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    (refused,) = together(tmp_path, lambda manager: None, ranks=1, layout="verl")
    assert isinstance(refused, ConfigError) and "layout 'megatron'" in str(refused)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_tree_around_another_part_lists_only_its_own(tmp_path):
    """Catches: a file that two parts claim, for which every save fails."""

    def write(directory: str) -> None:
        Path(directory, "config.json").write_text("{}")

    parts = {"state": {"w": 1}, "actor": FileTree(write), "actor.tokens": FileTree(write)}
    specs = (
        PartSpec("actor", "tree", "actor"),
        PartSpec("inner", "report", "actor/inner"),
        PartSpec("rank_1.pt", "file", "actor"),
    )
    (tmp_path / "step/actor/inner").mkdir(parents=True)
    (tmp_path / "step/actor/rank_1.pt").touch()
    write(str(tmp_path / "step/actor"))
    write(str(tmp_path / "step/actor/inner"))
    storage = PosixStorage(str(tmp_path), create=False)
    written = without_inner_parts(TreePart("actor", "actor"), specs).write(storage, "step")
    assert [entry.name for entry in written.files] == ["actor/config.json"]
    storage.close_root()

    def work(manager: Manager) -> Any:
        manager.save(1, parts=parts).wait()
        return manager.latest_step()

    assert together(tmp_path / "root", work) == [1, 1]


def test_I4_files_of_a_receipt_are_there_when_it_is_published(tmp_path):
    """Catches: a step that is tracked and lacks a file that its manifest names."""

    def work(manager: Manager) -> Any:
        gone = PosixStorage(str(tmp_path), create=False)

        left_over = Assembly.left_over

        def remove(self: Any) -> list[str]:
            gone.unlink(f"{self.directory}/{self.files[0].name}")
            return left_over(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Assembly, "left_over", remove)
            with pytest.raises(SaveFailed, match="is gone"):
                manager.save(1, {"w": 1}).wait()
        gone.close_root()
        return manager.latest_step()

    assert together(tmp_path, work, ranks=1) == [None]


# ----------------------------------------------------------------------- trees of several ranks


class OfRank:
    """Writes files of a rank's own, and those in ``more``, if all ranks have come here."""

    def __init__(self, rank: int, *more: str) -> None:
        self.rank, self.more = rank, more

    def __call__(self, directory: str) -> None:
        Path(directory, "inner").mkdir()
        for name in (f"loader_{self.rank}.pt", f"inner/{self.rank}", *self.more):
            Path(directory, name).write_text(str(self.rank))


def test_I3_every_rank_writes_files_of_a_tree(tmp_path):
    """Catches: files of a rank that no receipt lists, or that two receipts list; a directory in
    which they were made, and which stays."""

    def work(manager: Manager) -> Any:
        tree = FileTree(OfRank(manager.rank), every_rank=True)
        manager.save(1, parts={"state": {"w": 1}, "loader": tree}).wait()
        found = manager.restore(parts={"state": {"w": None}, "loader": tree})
        assert found is not None
        return found.parts["loader"]

    assert together(tmp_path, work, 3) == [str(tmp_path / "iter_0000001/loader")] * 3
    found = manifest_of(tmp_path, "iter_0000001")
    names = {entry["name"] for entry in found["files"]}
    listed = {name for name in names if name.startswith("loader/")}
    assert listed == {f"loader/{name}{r}{end}" for r in range(3) for name, end in NAMES}
    for rank in range(3):
        assert (tmp_path / f"iter_0000001/loader/loader_{rank}.pt").read_text() == str(rank)
    assert list((tmp_path / "iter_0000001/.ckptfsm").glob("tree-*")) == []


NAMES = (("loader_", ".pt"), ("inner/", ""))


def test_I3_every_rank_writes_files_of_a_tree_that_is_the_whole_step(tmp_path):
    """Catches: files below another name than a stock loader's; our own files taken for the tree's."""

    def work(manager: Manager) -> Any:
        tree = FileTree(OfRank(manager.rank), every_rank=True, directory="")
        manager.save(1, tree).wait()
        found = manager.restore(FileTree(OfRank(9), directory=""))
        assert found is not None
        return found.state, found.directory

    assert together(tmp_path, work) == [(str(tmp_path / "iter_0000001"),) * 2] * 2
    listed = {entry["name"] for entry in manifest_of(tmp_path, "iter_0000001")["files"]}
    listed = {name for name in listed if not name.startswith(".ckptfsm/")}
    assert listed == {f"{name}{r}{end}" for r in range(2) for name, end in NAMES}
    assert list((tmp_path / "iter_0000001/.ckptfsm").glob("tree-*")) == []


def test_an_empty_directory_of_a_rank_is_kept(tmp_path):
    """Catches: a tree that its reader does not take, because a directory without files is gone."""

    def make_empty(directory: str) -> None:
        Path(directory, "cache", "inner").mkdir(parents=True)

    def work(manager: Manager) -> Any:
        tree = FileTree(make_empty, every_rank=True)
        return manager.save(1, parts={"state": {"w": 1}, "loader": tree}).wait().step

    assert together(tmp_path, work) == [1, 1]
    assert (tmp_path / "iter_0000001/loader/cache/inner").is_dir()


@pytest.mark.parametrize("target", ["/etc", "/etc/passwd", "/nowhere"])
def test_F16_a_link_in_a_tree_of_every_rank_is_refused(tmp_path, target):
    """Catches: a link to a directory that is left out without a word, or told as something else."""

    def link(directory: str) -> None:
        os.symlink(target, Path(directory, f"link{Path(directory).name}"))

    def work(manager: Manager) -> Any:
        tree = FileTree(link, every_rank=True)
        with pytest.raises(SaveFailed, match=r"linktree-loader-\d of part 'loader' is a symlink"):
            manager.save(1, parts={"state": {"w": 1}, "loader": tree}).wait()
        return manager.all_steps()

    assert together(tmp_path, work) == [[], []]


def test_I3_every_rank_of_a_group_writes_files_of_a_tree(tmp_path):
    """Catches: a group in which one rank writes for all, or each into the directory of another."""

    def make_one(directory: str) -> None:
        Path(directory, Path(directory).name).write_text("made by a rank")

    job = GroupJob(tmp_path, {"actor": 2, "critic": 2})
    save = job.begin(1)
    for name, ticket in save.tickets.items():
        trees = {"model": {"w": "x"}, "loader": FileTree(make_one, every_rank=True)}
        job.controller.feed(job.groups[name].write(ticket, [None, None], parts=trees))
    save.handle.wait()
    job.controller.close()
    listed = {entry["name"] for entry in manifest_of(tmp_path, "iter_0000001")["files"]}
    for name in ("actor", "critic"):
        found = {f"{name}/loader/tree-{name}.0-{rank}" for rank in range(2)}
        assert {each for each in listed if each.startswith(f"{name}/loader/")} == found
        assert all((tmp_path / "iter_0000001" / each).is_file() for each in found)
    assert list((tmp_path / "iter_0000001/.ckptfsm").glob("tree-*")) == []


def test_I3_each_rank_of_a_group_has_files_of_its_own(tmp_path):
    """Catches: a file under another name than it was given, or of which another rank's is kept;
    ranks that have to name each other's files; one that a tree around it lists again."""

    def make_config(directory: str) -> None:
        Path(directory, "config.json").write_text("{}")

    job = GroupJob(tmp_path, {"actor": 2, "critic": 2})
    save = job.begin(1)
    for name, ticket in save.tickets.items():
        tree = FileTree(make_config, every_rank=False)
        given = iter([{f"rank_{r}.pt": b"%d of 2" % r, "": tree} for r in range(2)])
        make = partial(made, given)
        job.controller.feed(job.groups[name].write(ticket, [None, None], parts=make))
    save.handle.wait()
    job.controller.close()
    names = {entry["name"] for entry in manifest_of(tmp_path, "iter_0000001")["files"]}
    found = {"config.json": b"{}", "rank_0.pt": b"0 of 2", "rank_1.pt": b"1 of 2"}
    for name in ("actor", "critic"):
        assert {each for each in names if each.startswith(name)} == {f"{name}/{f}" for f in found}
        step = tmp_path / "iter_0000001" / name
        assert {path.name: path.read_bytes() for path in step.iterdir()} == found


def made(given: Iterator[Any]) -> Any:
    parts = next(given)
    if isinstance(parts, Exception):
        raise parts
    return parts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"model": {"w": 1}}, {"optim": {"w": 2}}], "names the directories"),
        (
            [{"model": {"w": 1}}, {"model": {"w": 1}, "optim": None}],
            "parts that rank 0 does not ask for",
        ),
        ([{"model": {"w": 1}}, None], "maps directories"),
        ([{"model": {"w": 1}}, ["model"]], "maps directories"),
        ([{"model": {"w": 1}}, {1: {"w": 1}, "model": {"w": 1}}], "maps directories"),
        ([{"model": {"w": 1}}, RuntimeError("out of memory")], "RuntimeError: out of memory"),
        ([{"x.pt": b"1"}, {"x.pt": b"2"}], "rank 0, 1 give a file 'x.pt' each"),
        ([{"x.pt": b"1"}, {"x/y.pt": b"2"}], "'x/y.pt' cannot be the name of a rank's file"),
        ([{"w": {"w": 1}, "actor.0": b"1"}, {"w": {"w": 1}}], "'actor.0' cannot be the name"),
    ],
)
def test_I3_parts_that_do_not_fit_together_fail_the_save(tmp_path: Path, given: Any, words: str):
    """Catches: a checkpoint that is tracked and cannot be loaded, as one rank's shard lies where the
    others' metadata does not look; ranks that wait for one that raised alone."""
    job = GroupJob(tmp_path / "root", {"actor": 2})
    save, make = job.begin(1), partial(made, iter(given))
    events = job.groups["actor"].write(save.tickets["actor"], [None, None], parts=make)
    assert {type(event) for event in events} == {Failed}
    job.controller.feed(events)
    with pytest.raises(SaveFailed, match=words):
        save.handle.wait()
    job.controller.abandon()


def test_I4_two_ranks_that_write_one_name_fail_the_save(tmp_path):
    """Catches: a file of one rank over that of another one."""

    def work(manager: Manager) -> Any:
        tree = FileTree(OfRank(manager.rank, "config.json"), every_rank=True)
        with pytest.raises(SaveFailed, match=r"config\.json"):
            manager.save(1, parts={"state": {"w": 1}, "loader": tree}).wait()
        manager.save(2, parts={"state": {"w": 1}}).wait()
        return manager.all_steps()

    assert together(tmp_path, work) == [[2], [2]]


def test_files_that_may_not_be_moved_are_told_as_that(tmp_path):
    """Catches: a directory that ``make`` left read-only, told as a failure that ends by itself."""

    def work(manager: Manager) -> Any:
        tree = FileTree(OfRank(manager.rank), every_rank=True)
        with pytest.MonkeyPatch.context() as patch:  # nothing is forbidden to root
            patch.setattr(Path, "rename", forbidden)
            with pytest.raises(SaveRefused, match="inner/0 of rank 0 cannot be moved"):
                manager.save(1, parts={"loader": tree}).wait()
        return manager.all_steps()

    rename = Path.rename

    def forbidden(self: Path, target: Any) -> Path:
        if self.name == "0":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    assert together(tmp_path, work, ranks=1) == [[]]


def test_an_optional_tree_that_one_rank_cannot_make_is_left_out(tmp_path):
    """Catches: files of the failed rank, in no receipt, that fail the whole checkpoint."""

    def work(manager: Manager) -> Any:
        make = OfRank(manager.rank, *(["missing/x"] if manager.rank else []))
        tree = OptionalPart(FileTree(make, every_rank=True))
        manager.save(1, parts={"state": {"w": 1}, "export": tree}).wait()
        return manager.all_steps()

    assert together(tmp_path, work) == [[1], [1]]
    assert not (tmp_path / "iter_0000001/export").exists()


def test_ranks_that_say_different_things_of_a_tree_are_refused(tmp_path):
    """Catches: a rank that awaits the files of all, and one that awaits those of the first."""

    def work(manager: Manager) -> None:
        tree = FileTree(OfRank(manager.rank), every_rank=manager.rank == 0)
        with pytest.raises(SaveRefused, match="rank 1 gives the FileTree 'loader' with every_rank"):
            manager.save(1, parts={"state": {"w": 1}, "loader": tree})

    assert together(tmp_path, work) == [None, None]


def test_I10_a_rank_that_waits_in_make_is_named(tmp_path):
    """Catches: "a rank is gone", said of a rank that waits in ``make`` for the others."""
    gate = threading.Event()
    group = ThreadGroup(2, timeout_s=0.2)

    def wait(directory: str) -> None:
        assert gate.wait(20.0)

    def one(rank: int) -> Any:
        transport = group.transport(rank)
        ports = fake_ports(tmp_path, transport=transport, driver=FakeDriver(rank))
        manager = Manager(ports, make({}), ())
        try:
            manager.save(
                1, parts={"state": {"w": 1}, "loader": FileTree(wait, every_rank=False)}
            ).wait()
        finally:
            gate.set()
            manager.abandon()

    results: list[Any] = run_ranks(2, lambda transport: one(transport.rank))
    assert isinstance(results[1], RankFailed)
    assert "rank 0 may be in make of part 'loader'" in results[1].message
    assert "every_rank=True" in results[1].message
