"""Every error the library raises, with a stable ``kind`` and the facts a caller needs.

Errors survive pickling: ranks exchange them. ``advice`` tells the caller: fix the call, skip this save,
retry, page someone, or report a bug.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NAMED = 8  # ranks
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of messages for a terminal, as torch has them


class CkptFsmError(Exception):
    """Base of all errors of this library.

    Attributes: ``kind`` (stable identifier), ``advice`` (the remedy for the caller), ``facts`` (the
    keyword arguments: file, step, rank, ... as far as they are known).
    """

    kind = "ckptfsm"
    advice = "see the message"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))

    def summary(self) -> str:
        """The message and the facts, without the advice."""
        where = ", ".join(f"{k}={v!r}" for k, v in self.facts.items() if v is not None)
        return f"{self.message} [{self.kind}{': ' if where else ''}{where}]"

    def __str__(self) -> str:
        return f"{self.summary()} ({self.advice})"


def _rebuild(cls: type[CkptFsmError], message: str, facts: dict[str, Any]) -> CkptFsmError:
    return cls(message, **facts)


class ConfigError(CkptFsmError, ValueError):
    """The configuration or an argument cannot work."""

    kind = "config"
    advice = "fix the call"


class IllegalTransition(CkptFsmError):
    """An event has no row in the transition table for the checkpoint's state."""

    kind = "illegal_transition"
    advice = "a bug in ckptfsm: please report it with the journal"


class RootBusy(CkptFsmError):
    """Another manager owns the root (``host``, ``pid``)."""

    kind = "root_busy"
    advice = (
        "if both are ranks of one job, call torch.distributed.init_process_group first; else stop the "
        "other job, or pass takeover=True once it is certainly gone"
    )


class Fenced(CkptFsmError):
    """A newer manager took the root over; this one must stop (``epoch``, ``newer_epoch``).

    Or the files are gone that would tell: see ``RootLost``.
    """

    kind = "fenced"
    advice = "stop this job; the newer one owns the root"


class RootLost(Fenced):
    """The private files of the root were deleted under its manager, which must stop (``file``).

    No newer manager was seen.
    """

    kind = "root_lost"
    advice = "stop this job; see what deleted the files, and whether the checkpoints are there"


class SaveRefused(CkptFsmError):
    """A save was not accepted; nothing was written, training can go on (``step``, ``in_flight``).

    If the disk refused the save, ``reason``, ``file`` and ``errno_name`` describe the refusal. If a
    value did, ``part`` and ``key`` name the value. A group refuses values after its controller asked,
    so the attempt fails, and ``poll`` or ``wait`` raises this.
    """

    kind = "save_refused"
    advice = "skip this save or fix the call"


class NoRoom(SaveRefused):
    """The disk cannot hold a save.

    It has ``step``, ``bytes_needed``, ``bytes_free``, ``bytes_held`` and ``file``. ``bytes_needed`` is a
    prediction: from the state, and from the size of earlier checkpoints. ``bytes_held``: of steps that
    stay only for jobs that are not done.
    """

    kind = "no_room"
    advice = "make room on the disk, or keep fewer checkpoints"


class StepExistsError(SaveRefused, FileExistsError):
    """The step, or a later one, is already saved (``step``, ``latest``)."""

    kind = "step_exists"


class SaveFailed(CkptFsmError):
    """An accepted save failed; its space is freed, training can go on (``step``, ``attempt``)."""

    kind = "save_failed"
    advice = "save again at a later step"


class WriterDied(SaveFailed):
    """A writer process ended without a complete result (``step``, ``rank``)."""

    kind = "writer_died"


class ShardMissing(SaveFailed):
    """Ranks did not report all the shards that the checkpoint declared (``ranks``)."""

    kind = "shard_missing"


class RestoreFailed(CkptFsmError):
    """A verified checkpoint could not be loaded into the given state (``step``, ``file``).

    The rank whose key does not fit also has ``part``, ``key``, and the shapes ``wanted`` and
    ``found``.
    """

    kind = "restore_failed"
    advice = "do what the message says, or restore another step"


class StepNotFoundError(CkptFsmError, FileNotFoundError):
    """No tracked checkpoint has this step (``step``, ``available``)."""

    kind = "step_not_found"
    advice = "choose one of all_steps()"


class DamagedRoot(CkptFsmError):
    """The files on disk contradict each other; nothing was deleted for it (``file``)."""

    kind = "damaged_root"
    advice = "page someone: look at the named file; `ckptfsm` deleted nothing"


class JournalCorrupt(DamagedRoot):
    """A journal segment is damaged before its end (``file``, ``offset``)."""

    kind = "journal_corrupt"
    advice = "nothing was deleted; `ckptfsm verify --all` judges, `ckptfsm doctor` tells the way on"


class NewerSchema(DamagedRoot):
    """A document was written by a newer version of the library (``file``, ``schema_version``)."""

    kind = "newer_schema"
    advice = "upgrade ckptfsm; the document was not touched"


