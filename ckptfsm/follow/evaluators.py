"""Following a root for new checkpoints: for an evaluator, a process of its own beside the job.

A checkpoint is given once it is tracked, or as soon as the tracker names it. Never one above the
tracker's step: a rollback lowers the tracker before it withdraws. It is known by its attempt, so steps
that come again after a rollback are new. One that was pruned before its lease is passed over.

Works without torch, and outlives restarts of the job. To outlive a restart of the reader, keep
``lease.attempt`` beside the results, and pass the last as ``after``.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import ConfigError, DeadlineExceeded, StepNotFoundError, describe
from ckptfsm.core.layout import LAYOUTS, MEGATRON, parse_attempt
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.journal import History
from ckptfsm.disk.ownership import known_holder, newest_epoch
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.follow.follower import Follower

log = logging.getLogger("ckptfsm")
Root = str | os.PathLike[str]
_USED = (State.TRACKED, State.FINALIZED, State.PRUNABLE)


def wait_for_new_checkpoint(
    root: Root,
    after: int | str | None = None,
    timeout_s: float | None = None,
    *,
    poll_interval_s: float = 5.0,
    clock: Clock | None = None,
) -> ReaderLease:
    """Wait for a checkpoint after ``after``, and return a lease that is held on the newest.

    Use the lease in a ``with`` block, which ends it, and ``renew`` it if the block takes long. For
    ``after`` and the errors see ``checkpoints``. Raises ``DeadlineExceeded`` after ``timeout_s``.
    """
    lease = _Evaluator(root, after, poll_interval_s, clock, newest_only=True).wait(timeout_s)
    if lease is None:
        raise DeadlineExceeded(
            f"no new checkpoint within {timeout_s} s", timeout_s=timeout_s, waiting_for=str(root)
        )
    return lease


def checkpoints(
    root: Root,
    after: int | str | None = None,
    *,
    newest_only: bool = False,
    timeout_s: float | None = None,
    poll_interval_s: float = 5.0,
    renew_s: float = 60.0,
    clock: Clock | None = None,
) -> Iterator[ReaderLease]:
    """Give each checkpoint as it comes, oldest first, under a lease that is held while the body runs.

    ``after``: a step, or the ``attempt`` of an earlier lease. With a step, those up to it never come.
    With an attempt, those that were requested up to it, which is exact also after a rollback.
    By default, the checkpoints that are there come first.

    ``newest_only`` passes over all but the newest. The iterator ends after ``timeout_s`` without a new
    checkpoint. A thread renews the lease every ``renew_s``, at most as long as this process lives.

    Raises ``ConfigError`` for a root that is no directory, ``DamagedRoot`` if the journal is damaged,
    and ``OSError`` if the disk fails.
    """
    if not renew_s > 0:
        raise ConfigError(f"renew_s needs a positive number of seconds, not {renew_s!r}")
    follower = _Evaluator(root, after, poll_interval_s, clock, newest_only=newest_only)
    return _each(follower, timeout_s, renew_s)


def _each(follower: _Evaluator, timeout_s: float | None, renew_s: float) -> Iterator[ReaderLease]:
    while (lease := follower.wait(timeout_s)) is not None:
        with ExitStack() as held:
            held.push(lease)
            held.enter_context(_renewed(lease, renew_s))
            yield lease


@contextmanager
def _renewed(lease: ReaderLease, every_s: float) -> Iterator[None]:
    """A block in which a thread renews a lease, until its step is gone."""
    ended = threading.Event()
    keeper = threading.Thread(
        target=_renew, args=(lease, every_s, ended.wait), name="ckptfsm-lease", daemon=True
    )
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()


def _renew(lease: ReaderLease, every_s: float, ended: Callable[[float], bool]) -> None:
    while not ended(every_s):
        try:
            lease.renew()
        except OSError as error:
            gone, why = isinstance(error, StepNotFoundError), describe(error)
            said = f"the lease on step {lease.step} was not renewed: {why}"
            say(log.warning, "lease_not_renewed", said, step=lease.step, error=why)
            if gone:  # rolled back, or damaged
                return


class _Evaluator(Follower):
    """Looks for new checkpoints, and remembers those that were given."""

    def __init__(
        self,
        root: Root,
        after: int | str | None,
        poll_interval_s: float,
        clock: Clock | None,
        *,
        newest_only: bool,
    ) -> None:
        if not (math.isfinite(poll_interval_s) and poll_interval_s > 0):
            raise ConfigError(f"poll_interval_s needs seconds, not {poll_interval_s!r}")
        super().__init__(clock or SystemClock())
        self._root = os.fspath(root)
        mark = _mark(after)
        self._floor = mark if isinstance(mark, int) else -1  # no step up to it is given
        self._after = mark if isinstance(mark, AttemptId) else None
        self._interval_s = poll_interval_s
        self._newest_only = newest_only
        self._known: set[AttemptId] = set()
        self._seen: Mapping[AttemptId, Checkpoint] = {}
        self._owner: str | None = None
        self._offered: list[Checkpoint] = []
        self._named: int | None = None
        self._epoch = self._after.epoch if self._after is not None else 0

    def wait(self, timeout_s: float | None) -> ReaderLease | None:
        """A lease on the next checkpoint, or None after ``timeout_s`` without a new one."""
        end = self._clock.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while (lease := self._next()) is None:
            left = end - self._clock.monotonic()
            if left <= 0:
                return None
            self._clock.sleep(min(self._interval_s, left))
        return lease

    def _next(self) -> ReaderLease | None:
        storage = _opened(self._root)
        if storage is None:
            return None
        try:
            lease = self.take(storage) if self.look(storage) is not None else None
        finally:
            storage.close_root()
        if lease is not None:
            self._know(lease.attempt)
        return lease

    def look(self, storage: Storage) -> int | None:
        holder = known_holder(storage, newest_epoch(storage))
        owner = holder.nonce if holder is not None else None
        if owner != self._owner:  # its tracker may name the same step in another root
            self._owner, self._settled = owner, None
        return super().look(storage)

    def apply_history(self, history: History, named: int | None) -> bool:
        ledger = history.ledger
        if history.newest_epoch < self._epoch or _differ(self._seen, ledger.checkpoints):
            # Another root stands at this path: what the caller has seen was of the one before.
            self._known, self._after, self._floor = set(), None, -1
        self._epoch, self._named, self._seen = history.newest_epoch, named, ledger.checkpoints
        self._known.intersection_update(ledger.checkpoints)
        self._pass_over_earlier(ledger)
        there = _up_to(ledger, named)
        offered = [c for c in there if c.id not in self._known and c.step > self._floor]
        self._offered = offered[-1:] if self._newest_only else offered
        # Not while something is offered: the tracker may come to the same step again meanwhile. A step
        # that the tracker alone names is one that the job has still to adopt.
        return not offered and any(c.step == named for c in there)

    def due(self) -> Sequence[Checkpoint]:
        return self._offered

    def waits_for(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.step == self._named

    def lease_on(self, storage: Storage, checkpoint: Checkpoint, late_s: float) -> ReaderLease:
        assert self._history is not None
        return ReaderLease(
            self._root,
            checkpoint.step,
            layout=LAYOUTS.get(self._history.layout, MEGATRON).name,
            attempt=str(checkpoint.id),
            visibility_timeout_s=0.0 if self.waits_for(checkpoint) else late_s,
            clock=self._clock,
        )

    def pass_over(self, checkpoint: Checkpoint, why: str) -> None:
        said = f"step {checkpoint.step} is passed over: {why}"
        say(log.warning, "checkpoint_passed_over", said, step=checkpoint.step)
        self._know(str(checkpoint.id))

    def _pass_over_earlier(self, ledger: Ledger) -> None:
        """Once the journal tells the attempt that ``after`` means, know it and the earlier ones."""
        last = self._after
        if last is None or not ledger.checkpoints:
            return
        there = ledger.checkpoints.get(last)
        if there is not None and there.state in _USED:
            self._known = {of for of in ledger.checkpoints if of.step <= last.step}
        else:  # pruned, or rolled back
            self._known = {of for of in ledger.checkpoints if _turn(of) <= _turn(last)}
        self._after = None

    def _know(self, attempt: str) -> None:
        """Know a checkpoint from now on; the older ones too, where only the newest counts."""
        of = parse_attempt(attempt)
        assert of is not None and self._history is not None
        self._known.add(of)
        if self._newest_only:
            self._known |= {o for o in self._history.ledger.checkpoints if o.step <= of.step}


def _mark(after: int | str | None) -> int | AttemptId | None:
    """``after`` as a step or an attempt."""
    if after is None or (isinstance(after, int) and not isinstance(after, bool)):
        return after
    of = parse_attempt(after) if isinstance(after, str) else None
    if of is None:
        raise ConfigError(f"after is a step or the attempt of a lease, not {after!r}")
    return of


def _turn(of: AttemptId) -> tuple[int, int]:
    """The place of an attempt in the order of requests."""
    return of.epoch, of.attempt


def _differ(before: Mapping[AttemptId, Checkpoint], now: Mapping[AttemptId, Checkpoint]) -> bool:
    """True if an attempt has another manifest: each run numbers its attempts from one."""
    both = ((before[of], now[of]) for of in before.keys() & now.keys())
    return any(a.manifest_crc and a.manifest_crc != b.manifest_crc for a, b in both)


def _up_to(ledger: Ledger, named: int | None) -> list[Checkpoint]:
    """The checkpoints that a reader may load, oldest first, if the tracker names this step.

    The tracker is written before that is journaled: then its checkpoint is still ``finalized``.
    """
    if named is None:
        return []
    found = ledger.in_state(State.TRACKED, State.FINALIZED)
    return [c for c in found if c.step == named or (c.step < named and c.state is State.TRACKED)]


def _opened(root: str) -> PosixStorage | None:
    """The storage of a root, or None if there is no directory yet."""
    try:
        return PosixStorage(root, create=False)
    except ConfigError as error:
        if error.reason != "missing":
            raise
        return None
