"""Where a run goes on in its data. No torch here."""

from __future__ import annotations


def is_within_an_epoch(step: int, batches: int) -> bool:
    """Whether an epoch of ``batches`` steps had batches left after ``step``.

    If not, the saved state of the data loader is used up: whoever loads it trains nothing in the next
    epoch and goes on with the one after (verl #7401).
    """
    return batches > 0 and step % batches != 0
