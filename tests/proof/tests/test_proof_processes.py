"""That the checks of the sweeps over real processes can fail; ``python -m proof`` runs the sweeps.

They fork from this process, so a bug that is planted here is the children's as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proof import processes
from proof.layer import Budget
from proof.processes import (
    Finding,
    _manager_sites,
    _pool,
    decided_otherwise,
    strike,
)
from proof.real_jobs import MANAGER
from proof.real_site import CUTS, ROLES, Ended, Role, Site

import ckptfsm.disk.assembly as assembly
import ckptfsm.disk.durable as durable
import ckptfsm.disk.inspection as evidence
import ckptfsm.disk.publishing as publishing
import ckptfsm.writers.shard_file as writer
from ckptfsm.coordinator.applier import Applier
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.events import Cleaned
from ckptfsm.core.ports import Storage
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.disk.publishing import Publisher

Plant = Callable[[pytest.MonkeyPatch], None]
MAIN = Site(processes.MAIN_SCRIPT)


# ------------------------------------------------------------------------------- can the checks fail?


def strike_first(method: str, ending: str, kind: str, after: Site = MAIN) -> Finding:
    """Strike the main script, or the recovery ``after`` a kill, at the first such call."""
    recovers = after.recovery == processes.NEVER
    with _pool(1) as pool:
        unstruck = pool.apply(strike, (after,), {"synced": False})
        assert unstruck.ended is not None
        calls = unstruck.ended.calls["trainer"]
        index = next(
            i for i, (m, path) in enumerate(calls) if m == method and path.endswith(ending)
        )
        site = replace(after, kind=kind, **{"recovery" if recovers else "index": index})
        struck: Finding = pool.apply(strike, (site,), {"synced": False})
    assert struck.hit == (method, calls[index][1])
    return struck


def tracker_first(patch: pytest.MonkeyPatch) -> None:
    whole = Publisher.finalize

    def finalize(self: Publisher, checkpoint: Any) -> str:
        self.write_tracker(checkpoint.step)
        return whole(self, checkpoint)

    patch.setattr(Publisher, "finalize", finalize)


def rename_errors_ignored(patch: pytest.MonkeyPatch) -> None:
    def put(storage: Storage, path: str, data: bytes, *, tag: str, check: Any = None) -> None:
        temporary = durable._write_temporary(storage, f"{path}{durable.TEMPORARY}{tag}", data)
        try:
            storage.rename(temporary, path)
        except OSError:
            return
        storage.fsync_dir(durable.parent_of(path))

    patch.setattr(publishing, "put", put)
    patch.setattr(assembly, "put", put)


def fsync_tried_again(patch: pytest.MonkeyPatch) -> None:
    def write_new(storage: Storage, path: str, data: bytes) -> None:
        handle = storage.open_exclusive(path)
        durable.write_all(storage, handle, data)
        try:
            storage.fsync(handle)
        except OSError:
            storage.fsync(handle)
        storage.close(handle)

    patch.setattr(durable, "write_new", write_new)


def short_write_taken_for_all(patch: pytest.MonkeyPatch) -> None:
    def write_all(storage: Storage, handle: int, data: bytes | memoryview) -> None:
        storage.write(handle, data)

    patch.setattr(writer, "write_all", write_all)


def nothing_tried_again(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Applier, command: Any, run: Callable[[Any], None], subject: Any) -> None:
        try:
            run(subject)
        except OSError:
            return

    patch.setattr(Applier, "_retriable", drop)


def partial_left_behind(patch: pytest.MonkeyPatch) -> None:
    def say_cleaned(self: Applier, checkpoint: Any) -> None:
        self.post(Cleaned(checkpoint.id))

    patch.setattr(Applier, "_run_clean_up", say_cleaned)


def never_cleaned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Applier, "_run_clean_up", lambda self, checkpoint: None)


def error_without_a_type(patch: pytest.MonkeyPatch) -> None:
    whole = Coordinator.request

    def request(self: Coordinator, asked: Any) -> Any:
        try:
            return whole(self, asked)
        except SaveRefused as error:
            raise KeyError(asked.step) from error

    patch.setattr(Coordinator, "request", request)


PLANTED: dict[str, tuple[Plant, str, tuple[str, str, str]]] = {
    "the tracker is written before publishing": (
        tracker_first,
        "I2",
        ("rename", "iter_0000001", "kill"),
    ),
    "an error of rename is not looked into": (
        rename_errors_ignored,
        "I4",
        ("rename", ".ckptfsm/manifest.json", "EIO"),
    ),
    "a failed fsync is tried again": (
        fsync_tried_again,
        "F6",
        ("fsync", "0.json.tmp-1.e1.a1.0", "EIO"),
    ),
    "a short write is taken for all": (
        short_write_taken_for_all,
        "F7",
        ("write", ".distcp", "short"),
    ),
    "a pending command is forgotten": (
        nothing_tried_again,
        "F5",
        ("write", "iteration.txt.tmp-1-1-nonce-1.0", "EIO"),
    ),
    "a partial is left behind": (partial_left_behind, "F5", ("write", ".distcp", "kill")),
    "a failed attempt is never cleaned": (never_cleaned, "I8", ("write", ".distcp", "kill")),
    "an error without a type": (error_without_a_type, "F5", ("mkdir", "1.e1.a1", "EIO")),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a check of this layer that cannot fail. The same site is green without the bug."""
    plant, promise, where = PLANTED[bug]
    assert strike_first(*where).violation is None
    plant(monkeypatch)
    violation = strike_first(*where).violation
    assert violation is not None, "the layer does not see it"
    assert violation.promise == promise, violation
    assert f"--kind {where[2]} --site" in violation.replay


