"""What DTensors leave behind in a process with further tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_group_in_torchs_cache() -> Iterator[None]:
    """Empty torch's cache of shardings, which may hold the last reference to a process group.

    The cache belongs to a thread. A child that another thread forks drops it, and then ends the group,
    whose threads it does not have: it hangs or crashes.
    """
    yield
    torch = sys.modules.get("torch")
    clear = getattr(torch and torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
