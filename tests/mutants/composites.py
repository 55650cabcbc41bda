"""Mutants of composite checkpoints: optional parts, groups under a controller, names of steps."""

from __future__ import annotations

from mutants.loader import mutant

_HEARD_LATE = (
    "tests:test_crash_simulation.py::"
    "test_F11_F23_what_a_failed_attempt_said_is_heard_at_the_next_save"
)
MUTANTS = (
    mutant(
        "a-group-is-completed-by-its-first-rank-alone",
        "worker",
        "            results = [rows, *self._of_others(storage, location)]\n",
        "            results = [rows]\n",
        breaks="I3",
        source="order",
        killers=("tests:test_controller.py::test_two_groups_and_a_file_make_one_checkpoint",),
        why="metadata that lacks what the other ranks wrote",
    ),
    mutant(
        "the-controller-waits-for-ever",
        "controller",
        "            self._end_in_time(self._ports.clock.monotonic())\n",
        "            pass\n",
        breaks="I10",
        source="F1",
        killers=(
            "tests:test_controller.py::test_F1_workers_that_say_nothing_are_not_awaited_for_ever",
        ),
    ),
    mutant(
        "dead-workers-are-awaited",
        "controller",
        "        elif number not in flight.written:\n",
        "        elif False:\n",
        breaks="I10",
        source="F1",
        killers=(
            "tests:test_controller.py::test_F1_a_dead_worker_fails_the_save_and_training_goes_on",
        ),
    ),
    mutant(
        "any-answer-counts-for-what-is-in-flight",
        "controller",
        "        flight = self._flights.get(event.of)\n",
        """        if not isinstance(event, WriterGone):
            event = replace(event, of=next(reversed(self._flights), event.of))
        flight = self._flights.get(event.of)
""",
        breaks="I5",
        source="F11",
        killers=("simulation", _HEARD_LATE),
        why="a late answer is taken for the newest attempt's",
    ),
    mutant(
        "answers-of-older-attempts-are-handed-on",
        "controller",
        "        flight = self._flights.get(event.of)\n",
        "        flight = self._flights.get(event.of, next(reversed(self._flights.values()), None))\n",
        breaks="I5",
        source="F11",
        killers=("simulation", _HEARD_LATE),
        why="a rank that has written the older one is taken to have written the newer, too",
    ),
    mutant(
        "answers-count-each-time",
        "controller",
        "        if event in flight.taken:\n            return\n",
        "",
        breaks="I5",
        source="F11",
        killers=("simulation", _HEARD_LATE),
    ),
    mutant(
        "doomed-writers-write-on",
        "worker",
        "                    self._dying.append(writer)\n",
        "                    pass\n",
        breaks="F13",
        source="F13",
        killers=("tests:test_controller.py::test_F13_the_writer_of_a_failed_attempt_is_ended",),
        why="a writer that nobody ends is reported gone",
    ),
    mutant(
        "any-part-may-be-left-out",
        "writer",
        "        if part.name in job.optional:\n",
        "        if True:\n",
        (
            "evidence",
            "        if receipt.dropped and receipt.part not in optional:\n",
            "        if False:\n",
        ),
        breaks="F23",
        source="F23",
        killers=("tests:test_composite.py", "simulation"),
    ),
    mutant(
        "half-of-an-optional-part-is-published",
        "assembly",
        "            own_files = receipt.files if receipt.part not in shares.dropped else ()\n",
        "            own_files = receipt.files\n",
        (
            "effects",
            "                self._leave_out(checkpoint, part, directory)\n",
            "                pass\n",
        ),
        breaks="I4",
        source="F23",
        killers=("tests:test_composite.py",),
    ),
    mutant(
        "a-root-is-opened-under-other-names",
        "coordinator",
        "        if other:\n",
        "        if False:\n",
        breaks="I2",
        source="F30",
        killers=("tests:test_composite.py",),
        why="every checkpoint seems to be missing, and is withdrawn",
    ),
    mutant(
        "ranks-need-not-name-the-same-parts",
        "proposal",
        "        if (proposal.step, _names(proposal)) != (first.step, _names(first)):\n",
        "        if proposal.step != first.step:\n",
        breaks="I3",
        source="F10",
        killers=("tests:test_composite.py",),
    ),
    mutant(
        "a-part-that-nobody-writes-is-complete",
        "proposal",
        "    if nobody:\n",
        "    if False:\n",
        breaks="I3",
        source="F10",
        killers=("tests:test_composite.py",),
    ),
    mutant(
        "a-tree-is-not-made-durable",
        "files",
        "            fsync_existing(storage, path)\n",
        "",
        breaks="I3",
        source="fsync",
        killers=("tests:test_composite.py",),
    ),
    mutant(
        "a-ticket-counts-twice",
        "worker",
        "            if not self._is_newer(ticket.of):  # a call",
        "            if False:  # a call",
        breaks="I4",
        source="F11",
        killers=("tests:test_controller.py::test_I4_a_call_that_is_tried_again_writes_nothing",),
        why="a call that an orchestrator tries again writes into what is published meanwhile",
    ),
    mutant(
        "what-needs-torch-is-published-without",
        "coordinator",
        "        self._refuse_unfinishable(history.ledger)\n",
        "",
        (
            "assembly",
            "        if finisher is None:\n            raise SaveFailed(",
            "        if finisher is None:\n            return {}\n            raise SaveFailed(",
        ),
        breaks="I4",
        source="review",
        killers=(
            "tests:test_controller.py::test_I8_a_controller_does_not_finish_what_needs_torch",
        ),
    ),
    mutant(
        "readers-share-a-lease",
        "reader_leases",
        '        name = f"{step}.{tag}-{self._taken}.json"\n',
        '        name = f"{step}.{tag}.json"\n',
        breaks="F27",
        source="F27",
        killers=("tests:test_controller.py::test_F27_two_readings_of_one_step_keep_it_both",),
    ),
    mutant(
        "shares-replace-each-other",
        "worker",
        """        keys = {f"{part.name}.{index}": key for index, key in enumerate(sorted(named))}
""",
        """        keys = {f"{part.name}.{key.replace('/', '.')}".rstrip("."): key for key in named}
""",
        breaks="I3",
        source="review",
        killers=("tests:test_controller.py::test_shares_whose_names_are_alike_are_all_there",),
    ),
)
