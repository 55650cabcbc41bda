"""Mutants of admission: room for a save is misjudged, or made where nothing may go."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "admitted-to-a-disk-that-is-too-small",
        "core.admission:decide_admission",
        "if space.free >= space.needed:",
        "if space.free:",
        breaks="F5",
        source="F5",
        why="a save that was never going to fit fills the disk",
    ),
    mutant(
        "a-size-that-nobody-announced-is-nothing",
        "core.admission:predict_bytes",
        "return max(expected, largest + largest // 20)",
        "return expected",
        breaks="F5",
        source="F5",
        why="the parts of groups and foreign requests begin on a full disk",
    ),
    mutant(
        "pruned-for-room-in-vain",
        "core.admission:decide_admission",
        "enough = space.given_up > 0 and space.free + space.given_up >= space.needed",
        "enough = space.given_up > 0",
        breaks="I7",
        source="I7",
    ),
    mutant(
        "pruned-for-room-before-the-newest-was-read",
        "coordinator.coordinator:Coordinator._is_proven",
        "return written or latest.id == self._verified",
        "return True",
        breaks="I2",
        source="F21",
        why="restore finds the newest one damaged, and nothing is left to fall back to",
    ),
    mutant(
        "room-is-made-of-what-retention-keeps",
        "coordinator.accepting:_make_room",
        "gone = {offer.of for offer in engine.given_up()}",
        "gone = {offer.of for offer in engine.ledger.prunable(())}",
        (
            "coordinator.accepting:_make_room",
            "engine.retire()",
            "for offer in engine.ledger.prunable(()):\n    engine.post(offer)",
        ),
        breaks="I7",
        source="I7",
    ),
    mutant(
        "room-is-made-of-the-last-tracked-one",
        "coordinator.accepting:_make_room",
        "gone = {offer.of for offer in engine.given_up()}",
        "gone = {c.id for c in tracked}",
        (
            "coordinator.accepting:_make_room",
            "engine.retire()",
            ('for c in engine.ledger.in_state(State.TRACKED):\n    engine.withdraw(c, "no room")'),
        ),
        breaks="I7",
        source="I7",
    ),
    mutant(
        "names-that-were-compared-count-as-content",
        "ranks.restoring:Restorer.release",
        'whole = self.config.verify == "digests" and bool(located.files)',
        "whole = True",
        breaks="I2",
        source="F21",
        why="a checkpoint of which only the names were compared lets the older ones go",
    ),
    mutant(
        "no-room-ends-the-job",
        "ranks.participant:Participant.take_refusal",
        "if not isinstance(refused, NoRoom):",
        "if True:",
        breaks="F5",
        source="F5",
        why="a job that asked to be warned ends on a full disk",
    ),
)
