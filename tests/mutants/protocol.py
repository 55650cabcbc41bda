"""Mutants of the protocol on disk: orderings swapped, second looks and fences dropped, one by one."""

from __future__ import annotations

from mutants.loader import mutant

ORDER = (
    mutant(
        "effect-before-journal",
        "coordinator.engine:Engine.commit",
        "if moved.source is not moved.dest:\n"
        "    record = self._record(moved)\n"
        "    self.append(record, essential=moved.dest in (*FORGOTTEN, State.FAILED))\n"
        "    self.moves += 1\n"
        "    self._blocked.pop(moved.of, None)\n"
        "    self.news.append(record)\n"
        '    say(log.info, "transition", _told(record), record=record)\n'
        "self.ledger = ledger\n"
        "if command is not None:\n"
        "    self.run(command)",
        "self.ledger = ledger\n"
        "if command is not None:\n"
        "    self.run(command)\n"
        "if moved.source is not moved.dest:\n"
        "    record = self._record(moved)\n"
        "    self.append(record, essential=moved.dest in (*FORGOTTEN, State.FAILED))\n"
        "    self.moves += 1\n"
        "    self.news.append(record)\n"
        '    say(log.info, "transition", _told(record), record=record)',
        breaks="I11",
        source="order",
        killers=("simulation", "processes"),
    ),
    mutant(
        "pruned-before-prunable-is-journaled",
        "coordinator.engine:Engine.commit",
        "if moved.source is not moved.dest:\n    record = self._record(moved)",
        "if isinstance(command, Prune):\n"
        "    latest = self.ledger.latest()\n"
        "    self.mover.prune(moved.checkpoint, latest.step if latest else -1)\n"
        "if moved.source is not moved.dest:\n"
        "    record = self._record(moved)",
        breaks="I1",
        source="order",
        killers=("simulation", "processes"),
        why="a crash in between leaves a tracked checkpoint without its directory",
    ),
    mutant(
        "acknowledged-before-the-tracker",
        "coordinator.engine:Engine._run_tracker",
        "self.publisher.write_tracker(checkpoint.step)\n"
        "if checkpoint.state is State.FINALIZED:\n"
        "    self.post(TrackerWritten(checkpoint.id))",
        "if checkpoint.state is State.FINALIZED:\n"
        "    self.post(TrackerWritten(checkpoint.id))\n"
        "self.publisher.write_tracker(checkpoint.step)\n"
        "if checkpoint.state is State.FINALIZED:",
        breaks="I2",
        source="order",
        killers=("simulation", "processes"),
    ),
    mutant(
        "published-before-the-manifest",
        "disk.publishing:Publisher.finalize",
        'put(self.storage, f"{directory}/{MANIFEST}",',
        "self.check_epoch()\n"
        "self.storage.rename(directory, target)\n"
        'put(self.storage, f"{target}/{MANIFEST}",',
        (
            "disk.publishing:Publisher.finalize",
            "self._publish(checkpoint, directory, target)",
            "self._fsync_names(checkpoint, target)",
        ),
        breaks="I4",
        source="order",
        killers=("simulation", "processes"),
    ),
    mutant(
        "tracker-after-the-move-to-quarantine",
        "coordinator.engine:Engine._run_quarantine",
        "self.publisher.write_tracker(latest.step)",
        "late = True",
        (
            "coordinator.engine:Engine._run_quarantine",
            "self.mover.quarantine(checkpoint, alone=alone, earlier=earlier)",
            (
                "self.mover.quarantine(checkpoint, alone=alone, earlier=earlier)\n"
                "if 'late' in locals():\n"
                "    self.publisher.write_tracker(latest.step)"
            ),
        ),
        breaks="I2",
        source="order",
        killers=("tests:test_schedules.py", "simulation"),
    ),
    mutant(
        "rollback-without-intent",
        "coordinator.coordinator:Coordinator.rollback",
        "self._engine.append(RollbackStarted(to_step=step, at=self._clock.wall()))",
        "",
        breaks="I8",
        source="order",
        killers=("simulation", "traces"),
        why="a crash in the middle undoes it, or half of it",
    ),
    mutant(
        "unfinished-rollback-is-forgotten",
        "coordinator.plan_run:PlanRun._follow",
        "self._finish_rollback(history.intent, afresh)",
        "pass",
        breaks="I8",
        source="order",
        killers=("tests:test_attacks.py",),
    ),
    mutant(
        "trash-emptied-before-a-prune-is-decided",
        "disk.setting_aside:Mover.prune",
        "aside = move_aside(self.storage, source, trash_dir(checkpoint.id))",
        "aside = move_aside(self.storage, source, gone_dir(checkpoint.id))",
        breaks="F27",
        source="order",
        killers=("tests:test_schedules.py", "simulation"),
        why="a reader's step, moved aside a moment too early, cannot be brought back",
    ),
    mutant(
        "trash-emptied-before-a-clean-up-is-durable",
        "disk.setting_aside:Mover._clean_up_in_place",
        "aside = move_aside(self.storage, directory, trash_dir(checkpoint.id))",
        "aside = move_aside(self.storage, directory, gone_dir(checkpoint.id))",
        breaks="I4",
        source="F8",
        killers=("tests:test_found_by_proof.py",),
        why="a power loss brings an attempt in place back under its published name, gutted",
    ),
    mutant(
        "reader-looks-before-its-lease",
        "disk.reader_lease:ReaderLease.renew",
        "put(self._storage, self._file, encode(mark), tag=self._nonce)\n"
        "found = lookup(self._storage, self._name)",
        "found = lookup(self._storage, self._name)\n"
        "put(self._storage, self._file, encode(mark), tag=self._nonce)",
        breaks="F27",
        source="order",
        killers=("exhaustive", "simulation"),
    ),
    mutant(
        "reader-does-not-look",
        "disk.reader_lease:ReaderLease.renew",
        'if found is None or found.kind != "dir":',
        "if False:",
        breaks="F27",
        source="order",
        killers=("exhaustive", "simulation"),
        why="a reader is told that a pruned step is there",
    ),
    mutant(
        "trash-kept-from-what-waits-for-space",
        "coordinator.coordinator:Coordinator.tick",
        "if idle or self._engine.pending or not self._idle_at_last_tick:",
        "if idle or not self._idle_at_last_tick:",
        breaks="F5",
        source="order",
        killers=("tests:test_coordinator.py",),
        why="a published save waits for its tracker until its deadline",
    ),
    mutant(
        "lease-given-back-before-the-load",
        "ranks.restoring:Restorer.restore",
        "return self.load(located, named)",
        "self.agree(Coordinator.release, located.lease)\nreturn self.load(located, named)",
        breaks="F27",
        source="order",
        killers=("tests:test_manager.py::test_F27_restore_holds_a_lease_while_it_loads",),
    ),
    mutant(
        "tracker-not-repaired-at-start",
        "coordinator.plan_run:PlanRun._follow",
        "self._repair_tracker(rewrite=any(d.result is Result.ADOPTED for d in decided.decisions))",
        "",
        breaks="F18",
        source="order",
        killers=("corruption", "simulation"),
    ),
    mutant(
        "late-retry-takes-the-tracker-back",
        "coordinator.engine:Engine._run_tracker",
        "if checkpoint.state is not State.FINALIZED and checkpoint != latest:",
        "if False:",
        breaks="I2",
        source="order",
        killers=("tests:test_schedules.py", "simulation"),
    ),
)

