"""Mutants of the ranks: writers, reports, collectives, and whole field bugs as they were."""

from __future__ import annotations

from mutants.loader import mutant

WRITERS = (
    mutant(
        "the-exit-code-is-ignored",
        "core.ports:Outcome.succeeded",
        "return self.exitcode == 0 and self.complete and self.error is None",
        "return True",
        (
            "writers.rank_writer:RankWriter._judge",
            (
                "if tuple(name for name, _, _ in outcome.payload) != self._names:\n"
                '    problem = "its result is not of its parts"\n'
                "if problem:"
            ),
            "if False:",
        ),
        (
            "writers.rank_writer:RankWriter._judge",
            "self.payloads = {name: payload for name, _, payload in outcome.payload}",
            "self.payloads = {}",
        ),
        (
            "writers.rank_writer:RankWriter._judge",
            "rank, size, count) for name, count, _ in outcome.payload",
            "rank, size, 0) for name in self._names",
        ),
        breaks="I10",
        source="Megatron-core (temporal caller)",
        killers=("tests:test_fork.py",),
        why="a writer that was killed has succeeded",
    ),
    mutant(
        "only-the-payload-is-believed",
        "core.ports:Outcome.succeeded",
        "return self.exitcode == 0 and self.complete and self.error is None",
        "return self.complete",
        breaks="I6",
        source="exit code",
        killers=(
            "tests:test_fork.py::test_SIGCHLD_ignored_is_a_failure_not_a_success",
            "simulation",
        ),
        why="the writer sent its result, then died",
    ),
    mutant(
        "a-killed-writer-is-polled-for-ever",
        "writers.rank_writer:RankWriter._ended",
        "if outcome is not None:\n    return self._judge(outcome)",
        "if outcome is not None and outcome.succeeded:\n    return self._judge(outcome)",
        breaks="I10",
        source="Megatron-LM #6970",
        killers=("tests:test_rank_writer.py", "fieldbugs", "simulation"),
    ),
    mutant(
        "a-hung-writer-is-waited-for",
        "writers.rank_writer:RankWriter._ended",
        "if now < self._deadline:",
        "if True:",
        breaks="I10",
        source="F1",
        killers=("tests:test_rank_writer.py", "simulation"),
    ),
    mutant(
        "no-receipt-is-needed",
        "writers.rank_writer:RankWriter._judge",
        "problem = self._missing_receipt()",
        'problem = ""',
        breaks="I3",
        source="receipt",
        killers=("tests:test_rank_writer.py", "simulation"),
    ),
    mutant(
        "gone-is-said-of-the-living",
        "ranks.reports:RankReports.bury",
        "if writer.kill(timeout_s=0.0):",
        "if True:",
        breaks="I1",
        source="F13",
        killers=(
            "tests:test_participant.py::test_I1_nothing_is_cleaned_up_under_a_writer_that_may_live",
            "simulation",
        ),
        why="the writer of a failed attempt writes on into a directory that was moved",
    ),
    mutant(
        "writers-outlive-their-trainer",
        "adapters.fork:_run_child",
        "_die_with(abs(parent), by_kernel=parent > 0)",
        "",
        breaks="F29",
        source="F29",
        killers=("tests:test_fork.py::test_F29_a_child_dies_with_its_trainer",),
    ),
    mutant(
        "a-descriptor-above-the-limit-ends-the-writer",
        "adapters.fork:_point",
        "if error.errno != errno.EBADF:",
        "if True:",
        breaks="I10",
        source="I10",
        killers=("tests:test_fork.py::test_a_descriptor_above_the_limit_is_let_go_of",),
    ),
    mutant(
        "a-trainer-that-died-at-once-is-not-missed",
        "adapters.fork:_die_with",
        "if os.getppid() != parent:  # it died between the fork and now",
        "if False:",
        breaks="F29",
        source="F29",
        killers=(
            ("tests:test_fork.py::test_F29_a_child_whose_trainer_died_before_it_could_ask_ends"),
        ),
        why="the kernel signals only a death that comes after the request",
    ),
    mutant(
        "a-save-holds-what-its-writer-has",
        "writers.rank_writer:RankWriter.look_at_copy",
        "self._let_go()",
        "pass",
        breaks="I10",
        source="verl #4638",
        killers=("tests:test_manager.py::test_nothing_of_the_state_is_held_once_a_writer_has_it",),
        why="a loaded optimizer that is offloaded after the save stays in memory",
    ),
    mutant(
        "what-hangs-in-its-fork-is-left-there",
        "adapters.fork:fork_child",
        "if child.begins(_BEGIN_S):\n    return child",
        "return child",
        breaks="I10",
        source="CPython #112275",
        killers=("tests:test_fork.py::test_a_child_that_hangs_in_its_fork_is_forked_anew",),
    ),
    mutant(
        "handlers-run-inside-a-call",
        "adapters.signals:OneCall.running",
        "signals = self._defer()",
        "signals = NoDeferredSignals()",
        breaks="I10",
        source="F13",
        killers=(
            "tests:test_interrupted_calls.py::test_I5_a_writer_whose_fork_was_interrupted_is_not_forgotten",
            "interrupts",
        ),
        why="a Ctrl-C leaves the other ranks in a collective, or a writer unknown to all ranks",
    ),
    mutant(
        "news-count-before-they-are-taken",
        "ranks.participant:Participant.take_update",
        "self._take(news, ended=update.fatal is not None)\nself._client.taken = number + 1",
        "self._client.taken = number + 1\nself._take(news, ended=update.fatal is not None)",
        breaks="I10",
        source="interrupt",
        killers=(
            "tests:test_proof_interrupts.py::test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of[taking]",
            "interrupts",
        ),
        why="an interrupt leaves a save in flight for good: its end is never told again",
    ),
    mutant(
        "an-interrupted-question-is-answered",
        "ranks.coordinator_client:CoordinatorClient.ask",
        "self._asking = True",
        "",
        breaks="I10",
        source="interrupt",
        killers=(
            "tests:test_proof_interrupts.py::test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of[asking]",
            "interrupts",
        ),
        why="the coordinator accepts a save that no rank knows of, and refuses the next one",
    ),
    mutant(
        "a-verdict-before-the-look",
        "writers.rank_writer:RankWriter.poll",
        "self._end = self._ended(now)",
        "self._end = ()\nself._end = self._ended(now)",
        breaks="I10",
        source="interrupt",
        killers=(
            "tests:test_proof_interrupts.py::test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of[judging]",
            "interrupts",
        ),
        why="the report of a writer is lost, and its deadline with it",
    ),
    mutant(
        "an-accepted-save-without-a-writer-is-awaited",
        "ranks.reports:RankReports.is_orphan",
        "return state in _BEGINNING and of not in known and not view.awaiting",
        "return False",
        breaks="I10",
        source="interrupt",
        killers=(
            "tests:test_proof_interrupts.py::test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of[forking]",
            "interrupts",
        ),
        why="an interrupt between the answer and the fork leaves a save without a writer",
    ),
    mutant(
        "a-report-is-sent-before-it-is-taken",
        "ranks.participant:Participant.exchange",
        "update = self._client.exchange(sent)\nself.reports.taken(sent)",
        "self.reports.taken(sent)\nupdate = self._client.exchange(sent)",
        breaks="I10",
        source="interrupt",
        killers=(
            "tests:test_proof_interrupts.py::test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of[sending]",
            "interrupts",
        ),
        why="the reports of an interrupted exchange are never sent again",
    ),
    mutant(
        "an-old-writer-writes-into-anothers-directory",
        "megatron.fence:_Fence._look",
        "if not self.marks or not all(mark.exists() for mark in self.marks):",
        "if False:",
        breaks="I4",
        source="attack",
        killers=(
            "tests:test_fence.py::test_I4_an_old_writer_stays_out_of_a_directory_that_is_anothers",
        ),
        why="a foreign writer that wakes up overwrites a checkpoint acknowledged meanwhile",
    ),
    mutant(
        "leaving-does-not-look-at-receipts",
        "coordinator.coordinator:Coordinator.leave",
        "if busy.state in (State.REQUESTED, State.FORKED) and not foreign:",
        "if False:",
        breaks="I2",
        source="attack",
        killers=(
            "tests:test_manager.py::test_F25_a_save_that_was_durable_when_its_manager_was_left_is_finished",
        ),
        why="a save with durable shards is thrown away",
    ),
    mutant(
        "a-lease-of-this-process-lives-for-good",
        "disk.ownership:holder_lives",
        "return holder.nonce in _living.nonces",
        "return True",
        breaks="F7",
        source="attack",
        killers=(
            "tests:test_manager.py::test_F7_a_dead_disk_that_was_mended_is_opened_again_by_the_same_process",
        ),
        why="a root that could not be given back on a dead disk is busy for good",
    ),
    mutant(
        "the-trash-waits-for-an-idle-moment",
        "coordinator.coordinator:Coordinator.tick",
        "if idle or self._engine.pending or not self._idle_at_last_tick:",
        "if idle or self._engine.pending:",
        breaks="F5",
        source="attack",
        killers=(
            "tests:test_coordinator.py::test_F5_the_trash_of_one_that_saves_all_the_time_is_emptied",
        ),
    ),
    mutant(
        "a-fenced-one-says-what-it-did-not-find",
        "coordinator.engine:Engine.raise_if_fenced",
        "raise fenced from error",
        "return",
        breaks="I9",
        source="attack",
        killers=("tests:test_coordinator.py::test_I9_a_fenced_one_says_so_first",),
    ),
    mutant(
        "writers-keep-the-trainers-sockets",
        "adapters.fork:_run_child",
        "_let_go_of_all_but({0, 1, 2, pipe[1], *keep})",
        "",
        breaks="F29",
        source="F29",
        killers=("tests:test_fork.py::test_F29_a_child_does_not_hold_a_listening_socket",),
    ),
    mutant(
        "results-are-shared-between-attempts",
        "writers.rank_writer:RankWriter._judge",
        "self.payloads = {name: payload for name, _, payload in outcome.payload}",
        "for name, _, payload in outcome.payload:\n"
        "    _SHARED.setdefault(name, payload)\n"
        "self.payloads = _SHARED",
        (
            "writers.rank_writer:missed_deadline",
            "def missed_deadline(",
            "_SHARED: dict[str, Any] = {}\n\n\ndef missed_deadline(",
        ),
        breaks="I5",
        source="Megatron-core (results queue)",
        killers=("fieldbugs", "simulation", "tests:test_manager.py"),
        why="the result of the attempt before is taken for this one's",
    ),
)

