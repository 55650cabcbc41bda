"""What every owner of a root does: open and close it, poll it, ask it. Only saving differs.

``Manager`` is one rank of a job whose ranks all run the same program; ``Controller`` is the one process
that drives groups of workers.

Rules: every public method is collective unless it says otherwise: all ranks of the transport call it at
the same point (a controller's has one). The training thread never touches the coordinator's disk work:
it asks, with a deadline.
"""

from __future__ import annotations

import logging
import operator
import signal
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfsm.config import CheckpointConfig
from ckptfsm.coordinator import Coordinator, CoordinatorOptions, RecoveryReport
from ckptfsm.documents import TransitionRecord
from ckptfsm.errors import (
    CkptFsmError,
    ConfigError,
    ManagerClosed,
    PollMissingWarning,
    RankFailed,
    RecoveryWarning,
    SaveRefused,
)
from ckptfsm.handle import SaveHandle, View
from ckptfsm.layout import LAYOUTS
from ckptfsm.lifecycle import UNSETTLED, State
from ckptfsm.link import Answer, Link, typed
from ckptfsm.notices import say, warn_at_end, warn_caller
from ckptfsm.ports import Draft, Ports, Storage
from ckptfsm.proposal import Accepted
from ckptfsm.pump import Hook, Pump

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ckptfsm")
_LET_GO_S = 0.1