LOOKS = (
    mutant(
        "tracker-not-read-back",
        "disk.publishing:Publisher.write_tracker",
        "if seen.step != step:",
        "if False:",
        breaks="I2",
        source="read-back",
        killers=("tests:test_schedules.py", "simulation"),
    ),
    mutant(
        "published-name-not-read-back",
        "disk.publishing:Publisher._fsync_names",
        "if manifest is None or manifest.of != checkpoint.id:",
        "if False:",
        (
            "disk.publishing:Publisher._publish",
            (
                "if lookup(self.storage, directory) is not None:\n"
                "    raise  # it certainly did not happen; something else may stand at the name"
            ),
            "pass",
        ),
        breaks="I3",
        source="read-back",
        killers=("tests:test_schedules.py", "simulation"),
        why="a rename that failed is taken for done",
    ),
    mutant(
        "unknown-outcome-is-a-failure",
        "coordinator.engine:Engine._run_finalize",
        "except (Fenced, OutcomeUnknown):",
        "except Fenced:",
        breaks="I1",
        source="F8",
        killers=(
            "tests:test_coordinator.py::test_F8_a_publish_of_unknown_outcome_is_fatal",
            "simulation",
        ),
        why="what may be published is failed and taken away",
    ),
    mutant(
        "a-published-one-may-fail",
        "coordinator.engine:Engine._run_finalize",
        "if checkpoint.published:",
        "if False:",
        breaks="I1",
        source="F5",
        killers=("tests:test_attacks.py", "simulation"),
    ),
    mutant(
        "another-attempts-manifest-is-our-commit",
        "disk.publishing:Publisher._is_committed",
        "if manifest is None or manifest.of != checkpoint.id:\n    return False",
        "if manifest is None or manifest.of.step != checkpoint.step:\n    return False",
        breaks="I5",
        source="F11",
        killers=(
            "tests:test_in_place.py::test_I5_the_manifest_of_another_attempt_is_not_our_commit",
        ),
    ),
    mutant(
        "another-attempts-directory-is-ours-published",
        "disk.publishing:Publisher._is_published",
        "if manifest is not None and manifest.of == checkpoint.id:\n    return True",
        "if manifest is not None and manifest.of.step == checkpoint.step:\n    return True",
        breaks="I5",
        source="F11",
        killers=(
            "tests:test_coordinator.py::test_I5_another_attempt_at_our_name_is_not_ours_published",
        ),
    ),
    mutant(
        "a-mount-is-pruned",
        "core.keeping:_kept_by_tracker",
        "return PruneDecision.KEEP_SOMEBODY_ELSES if facts.holds.somebody_elses else None",
        "return None",
        breaks="F16",
        source="F16",
        killers=(
            "tests:test_coordinator.py::test_F16_a_checkpoint_that_became_a_mount_is_not_pruned",
        ),
        why="no rename takes it, so that the prune is tried for ever",
    ),
    mutant(
        "prune-does-not-look-for-pins",
        "core.keeping:decide_prune",
        "_kept_as_the_last(facts)\nor _kept_by_people(facts)",
        "_kept_as_the_last(facts)",
        breaks="I7",
        source="F27",
        killers=("exhaustive", "simulation"),
    ),
    mutant(
        "prune-does-not-look-first",
        "disk.setting_aside:Mover.prune",
        "decision = decide_prune(facts)\n"
        "if decision is not PruneDecision.MOVE:\n"
        "    return self._stay(checkpoint, why_kept(decision, facts))",
        "blind = replace(facts.holds, pinned=False, leased=False)\n"
        "decision = decide_prune(replace(facts, holds=blind))\n"
        "if decision is not PruneDecision.MOVE:\n"
        "    return self._stay(checkpoint, why_kept(decision, facts))",
        breaks="F27",
        source="F27",
        killers=("tests:test_schedules.py", "simulation"),
        why="a leased step is away for a moment",
    ),
    mutant(
        "prune-does-not-look-again",
        "disk.setting_aside:Mover.prune",
        "facts = replace(facts, holds=self._look_at_holds(checkpoint.step))",
        "return Pruned(aside=aside)",
        breaks="F27",
        source="F27",
        killers=("exhaustive", "simulation"),
        why="the second look of the pruner: a lease taken between look and rename",
    ),
    mutant(
        "prune-does-not-bring-back",
        "disk.setting_aside:Mover._prune_left",
        "return self._bring_back(checkpoint, back, why_kept(left, facts))",
        "return Pruned()",
        breaks="F27",
        source="F17",
        killers=("tests:test_attacks.py", "simulation"),
        why="a crash between the move and the second look",
    ),
    mutant(
        "prune-does-not-read-the-tracker",
        "core.keeping:_kept_by_tracker",
        "if tracked is None or tracked <= facts.step:",
        "if False:",
        breaks="I2",
        source="F17",
        killers=("tests:test_coordinator.py", "simulation"),
        why="a tracker edited by hand names the one that is pruned",
    ),
    mutant(
        "prune-does-not-look-at-the-newer-one",
        "core.keeping:_kept_as_the_last",
        "return None if facts.newer_is_there else PruneDecision.KEEP_NEWER_MISSING",
        "return None",
        breaks="I2",
        source="F19",
        killers=("tests:test_schedules.py", "simulation"),
    ),
    mutant(
        "prune-takes-whatever-has-the-name",
        "disk.setting_aside:Mover.prune",
        "return self._prune_left(checkpoint, newer_step)",
        "pass",
        breaks="I1",
        source="F15",
        killers=("tests:test_schedules.py",),
        why="also a later attempt's directory, or a person's",
    ),
    mutant(
        "prune-deletes-in-place",
        "disk.setting_aside:Mover.prune",
        "aside = move_aside(self.storage, source, trash_dir(checkpoint.id))\nfacts",
        "from ckptfsm.disk.durable import walk_files\n"
        "for inner, _ in walk_files(self.storage, source):\n"
        '    if not inner.startswith(".ckptfsm"):\n'
        '        self.storage.unlink(f"{source}/{inner}")\n'
        "aside = move_aside(self.storage, source, trash_dir(checkpoint.id))\n"
        "facts",
        breaks="I4",
        source="verl (open): gutted directory",
        killers=("simulation", "processes"),
        why="a deletion that is interrupted leaves a directory that looks like a checkpoint",
    ),
    mutant(
        "clean-up-takes-what-was-published",
        "disk.setting_aside:Mover.clean_up",
        "move_aside(self.storage, name, quarantine_dir(checkpoint.id))",
        "move_aside(self.storage, name, trash_dir(checkpoint.id))",
        (
            "core.recovery_rules:RULES",
            "(State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN)",
            "()",
        ),
        breaks="I1",
        source="I1",
        killers=("fieldbugs", "simulation", "processes"),
        why="published, not yet journaled, killed: a restart throws it away",
    ),
    mutant(
        "quarantine-is-the-trash",
        "disk.setting_aside:Mover.quarantine",
        "move_aside(self.storage, source, quarantine_dir(checkpoint.id))",
        "move_aside(self.storage, source, trash_dir(checkpoint.id))",
        breaks="I1",
        source="I1",
        killers=("simulation", "fieldbugs"),
        why="what a person or damage took out of service is deleted",
    ),
    mutant(
        "unlisted-files-are-published",
        "disk.assembly:Assembly.manifest",
        "self._refuse_unlisted(directory, files)",
        "",
        breaks="F21",
        source="F13",
        killers=("tests:test_coordinator.py", "simulation"),
        why="a late writer's file in the directory",
    ),
    mutant(
        "a-taken-name-is-cleared",
        "coordinator.coordinator:Coordinator._clear_the_name",
        'if there.found in ("manifest", "stock"):\n    raise StepExistsError(',
        "if there.found in ():\n    raise StepExistsError(",
        breaks="F15",
        source="F15",
        killers=("tests:test_manager.py::test_adopt_a_stock_directory",),
        why="a complete checkpoint that is not in use is moved away unasked",
    ),
    mutant(
        "adopted-without-pin",
        "coordinator.plan_run:PlanRun._act",
        'self.engine.protection.pin(action.of.step, "adopted")',
        "",
        breaks="I8",
        source="F26",
        killers=("tests:test_manager.py::test_adopt_a_manifest_without_a_journal",),
    ),
    mutant(
        "pinned-after-it-is-adopted",
        "coordinator.plan_run:PlanRun._act",
        'self.engine.protection.pin(action.of.step, "adopted")\nself.engine.reread_protection()',
        "pass",
        (
            "coordinator.plan_run:PlanRun._act",
            "self.engine.post(action)",
            (
                "self.engine.post(action)\n"
                "if isinstance(action, Adopted):\n"
                '    self.engine.protection.pin(action.of.step, "adopted")\n'
                "    self.engine.reread_protection()"
            ),
        ),
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_crash_simulation.py::"
                "test_I8_what_was_adopted_stays_wherever_its_opening_is_killed"
            ),
            "simulation",
        ),
        why="a crash between the two, and retention deletes what a stranger saved",
    ),
    mutant(
        "a-renewal-changes-nothing",
        "disk.reader_lease:ReaderLease.renew",
        'nonce=f"{self._nonce}-{self._renewals}")',
        "nonce=self._nonce)",
        breaks="F27",
        source="F27",
        killers=(
            (
                "tests:test_coordinator.py::"
                "test_F27_a_reader_that_renews_keeps_its_step_beyond_the_timeout"
            ),
            "simulation",
        ),
        why="the lease of a reader that lives and renews expires",
    ),
    mutant(
        "renewals-do-not-count",
        "disk.reader_lease:ReaderLeases._watch",
        "known[0] == content else now",
        "known[0] != b'' else now",
        breaks="F27",
        source="F27",
        killers=("tests:test_coordinator.py", "simulation"),
        why="a reader that lives and renews loses its lease",
    ),
)