PEOPLE = (
    mutant(
        "polling-does-nothing",
        "ranks.session:Session.poll",
        "self._participant.exchange(expired=False)",
        "pass",
        breaks="F28",
        source="verl #6067 / #7363",
        killers=("tests:test_manager.py::test_a_save_is_acknowledged_only_once_it_is_tracked",),
        why="nothing is polled, and so nothing is ever tracked",
    ),
    mutant(
        "a-hook-ends-training",
        "ranks.participant:Participant._call_hooks",
        "except Exception:  # a user's hook: training and the machine go on (F24)",
        "except ZeroDivisionError:",
        breaks="F24",
        source="F24",
        killers=("simulation", "tests:test_manager.py"),
    ),
    mutant(
        "a-bad-policy-keeps-nothing",
        "coordinator.engine:Engine.given_up",
        'say(log.exception, "retention_policy_failed", said, error=describe(error))\nreturn []',
        'say(log.exception, "retention_policy_failed", said, error=describe(error))\n'
        "preserved = frozenset()",
        breaks="I7",
        source="I7",
        killers=("tests:test_manager.py::test_I7_a_policy_that_raises_keeps_everything",),
    ),
    mutant(
        "clean-up-errors-end-the-job",
        "coordinator.engine:Engine._retriable",
        "self._put_off(command, error)",
        "raise",
        breaks="I10",
        source="prime-rl #1763",
        killers=("fieldbugs", "simulation", "processes"),
    ),
    mutant(
        "what-failed-is-not-tried-again",
        "coordinator.engine:Engine._retriable",
        "self._put_off(command, error)",
        "pass",
        breaks="I10",
        source="Automodel #3390",
        killers=("simulation", "fieldbugs"),
        why="the quota is exceeded while the tracker is written: never tracked",
    ),
    mutant(
        "one-rank-raises-alone",
        "ranks.reports:RankReports.begin_writing",
        "self.give_up(of, error)",
        "raise",
        breaks="I10",
        source="F31",
        killers=("tests:test_manager.py::test_F31_one_rank_fails_inside_save",),
        why="the other ranks wait in a collective",
    ),
    mutant(
        "the-coordinators-error-stays-at-rank-0",
        "ranks.coordinator_client:CoordinatorClient.together",
        "answer = self.answer_of(error)",
        "raise",
        breaks="I10",
        source="Automodel #3390",
        killers=("simulation", "tests:test_manager.py"),
    ),
    mutant(
        "what-the-disk-blocks-is-waited-for",
        "ranks.session:_FinishedOrBlocked.__call__",
        "return self.finished(view) or view.blocked_by is not None",
        "return self.finished(view)",
        breaks="I10",
        source="F5",
        killers=("tests:test_manager.py::test_F5_a_save_is_refused_while_the_tracker_is_blocked",),
        why="training stands still for half an hour, and is not told of the disk",
    ),
    mutant(
        "a-mended-disk-is-not-tried",
        "ranks.session:Session._wait_and_retry",
        "self._agree(Coordinator.retry)",
        "",
        breaks="I10",
        source="F5",
        killers=("tests:test_manager.py::test_F5_a_mended_disk_is_used_at_once",),
    ),
    mutant(
        "a-wait-that-retries-begins-anew",
        "ranks.session:Session._wait_and_retry",
        "timeout_s, waiting_for, since=began",
        "timeout_s, waiting_for",
        breaks="I10",
        source="review",
        killers=("tests:test_manager.py::test_F25_a_wait_that_retries_has_one_deadline",),
        why="a close takes twice its close_timeout_s",
    ),
    mutant(
        "an-owner-does-not-see-an-earlier-versions-epoch",
        "disk.ownership:newest_epoch",
        "names = [*list_names(storage, OLD_EPOCHS), *list_names(storage, EPOCHS)]",
        "names = list_names(storage, EPOCHS)",
        breaks="I9",
        source="attack",
        killers=(
            "tests:test_ownership.py::test_I9_an_earlier_version_that_takes_over_fences_this_one",
        ),
        why="a job of an earlier version takes the root, and both go on",
    ),
    mutant(
        "an-opening-forgets-why-the-tracker-waits",
        "coordinator.plan_run:PlanRun._refuse_half_open",
        ") from self.engine.blocked.get(waiting.id)",
        ")",
        breaks="I10",
        source="F5",
        killers=(
            (
                "tests:test_coordinator.py::"
                "test_F5_a_root_is_opened_where_our_trash_takes_the_bytes_of_the_tracker"
            ),
        ),
        why="a full disk is not seen, and the trash that fills it is never emptied",
    ),
    mutant(
        "a-reason-is-told-once-for-all",
        "coordinator.engine:Engine._put_off",
        "if told is None or told.summary() != reason.summary():",
        "if told is None:",
        breaks="I10",
        source="F5",
        killers=("tests:test_coordinator.py",),
        why="a disk that was full and is broken now goes on to be called full",
    ),
    mutant(
        "one-ranks-finalizers-are-enough",
        "core.lifecycle:_finalizers_complete",
        "return len(checkpoint.finalizers_ran) + 1 == len(writing_ranks(checkpoint))",
        "return True",
        breaks="I6",
        source="I6",
        killers=("tests:test_coordinator.py", "simulation"),
    ),
    mutant(
        "errors-of-finalizers-do-not-count",
        "ranks.reports:RankReports.run_finalizers",
        "if ran.error:",
        "if False:",
        breaks="I6",
        source="I6",
        killers=("tests:test_manager.py::test_I6_a_finalizer_that_raises_fails_the_save",),
    ),
    mutant(
        "finalizers-run-twice",
        "ranks.reports:RankReports.run_finalizers",
        "if not ran.failed:",
        "for _ in range(0 if ran.failed else 2):",
        breaks="I6",
        source="I6",
        killers=("simulation", "tests:test_manager.py"),
    ),
)

