"""Which tensors are watched while a writer reads them, and the changes that count."""

from __future__ import annotations

import pytest
import torch

from ckptfsm.dcp.images import Held, exact, to_host

pytestmark = pytest.mark.megatron


def held(trainers: torch.Tensor) -> Held:
    found = Held()
    found.add("w", trainers, exact(to_host(trainers.detach())))
    return found


VIEWS = {
    "whole": lambda base: base,
    "rows": lambda base: base[10:20],
    "of a flat buffer": lambda base: base.view(-1)[100:200].view(10, 10),
    "transposed": lambda base: base.t(),
    "parameter": lambda base: torch.nn.Parameter(base),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_change_of_the_memory_is_seen(kind):
    """Catches: a part of a larger buffer, as of a distributed optimizer, that is not watched."""
    base = torch.zeros(50, 50)
    watched = held(VIEWS[kind](base))
    assert watched.changed() == ""
    base.add_(1)
    assert watched.changed() == "w was changed before the writer had read it"


def test_a_tensor_that_moved_is_seen():
    """Catches: memory that was given back, and read all the same."""
    tensor = torch.zeros(100)
    watched = held(tensor)
    tensor.set_(torch.zeros(100))
    assert "w was moved" in watched.changed()


@pytest.mark.parametrize("copied", ["strided", "shared"])
def test_a_copy_is_not_watched(copied):
    """Catches: a save that fails though its copy was made in time."""
    tensor = (
        torch.zeros(100, 10).share_memory_() if copied == "shared" else torch.zeros(100, 10)[:, :3]
    )
    watched = held(tensor)
    tensor.add_(1)
    assert watched.changed() == ""
    assert torch.equal(watched.copies[0], torch.zeros_like(tensor))


def test_inference_tensors_have_no_count():
    """Catches: an error of torch, which counts no changes in inference mode."""
    with torch.inference_mode():
        tensor = torch.zeros(10)
    assert held(tensor).changed() == ""
