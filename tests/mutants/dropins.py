"""Mutants of the drop-ins: megatron-core's queue, Megatron-LM, verl's driver."""

from __future__ import annotations

from mutants.loader import mutant

_TESTS = "tests:test_dropins.py::"
_VERL = "tests:test_verl_driver.py::"
_MANAGER = "tests:test_manager.py::"

QUEUE = (
    mutant(
        "a-foreign-writers-exit-code-is-ignored",
        "integrations.queue",
        "        elif outcome.succeeded:\n",
        "        elif outcome is not None:\n",
        breaks="I6",
        source="Megatron-core (temporal caller)",
        killers=(f"{_TESTS}test_I10_a_killed_writer_is_an_error_on_every_rank",),
        why="a writer that is not alive has succeeded",
    ),
    mutant(
        "finalizers-of-a-dead-request-run",
        "integrations.queue",
        '            if verdict == "written":\n',
        "            if call.problem is None:\n",
        breaks="I6",
        source="Megatron-core (temporal caller)",
        killers=(f"{_TESTS}test_I10_a_killed_writer_is_an_error_on_every_rank",),
        why="on the ranks whose own writer is well",
    ),
    mutant(
        "a-killed-writer-is-an-error-of-its-own-rank",
        "integrations.queue",
        "            problem = self._shared(call, no_dist)\n",
        "            problem = self._shared(call, True)\n",
        breaks="I10",
        source="Megatron-LM #6970",
        killers=(f"{_TESTS}test_I10_a_killed_writer_is_an_error_on_every_rank",),
        why="the other ranks take the call for finalized, and go on without it",
    ),
    mutant(
        "a-foreign-writer-has-no-deadline",
        "integrations.queue",
        "            if outcome is None and time.monotonic() < self.deadline:\n",
        "            if outcome is None:\n",
        breaks="I10",
        source="Megatron-LM #6970",
        killers=(f"{_TESTS}test_I10_a_hung_writer_misses_its_deadline",),
    ),
    mutant(
        "requests-in-flight-swap-their-results",
        "integrations.queue",
        "            call.request.finalize(call.payload)\n",
        """            _SHARED.setdefault(id(self), []).extend(
                c.payload for c in (call, *self._calls) if c.look() == "written"
            )
            call.request.finalize(_SHARED[id(self)].pop())
""",
        (
            "integrations.queue",
            "_BURY_S = 0.05\n",
            "_BURY_S = 0.05\n_SHARED: dict[int, list[Any]] = {}\n",
        ),
        breaks="I5",
        source="Megatron-core (results queue)",
        killers=(f"{_TESTS}test_I5_requests_in_flight_together_keep_their_results",),
        why="all results lie in one place, untagged",
    ),
    mutant(
        "a-result-is-left-for-the-next-request",
        "megatron.foreign",
        """            while self.queue is not None and not self.queue.empty():
                self.queue.get_nowait()
""",
        "            pass\n",
        breaks="I5",
        source="Megatron-core (results queue)",
        killers=(f"{_TESTS}test_I5_a_result_that_was_not_taken_is_not_the_next_requests",),
    ),
    mutant(
        "shared-memory-is-not-copied",
        "megatron.foreign",
        "    return value.detach().clone() if _is_shared(value) else value\n",
        "    return value\n",
        breaks="I5",
        source="nvidia-resiliency-ext (cpu_shm)",
        killers=(f"{_TESTS}test_I5_requests_that_are_staged_into_the_same_shared_memory[False]",),
        why="the next request is staged into the memory that this one's writer still reads",
    ),
    mutant(
        "two-ready-requests-in-one-memory",
        "megatron.foreign",
        "        if staged.shared & other.request.shared:\n",
        "        if False:\n",
        breaks="I5",
        source="nvidia-resiliency-ext (cpu_shm)",
        killers=(
            f"{_TESTS}test_I5_ready_parts_that_were_staged_into_one_memory_are_refused[True-True]",
        ),
        why="both were staged before either was copied: both parts have the values of the second",
    ),
    mutant(
        "a-rank-alone-raises-of-its-results-queue",
        "megatron.foreign",
        "        except Exception as error:  # another process's, which this rank alone may miss\n",
        "        except MemoryError as error:\n",
        breaks="I10",
        source="megatron-core (the process of its results queue is killed)",
        killers=(f"{_TESTS}test_I10_a_results_queue_that_is_gone_is_an_error_on_every_rank",),
        why="the other rank waits for the verdict of this one",
    ),
    mutant(
        "finalizers-begin-where-another-rank-may-not",
        "pump",
        "            ran = self._run_together(part.name, partial(_may_finalize, writer, part))\n",
        "            _may_finalize(writer, part)\n",
        breaks="I10",
        source="megatron-core (two queues in use at once)",
        killers=(f"{_MANAGER}test_I10_a_rank_that_may_not_finalize_is_heard_before_any_rank_does",),
        why="the others begin, and wait in the finalizers' collectives for this one",
    ),
    mutant(
        "a-part-is-taken-with-the-last-one",
        "integrations.queue",
        "        part = request if callable(request) else taken_now(request)\n",
        "        part = request\n",
        breaks="I5",
        source="nvidia-resiliency-ext (cpu_shm)",
        killers=(f"{_TESTS}test_I5_requests_that_are_staged_into_the_same_shared_memory[True]",),
        why="the requests of the other parts were staged into its memory meanwhile",
    ),
    mutant(
        "an-older-common-state-beside-the-shards-is-taken",
        "megatron.foreign",
        "        if COMMON in list_names(storage, place):\n",
        "        if False:\n",
        breaks="I4",
        source="megatron-core 0.19 (reads a legacy common.pt first)",
        killers=(f"{_TESTS}test_I4_one_common_state_is_written_and_no_other_lies_beside_it",),
        why="a loader takes the common state of an interrupted save",
    ),
    mutant(
        "a-rank-finalizes-when-its-own-writer-is-done",
        "integrations.queue",
        "            if not running:\n",
        '            if seen != "running":\n',
        breaks="I3",
        source="order",
        killers=(f"{_TESTS}test_I6_finalizers_wait_for_the_writers_of_all_ranks",),
        why="foreign finalizers move the tracker before every shard is written",
    ),
    mutant(
        "a-call-survives-its-abort",
        "integrations.queue",
        "        while self._calls:\n            self._drop(self._take_call())\n",
        "        while self._calls and not abort:\n            self._drop(self._take_call())\n",
        breaks="I5",
        source="Megatron-Bridge #5117",
        killers=(f"{_TESTS}test_I5_a_call_that_was_aborted_is_not_the_next_one",),
        why="what a failed run had written is finalized by the retry",
    ),
    mutant(
        "a-refused-checkpoint-stays-begun",
        "integrations.queue",
        """        self._filling = None
        handle = filling.manager.save(filling.step, parts=filling.parts)
""",
        """        handle = filling.manager.save(filling.step, parts=filling.parts)
        self._filling = None
""",
        breaks="I5",
        source="order",
        killers=(f"{_TESTS}test_a_refused_checkpoint_is_not_begun_any_more",),
        why="the next checkpoint's parts are taken for those of the one before",
    ),
)