FIELD = (
    mutant(
        "a-directory-behind-eexist-is-missing",
        "disk.visibility:_Awaited.mkdir",
        "self._made_elsewhere.add(path)",
        "",
        breaks="F9",
        source="mlcommons/storage #699",
        killers=(
            "tests:test_rank_writer.py::test_F9_a_directory_that_another_host_made_is_waited_for",
        ),
        why="a save fails because two hosts make one directory at the same time",
    ),
    mutant(
        "close-waits-for-what-is-refused",
        "ranks.session:_may_close",
        "view.quiet or bool(refused and view.unfinished.keys() <= view.blocked.keys())",
        "view.quiet",
        breaks="I10",
        source="orbax #3537",
        killers=(
            "tests:test_file_systems.py::test_close_does_not_wait_for_a_clean_up_that_is_refused",
        ),
        why="a job whose file system refuses a rename hangs in close for half an hour",
    ),
    mutant(
        "a-rename-is-not-tried",
        "coordinator.coordinator:Coordinator._open",
        "require_rename(self._storage, ownership.tag)",
        "",
        breaks="I3",
        source="verl #7641",
        killers=("tests:test_file_systems.py::test_a_missing_ability_is_named_at_opening",),
        why="the mount of an object store takes hours of training, and publishes nothing",
    ),
    mutant(
        "any-epoch-is-rank-0s",
        "ranks.shared_root:OpenedRoot.is_seen_in",
        "holder.nonce == self.owner.nonce",
        "True",
        breaks="I10",
        source="Megatron-LM #1530",
        killers=(
            (
                "tests:test_shared_root.py::"
                "test_ranks_that_do_not_see_the_same_directory_are_refused_at_opening"
            ),
        ),
        why="each node writes to a disk of its own, and the first save fails",
    ),
    mutant(
        "a-root-that-shows-late-is-missing",
        "ranks.shared_root:open_when_visible",
        'error.facts.get("reason") != "missing" or ports.clock.monotonic() >= deadline',
        "True",
        breaks="F9",
        source="F9",
        killers=("tests:test_shared_root.py::test_F9_the_root_that_rank_0_made_is_waited_for",),
        why="the first start fails on hosts that have cached that there is no root",
    ),
    mutant(
        "what-is-not-seen-yet-is-lost",
        "ranks.restoring:Restorer._sizes",
        "self.config.visibility_timeout_s if self.transport.rank else 0.0",
        "0.0",
        breaks="I2",
        source="F9",
        killers=(
            (
                "tests:test_simulation.py::"
                "test_F9_a_restore_on_another_host_waits_for_names_that_it_does_not_see_yet"
            ),
        ),
        why="a sound checkpoint is withdrawn by a restore on a host that does not see its name yet",
    ),
    mutant(
        "tracker-before-the-save",
        "coordinator.coordinator:Coordinator.request",
        "try:\n    self._engine.post(event)\nexcept OutcomeUnknown:",
        "try:\n"
        "    self._engine.post(event)\n"
        "    self._engine.publisher.write_tracker(of.step)\n"
        "except OutcomeUnknown:",
        breaks="I2",
        source="verl #4638 / #4667",
        killers=("fieldbugs", "simulation", "processes"),
    ),
    mutant(
        "the-old-one-goes-before-the-new-one-is-there",
        "coordinator.coordinator:Coordinator.request",
        "self._requests = of.attempt\ntry:",
        "self._requests = of.attempt\n"
        "latest = self._engine.ledger.latest()\n"
        'if latest is not None and type(self._options.retention).__name__ == "LatestN":\n'
        '    move(self._storage, self._layout.published_name(latest.step), f"{QUARANTINE}/old.{of}")\n'
        "try:",
        (
            "coordinator.coordinator:",
            "from ckptfsm.disk.durable import list_names, lookup, storage_error",
            "from ckptfsm.disk.durable import list_names, lookup, move, storage_error",
        ),
        breaks="I2",
        source="verl #4873",
        killers=("fieldbugs", "simulation", "processes"),
        why="keep=1: the slot is made free when the new save begins",
    ),
    mutant(
        "latest-advances-while-the-save-is-pending",
        "coordinator.engine:Engine.run",
        "case CreateStaging():\n    self.publisher.create_staging(checkpoint)",
        "case CreateStaging():\n"
        "    self.publisher.create_staging(checkpoint)\n"
        "    self.publisher.write_tracker(checkpoint.step)\n"
        "    for old in self.ledger.in_state(State.TRACKED):\n"
        "        self.mover.prune(old, old.step)",
        breaks="I2",
        source="SkyRL #2145",
        killers=("fieldbugs", "simulation", "processes"),
    ),
    mutant(
        "moved-before-it-is-durable",
        "writers.shard_file:ShardFile.close_durably",
        "self._storage.fsync(self._handle)",
        "pass",
        (
            "disk.publishing:Publisher.finalize",
            ("self.check_epoch()\ntarget = self.layout.published_name(checkpoint.step)"),
            (
                "self.check_epoch()\n"
                "target = self.layout.published_name(checkpoint.step)\n"
                'put(self.storage, TRACKER, b"%d\\n" % checkpoint.step, tag=self.tag)'
            ),
        ),
        breaks="I2",
        source="KempnerForge #102",
        killers=("fieldbugs", "simulation"),
    ),
    mutant(
        "async-saves-are-never-finalized",
        "coordinator.engine:Engine.run",
        "case Finalize():\n    self._run_finalize(checkpoint)",
        "case Finalize():\n    pass",
        breaks="I10",
        source="verl #4253",
        killers=("simulation", "fieldbugs"),
    ),
    mutant(
        "nobody-writes-the-tracker",
        "disk.publishing:Publisher.write_tracker",
        "put(self.storage, TRACKER, tracker_text(step), tag=self.tag, check=self.check_epoch)\n"
        "seen = read_tracker(self.storage)\n"
        "if seen.step != step:",
        "seen = read_tracker(self.storage)\nif False:",
        breaks="I2",
        source="verl #7952, rllm #897",
        killers=("fieldbugs", "simulation", "processes"),
    ),
    mutant(
        "a-rank-guesses-that-it-writes-the-tracker",
        "writers.rank_writer:RankWriter._judge",
        "self.payloads = {name: payload for name, _, payload in outcome.payload}",
        "self.payloads = {name: payload for name, _, payload in outcome.payload}\n"
        "if self._rank == self._world_size - 1:\n"
        '    put(self._storage, "latest_checkpointed_iteration.txt", b"%d" % self.of.step, tag="guess")',
        breaks="I2",
        source="verl #5016",
        killers=("fieldbugs", "simulation"),
    ),
    mutant(
        "other-ranks-delete",
        "ranks.reports:RankReports.begin_writing",
        "location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)",
        "location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)\n"
        "if self._rank != 0 and self.view.latest is not None:\n"
        "    from ckptfsm.disk.durable import walk_files\n"
        "\n"
        '    old = f"iter_{self.view.latest:07d}"\n'
        "    for name, _ in walk_files(storage, old):\n"
        '        if not name.startswith(".ckptfsm"):\n'
        '            storage.unlink(f"{old}/{name}")',
        breaks="I1",
        source="verl (open): other ranks delete",
        killers=("fieldbugs", "simulation"),
    ),
    mutant(
        "the-tracker-names-the-live-step",
        "coordinator.engine:Engine._run_tracker",
        "self.publisher.write_tracker(checkpoint.step)\nif checkpoint.state",
        "self.publisher.write_tracker(getattr(self, 'live_step', checkpoint.step))\n"
        "if checkpoint.state",
        (
            "coordinator.coordinator:Coordinator.request",
            ("self._engine.check_epoch()\nof = AttemptId("),
            ("self._engine.check_epoch()\nself._engine.live_step = request.step\nof = AttemptId("),
        ),
        breaks="I2",
        source="Megatron-Bridge #3267",
        killers=("fieldbugs", "simulation"),
        why="the step is read when the save is finished, not when it was asked for",
    ),
    mutant(
        "attempts-share-their-number",
        "coordinator.coordinator:Coordinator._next_attempt",
        "return max(self._requests, max(here, default=0)) + 1",
        "return 1",
        breaks="I5",
        source="F11",
        killers=("simulation", "suites"),
        why="a late report of the failed attempt counts for the next one at the step",
    ),
    mutant(
        "reports-wait-for-a-call-of-the-trainer",
        "ranks.agent:Agent._look",
        "self._report(events)",
        "pass",
        breaks="I10",
        source="order",
        killers=("tests:test_agent.py::test_a_save_of_one_rank_is_tracked_without_a_round",),
        why="durable shards are lost with a job that computes for hours",
    ),
    mutant(
        "an-agent-that-outlives-its-manager",
        "ranks.agent:Agent.end",
        "self._over.set()",
        "pass",
        breaks="F29",
        source="order",
        killers=("tests:test_agent.py::test_the_thread_ends_with_its_manager",),
    ),
    mutant(
        "a-port-that-outlives-its-manager",
        "ranks.agent:Agent._run",
        "self._mailbox.close()",
        "pass",
        breaks="F29",
        source="order",
        killers=("tests:test_agent.py::test_the_thread_ends_with_its_manager",),
    ),
    mutant(
        "a-port-that-stays-open-with-a-child",
        "megatron.mailbox:Inbox.close",
        "self._listener.shutdown(socket.SHUT_RDWR)",
        "pass",
        breaks="F29",
        source="order",
        killers=("tests:test_mailbox.py::test_nothing_listens_after_the_end",),
    ),
    mutant(
        "a-strangers-message-counts",
        "megatron.mailbox:unsealed",
        "if not hmac.compare_digest(signature, hmac.digest(secret, body, _DIGEST)):",
        "if False:",
        breaks="F30",
        source="order",
        killers=(
            "tests:test_mailbox.py::test_a_message_without_the_secret_is_dropped_with_a_word",
        ),
        why="anybody in the network ends the training",
    ),
    mutant(
        "a-report-is-taken-as-it-comes",
        "megatron.mailbox:decoded",
        "if not is_plausible(made):",
        "if False:",
        breaks="F30",
        source="order",
        killers=("tests:test_mailbox.py::test_a_report_that_cannot_be_is_dropped_with_a_word",),
        why="one bad message stops the coordinator for good",
    ),
    mutant(
        "silent-strangers-take-all-descriptors",
        "megatron.mailbox:Inbox.collect",
        "while len(waiting) > _MOST_WAITING:",
        "while False:",
        breaks="F30",
        source="order",
        killers=("tests:test_mailbox.py::test_silent_senders_hold_up_no_other",),
    ),
    mutant(
        "a-start-that-waits-for-a-name-service",
        "megatron.mailbox:_within",
        "return pending.result(seconds)",
        "return pending.result()",
        breaks="F29",
        source="order",
        killers=("tests:test_mailbox.py::test_all_ranks_have_a_mailbox_or_none",),
    ),
)

MUTANTS = (*WRITERS, *PEOPLE, *FIELD)
