"""Fixtures of the real jobs: two ranks over gloo, real writers, a real disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cluster import Cluster, ForkServer, Gate
from forkserver import as_it_is

torch.compile = (
    as_it_is  # before a test imports megatron-core: each fork of this process is cheaper
)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def cluster(fork_server: ForkServer, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(fork_server, tmp_path / "jobs") as cluster:
        yield cluster


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[str], Gate]]:
    """Makes named gates."""
    gates: list[Gate] = []

    def make(name: str) -> Gate:
        gates.append(Gate(tmp_path / f"gate-{name}"))
        return gates[-1]

    yield make
    for made in gates:
        made.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"