FENCES = (
    mutant(
        "a-manifest-in-place-is-put-unchecked",
        "disk.publishing:Publisher._commit_in_place",
        "put(self.storage, path, manifest, tag=self.tag, check=self.check_epoch)",
        "put(self.storage, path, manifest, tag=self.tag)",
        breaks="I9",
        source="fencing",
        killers=(
            "tests:test_races.py::test_I9_a_check_comes_directly_before_a_checkpoint_gets_its_name",
        ),
    ),
    mutant(
        "published-unchecked",
        "disk.publishing:Publisher._publish",
        "self.check_epoch()\ntry:\n    self.storage.rename(directory, target)",
        "try:\n    self.storage.rename(directory, target)",
        breaks="I9",
        source="fencing",
        killers=(
            "tests:test_races.py::test_I9_a_check_comes_directly_before_a_checkpoint_gets_its_name",
        ),
        why="the check before the manifest is older than what the put of it takes",
    ),
    mutant(
        "a-taker-forgets-all-epochs-but-its-own",
        "disk.ownership:_forget_older",
        "if older is not None and older < epoch:",
        "if older is not None and older != epoch:",
        breaks="I9",
        source="fencing",
        killers=("tests:test_ownership.py::test_I9_a_paused_taker_leaves_its_successors_epoch",),
        why="a paused one removes its successor's, and goes on as the owner",
    ),
    mutant(
        "nobody-is-fenced",
        "disk.ownership:RootOwnership.check",
        "if newest != self.epoch:\n    raise Fenced(",
        "if False:\n    raise Fenced(",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "finalize-is-not-fenced",
        "disk.publishing:Publisher.finalize",
        "self.check_epoch()\ntarget = self.layout.published_name(checkpoint.step)",
        "target = self.layout.published_name(checkpoint.step)",
        (
            "disk.publishing:Publisher.finalize",
            ("fsync_tree_dirs(self.storage, directory)\nself.check_epoch()"),
            "fsync_tree_dirs(self.storage, directory)",
        ),
        (
            "disk.publishing:Publisher._publish",
            ("self.check_epoch()\ntry:\n    self.storage.rename(directory"),
            ("try:\n    self.storage.rename(directory"),
        ),
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "tracker-is-not-fenced",
        "disk.publishing:Publisher.write_tracker",
        "self.check_epoch()\n"
        "put(self.storage, TRACKER, tracker_text(step), tag=self.tag, check=self.check_epoch)",
        "put(self.storage, TRACKER, tracker_text(step), tag=self.tag)",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "prune-is-not-fenced",
        "disk.setting_aside:Mover.prune",
        "self.check_epoch()\nif not self._is_at_its_name(checkpoint):",
        "if not self._is_at_its_name(checkpoint):",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "clean-up-is-not-fenced",
        "disk.setting_aside:Mover.clean_up",
        "self.check_epoch()\n"
        "directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)\n"
        "name = self.layout.published_name(checkpoint.step)",
        "directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)\n"
        "name = self.layout.published_name(checkpoint.step)",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "quarantine-is-not-fenced",
        "disk.setting_aside:Mover.quarantine",
        "self.check_epoch()\nfor path in sorted(self.lies_in(TRASH, checkpoint)):",
        "for path in sorted(self.lies_in(TRASH, checkpoint)):",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "bringing-back-is-not-fenced",
        "disk.setting_aside:Mover._bring_back",
        "self.check_epoch()\n"
        "move(self.storage, aside, self.layout.published_name(checkpoint.step))",
        "move(self.storage, aside, self.layout.published_name(checkpoint.step))",
        breaks="I9",
        source="fencing",
        killers=("tests:test_found_by_review.py",),
    ),
    mutant(
        "what-comes-back-counts-unseen",
        "disk.setting_aside:Mover._stay",
        "if not is_whole(checkpoint, there):",
        "if False:",
        breaks="I2",
        source="F27",
        killers=("tests:test_found_by_proof.py",),
        why="somebody gutted it before it was pruned, and its reader brings it back",
    ),
    mutant(
        "a-stranger-is-explained-away",
        "core.evidence:is_its_own",
        "if there.of is not None:\n    return there.of == checkpoint.id",
        'if there.of is not None and checkpoint.provenance != "adopted":\n'
        "    return there.of == checkpoint.id",
        breaks="I8",
        source="F16",
        killers=("tests:test_recovery.py",),
        why="at the name of a withdrawn one that was adopted, another's is evidence",
    ),
    mutant(
        "what-left-for-the-trash-is-still-at-its-name",
        "core.recovery_rules:_lies_elsewhere",
        "return facts.in_trash or (left and facts.in_quarantine)",
        "return left and (facts.in_trash or facts.in_quarantine)",
        breaks="I8",
        source="F16",
        killers=(
            (
                "tests:test_found_by_proof.py::"
                "test_I8_a_fresh_start_leaves_nothing_at_the_name_of_what_lies_in_the_trash"
            ),
        ),
        why="a fresh start leaves what a stock trainer saved there since",
    ),
    mutant(
        "a-stranger-inherits-the-name-of-what-was-moved",
        "core.recovery_rules:_lies_elsewhere",
        "return facts.in_trash or (left and facts.in_quarantine)",
        "return facts.in_trash",
        breaks="I8",
        source="F16",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_a_strangers_directory_at_the_name_of_what_was_moved_aside_is_left_alone"
            ),
        ),
        why="what somebody else has begun there is moved aside as ours",
    ),
    mutant(
        "what-came-back-may-leave-again",
        "disk.setting_aside:Mover._stay",
        'self._make_durable("", TRASH)\nthere = inspect_published(',
        "there = inspect_published(",
        breaks="I1",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_what_came_back_gutted_is_looked_at_again_after_an_error"
            ),
        ),
        why="a power loss puts what is tracked again back into the trash",
    ),
    mutant(
        "the-trash-has-no-say-at-a-restart",
        "disk.inspection:gather_evidence",
        "frozenset(trashed),",
        "frozenset(),",
        breaks="I7",
        source="F27",
        killers=(
            "tests:test_found_by_attack.py::test_I1_what_a_fenced_prune_takes_is_not_deleted_by_its_successor",
            "tests:test_found_by_review.py",
        ),
        why="a stranger's directory at its name goes to quarantine",
    ),
    mutant(
        "a-leased-one-is-given-up-for-a-stranger",
        "disk.setting_aside:Mover._prune_left",
        "raise DamagedRoot(problem, file=name, step=checkpoint.step)",
        "return Pruned()",
        breaks="I7",
        source="F27",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I7_what_a_reader_holds_is_not_deleted_for_a_strangers_directory"
            ),
        ),
        why="it lies in the trash, and its name is taken when it should come back",
    ),
    mutant(
        "what-is-saved-again-is-taken-for-what-was-missing",
        "core.evidence:is_its_own",
        'if checkpoint.reason == "missing":  # it',
        "if False:  # it",
        breaks="I2",
        source="F19",
        killers=("tests:test_recovery.py", "tests:test_found_by_review.py"),
        why="a stock trainer's save goes to quarantine, and the run falls back",
    ),
    mutant(
        "a-fresh-start-passes-over-a-mount",
        "core.recovery_refusals:refuse_leftovers",
        "stuck += [name for name in evidence.mounts if name not in stuck]",
        "",
        breaks="I8",
        source="F16",
        killers=("tests:test_found_by_review.py::test_F16_a_fresh_start_refuses_a_mount",),
    ),
    mutant(
        "what-is-in-the-trash-is-not-needed-any-more",
        "core.keeping:decide_left",
        "return _kept_as_the_last(facts) or _kept_by_people(facts) or nothing_else",
        "return _kept_by_people(facts) or nothing_else",
        breaks="I7",
        source="F17",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I1_what_lies_in_the_trash_comes_back_if_nothing_newer_is_whole"
            ),
            "exhaustive",
        ),
        why="the newer one, which made it removable, was damaged since: the last whole one is deleted",
    ),
    mutant(
        "prunes-are-decided-before-withdrawals",
        "core.recovery:_in_order",
        "ordered = [*failed, *first, *staying, *(d for d in rest if d not in last)]\n"
        "for step, prunes in groupby(reversed(leaving), key=lambda d: d.step):",
        "ordered = [*failed, *first, *leaving, *staying, *(d for d in rest if d not in last)]\n"
        "for step, prunes in ():",
        breaks="I7",
        source="F17",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I1_what_a_person_moved_to_quarantine_is_not_taken_for_what_stands_at_its_name"
            ),
            "exhaustive",
        ),
    ),
    mutant(
        "a-left-out-part-has-its-checkpoints-name",
        "core.layout:left_out_name",
        'return f"part-{attempt_name(of)}"',
        "return attempt_name(of)",
        breaks="F27",
        source="F27",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_F27_a_part_that_was_left_out_is_not_taken_for_its_checkpoint"
            ),
        ),
        why="half a checkpoint comes back for its reader",
    ),
    mutant(
        "a-withdrawal-takes-whatever-has-the-name-now",
        "disk.setting_aside:Mover.quarantine",
        "moved = self.lies_in(QUARANTINE, checkpoint) - earlier\nfound",
        "moved = frozenset()\nfound",
        breaks="I1",
        source="F16",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I7_what_a_reader_holds_is_not_deleted_for_a_strangers_directory"
            ),
        ),
        why="its move was done, and what somebody saved meanwhile goes too",
    ),
    mutant(
        "a-refused-start-is-forgotten",
        "coordinator.coordinator:Coordinator._recover",
        "lost=history.lost",
        "lost=frozenset()",
        breaks="I8",
        source="F33",
        killers=(
            "tests:test_found_by_review.py::test_I8_a_start_that_was_refused_is_refused_again",
        ),
        why="the next one begins from zero",
    ),
    mutant(
        "a-fresh-start-goes-on-over-what-it-leaves",
        "core.recovery:plan",
        "if afresh:\n    refuse_leftovers",
        'if resume == "fresh":\n    refuse_leftovers',
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_an_interrupted_fresh_start_refuses_before_it_changes_anything"
            ),
        ),
    ),
    mutant(
        "a-fresh-start-is-completed-over-what-came-since",
        "core.recovery_refusals:refuse_newcomer",
        'used = tracker.found != "missing"',
        'used = tracker.found == "release"',
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_was_saved_after_a_fresh_start_that_died_is_not_moved_unasked"
            ),
        ),
        why="a month of another trainer's goes to quarantine, and the run begins from zero",
    ),
    mutant(
        "a-rollback-is-completed-over-what-came-since",
        "core.recovery_refusals:refuse_newcomer",
        "used = above and _is_anothers(tracker.step, intent, ledger, evidence)",
        "used = False",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_was_saved_after_a_rollback_that_died_is_not_moved_unasked"
            ),
        ),
    ),
    mutant(
        "a-fresh-start-leaves-what-waits-to-be-tracked",
        "coordinator.plan_run:PlanRun._follow",
        "if self.engine.ledger.in_flight() is None:\n    self._finish_rollback",
        "if True:\n    self._finish_rollback",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_a_fresh_start_does_not_leave_what_waits_to_be_tracked"
            ),
        ),
        why="it is refused, and the next start resumes from that",
    ),
    mutant(
        "a-lowered-tracker-counts-as-it-was-before",
        "core.recovery_refusals:_is_anothers",
        "if there is None or intent.lowered:\n    return there is not None",
        "if there is None:\n    return False",
        breaks="I8",
        source="F33",
        killers=("tests:test_recovery.py::test_I8_what_stands_at_a_step_we_know_may_be_anothers",),
        why="a step that a stock trainer saved again goes to quarantine",
    ),
    mutant(
        "our-own-tracker-is-a-newcomers",
        "core.rollback:Intent.after",
        "return replace(self, lowered=False)",
        "return self",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_our_own_tracker_above_a_damaged_target_is_no_newcomers"
            ),
        ),
        why="a rollback whose target was damaged is refused",
    ),
    mutant(
        "what-is-not-whole-is-a-newcomers",
        "core.recovery_refusals:_is_anothers",
        'return there.found in ("manifest", "stock") or not withdrawn',
        "return True",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_recovery.py::"
                "test_I8_an_unfinished_rollback_goes_on_where_the_tracker_names_what_was_lost"
            ),
        ),
        why="the tracker names what was lost, and the rollback is refused for ever",
    ),
    mutant(
        "a-fresh-start-is-planned-with-a-tracker",
        "core.recovery:plan",
        "if afresh:\n    evidence = replace(",
        "if False:\n    evidence = replace(",
        breaks="I10",
        source="F33",
        killers=(
            "tests:test_found_by_review.py::test_I10_a_fresh_start_is_planned_as_it_is_carried_out",
        ),
        why="what moves directories does not see it any more, and decides otherwise",
    ),
    mutant(
        "a-fresh-start-lets-go-of-the-older-ones",
        "coordinator.engine:Engine._run_tracker",
        "self._retire_due = not self._keep_all",
        "self._retire_due = True",
        breaks="I7",
        source="F21",
        killers=("tests:test_found_by_review.py::test_I7_a_fresh_start_deletes_nothing",),
        why="what a roll forward supersedes is deleted, where all is to be kept",
    ),
    mutant(
        "any-loss-lifts-the-tracker",
        "core.rollback:Intent.after",
        "if record.step == self._reached(checkpoints):",
        "if record.step <= (self.target or 0):",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_only_the_loss_of_what_it_names_lifts_the_tracker"
            ),
            "tests:test_journal.py",
        ),
        why="a stock trainer's save is moved away, as an old checkpoint was damaged meanwhile",
    ),
    mutant(
        "the-trash-is-emptied-of-what-is-in-use",
        "disk.trash:remove_some",
        "names = [name for name in list_names(storage, TRASH) if is_given_up(name)]",
        "names = list_names(storage, TRASH)",
        breaks="I1",
        source="fencing",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_a_fenced_prune_takes_is_not_deleted_by_its_successor"
            ),
        ),
        why="a fenced manager's late rename took it there, and its successor holds it as tracked",
    ),
    mutant(
        "whatever-lies-in-a-marked-directory-goes",
        "core.keeping:decide_in_place",
        "if begun_here and facts.contents is not Contents.MORE:",
        "if begun_here:",
        breaks="I1",
        source="F16",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_a_stock_trainer_added_to_a_failed_attempt_is_not_deleted"
            ),
        ),
        why="what a stock trainer wrote over a failed attempt, in a format nobody judges",
    ),
    mutant(
        "a-clean-up-takes-whatever-has-the-name-now",
        "disk.setting_aside:Mover._clean_up_in_place",
        "marked = is_marked(self.storage, directory, checkpoint.id)",
        "marked = True",
        breaks="I1",
        source="F16",
        killers=(
            (
                "tests:test_in_place.py::"
                "test_I1_a_clean_up_tried_again_takes_no_save_of_another_trainer"
            ),
        ),
        why="a trainer's unfinished save, where the clean-up's first try had moved the attempt itself",
    ),
    mutant(
        "what-somebody-added-is-a-left-over",
        "disk.inspection:_is_cut_short",
        "return all(\n    path.startswith(inner)",
        "return any(\n    path.startswith(inner)",
        breaks="I1",
        source="F16",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_a_stock_trainer_added_to_a_failed_attempt_is_not_deleted"
            ),
        ),
        why="a stock trainer saved into the directory of a failed attempt, in an older format",
    ),
    mutant(
        "in-place-rolls-forward-over-what-is-in-use",
        "core.recovery_rules:_name_is_taken",
        "return went_on(facts.checkpoint, facts.tracker)",
        "return False",
        breaks="I8",
        source="F16",
        killers=(
            (
                "tests:test_in_place.py::"
                "test_I8_a_roll_forward_stops_where_a_stock_trainer_saved_the_same_shapes"
            ),
        ),
        why="our metadata over a stock trainer's shards",
    ),
    mutant(
        "a-roll-forward-writes-over-metadata",
        "disk.assembly:Assembly.finish",
        "if there and not content_is(self.storage, path, content):",
        "if False:",
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I1_a_roll_forward_writes_over_nobody_elses_metadata",
        ),
        why="a stock trainer's metadata, where the tracker does not tell of its save",
    ),
    mutant(
        "a-torn-manifest-is-what-a-save-leaves",
        "core.keeping:decide_in_place",
        "begun_here = facts.alone and facts.marked and facts.at_name is AtName.UNFINISHED",
        "begun_here = facts.marked and facts.at_name in (AtName.UNFINISHED, AtName.TORN)",
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I1_a_torn_manifest_beside_an_undecided_prune_is_kept",
        ),
        why="a published checkpoint is deleted as what a save leaves that was cut short",
    ),
    mutant(
        "a-late-manifest-may-still-land",
        "disk.setting_aside:Mover.clean_up",
        'sweep_temporaries(self.storage, (f"{name}/{PRIVATE}",))',
        "",
        breaks="I9",
        source="fencing",
        killers=(
            "tests:test_in_place.py::test_I9_no_late_manifest_lands_in_an_adopted_checkpoint",
        ),
        why="a stock trainer's checkpoint, in use, is withdrawn as one of ours that is damaged",
    ),
    mutant(
        "what-a-person-renamed-is-a-second-one",
        "core.layout:parse_aside",
        "if number.isascii() and number.isdigit() and (of := parse_attempt(first)):",
        "if of := parse_attempt(first):",
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_found_by_attack.py::test_I1_what_a_person_renamed_in_the_trash_is_kept",
        ),
        why="1.e1.a1.bak in the trash is given up and deleted",
    ),
    mutant(
        "the-first-of-two-comes-back",
        "disk.setting_aside:Mover._prune_left",
        "return self._bring_back(checkpoint, back, why_kept(left, facts))",
        "return self._bring_back(checkpoint, paths[0], why_kept(left, facts))",
        breaks="F27",
        source="fencing",
        killers=(
            "tests:test_found_by_attack.py::test_F27_of_two_in_the_trash_the_attempts_own_comes_back",
        ),
        why="a stranger's save gets the name of a step that a reader holds",
    ),
    mutant(
        "a-clean-up-takes-what-was-adopted",
        "coordinator.engine:Engine._run_clean_up",
        "held = any(self._has_its_name(other) for other in others)",
        "held = False",
        breaks="I1",
        source="F16",
        killers=("tests:test_in_place.py::test_I1_a_clean_up_tried_again_leaves_what_was_adopted",),
        why="a tracked, pinned checkpoint, once the tracker is our own",
    ),
    mutant(
        "a-clean-up-does-not-look-again",
        "disk.setting_aside:Mover._clean_up_in_place",
        "still = decide_in_place(replace(facts, contents=contents))",
        "still = decide_in_place(facts)",
        breaks="I1",
        source="race",
        killers=(
            "tests:test_in_place.py::test_I1_what_is_completed_while_it_is_moved_is_not_deleted",
        ),
        why="a stock trainer completes its save between look and move",
    ),
    mutant(
        "a-prune-does-not-look-at-the-tracker-again",
        "disk.setting_aside:Mover.prune",
        "facts = replace(facts, holds=self._look_at_holds(checkpoint.step))",
        "before = facts.holds.tracker_step\n"
        "facts = replace(facts, holds=self._look_at_holds(checkpoint.step))\n"
        "facts = replace(facts, holds=replace(facts.holds, tracker_step=before))",
        breaks="I1",
        source="race",
        killers=(
            "tests:test_in_place.py::test_I1_what_is_put_in_use_while_it_is_pruned_is_not_deleted",
        ),
        why="a stock trainer saves the step again between look and move",
    ),
    mutant(
        "what-waits-for-its-prune-has-no-name",
        "coordinator.engine:Engine._has_its_name",
        "return not self.mover.lies_in(TRASH, other)",
        "return False",
        breaks="I7",
        source="F27",
        killers=(
            "tests:test_in_place.py::test_F27_a_clean_up_tried_again_leaves_what_a_reader_holds",
        ),
        why="a clean-up that was put off takes what a reader holds",
    ),
    mutant(
        "our-own-later-save-is-another-trainers",
        "core.evidence:went_on",
        "return tracker.step == checkpoint.step or not tracker.by_us",
        "return True",
        breaks="I2",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I2_a_failed_attempt_is_not_adopted_after_our_own_later_save",
        ),
        why="what has failed is adopted, or left at its name for good",
    ),
    mutant(
        "a-tracker-above-is-always-ours",
        "core.evidence:went_on",
        "return tracker.step == checkpoint.step or not tracker.by_us",
        "return tracker.step == checkpoint.step",
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I1_a_tracker_at_a_step_that_was_left_tells_of_another_trainer",
        ),
        why="a stock trainer's saves go to quarantine, or are deleted",
    ),
    mutant(
        "what-is-put-in-use-was-not-gone-on-from",
        "core.evidence:went_on",
        "return tracker.step == checkpoint.step or not tracker.by_us",
        "return not tracker.by_us",
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I1_what_a_person_puts_in_use_is_no_failed_attempts",
        ),
        why="a stock trainer's save goes to quarantine, which a person has just put in use",
    ),
    mutant(
        "our-tracker-looks-like-a-stock-trainers",
        "core.layout:tracker_text",
        'return b"%d\\n" % step',
        'return b"%d" % step',
        breaks="I1",
        source="F16",
        killers=(
            "tests:test_in_place.py::test_I1_a_tracker_at_a_step_that_was_left_tells_of_another_trainer",
        ),
        why="nothing tells any more who wrote it last",
    ),
    mutant(
        "finalizers-of-the-fenced",
        "coordinator.engine:Engine._ask_for_finalizers",
        "self.check_epoch()  # finalizers write by the published name",
        "pass",
        breaks="I9",
        source="F13",
        killers=("tests:test_coordinator.py::test_I9_a_fenced_coordinator_asks_for_no_finalizers",),
        why="a job that was paused behind its writers puts its metadata over a tracked checkpoint's",
    ),
    mutant(
        "receipts-of-the-fenced",
        "writers.rank_writer:put_receipt",
        "put(storage, path, encode_sealed(receipt), tag=str(job.of), check=own)",
        "put(storage, path, encode_sealed(receipt), tag=str(job.of))",
        breaks="I9",
        source="F13",
        killers=(
            "tests:test_in_place.py::test_I9_a_writer_that_was_paused_leaves_a_successors_receipts",
        ),
        why="a writer that was paused replaces the receipt of a tracked checkpoint",
    ),
    mutant(
        "in-place-under-the-tracker",
        "coordinator.coordinator:Coordinator._refuse_in_place",
        "if read_tracker(self._storage).step == request.step:",
        "if False:",
        breaks="I2",
        source="F5",
        killers=(
            "tests:test_in_place.py::test_I2_nothing_is_written_in_place_where_the_tracker_is",
        ),
        why="the tracker names what is being written, and what fails there is resumed from",
    ),
    mutant(
        "what-was-moved-still-has-its-name",
        "coordinator.engine:Engine._may_be_there",
        "return adopted and not self.mover.lies_in(QUARANTINE, withdrawn)",
        "return adopted",
        breaks="I10",
        source="F5",
        killers=(
            "tests:test_in_place.py::test_F5_a_failed_one_where_an_adopted_one_was_gives_space_back",
        ),
        why="each failed save at the step of an adopted one that was left stays in quarantine",
    ),
    mutant(
        "what-is-withdrawn-is-a-failed-ones",
        "coordinator.engine:Engine._run_clean_up",
        "c.state is not State.QUARANTINED or self._may_be_there(c)",
        "c.state is not State.QUARANTINED",
        breaks="I1",
        source="I1",
        killers=(
            "tests:test_in_place.py::test_I1_what_was_adopted_and_withdrawn_is_not_given_up_with_a_failed_attempt",
        ),
        why="what was taken out of service is deleted with a failed attempt",
    ),
    mutant(
        "a-staged-attempt-makes-evidence",
        "disk.inspection:gather_evidence",
        "if c.in_place or c.state not in staged}",
        "}",
        breaks="I8",
        source="F33",
        killers=(
            "tests:test_in_place.py::test_I8_a_save_that_has_only_begun_is_no_evidence_for_what_was_staged",
        ),
        why="every start is refused over a directory that was only begun",
    ),
    mutant(
        "the-tracker-moves-before-the-clean-up",
        "core.recovery:_in_order",
        "staying = [d for d in known if d not in leaving and d not in failed]",
        "staying, failed = [d for d in known if d not in leaving], []",
        breaks="I8",
        source="order",
        killers=(
            "tests:test_in_place.py::test_I8_what_has_failed_is_cleaned_up_while_the_tracker_tells_who_went_on",
        ),
        why="a stock trainer's checkpoint, which the same plan adopts",
    ),
    mutant(
        "what-came-to-the-trash-was-given-up",
        "coordinator.engine:Engine._give_up",
        "self._sort(of, path, given_up=True, sure=path == aside)",
        "self._sort(of, path, given_up=True, sure=True)",
        breaks="I1",
        source="fencing",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_somebody_saved_over_a_failed_attempt_in_place_is_not_deleted"
            ),
        ),
        why="a fenced manager's late rename took there what a stock trainer had saved",
    ),
    mutant(
        "what-the-tracker-names-may-lie-in-the-trash",
        "core.keeping:decide_left",
        "named = not name_taken and facts.holds.tracker_step == facts.step",
        "named = False",
        breaks="I2",
        source="fencing",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I2_what_the_tracker_names_comes_back_from_the_trash"
            ),
        ),
        why="somebody went back to a step whose prune was half done",
    ),
    mutant(
        "a-part-left-out-in-place-is-deleted",
        "disk.publishing:Publisher._leave_out",
        "place = QUARANTINE if checkpoint.in_place else TRASH",
        "place = TRASH",
        breaks="I1",
        source="fencing",
        killers=(
            "tests:test_found_by_attack.py::test_I1_what_a_clean_up_leaves_out_in_place_is_kept",
        ),
        why="a fenced manager's late rename takes a later save's part",
    ),
    mutant(
        "a-clean-up-tried-again-forgets-staging",
        "disk.setting_aside:Mover.clean_up",
        'self._make_durable(QUARANTINE, TRASH, parent_of(directory), "")',
        'self._make_durable(TRASH, "")',
        breaks="I10",
        source="fsync",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_F6_a_staging_directory_that_left_does_not_come_back"
            ),
        ),
        why="a power loss brings a failed attempt back to staging, for good",
    ),
    mutant(
        "a-stock-one-in-the-trash-is-a-left-over",
        "disk.inspection:is_manifest_of",
        'return there.found == "manifest" and there.of == of',
        "return there.of in (None, of)",
        breaks="I1",
        source="fencing",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_is_saved_after_a_prune_is_not_what_was_pruned"
            ),
        ),
        why="a fenced manager's late rename took a stock trainer's there",
    ),
    mutant(
        "what-is-given-up-needs-room-in-the-journal",
        "coordinator.engine:Engine.commit",
        "self.append(record, essential=moved.dest in (*FORGOTTEN, State.FAILED))",
        "self.append(record, essential=moved.dest is State.FAILED)",
        breaks="F5",
        source="disk",
        killers=(
            "tests:test_found_by_attack.py::test_F5_a_full_disk_gets_the_space_of_a_failed_save_back",
        ),
        why="a full disk, and a journal block that is full: the space of a failed save stays taken",
    ),
    mutant(
        "the-trash-is-emptied-by-names-alone",
        "disk.inspection:is_manifest_of",
        'return there.found == "manifest" and there.of == of',
        'return there.found == "manifest"',
        breaks="I1",
        source="fencing",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I1_what_is_saved_after_a_prune_is_not_what_was_pruned"
            ),
        ),
        why="a fenced manager's late rename took a newer attempt there",
    ),
    mutant(
        "the-older-attempt-of-a-step-goes-first",
        "core.recovery:_turn",
        "checkpoint.step, checkpoint.state is State.QUARANTINED, checkpoint.id",
        "checkpoint.step, False, checkpoint.id",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_attack.py::"
                "test_I8_an_older_attempt_that_is_put_back_over_a_newer_one_leaves_its_name"
            ),
        ),
        why="its name is not free for the newer one's sake, which is missing: the next start refuses",
    ),
    mutant(
        "the-newest-saved-anew-is-our-own",
        "core.recovery_refusals:_is_anothers",
        'return there.found == "stock" and latest.provenance == "saved"',
        "return False",
        breaks="I8",
        source="F33",
        killers=("tests:test_recovery.py::test_I8_the_newest_that_was_saved_anew_is_anothers",),
        why="a stock trainer's save of the step that the rollback began at goes to quarantine",
    ),
    mutant(
        "a-target-that-was-lost-is-still-one",
        "core.rollback:Intent._reached",
        "if c.state is State.TRACKED)",
        ")",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_journal.py::"
                "test_I8_the_tracker_is_lifted_with_each_step_that_it_was_left_at"
            ),
        ),
        why="the second loss does not count, and the root is refused for ever",
    ),
    mutant(
        "a-fresh-start-keeps-all-for-good",
        "coordinator.engine:Engine.opening",
        "self._keep_all = False",
        "pass",
        breaks="I10",
        source="F33",
        killers=("tests:test_found_by_review.py::test_I7_a_fresh_start_deletes_nothing",),
        why="retention never has its turn in that run",
    ),
    mutant(
        "a-roll-forward-passes-over-what-is-in-use",
        "core.recovery_refusals:_lags",
        "return tracker.step not in adopted and (",
        "return (",
        breaks="I8",
        source="F33",
        killers=("tests:test_recovery.py::test_a_roll_forward_over_what_is_in_use_is_said",),
        why="another trainer's line is left without a word, also with strict",
    ),
    mutant(
        "a-rollback-asks-for-any-loss",
        "core.recovery_refusals:_is_asked_for",
        "or withdrawn.step > intent.target",
        "or True",
        breaks="I8",
        source="F33",
        killers=(
            ("tests:test_recovery.py::test_an_unfinished_rollback_warns_of_what_nobody_asked_for"),
        ),
        why="strict goes on although the target was damaged",
    ),
    mutant(
        "what-nobody-knows-is-in-nobodys-use",
        "core.recovery_refusals:_is_anothers",
        'there.found in ("manifest", "stock") or not withdrawn',
        'there.found in ("manifest", "stock")',
        breaks="I8",
        source="F33",
        killers=("tests:test_recovery.py::test_I8_what_stands_at_a_step_we_know_may_be_anothers",),
        why="a checkpoint of an older format, that the tracker names, is passed over without a word",
    ),
    mutant(
        "a-fresh-start-takes-the-tracker-away-last",
        "coordinator.plan_run:PlanRun._begin_afresh",
        "self.engine.mover.set_aside_tracker()\nreturn True",
        "return True",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_a_fresh_start_does_not_leave_what_waits_to_be_tracked"
            ),
        ),
        why="it may name what was adopted only to be moved away",
    ),
    mutant(
        "a-fresh-start-puts-the-tracker-right",
        "coordinator.plan_run:PlanRun._follow",
        "if not afresh:\n    self._repair_tracker",
        "if True:\n    self._repair_tracker",
        breaks="I2",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_the_tracker_names_nothing_that_a_fresh_start_adopted"
            ),
        ),
    ),
    mutant(
        "a-fresh-start-only-completes-the-rollback",
        "coordinator.plan_run:PlanRun._begin_afresh",
        'if self.resume != "fresh" or not',
        'if self.resume != "fresh" or history.intent.rolling_back or not',
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_a_fresh_start_over_a_rollback_that_died_begins_afresh"
            ),
        ),
    ),
    mutant(
        "a-fresh-start-is-journaled-late",
        "coordinator.plan_run:PlanRun.run",
        "afresh = self._begin_afresh(history, decided)",
        "afresh = False",
        (
            "coordinator.plan_run:PlanRun._follow",
            "self._let_writers_go()",
            (
                "afresh = self.engine._keep_all = self._begin_afresh(history, decided)\n"
                "self._let_writers_go()"
            ),
        ),
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_a_fresh_start_adopted_is_not_resumed_from_if_it_died"
            ),
        ),
        why="what was adopted only to be moved away is resumed from if it dies",
    ),
    mutant(
        "a-fresh-start-is-forgotten-at-the-next",
        "coordinator.engine:Engine.begin",
        "begun_afresh=history.intent.begun_afresh",
        "begun_afresh=False",
        breaks="I8",
        source="F33",
        killers=(
            "tests:test_found_by_review.py::test_I8_what_a_person_puts_back_is_evidence",
            "traces",
        ),
        why="what was damaged before it is held against the runs after it",
    ),
    mutant(
        "a-fresh-start-counts-for-ever",
        "core.rollback:Intent.after",
        "return NO_INTENT",
        "return self",
        breaks="I8",
        source="F33",
        killers=("tests:test_journal.py",),
        why="what is lost in the runs after it is no evidence: a start from zero",
    ),
    mutant(
        "what-was-repaired-is-moved-away-again",
        "core.recovery_rules:was_put_back",
        'facts.checkpoint.reason == "damaged" and facts.newest is not None',
        'facts.checkpoint.reason == "damaged"',
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_was_damaged_comes_back_once_a_person_has_repaired_it"
            ),
        ),
    ),
    mutant(
        "our-own-tracker-is-a-persons",
        "core.recovery_rules:was_put_back",
        "named is None or facts.tracker_leads",
        "named is None",
        breaks="I2",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_what_was_rolled_back_does_not_come_back_with_the_next_save"
            ),
        ),
        why="a rollback is undone by the next save, whose journal record was lost",
    ),
    mutant(
        "an-adoption-waits-for-nothing",
        "core.recovery:_in_order",
        "busy = {d.step for d in known if d.actions and d not in failed}",
        "busy = {d.step for d in known}",
        breaks="I2",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_a_roll_forward_never_takes_the_tracker_below_a_step_that_was_rolled_back_before"
            ),
        ),
        why="a roll forward takes the tracker below it, and a crash there keeps it out",
    ),
    mutant(
        "what-has-failed-keeps-an-adoption-waiting",
        "core.recovery:_in_order",
        "if d.actions and d not in failed}",
        "if d.actions}",
        breaks="I2",
        source="order",
        killers=(
            "tests:test_suites.py::test_I2_an_adoption_that_is_cut_short_begins_with_the_newest",
        ),
        why="older steps are adopted before it, and a death in between resumes from these",
    ),
    mutant(
        "nothing-falls-back-before-a-withdrawal",
        "coordinator.plan_run:PlanRun._follow",
        "self._fall_back(decided.fallback, actions)",
        "",
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_has_the_name_of_the_newest_is_resumed_from_wherever_the_start_dies"
            ),
        ),
        why="a death between a withdrawal and the adoption there goes back to something older",
    ),
    mutant(
        "what-another-run-left-damaged-is-our-failed-ones",
        "core.recovery:_explains",
        "return checkpoint.in_place and there.of is None",
        'return checkpoint.in_place and there.found != "manifest"',
        breaks="I8",
        source="F16",
        killers=(
            (
                "tests:test_in_place.py::"
                "test_I8_what_another_run_left_damaged_at_a_failed_attempts_name_is_evidence"
            ),
        ),
        why="one start begins from zero beside it",
    ),
    mutant(
        "the-tracker-stays-at-what-is-still-to-be-moved",
        "core.recovery:_fallback",
        "if isinstance(a, (Withdrawn, Quarantine))}\nif not gone",
        "if isinstance(a, Withdrawn)}\nif not gone",
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_has_the_name_of_the_newest_is_resumed_from_wherever_the_start_dies"
                "[withdrawn_and_still_there-3]"
            ),
        ),
        why="what was known to be damaged is taken for repaired",
    ),
    mutant(
        "what-was-lost-is-no-limit",
        "core.recovery:_newest_in_use",
        "return max((of.step for of in lost), default=None)",
        "return None",
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_was_lost_is_the_limit_until_something_is_tracked"
            ),
        ),
        why="a death before a roll forward, and the next start resumes from what nobody acknowledged",
    ),
    mutant(
        "what-the-tracker-falls-back-to-is-not-settled",
        "coordinator.plan_run:PlanRun._fall_back",
        "self.engine.publisher.make_adopted_durable(to)",
        "pass",
        breaks="I2",
        source="order",
        killers=(
            "tests:test_found_by_review.py::test_I2_what_the_tracker_falls_back_to_is_durable_first",
        ),
        why="a power loss leaves a tracker that names a stock save of which nothing is left",
    ),
    mutant(
        "the-tracker-falls-back-below-a-reprieved-one",
        "core.recovery:_fallback",
        "isinstance(a, (Adopted, Reprieved))}",
        "isinstance(a, Adopted)}",
        breaks="I2",
        source="order",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_the_tracker_does_not_fall_back_below_what_a_prune_had_not_moved"
            ),
        ),
        why="a stock trainer goes back two steps if the start dies then",
    ),
    mutant(
        "the-tracker-falls-back-before-the-clean-up",
        "coordinator.plan_run:PlanRun._follow",
        "self._carry_out(failing)  # while the tracker tells who went on from there\n"
        "self._fall_back(decided.fallback, actions)",
        "self._fall_back(decided.fallback, actions)\nself._carry_out(failing)",
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_in_place.py::"
                "test_I8_what_has_failed_is_cleaned_up_before_the_tracker_falls_back"
            ),
        ),
        why="what a stock trainer went on from is moved away with our failed attempt",
    ),
    mutant(
        "the-tracker-leaves-what-stays",
        "core.recovery:_fallback",
        "if not gone or named in survivors or",
        "if not gone or",
        breaks="I8",
        source="order",
        killers=(
            "tests:test_recovery.py::test_I8_the_tracker_is_put_to_what_stays_before_anything_is_withdrawn",
        ),
    ),
    mutant(
        "the-tracker-leaves-the-target-of-a-rollback",
        "core.recovery:plan",
        "None if goes_back else _fallback",
        "_fallback",
        breaks="I8",
        source="order",
        killers=(
            (
                "tests:test_recovery.py::"
                "test_I8_the_tracker_waits_while_a_rollback_or_a_fresh_start_is_to_be_completed"
            ),
        ),
    ),
    mutant(
        "what-was-put-aside-is-overwritten",
        "disk.setting_aside:Mover.set_aside",
        'return move_aside(self.storage, name, f"{QUARANTINE}/{name}.{self.tag}")',
        'move(self.storage, name, f"{QUARANTINE}/{name}.{self.tag}")\nreturn name',
        breaks="I1",
        source="F30",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I1_what_is_in_the_way_of_a_save_is_put_beside_what_was"
            ),
        ),
    ),
    mutant(
        "an-adopted-one-is-pruned-unseen",
        "core.keeping:place_of",
        "if own and (there.of is not None or is_whole(checkpoint, there)):",
        'if own and (there.of is not None or checkpoint.provenance == "adopted"):',
        breaks="I1",
        source="F16",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I1_a_persons_directory_at_the_name_of_an_adopted_one_is_not_pruned"
            ),
        ),
        why="whatever a person put at its name is deleted",
    ),
    mutant(
        "a-prune-that-comes-back-lowers-the-tracker",
        "core.recovery:_in_order",
        "last = [d for d in rest if d.actions and d.step in pruned]",
        "last = rest",
        breaks="I2",
        source="order",
        killers=("tests:test_found_by_review.py",),
        why="below a stock save that is adopted in the same opening, unless a crash comes between",
    ),
    mutant(
        "what-lay-in-quarantine-before-counts-as-moved",
        "coordinator.engine:Engine._run_quarantine",
        "self._set_aside[checkpoint.id] = self.mover.lies_in(QUARANTINE, checkpoint)",
        "self._set_aside[checkpoint.id] = frozenset()",
        breaks="I2",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I2_a_move_that_a_power_loss_shows_twice_is_done_again_after_an_error"
            ),
        ),
        why="a power loss showed it at both names: a fresh start comes to nothing",
    ),
    mutant(
        "what-was-lost-is-forgotten-by-the-next-start",
        "coordinator.coordinator:Coordinator._recover",
        "forget_moved(history.ledger, decided.decisions, history.lost)",
        "forget_moved(history.ledger, decided.decisions)",
        breaks="I8",
        source="F33",
        killers=(
            "tests:test_found_by_review.py::test_I8_a_start_that_was_refused_is_refused_again",
        ),
    ),
    mutant(
        "a-root-opens-while-its-last-one-is-in-the-trash",
        "coordinator.plan_run:PlanRun._refuse_half_open",
        "if leaving:",
        "if False:",
        breaks="I8",
        source="F33",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_a_root_is_not_opened_while_its_newest_checkpoint_is_in_the_trash"
            ),
        ),
    ),
    mutant(
        "the-tracker-leaves-what-was-saved-again",
        "coordinator.engine:Engine._run_quarantine",
        "and named and not self.mover.is_taken(checkpoint, earlier):",
        "and named:",
        breaks="I2",
        source="F19",
        killers=(
            (
                "tests:test_found_by_review.py::"
                "test_I8_what_another_run_saved_at_a_step_that_was_deleted_is_adopted"
            ),
        ),
        why="a crash there, and it is newer than the tracker: never resumed from",
    ),
    mutant(
        "rolled-back-to-a-broken-one",
        "coordinator.coordinator:Coordinator.rollback",
        "self._refuse_broken_target(self._engine.tracked(step))",
        "self._engine.tracked(step)",
        breaks="I2",
        source="F19",
        killers=("tests:test_found_by_review.py",),
    ),
    mutant(
        "pruned-before-the-latest-was-read",
        "coordinator.plan_run:PlanRun._follow",
        "self._refuse_half_open(decided.reasons)",
        "self._refuse_half_open(decided.reasons)\nself.engine.retire()",
        breaks="I2",
        source="F21",
        killers=("tests:test_found_by_review.py",),
    ),
    mutant(
        "a-request-is-not-fenced",
        "coordinator.coordinator:Coordinator.request",
        "self._engine.check_epoch()\nof = AttemptId(",
        "of = AttemptId(",
        (
            "disk.publishing:Publisher.create_staging",
            (
                "self.check_epoch()\n"
                "directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)\n"
                "if not"
            ),
            ("directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)\nif not"),
        ),
        breaks="I9",
        source="fencing",
        killers=("simulation",),
    ),
    mutant(
        "emptying-the-trash-is-not-fenced",
        "coordinator.engine:Engine.give_space_back",
        "return remove_some(self._storage, limit, self.check_epoch)",
        "return remove_some(self._storage, limit)",
        (
            "coordinator.coordinator:Coordinator.tick",
            ("self._engine.check_epoch()\ninterval ="),
            "interval =",
        ),
        breaks="I9",
        source="fencing",
        killers=("tests:test_schedules.py", "simulation"),
    ),
    mutant(
        "a-fenced-one-goes-on",
        "coordinator.coordinator:Coordinator._guarded",
        "except (Fenced, IllegalTransition) as error:\n    self.fatal = error\n    raise",
        "except (Fenced, IllegalTransition):\n    raise",
        (
            "coordinator.coordinator:Coordinator._guarded",
            "except Fenced as fenced:\n    self.fatal = fenced\n    raise",
            "except Fenced:\n    raise",
        ),
        breaks="I9",
        source="fencing",
        killers=(
            "tests:test_coordinator.py::test_I9_a_fenced_coordinator_changes_nothing",
            "simulation",
        ),
    ),
    mutant(
        "the-lock-is-not-asked",
        "disk.ownership:open_root",
        "if not takeover and (lock is None or _lives(storage, holder, identity)):",
        "if False:",
        breaks="F12",
        source="fencing",
        killers=(
            "tests:test_coordinator.py::test_F12_a_second_one_is_refused_and_disturbs_nothing",
            "simulation",
        ),
        why="a second job takes a living root over unasked",
    ),
    mutant(
        "an-epoch-can-be-taken-twice",
        "disk.ownership:_link_epoch",
        "storage.link(temporary, _epoch_path(epoch))",
        "storage.rename(temporary, _epoch_path(epoch))",
        breaks="I9",
        source="fencing",
        killers=("simulation",),
        why="rename replaces where link refuses: two managers hold one epoch",
    ),
)