def read_error_is_damage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evidence, "_raise_unless_damage", lambda error: None)


def unreadable_manifest_is_none(patch: pytest.MonkeyPatch) -> None:
    whole = evidence.read_commit

    def read_commit(storage: Storage, directory: str) -> Any:
        try:
            return whole(storage, directory)
        except OSError:
            return None

    patch.setattr(evidence, "read_commit", read_commit)


KILLED = Site("save_track_prune", 209, "kill", recovery=processes.NEVER, reads=True)
LATEST = ("read", "iter_0000002/.ckptfsm/manifest.json", "EIO", KILLED)


@pytest.mark.parametrize("plant", [read_error_is_damage, unreadable_manifest_is_none])
def test_looking_away_from_a_read_of_recovery_is_seen(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a step that is no longer resumed from because it could not be read once."""
    with _pool(1) as pool:
        unstruck = pool.apply(strike, (KILLED,), {"synced": False}).ended
    refused = strike_first(*LATEST)
    assert refused.violation is None and not decided_otherwise(refused, unstruck)
    assert refused.ended is not None and "refused" in refused.ended.told
    plant(monkeypatch)
    assert "then 1 was resumed from, not 2" in decided_otherwise(strike_first(*LATEST), unstruck)


def test_every_kind_of_read_is_struck() -> None:
    """Would catch: a read of the storage that tells the sweep nothing, and so is never struck."""
    with _pool(1) as pool:
        life = pool.apply(strike, (replace(MAIN, reads=True),), {"synced": False}).ended
    methods = {method for method, _ in life.calls["trainer"]}
    assert methods == {"stat", "listdir", "read", "digest", "free_bytes", "try_lock"}


def test_the_bounded_profile_takes_reads_that_are_alike_once() -> None:
    """Would catch: a read left out that is like no other, or one kind of error that is never chosen."""
    step = [("listdir", "epochs"), ("stat", "iter_0000001"), ("stat", "iter_0000001")]
    life = Ended(0, calls={"trainer": [*step, ("listdir", "epochs"), ("stat", "iter_0000002")]})
    sites = [(Site("roll_back", i, reads=True), life) for i in range(5)]
    chosen = {whole: processes._read_errors(set(), sites, whole=whole) for whole in (False, True)}
    assert [(s.index, s.kind) for s in chosen[False]] == [
        (0, "EIO"),
        (1, "ESTALE"),
        (2, "EIO"),
        (3, "ESTALE"),
    ]
    assert len(chosen[True]) == 5 * len(processes.READ_ERRNOS)


def test_a_lock_that_cannot_be_made_is_among_the_reads() -> None:
    """Would catch: a full disk that is never met by the one read that may make a file."""
    life = Ended(0, calls={"trainer": [("stat", "x"), ("try_lock", ".ckptfsm/lock")]})
    sites = [(Site("roll_back", i, reads=True), life) for i in range(2)]
    chosen = processes._read_errors(set(), sites, whole=True)
    assert [s.kind for s in chosen if s.index == 0] == ["EIO", "ESTALE"]
    assert [s.kind for s in chosen if s.index == 1] == ["EIO", "ESTALE", "ENOSPC", "EDQUOT"]


@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT"])
def test_a_bug_at_a_lock_that_cannot_be_made_is_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: such an error that is not judged. Green without the bug."""
    where = ("try_lock", "/lock", kind, replace(MAIN, reads=True))
    assert strike_first(*where).violation is None
    recovery_without_a_type(monkeypatch)
    violation = strike_first(*where).violation
    assert violation is not None and violation.promise == "F5"


def test_a_read_that_was_made_and_not_struck_is_a_gap() -> None:
    """Would catch: a sweep that takes a call it never struck for one that the life did not make."""
    told = {"counts": {"trainer": 7, "writer": 0}}
    for index, reads, polled_less in ((6, True, False), (7, True, True), (7, False, False)):
        finding = Finding(Site(MANAGER, index, "EIO", reads=reads), ended=Ended(0, told=told))
        assert processes._polled_less(finding) is polled_less
    assert not processes._polled_less(Finding(Site(MANAGER, 7, "EIO", reads=True)))


def miss_a_call(site: Site, *, synced: bool, place: str) -> Finding:
    finding = strike(site, synced=synced, place=place)
    if site.index == 7:
        finding.struck = None
    return finding


def test_a_sweep_that_misses_a_call_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a sweep that counts calls it never struck."""
    only = {"fail_and_retry": processes.SCRIPTS["fail_and_retry"]}
    monkeypatch.setattr(processes, "SCRIPTS", only)
    monkeypatch.setattr(processes, "strike", miss_a_call)
    first = processes._own_sites
    monkeypatch.setattr(processes, "_own_sites", lambda lives: first(lives)[:12])
    result = processes.run(Budget(stop_at_first=True))
    assert [v.promise for v in result.violations] == ["sweep"]
    assert "--script fail_and_retry --kind kill --site 7" in result.violations[0].replay


def hopeful_recovery(patch: pytest.MonkeyPatch) -> None:
    """An error of the disk while the root is opened passes for an empty root."""
    whole = Coordinator.open

    def open_(self: Coordinator) -> Any:
        try:
            return whole(self)
        except OSError:
            return RecoveryReport(1, None, (), (), 0.0)

    patch.setattr(Coordinator, "open", open_)


def recovery_without_a_type(patch: pytest.MonkeyPatch) -> None:
    whole = Coordinator.open

    def open_(self: Coordinator) -> Any:
        try:
            return whole(self)
        except OSError as error:
            raise KeyError("root") from error

    patch.setattr(Coordinator, "open", open_)


@pytest.mark.parametrize("plant", [hopeful_recovery, recovery_without_a_type])
def test_a_bug_of_a_struck_recovery_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: errors of a recovery that are not judged. Green without the bug."""
    site = Site("roll_back", 213, "EIO", recovery=1)
    with _pool(1) as pool:
        sound = pool.apply(strike, (site,), {"synced": False})
    assert sound.recovery_struck is not None and sound.violation is None
    assert sound.ended is not None and "refused" in sound.ended.told
    plant(monkeypatch)
    with _pool(1) as pool:
        struck = pool.apply(strike, (site,), {"synced": False})
    assert struck.violation is not None and struck.violation.promise == "I8"
    assert "--kind EIO --site 213 --recovery 1" in struck.violation.replay


READING: dict[str, tuple[Plant, tuple[str, str]]] = {
    "an error without a type": (recovery_without_a_type, ("listdir", ".ckptfsm/epochs")),
    "a pending command is forgotten": (
        nothing_tried_again,
        ("read", "latest_checkpointed_iteration.txt"),
    ),
}


@pytest.mark.parametrize("bug", READING)
def test_a_bug_at_an_error_of_a_lifes_read_is_seen(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: errors of a life's reads that are not judged. Green without the bug."""
    plant, (method, ending) = READING[bug]
    where = (method, ending, "ESTALE", replace(MAIN, reads=True))
    assert strike_first(*where).violation is None
    plant(monkeypatch)
    violation = strike_first(*where).violation
    assert violation is not None and violation.promise == "F5"
    assert violation.replay.endswith("--reads")


def test_a_refused_recovery_that_changed_the_decision_is_told() -> None:
    """Would catch: a refused root from which the next start resumes elsewhere."""
    refused = Ended(0, told={"refused": "StorageError"})
    finding = Finding(Site("roll_back", 213, "EIO", recovery=1), ended=refused, tracked=1)
    assert not decided_otherwise(finding, Ended(0, told={"latest": 1}))
    assert decided_otherwise(finding, Ended(0, told={"latest": 2}))
    opened = replace(finding, ended=Ended(0, told={"latest": 1}))
    assert decided_otherwise(opened, Ended(0, told={"latest": 2, "rolled_forward": False}))
    assert not decided_otherwise(opened, Ended(0, told={"latest": 2, "rolled_forward": True}))


def test_the_writer_of_the_manager_dies_alone() -> None:
    """Would catch: a sweep of the writer that strikes the trainer."""
    with _pool(1) as pool:
        site = Site(MANAGER, 5, "kill", role="writer")
        finding = pool.apply(strike, (site,), {"synced": True})
    assert finding.violation is None and finding.struck is not None
    assert ".ckptfsm/staging/" in finding.struck[1]


@pytest.mark.parametrize("role", ROLES)
def test_every_write_of_the_manager_is_cut(role: Role) -> None:
    """Would catch: a sweep of the manager that fails its calls, and never cuts one of its writes."""
    with _pool(1) as pool:
        life = pool.apply(strike, (Site(MANAGER),), {"synced": False}).ended
    writes = [i for i, (m, _) in enumerate(life.calls[role]) if m in ("write", "pwrite")]
    assert writes
    sites = [s for part in _manager_sites(life, role, whole=False).values() for s in part]
    for kind in CUTS:
        assert [s.index for s in sites if s.kind == kind] == writes
    assert {s.index for s in sites if s.kind == "kill"} == set(range(len(life.calls[role])))


def test_a_bug_at_a_short_write_of_the_managers_writer_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would catch: short writes of a forked writer that are not judged. Green without the bug."""
    with _pool(1) as pool:
        life = pool.apply(strike, (Site(MANAGER),), {"synced": False}).ended
        shard = next(
            i
            for i, (method, path) in enumerate(life.calls["writer"])
            if method == "write" and path.endswith(".distcp")
        )
        site = Site(MANAGER, shard, "short", role="writer")
        assert pool.apply(strike, (site,), {"synced": False}).violation is None
    short_write_taken_for_all(monkeypatch)
    with _pool(1) as pool:
        violation = pool.apply(strike, (site,), {"synced": False}).violation
    assert violation is not None and violation.promise == "F7"
    assert violation.replay.endswith("--role writer")


def test_without_a_real_disk_a_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a sweep of a file system in memory that passes for one of a disk."""
    swept: list[str] = []
    monkeypatch.setattr(processes, "_sweep", lambda sweep, _: swept.append(sweep.place))
    there = dict.fromkeys((tempfile.gettempdir(), "/var/tmp", str(Path.cwd())), "tmpfs")
    monkeypatch.setattr(processes, "file_system_of", lambda directory: there[directory])
    for profile in ("nightly", "release"):
        assert "is tmpfs" in processes.run(Budget(profile)).skipped
    assert not swept
    assert processes.run(Budget("pr")).notes[-1].endswith(" is tmpfs")
    there["/var/tmp"] = "xfs"
    result = processes.run(Budget("release"))
    assert not result.skipped and result.notes[-1] == "/var/tmp is xfs"
    assert [place.startswith("/var/tmp/") for place in swept] == [False, True]
