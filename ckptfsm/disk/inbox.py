"""Requests of people to the owner of a root, and its answers: small files, each put whole.

A person's process puts ``inbox/<nonce>.json`` and waits for ``answers/<nonce>.json``. The owner takes
the requests at its tick, carries each out by the methods that its trainer uses, and answers.

Rules:

- A request names the epoch that it is meant for. An owner with another epoch refuses it: a request
  that a dead owner left behind must not roll back the next run.
- An owner carries a request out at most once, also if it cannot be removed.
- A person who waits no longer takes the request back. If it is gone by then, the owner has taken it,
  and the outcome is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import Answered, Asked, decode, encode
from ckptfsm.core.errors import CkptFsmError, describe
from ckptfsm.core.layout import ANSWERS, INBOX, answer_name, parse_request, request_name
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names, lookup, make_dir, put
from ckptfsm.disk.trash import remove_marker

log = logging.getLogger("ckptfsm")
_REQUEST_BYTES = 1 << 16


def send(storage: Storage, asked: Asked) -> None:
    """Put a request into the inbox, durably."""
    for directory in (INBOX, ANSWERS):
        make_dir(storage, directory)
    put(storage, request_name(asked.nonce), encode(asked), tag=asked.nonce)


def take_back(storage: Storage, nonce: str) -> bool:
    """Remove a request that waits; False if the owner has taken it."""
    if lookup(storage, request_name(nonce)) is None:
        return False
    remove_marker(storage, request_name(nonce))
    return True


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
    done: set[str] = field(default_factory=set)

    def requests(self) -> Iterator[Asked]:
        """The requests for this owner, in no order; others are answered and removed here."""
        for name in list_names(self.storage, INBOX):
            nonce = parse_request(name)
            if nonce is None or nonce in self.done:
                continue
            try:
                asked = self._read(nonce)
            except (CkptFsmError, FileNotFoundError) as error:
                self.answer(nonce, f"the request cannot be read: {describe(error)}", "config")
                continue
            if asked.epoch == self.epoch:
                yield asked
            else:
                words = (
                    f"the request was for epoch {asked.epoch}, and epoch {self.epoch} owns the root"
                )
                self.answer(nonce, words, "save_refused")

    def _read(self, nonce: str) -> Asked:
        name = request_name(nonce)
        asked = decode(Asked, self.storage.read(name, _REQUEST_BYTES), name)
        if asked.nonce != nonce:
            raise CkptFsmError("the request is another's", file=name)
        return asked

    def answer(self, nonce: str, words: str, kind: str = "") -> None:
        """Answer a request, and remove it; from now on it is never carried out."""
        self.done.add(nonce)
        answered = Answered(nonce=nonce, words=words, kind=kind)
        try:
            put(self.storage, answer_name(nonce), encode(answered), tag=self.tag)
            remove_marker(self.storage, request_name(nonce))
        except OSError as error:  # the person's command says that no answer came
            said = f"a request could not be answered: {describe(error)}"
            say(log.warning, "request_not_answered", said, nonce=nonce, error=describe(error))
