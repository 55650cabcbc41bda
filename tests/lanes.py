"""The lane of a test: `make quick`, `make test` or `make gate`; and the seconds of lanes, for `.ci/run`.

A test belongs to `make gate` if it repeats, with more examples, something that a cheaper test or a
sample of a layer shows too. Each line says which examples stay in `make test`. All other tests run
there; those of the library itself (tests/unit, tests/histories, tests/house) also run in `make quick`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

# The name of a test, and the parameters (a regular expression) that stay in `make test`; "" if none.
GATE: Mapping[str, str] = MappingProxyType(
    {
        # The scripts of one coordinator and of a controller; a failed save, and drawn losses, stay.
        "test_I2_sigkill_at_every_storage_call": "fail_and_retry",
        "test_F5_F6_F8_an_error_at_every_storage_call": "fail_and_retry",
        "test_I2_I4_I8_power_loss_at_every_storage_call": "drawn-|fail_and_retry",
        "test_I8_crash_in_the_middle_of_recovery": "fail_and_retry",
        # Each line of a call with its Ctrl-C; the layer `interrupts` strikes a sample of all lines.
        "test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of": "",
        # Starts that die at every call: one of each kind of newest step stays.
        "test_history": (
            "^(?!restart/(a_start_that_dies_twice|a_prune_below|a_failed_attempt_at|unknown_steps))"
        ),
        # Jobs of real ranks: one way of the queue or of a broken package stays, one rank of the killed.
        # A hung and a stopped writer stay in tests/megatron/test_megatron_writer_deaths.py and in
        # tests/unit/writers.
        "test_hung_writer_raises_on_all_ranks": "",
        "test_f1_a_stopped_writer_meets_its_deadline": "",
        "test_a_state_that_changes_too_early_fails_its_save": "in place",
        "test_a_shared_optimizer_is_gated_where_memory_cannot_be_read": "True",
        "test_requests_in_flight_together_keep_their_results": "True",  # False: torch is imported anew
        "test_begun_checkpoints_are_tracked": "True",
        "test_we_resume_from_steps_of_stock_code": "True",
        "test_torn_tracker_is_mended_before_the_load": "x00",
        "test_f2_f29_killed_rank_leaves_no_orphan_and_the_job_restarts_on_its_port": "1",
        "test_f3_coordinator_killed_after_the_shards_is_rolled_forward": "manifest",
        "test_f1_killed_writer_fails_the_save_on_all_ranks": "1",
        "test_f25_exception_leaves_in_time_and_the_next_start_decides": "raising0",
        # Stock code loses what ours keeps: no promise of ours.
        "test_non_persistent_cleanup_spares_the_tracked_one": "True",
        "test_stock_queue_swaps_the_results_of_two_requests": "",
        "test_f1_a_killed_writer_fails_the_save_on_all_ranks": "^0",
        "test_f1_a_killed_writer_of_an_eager_save_begins_again": "0",
        "test_a_ctrl_c_is_heard_while_a_writer_does_not_greet": "0",
        # Jobs of a writer process: one engine stays. The other one makes the same files elsewhere.
        "test_saves_are_tracked_pruned_restored_and_stock_loadable": "gated",
        "test_files_are_those_of_a_forked_writer": "eager",
        "test_where_memory_cannot_be_read_files_are_the_same": "gated",
        "test_a_gpt_resumes_bit_for_bit": "gated",
        "test_states_of_every_layout_are_restored_and_stock_loadable": "gated",
        "test_an_old_nvidia_resiliency_ext_is_named": "queue",
        "test_a_half_installed_nvidia_resiliency_ext_is_left_alone_or_named": "",
        # An interpreter that imports torch for one rare case: 5 s each.
        "test_a_foreign_warning_fails_neither_a_save_nor_a_restore": "",
        "test_an_untried_nvidia_resiliency_ext_is_taken_with_a_warning": "",
        "test_a_worker_that_cannot_be_attached_again_has_verls_manager": "",
        # A writer process of a group completes its part in the same way with each engine.
        "test_groups_under_a_controller_write_steps_that_stock_code_loads": "fork|gated",
        # Of trainers on a device: tests/megatron/test_megatron_device.py has each part by itself.
        "test_a_killed_trainer_of_a_device_resumes_bit_for_bit": "",
        # Broken roots in a terminal: two scenarios stay. The same findings and commands, without a
        # terminal, stay in tests/unit/cli.
        "test_F17_F18_F19_F20_F21_F29_a_reader_gets_back_to_training": "^(F18|F29)$",
        # Controls of the layers: a bug in their subject is seen. The layers themselves run a sample,
        # and one control of the processes stays.
        "test_planted_bug_is_seen": "tracker is written before",
        "test_looking_away_from_a_read_of_recovery_is_seen": "",
        "test_a_bug_of_a_struck_recovery_is_seen": "",
        "test_a_bug_at_a_lock_that_cannot_be_made_is_seen": "",
        "test_a_bug_at_an_error_of_a_lifes_read_is_seen": "",
        "test_a_bug_at_a_short_write_of_the_managers_writer_is_seen": "",
        "test_a_sweep_that_misses_a_call_is_a_violation": "",
        "test_every_write_of_the_manager_is_cut": "writer",
        "test_a_survivor_and_a_red_killer_are_violations_and_a_kill_is_not": "",
        "test_the_map_is_renewed_where_it_is_wrong": "",
        "test_no_death_is_drawn_that_does_not_happen": "",
        "test_F30_a_huge_file_is_not_read": "written",
        "test_nothing_is_left_when_it_is_killed": "2",
        "test_a_soak_ends_though_its_seeds_do_not": "",
        "test_the_layer_shares_seeds_out_and_stops_when_told": "",
        "test_a_worker_that_is_killed_is_a_violation": "",
        # The target `torch-alone` runs it on two ranks, where megatron-core cannot be imported.
        "test_the_demo_under_fsdp2_keeps_every_promise": "",
        # Benchmarks with real saves beside stock's, and the snippets that run a job of ranks. What
        # they call is tested; light snippets run in `make test`, and all are compiled there.
        "test_every_group_reports_its_figures": "",
        "test_the_table_of_the_groups_that_are_asked_for": "",
        "test_job_snippets_run": "",
        # The files of the tutorial run on one rank in `make test`, without a kill.
        "test_the_tutorial": "",
        # The site needs packages that only `make gate` installs; links are checked in `make test` too.
        "test_the_site_is_built_strictly": "",
        # Twenty seconds for a figure that moves slowly.
        "test_a_save_runs_through_few_functions": "",
    }
)


def is_for_gate(name: str) -> bool:
    """Whether a test of this name, with its parameters in brackets, runs in `make gate` alone."""
    function, _, parameters = name.partition("[")
    if function not in GATE:
        return False
    stays = GATE[function]
    return not (stays and re.search(stays, parameters.rstrip("]")))


def note(lane: str, wall_s: float | None = None, processor_s: float = 0.0) -> None:
    """Tell `.ci/run`, if that runs us, that a part of a lane begins, or what it took in the end."""
    if told := os.environ.get("CKPTFSM_SECONDS"):
        took = [] if wall_s is None else [round(wall_s, 1), round(processor_s, 1)]
        with Path(told).open("a") as file:
            file.write(json.dumps([lane, *took]) + "\n")
