"""The loop."""

from __future__ import annotations

import time
from typing import Any

from trainer_lm.async_utils import maybe_finalize_async_save
from trainer_lm.checkpointing import load_checkpoint, save_checkpoint
from trainer_lm.global_vars import get_args


def pretrain(model: Any) -> int:
    """The iteration that training began from."""
    args = get_args()
    start, _ = load_checkpoint(model, None, None) if args.load else (0, 0)
    context: dict[str, Any] = {}
    iteration = train(model, start, context)
    if args.save and iteration != 0 and iteration % args.save_interval != 0:
        save_checkpoint(iteration, model, None, None, 0, context)
    maybe_finalize_async_save(blocking=True, terminate=True)
    return start


def train(model: Any, iteration: int, context: dict[str, Any]) -> int:
    args = get_args()
    while iteration < args.train_iters:
        maybe_finalize_async_save(blocking=False)
        time.sleep(args.pace_s)  # a training step
        iteration += 1
        save_if_due(iteration, model, context)
    maybe_finalize_async_save(blocking=True, terminate=True)
    return iteration


def save_if_due(iteration: int, model: Any, context: dict[str, Any]) -> None:
    args = get_args()
    if args.save and iteration % args.save_interval == 0:
        save_checkpoint(iteration, model, None, None, 0, context)
    elif args.non_persistent_save_interval and iteration % args.non_persistent_save_interval == 0:
        save_checkpoint(iteration, model, None, None, 0, context, non_persistent_ckpt=True)
