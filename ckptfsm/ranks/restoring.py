"""Restore: choose, lease, verify, load. All ranks take every step together.

A file that a rank reads whole is verified in that same pass, see ``ports.VerifiedReading``. Every
other file is verified before anything is loaded, and no object is unpickled before its file was.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from ckptfsm.adapters.notices import say, warn_caller
from ckptfsm.adapters.signals import OneCall
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.backoff import pauses
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    ReshardWarning,
    RestoreFailed,
    UnusedKeysWarning,
    describe,
)
from ckptfsm.core.layout import join
from ckptfsm.core.ports import Driver, Pending, Ports, Storage, Survey, Transport, VerifiedReading
from ckptfsm.core.requests import Located
from ckptfsm.disk.durable import is_about_content
from ckptfsm.disk.inspection import check_digests, check_extra_shards, check_sizes
from ckptfsm.disk.visibility import Visibility
from ckptfsm.ranks.coordinator_client import first_problem
from ckptfsm.ranks.handle import Restored
from ckptfsm.ranks.proposal import name_parts

log = logging.getLogger("ckptfsm")
P = ParamSpec("P")
T = TypeVar("T")
_LEAVING = (KeyboardInterrupt, SystemExit)
_KEYS_SHOWN = 5


class _FoundDamaged(Exception):
    """A file turned out to be bad while it was loaded. Raised on every rank, with the same words."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """The files that were verified, or will be: ``readers`` has the number of ranks that read each.

    ``reading`` is this rank's, of files that are in ``readers``.
    """

    reading: VerifiedReading | None = None
    readers: Mapping[str, int] = field(default_factory=dict)


_NOTHING_LATER = _Verified()


@dataclass(frozen=True, slots=True)
class Restorer:
    """A restore on one rank. ``agree`` asks the coordinator on behalf of all ranks."""

    ports: Ports
    storage: Storage
    config: CheckpointConfig
    agree: Callable[..., Any]
    calls: OneCall

    @property
    def transport(self) -> Transport:
        return self.ports.transport

    @property
    def driver(self) -> Driver:
        return self.ports.driver

    def restore(
        self, state: Any, parts: Mapping[str, Any] | None, step: int | None
    ) -> Restored | None:
        """Restore, see ``Manager.restore``."""
        named = self._everywhere(step, name_parts, state, parts)
        while True:
            chosen = self._choose(step, named)
            if chosen is None:
                return None
            located, verified = chosen
            complete = not verified.readers
            try:
                restored = self.load(located, named, verified)
                complete = True
                return restored
            except _FoundDamaged as found:
                problem = str(found)
            finally:
                self.release(located, complete=complete)
            self._pass_over(step, located, problem)

    def choose(self, step: int | None) -> Located | None:
        """The checkpoint to read, verified, with a lease on it that the caller has to release."""
        chosen = self._choose(step, None)
        return None if chosen is None else chosen[0]

    def _choose(
        self, step: int | None, named: Mapping[str, Any] | None
    ) -> tuple[Located, _Verified] | None:
        """The checkpoint to read, with a lease. With ``named``, files are read whole into that."""
        while True:
            located: Located | None = self.agree(Coordinator.locate, step)
            if located is None:
                return None
            problem: str | None = None
            try:
                verified = self._plan(located, named)
                problem = self._damage(located, verified.readers)
            finally:
                if problem != "":  # damaged, or not verified
                    self.agree(Coordinator.release, located.lease)
            if not problem:
                return located, verified
            self._pass_over(step, located, problem)

    def release(self, located: Located, *, complete: bool = True) -> None:
        """Give the lease of a chosen checkpoint back; tell the coordinator of its verification.

        ``complete``: all of it was verified that ``config.verify`` asks for.
        """
        whole = self.config.verify == "digests" and bool(located.files) and complete
        verified = located.step if whole else None
        self.agree(Coordinator.release, located.lease, verified)

    def _pass_over(self, step: int | None, located: Located, problem: str) -> None:
        """Withdraw a damaged checkpoint. Raises ``DamagedRoot`` if it was asked for, or is the last."""
        if step is not None:
            raise DamagedRoot(
                f"step {step} is damaged: {problem}", step=step, file=located.directory
            )
        self.agree(Coordinator.withdraw_damaged, located.step, problem)

    def _plan(self, located: Located, named: Mapping[str, Any] | None) -> _Verified:
        """The files that ranks read whole into their states, and verify then."""
        if named is None or self.config.verify != "digests" or not located.files:
            return _NOTHING_LATER
        reading = self._everywhere(located.step, self._plan_reading, located, named)
        gathered = self.transport.gather(reading.files if reading is not None else frozenset())
        readers = Counter(name for files in gathered or () for name in files)
        return _Verified(reading, self.transport.broadcast(dict(readers)))

    def _plan_reading(self, located: Located, named: Mapping[str, Any]) -> VerifiedReading | None:
        directories = {p.name: p.directory for p in located.parts if p.format.planned}
        parts = {
            name: (directories[name], value)
            for name, value in named.items()
            if name in directories and value is not None
        }
        return self.driver.plan_reading(self.storage, located.directory, parts, located.files)

    def _damage(self, located: Located, later: Collection[str]) -> str:
        """The fault of the checkpoint, the same on every rank; "" if there is none.

        The content of the files in ``later`` is not looked at. A disk that cannot be read is not
        damage: that raises, and nothing is withdrawn.
        """
        look = partial(self._verify_portion, located, later)
        verifying = self._everywhere(located.step, self._start, look)
        self._await(verifying)
        return first_problem(self.transport, self._everywhere(located.step, verifying.result))

    def _await(self, verifying: Pending[str]) -> None:
        """Wait until every rank has verified its portion; meanwhile the ranks keep exchanging flags.

        An interrupt of one rank ends the wait on all of them.
        """
        for pause in pauses():
            waits = [not verifying.done()]
            if not any(self.calls.agree(self.transport.any_flags, waits, "verified a checkpoint")):
                return
            # A rank that is done waits in the next exchange, for those that are not.
            with suppress(FutureTimeout):
                verifying.exception(pause)

    def _start(self, work: Callable[[], str]) -> Pending[str]:
        """Begin on another thread: a rank may not be silent for so long."""
        executor = self.ports.executor()
        verifying = executor.submit(partial(_fault_found_by, work))
        executor.shutdown()
        return verifying

    def _verify_portion(self, located: Located, later: Collection[str]) -> str:
        """Verify this rank's portion of the files, so that verification scales with ranks."""
        if located.problem:
            return located.problem
        if self.config.verify == "none" or not located.files:
            return ""
        portion = located.files[self.transport.rank :: self.transport.world_size]
        problem = self._sizes(located, portion)
        if not problem and self.transport.rank == 0:
            problem = check_extra_shards(self.storage, located.directory, located.files)
        if not problem and self.config.verify == "digests":
            now = [entry for entry in portion if entry.name not in later]
            problem = check_digests(self.storage, located.directory, now)
        return problem

    def _sizes(self, located: Located, portion: Sequence[FileEntry]) -> str:
        """Check sizes. Rank 0 saw all files; other hosts may see a name late, and wait for it."""
        late = self.config.visibility_timeout_s if self.transport.rank else 0.0
        deadline, pause = self.ports.clock.monotonic() + late, pauses()
        while problem := check_sizes(self.storage, located.directory, portion):
            if self.ports.clock.monotonic() >= deadline:
                break
            self.ports.clock.sleep(next(pause))
        return problem

    def load(
        self, located: Located, named: Mapping[str, Any], verified: _Verified = _NOTHING_LATER
    ) -> Restored:
        """Load the chosen checkpoint. A part of None is loaded by other ranks only."""
        step = located.step
        wanted = self._everywhere(step, self._with_others, located, named)
        directories = self._everywhere(step, self._part_directories, located, wanted)
        look = partial(self.driver.survey, wanted, directories, self.config.reshard_drops)
        surveys = self.transport.gather(self._survey(located, look))
        # Every rank leaves out what some rank cannot load in its sharding, if it may be.
        missing = self.transport.broadcast({key for each in surveys or () for key in each.missing})
        dropped = missing & set(self.config.reshard_drops)
        check = set[str] if surveys is None else partial(self.driver.check, surveys, dropped)
        unused: set[str] = self.transport.broadcast(self._everywhere(step, check))
        if verified.readers:
            self._read(step, verified)
        load = self.driver.load if verified.reading is None else verified.reading.load
        loaded = self._everywhere(step, load, wanted, directories, dropped)
        # Still the verified one.
        directory = self._everywhere(step, self.storage.absolute, located.directory)
        own = {name: loaded[name] for name, value in named.items() if value is not None}
        only = next(iter(own.values())) if len(own) == 1 else None
        return Restored(step, only, own, tuple(sorted(dropped)), tuple(sorted(unused)), directory)

    def _survey(self, located: Located, look: Callable[[], Survey]) -> Survey:
        """This rank's survey. ``_FoundDamaged`` if it fails by metadata that are not as written."""
        survey, failure = _attempt(look)
        if self.config.verify != "digests":
            names = {name for spec in located.parts for name in spec.format.metadata}
            fits = failure is None or isinstance(failure, (RestoreFailed, ConfigError, *_LEAVING))
            found = [e for e in located.files if not fits and e.name.rpartition("/")[2] in names]
            problem, sick = _attempt(check_digests, self.storage, located.directory, found)
            if said := first_problem(self.transport, problem or ""):
                raise _FoundDamaged(said)
            failure = sick or failure
        self._agree_that_none_failed(located.step, failure)
        return cast("Survey", survey)

    def _read(self, step: int, verified: _Verified) -> None:
        """Read this rank's files into its state. ``_FoundDamaged`` if any rank found a bad one."""
        verifying, failure = _attempt(self._start, partial(_read_whole, verified))
        try:
            self._agree_that_none_failed(step, failure)
            assert verifying is not None
            self._await(verifying)
        except BaseException:  # the state must not change behind the caller's back
            if verified.reading is not None:
                verified.reading.stop()
            if verifying is not None:
                verifying.exception()
            raise
        problem = first_problem(self.transport, self._everywhere(step, verifying.result))
        if problem:
            raise _FoundDamaged(problem)

    def _with_others(self, located: Located, named: Mapping[str, Any]) -> dict[str, Any]:
        """Add the parts of other ranks, empty: loading one may be collective, as of torch_dist."""
        plain = {spec.name for spec in located.parts if not spec.format.sharded}
        return {
            name: {} if value is None else value
            for name, value in named.items()
            if value is not None or name not in plain
        }

    def _part_directories(self, located: Located, named: Mapping[str, Any]) -> dict[str, str]:
        known = {spec.name: spec.directory for spec in located.parts}
        refuse_unknown_parts(located.step, named, known)
        # A rank without files to verify has not looked for the directory yet (F9).
        visibility = Visibility(self.ports.clock, self.config.visibility_timeout_s)
        visibility.require(self.storage, located.directory)
        base = self.storage.absolute(located.directory)
        return {name: join(base, known.get(name, "")) for name in named}

    def _everywhere(
        self, step: int | None, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
    ) -> T:
        """Run ``work`` on every rank. If any of them fails, all of them raise.

        A failed rank raises its typed error, every other rank ``RestoreFailed``.
        """
        result, failure = _attempt(work, *arguments, **keywords)
        self._agree_that_none_failed(step, failure)
        return cast("T", result)

    def _agree_that_none_failed(self, step: int | None, failure: BaseException | None) -> None:
        """Raise if this rank or another one failed. See ``_everywhere``."""
        problem, rank = "", self.transport.rank
        if failure is not None:
            if isinstance(failure, (RestoreFailed, DamagedRoot)):
                failure.facts = {"step": step, "file": self.storage.root} | failure.facts
            problem = f"rank {rank}: {describe(failure)}"
            what = "the latest step" if step is None else f"step {step}"
            said = f"{what} cannot be restored: {problem}"
            say(log.warning, "restore_problem", said, exc_info=failure, step=step, rank=rank)
        first = first_problem(self.transport, problem)
        if isinstance(failure, (CkptFsmError, *_LEAVING)):
            raise failure
        if first:
            raise RestoreFailed(f"could not be loaded: {first}", step=step, file=self.storage.root)


