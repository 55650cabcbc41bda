"""What all tests of commands share."""

from __future__ import annotations

import pytest

from ckptfsm.cli import examining


@pytest.fixture(autouse=True)
def no_pause_before_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """``doctor`` looks again at a root whose owner may live: at once."""
    monkeypatch.setattr(examining, "_SECOND_LOOK_S", 0.0)
