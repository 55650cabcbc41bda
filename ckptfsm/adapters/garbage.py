"""The garbage collector of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic collection in a block that makes many objects and no cycles.

    The collector would look at all objects of the trainer again and again, while the training
    thread waits. A trainer that has switched the collector off finds it so.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
