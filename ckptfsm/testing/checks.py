"""Checks for extensions by trainers: a retention policy, a part that writes its files itself.

``assert_policy_sound`` and ``assert_writer_sound`` run your code inside the production code, on a
disk that fails at every call. Both raise ``Unsound`` with the fault. Needs ``ckptfsm[testing]``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfsm.core.documents import Receipt, decode
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.formats import FORMATS
from ckptfsm.core.layout import PRIVATE, RECEIPTS, receipt_name, staging_dir
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Identity, PartJob, RankJob
from ckptfsm.core.retention import CheckpointInfo, Policy, immutable
from ckptfsm.disk.durable import TEMPORARY, is_temporary, list_names, lookup, make_dirs, walk_files
from ckptfsm.testing.faults import FaultStorage, Hook, crash_at, fail_at
from ckptfsm.testing.harness import FakeJob, check_root
from ckptfsm.testing.simfs import Crash, ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank

Keeps = Callable[[Sequence[CheckpointInfo]], Collection[int]]
_OF = AttemptId(1, 1, 1)
_LOCATION = staging_dir(_OF)
_LIMIT = 1 << 20


class Unsound(AssertionError):
    """A policy or a writer breaks a rule that the library relies on."""


# ------------------------------------------------------------------------------------------- policies


def assert_policy_sound(policy: Policy, *, keeps: Keeps | None = None, examples: int = 200) -> None:
    """Try ``policy`` on many sets of checkpoints, then in a job that is restarted after every save.

    ``keeps(checkpoints)``: the steps that the policy must keep at least, as its author means it.

    Raises ``Unsound`` if the policy raises (as when it changes its argument), names missing steps,
    or drops steps of ``keeps``. Also raised if a second call answers differently. Hypothesis shows
    the shortest example.
    """

    @settings(  # the same examples every time
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_checkpoints())
    def check(checkpoints: list[CheckpointInfo]) -> None:  # Hypothesis drives functions only
        _check_answer(policy, keeps, checkpoints)

    check()
    disk = SimDisk()
    for run in range(1, 9):
        storage = SimStorage(disk, f"run{run}")
        identity = Identity("sim", run, f"boot:{run}", f"run{run}")
        job = FakeJob(storage, ranks=1, retention=policy, identity=identity)
        job.open()
        job.save(run)
        check_root(SimStorage(disk, "judge"), run)
        disk.kill(f"run{run}")


def _checkpoints() -> st.SearchStrategy[list[CheckpointInfo]]:
    """Tracked checkpoints as a policy sees them: oldest first, run time growing with the step."""
    metrics = st.fixed_dictionaries({}, optional={"loss": st.floats(0, 9)})
    entry = st.tuples(st.integers(0, 12), metrics)
    entries = st.lists(entry, max_size=6, unique_by=itemgetter(0))
    return entries.map(
        lambda drawn: [
            CheckpointInfo(step, step * 10.0, found)
            for step, found in sorted(drawn, key=itemgetter(0))
        ]
    )


def _check_answer(policy: Policy, keeps: Keeps | None, checkpoints: list[CheckpointInfo]) -> None:
    try:
        kept = frozenset(policy.preserve(immutable(checkpoints)))  # the answer may be a generator
        again = frozenset(policy.preserve(immutable(checkpoints)))
    except Exception as error:  # the library would keep everything, and the disk would fill up
        raise Unsound(f"it raised {type(error).__name__}: {error}") from error
    if kept != again:
        raise Unsound(f"asked twice, it kept {sorted(kept)} and {sorted(again)}")
    strangers = kept - {c.step for c in checkpoints}
    if strangers:
        raise Unsound(f"it keeps {sorted(strangers)}, which are not there")
    missing = set(keeps(checkpoints)) - kept if keeps is not None else set()
    if missing:
        steps = [c.step for c in checkpoints]
        raise Unsound(f"of {steps} it keeps {sorted(kept)}, and not {sorted(missing)}")


# -------------------------------------------------------------------------------------------- writers


def assert_writer_sound(part: PartJob) -> int:
    """Let ``part`` write on a disk that loses power, kills or fails at each of its calls.

    Returns the number of storage calls that were tried. Raises ``Unsound`` in four cases:

    - The part fails on a sound disk.
    - A power loss removes or changes a file that the receipt lists (an fsync is missing).
    - The part writes a file that it does not list, or one that a save sweeps or writes itself.
    - The part hides an error: a call fails, yet a receipt lists a file that is not durable.
    """
    disk, calls = _write(part, None)
    _judge(disk, "after it ended", ended=True)
    short, _ = _write(part, None, short_writes=7)
    _judge(short, "on a disk that takes 7 bytes at a time", ended=True)
    for index in range(calls):
        for loss in ("all_kept", Random(index)):
            disk, _ = _write(part, crash_at(index))
            _judge(disk, f"killed before its call {index}", loss)
        for code in (errno.EIO, errno.ENOSPC):
            disk, _ = _write(part, fail_at(index, code))
            _judge(disk, f"with {errno.errorcode[code]} at its call {index}")
    return calls


def _write(
    part: PartJob, hook: Hook | None, short_writes: int | None = None
) -> tuple[SimDisk, int]:
    """A fresh disk with the part written, up to the hook's fault; and the number of calls."""
    disk = SimDisk(short_writes=short_writes)
    coordinator = SimStorage(disk, "coordinator")
    make_dirs(coordinator, _LOCATION)
    storage = FaultStorage(SimStorage(disk, "writer"), before=hook)
    try:
        write_rank(storage, RankJob(_OF, 0, 1, _LOCATION, (part,)))
    except (ProcessDead, CkptFsmError, OSError) as error:
        if hook is None:
            raise Unsound(f"it failed on a sound disk: {type(error).__name__}: {error}") from error
        disk.kill("writer")  # an error is right: the attempt fails
    return disk, len(storage.calls)