class CopyDamaged(DamagedRoot):
    """A copy in a place lacks an object, or has one with another content (``place``, ``object``).

    Nothing of it was published. ``older`` are the steps of older copies.
    """

    kind = "copy_damaged"
    advice = "fetch another step; `ckptfsm verify` on the place judges all of them"


class PlaceInUse(CkptFsmError):
    """A name in a place for copies or exports belongs to another run or attempt.

    It has ``place`` and ``object``.
    """

    kind = "place_in_use"
    advice = "do what the message says; nothing was changed in the place"


class DeadlineExceeded(CkptFsmError, TimeoutError):
    """A bounded wait ran out (``timeout_s``, ``waiting_for``).

    If the disk is known to refuse a write, ``reason``, ``file`` and ``errno_name`` describe the
    refusal.
    """

    kind = "deadline_exceeded"
    advice = "retry, or raise the deadline in the configuration"


class ManagerClosed(CkptFsmError):
    """The manager was closed, or left after an error; every further call raises this (``file``)."""

    kind = "manager_closed"
    advice = "fix the call: make a new manager"


class RankFailed(CkptFsmError):
    """A rank could not be reached in an exchange (``ranks``)."""

    kind = "rank_failed"
    advice = "restart the job; recovery decides from disk"


class RankInterrupted(CkptFsmError):
    """A signal interrupted a rank in a collective call; all ranks left the call (``rank``)."""

    kind = "rank_interrupted"
    advice = "that rank raises what its signal handler raised; here, call again or leave"


class StorageError(CkptFsmError, OSError):
    """A storage call failed (``file``, ``call``, ``errno_name``)."""

    kind = "storage"
    advice = "look at the disk; retry once it is mended"


class NotPermitted(StorageError, PermissionError):
    """This user may not do that in the root (``file``, ``call``, ``user``)."""

    kind = "not_permitted"
    advice = (
        "have its owner let the group do it, as by chmod g+w; to read, no lease is needed: "
        "docs/permissions.md"
    )


class PlaceFailed(StorageError):
    """A place for copies cannot be reached, or refused a call (``place``, ``object``, ``call``).

    Nothing is known then about what the place has.
    """

    kind = "place_failed"
    advice = "see that the address, the credentials and the network are right, and call again"


class OutcomeUnknown(StorageError):
    """A durable change could neither be completed nor undone with certainty."""

    kind = "outcome_unknown"
    advice = "restart the job; recovery decides from disk"


def describe(error: BaseException) -> str:
    """A single bounded line about ``error``, for journals and reports."""
    words = error.summary() if isinstance(error, CkptFsmError) else _words_of(error)
    plain = _COLOURS.sub("", f"{type(error).__name__}: {words}")
    return shorten(one_line(" ".join(plain.splitlines())))


def _words_of(error: BaseException) -> str:
    """The message of ``error``; for torch's ``CheckpointException`` the causes, without tracebacks."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return str(error)
    rank, failure = min(failures.items())
    more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    return f"rank {rank}: {describe(failure[0])}{more}"


def shorten(text: str, limit: int = 500) -> str:
    """``text`` fit for a journal on a full disk: printable, and at most ``limit`` characters."""
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
    """``text`` with escapes for bytes that UTF-8 cannot hold: file names may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def one_line(text: str) -> str:
    """``text`` with escapes for unprintable characters: file names may move a terminal's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_os_error(error: BaseException) -> OSError | None:
    """The first real operating-system error in the chain of ``error``, or None.

    torch masks a full disk as "unexpected pos"; the OSError that caused it sits deeper in the chain.
    """
    found: OSError | None = None
    current: BaseException | None = error
    for _ in range(20):
        if current is None:
            break
        if isinstance(current, OSError) and current.errno is not None:
            found = current
        current = current.__cause__ or current.__context__
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """``ranks`` as short text: ``0, 3, 5 and 12 more``."""
    shown, more = ", ".join(str(r) for r in sorted(ranks)[:_NAMED]), len(ranks) - _NAMED
    return shown if more <= 0 else f"{shown} and {more} more"


class SaveFailedWarning(UserWarning):
    """A save failed and ``on_failure`` is ``warn``, or the disk refuses an effect after publishing."""


class ReshardWarning(UserWarning):
    """A part of a checkpoint cannot be loaded under another sharding and was left out."""


class RanksDisagreeWarning(UserWarning):
    """Ranks give different values for what a checkpoint keeps once: the first rank's is kept."""


class ClassNotKeptWarning(UserWarning):
    """A value to save is of a subclass of dict or list, and a restore gives a plain dict or list."""


class UnusedKeysWarning(UserWarning):
    """A restore left out keys of the checkpoint, because no rank asked for them."""


class RecoveryWarning(UserWarning):
    """Opening the root, or restoring from it, found a problem that a person should know."""


class UntriedVersionWarning(UserWarning):
    """An installed package is of a release series that this library was never tested with."""


class UnsavedStepsWarning(UserWarning):
    """Steps that no checkpoint has: no setting makes a save due, or a run ended in order behind one."""


class PollMissingWarning(UserWarning):
    """A save is in flight and ``poll`` is not called."""
