"""Other users at a root: what they may do is what the modes of its files say, and is told by type."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_roots import real_job, real_root

from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli.app import run
from ckptfsm.core.errors import NotPermitted, RootBusy
from ckptfsm.core.evidence import Ownership
from ckptfsm.disk import ownership
from ckptfsm.disk.overview import owner_of
from ckptfsm.disk.ownership import open_root
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.follow.evaluators import checkpoints, wait_for_new_checkpoint

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
WAIT_S = 60.0
GROUP, OTHERS = 54321, 54322


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of a group, which others may enter. That of pytest is its user's alone."""
    made = Path(tempfile.mkdtemp(prefix="ckptfsm-permissions-"))
    os.chown(made, -1, GROUP)
    made.chmod(0o2755)
    before = os.umask(0o002)
    yield made
    os.umask(before)
    shutil.rmtree(made)


@pytest.fixture(autouse=True, scope="module")
def commands_are_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The other user may not read this clone, where it lies in a directory of its user alone."""
    root = str(real_root(tmp_path_factory.mktemp("imports") / "root", 10))
    for command in (("pin", "10"), ("doctor",), ("ls",), ("lease", "11")):
        commanded(*command, "-r", root)


def as_user(group: int, call: Callable[[], Any]) -> Any:
    """The result of a call in a process of another user of ``group``; the error it raises."""

    def become_and_call() -> Any:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(54321, 54321, 54321)
        try:
            return call()
        except Exception as error:
            return error

    return fork_child(become_and_call, keep=()).wait(WAIT_S).payload


def commanded(*arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it says about an error."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        return run(arguments), err.getvalue()


def leased(root: Path) -> str:
    with ReaderLease(root, 10) as lease:
        return lease.path


@pytest.mark.damages_journal("another user writes it, and the judge comes after its directory")
def test_a_colleague_of_the_group_may_lease_and_own(place: Path):
    """Catches: modes that keep the group out, although umask and setgid let it in."""
    root = real_root(place / "root", 10)
    assert as_user(GROUP, lambda: leased(root)) == str(root / "iter_0000010")
    assert as_user(GROUP, lambda: commanded("pin", "10", "-r", str(root))) == (0, "")
    assert (root / ".ckptfsm/pins/10.json").stat().st_uid == 54321
    assert real_root(root, 20) == root, "the first user goes on"


@pytest.mark.parametrize("living", [True, False])
def test_a_stranger_is_refused_by_type(place: Path, living: bool):
    """Catches: a bare PermissionError, with the name of a temporary file and no way out."""
    root = place / "root"
    job = real_job(root)
    job.save(10)
    if not living:
        job.close()
    refused = as_user(OTHERS, lambda: leased(root))
    assert isinstance(refused, NotPermitted) and refused.user == 54321
    assert "docs/permissions.md" in str(refused)
    pin = ("pin", "10", "--wait", "0", "-r", str(root))
    status, err = as_user(OTHERS, lambda: commanded(*pin))
    assert status == 1 and "[not_permitted: " in err
    assert as_user(OTHERS, lambda: commanded("ls", "-r", str(root))) == (0, "")
    if living:
        job.close()


def asked(root: Path, umask: int) -> tuple[int, str]:
    os.umask(umask)
    return commanded("pin", "10", "--wait", "0", "-r", str(root))


@pytest.mark.parametrize("purged", [(), ("inbox", "answers", "readers")])
def test_a_colleagues_umask_keeps_nobody_from_the_directories_of_requests(
    place: Path, purged: tuple[str, ...]
):
    """Catches: a first request by a user with umask 022, after which neither the owner nor the group
    can write there."""
    root = place / "root"
    job = real_job(root)
    job.save(10)
    for name in purged:
        shutil.rmtree(root / ".ckptfsm" / name, ignore_errors=True)
    assert as_user(GROUP, lambda: asked(root, 0o022))[0] == 3
    made = [(root / ".ckptfsm" / name).stat() for name in ("inbox", "answers")]
    assert {(s.st_uid, s.st_gid, s.st_mode & 0o7777) for s in made} == {(54321, GROUP, 0o2775)}
    assert as_user(GROUP, lambda: leased(root)) == str(root / "iter_0000010")
    job.close()


def test_a_refusal_names_the_directory_its_owner_and_its_mode(place: Path):
    """Catches: advice to stop the job for a directory that only lacks a mode bit."""
    root = place / "root"
    job = real_job(root)
    job.save(10)
    for name in ("inbox", "answers"):
        (root / ".ckptfsm" / name).mkdir(mode=0o755)
        (root / ".ckptfsm" / name).chmod(0o2755)
    err = as_user(GROUP, lambda: asked(root, 0o002))[1]
    assert "takeover" not in err
    assert f"{root}/.ckptfsm/inbox: user root, group {GROUP}, mode drwxr-sr-x" in err
    assert "chmod g+w" in err
    for name in ("inbox", "answers"):
        os.chown(root / ".ckptfsm" / name, 54321, GROUP)
    err = as_user(GROUP, lambda: asked(root, 0o002))[1]
    assert "takeover" not in err and f"chmod g+w {root}/.ckptfsm/inbox" in err
    job.close()


def test_a_root_of_one_user_alone_is_refused_by_type(place: Path):
    """Catches: a bare PermissionError where not even the root may be opened."""
    root = real_root(place / "root", 10)
    root.chmod(0o700)
    for call in (
        lambda: leased(root),
        lambda: wait_for_new_checkpoint(root, timeout_s=0),
        lambda: next(checkpoints(root, timeout_s=0)),
        lambda: PosixStorage(root, create=False),
    ):
        refused = as_user(GROUP, call)
        assert isinstance(refused, NotPermitted) and f"{root}: user root" in refused.message


def seen(root: Path) -> Ownership:
    return owner_of(PosixStorage(root, create=False)).ownership


def started(root: Path) -> None:
    open_root(PosixStorage(root), this_process())


@pytest.mark.parametrize("hidden", [False, True])
def test_F12_an_owner_that_cannot_be_looked_at_is_not_dead(place: Path, hidden: bool, monkeypatch):
    """Catches: a colleague who takes the root of a living job, of which the kernel shows neither the
    open files nor, with hidepid, the start; after a copy the job has no lock either."""
    root = place / "root"
    job = real_job(root)
    job.save(10)
    (root / ".ckptfsm/lock").read_bytes()  # closing it, as a copy does, drops the lock
    if hidden:
        monkeypatch.setattr(ownership, "_started", lambda pid: "")
    assert as_user(GROUP, lambda: seen(root)) is Ownership.LIVES
    assert isinstance(as_user(GROUP, lambda: started(root)), RootBusy)
    status, err = as_user(GROUP, lambda: commanded("pin", "10", "--wait", "0", "-r", str(root)))
    assert status == 3 and "[root_busy: " in err
    job.save(20)  # nobody has fenced it
    job.close()


def test_F29_a_killed_owner_of_another_user_leaves_the_root_free(place: Path):
    """Catches: an owner that cannot be looked at, taken for living although its process ended."""
    root = real_root(place / "root", 10)
    fork_child(lambda: started(root), keep=()).wait(WAIT_S)
    assert as_user(GROUP, lambda: seen(root)) is Ownership.ENDED
    assert as_user(GROUP, lambda: started(root)) is None
