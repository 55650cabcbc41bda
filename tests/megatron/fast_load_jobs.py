"""The jobs of the tests of fast loads. See ``jobs.py``; its rules hold here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from jobs import Here, Told, is_state_of, managed, state_of, template_of
from megatron.core.dist_checkpointing import ShardedTensor

from ckptfsm.core.ports import Storage
from ckptfsm.dcp import driver
from ckptfsm.dcp import fast_load as reading
from ckptfsm.dcp.fast_load import FastLoad
from ckptfsm.disk.pieces import Piece, ToRead, first_bad_file

ROWS = 128


def replicas_of(state: dict[str, Any], here: Here) -> dict[str, Any]:
    """The tensors of a state as if every rank had all of them."""
    return {
        key: ShardedTensor.from_rank_offsets(key, state[key].data, replica_id=here.rank)
        for key in ("w", "m")
    }


def save_and_restore(here: Here, root: str, replicated: bool = False) -> Told:
    """Save step 1 and restore it; the keys that were filled and the files that were read whole."""
    saved, wanted = state_of(1, here, ROWS), template_of(here, ROWS)
    if replicated:
        one = Here(0, 1, grouped=False)
        saved, wanted = replicas_of(state_of(1, one, ROWS), here), replicas_of(wanted, here)
    read: dict[str, bool] = {}
    filled: set[str] = set()

    def read_whole(
        storage: Storage,
        files: Sequence[ToRead],
        take: Callable[[Piece], None],
        stopped: Callable[[], bool],
    ) -> int | None:
        read.update({file.path.rpartition("/")[2]: file.direct for file in files})
        return first_bad_file(storage, files, take, stopped)

    class Watched(FastLoad):
        def full(self) -> Any:
            full = super().full()
            filled.update(each.key for each in full)
            return full

    with managed(here, root) as manager, pytest.MonkeyPatch.context() as patch:
        manager.save(1, saved)
        manager.wait_until_finished()
        patch.setattr(reading, "first_bad_file", read_whole)
        patch.setattr(driver, "FastLoad", Watched)
        restored = manager.restore(wanted)
        assert restored is not None
        equal = all(torch.equal(restored.state[key], saved[key].data) for key in ("w", "m"))
    return {"read": read, "filled": sorted(filled), "equal": equal}


def interrupt_reading(here: Here, root: str) -> Told:
    """Rank 1 is interrupted while it reads; the error of each rank, and a restore after it."""
    began = threading.Event()
    stopped: list[bool] = []

    class Interrupted(FastLoad):
        def run(self, alone: Any) -> str:
            began.set()
            stopped.append(self._stopped.wait(30.0))
            return super().run(alone)

    def hear() -> BaseException | None:
        return KeyboardInterrupt() if here.rank == 1 and began.is_set() else None

    raised = "nothing"
    with managed(here, root) as manager:
        manager.save(1, state_of(1, here))
        manager.wait_until_finished()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "FastLoad", Interrupted)
            patch.setattr(type(manager._one_call), "hear", lambda self: hear())
            try:
                manager.restore(template_of(here))
            except (Exception, KeyboardInterrupt) as error:
                raised = type(error).__name__
        readers = sum(thread.name == "ckptfsm-read" for thread in threading.enumerate())
        restored = manager.restore(template_of(here))
        assert restored is not None
        equal = is_state_of(restored.state, 1, here)
    return {"raised": raised, "stopped": stopped, "readers": readers, "equal": equal}
