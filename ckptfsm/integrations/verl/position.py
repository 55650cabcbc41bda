"""The position of a resumed run in its data. No torch here."""

from __future__ import annotations


def is_within_an_epoch(step: int, batches: int) -> bool:
    """True if an epoch of ``batches`` steps has batches left after ``step``.

    If not, the saved state of the data loader is used up. A run that loads it trains nothing in the
    next epoch and continues with the one after (verl #7401).
    """
    return batches > 0 and step % batches != 0
