"""I12: values are loaded back before a save is accepted; the kinds are in the tests of megatron."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("megatron.core")

from ckptfsm.core.errors import SaveRefused  # noqa: E402
from ckptfsm.megatron.read_back import ReadBack  # noqa: E402


def test_I12_a_value_that_the_loader_does_not_take_is_refused() -> None:
    """Catches: a save of values that no start can load."""
    values = {"losses": collections.deque([1.0])}
    with pytest.raises(SaveRefused, match=r"\['losses'\], of type collections.deque,.*list\(x\)"):
        ReadBack(common_in_shard=False).check("state", values, values)
