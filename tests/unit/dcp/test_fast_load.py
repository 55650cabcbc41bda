"""Tensors filled from a file of blobs: the right bytes, and none where the head is another's."""

from __future__ import annotations

import io
import os

import pytest
import xxhash

torch = pytest.importorskip("torch")

from ckptfsm.core.documents import FileEntry  # noqa: E402
from ckptfsm.dcp.fast_load import FastLoad, Filled, Target, form_of  # noqa: E402
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
            blob = form_of(tensor.dtype, shape)
            memory = tensor.reshape(-1).view(torch.uint8)
            targets.append(Target(name, memory, blob, self.starts[key]))
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
