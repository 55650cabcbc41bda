"""Which tests of a drop-in show a report green under the trainer that it is about, by the report's name.

Those of verl, torchtitan, Accelerate and Trainer run with the real package (``make test-integrations``),
those of Megatron with megatron-core on two ranks.
"""

from __future__ import annotations

from types import MappingProxyType

QUEUE = "tests/megatron/test_megatron_queue.py"
TRAINING = "tests/megatron/test_megatron_training.py"
VERL = "tests/integrations/test_verl.py"
SFT = "tests/integrations/test_verl_sft.py"
COMMON = "tests/megatron/test_megatron_common.py"
TITAN = "tests/integrations/test_torchtitan.py"
NVRX = "tests/megatron/test_megatron_nvrx.py"

ACCELERATE = "tests/integrations/test_accelerate.py"
TRAINER = "tests/integrations/test_transformers.py"

_OLD_STAYS = f"{VERL}::test_the_old_checkpoint_stays_until_the_new_one_is_tracked"
_EVERY_RANK = f"{VERL}::test_the_tracker_waits_for_every_rank_and_is_the_drivers"
_POLLS = f"{VERL}::test_the_loop_polls_and_its_end_waits"
_NOBODY_POLLS = f"{VERL}::test_a_save_is_never_polled"
_KILLED = f"{QUEUE}::test_killed_writer_raises_on_all_ranks"
_KILLED_LM = f"{TRAINING}::test_killed_writer_leaves_the_tracker"

DROPINS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "verl-4253": (_POLLS, _NOBODY_POLLS),
        "verl-4638-tracker": (_OLD_STAYS, _EVERY_RANK),
        "verl-4638-prune": (_OLD_STAYS,),
        "verl-4638-memory": (
            f"{VERL}::test_the_worker_keeps_no_copy_and_a_killed_writer_fails_its_save_alone",
        ),
        "verl-4873": (
            _OLD_STAYS,
            f"{VERL}::test_a_full_disk_in_verls_code_fails_the_save_alone",
        ),
        "verl-5016": (_EVERY_RANK,),
        "verl-6067": (_POLLS, _NOBODY_POLLS),
        "verl-7952": (
            f"{VERL}::test_a_backend_for_which_verl_writes_no_tracker",
            f"{VERL}::test_a_torn_tracker_is_not_a_start_from_zero",
        ),
        "verl-ranks-delete": (_OLD_STAYS,),
        "verl-gutted": (f"{VERL}::test_a_gutted_step_is_not_resumed_from",),
        "verl-forgets": (f"{VERL}::test_a_restart_remembers_the_prunes",),
        "verl-same-step": (f"{VERL}::test_the_same_step_twice_is_refused_and_stays",),
        "bridge-5184": (f"{TRAINING}::test_retention_does_not_count_a_save_in_flight",),
        "bridge-5117": (f"{QUEUE}::test_written_call_of_a_failed_run_does_not_finalize_the_next",),
        "bridge-3267": (
            f"{TRAINING}::test_tracker_waits_for_the_writers_and_names_their_iteration",
        ),
        "megatron-6970": (_KILLED,),
        "megatron-results": (f"{QUEUE}::test_requests_in_flight_together_keep_their_results",),
        "megatron-temporal": (_KILLED, _KILLED_LM),
        "megatron-tracker": (f"{TRAINING}::test_torn_tracker_is_mended_before_the_load",),
        "megatron-non-persistent": (
            f"{TRAINING}::test_non_persistent_cleanup_spares_the_tracked_one",
        ),
        "verl-7401": (f"{SFT}::test_an_epoch_that_is_over_is_not_skipped_by_the_next_run",),
        "swift-9908": (f"{COMMON}::test_a_run_of_stock_is_adopted_goes_on_and_is_pruned",),
        "verl-8000": (f"{VERL}::test_a_stock_async_save_cannot_be_scheduled",),
        "nvrx-staging": (
            f"{NVRX}::test_I5_staged_requests_in_flight_together_keep_their_values",
            f"{NVRX}::test_I5_parts_of_the_same_structure_keep_their_values",
        ),
        "titan-4197": (
            f"{TITAN}::test_a_rank_that_is_killed_in_the_middle_of_a_save_costs_that_save_alone",
        ),
        "titan-4270": (f"{TITAN}::test_the_end_of_the_data_waits_for_the_save_in_flight",),
        "accelerate-total-limit": (
            f"{ACCELERATE}::test_a_kill_in_the_middle_of_a_save_leaves_the_one_before",
        ),
        "transformers-35782": (
            f"{TRAINER}::test_a_kill_in_the_middle_of_a_save_leaves_the_one_before",
            f"{TRAINER}::test_a_half_written_newest_directory_is_passed_over",
        ),
    }
)
