"""The receipts of one attempt: checked to belong to it (I5), and awaited where they show late (F9)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.posix_storage import digest_of
from ckptfsm.core.backoff import pauses
from ckptfsm.core.documents import MAX_DOCUMENT_BYTES, FileEntry, Receipt, decode
from ckptfsm.core.errors import DamagedRoot, ShardMissing, name_ranks
from ckptfsm.core.layout import receipt_name
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import SMALL_BYTES, read_document

_LONGEST_PAUSE_S = 0.5  # between two looks for a missing receipt on a shared disk
_AT_ONCE = 1000  # receipts are parsed after they were read, so that no read is waited for meanwhile
_whose = attrgetter("step", "epoch", "attempt", "part", "rank", "world_size")


class CheckedReceipt(NamedTuple):
    """A receipt of the attempt, in less memory than the document: there is one of each rank.

    ``entry`` is the receipt as a manifest lists it: size and digest of the bytes that were checked.
    """

    part: str
    rank: int
    files: tuple[FileEntry, ...]
    results: tuple[tuple[Any, ...], ...]
    dropped: str
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class Receipts:
    """The receipts of the attempt ``of``, which lies in the directory ``location``."""

    storage: Storage
    location: str
    of: AttemptId
    world_size: int

    def read(self, part: str, rank: int) -> CheckedReceipt:
        """The receipt of a rank for a part. Raises ``DamagedRoot`` if it is not of this attempt."""
        path = f"{self.location}/{receipt_name(part, rank)}"
        return self._checked(part, rank, read_document(self.storage, path, MAX_DOCUMENT_BYTES))

    def _checked(self, part: str, rank: int, data: bytes) -> CheckedReceipt:
        name = receipt_name(part, rank)
        path = f"{self.location}/{name}"
        receipt = decode(Receipt, data, path)
        of = self.of
        expected = (of.step, of.epoch, of.attempt, part, rank, self.world_size)
        actual = _whose(receipt)
        if actual != expected:
            raise DamagedRoot(
                f"the receipt is of {actual}, not of {expected}",
                file=path,
                rank=rank,
                step=self.of.step,
            )
        entry = FileEntry(name=name, bytes=len(data), digest=digest_of(data))
        return CheckedReceipt(part, rank, receipt.files, receipt.results, receipt.dropped, entry)

    def _documents(self, part: str, ranks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The ranks whose receipt is there, and its bytes."""
        inner, _, _ = receipt_name(part, 0).rpartition("/")
        names = {receipt_name(part, rank).rpartition("/")[2]: rank for rank in ranks}
        directory = f"{self.location}/{inner}"
        for name, data in self.storage.read_each(directory, names, SMALL_BYTES):
            if len(data) < SMALL_BYTES:
                yield names[name], data
                continue
            try:
                document = read_document(self.storage, f"{directory}/{name}", MAX_DOCUMENT_BYTES)
            except FileNotFoundError:
                continue
            yield names[name], document

    def arriving(
        self, shares: Collection[tuple[str, int]], clock: Clock, deadline: float
    ) -> Iterator[CheckedReceipt]:
        """The receipts of ``shares`` (pairs of part and rank), each as soon as it appears.

        Raises ``ShardMissing`` if some are missing at ``deadline``.
        """
        missing = sorted(shares)
        pause = pauses(longest_s=_LONGEST_PAUSE_S)
        while True:
            there: set[tuple[str, int]] = set()
            for part, of_part in groupby(missing, key=itemgetter(0)):
                found = self._documents(part, [rank for _, rank in of_part])
                while documents := list(islice(found, _AT_ONCE)):
                    with collection_paused():
                        receipts = [self._checked(part, rank, data) for rank, data in documents]
                    there |= {(part, receipt.rank) for receipt in receipts}
                    yield from receipts
            missing = [share for share in missing if share not in there]
            if not missing:
                return
            if clock.monotonic() >= deadline:
                part = missing[0][0]
                ranks = tuple(sorted({rank for name, rank in missing if name == part}))
                raise ShardMissing(
                    f"no receipt of rank {name_ranks(ranks)} for part {part!r}",
                    step=self.of.step,
                    attempt=str(self.of),
                    part=part,
                    ranks=ranks,
                )
            clock.sleep(next(pause))
