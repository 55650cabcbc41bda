"""Count the functions and files of the library that one save runs through in the trainer's process.

``python -m benchmarks.hops`` saves twice with the real driver in one process and keeps one
checkpoint, so that the second save prunes the first. The count covers the functions of ``ckptfsm``
called for the second save, on the training thread and on the coordinator's, and the files that hold
them. Functions that run in the forked writer are not counted.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any


class Calls:
    """A profile function that notes which functions of the library are called in this process."""

    def __init__(self, package: Path) -> None:
        self.on = False
        self._base = f"{package}{os.sep}"
        self._process = os.getpid()
        self._seen: set[tuple[str, int, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = self.on and event == "call" and code.co_filename.startswith(self._base)
        if ours and os.getpid() == self._process and not code.co_name.startswith("<"):
            name = code.co_filename.removeprefix(self._base)
            self._seen.add((name, code.co_firstlineno, code.co_name))

    @property
    def counts(self) -> tuple[int, int]:
        """The functions and files counted so far."""
        return len(self._seen), len({name for name, _, _ in self._seen})


def state(step: int) -> Mapping[str, Any]:
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    values = torch.full((1024,), float(step))
    return {"weight": ShardedTensor.from_rank_offsets("weight", values), "step": step}


def main() -> None:
    warnings.simplefilter("ignore")
    import ckptfsm

    logging.disable(logging.CRITICAL)
    calls = Calls(Path(ckptfsm.__file__).parent)
    threading.setprofile(calls)  # before the coordinator's thread begins
    with (
        tempfile.TemporaryDirectory() as place,
        ckptfsm.CheckpointManager(f"{place}/root", retention=ckptfsm.LatestN(1)) as ckpts,
    ):
        ckpts.save(1, state(1)).wait()
        calls.on = True
        sys.setprofile(calls)
        handle = ckpts.save(2, state(2))
        returned = calls.counts
        handle.wait()
        ckpts.poll()
        sys.setprofile(None)
        threading.setprofile(None)
        ended = calls.counts
    print(f"until save() returns: {returned[0]} functions in {returned[1]} files")
    print(f"until it is tracked and the older one pruned: {ended[0]} functions in {ended[1]} files")


if __name__ == "__main__":
    main()
