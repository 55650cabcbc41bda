"""Errors cross process borders between ranks: they must survive pickling with all their facts."""

from __future__ import annotations

import copy
import errno
import logging
import pickle
from contextlib import contextmanager

import pytest

from ckptfsm.adapters import notices
from ckptfsm.adapters.notices import say
from ckptfsm.core import errors
from ckptfsm.core.errors import (
    CkptFsmError,
    OutcomeUnknown,
    RecoveryWarning,
    StorageError,
)

CLASSES = sorted(
    (
        thing
        for thing in vars(errors).values()
        if isinstance(thing, type) and issubclass(thing, CkptFsmError)
    ),
    key=lambda cls: cls.__name__,
)
BUILTIN_BASES = {
    "ConfigError": ValueError,
    "StepExistsError": FileExistsError,
    "StepNotFoundError": FileNotFoundError,
    "DeadlineExceeded": TimeoutError,
    "StorageError": OSError,
    "OutcomeUnknown": OSError,
}
FAMILY = {
    "StepExistsError": "SaveRefused",
    "WriterDied": "SaveFailed",
    "ShardMissing": "SaveFailed",
    "JournalCorrupt": "DamagedRoot",
    "NewerSchema": "DamagedRoot",
    "OutcomeUnknown": "StorageError",
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(cls, protocol):
    """Catches: an error of a rank that arrives at rank 0 as a TypeError, or without its facts."""
    error = cls("it broke", step=7, ranks=(1, 2), file="iter_0000007", exitcode=-9)
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is cls
        assert again.facts == error.facts and again.message == "it broke"
        assert str(again) == str(error)
        assert (again.step, again.ranks, again.exitcode) == (7, (1, 2), -9)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_a_kind_and_advice(cls):
    """Catches: an error without a kind, advice, doc or facts in its text."""
    error = cls("it broke", step=7, file=None)
    assert error.advice and error.kind and cls.__doc__
    assert str(error) == f"it broke [{cls.kind}: step=7] ({cls.advice})"
    assert str(cls("bare")) == f"bare [{cls.kind}] ({cls.advice})"
    assert error.args == ("it broke",), "what loggers and debuggers show of any exception"
    assert cls("x", step=7, rank=1).summary() == f"x [{cls.kind}: step=7, rank=1]"


def test_kinds_are_unique():
    """Catches: two errors that a caller cannot tell apart by kind."""
    assert len({cls.kind for cls in CLASSES}) == len(CLASSES)


def test_families_and_builtin_bases():
    """Catches: ``except FileExistsError`` or ``except SaveRefused`` that stops working."""
    by_name = {cls.__name__: cls for cls in CLASSES}
    for name, base in BUILTIN_BASES.items():
        assert issubclass(by_name[name], base)
        with pytest.raises(base):
            raise by_name[name]("x", step=1)
    for name, parent in FAMILY.items():
        assert issubclass(by_name[name], by_name[parent])
    assert not issubclass(errors.DamagedRoot, OSError), "damage is never retried as a disk error"
    assert not issubclass(errors.Fenced, OSError)


def test_an_unknown_attribute_is_an_attribute_error():
    """Catches: a typo in a fact's name that silently reads as None, or endless recursion."""
    error = CkptFsmError("x", step=1)
    with pytest.raises(AttributeError, match="CkptFsmError has no attribute 'stepp'"):
        _ = error.stepp
    assert not hasattr(CkptFsmError.__new__(CkptFsmError), "facts")


def test_an_os_error_of_ours_has_no_errno_of_its_own():
    """Catches: facts read as OSError's fields."""
    error = StorageError("disk", file="a", errno_name="ENOSPC", call="write")
    assert error.errno is None and error.errno_name == "ENOSPC" and error.call == "write"
    assert error.filename is None and error.file == "a"


def test_describe_is_one_bounded_line():
    """Catches: a journal record or a report blown up by an error's text."""
    assert errors.describe(ValueError("a\nb")) == "ValueError: a b"
    text = errors.describe(ValueError("x" * 9999))
    assert len(text) == 500 and text.endswith("...")
    assert errors.shorten("x" * 21, limit=20) == "x" * 17 + "..."
    assert errors.describe(ValueError("x" * 488)) == "ValueError: " + "x" * 488


class Gathered(BaseException):
    """Looks like torch's ``CheckpointException``: its text is a traceback of each rank."""

    def __init__(self, failures):
        super().__init__("Traceback (most recent call last): (RANK 0)\n" + "  File\n" * 500)
        self.failures = failures


def test_describe_keeps_the_cause_that_torch_puts_last():
    """Catches: an error that ends within torch's traceback, in front of the cause."""
    one = Gathered({2: (KeyError("w"), None)})
    assert errors.describe(one) == "Gathered: rank 2: KeyError: 'w'"
    three = Gathered({2: (one, None), 1: (ValueError("shape"), None), 7: (KeyError("w"), None)})
    assert errors.describe(three) == "Gathered: rank 1: ValueError: shape (and 2 more ranks)"
    nested = Gathered({0: (three, None)})
    assert "ValueError: shape" in errors.describe(nested)
    assert errors.describe(Gathered({})).startswith("Gathered: Traceback")


def test_F5_the_first_os_error_of_a_chain_is_found():
    """Catches: a full disk reported as torch's "unexpected pos"."""
    try:
        try:
            try:
                raise OSError(errno.ENOSPC, "no space left")
            except OSError as full:
                raise RuntimeError("unexpected pos 64 vs 0") from full
        except RuntimeError:
            raise ValueError("writer failed")
    except ValueError as error:
        assert errors.first_os_error(error).errno == errno.ENOSPC


def test_first_os_error_ignores_errors_without_errno_and_ends():
    """Catches: our StorageError taken for the cause, and an endless chain."""
    assert errors.first_os_error(ValueError("x")) is None
    assert errors.first_os_error(OutcomeUnknown("x", file="a")) is None
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert errors.first_os_error(one) is None
    top = OSError(errno.EIO, "top")
    top.__cause__ = OSError(errno.ENOSPC, "deepest")
    assert errors.first_os_error(top).errno == errno.ENOSPC


def test_F10_name_ranks():
    """Catches: an error that names the wrong ranks, or ten thousand of them."""
    assert errors.name_ranks([3, 0]) == "0, 3"
    assert errors.name_ranks(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert errors.name_ranks(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_F30_bytes_that_utf8_cannot_hold_are_written_out():
    """Catches: a file's name of arbitrary bytes that a journal record cannot carry."""
    assert errors.printable("name\udcff.bin") == "name\\udcff.bin"
    assert errors.printable("grün") == "grün"


def test_describe_names_an_error_of_ours_by_its_message():
    """Catches: advice to a caller in a journal, where no caller reads it."""
    said = errors.describe(StorageError("no room", file="a"))
    assert said == "StorageError: no room [storage: file='a']"


INSIDE = """
@contextmanager
def reading():
    warn_caller(RecoveryWarning("entered"))
    yield
"""


def test_a_warning_names_the_line_that_called_the_library():
    """Catches: a warning that points at a line of ours, or of contextlib: no user can mend that."""
    names = {**vars(errors), **vars(notices), "contextmanager": contextmanager}
    names["__name__"] = "ckptfsm.disk.reader_lease"
    exec(INSIDE, names)
    with pytest.warns(RecoveryWarning) as said, names["reading"]():
        notices.warn_caller(RecoveryWarning("here"))
    assert [str(w.message) for w in said] == ["entered", "here"]
    assert {w.filename for w in said} == {__file__}


def test_a_log_line_is_for_people_and_its_event_for_programs(caplog):
    """Catches: a line of one word, a name that moves a terminal's cursor, a record without its facts."""
    log = logging.getLogger("ckptfsm")
    with caplog.at_level(logging.INFO, "ckptfsm"):
        say(log.info, "seen", "100 % of a\udcff\x1b[2J\nb: grün", file="a")
        try:
            raise ValueError("x")
        except ValueError as error:
            say(log.exception, "failed", "it failed", step=3)
            say(log.warning, "failed", "it failed", exc_info=error)
            say(log.warning, "failed", "it failed")
    seen, *failed = caplog.records
    assert seen.getMessage() == "100 % of a\\udcff\\x1b[2J\\nb: grün"
    assert (seen.event, seen.file, seen.levelname) == ("seen", "a", "INFO")
    assert seen.funcName == "test_a_log_line_is_for_people_and_its_event_for_programs"
    assert [bool(record.exc_info) for record in failed] == [True, True, False]
    assert failed[0].step == 3
