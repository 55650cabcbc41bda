"""AsyncRequests of nvidia-resiliency-ext in the queue, where that package is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        find_spec("nvidia_resiliency_ext") is None and "CKPTFSM_NVRX" not in os.environ,
        reason="nvidia-resiliency-ext is not installed: make test-integrations",
    ),
]


def test_requests_of_nvidia_resiliency_ext(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a request whose class, queue or writer is not megatron-core's."""
    for rank in cluster.run("nvrx_jobs.save_two", place=str(tmp_path)):
        assert rank["seen"] == [0, 1]
        assert rank["loaded"] == [[1.0, 1.0, 1], [2.0, 2.0, 2]]
        assert rank["plain"] == [3.0] * 4
