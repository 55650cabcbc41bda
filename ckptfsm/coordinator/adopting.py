"""Puts a complete directory in the place where the next start adopts it, because a person asked for it.

A start never resumes unasked from a step that is newer than the tracker. So the tracker is moved too,
last: a death before that leaves a complete directory at its name.
"""

from __future__ import annotations

from ckptfsm.core.errors import ConfigError, DamagedRoot, StepExistsError
from ckptfsm.core.layout import MANIFEST, TRACKER, Layout, tracker_text
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.disk.durable import fsync_tree_dirs, fsync_tree_files, lookup, move, put
from ckptfsm.disk.inspection import inspect_published, newest_published_epoch, read_tracker
from ckptfsm.disk.journal import newest_segment
from ckptfsm.disk.ownership import RootOwnership, open_root
from ckptfsm.disk.verification import Choose, everything, verify_directory


def adopt_directory(
    storage: Storage, identity: Identity, layout: Layout, source: str, step: int
) -> None:
    """Move ``source``, a directory of the root, to the published name of ``step``, and name it.

    The caller has opened and closed the root before: during a rollback, a moved tracker would look
    like a later save. Raises ``DamagedRoot`` if a loader would refuse the directory,
    ``StepExistsError`` if the name is taken, ``RootBusy`` if an owner lives.
    """
    name = layout.published_name(step)
    of = require_loadable(storage, layout, source, step)
    above = newest_segment(storage) or newest_published_epoch(storage, layout)
    if of is not None:  # another run's may be of any epoch, and what is saved from now on is later
        above = max(above, of.epoch)
    ownership = open_root(storage, identity, above=above)
    try:
        if source != name:
            if lookup(storage, name) is not None:
                raise StepExistsError(f"{name} is taken", step=step, file=name)
            ownership.check()
            move(storage, source, name)
        fsync_tree_files(storage, name)  # a stock trainer leaves them in the page cache
        fsync_tree_dirs(storage, name)
        storage.fsync_dir("")
        _name_if_newer(storage, ownership, step)
    finally:
        ownership.release()


def require_loadable(storage: Storage, layout: Layout, source: str, step: int) -> AttemptId | None:
    """The attempt in a directory's manifest, None without one.

    Raises ``DamagedRoot`` if a loader would refuse a directory, ``ConfigError`` for another step's.
    """
    there = inspect_published(storage, layout, step, at=source)
    if there.of is not None and there.of.step != step:
        raise ConfigError(f"{source} holds step {there.of.step}, not step {step}", step=step)
    if there.found not in ("manifest", "stock"):
        raise DamagedRoot(f"no loader would take it: {there.detail}", file=source, step=step)
    return there.of


def require_intact(
    storage: Storage, layout: Layout, source: str, step: int, choose: Choose = everything
) -> None:
    """As ``require_loadable``. Also raises ``DamagedRoot`` if a file is not what the directory's
    manifest says.

    Reads every file once; without a manifest no digest is known. ``choose`` is told of the files.
    """
    require_loadable(storage, layout, source, step)
    verdict = verify_directory(storage, source, layout, step, choose)
    if not verdict.good:
        more = f", and {len(verdict.problems) - 1} more" if len(verdict.problems) > 1 else ""
        raise DamagedRoot(
            f"its own manifest calls it damaged: {verdict.problems[0]}{more}. Adopt another copy; to "
            f"take this one without a proof, remove {source}/{MANIFEST} first",
            file=source,
            step=step,
        )


def _name_if_newer(storage: Storage, ownership: RootOwnership, step: int) -> None:
    """Let the tracker name ``step`` unless it names a newer one."""
    named = read_tracker(storage).step
    if named is None or named < step:
        put(storage, TRACKER, tracker_text(step), tag=ownership.tag, check=ownership.check)
