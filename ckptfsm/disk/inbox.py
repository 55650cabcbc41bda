"""Operator requests to the owner of a root, and its answers: small files, each put whole.

A person's process puts ``inbox/<nonce>.json`` and waits for ``answers/<nonce>.json``. The owner takes
the requests at its tick, carries each out by the methods that its trainer uses, and answers.

The owner removes a request first, and carries it out then: at most once, also if the owner dies. A
person who waits no longer removes the request too. If it is gone by then, the outcome is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import Answered, Asked, decode, encode
from ckptfsm.core.errors import CkptFsmError, describe, shorten
from ckptfsm.core.layout import ANSWERS, INBOX, answer_name, parse_request, request_name
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import is_temporary, list_names, lookup, make_dir, put
from ckptfsm.disk.trash import remove_marker

log = logging.getLogger("ckptfsm")
_REQUEST_BYTES = 1 << 16
_LETTERS = 8000  # of an answer
_SERVED_S = 1.0
_LEFT_S = 3600.0  # after this time, no person comes for a file


def send(storage: Storage, asked: Asked) -> None:
    """Put a request into the inbox, durably."""
    for directory in (INBOX, ANSWERS):
        make_dir(storage, directory)
    put(storage, request_name(asked.nonce), encode(asked), tag=asked.nonce)


def take_back(storage: Storage, nonce: str) -> bool:
    """Remove a request that waits; False if the owner has taken it."""
    return remove_marker(storage, request_name(nonce))


def read_answer(storage: Storage, nonce: str) -> Answered | None:
    """The answer to a request, once; None if there is none yet."""
    name = answer_name(nonce)
    if lookup(storage, name) is None:
        return None
    answered = decode(Answered, storage.read(name, _REQUEST_BYTES), name)
    remove_marker(storage, name)
    return answered


@dataclass(slots=True)
class Inbox:
    """The owner's side. ``tag`` names its temporary files."""

    storage: Storage
    epoch: int
    tag: str
    clock: Clock
    done: set[str] = field(default_factory=set)
    _left: dict[str, float] | None = None  # files that may be left behind, and since when

    def requests(self) -> Iterator[Asked]:
        """The requests for this owner, in no order, each taken out of the inbox just before.

        Others are removed and answered here. The trainer may wait meanwhile, so the rest is left to the
        next call after ``_SERVED_S``. Raises ``OSError`` if the inbox cannot be listed, or a request
        cannot be removed.
        """
        self.sweep()
        names, end = list_names(self.storage, INBOX), self.clock.monotonic() + _SERVED_S
        for nonce in filter(None, map(parse_request, names)):
            if nonce in self.done:
                continue
            if self.clock.monotonic() > end:
                return
            try:
                asked = self._read(nonce)
            except FileNotFoundError:  # taken back
                continue
            except (CkptFsmError, OSError) as error:
                self._refuse(nonce, f"the request cannot be read: {describe(error)}")
                continue
            if not remove_marker(self.storage, request_name(nonce)):
                continue
            self.done.add(nonce)
            if asked.epoch == self.epoch:
                yield asked
            else:
                words = (
                    f"the request was for epoch {asked.epoch}, and epoch {self.epoch} owns the root"
                )
                self.answer(nonce, words, "save_refused")

    def _refuse(self, nonce: str, words: str) -> None:
        """Answer a file that is no request. If it cannot be removed, it does not keep the others."""
        self.done.add(nonce)
        self.answer(nonce, words, "config")
        try:
            remove_marker(self.storage, request_name(nonce))
        except OSError as error:
            said = f"a file in the inbox cannot be removed: {describe(error)}"
            say(log.warning, "request_not_removed", said, nonce=nonce, error=describe(error))

    def _read(self, nonce: str) -> Asked:
        name = request_name(nonce)
        asked = decode(Asked, self.storage.read(name, _REQUEST_BYTES), name)
        if asked.nonce != nonce:
            raise CkptFsmError("the request is another's", file=name)
        return asked

    def answer(self, nonce: str, words: str, kind: str = "") -> None:
        """Put the answer to a request that was taken out of the inbox."""
        answered = Answered(nonce=nonce, words=shorten(words, _LETTERS), kind=kind)
        try:
            put(self.storage, answer_name(nonce), encode(answered), tag=self.tag)
            if self._left is not None:
                self._left[answer_name(nonce)] = self.clock.monotonic()
        except OSError as error:  # the person's command says that no answer came
            said = f"a request could not be answered: {describe(error)}"
            say(log.warning, "request_not_answered", said, nonce=nonce, error=describe(error))

    def sweep(self) -> None:
        """Remove the files of commands that died, an hour after this owner saw them first.

        Those are answers and temporary files. Raises ``OSError``.
        """
        now = self.clock.monotonic()
        if self._left is None:
            self._left = dict.fromkeys(self._files_left(), now)
        for name, since in list(self._left.items()):
            if now - since > _LEFT_S:
                del self._left[name]
                remove_marker(self.storage, name)

    def _files_left(self) -> Iterator[str]:
        for directory in (INBOX, ANSWERS):
            for name in list_names(self.storage, directory):
                is_answer = directory == ANSWERS and parse_request(name) is not None
                if is_temporary(name) or is_answer:
                    yield f"{directory}/{name}"