def refuse_unknown_parts(step: int, named: Iterable[str], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for a part that a checkpoint does not have; an adopted one knows none."""
    missing = [name for name in named if known and name not in known]
    if missing:
        said = (
            f"the checkpoint of step {step} has no part {missing[0]!r}; it has {', '.join(known)}"
        )
        raise ConfigError(said, step=step, part=missing[0])


def _attempt(
    work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
) -> tuple[T | None, BaseException | None]:
    """The result of ``work`` and None, or None and its error."""
    try:
        return work(*arguments, **keywords), None
    except BaseException as error:  # torch's CheckpointException is one; all ranks must learn of it
        return None, error


def _read_whole(verified: _Verified) -> str:
    reading, readers = verified.reading, verified.readers
    if reading is None:
        return ""
    return reading.run({name for name in reading.files if readers[name] == 1})


def _fault_found_by(work: Callable[[], str]) -> str:
    """The fault of the content that ``work`` found, or ran into."""
    try:
        return work()
    except OSError as error:
        if not is_about_content(error):
            raise
        return describe(error)  # for example a link in place of a directory


def warn_of_rest(restored: Restored, *, partial: bool) -> None:
    """Warn of what was left out: the run then differs from the saved one.

    ``partial``: the caller did not mean to ask for every key.
    """
    if restored.unused and not partial:
        warn_caller(UnusedKeysWarning(_unused(restored)))
    if restored.dropped:
        warn_caller(
            ReshardWarning(
                f"step {restored.step} was saved under another sharding: "
                f"{', '.join(restored.dropped)} cannot be resharded and is left out; the run is not "
                "bit-for-bit the same"
            )
        )


def _unused(restored: Restored) -> str:
    """The keys that nobody asked for, in words: the first ones and their number."""
    count = len(restored.unused)
    first, more = restored.unused[:_KEYS_SHOWN], count - _KEYS_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"step {restored.step}: {count} key{'s' if count > 1 else ''} of the checkpoint left out, "
        f"which no rank asks for: {', '.join(first)}{rest}. An optimizer that has made no "
        "step asks for no moments, and fails without them: TrainingState asks for them in plain torch, "
        "else make a step with zero gradients and a learning rate of 0 before restore. Freeze "
        "parameters after restore. Pass partial=True to leave keys out on purpose"
    )
