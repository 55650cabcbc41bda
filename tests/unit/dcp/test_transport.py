"""The choice of a transport, before any exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptfsm import CheckpointManager
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.config import config_of
from ckptfsm.core.errors import ConfigError
from ckptfsm.dcp.checkpoint_manager import GroupWorker
from ckptfsm.dcp.transport import transport_of

CONFIG = config_of(None, {})


def scheduled(root: Path) -> None:
    pytest.importorskip("megatron.core", reason="the queue is megatron-core's")
    from ckptfsm.integrations.queue import AsyncCallsQueue

    AsyncCallsQueue().schedule_async_request(None)


@pytest.mark.parametrize("make", [CheckpointManager, GroupWorker, scheduled])
def test_ranks_without_a_process_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any]
) -> None:
    """Catches: every rank of a job opens the root as rank 0, and is told to pass takeover."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"RANK=1.*init_process_group") as caught:
        make(tmp_path / "root")
    assert caught.value.reason == "no_process_group"
    assert "takeover" not in str(caught.value)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("told", ["", "1", "all"])
def test_one_process_needs_no_process_group(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """Catches: a job of one process that cannot start any more."""
    monkeypatch.setenv("WORLD_SIZE", told)
    assert isinstance(transport_of(CONFIG), LocalTransport)


def test_a_process_group_of_one_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: WORLD_SIZE of a launcher counts more than the process group that was made."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert isinstance(transport_of(CONFIG), LocalTransport)
    finally:
        dist.destroy_process_group()
