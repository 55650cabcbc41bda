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
        killers=("tests:test_admission.py", "tests:test_coordinator.py"),
        why="a save that was never going to fit fills the disk",
    ),
    mutant(
        "a-size-that-nobody-announced-is-nothing",
        "core.admission:predict_bytes",
        "return max(expected, largest + largest // 20)",
        "return expected",
        breaks="F5",
        source="F5",
        killers=("tests:test_admission.py", "tests:test_controller.py"),
        why="the parts of groups and foreign requests begin on a full disk",
    ),
    mutant(
        "pruned-for-room-in-vain",
        "core.admission:decide_admission",
        "enough = space.given_up > 0 and space.free + space.given_up >= space.needed",
        "enough = space.given_up > 0",
        breaks="I7",
        source="I7",
        killers=("tests:test_admission.py", "tests:test_coordinator.py"),
    ),
    mutant(
        "pruned-for-room-before-the-newest-was-read",
        "coordinator.coordinator:Coordinator._is_proven",
        "return written or latest.id == self._verified",
        "return True",
        breaks="I2",
        source="F21",
        killers=("tests:disk_full/nothing_is_pruned_for_room_before_the_newest_was_read",),
        why="restore finds the newest one damaged, and nothing is left to fall back to",
    ),
    mutant(
        "room-is-made-of-what-retention-keeps",
        "coordinator.coordinator:Coordinator._space_for",
        "gone = {offer.of for offer in self._engine.given_up()}",
        "gone = {offer.of for offer in self._engine.ledger.prunable(())}",
        (
            "coordinator.coordinator:Coordinator._make_room",
            "self._engine.retire_now()",
            "for offer in self._engine.ledger.prunable(()):\n    self._engine.post(offer)",
        ),
        breaks="I7",
        source="I7",
        killers=("tests:test_coordinator.py",),
    ),
    mutant(
        "room-is-made-of-the-last-tracked-one",
        "coordinator.coordinator:Coordinator._space_for",
        "gone = {offer.of for offer in self._engine.given_up()}",
        "gone = {c.id for c in tracked}",
        (
            "coordinator.coordinator:Coordinator._make_room",
            "self._engine.retire_now()",
            (
                "for c in self._engine.ledger.in_state(State.TRACKED):\n"
                '    self._engine.withdraw(c, "no room")'
            ),
        ),
        breaks="I7",
        source="I7",
        killers=("tests:test_coordinator.py",),
    ),
    mutant(
        "names-that-were-compared-count-as-content",
        "ranks.restoring:Restorer.release",
        'whole = self.config.verify == "digests" and bool(located.files)',
        "whole = True",
        breaks="I2",
        source="F21",
        killers=(
            (
                "tests:test_manager.py::"
                "test_F5_a_restart_that_keeps_fewer_makes_room_once_it_has_restored"
            ),
        ),
        why="a checkpoint of which only the names were compared lets the older ones go",
    ),
    mutant(
        "no-room-ends-the-job",
        "ranks.participant:Participant.take_refusal",
        "if not isinstance(refused, NoRoom):",
        "if True:",
        breaks="F5",
        source="F5",
        killers=(
            "tests:test_manager.py::test_F5_training_goes_on_without_a_save_that_has_no_room",
        ),
        why="a job that asked to be warned ends on a full disk",
    ),
)