MEGATRON_LM = (
    mutant(
        "megatron-lms-own-closure-runs",
        "integrations.megatron_lm",
        '        reports += [c for c in fns if getattr(c, "__name__", "") in REPORTS]\n',
        "        reports += fns\n",
        breaks="I1",
        source="Megatron-LM (tracker)",
        killers=(f"{_TESTS}test_I2_the_tracker_and_the_reports_wait_for_the_writer",),
        why="it truncates the tracker, and deletes what it named",
    ),
    mutant(
        "megatron-lms-closures-run-at-the-request",
        "integrations.megatron_lm",
        "        fns = captured.finalize_fns\n",
        """        fns = captured.finalize_fns
        while fns:
            fns.pop()()
""",
        breaks="I2",
        source="Megatron-LM (tracker)",
        killers=(f"{_TESTS}test_I2_the_tracker_and_the_reports_wait_for_the_writer",),
        why="sync and async are two ways: the one tracks at once",
    ),
    mutant(
        "megatron-lms-closures-run-beside-the-checkpoint",
        "integrations.megatron_lm",
        "        elif self.directory:",
        "        elif False:",
        breaks="I2",
        source="Megatron-LM (tracker)",
        killers=(f"{_TESTS}test_I2_closures_do_not_run_through_a_second_request",),
        why="newer versions move them to a second request",
    ),
    mutant(
        "reports-of-a-save-that-failed",
        "integrations.megatron_lm",
        "            if pending.handle.skipped or pending.handle.exception() is not None:\n",
        "            if pending.handle.skipped:\n",
        breaks="I6",
        source="order",
        killers=(f"{_TESTS}test_I2_a_failed_save_is_raised_and_reported_to_nobody",),
    ),
    mutant(
        "the-retain-interval-deletes-what-it-keeps",
        "integrations.megatron_lm",
        "    return LatestN(1) | EveryNSteps(save_retain_interval)\n",
        "    return LatestN(1) & EveryNSteps(save_retain_interval)\n",
        breaks="I7",
        source="policy",
        killers=(f"{_TESTS}test_I7_the_retain_interval_keeps_the_last_and_the_multiples",),
    ),
    mutant(
        "a-synchronous-save-is-left-in-flight",
        "integrations.megatron_lm",
        "        self.checkpoints.maybe_finalize_async_save(blocking=goes_on)\n",
        "",
        breaks="I2",
        source="verl #6067 / #7363",
        killers=(f"{_TESTS}test_I2_a_synchronous_save_is_tracked_when_it_returns",),
        why="a trainer that saves synchronously never polls",
    ),
    mutant(
        "stock-code-loads-before-recovery",
        "integrations.megatron_lm",
        """            return self._stock_load(*arguments, **keywords)
        self.checkpoints.open()
""",
        "            return self._stock_load(*arguments, **keywords)\n",
        breaks="F18",
        source="Megatron-LM (tracker)",
        killers=(f"{_TESTS}test_F18_a_torn_tracker_does_not_end_the_run_with_status_0",),
        why="a torn tracker ends the run with status 0",
    ),
    mutant(
        "megatron-lms-cleanup-by-names-runs",
        "integrations.megatron_lm",
        '    "cleanup_old_non_persistent_checkpoint",\n',
        "",
        breaks="I7",
        source="Megatron-LM (non-persistent)",
        killers=(f"{_TESTS}test_I7_the_cleanup_by_names_does_not_run",),
    ),
)

