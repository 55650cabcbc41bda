"""A byte-level training text that every machine with Python already has: the standard library.

Rules: no download and no randomness. The order of files is fixed by name and the size is bounded,
so equal Python installations see equal bytes on every rank. A position in the text is one integer,
the cursor, so that the data position fits into a checkpoint as a common value.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ckptfsm.core.errors import ConfigError

VOCABULARY_SIZE = 256
"""Distinct tokens: one per byte value."""

TEXT_LIMIT_BYTES = 2 * 1024 * 1024
"""The number of bytes to read from the standard library by default."""


def read_stdlib(limit_bytes: int = TEXT_LIMIT_BYTES) -> bytes:
    """The first ``limit_bytes`` of the standard library's top-level ``*.py`` files, sorted by name.

    Packages are left out: ``site-packages`` lives among them, and differs between machines.
    Raises ConfigError if the limit is below two bytes or the sources are not on disk.
    """
    if limit_bytes < 2:
        raise ConfigError("a text needs at least two bytes", limit_bytes=limit_bytes)
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        with path.open("rb") as source:
            text += source.read(limit_bytes - len(text))
        if len(text) >= limit_bytes:
            break
    if len(text) < 2:
        raise ConfigError("the standard library's sources are not on disk", file=str(folder))
    return bytes(text)


class ByteText:
    """An endless text: ``data`` repeated, read in order from a cursor.

    ``data`` has at least two bytes. A cursor is an offset in ``[0, len(text))``, in bytes.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < 2:
            raise ConfigError("a text needs at least two bytes", text_bytes=len(data))
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._bytes.numel()

    def batch(
        self, cursor: int, batch_size: int, sequence_length: int
    ) -> tuple[Tensor, Tensor, int]:
        """``batch_size`` consecutive rows from ``cursor`` on, and the cursor after them.

        Returns (tokens, labels, next_cursor): int64 tensors ``[batch_size, sequence_length]`` on
        the CPU with values in ``[0, 256)``; a label is the byte after its token. Wraps around at
        the end of the text. Raises ConfigError for a cursor outside the text or an empty batch.
        """
        if not 0 <= cursor < len(self):
            raise ConfigError("the cursor is outside the text", cursor=cursor, text_bytes=len(self))
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError("a batch needs at least one token")
        count = batch_size * sequence_length
        offsets = (cursor + torch.arange(count + 1)) % len(self)
        stream = self._bytes[offsets].long()
        tokens = stream[:-1].reshape(batch_size, sequence_length)
        labels = stream[1:].reshape(batch_size, sequence_length)
        return tokens, labels, (cursor + count) % len(self)
