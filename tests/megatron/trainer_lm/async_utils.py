"""The queue of async saves, one per process."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from trainer_lm.global_vars import get_args

_async_calls_queue = AsyncCallsQueue()


def init_persistent_async_worker() -> None:
    global _async_calls_queue
    _async_calls_queue = AsyncCallsQueue(persistent=True)


def schedule_async_save(async_request: Any) -> None:
    _async_calls_queue.schedule_async_request(async_request)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    if not get_args().async_save:
        return
    _async_calls_queue.maybe_finalize_async_calls(blocking, no_dist=False)
    if terminate:
        _async_calls_queue.close()


def is_empty_async_queue() -> bool:
    return _async_calls_queue.get_num_unfinalized_calls() == 0


def reset_persistent_async_worker() -> None:
    _async_calls_queue.close(abort=True)
