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