VERL = (
    mutant(
        "verls-loop-does-not-poll",
        "integrations.verl.trainer",
        "        self.poll()\n        return stock(*arguments, **keywords)\n",
        "        return stock(*arguments, **keywords)\n",
        breaks="F28",
        source="verl #6067 / #7363",
        killers=(f"{_VERL}test_the_loop_polls_and_its_end_waits",),
    ),
    mutant(
        "the-end-of-verls-fit-does-not-wait",
        "integrations.verl.trainer",
        """            return self._fit_to_the_end(result)
        self.close()
""",
        "            return self._fit_to_the_end(result)\n",
        breaks="F28",
        source="verl #7952, rllm #897",
        killers=(f"{_VERL}test_the_loop_polls_and_its_end_waits",),
        why="the last save of a run is tracked by nobody",
    ),
    mutant(
        "nobody-is-told-that-nobody-polls",
        "integrations.verl.trainer",
        '            "poll_warning_steps": 1,\n',
        "",
        breaks="F28",
        source="verl #4253",
        killers=(f"{_VERL}test_a_loop_that_does_not_poll_is_told",),
    ),
    mutant(
        "of-two-counts-the-smaller-one-counts",
        "integrations.verl.trainer",
        "    kept = 0 if min(counts) <= 0 else max(counts)\n",
        "    kept = max(0, min(counts))\n",
        breaks="I7",
        source="policy",
        killers=(f"{_VERL}test_of_two_counts_the_larger_one_counts",),
    ),
    mutant(
        "verl-loads-before-recovery",
        "integrations.verl.trainer",
        "        with self.loading():\n            return stock()\n",
        "        return stock()\n",
        breaks="F18",
        source="Megatron-LM (tracker)",
        killers=(f"{_VERL}test_F18_a_torn_tracker_is_mended_before_verl_loads",),
        why="a torn tracker is a ValueError there",
    ),
    mutant(
        "a-role-that-is-gone-is-awaited",
        "integrations.verl.trainer",
        '            self.controller.feed([Failed(ticket.of, "fork_failed", why, ticket.first_rank)])\n',
        "",
        breaks="I10",
        source="F1",
        killers=(f"{_VERL}test_I10_a_role_whose_workers_are_gone_fails_the_save",),
        why="the save ends at its deadline only, and nobody is told why",
    ),
    mutant(
        "parts-are-made-though-a-rank-did-not-load",
        "worker",
        "    if not stage.loaded:\n        return {}\n",
        "",
        breaks="I10",
        source="verl #4638 / #4667",
        killers=(
            "tests:test_staging.py::test_parts_that_one_function_makes_are_made_when_all_are_loaded",
        ),
        why="verl's code holds collectives",
    ),
    mutant(
        "a-later-subclass-is-taken-over",
        "integrations.verl.trainer",
        "        if own is not self.saver:\n",
        "        if own is None:\n",
        breaks="I6",
        source="order",
        killers=(f"{_VERL}test_a_subclass_with_a_save_of_its_own_is_refused_when_it_is_made",),
        why="what its own save would have saved is not in the checkpoint",
    ),
)

MUTANTS = (*QUEUE, *MEGATRON_LM, *VERL)