def _judge(disk: SimDisk, when: str, loss: Crash = "all_lost", *, ended: bool = False) -> None:
    """Raise ``Unsound`` unless all files of a durable receipt survived, and no others.

    ``ended``: no fault struck the part, so the receipt must exist.
    """
    disk.crash(loss)
    storage = SimStorage(disk, "judge")
    parts = list_names(storage, f"{_LOCATION}/{RECEIPTS}")
    path = f"{_LOCATION}/{receipt_name(parts[0], 0)}" if parts else ""
    if not parts or lookup(storage, path) is None:
        if ended:
            raise Unsound(f"{when}: there is no receipt after a power loss")
        return
    receipt = decode(Receipt, storage.read(path, _LIMIT), path)
    for entry in receipt.files:
        _refuse_name(entry.name, planned=bool(receipt.results))
        name = f"{_LOCATION}/{entry.name}"
        stat = lookup(storage, name)
        if stat is None or stat.kind != "file":
            raise Unsound(f"{when}: {entry.name} is listed, and gone after a power loss")
        known = entry.digest is None or storage.digest(name) == entry.digest
        if stat.size != entry.bytes or not known:
            raise Unsound(f"{when}: {entry.name} has lost its content: was it fsynced?")
    listed = {entry.name for entry in receipt.files}
    for name, _ in walk_files(storage, _LOCATION):
        if name not in listed and not name.startswith(".ckptfsm/receipts/"):
            raise Unsound(f"{when}: {name} is in no receipt: such a checkpoint is refused")


def _refuse_name(name: str, *, planned: bool) -> None:
    """Refuse a file name that a save overwrites or sweeps away.

    Only a ``planned`` part, which has results, may write the file that its ranks share.
    """
    last = name.rpartition("/")[2]
    if is_temporary(name):
        raise Unsound(f"{name}: files with {TEMPORARY!r} in their name are swept away")
    for each in FORMATS.values():
        if last in (PRIVATE, *each.metadata) or (last == each.common and not planned):
            raise Unsound(f"{name}: a {each.name} save writes such a file itself")
