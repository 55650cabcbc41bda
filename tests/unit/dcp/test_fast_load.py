"""Tensors filled from a file of blobs: the right bytes, and none where the head is another's."""

from __future__ import annotations

import io
import os
from itertools import pairwise

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfsm.core.documents import FileEntry  # noqa: E402
from ckptfsm.dcp.fast_load import (  # noqa: E402
    FastLoad,
    Filled,
    Region,
    Target,
    Wanted,
    form_of,
    stored_items,
    targets_by_file,
)
from ckptfsm.disk.durable import write_new  # noqa: E402
from ckptfsm.disk.pieces import PIECE_BYTES  # noqa: E402
from ckptfsm.testing.simfs import SimDisk, SimStorage  # noqa: E402

SHAPES = {"small": (3,), "grid": (2, 5), "big": (PIECE_BYTES // 4 + 10,), "last": (1,)}


class File:
    """A file with a blob for each shape, and other bytes around them."""

    def __init__(self) -> None:
        self.storage = SimStorage(SimDisk())
        self.saved = {key: torch.randn(shape) for key, shape in SHAPES.items()}
        self.wanted = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        self.starts = {}
        content = io.BytesIO()
        for key, tensor in self.saved.items():
            content.write(os.urandom(17))
            self.starts[key] = content.tell()
            blob = io.BytesIO()
            torch.save(tensor, blob)
            content.write(blob.getvalue())
        content.write(b"end")
        self.data = bytearray(content.getvalue())

    def load(self) -> tuple[str, set[str]]:
        """The fault, and the keys that were filled. The digest is that of the file as it was made."""
        digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(bytes(self.data))}"
        write_new(self.storage, "file", bytes(self.data))
        entry = FileEntry(name="file", bytes=len(self.data), digest=digest)
        targets = []
        for key, tensor in self.wanted.items():
            shape = tuple(tensor.shape)
            name = Filled(key, (0,), shape, tensor.dtype, tensor.device, tensor.data_ptr())
            whole = tuple(slice(0, size) for size in shape)
            region = Region(name, tensor, whole, whole)
            blob = form_of(tensor.dtype, shape)
            targets.append(Target([region], shape, blob, self.starts[key]))
        reading = FastLoad(self.storage, "", {entry: targets}, lambda *state: {})
        problem = reading.run({"file"})
        return problem, {each.key for each in reading.full()}


def test_every_tensor_gets_its_bytes():
    """Catches: bytes of a blob's head or of the blob before; a value at the border of two pieces."""
    file = File()
    assert file.load() == ("", set(SHAPES))
    for key, tensor in file.saved.items():
        assert torch.equal(file.wanted[key], tensor), key


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("byte", [0, 100, -1])
def test_a_tensor_behind_another_head_is_not_filled(key: str, byte: int):
    """Catches: a tensor of other strides, whose bytes have another order."""
    file = File()
    head = form_of(torch.float32, SHAPES[key]).head
    file.data[file.starts[key] + (byte if byte >= 0 else len(head) - 1)] ^= 1
    assert file.load() == ("", set(SHAPES) - {key})
    assert not file.wanted[key].any()


def test_a_head_that_is_not_at_its_place_fills_nothing():
    file = File()
    file.starts = {key: start + 1 for key, start in file.starts.items()}
    assert file.load() == ("", set())
    assert not any(tensor.any() for tensor in file.wanted.values())


ROWS, COLUMNS = 6, 5
CUTS = st.tuples(st.sets(st.integers(1, ROWS - 1)), st.sets(st.integers(1, COLUMNS - 1)))


def boxes(cuts: tuple[set[int], set[int]]) -> list[tuple[slice, slice]]:
    """The parts of a grid that is cut there."""
    rows, columns = (sorted({0, end, *cut}) for cut, end in zip(cuts, (ROWS, COLUMNS)))
    return [
        (slice(top, bottom), slice(left, right))
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


@given(
    stored=CUTS,
    wanted=CUTS,
    lost=st.none() | st.integers(0, 100),
    only=st.none() | st.integers(0, 100),
)
@example(stored=({2}, set()), wanted=({1, 3}, set()), lost=None, only=1)
def test_another_sharding_gets_its_values(stored, wanted, lost, only):
    """Catches: a value at another place; a tensor that is taken for whole without one of its items."""
    saved = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    content, chunks, places = io.BytesIO(), [], {}
    for box in boxes(stored):
        start, offset = content.tell(), torch.Size([each.start for each in box])
        torch.save(torch.empty(saved[box].shape).copy_(saved[box]), content)
        chunks.append(ChunkStorageMetadata(offset, saved[box].shape))
        info = _StorageInfo("file", start, content.tell() - start)
        places[MetadataIndex("w", offset)] = info
    gone = None if lost is None else boxes(stored)[lost % len(chunks)]
    if lost is not None:
        del chunks[lost % len(chunks)]
    about = TensorStorageMetadata(TensorProperties(torch.float32), saved.shape, chunks)
    metadata = Metadata({"w": about}, storage_data=places)
    tensors = {}
    asked = boxes(wanted)
    for number, box in enumerate(asked if only is None else [asked[only % len(asked)]]):
        data, offset = torch.zeros_like(saved[box]), tuple(each.start for each in box)
        name = Filled("w", offset, tuple(data.shape), data.dtype, data.device, number)
        tensors[name] = Wanted(name, tuple(saved.shape), data), box
    found = [item for each, _ in tensors.values() for item in stored_items(metadata, each)]
    storage, data = SimStorage(SimDisk()), content.getvalue()
    write_new(storage, "file", data)
    digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    entry = FileEntry(name="file", bytes=len(data), digest=digest)
    reading = FastLoad(storage, "", targets_by_file(found, "", {"file": entry}), lambda *state: {})
    assert reading.run({"file"}) == ""
    for name, (each, box) in tensors.items():
        whole = gone is None or not saved[box][_within(gone, box)].numel()
        assert (name in reading.full()) == whole
        if whole:
            assert torch.equal(each.data, saved[box])


def _within(inner: tuple[slice, slice], outer: tuple[slice, slice]) -> tuple[slice, slice]:
    one, other = (
        slice(max(0, i.start - o.start), max(0, min(i.stop, o.stop) - o.start))
        for i, o in zip(inner, outer)
    )
    return one, other
