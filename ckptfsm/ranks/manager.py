"""The interface for a trainer on one rank, in lockstep with the other ranks.

A local error is never raised between collectives. The next exchange carries it, and every rank
raises it, so that no rank is left waiting (I10).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import (
    DeadlineExceeded,
    Fenced,
    OutcomeUnknown,
    RanksDisagreeWarning,
    SaveRefused,
    describe,
)
from ckptfsm.core.requests import Accepted
from ckptfsm.ranks.handle import Restored, SaveHandle
from ckptfsm.ranks.proposal import ProposedCall
from ckptfsm.ranks.restoring import warn_of_rest
from ckptfsm.ranks.session import Session, whole_step
from ckptfsm.ranks.share import Proposed
from ckptfsm.writers.rank_writer import no_signal

log = logging.getLogger("ckptfsm")


class Manager(Session):
    """The life of the checkpoints of one root, from one rank. See the module for its rules."""

    def save(
        self,
        step: int,
        state: Any = None,
        *,
        parts: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Begin a checkpoint of ``step`` (collective).

        ``state`` is a Megatron sharded state dict, saved as the single part ``state`` at the root
        of the step's directory. ``parts`` maps names to several of them, to ``bytes`` (a plain
        file), or to foreign requests. Each may be a function that returns it, called when the save
        begins.

        Tensors may change when it returns, or, after a gated save, when ``before_update`` does.
        ``metrics`` are by name. Rank 0's count, and those of the other ranks are not compared.

        With ``sync`` it returns when the checkpoint is tracked. While the disk blocks the save
        before, the save is refused, or skipped under ``on_failure="warn"``. If the disk has no room
        for it, raises ``NoRoom``, or skips the save as ``on_failure`` says.

        Raises ``SaveRefused`` (on every rank) if it was not accepted, and ``DeadlineExceeded`` if
        another save stays in flight. Raises ``SaveFailed`` for an earlier save under
        ``on_failure="raise"``.
        """
        step = whole_step(step)
        with self._one_call.running(), self._participant.stalling(step):
            self._require_open()
            if not self._participant.await_previous_save(step):
                return SaveHandle(step)
            self._participant.allocation.save_begins()
            self._share.clear()
            handle = self._plan_and_write(step, ProposedCall(state, parts), metrics)
            if self.config.sync and not handle.skipped:
                self.wait_for(handle)
            return handle

    def _plan_and_write(
        self, step: int, call: ProposedCall, metrics: Mapping[str, float] | None
    ) -> SaveHandle:
        """Draft, ask, stage and write. A refusal is raised on every rank, or the save is skipped."""
        proposed = self._share.propose(step, call, metrics)
        accepted: Accepted | None = None
        try:
            accepted = self._participant.request(partial(self._accept, proposed))
        finally:
            if accepted is None:
                self._share.undo(proposed.draft)
        if accepted is None or proposed.draft is None:
            return SaveHandle(step)
        return self._participant.start_save(self._storage, accepted, proposed.draft)

    def _accept(self, proposed: Proposed) -> Accepted:
        """At rank 0: accept the save for all ranks, or raise its refusal."""
        assert proposed.by_rank is not None
        step = proposed.by_rank[0].step
        try:
            if proposed.differences:  # before anything is refused: each is named once
                for line in self._share.comparison.warn_of(step, proposed.differences):
                    self._participant.warn_later(RanksDisagreeWarning(line))
            request, planned = self._share.agree(proposed)
            of = self._client.request(request)
        except (SaveRefused, Fenced, OutcomeUnknown) as error:
            error.facts.setdefault("step", step)
            raise
        except DeadlineExceeded:
            raise
        except Exception as error:  # a bad state dict must not strand the other ranks
            say(log.exception, "save_refused", f"step {step}: the save cannot begin", step=step)
            raise SaveRefused(f"the save cannot begin: {describe(error)}", step=step) from error
        return Accepted(of, request.in_place, request.parts, planned)

    def before_update(self) -> None:
        """Wait until the save in flight has read this rank's state (local): call before changing it.

        Needed for gated saves; after others it returns at once. A state that changes earlier fails
        its save, if torch counts the change. An interrupt ends the wait: the state may not change yet.
        For state on an accelerator the host does not wait: the later work of the current stream does.
        """
        writer = self._share.writer
        if writer is None or writer.has_copy or self._participant.is_copy:
            return
        with self._one_call.running(), self._participant.stalling(writer.of.step):
            writer.before_update(self._ports.clock, self._one_call.hear)

    def restore(
        self,
        state: Any = None,
        *,
        parts: Mapping[str, Any] | None = None,
        step: int | None = None,
        partial: bool = False,
    ) -> Restored | None:
        """Load the latest checkpoint, or that of ``step``, into the shape of ``state``
        (collective).

        Verifies (``verify``) and holds a lease on the checkpoint. Files that a rank reads whole are
        verified while they are read, all others before. If the latest is damaged, falls back to
        the newest valid one under ``resume="fallback"``. If this raises, tensors of ``state`` may
        have been overwritten, as by megatron-core's load. Loads under another
        tensor-parallel or world size; sharded objects in ``reshard_drops`` that do not reshard are
        left out with a warning. Keys of the checkpoint that no rank asks for are left out too. They
        are in ``Restored.unused``, and a warning names them unless ``partial``. Of a state of
        megatron-core's, all plain values are returned. A tensor gets the dtype of the given one.
        Returns None only when there is no evidence of any checkpoint.

        Raises ``StepNotFoundError``, ``DamagedRoot``, or the error of the load.
        """
        self._require_open()
        with self._one_call.running():
            self._share.await_copy(no_signal)  # the load may change the state in place
            restored = self._restorer(self.config).restore(state, parts, step)
        self._participant.emit_warnings()
        if restored is not None and self.rank == 0:
            warn_of_rest(restored, partial=partial)
        return restored
