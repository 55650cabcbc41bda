"""Parts of a checkpoint: which declarations are refused."""

from __future__ import annotations

import pytest

from ckptfsm.core.errors import (
    ConfigError,
)
from ckptfsm.core.parts import PartSpec, check_parts

NOBODY = (PartSpec("state", ranks=()),)


def test_parts_without_a_writer_are_refused():
    """Catches: an attempt that no writer ever forks for or leaves, so that it never ends."""
    with pytest.raises(ConfigError):
        check_parts(NOBODY, 2)


def test_the_hash_of_a_part_does_not_walk_over_its_ranks() -> None:
    """Catches: a lookup by part whose time grows with the ranks, at every report of a rank."""
    unhashable: list[int] = []
    part = PartSpec("a", "report", "d", (unhashable,))  # type: ignore[arg-type]
    assert hash(part) == hash(PartSpec("a", "report", "d", (1, 2)))
    assert part != PartSpec("a", "report", "d", (1, 2))
