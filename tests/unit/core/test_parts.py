"""Parts of a checkpoint: which declarations are refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from ckptfsm.core.errors import (
    ConfigError,
)
from ckptfsm.core.events import Published, Superseded
from ckptfsm.core.parts import AttemptId, PartSpec, Sent, check_parts
from ckptfsm.ranks.proposal import Proposal

NOBODY = (PartSpec("state", ranks=()),)


def test_parts_without_a_writer_are_refused():
    """Catches: an attempt that no writer ever forks for or leaves, so that it never ends."""
    with pytest.raises(ConfigError):
        check_parts(NOBODY, 2)


def test_a_format_of_another_version_is_named():
    """Catches: a bare KeyError, which says neither the part nor what to install."""
    with pytest.raises(ConfigError, match="'state' has the format 'zarr'.*install the version"):
        _ = PartSpec("state", "zarr").format


def test_the_hash_of_a_part_does_not_walk_over_its_ranks() -> None:
    """Catches: a lookup by part whose time grows with the ranks, at every report of a rank."""
    unhashable: list[int] = []
    part = PartSpec("a", "report", "d", (unhashable,))  # type: ignore[arg-type]
    assert hash(part) == hash(PartSpec("a", "report", "d", (1, 2)))
    assert part != PartSpec("a", "report", "d", (1, 2))


@pytest.mark.parametrize(
    "sent",
    [
        PartSpec("a", "report", "d", (1, 2), optional=True),
        Published(AttemptId(5, 2, 3)),
        Superseded(AttemptId(5, 2, 3), 7, ("pin",)),
        Proposal(5, 2, (PartSpec("a"),), frozenset({"b"}), error="no"),
    ],
)
def test_what_ranks_send_arrives_as_it_was(sent: Sent) -> None:
    """Catches: a field that is lost on the way, and a value that can be changed there."""
    arrived = pickle.loads(pickle.dumps(sent))
    assert arrived == sent and type(arrived) is type(sent)
    assert copy.deepcopy(sent) == sent
    with pytest.raises(FrozenInstanceError):
        setattr(arrived, fields(arrived)[0].name, 1)
    assert not hasattr(arrived, "__dict__")
