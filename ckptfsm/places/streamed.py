"""What places have in common that keep no digests: an object is read and written as a whole."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing

import xxhash

from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import MAX_DOCUMENT_BYTES
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.disk.durable import TEMPORARY


class StreamedPlace(ABC):
    """See ``place.CopyPlace``. A digest is that of the object as it is read back."""

    where: str

    @abstractmethod
    def stream(self, name: str) -> Generator[bytes, None, None]: ...

    @abstractmethod
    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None: ...

    def digest(self, name: str) -> str | None:
        digest = xxhash.xxh3_128()
        try:
            with closing(self.stream(name)) as pieces:
                for piece in pieces:
                    digest.update(piece)
        except FileNotFoundError:
            return None
        return DIGEST_PREFIX + digest.hexdigest()

    def read(self, name: str) -> bytes | None:
        data = bytearray()
        try:
            with closing(self.stream(name)) as pieces:
                for piece in pieces:
                    data += piece
                    if len(data) > MAX_DOCUMENT_BYTES:
                        raise DamagedRoot(
                            f"an object of more than {MAX_DOCUMENT_BYTES} bytes, and a small one is "
                            "expected",
                            place=self.where,
                            object=name,
                        )
        except FileNotFoundError:
            return None
        return bytes(data)

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        """As ``CopyPlace`` says; of two hosts that replace it at the same moment, one is not told."""
        if self.read(name) != expected:
            return False
        self.put(name, iter([data]), len(data), "")
        return self.read(name) == data


def temporary_of(name: str) -> str:
    """Another name for an object that is being written."""
    return f"{name}{TEMPORARY}{uuid.uuid4().hex[:12]}"
