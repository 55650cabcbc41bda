"""A text that every machine with Python has, the standard library, and its batches of bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ckptfsm.core.errors import ConfigError

VOCABULARY_SIZE = 256  # byte values
_TEXT_BYTES = 2 * 1024 * 1024


class Corpus:
    """The text, cut into global batches of rows. It wraps around."""

    def __init__(self) -> None:
        self._text = torch.frombuffer(bytearray(_read_stdlib()), dtype=torch.uint8)

    def batch(
        self, cursor: int, shape: tuple[int, int], place: tuple[int, int]
    ) -> tuple[Tensor, Tensor, int]:
        """The rows of one data-parallel rank in the global batch at byte ``cursor``.

        ``shape`` is (rows of a rank, tokens of a row), ``place`` is (rank, ranks). Returns (tokens,
        labels, cursor of the next batch): int64 tensors of ``shape`` on the CPU. A label is the byte
        after its token.
        """
        rows, length = shape
        rank, ranks = place
        count = rows * ranks * length
        offsets = (cursor + torch.arange(count + 1)) % self._text.numel()
        stream = self._text[offsets].long()
        own = slice(rank * rows, (rank + 1) * rows)
        tokens = stream[:-1].reshape(rows * ranks, length)[own]
        labels = stream[1:].reshape(rows * ranks, length)[own]
        return tokens, labels, (cursor + count) % self._text.numel()


def _read_stdlib() -> bytes:
    """The first two MiB of the standard library's top-level ``*.py`` files, sorted by name.

    Packages are left out: ``site-packages`` lies among them. Raises ``ConfigError`` without the sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        with path.open("rb") as source:
            text += source.read(_TEXT_BYTES - len(text))
        if len(text) >= _TEXT_BYTES:
            break
    if len(text) < 2:
        raise ConfigError("the standard library's sources are not on disk", file=str(folder))
    return bytes(text)
