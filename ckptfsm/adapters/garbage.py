"""The garbage collector of the process, which is the trainer's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 0  # as the first threshold: no object starts a collection


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic collection in a block that makes many objects and no cycles.

    The collector would look at all objects of the trainer again and again, while the training
    thread waits. The block must not wait for a disk or another process: the pause is the trainer's, too.
    """
    # The thresholds, not the switch: a trainer may use either meanwhile, on another thread.
    before = gc.get_threshold()
    if before[0] == _NEVER:
        yield
        return
    ours = (_NEVER, *before[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