class Owner:
    """The life of the checkpoints of one root, from one process of its job."""

    def __init__(
        self,
        ports: Ports,
        config: CheckpointConfig,
        hooks: Sequence[Hook] = (),
        *,
        writers: int | None = None,
    ) -> None:
        """``writers``: how many ranks a checkpoint has, if not those of the transport."""
        self.config = config
        self.writers = writers or ports.transport.world_size
        self.recovery: RecoveryReport | None = None
        self._ports = ports
        self._polls = 0
        self._unpolled_since: int | None = None
        self._signals: dict[int, Any] = {}
        self._link = Link(ports.transport, config.effect_timeout_s)
        self._pump = Pump(ports, config, self._link, hooks, self.writers)
        self._storage: Storage
        try:
            self._open()
        except BaseException:  # a Ctrl-C too: the root must not stay ours
            self._let_go(idle=self._link.abandon(_LET_GO_S))
            raise
        if self.rank == 0:
            warn_at_end(self, _left_in_flight, weakref.ref(self))

    # ------------------------------------------------------------------------------ open and close

    def _open(self) -> None:
        """Open the root at rank 0, tell everyone what it holds, or raise on every rank."""
        answer = Answer()
        if self.rank == 0:
            try:
                self._storage = self._ports.open_storage(True)
                self._link.start(self._make_coordinator(self._storage), self._ports.executor())
                report = self._link.ask(Coordinator.open)
                answer = Answer((report, self._link.ask(_view_of)), update=self._link.collect())
            except Exception as error:  # the other ranks wait for the broadcast
                answer = Answer(error=typed(error))
        answer = self._ports.transport.broadcast(answer)
        problem = answer.error or self._open_locally()
        failed = self._ports.transport.any_flags([problem is not None])[0]
        if failed:
            raise problem or RankFailed("another rank could not open the root")
        self.recovery, view = answer.value
        self._pump.begin(view, [r for r in answer.update.news if isinstance(r, TransitionRecord)])
        self._note_recovery()

    def _open_locally(self) -> CkptFsmError | None:
        """This rank's own part: its storage and the signals it was asked to watch."""
        try:
            if self.rank != 0:
                self._storage = self._ports.open_storage(False)
            for name in self.config.preemption_signals:
                number = signal.Signals[name]
                self._signals[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
        except Exception as error:  # the other ranks must not believe that the manager is open
            return typed(error)
        return None

    def _note_recovery(self) -> None:
        """What a person should know before hours of training go by; said at the first step."""
        assert self.recovery is not None
        reported = [d for d in self.recovery.decisions if d.result == "reported"]
        notes = [f"{d.subject} is left alone: {d.why}" for d in reported]
        for note in (*self.recovery.warnings, *notes):
            self._pump.notes.append(RecoveryWarning(note))

    def _make_coordinator(self, storage: Storage) -> Coordinator:
        config, driver = self.config, self._ports.driver
        return Coordinator(
            storage,
            clock=self._ports.clock,
            identity=self._ports.identity(),
            options=CoordinatorOptions(
                config.retention,
                config.resume,
                config.takeover,
                config.visibility_timeout_s,
                config.reader_timeout_s,
                layout=LAYOUTS[config.layout],
            ),
            finishers=driver.finishers,
            provenance=driver.provenance(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def close(self) -> None:
        """Drain what is in flight, journal the end, give the root back (collective).

        Raises ``DeadlineExceeded`` after ``close_timeout_s``, what a save failed with, also one that was
        to be tried again and was not; the root is given back all the same.
        """
        if self._pump.closed:
            return
        self._pump.refuse_inside_a_hook()
        try:
            self.wait_until_finished(self.config.close_timeout_s)
        except BaseException:
            self.abandon()
            raise
        idle = False
        try:
            self._agree(Coordinator.close)
            idle = True
        finally:
            self._let_go(idle=idle)
        if self._pump.owed is not None:
            raise self._pump.owed

    def abandon(self) -> None:
        """Leave without the other ranks: a bounded wait for the own writer, then only local work.

        What was not tracked by then is decided by recovery at the next start.
        """
        if self._pump.closed:
            return
        self._pump.refuse_inside_a_hook()
        self._pump.abandon()
        self._let_go(idle=self._link.abandon(self.config.exit_timeout_s))

    def _let_go(self, *, idle: bool) -> None:
        """Let go of signals, transport and root. ``idle``: nothing works on the root any more."""
        for number, previous in self._signals.items():
            # Another's handler stays: it may lead to ours, which leads on.
            if signal.getsignal(number) == self._on_signal and previous is not None:
                signal.signal(number, previous)
        self._pump.end()
        self._link.stop()
        self._ports.transport.close()
        if idle and hasattr(self, "_storage"):
            self._storage.close_root()

    # ----------------------------------------------------------------------------------- questions

    @property
    def rank(self) -> int:
        return self._ports.transport.rank

    @property
    def world_size(self) -> int:
        return self._ports.transport.world_size

    @property
    def preempted(self) -> bool:
        """True once the ranks agreed that one of them was asked to end (a signal)."""
        return self._pump.preempted

    def latest_step(self) -> int | None:
        """The newest tracked step (not collective)."""
        return self._pump.view.latest

    def step_in_flight(self) -> int | None:
        """The step whose save is neither tracked nor has failed; None without one (not collective)."""
        busy = self._pump.view.in_flight
        return busy.step if busy is not None else None

    def all_steps(self) -> list[int]:
        """Every tracked step, ascending (not collective)."""
        return sorted(self._pump.view.steps)

    def should_save(self, step: int) -> bool:
        """True if a save is due at ``step`` (not collective: the same on every rank).

        Due by interval or step list, because the coordinator's timer or a preemption was agreed in
        an earlier ``poll``, or because a failed save is to be tried again.
        """
        self._watch_polls(step)
        latest = self._pump.view.latest
        if latest is not None and step <= latest:
            return False
        interval = self.config.save_interval_steps
        return (
            self._pump.save_due
            or step in self.config.save_steps
            or (interval is not None and step > 0 and step % interval == 0)
        )

    def request_save(self) -> None:
        """Ask for a save at the next step that all ranks agree on (one rank is enough).

        Raises ``ConfigError`` if the ranks do not agree on anything while nothing is in flight:
        configure ``agree_when_idle``, ``save_interval_s`` or ``preemption_signals``.
        """
        if not self.config.needs_agreement:
            raise ConfigError("request_save() needs agree_when_idle=True")
        self._pump.save_asked = True

    def _on_signal(self, number: int, frame: object) -> None:
        """Ask for a save; once closed, do what was done before us: a later manager led here."""
        if not self._pump.closed:
            self._pump.save_asked = True
            return
        previous = self._signals[number]
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _make_way(self, step: int) -> bool:
        """What every save begins with; False if it is to be skipped. The same on every rank.

        One in flight per root: wait, skip or refuse.
        """
        self._require_open()
        self._watch_polls(step)
        self._pump.raise_failures()
        busy = self._pump.view.in_flight
        if busy is None:
            return True
        if self.config.on_busy == "skip":
            said = f"step {step}: not saved, because step {busy.step} is still in flight"
            say(log.warning, "save_skipped", said, step=step, in_flight=busy.step)
            return False
        if self.config.on_busy == "raise":
            raise SaveRefused(
                f"step {busy.step} is still in flight", step=step, in_flight=busy.step
            )
        self._pump.drive(
            _no_save_in_flight, self.config.busy_timeout_s, f"the save of step {busy.step}"
        )
        self._pump.raise_failures()
        return True

    def _begin_writing(self, accepted: Accepted, draft: Draft) -> SaveHandle:
        """Stage and fork this process's share; from now on somebody has to poll."""
        handle = self._pump.begin_writing(self._storage, accepted, draft)
        self._unpolled_since = accepted.of.step
        return handle

    # ----------------------------------------------------------------------------------- poll

    def poll(self) -> None:
        """Drive the machine; call it every step (collective).

        Raises what a save failed with, on every rank, under ``on_failure="raise"``.
        """
        self._require_open()
        self._unpolled_since = None
        self._polls += 1
        due = self._polls % self.config.exchange_every == 0
        if not self._pump.view.quiet or (due and self.config.needs_agreement):
            self._pump.exchange(expired=False)
        self._link.work_in_background()
        self._pump.raise_failures()

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight (collective). Raises failures and ``DeadlineExceeded``.

        ``ManagerClosed`` if it was left with a save in flight.
        """
        limit = timeout_s if timeout_s is not None else self.config.busy_timeout_s
        self._pump.drive(_nothing_unsettled, limit, "the saves in flight")
        self._pump.raise_failures()

    def wait_for(self, handle: SaveHandle) -> None:
        """Wait until one save is tracked or has failed (collective). Raises what ``poll`` would.

        ``SaveHandle.wait`` raises its failure under ``on_failure="warn"`` too. ``DeadlineExceeded``
        after ``busy_timeout_s``.
        """
        self._pump.settle(handle)
        self._pump.raise_failures()

    def _require_open(self) -> None:
        if self._pump.closed:
            why = "the manager is closed, or another process's that forked this one"
            raise ManagerClosed(why, file=self._storage.root)
        self._pump.refuse_inside_a_hook()

    def _watch_polls(self, step: int) -> None:
        """A save that nobody polls never gets tracked: say so, with its step (F28)."""
        since, busy = self._unpolled_since, self._pump.view.in_flight
        if since is None or busy is None or not isinstance(step, int):
            return
        if step - since >= self.config.poll_warning_steps:
            self._unpolled_since = step
            warn_caller(
                PollMissingWarning(
                    f"the save of step {busy.step} is in flight and poll() was not called for "
                    f"{step - since} steps: it cannot be tracked without"
                )
            )

    # --------------------------------------------------------------------- what people ask for

    def pin(self, step: int, reason: str = "") -> None:
        """Keep ``step`` from retention until ``unpin`` (collective). ``StepNotFoundError``."""
        self._agree(Coordinator.pin, step, reason)

    def unpin(self, step: int) -> None:
        """Release a pin, also that of an adopted checkpoint (collective)."""
        self._agree(Coordinator.unpin, step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint (collective). ``SaveRefused`` if anything keeps it (I7)."""
        self._agree(Coordinator.delete, step)

    def rollback(self, step: int) -> None:
        """Go back to ``step``; later ones are moved to quarantine (collective)."""
        self._agree(Coordinator.rollback, step)

    def _agree(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the coordinator together; its news first, then its error on every rank."""
        self._require_open()
        answer = Answer()
        try:
            answer = self._link.together(work, *arguments)
            self._pump.take_answer(answer)
        except BaseException:  # a Ctrl-C
            self._link.give_back(answer.value)
            raise
        if answer.error is not None:
            raise answer.error
        return answer.value


def whole_step(step: Any) -> Any:
    """``step`` as an ``int`` if it is a whole number of any type; the ledger refuses the rest."""
    whole = hasattr(step, "__index__") and not isinstance(step, bool)
    return operator.index(step) if whole else step


def _no_save_in_flight(view: View) -> bool:
    return view.in_flight is None


def _nothing_unsettled(view: View) -> bool:
    return view.quiet


def _left_in_flight(reference: weakref.ref[Owner]) -> str:
    """What to say at the end of a program that never closed its manager (F28)."""
    owner = reference()
    busy = owner._pump.view.in_flight if owner is not None and not owner._pump.closed else None
    if busy is None:
        return ""
    return (
        f"the program ends while the save of step {busy.step} is in flight, and close() was not called: "
        "nothing tracks it any more, the next start decides"
    )


def _view_of(coordinator: Coordinator) -> View:
    ledger = coordinator.ledger
    steps = {c.step for c in ledger.in_state(State.TRACKED)}
    return View(steps, {c.id: c.state for c in ledger.in_state(*UNSETTLED)})
