"""Pieces that a save uses again are those that it would make anew, which takes long for thousands."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.utils.serialization import config

from ckptfsm.adapters.memory import OwnMemory
from ckptfsm.core.images import SMALL_BYTES, Image, Memory
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.images import Held, exact, shards_of
from ckptfsm.testing.simfs import SimDisk, SimStorage
from ckptfsm.writers.image import InlineChunks, write_image

SIDE = 128
COUNTED = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE)
BIG = torch.complex(COUNTED, -COUNTED)


def stored(image: Image) -> bytes:
    """The bytes of the file that a writer makes."""
    storage = SimStorage(SimDisk(), "p1")
    write_image(storage, "", image, InlineChunks(OwnMemory()))
    return storage.read(image.name, 1 << 30)


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(exact(tensor.detach()), file)
    return file.getvalue()


class Tagged(torch.Tensor):
    """A tensor with a pickle of its own."""


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        lambda t: t,
        lambda t: t.add_(1),
        lambda t: t + 5,
        lambda t: t.conj(),
        lambda t: t.T,
        lambda t: t.as_subclass(Tagged),
        lambda t: t.clone().share_memory_(),
        lambda t: torch.cat([t, t])[: len(t)],
        lambda t: torch.cat([t, t])[len(t) :],
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_the_next_save_has_the_values_of_its_tensor(other: Callable, small: bool):
    """Catches: a tensor read where the last one lay; a view that has its memory and other values."""
    tensor = BIG[:4, :4].clone() if small else BIG.clone()
    items, templates = _create_write_items("x", tensor), Templates()
    shards_of(0, "", [[(items[0], tensor)]], templates, Held())
    for value in (other(tensor), tensor, other(tensor)):
        held = Held()
        [image], [row] = shards_of(0, "", [[(items[0], value)]], templates, held)
        assert stored(image) == saved(value)
        assert (row[0], row[3:]) == ("x", ("__0_0.distcp", 0, image.size))


def test_pieces_are_used_again_and_belong_to_the_promises_of_their_save():
    """Catches: state that is read later without a promise, as it had one in the save before."""
    tensor, number = torch.ones(SMALL_BYTES), torch.tensor(1.0)
    items = [*_create_write_items("x", tensor), *_create_write_items("n", number)]
    bucket = list(zip(items, [tensor, number], strict=True))
    templates, seen = Templates(), []
    for promised in (False, True, True):
        held = Held(promises_all=promised)
        [image], _ = shards_of(0, "", [bucket], templates, held)
        data, small = [piece for piece in image.pieces if isinstance(piece, Memory)]
        assert (data.early, small.early) == (not promised, True)
        assert [name for name, *_ in held.tensors] == (["x"] if promised else [])
        assert len(held.copies) == 2, "what is read stays"
        seen.append((image.pieces[0], data, small))
    assert seen[1][0] is seen[2][0] and seen[1][2] is seen[2][2]


def test_the_settings_of_torch_hold_from_the_next_save_on():
    """Catches: a template of other settings, used for ever."""
    tensor = BIG.clone()
    items, templates = _create_write_items("x", tensor), Templates()
    for alignment in (64, 4096):
        with config.patch({"save.storage_alignment": alignment}):
            templates.look()
            [image], _ = shards_of(0, "", [[(items[0], tensor)]], templates, Held())
            assert stored(image) == saved(tensor)
