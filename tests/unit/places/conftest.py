"""Places for the tests: directories, a made-up HDFS, file systems of fsspec, servers on loopback."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from copying import KINDS
from hdfs_program import install_hdfs

from ckptfsm.places.place import CopyPlace, place_at


@pytest.fixture(scope="session")
def moto(tmp_path_factory) -> Iterator[object]:
    from s3_servers import Moto

    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory) -> Iterator[object]:
    from s3_servers import Azurite

    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(params=KINDS)
def url(request, tmp_path: Path, monkeypatch) -> str:
    """A place that has nothing yet."""
    if request.param == "directory":
        (tmp_path / "place").mkdir()
        return str(tmp_path / "place")
    if request.param == "hdfs":
        install_hdfs(tmp_path / "hadoop", monkeypatch)
        return "hdfs://host/runs/gpt"
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/gpt"
    server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.new_bucket() + "/runs/gpt"


@pytest.fixture
def place(url: str) -> CopyPlace:
    return place_at(url)
