"""An old foreign writer: it stays out of a directory that is another attempt's by now."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import StorageError
from ckptfsm.core.layout import PRIVATE, begun_name
from ckptfsm.core.parts import AttemptId
from ckptfsm.megatron.fence import stay_out_once_fenced
from ckptfsm.testing.fakes import FifoGate


def test_I4_an_old_writer_stays_out_of_a_directory_that_is_anothers(tmp_path: Path):
    """Catches: a foreign writer that was stopped, or outlived its job, and wakes
    up after the next job has saved the same step. Such a writer opens its files by path, and writes
    over them."""
    directory = tmp_path / "iter_0000006"
    begin(directory, 1)
    gate, storage = FifoGate(tmp_path / "gate"), PosixStorage(tmp_path)

    def write() -> None:
        stay_out_once_fenced(storage, "iter_0000006")
        (directory / "first").write_text("the old job's")
        (tmp_path / "elsewhere").write_text("not ours to judge")
        gate.hold()
        assert (directory / "first").read_text() == "the new job's"
        for late in (partial((directory / "first").write_text, "late"), (directory / "new").mkdir):
            with suppress(StorageError):
                late()
                raise AssertionError("an old writer changed what is another's")
        (directory / "second").open("ab").close()

    child = fork_child(write, keep=storage.descriptors())
    held = gate.reached()
    directory.rename(tmp_path / "aside")
    begin(directory, 2)
    (directory / "first").write_text("the new job's")
    os.write(held, b".")
    os.close(held)
    outcome = child.wait(20.0)
    assert outcome is not None and outcome.error is not None
    assert "is another attempt's by now: this old writer stays out" in outcome.explain()
    assert sorted(p.name for p in directory.iterdir()) == [PRIVATE, "first"]
    assert (directory / "first").read_text() == "the new job's"
    storage.close_root()


def begin(directory: Path, attempt: int) -> None:
    """The decision of the coordinator about a directory in place."""
    (directory / begun_name(AttemptId(6, attempt, 1))).mkdir(parents=True)