JOURNAL = (
    mutant(
        "damage-in-the-middle-is-skipped",
        "disk.journal:parse_segment_bytes",
        "if torn_at is not None:\n"
        "    raise JournalCorrupt(\n"
        '        "journal damaged before its last record", file=file, offset=torn_at\n'
        "    )",
        "",
        breaks="F20",
        source="F20",
        killers=("tests:test_coordinator.py", "corruption"),
    ),
    mutant(
        "checksums-are-not-compared",
        "disk.journal:decode_line",
        '== b"%08x" % zlib.crc32(body) else None',
        '!= b"" else None',
        breaks="F20",
        source="F20",
        killers=("tests:test_journal.py", "corruption"),
    ),
    mutant(
        "seals-are-not-checked",
        "disk.journal:read_history",
        "_check_seals(storage, opened.seals)",
        "",
        breaks="F20",
        source="F20",
        killers=("corruption",),
    ),
    mutant(
        "illegal-moves-are-replayed",
        "disk.journal:_replay_transition",
        "if not legal or created != (record.created is not None):",
        "if False:",
        breaks="I11",
        source="I11",
        killers=("tests:test_journal.py", "corruption"),
    ),
    mutant(
        "moves-within-the-table-only-by-name",
        "coordinator.engine:Engine._record",
        "source=moved.source,",
        "source=State.REQUESTED if moved.source is State.FORKED else moved.source,",
        breaks="I11",
        source="I11",
        killers=("simulation", "traces"),
        why="the journal says another source than the ledger moved from",
    ),
)

MUTANTS = (*ORDER, *LOOKS, *FENCES, *JOURNAL)
