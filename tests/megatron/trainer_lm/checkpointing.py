"""Saving and loading."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from trainer_lm.async_utils import is_empty_async_queue, schedule_async_save
from trainer_lm.global_vars import get_args

# From megatron-core 0.17 on a request says who makes it; the queue beside this is megatron-core's.
_ASKS = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
ASYNC: dict[str, Any] = {"async_strategy": "mcore"} if _ASKS else {}

RAN: list[str] = []  # the closures that ran on this rank


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    os.makedirs(os.path.dirname(filename) if check_parent else filename, exist_ok=True)


def get_checkpoint_name(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    return os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def read_metadata(tracker_filename: str) -> int:
    text = Path(tracker_filename).read_text().strip()
    try:
        return int(text)
    except ValueError:
        print(f"ERROR: invalid metadata file {tracker_filename}")
        sys.exit()  # with status 0, as the original


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: int,
    checkpointing_context: dict[str, Any] | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    release: bool = False,
) -> None:
    args = get_args()
    if args.async_save and not is_empty_async_queue():
        print("WARNING: starting a save before the previous has finished")
    save_dir = args.save
    if non_persistent_ckpt:
        save_dir = args.non_persistent_global_ckpt_dir or os.path.join(save_dir, "non_persistent")
        cleanup_old_non_persistent_checkpoint(save_dir, leave_ckpt_num=1, do_async=args.async_save)
    checkpoint_name = get_checkpoint_name(save_dir, iteration, release=release)
    state_dict = {**model.sharded_state_dict(iteration), "args": args, "iteration": iteration}
    state_dict["num_floating_point_operations_so_far"] = num_floating_point_operations_so_far
    if dist.get_rank() == 0:
        ensure_directory_exists(checkpoint_name, check_parent=False)
    dist.barrier()  # the original has others on its way
    context = {} if checkpointing_context is None else checkpointing_context
    if "save_strategy" not in context:
        context["save_strategy"] = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(args.ckpt_format), dist.group.WORLD, False
        )
    async_save_request = dist_checkpointing.save(
        state_dict,
        checkpoint_name,
        context["save_strategy"],
        async_sharded_save=args.async_save,
        validate_access_integrity=True,
        preprocess_common_before_consistancy_check=preprocess_common_state_dict_fn,
        content_metadata={"singleton_local_shards": False},
        **ASYNC,
    )
    closures = []
    if dist.get_rank() == 0:
        closures.append(_closure_of_the_tracker(args, save_dir, iteration))
    if dist.get_rank() == dist.get_world_size() - 1:

        def onelogger_finalize_fn() -> None:
            RAN.append(f"onelogger {iteration}")

        def wandb_finalize_fn() -> None:
            RAN.append(f"wandb {iteration}")

        closures += [onelogger_finalize_fn, wandb_finalize_fn]
    for closure in closures:
        if args.async_save:
            async_save_request.add_finalize_fn(closure)
        else:
            closure()
    if args.async_save:
        schedule_async_save(async_save_request)
    dist.barrier()


def _closure_of_the_tracker(args: Any, save_dir: str, iteration: int) -> Any:
    """Truncates the tracker first, and deletes below ``args.save`` whatever ``save_dir`` is."""
    tracker_filename = get_checkpoint_tracker_filename(save_dir)

    def iter_finalize_fn() -> None:
        RAN.append(f"tracker {iteration}")
        previous = 0
        if args.save_retain_interval is not None and os.path.exists(tracker_filename):
            previous = int(Path(tracker_filename).read_text())
        with open(tracker_filename, "w") as tracker:
            tracker.write(str(iteration))
        if args.save_tokenizer_assets:
            save_tokenizer_assets(get_tokenizer(), args, get_checkpoint_name(save_dir, iteration))
        if previous > 0 and previous != iteration and previous % args.save_retain_interval != 0:
            doomed = get_checkpoint_name(args.save, previous)
            threading.Thread(target=shutil.rmtree, args=(doomed,)).start()

    return iter_finalize_fn


def get_tokenizer() -> str:
    return "a tokenizer"


def save_tokenizer_assets(tokenizer: str, config: Any, checkpoint_path: str) -> None:
    """Since August 2026: files beside the shards, which the closure of the tracker writes."""
    if dist.get_rank() == 0:
        place = Path(checkpoint_path, "tokenizer")
        place.mkdir(parents=True, exist_ok=True)
        (place / "vocab.json").write_text(f"{tokenizer} of type {config.tokenizer_type}")


def cleanup_old_non_persistent_checkpoint(
    save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False
) -> None:
    """Goes by names: complete or not, tracked or not."""
    if dist.get_rank() != 0:
        return
    found = sorted(Path(save_dir).rglob("iter_*"), key=lambda path: int(path.name[5:]))
    for path in found[:-leave_ckpt_num]:
        shutil.rmtree(path)


def load_checkpoint(
    model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load"
) -> tuple[int, int]:
    """The iteration that was loaded, 0 if there is none, and a count of operations."""
    load_dir = getattr(get_args(), load_arg)
    tracker_filename = get_checkpoint_tracker_filename(load_dir)
    if not os.path.isfile(tracker_filename):
        print("WARNING: could not find the metadata file; will not load any checkpoints")
        return 0, 0
    iteration = read_metadata(tracker_filename)
    directory = get_checkpoint_name(load_dir, iteration)
    metadata = dist_checkpointing.load_content_metadata(directory)
    assert metadata == {"singleton_local_shards": False}
    model.load(dist_checkpointing.load(model.template(), directory), iteration)
    return iteration, 0
